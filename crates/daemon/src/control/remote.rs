//! Exports of NBD servers as clients of the control socket name them.

use std::path::PathBuf;

use super::refusal::Refusal;
use super::shape::{arguments, choice};
use crate::address::Address;
use crate::facts::nbd_uri;

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
        "node-name" node_name: Option<String>,
    }
}

impl RemoteNbd {
    /// As an image's path.
    pub(super) fn path(&self) -> Result<PathBuf, Refusal> {
        let address = match &self.server.of {
            ServerAddressType::Unix(UnixServer { path }) => Address::Unix(path.into()),
            ServerAddressType::Inet(InetServer { host, port }) => {
                let refused = |_| Refusal::new(format!("{port:?} is not a port number"));
                Address::Tcp { host: host.clone(), port: port.parse().map_err(refused)? }
            }
        };
        let uri = nbd_uri(&address, self.export.as_deref().unwrap_or_default(), false);
        // As in QEMU nothing waits where nothing is said.
        let seconds = self.reconnect.unwrap_or(0);
        let sign = if uri.contains('?') { '&' } else { '?' };
        Ok(format!("{uri}{sign}reconnect={seconds}").into())
    }
}
