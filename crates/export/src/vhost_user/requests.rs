//! The front-end's socket for our own requests: told that the disk has another size.
//!
//! The front-end holds that socket too, so that it blocks whenever the front-end wishes, whatever time limit it is given here.
//! Nobody waits for it: one that has no room is let go.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;
use rustix::net::sockopt::{socket_domain, socket_type};
use rustix::net::{AddressFamily, SendFlags, SocketType, send};

/// VHOST_USER_SLAVE_CONFIG_CHANGE_MSG by number.
const CONFIG_CHANGED: u32 = 2;

/// The socket, where there is one.
#[derive(Default)]
pub(super) struct Requests(Mutex<Option<Arc<OwnedFd>>>);

impl Requests {
    fn lock(&self) -> MutexGuard<'_, Option<Arc<OwnedFd>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on that one. Others than UNIX sockets may wait in the kernel even where they are told not to.
    pub(super) fn set(&self, socket: Option<OwnedFd>) {
        let fits = |socket: &OwnedFd| {
            socket_domain(socket) == Ok(AddressFamily::UNIX)
                && socket_type(socket) == Ok(SocketType::STREAM)
        };
        let kept = match socket {
            Some(socket) if !fits(&socket) => {
                tracing::warn!(
                    "the front-end's socket for requests is no UNIX stream: it is not told of new sizes"
                );
                None
            }
            other => other.map(Arc::new),
        };
        *self.lock() = kept;
    }

    /// It, for another server; from now on there is none.
    pub(super) fn take(&self) -> Option<UnixStream> {
        let taken = self.lock().take()?;
        taken.as_fd().try_clone_to_owned().ok().map(Into::into)
    }

    /// Tell the front-end that the disk's size changed.
    pub(super) fn tell_of_size(&self) {
        let Some(socket) = self.lock().clone() else { return };
        // Request, flags (version 1), size of the payload: none.
        let message = [CONFIG_CHANGED, 1, 0].map(u32::to_ne_bytes).concat();
        let why = loop {
            match send(&socket, &message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(sent) if sent == message.len() => return,
                Ok(_) => break io::ErrorKind::WriteZero.into(),
                Err(Errno::INTR) => {}
                Err(error) => break io::Error::from(error),
            }
        };
        tracing::warn!(
            "cannot tell the front-end of the new size: {why}; it is told of none any more"
        );
        let mut kept = self.lock();
        if kept.as_ref().is_some_and(|kept| Arc::ptr_eq(kept, &socket)) {
            *kept = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_socket_that_the_front_end_has_filled_is_not_waited_for() {
        let (mut theirs, mut ours) = UnixStream::pair().expect("sockets");
        let requests = Arc::new(Requests::default());
        requests.set(Some(ours.try_clone().expect("it").into()));
        requests.tell_of_size();
        let mut message = [0; 12];
        theirs.read_exact(&mut message).expect("a message");
        assert_eq!(message[..4], CONFIG_CHANGED.to_ne_bytes());
        // The front-end has both ends: it fills one, which blocks then for as long as it likes.
        ours.set_nonblocking(true).expect("its flags");
        while ours.write(&[0; 4096]).is_ok() {}
        while ours.write(&[0]).is_ok() {}
        ours.set_nonblocking(false).expect("its flags");
        ours.set_write_timeout(None).expect("its option");
        let (told, done) = channel();
        let theirs_too = requests.clone();
        std::thread::spawn(move || {
            theirs_too.tell_of_size();
            told.send(()).expect("somebody hears");
        });
        done.recv_timeout(Duration::from_secs(60)).expect("nobody waits");
        assert!(requests.take().is_none(), "it is let go");
    }

    #[test]
    fn what_is_no_stream_of_this_host_is_not_kept() {
        let requests = Requests::default();
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let (_theirs, datagrams) = std::os::unix::net::UnixDatagram::pair().expect("sockets");
        let file = std::fs::File::open("/dev/null").expect("a file");
        for other in [tcp.into(), datagrams.into(), file.into()] {
            requests.set(Some(other));
            assert!(requests.take().is_none());
        }
    }
}
