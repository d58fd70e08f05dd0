//! Exports of NBD servers and images of Ceph, as clients of the control socket name them.

use std::path::PathBuf;

use ringtap_stores::percent::encoded;

use super::refusal::Refusal;
use super::shape::{arguments, choice};
use crate::address::Address;
use crate::facts::nbd_uri;
use crate::running::Running;

arguments! {
    /// A UNIX socket.
    struct UnixServer { "path" path: String }
}

arguments! {
    /// A TCP port.
    struct InetServer { "host" host: String, "port" port: String }
}

choice! {
    /// Where a server listens.
    struct ServerAddress {}
    "type" enum ServerAddressType { "unix" Unix(UnixServer), "inet" Inet(InetServer) }
}

arguments! {
    /// An export of an NBD server.
    struct RemoteNbd {
        "server" server: ServerAddress,
        "export" export: Option<String>,
        /// For how many seconds requests wait for a connection that is lost.
        "reconnect-delay" reconnect: Option<u32>,
        /// Certificates, by their id.
        "tls-creds" tls_creds: Option<String>,
        /// The name that the server's certificate must have, where it is not its host's.
        "tls-hostname" tls_hostname: Option<String>,
        "node-name" node_name: Option<String>,
    }
}

arguments! {
    /// An image of Ceph.
    struct RemoteRbd {
        "pool" pool: String,
        "namespace" namespace: Option<String>,
        "image" image: String,
        "snapshot" snapshot: Option<String>,
        "conf" conf: Option<String>,
        "user" user: Option<String>,
        /// Monitors, where the configuration is not to say them.
        "server" servers: Option<Vec<InetServer>>,
        "node-name" node_name: Option<String>,
    }
}

impl RemoteRbd {
    /// As an image's path.
    pub(super) fn path(&self) -> PathBuf {
        let mut name = format!("rbd:{}", plain(&self.pool));
        if let Some(namespace) = self.namespace.as_ref().filter(|space| !space.is_empty()) {
            name += &format!("/{}", plain(namespace));
        }
        name += &format!("/{}", plain(&self.image));
        if let Some(snapshot) = &self.snapshot {
            name += &format!("@{}", plain(snapshot));
        }
        let address = |at: &InetServer| match at.host.contains(':') {
            true => format!("[{}]:{}", at.host, at.port),
            false => format!("{}:{}", at.host, at.port),
        };
        let monitors = self.servers.as_ref().filter(|all| !all.is_empty());
        let monitors = monitors.map(|all| all.iter().map(address).collect::<Vec<_>>().join(";"));
        let options = [("conf", &self.conf), ("id", &self.user), ("mon_host", &monitors)];
        for (key, value) in options {
            if let Some(value) = value {
                name += &format!(":{key}={}", plain(value));
            }
        }
        name.into()
    }
}

/// A part of a name with what divides such behind backslashes.
fn plain(part: &str) -> String {
    let divides = |character| matches!(character, ':' | '/' | '@' | '=' | '\\');
    let each = part.chars().flat_map(|one| divides(one).then_some('\\').into_iter().chain([one]));
    each.collect()
}

impl RemoteNbd {
    /// As an image's path.
    pub(super) fn path(&self, running: &Running) -> Result<PathBuf, Refusal> {
        let folder = self.tls_creds.as_ref().map(|id| running.tls_of_client(id)).transpose()?;
        if folder.is_none() && self.tls_hostname.is_some() {
            return Err(Refusal::new("'tls-hostname' goes with 'tls-creds'"));
        }
        let address = match &self.server.of {
            ServerAddressType::Unix(UnixServer { path }) => Address::Unix(path.into()),
            ServerAddressType::Inet(InetServer { host, port }) => {
                let refused = |_| Refusal::new(format!("{port:?} is not a port number"));
                Address::Tcp { host: host.clone(), port: port.parse().map_err(refused)? }
            }
        };
        let uri = nbd_uri(&address, self.export.as_deref().unwrap_or_default(), folder.is_some());
        // As in QEMU nothing waits where nothing is said.
        let seconds = self.reconnect.unwrap_or(0);
        let sign = if uri.contains('?') { '&' } else { '?' };
        let mut uri = format!("{uri}{sign}reconnect={seconds}");
        let folder = folder.map(|folder| folder.to_string_lossy().into_owned());
        for (key, value) in [("tls-certificates", &folder), ("tls-hostname", &self.tls_hostname)] {
            if let Some(value) = value {
                uri += &format!("&{key}={}", encoded(value));
            }
        }
        Ok(uri.into())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::control::shape::Read;

    #[test]
    fn images_of_ceph_have_names() {
        let name = |value| RemoteRbd::read(value, "").map(|it| it.path().display().to_string());
        let plain = json!({ "pool": "rbd", "image": "vm" });
        assert_eq!(name(plain).ok().as_deref(), Some("rbd:rbd/vm"));
        let all = json!({
            "pool": "a:b", "namespace": "n", "image": "v@m", "snapshot": "s", "conf": "/etc/c",
            "user": "me", "server": [{ "host": "::1", "port": "3300" }],
        });
        let expected = "rbd:a\\:b/n/v\\@m@s:conf=\\/etc\\/c:id=me:mon_host=[\\:\\:1]\\:3300";
        assert_eq!(name(all).ok().as_deref(), Some(expected));
        assert!(name(json!({ "pool": "rbd" })).is_err());
        let none = json!({ "pool": "rbd", "namespace": "vm", "image": "" });
        assert_eq!(name(none).ok().as_deref(), Some("rbd:rbd/vm/"), "which nobody opens");
    }
}
