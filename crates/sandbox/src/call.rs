//! What is said between a server and its broker, as bytes: whole messages of bounded length.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// The longest message: an attribute of a file, which has 64 KiB at most, and what goes with it.
pub(crate) const LONGEST: usize = 72 << 10;
/// The most descriptors that go with one.
pub(crate) const FILES: usize = 8;
/// One byte that says what is asked for, four numbers, and the length of the first of two texts.
const HEAD: usize = 1 + 4 * 8 + 2;

/// What may be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum What {
    /// A line of the operator's list; the first number is its kind.
    Allow = 1,
    /// The list is complete.
    Seal,
    /// A UNIX socket bound to a path; the first number is its mode.
    Bind,
    /// A UNIX socket connected to a path; the first number says whether it may wait.
    Connect,
    /// TCP sockets that listen; the first number is the port.
    Listen,
    /// A TCP socket that is connected; the first number is the port, the second the milliseconds to wait.
    Dial,
    /// A disk mounted over a file by FUSE; the first number says whether for reading only.
    Mount,
    /// Nothing mounted there; the first number says whether whatever still uses it.
    Unmount,
    /// Who holds a lock: numbers of the device (two), of the file, and of the byte.
    Holder,
    /// Rings for who calls io_uring_setup: the notifier comes with it.
    Rings,
    /// What Ringtap has written down of a file, which comes with it.
    Attribute,
    /// Something else written down of it; nothing where the first number is 0.
    SetAttribute,
    /// The program of the server started once more, as the next: what it has as its standard files comes with it. Another
    /// one where it is named, and the first number is the process that asks for it.
    Start,
    /// How the next has ended: the first number is its process, the second says whether it is to end now.
    Next,
    /// A text to whoever waits to hear what became of an upgrade.
    Tell,
    /// Whether a process has mapped a file without a name, which comes with it, for itself alone: its number, and where.
    Private,
    /// What takes the driver of block devices, or their files: what is wanted, the device, and two more numbers; the image
    /// that it shows, and bytes for the driver.
    Device,
    /// A mount of the namespace that server and broker have for themselves, taken off there.
    LetGo,
    /// Whose the sockets are that are bound: the numbers of a user and a group.
    Owner,
    /// What is at the path of a UNIX socket: numbers of its device and its file, and its mode.
    Look,
    /// The socket there removed, where it is that one: the first number is its device's, the second its file's.
    Remove,
    /// What the service manager is told.
    Notify,
}

impl What {
    const ALL: [What; 22] = [
        What::Allow,
        What::Seal,
        What::Bind,
        What::Connect,
        What::Listen,
        What::Dial,
        What::Mount,
        What::Unmount,
        What::Holder,
        What::Rings,
        What::Attribute,
        What::SetAttribute,
        What::Start,
        What::Next,
        What::Tell,
        What::Private,
        What::Device,
        What::LetGo,
        What::Owner,
        What::Look,
        What::Remove,
        What::Notify,
    ];
}

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Call<'a> {
    pub(crate) what: What,
    pub(crate) numbers: [u64; 4],
    pub(crate) first: &'a [u8],
    pub(crate) second: &'a [u8],
}

impl<'a> Call<'a> {
    pub(crate) fn new(what: What) -> Call<'a> {
        Call { what, numbers: [0; 4], first: b"", second: b"" }
    }

    pub(crate) fn path(what: What, path: &'a Path) -> Call<'a> {
        Call { first: path.as_os_str().as_bytes(), ..Call::new(what) }
    }

    pub(crate) fn number(self, number: u64) -> Call<'a> {
        let [_, rest @ ..] = self.numbers;
        Call { numbers: [number, rest[0], rest[1], rest[2]], ..self }
    }

    /// Its bytes; none where it is too long.
    pub(crate) fn bytes(&self) -> Option<Vec<u8>> {
        let len = u16::try_from(self.first.len()).ok()?;
        let mut bytes = vec![self.what as u8];
        self.numbers.iter().for_each(|number| bytes.extend(number.to_le_bytes()));
        bytes.extend(len.to_le_bytes());
        bytes.extend(self.first);
        bytes.extend(self.second);
        Some(bytes).filter(|bytes| bytes.len() <= LONGEST)
    }

    /// What bytes say, which whoever may have written.
    pub(crate) fn parse(bytes: &'a [u8]) -> Option<Call<'a>> {
        let (head, texts) = bytes.split_at_checked(HEAD)?;
        let what = What::ALL.into_iter().find(|what| *what as u8 == head[0])?;
        let mut numbers = [0; 4];
        for (number, bytes) in numbers.iter_mut().zip(head[1..].chunks_exact(8)) {
            *number = u64::from_le_bytes(bytes.try_into().ok()?);
        }
        let len = u16::from_le_bytes(head[HEAD - 2..].try_into().ok()?);
        let (first, second) = texts.split_at_checked(len.into())?;
        let clean = |text: &[u8]| !text.contains(&0);
        // Bytes for a driver are no text.
        (clean(first) && (what == What::Device || clean(second))).then_some(Call {
            what,
            numbers,
            first,
            second,
        })
    }
}

