//! Front-ends that come while another has the disk: each is told by a closed connection, and the log by a line.

use std::cell::Cell;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};

use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::net::{RecvFlags, recv};

use super::peer::Peer;

/// Watches the front-end that is served, and the listening socket beside it.
pub(crate) struct Others<'a> {
    listener: &'a UnixListener,
    served: &'a UnixStream,
    /// Readable when either is.
    either: OwnedFd,
    /// The last that was refused: it may try again and again.
    told: Cell<Option<Peer>>,
}

impl<'a> Others<'a> {
    pub(crate) fn beside(listener: &'a UnixListener, served: &'a UnixStream) -> io::Result<Self> {
        let either = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for file in [listener.as_fd(), served.as_fd()] {
            let data = epoll::EventData::new_u64(0);
            epoll::add(&either, file, data, epoll::EventFlags::IN)?;
        }
        Ok(Others { listener, served, either, told: Cell::new(None) })
    }

    /// Refuse whoever has come meanwhile; whether the one that is served has said something, or left. That goes
    /// first: it may have left for the very one that comes.
    pub(crate) fn refuse(&self) -> io::Result<bool> {
        let mut fds = [PollFd::new(self.served, PollFlags::IN)];
        if poll(&mut fds, Some(&Timespec::default()))? > 0 {
            return Ok(true);
        }
        // It fails where the other has gone again, or there is no descriptor for it: it waits then.
        let Ok((other, _)) = self.listener.accept() else { return Ok(false) };
        let peer = Peer::of(&other);
        if self.told.replace(Some(peer)) != Some(peer) {
            tracing::warn!(
                "a second front-end, {peer}, is refused: {} has the disk; give each disk a socket of its own, \
                 or stop the first",
                Peer::of(self.served)
            );
        }
        // What is left unread would reach it as a reset, not as an end.
        let _ = recv(&other, &mut [0; 4096][..], RecvFlags::DONTWAIT);
        Ok(false)
    }
}

impl AsFd for Others<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.either.as_fd()
    }
}
