//! Sockets that systemd handed over (or whoever speaks its protocol: LISTEN_FDS and its kin).

use std::net::TcpListener;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;

use ringtap_export::nbd::Listener;
use rustix::net::{AddressFamily, SocketType, sockopt};

use crate::Error;

/// The sockets handed over and not given out yet, with their `FileDescriptorName=`.
#[derive(Default)]
pub(crate) struct Handed(Vec<(String, OwnedFd)>);

impl Handed {
    /// Take what the environment says was handed over. Call it once in the life of a process.
    pub(crate) fn take() -> Result<Handed, Error> {
        let found = sd_notify::listen_fds_with_names().map_err(|error| {
            Error::Handed(format!("the sockets handed over (LISTEN_FDS) are not there: {error}"))
        })?;
        Ok(Handed(found.map(|(fd, name)| (name, own(fd))).collect()))
    }

    /// The sockets of that name, or all that are left. Never an empty list.
    pub(crate) fn give(&mut self, name: Option<&str>) -> Result<Vec<Listener>, Error> {
        let wanted = |held: &str| name.is_none_or(|name| name == held);
        let names: Vec<String> = self.0.iter().map(|(name, _)| format!("{name:?}")).collect();
        let (given, left) = std::mem::take(&mut self.0)
            .into_iter()
            .partition::<Vec<_>, _>(|(held, _)| wanted(held));
        self.0 = left;
        if given.is_empty() {
            let what =
                name.map_or("no socket".to_owned(), |name| format!("no socket named {name:?}"));
            let others = match &names[..] {
                [] => "nothing at all; is this started by a .socket unit?".to_owned(),
                names => {
                    format!("{}; set FileDescriptorName= in the .socket unit", names.join(", "))
                }
            };
            return Err(Error::Handed(format!("systemd handed over {what}, but {others}")));
        }
        given.into_iter().map(|(name, socket)| listener(&name, socket)).collect()
    }

    /// Close the sockets of that name: clients find nobody, rather than wait for an answer.
    pub(crate) fn close(&mut self, name: &str) {
        self.0.retain(|(held, _)| held != name);
    }

    /// Names of the sockets nobody asked for.
    pub(crate) fn left(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(name, _)| name.as_str())
    }
}

fn own(fd: RawFd) -> OwnedFd {
    // SAFETY: by the protocol this open descriptor was made for this process alone; nothing else
    // here knows it, and `take` runs once.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

pub(crate) fn listener(name: &str, socket: OwnedFd) -> Result<Listener, Error> {
    let listens = sockopt::socket_acceptconn(&socket).unwrap_or(false)
        && sockopt::socket_type(&socket) == Ok(SocketType::STREAM);
    let family = sockopt::socket_domain(&socket).ok().filter(|_| listens);
    match family {
        Some(AddressFamily::UNIX) => Ok(Listener::Unix(UnixListener::from(socket))),
        Some(AddressFamily::INET | AddressFamily::INET6) => {
            Ok(Listener::Tcp(TcpListener::from(socket)))
        }
        _ => Err(Error::Handed(format!(
            "the socket {name:?} that systemd handed over is not a listening UNIX or TCP stream: \
             use ListenStream= and Accept=no"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(names: &[&str]) -> Handed {
        let socket = || OwnedFd::from(TcpListener::bind("127.0.0.1:0").expect("a port"));
        Handed(names.iter().map(|name| (name.to_string(), socket())).collect())
    }

    #[test]
    fn sockets_go_by_name_and_the_rest_to_who_asks_for_any() {
        let mut handed = held(&["a", "b", "a", "c"]);
        assert_eq!(handed.give(Some("a")).expect("two").len(), 2);
        let message = handed.give(Some("a")).expect_err("none left").to_string();
        assert!(message.contains("\"b\", \"c\""), "{message}");
        assert_eq!(handed.left().collect::<Vec<_>>(), ["b", "c"]);
        assert_eq!(handed.give(None).expect("two").len(), 2);
        let message = handed.give(None).expect_err("none left").to_string();
        assert!(message.contains("nothing at all"), "{message}");
    }

    #[test]
    fn what_does_not_listen_is_refused() {
        let (socket, _peer) = std::os::unix::net::UnixStream::pair().expect("a pair");
        let mut handed = Handed(vec![("x".into(), socket.into())]);
        let message = handed.give(None).expect_err("refused").to_string();
        assert!(message.contains("Accept=no"), "{message}");
    }
}
