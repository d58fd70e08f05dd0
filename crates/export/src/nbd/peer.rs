//! Who is at the other end of a connection, as far as limits go.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, TcpStream};
use std::os::fd::OwnedFd;

use rustix::net::sockopt;

use super::listener::Listener;

/// Connections of one peer share that peer's limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Peer {
    /// The user of a UNIX socket (SO_PEERCRED).
    User(u32),
    /// The address of a TCP client; of IPv6 the first 64 bits, for one host has all of the others.
    Host(IpAddr),
    /// It was gone before it could be asked.
    Unknown,
}

impl Peer {
    /// The peer of a connection that this listener took.
    pub(super) fn of(socket: OwnedFd, listener: &Listener) -> (OwnedFd, Peer) {
        match listener {
            Listener::Unix(_) => {
                let peer = sockopt::socket_peercred(&socket).ok();
                (socket, peer.map_or(Peer::Unknown, |peer| Peer::User(peer.uid.as_raw())))
            }
            Listener::Tcp(_) => {
                let stream = TcpStream::from(socket);
                let peer = stream.peer_addr().map_or(Peer::Unknown, |peer| Peer::host(peer.ip()));
                (stream.into(), peer)
            }
        }
    }

    fn host(address: IpAddr) -> Peer {
        Peer::Host(match address.to_canonical() {
            IpAddr::V6(address) => {
                let network = u128::from(address) & !u128::from(u64::MAX);
                IpAddr::V6(Ipv6Addr::from(network))
            }
            address => address,
        })
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Peer::User(uid) => write!(f, "user {uid}"),
            Peer::Host(IpAddr::V6(network)) => write!(f, "{network}/64"),
            Peer::Host(address) => write!(f, "{address}"),
            Peer::Unknown => f.write_str("a client that is gone"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_host_is_one_peer() {
        let host = |text: &str| Peer::host(text.parse().expect("an address"));
        assert_eq!(host("::ffff:192.0.2.1"), host("192.0.2.1"));
        assert_ne!(host("192.0.2.1"), host("192.0.2.2"));
        assert_eq!(host("2001:db8:1:2::3"), host("2001:db8:1:2:ffff::4"));
        assert_ne!(host("2001:db8:1:2::3"), host("2001:db8:1:3::3"));
        assert_eq!(host("2001:db8:1:2::3").to_string(), "2001:db8:1:2::/64");
        assert_eq!(Peer::User(7).to_string(), "user 7");
    }
}
