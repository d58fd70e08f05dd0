//! Which machine the lab is to run on.

use std::str::FromStr;

/// Where the lab is to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// As ssh takes it: `user@name`.
    pub(super) name: String,
    pub(super) port: Option<u16>,
}

impl FromStr for Host {
    type Err = String;

    fn from_str(uri: &str) -> Result<Host, String> {
        let wrong = |why| format!("{uri:?} {why}: write ssh://[USER@]HOST[:PORT]");
        let rest = uri.strip_prefix("ssh://").ok_or_else(|| wrong("is no ssh URI"))?;
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        // An IPv6 address stands in brackets, its colons are no port's.
        let (name, port) = match rest.rsplit_once(':') {
            Some((name, port)) if !port.contains(']') => {
                (name, Some(port.parse().map_err(|_| wrong("has no port that is a number"))?))
            }
            _ => (rest, None),
        };
        let name = name.replace(['[', ']'], "");
        if name.is_empty() || name.starts_with('-') || name.contains(['/', ' ']) {
            return Err(wrong("names no host"));
        }
        Ok(Host { name, port })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(name: &str, port: Option<u16>) -> Host {
        Host { name: name.into(), port }
    }

    #[test]
    fn hosts_are_named_by_uri() {
        for (uri, expected) in [
            ("ssh://lab", host("lab", None)),
            ("ssh://root@lab:2222/", host("root@lab", Some(2222))),
            ("ssh://[::1]:22", host("::1", Some(22))),
            ("ssh://root@[fe80::1%eth0]", host("root@fe80::1%eth0", None)),
        ] {
            assert_eq!(uri.parse(), Ok(expected), "{uri}");
        }
        for bad in ["lab", "ssh://", "ssh://-oProxyCommand=x", "ssh://lab:x", "ssh://lab/folder"] {
            let error = bad.parse::<Host>().unwrap_err();
            assert!(error.contains("write ssh://[USER@]HOST[:PORT]"), "{error}");
        }
    }
}
