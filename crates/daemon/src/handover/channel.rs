//! Between a server and the next: messages with descriptors.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Read, Seek, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// By what the next server finds the channel: the process that it is from, and the number of a descriptor.
pub(crate) const CHANNEL: &str = "RINGTAP_HANDOVER";

/// Descriptors of one packet: the kernel takes 253.
const AT_ONCE: usize = 200;
/// The longest text, and the most descriptors.
const MOST_TEXT: usize = 64 << 10;
const MOST_FILES: usize = 1 << 20;

/// What is said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// What to prepare from. It comes in a file, the first of the descriptors.
    State = 1,
    /// Everything is prepared.
    Ready = 2,
    /// What goes on. It comes in a file, the first of the descriptors.
    Connections = 3,
    /// All of it is taken over: the commit point.
    Taken = 4,
    /// It cannot be taken over; the text says why.
    Failed = 5,
}

impl Kind {
    fn of(number: u32) -> Option<Kind> {
        [Kind::State, Kind::Ready, Kind::Connections, Kind::Taken, Kind::Failed]
            .into_iter()
            .find(|kind| *kind as u32 == number)
    }
}

/// One message.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) kind: Kind,
    pub(super) text: String,
    pub(super) files: Vec<OwnedFd>,
}

/// One end.
pub(super) struct Channel(pub(super) UnixStream);

fn wrong(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

impl Channel {
    /// Say something, with descriptors.
    pub(super) fn send(&self, kind: Kind, text: &str, files: &[&dyn AsFd]) -> io::Result<()> {
        let text = &text.as_bytes()[..text.len().min(MOST_TEXT)];
        let head = [kind as u32, text.len() as u32, files.len() as u32, 0];
        let head: Vec<u8> = head.iter().flat_map(|word| word.to_ne_bytes()).collect();
        (&self.0).write_all(&[&head[..], text].concat())?;
        for some in files.chunks(AT_ONCE) {
            let fds: Vec<_> = some.iter().map(|file| file.as_fd()).collect();
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(AT_ONCE))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            ancillary.push(SendAncillaryMessage::ScmRights(&fds));
            let byte = [IoSlice::new(&[0])];
            rustix::io::retry_on_intr(|| {
                sendmsg(&self.0, &byte, &mut ancillary, SendFlags::NOSIGNAL)
            })?;
        }
        Ok(())
    }

    /// Say what a file holds, which nobody can change, with descriptors behind it.
    pub(super) fn send_file(&self, kind: Kind, body: &[u8], files: &[&dyn AsFd]) -> io::Result<()> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let mut file = File::from(memfd_create("ringtap-handover", flags)?);
        file.write_all(body)?;
        let all = SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::SEAL;
        fcntl_add_seals(&file, all)?;
        let first: &dyn AsFd = &file;
        let files: Vec<&dyn AsFd> = [first].into_iter().chain(files.iter().copied()).collect();
        self.send(kind, "", &files)
    }

    /// Hear what the other says by then; nothing where it has gone. An error of the kind `ConnectionReset` where it has gone without
    /// having heard all that was said to it.
    pub(super) fn receive(&self, until: Option<Instant>) -> io::Result<Option<Message>> {
        let mut head = [0; 16];
        if !self.fill(&mut head, &mut vec![], until)? {
            return Ok(None);
        }
        let word = |at: usize| u32::from_ne_bytes([0, 1, 2, 3].map(|i| head[at + i]));
        let (text, count) = (word(4) as usize, word(8) as usize);
        let kind = Kind::of(word(0)).ok_or_else(|| wrong("it says what is not known here"))?;
        if text > MOST_TEXT || count > MOST_FILES {
            return Err(wrong("it says too much"));
        }
        let (mut text, mut files) = (vec![0; text], vec![]);
        let whole = self.fill(&mut text, &mut vec![], until)?;
        while whole && files.len() < count {
            let before = files.len();
            if !self.fill(&mut [0], &mut files, until)? || files.len() == before {
                return Err(wrong("its descriptors do not come"));
            }
        }
        let text = String::from_utf8_lossy(&text).into_owned();
        Ok(whole.then_some(Message { kind, text, files }))
    }

    fn fill(
        &self,
        bytes: &mut [u8],
        files: &mut Vec<OwnedFd>,
        until: Option<Instant>,
    ) -> io::Result<bool> {
        let mut got = 0;
        while got < bytes.len() {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Err(io::ErrorKind::TimedOut.into());
            }
            self.0.set_read_timeout(left.map(|left| left.max(Duration::from_micros(1))))?;
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(AT_ONCE))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let mut room = [IoSliceMut::new(&mut bytes[got..])];
            match recvmsg(&self.0, &mut room, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
                Ok(message) if message.bytes == 0 => return Ok(false),
                Ok(message) => got += message.bytes,
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Err(io::ErrorKind::TimedOut.into()),
                Err(error) => return Err(error.into()),
            }
            for message in ancillary.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = message {
                    files.extend(rights);
                }
            }
        }
        Ok(true)
    }
}

/// Descriptors that have come, each to be taken once.
pub(super) struct Files(Vec<Option<OwnedFd>>);

impl Files {
    /// Those of a message whose first is a file, and what that holds.
    pub(super) fn of(files: Vec<OwnedFd>) -> io::Result<(Vec<u8>, Files)> {
        let mut files: Vec<Option<OwnedFd>> = files.into_iter().map(Some).collect();
        let first = files.first_mut().and_then(Option::take).ok_or_else(|| wrong("no file"))?;
        let (mut file, mut body) = (File::from(first), vec![]);
        file.rewind()?;
        file.read_to_end(&mut body)?;
        Ok((body, Files(files)))
    }

    pub(super) fn take(&mut self, place: usize) -> Result<OwnedFd, String> {
        let found = self.0.get_mut(place).and_then(Option::take);
        found.ok_or_else(|| format!("its state names descriptor {place}, which did not come"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_descriptors_arrive_with_what_is_said() {
        let (one, other) = UnixStream::pair().expect("a pair");
        let (one, other) = (Channel(one), Channel(other));
        let (end, _end) = rustix::pipe::pipe().expect("a pipe");
        let files: Vec<&dyn AsFd> = (0..450).map(|_| &end as &dyn AsFd).collect();
        let sends = std::thread::spawn(move || {
            let until = Some(Instant::now() + Duration::from_secs(30));
            let said = other.receive(until).expect("heard").expect("a message");
            let (body, mut files) = Files::of(said.files).expect("the file");
            (said.kind, body, files.0.len(), files.take(450).is_ok(), files.take(450).is_ok())
        });
        one.send_file(Kind::State, b"all of it", &files).expect("sent");
        let heard = sends.join().expect("no panic");
        assert_eq!(heard, (Kind::State, b"all of it".to_vec(), 451, true, false));
        drop(one);
    }

    #[test]
    fn who_says_nothing_is_not_waited_for() {
        let (one, other) = UnixStream::pair().expect("a pair");
        let soon = Some(Instant::now() + Duration::from_millis(20));
        let end = Channel(one).receive(soon).expect_err("nothing came");
        assert_eq!(end.kind(), io::ErrorKind::TimedOut);
        drop(other);
    }
}
