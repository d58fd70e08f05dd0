//! Names of exports. Source: the NBD URI specification, doc/uri.md of the NetworkBlockDevice project.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use url::{Host, Url};

use crate::percent;

/// The port that NBD has of IANA.
const PORT: u16 = 10809;

/// An export of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uri {
    /// Where the server listens.
    pub server: Server,
    /// The export's name.
    pub export: String,
    /// Whether the connection is encrypted.
    pub tls: bool,
    /// Where certificates for that are: `ca-cert.pem`, and where the server wants them `client-cert.pem` and
    /// `client-key.pem`. `tls-certificates`, as libnbd names it.
    pub certificates: Option<PathBuf>,
    /// The name that the server's certificate must have, where it is not its host's: `tls-hostname`.
    pub hostname: Option<String>,
    /// For how long requests wait for a connection that was lost, before they fail: `reconnect`, in seconds; none where
    /// it is not looked for again (`never`).
    pub reconnect: Option<Duration>,
    /// The most connections, where the server allows several: `connections`.
    pub connections: usize,
    text: String,
}

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Server {
    /// At a UNIX socket.
    Unix(PathBuf),
    /// At a TCP port.
    Tcp(String, u16),
}

impl Uri {
    /// Read one; else what is wrong with it.
    pub fn parse(text: &str) -> Result<Uri, String> {
        let url = Url::parse(text).map_err(|error| format!("it is no URI: {error}"))?;
        let (tls, unix) = match url.scheme() {
            "nbd" => (false, false),
            "nbds" => (true, false),
            "nbd+unix" => (false, true),
            "nbds+unix" => (true, true),
            other => return Err(format!("{other}: is not nbd:, nbd+unix:, nbds: or nbds+unix:")),
        };
        if url.username() != "" || url.password().is_some() {
            return Err("a user in it is for PSK, which is not supported: use certificates".into());
        }
        let export = decoded(path_as_written(text))?;
        let socket = url.query_pairs().find(|(key, _)| key == "socket");
        let server = match (unix, socket) {
            (true, Some((_, path))) if !path.is_empty() => {
                if url.host_str().is_some_and(|host| !host.is_empty()) {
                    return Err(
                        "a UNIX socket has no host: write nbd+unix:///EXPORT?socket=PATH".into()
                    );
                }
                Server::Unix(PathBuf::from(&*path))
            }
            (true, _) => {
                return Err("the socket is missing: write nbd+unix:///EXPORT?socket=PATH".into());
            }
            (false, Some(_)) => {
                return Err("a socket goes with nbd+unix:///EXPORT?socket=PATH".into());
            }
            (false, None) => {
                let host = match url.host() {
                    Some(Host::Ipv6(address)) => address.to_string(),
                    Some(host) if !host.to_string().is_empty() => host.to_string(),
                    _ => return Err("the host is missing: write nbd://HOST[:PORT]/EXPORT".into()),
                };
                Server::Tcp(host, url.port().unwrap_or(PORT))
            }
        };
        let said = |name: &str| {
            let mut pairs = url.query_pairs();
            pairs.find(|(key, _)| key == name).map(|(_, value)| value.into_owned())
        };
        let certificates = said("tls-certificates").map(PathBuf::from);
        let hostname = said("tls-hostname");
        let number = |name: &str, default: u64| match said(name) {
            None => Ok(default),
            Some(text) => text.parse().map_err(|_| format!("{name}={text} is no number")),
        };
        let reconnect = match said("reconnect").as_deref() {
            Some("never") => None,
            _ => Some(Duration::from_secs(number("reconnect", 30)?)),
        };
        let connections = number("connections", 4)?.clamp(1, 64) as usize;
        let text = text.to_owned();
        Ok(Uri { server, export, tls, certificates, hostname, reconnect, connections, text })
    }
}

impl fmt::Display for Uri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// The path behind the first slash, as it is written: `.` and `..` are names of exports as others are, and `url` takes
/// them away.
fn path_as_written(text: &str) -> &str {
    let text = text.trim_matches(|c: char| c <= ' ');
    let rest = text.split_once("://").map_or("", |(_, rest)| rest);
    let rest = rest.split(['?', '#']).next().unwrap_or_default();
    rest.split_once('/').map_or("", |(_, path)| path)
}

/// Without its `%XX`; `url` decodes query strings itself, and paths not.
fn decoded(path: &str) -> Result<String, String> {
    percent::decoded(path).ok_or_else(|| "the export's name is no UTF-8".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_exports() {
        let tcp = |host: &str, port| Server::Tcp(host.into(), port);
        for (text, server, export, tls) in [
            ("nbd://host", tcp("host", 10809), "", false),
            ("nbd://host/a/b%20c+d&e", tcp("host", 10809), "a/b c+d&e", false),
            ("nbds://[::1]:1234/x", tcp("::1", 1234), "x", true),
            ("nbd://host/a/../b/./c", tcp("host", 10809), "a/../b/./c", false),
            ("nbd://host/..?reconnect=1", tcp("host", 10809), "..", false),
            ("nbd+unix:///%2e%2e/x?socket=s", Server::Unix("s".into()), "../x", false),
            ("nbd+unix:///?socket=/run/a%20b", Server::Unix("/run/a b".into()), "", false),
            ("nbds+unix:///e?socket=s", Server::Unix("s".into()), "e", true),
        ] {
            let uri = Uri::parse(text).expect(text);
            assert_eq!((uri.server, &*uri.export, uri.tls), (server, export, tls), "{text}");
        }
        let patience = |text: &str| Uri::parse(text).expect(text).reconnect.map(|it| it.as_secs());
        assert_eq!(patience("nbd://host"), Some(30));
        assert_eq!(patience("nbd://host/x?reconnect=0"), Some(0));
        assert_eq!(patience("nbd://host/x?reconnect=never"), None);
        for (text, said) in [
            ("nbd://host/x?reconnect=soon", "is no number"),
            ("nbd:///x", "host is missing"),
            ("nbd+unix:///x", "socket is missing"),
            ("nbd+unix://host/x?socket=/s", "no host"),
            ("nbd://host/x?socket=/s", "nbd+unix"),
            ("nbd://me@host/x", "PSK"),
            ("http://host/x", "is not nbd"),
            ("nbd://host/%ff", "no UTF-8"),
            ("nbd", "no URI"),
        ] {
            let error = Uri::parse(text).expect_err(text);
            assert!(error.contains(said), "{text}: {error}");
        }
    }
}