pub(crate) fn as_path(bytes: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(bytes))
}

/// An answer: an error of the kernel or none, some text, and descriptors beside them.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    pub(crate) errno: i32,
    pub(crate) text: Vec<u8>,
    pub(crate) files: Vec<OwnedFd>,
}

impl Answer {
    pub(crate) fn of(file: OwnedFd) -> Answer {
        Answer { files: vec![file], ..Answer::default() }
    }

    /// Errors keep their number; those that have none, their words.
    pub(crate) fn failed(error: &io::Error) -> Answer {
        match error.raw_os_error() {
            Some(errno) => Answer { errno, ..Answer::default() },
            None => {
                let mut text = error.to_string().into_bytes();
                text.truncate(LONGEST / 2);
                Answer { errno: -1, text, files: vec![] }
            }
        }
    }

    /// To whoever asked, if that still waits.
    pub(crate) fn give(&self, socket: impl AsFd) {
        let bytes = [&self.errno.to_le_bytes()[..], &self.text].concat();
        let files: Vec<BorrowedFd<'_>> = self.files.iter().map(AsFd::as_fd).collect();
        let _ = send(socket, &bytes, &files);
    }

    /// What the broker answers is believed: it is the one that could do more.
    pub(crate) fn receive(socket: impl AsFd) -> io::Result<Answer> {
        let mut bytes = vec![0; LONGEST];
        let (len, files) = receive(socket, &mut bytes)?;
        let gone = || io::Error::new(io::ErrorKind::BrokenPipe, "the broker is gone");
        let (errno, text) = bytes[..len].split_first_chunk().ok_or_else(gone)?;
        Ok(Answer { errno: i32::from_le_bytes(*errno), text: text.to_vec(), files })
    }

    pub(crate) fn result(self) -> io::Result<Answer> {
        match self.errno {
            0 => Ok(self),
            -1 => Err(io::Error::other(String::from_utf8_lossy(&self.text).into_owned())),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }
}

pub(crate) fn send(socket: impl AsFd, bytes: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES))];
    let mut beside = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() && !beside.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(Errno::MSGSIZE.into());
    }
    let bytes = [io::IoSlice::new(bytes)];
    rustix::io::retry_on_intr(|| sendmsg(&socket, &bytes, &mut beside, SendFlags::NOSIGNAL))?;
    Ok(())
}

/// Bytes and descriptors of one message; nothing at its end.
pub(crate) fn receive(socket: impl AsFd, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES))];
    loop {
        let mut beside = RecvAncillaryBuffer::new(&mut space);
        let mut whole = [io::IoSliceMut::new(bytes)];
        let got = match recvmsg(&socket, &mut whole, &mut beside, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => continue,
            got => got?,
        };
        let files = beside
            .drain()
            .filter_map(|message| match message {
                RecvAncillaryMessage::ScmRights(files) => Some(files),
                _ => None,
            })
            .flatten()
            .collect();
        return Ok((got.bytes, files));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_read_as_they_were_written() {
        for what in What::ALL {
            let call = Call { what, numbers: [1, 2, 3, u64::MAX], first: b"/a b", second: b"c" };
            assert_eq!(Call::parse(&call.bytes().expect("short")), Some(call));
        }
        let long = vec![b'a'; LONGEST];
        assert_eq!(Call { second: &long, ..Call::new(What::Bind) }.bytes(), None);
    }

    #[test]
    fn whatever_else_there_is_is_refused() {
        let good = Call::path(What::Bind, Path::new("/a")).bytes().expect("short");
        let changed = |at: usize, to: u8| {
            let mut bytes = good.clone();
            bytes[at] = to;
            Call::parse(&bytes).is_none()
        };
        assert!(changed(0, 0) && changed(0, 200), "what nobody may ask for");
        assert!(changed(HEAD - 2, 3) && changed(HEAD - 1, 1), "a text behind the end");
        assert!(changed(HEAD, 0) && changed(HEAD + 1, 0), "a path with an end in it");
        assert!((0..HEAD).all(|len| Call::parse(&good[..len]).is_none()));
    }
}
