//! Names of objects.

use std::fmt;
use std::time::Duration;

use ringtap_stores::percent;
use url::Url;

use crate::index::DIGEST;

/// An object of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uri {
    /// Where it lies.
    pub server: Server,
    /// Its name there: the key, or the path of the URL, without `%XX`.
    pub key: String,
    /// SHA-256 of its index: `digest=sha256:…`.
    pub digest: Option<[u8; 32]>,
    /// For how long requests are tried again before they fail: `reconnect`, in seconds; none where they are tried once
    /// (`never`).
    pub reconnect: Option<Duration>,
    text: String,
}

/// Where an object lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Server {
    /// In a bucket, of a store that speaks S3.
    S3 {
        /// Its name.
        bucket: String,
        /// Where the store is, where not at Amazon's, nor where the environment says: `endpoint`.
        endpoint: Option<String>,
        /// `region`, where the environment names none.
        region: Option<String>,
    },
    /// At a server of HTTP: scheme, host and port.
    Http(Url),
}

const SCHEMES: [&str; 3] = ["s3", "https", "http"];

impl Uri {
    /// Read one; else what is wrong with it.
    pub fn parse(text: &str) -> Result<Uri, String> {
        let url = Url::parse(text).map_err(|error| format!("it is no URI: {error}"))?;
        let scheme = url.scheme();
        if !SCHEMES.contains(&scheme) {
            return Err(format!("{scheme}: is not s3:, https: or http:"));
        }
        if url.username() != "" || url.password().is_some() {
            return Err("credentials are taken from no URI, which others see: S3's come from the \
                        environment, the instance or ~/.aws/credentials"
                .into());
        }
        let (mut digest, mut reconnect) = (None, Some(Duration::from_secs(30)));
        let (mut endpoint, mut region) = (None, None);
        for (name, value) in url.query_pairs() {
            match (&*name, scheme) {
                ("digest", _) => digest = Some(digest_of(&value)?),
                ("reconnect", _) if value == "never" => reconnect = None,
                ("reconnect", _) => {
                    let seconds = value.parse();
                    let seconds = seconds.map_err(|_| format!("reconnect={value} is no number"))?;
                    reconnect = Some(Duration::from_secs(seconds));
                }
                ("endpoint", "s3") => endpoint = Some(endpoint_of(&value)?),
                ("region", "s3") => region = Some(value.into_owned()),
                _ => {
                    return Err(format!(
                        "{name}= is not known: digest=sha256:HEX and reconnect=SECONDS are, and of \
                         S3 endpoint=URL and region=NAME; queries are not passed on"
                    ));
                }
            }
        }
        if url.fragment().is_some() {
            return Err(
                "what follows # names nothing: write %23 where it is part of the name".into()
            );
        }
        let path = url.path();
        let key = decoded(path.strip_prefix('/').unwrap_or(path))?;
        if key.is_empty() || key.ends_with('/') {
            return Err("it names no object: write s3://BUCKET/KEY or https://HOST/PATH".into());
        }
        let host = url.host_str().filter(|host| !host.is_empty()).unwrap_or_default();
        let server = match scheme {
            "s3" => {
                if url.port().is_some() {
                    return Err("a bucket has no port: name the server by endpoint=URL".into());
                }
                let bucket = host.to_owned();
                if bucket.is_empty() {
                    return Err("the bucket is missing: write s3://BUCKET/KEY".into());
                }
                Server::S3 { bucket, endpoint, region }
            }
            _ => {
                let mut server = url.clone();
                server.set_path("/");
                server.set_query(None);
                Server::Http(server)
            }
        };
        Ok(Uri { server, key, digest, reconnect, text: text.to_owned() })
    }

    /// What the bytes are known by, whatever else was said with the name.
    pub fn identity(&self) -> String {
        match &self.server {
            Server::S3 { bucket, endpoint, .. } => {
                let told = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"];
                let told = told.iter().find_map(|name| std::env::var(name).ok());
                let endpoint = endpoint.clone().or(told).unwrap_or_default();
                format!("s3 {endpoint} {bucket}/{}", self.key)
            }
            Server::Http(server) => format!("{server}{}", self.key),
        }
    }
}

impl fmt::Display for Uri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

fn digest_of(value: &str) -> Result<[u8; DIGEST], String> {
    let wrong = || format!("digest={value} is not sha256: and 64 hexadecimal digits");
    let digits = value.strip_prefix("sha256:").ok_or_else(wrong)?;
    let mut digest = [0; DIGEST];
    hex::decode_to_slice(digits, &mut digest).map_err(|_| wrong())?;
    Ok(digest)
}

fn endpoint_of(value: &str) -> Result<String, String> {
    let url = Url::parse(value).map_err(|error| format!("endpoint={value} is no URL: {error}"))?;
    let plain = url.username().is_empty() && url.password().is_none();
    match url.scheme() {
        "https" | "http" if plain => Ok(value.to_owned()),
        _ => Err("an endpoint is written https://HOST[:PORT], without credentials".into()),
    }
}

fn decoded(path: &str) -> Result<String, String> {
    percent::decoded(path).ok_or_else(|| "the object's name is no UTF-8".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_where_an_object_is_and_no_secret() {
        let hex = "00ff".repeat(16);
        let s3 = format!("s3://images/a/b%20c.raw?digest=sha256:{hex}&reconnect=5&region=eu-1");
        let uri = Uri::parse(&s3).expect("a name");
        assert_eq!((&*uri.key, uri.reconnect), ("a/b c.raw", Some(Duration::from_secs(5))));
        assert_eq!(uri.digest.map(|digest| (digest[0], digest[1])), Some((0, 255)));
        assert!(matches!(&uri.server, Server::S3 { bucket, .. } if bucket == "images"));
        assert_eq!(uri.to_string(), s3);
        let uri = Uri::parse("https://host:8443/x/y.qcow2?reconnect=never").expect("a name");
        assert_eq!((&*uri.key, uri.reconnect), ("x/y.qcow2", None));
        assert_eq!(uri.identity(), "https://host:8443/x/y.qcow2");
        for (wrong, why) in [
            ("ftp://host/x", "s3:"),
            ("https://user:secret@host/x", "credentials"),
            ("s3://key:secret@bucket/x", "credentials"),
            ("s3://bucket/x?endpoint=https://a:b@host", "without credentials"),
            ("s3://bucket/x?X-Amz-Signature=1", "not passed on"),
            ("https://host/x?endpoint=https://a", "not known"),
            ("s3://bucket/x?digest=md5:1", "sha256"),
            ("s3://bucket/x?reconnect=soon", "no number"),
            ("s3://bucket", "no object"),
            ("https://host/", "no object"),
            ("https://host/x#y", "%23"),
            ("s3://bucket:9000/x", "endpoint="),
            ("s3://bucket/%ff", "no UTF-8"),
            ("not a name", "no URI"),
        ] {
            let said = Uri::parse(wrong).expect_err(wrong);
            assert!(said.contains(why), "{wrong}: {said}");
        }
    }
}
