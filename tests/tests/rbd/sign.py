# The address of a request to an S3 store, signed: METHOD URL USER SECRET.
import datetime, hashlib, hmac, sys, urllib.parse
method, url, user, secret = sys.argv[1:]
at = urllib.parse.urlsplit(url)
now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%SZ")
scope = now[:8] + "/us-east-1/s3/aws4_request"
query = urllib.parse.urlencode([("X-Amz-Algorithm", "AWS4-HMAC-SHA256"), ("X-Amz-Credential", user + "/" + scope),
    ("X-Amz-Date", now), ("X-Amz-Expires", "600"), ("X-Amz-SignedHeaders", "host")])
asked = "\n".join([method, at.path, query, "host:" + at.netloc, "", "host", "UNSIGNED-PAYLOAD"])
text = "\n".join(["AWS4-HMAC-SHA256", now, scope, hashlib.sha256(asked.encode()).hexdigest()])
key = ("AWS4" + secret).encode()
for part in scope.split("/"):
    key = hmac.new(key, part.encode(), hashlib.sha256).digest()
print(url + "?" + query + "&X-Amz-Signature=" + hmac.new(key, text.encode(), hashlib.sha256).hexdigest())
