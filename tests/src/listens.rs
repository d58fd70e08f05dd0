//! Whether a socket takes connections yet.

use std::path::Path;

/// Whether somebody listens on the UNIX socket at `path`, without connecting to it. A socket is in
/// its folder from `bind` on and refuses connections until `listen`, so that it exists says little.
pub fn listens(path: &Path) -> bool {
    let table = std::fs::read_to_string("/proc/net/unix").expect("the table of sockets");
    let end = format!(" {}", path.display());
    // Flag 0x10000: accepts connections.
    table.lines().any(|line| line.ends_with(&end) && line.contains(" 00010000 "))
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket};

    use super::*;

    #[test]
    fn a_bound_socket_does_not_listen_yet() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("socket");
        assert!(!listens(&path));
        let socket = socket(AddressFamily::UNIX, SocketType::STREAM, None).expect("a socket");
        bind(&socket, &SocketAddrUnix::new(&path).expect("an address")).expect("bound");
        assert!(path.exists() && !listens(&path));
        listen(&socket, 1).expect("it listens");
        assert!(listens(&path));
        drop(socket);
        assert!(path.exists() && !listens(&path));
    }
}
