//! The server's end of the socket to its broker: whether there is one, and how it is asked.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::call::{Answer, Call, What, send};
use crate::list::List;
use crate::user::Owner;

/// The server's end, and the broker's process: of the newest, where there was another before.
static SERVERS_END: Mutex<Option<&'static (OwnedFd, i32)>> = Mutex::new(None);
/// Whether the server does without.
static DISMISSED: AtomicBool = AtomicBool::new(false);
/// How long a server that ends waits for its broker to end.
const LAST_WAIT: Duration = Duration::from_secs(5);

/// From now on this end, and the broker's process there, are those that are asked.
pub(crate) fn connected(end: &'static (OwnedFd, i32)) {
    *SERVERS_END.lock().unwrap_or_else(PoisonError::into_inner) = Some(end);
    DISMISSED.store(false, SeqCst);
}

/// Do without the broker: it ends, and this process does all itself. Who ends does that last, so that nothing of it is left
/// in folders that go then. One that does not end (its call waits for storage that is gone) is not waited for without end.
pub fn dismiss() {
    let Some((socket, broker)) = newest().filter(|_| !DISMISSED.swap(true, SeqCst)) else {
        return;
    };
    let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
    let until = Instant::now() + LAST_WAIT;
    // SAFETY: it asks for the end of a process, and writes nothing.
    while unsafe { libc::waitpid(*broker, std::ptr::null_mut(), libc::WNOHANG) } == 0 {
        if Instant::now() > until {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn newest() -> Option<&'static (OwnedFd, i32)> {
    *SERVERS_END.lock().unwrap_or_else(PoisonError::into_inner)
}

fn servers_end() -> Option<&'static OwnedFd> {
    let there = newest().filter(|_| !DISMISSED.load(SeqCst));
    there.map(|(socket, _)| socket)
}

/// Whether this process has a broker.
pub fn is_there() -> bool {
    servers_end().is_some()
}

/// Ask the broker; nothing where there is none.
pub(crate) fn ask(call: &Call<'_>) -> Option<io::Result<Answer>> {
    ask_with(call, &[])
}

pub(crate) fn ask_with(
    call: &Call<'_>,
    files: &[std::os::fd::BorrowedFd<'_>],
) -> Option<io::Result<Answer>> {
    let socket = servers_end()?;
    let asked = || {
        let bytes = call.bytes().ok_or(Errno::NAMETOOLONG)?;
        // Each call has its answer to itself, so none waits for another's.
        let (ours, theirs) = pair()?;
        let with: Vec<_> = std::iter::once(theirs.as_fd()).chain(files.iter().copied()).collect();
        send(socket, &bytes, &with)?;
        drop(theirs);
        Answer::receive(&ours)?.result()
    };
    Some(asked())
}

pub(crate) fn pair() -> Result<(OwnedFd, OwnedFd), Errno> {
    let flags = SocketFlags::CLOEXEC;
    rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

/// Tell the broker whose the server's sockets are, if not its own user's, and the list. Only its last line is answered, for
/// all of them.
pub(crate) fn tell(list: &List, owner: Option<Owner>) -> io::Result<()> {
    let Some(socket) = servers_end() else { return Ok(()) };
    if let Some(Owner { user, group }) = owner {
        let numbers = [user.into(), group.into(), 0, 0];
        let call = Call { numbers, ..Call::new(What::Owner) };
        ask(&call).map_or(Ok(()), |answer| answer.map(drop))?;
    }
    let mut before: Option<Vec<u8>> = None;
    list.lines(|call| {
        let line = call.bytes().ok_or(Errno::NAMETOOLONG)?;
        before.replace(line).map_or(Ok(()), |before| send(socket, &before, &[]))
    })?;
    let Some(last) = before else { return Ok(()) };
    let (ours, theirs) = pair()?;
    send(socket, &last, &[theirs.as_fd()])?;
    drop(theirs);
    Answer::receive(&ours)?.result().map(drop)
}

/// Tell the broker that the list is complete: servers that it has connected to by then are on it, too.
pub fn seal() -> io::Result<()> {
    ask(&Call::new(What::Seal)).map_or(Ok(()), |answer| answer.map(drop))
}
