//! Relative names within images that are objects: what lies in the same folder of the same server.

use url::Url;

use crate::percent;

/// What a relative name within an object leads to: a URI of the same server and bucket, reached in the same way. None where
/// it leads out of there.
pub fn beside_object(object: &str, name: &str) -> Option<String> {
    let url = Url::parse(object).ok()?;
    let path = url.path();
    let mut steps: Vec<String> = path.split('/').skip(1).map(str::to_owned).collect();
    steps.pop();
    for step in name.split('/') {
        match step {
            "" | "." => {}
            ".." => drop(steps.pop()?),
            step => steps.push(percent::part(step)),
        }
    }
    let ends_in_a_file =
        name.rsplit('/').next().is_some_and(|last| !["", ".", ".."].contains(&last));
    let authority = object.get(..object.find("://")? + 3)?.len();
    let host = object.get(authority..)?.split(['/', '?', '#']).next()?;
    // A digest is that of the object alone.
    let options = url.query().unwrap_or_default().split('&');
    let options: Vec<&str> =
        options.filter(|it| !it.is_empty() && !it.starts_with("digest=")).collect();
    let query = if options.is_empty() { String::new() } else { format!("?{}", options.join("&")) };
    let uri = format!("{}://{host}/{}{query}", url.scheme(), steps.join("/"));
    ends_in_a_file.then_some(uri)
}

/// Whether the operator's name allows that object: it is the same one, whatever else is said with it, or a folder that it
/// lies in, which ends with a slash.
pub fn allows_object(allowed: &str, object: &str) -> Option<Allows> {
    let (allowed, object) = (Parts::of(allowed)?, Parts::of(object)?);
    if allowed.server != object.server {
        return None;
    }
    if allowed.path == object.path {
        return Some(Allows::Itself);
    }
    let inside = allowed.path.ends_with('/') && object.path.starts_with(&allowed.path);
    inside.then_some(Allows::Folder)
}

/// How an object is allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allows {
    /// By its name.
    Itself,
    /// With all that lies in a folder.
    Folder,
}

/// What of a name says where an object is.
struct Parts {
    /// Scheme, host and port, and by what way that is reached.
    server: (String, String, Option<u16>, Vec<(String, String)>),
    path: String,
}

impl Parts {
    fn of(uri: &str) -> Option<Parts> {
        let url = Url::parse(uri).ok()?;
        let pairs = url.query_pairs().into_owned();
        let mut ways: Vec<_> =
            pairs.filter(|(name, _)| name != "digest" && name != "reconnect").collect();
        ways.sort_unstable();
        let path = percent::decoded(url.path())?;
        let host = url.host_str().unwrap_or_default().to_owned();
        let port = url.port_or_known_default();
        Some(Parts { server: (url.scheme().to_owned(), host, port, ways), path })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_relative_name_stays_on_its_server_and_in_its_bucket() {
        let beside = |object: &str, name: &str| beside_object(object, name).unwrap_or_default();
        let top = "s3://B/dir/top.qcow2?digest=sha256:00&endpoint=http://s:9&reconnect=5";
        let way = "?endpoint=http://s:9&reconnect=5";
        for (name, leads) in [
            ("base.qcow2", "s3://B/dir/base.qcow2"),
            ("./a//b.img", "s3://B/dir/a/b.img"),
            ("../base", "s3://B/base"),
            ("x?endpoint=http://evil", "s3://B/dir/x%3Fendpoint%3Dhttp%3A%2F%2Fevil"),
            ("%2e%2e/#x", "s3://B/dir/%252e%252e/%23x"),
        ] {
            // A slash parts folders; what is between two of them is a name.
            let leads = leads.replace("%3A%2F%2Fevil", "%3A/evil");
            assert_eq!(beside(top, name), format!("{leads}{way}"), "{name}");
        }
        for name in ["../../x", "..", "a/..", "", ".", "a/", "../../B/dir/x"] {
            assert_eq!(beside_object(top, name), None, "{name}");
        }
        assert_eq!(beside("https://h:8/a/top", r"..\..\x"), r"https://h:8/a/..%5C..%5Cx");
        assert_eq!(beside("http://h/top", "base"), "http://h/base");
        assert_eq!(beside_object("http://h/top", "../base"), None);
    }

    #[test]
    fn an_operator_allows_an_object_or_a_folder_of_one_server() {
        let object = "s3://B/dir/base%20x?reconnect=5";
        assert_eq!(
            allows_object("s3://B/dir/base x?digest=sha256:1", object),
            Some(Allows::Itself)
        );
        assert_eq!(allows_object("s3://B/dir/", object), Some(Allows::Folder));
        for other in [
            "s3://B/dir",
            "s3://B/di/",
            "s3://C/dir/",
            "https://B/dir/",
            "s3://B/dir/?endpoint=http://e",
            "/dir/",
        ] {
            assert_eq!(allows_object(other, object), None, "{other}");
        }
        let here = |way: &str| format!("s3://B/dir/base{way}");
        assert_eq!(allows_object(&here(""), &here("?endpoint=http://e")), None);
        let ways = ["?endpoint=http://e&region=r", "?region=r&endpoint=http://e"].map(here);
        assert_eq!(allows_object(&ways[0], &ways[1]), Some(Allows::Itself));
    }
}
