//! Where a disk is served.

use std::fmt;
use std::path::PathBuf;

/// The port that IANA gave to NBD.
const NBD_PORT: u16 = 10809;

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Address {
    /// A UNIX socket at this path.
    Unix(PathBuf),
    /// A TCP port; port 0 lets the kernel choose.
    Tcp {
        /// Name or address of an interface of this host.
        host: String,
        /// The port.
        port: u16,
    },
    /// Sockets that systemd (or whoever speaks its protocol) handed over: those of this
    /// `FileDescriptorName=`, or those that fit where no name is given.
    Systemd(Option<String>),
}

impl Address {
    /// Of NBD: `unix:PATH`, `tcp:HOST[:PORT]`, `systemd[:NAME]`. The error says what to write.
    pub fn nbd(text: &str) -> Result<Address, String> {
        if let Some(handed) = Address::systemd(text) {
            return Ok(handed);
        }
        if let Some(path) = text.strip_prefix("unix:").filter(|path| !path.is_empty()) {
            return Ok(Address::Unix(path.into()));
        }
        match text.strip_prefix("tcp:") {
            Some(rest) => Address::tcp(rest),
            None => Err("write unix:PATH, tcp:HOST:PORT or systemd[:NAME]".into()),
        }
    }

    /// Of vhost-user: `PATH`, `unix:PATH`, `systemd[:NAME]`. The error says what to write.
    pub fn vhost_user(text: &str) -> Result<Address, String> {
        if let Some(handed) = Address::systemd(text) {
            return Ok(handed);
        }
        if text.starts_with("tcp:") {
            let why = "vhost-user hands over memory, which only a UNIX socket can: write a path";
            return Err(why.into());
        }
        match text.strip_prefix("unix:").unwrap_or(text) {
            "" => Err("write the path of a UNIX socket, or systemd[:NAME]".into()),
            path => Ok(Address::Unix(path.into())),
        }
    }

    fn systemd(text: &str) -> Option<Address> {
        if text == "systemd" {
            return Some(Address::Systemd(None));
        }
        let name = text.strip_prefix("systemd:").filter(|name| !name.is_empty())?;
        Some(Address::Systemd(Some(name.to_owned())))
    }

    fn tcp(text: &str) -> Result<Address, String> {
        let (host, port) = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            Some((host, port)) => (host, port),
            None if text.matches(':').count() > 1 => {
                return Err("put an IPv6 address into brackets: tcp:[::1]:10809".into());
            }
            None => text.split_at(text.find(':').unwrap_or(text.len())),
        };
        if host.is_empty() {
            let why = "name the interface: tcp:0.0.0.0:10809 or tcp:[::]:10809 for all of them";
            return Err(why.into());
        }
        let port = match port.strip_prefix(':') {
            Some(port) => port.parse().map_err(|_| format!("{port:?} is not a port number"))?,
            None if port.is_empty() => NBD_PORT,
            None => return Err("write tcp:HOST:PORT".into()),
        };
        Ok(Address::Tcp { host: host.to_owned(), port })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
            Address::Tcp { host, port } if host.contains(':') => write!(f, "tcp:[{host}]:{port}"),
            Address::Tcp { host, port } => write!(f, "tcp:{host}:{port}"),
            Address::Systemd(Some(name)) => write!(f, "systemd:{name}"),
            Address::Systemd(None) => f.write_str("systemd"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_shown_alike() {
        for text in
            ["unix:/run/x.sock", "tcp:localhost:10810", "tcp:[::1]:1", "systemd", "systemd:a"]
        {
            assert_eq!(Address::nbd(text).map(|address| address.to_string()), Ok(text.to_owned()));
        }
        let tcp = |host: &str, port| Ok(Address::Tcp { host: host.into(), port });
        assert_eq!(Address::nbd("tcp:127.0.0.1"), tcp("127.0.0.1", 10809));
        assert_eq!(Address::nbd("tcp:[::]"), tcp("::", 10809));
        assert_eq!(Address::vhost_user("a.sock"), Ok(Address::Unix("a.sock".into())));
        assert_eq!(Address::vhost_user("unix:a.sock"), Ok(Address::Unix("a.sock".into())));
    }

    #[test]
    fn what_is_no_address_is_refused() {
        for text in
            ["", "/run/x.sock", "unix:", "tcp:", "tcp::1", "tcp:::1", "tcp:h:x", "tcp:h:70000"]
        {
            assert!(Address::nbd(text).is_err(), "{text}");
        }
        for text in ["", "unix:", "tcp:localhost:1"] {
            assert!(Address::vhost_user(text).is_err(), "{text}");
        }
    }
}
