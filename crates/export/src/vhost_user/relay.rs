//! Between the front-end's socket and the vhost crate's handler: one whole message at a time.
//!
//! The crate refuses what some front-ends send (User-Mode Linux pads its memory table) and keeps to
//! itself the socket on which we tell the front-end of a new size; and it ends without a word where a message
//! that wants a reply is not as it should be. So each message is taken whole
//! here, mended, and handed to the crate through a socket pair; its reply goes the same way back.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::Stops;
use super::handover::Message;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// VHOST_USER_SET_OWNER, VHOST_USER_SET_MEM_TABLE, VHOST_USER_SET_LOG_FD, VHOST_USER_SET_PROTOCOL_FEATURES and
/// VHOST_USER_SET_SLAVE_REQ_FD by number (vhost-user.rst).
const SET_OWNER: u32 = 3;
const SET_MEMORY_TABLE: u32 = 5;
const SET_LOG_FD: u32 = 7;
pub(super) const SET_PROTOCOL_FEATURES: u32 = 16;
const SET_REQUEST_SOCKET: u32 = 21;
/// Messages whose reply is something else than whether they were taken, of which only the handler knows: the
/// GET_ ones, SET_LOG_BASE, SET_DEVICE_STATE_FD and CHECK_DEVICE_STATE.
pub(super) const OTHER_REPLY: [u32; 12] = [1, 6, 11, 15, 17, 24, 31, 36, 40, 41, 42, 43];
/// VHOST_USER_PROTOCOL_F_REPLY_ACK.
const REPLY_ACK: u64 = 1 << 3;
/// A message's flags: version 1, a reply, and that one is wanted.
const VERSION: u32 = 1;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
/// A message: request, flags, size of the payload; then the payload.
const HEADER: usize = 12;
const MOST_PAYLOAD: usize = 4096;
const MOST_FILES: usize = 32;
/// A memory table: count, padding; then regions.
const TABLE_HEADER: usize = 8;
const REGION: usize = 32;
/// A front-end whose message is not whole after this is given up.
const PATIENCE: Duration = Duration::from_secs(10);

/// One that the server waits for as it stops, so that all of its disks do, has no more than this.
const LAST: Duration = Duration::from_secs(1);

/// How long a front-end is waited for.
struct Wait<'a> {
    until: Instant,
    stops: Stops<'a>,
    stopped: bool,
}

impl Wait<'_> {
    fn new(patience: Duration, stops: Stops<'_>) -> Wait<'_> {
        Wait { until: Instant::now() + patience, stops, stopped: false }
    }

    /// Until it has sent something, or takes something.
    fn wait(&mut self, front_end: &UnixStream, what: PollFlags) -> io::Result<()> {
        let slow = || io::Error::new(io::ErrorKind::TimedOut, "its message comes too slowly");
        loop {
            let left = self.until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(slow());
            }
            let left = Timespec::try_from(left).map_err(io::Error::other)?;
            let [stop, failed] = self.stops.map(|stop| PollFd::new(stop, PollFlags::IN));
            let mut fds = [PollFd::new(front_end, what), stop, failed];
            let looked_at = if self.stopped { 1 } else { fds.len() };
            match poll(&mut fds[..looked_at], Some(&left)) {
                Ok(0) => return Err(slow()),
                // First: what comes byte by byte is always there.
                Ok(_) if fds[1..].iter().any(|stop| !stop.revents().is_empty()) => {
                    self.stopped = true;
                    self.until = self.until.min(Instant::now() + LAST);
                }
                Ok(_) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// The two ends.
pub(crate) struct Relay {
    front_end: UnixStream,
    handler: UnixStream,
    patience: Duration,
    /// Whether messages that want a reply get one.
    acks: bool,
    /// The message in flight, where it wants one.
    wants_reply: Option<u32>,
}

impl Relay {
    /// A relay for a connection, and the socket the handler is to use.
    pub(crate) fn new(front_end: UnixStream) -> io::Result<(Relay, UnixStream)> {
        front_end.set_nonblocking(false)?;
        let (handler, theirs) = UnixStream::pair()?;
        Ok((
            Relay { front_end, handler, patience: PATIENCE, acks: false, wants_reply: None },
            theirs,
        ))
    }

    pub(crate) fn front_end(&self) -> &UnixStream {
        &self.front_end
    }

    /// Hand one message to the handler; false at the end of the stream. A socket for our own
    /// requests that came with it is kept in `requests`. Once a stop is raised the rest of it is waited for no longer than
    /// [`LAST`].
    pub(crate) fn forward_message(
        &mut self,
        requests: &mut Option<OwnedFd>,
        stops: Stops<'_>,
    ) -> io::Result<bool> {
        let mut message = [0; HEADER];
        let (mut wait, mut files) = (Wait::new(self.patience, stops), Vec::new());
        if !self.fill(&mut message, &mut files, &mut wait)? {
            return Ok(false);
        }
        let word = |at: usize| u32::from_ne_bytes([0, 1, 2, 3].map(|i| message[at + i]));
        let (request, flags, size) = (word(0), word(4), word(8) as usize);
        if size > MOST_PAYLOAD {
            let text = format!("message {request} has {size} bytes of payload");
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        let mut payload = vec![0; size];
        let mut beside = Vec::new();
        if size > 0 && !self.fill(&mut payload, &mut beside, &mut wait)? {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if let (SET_PROTOCOL_FEATURES, Some(bits)) = (request, payload.first_chunk()) {
            self.acks = u64::from_ne_bytes(*bits) & REPLY_ACK != 0;
        }
        let wants = self.acks && flags & NEED_REPLY != 0 && !OTHER_REPLY.contains(&request);
        self.wants_reply = wants.then_some(request);
        if request == SET_MEMORY_TABLE {
            trim_table(&mut payload);
        }
        // The crate does not know it. The descriptor is one that a back-end may signal when it has logged something;
        // this one does not, and does nothing else either.
        if (request, files.len(), size) == (SET_LOG_FD, 1, 8) {
            message[..4].copy_from_slice(&SET_OWNER.to_ne_bytes());
            message[4..8].copy_from_slice(&(flags & !NEED_REPLY).to_ne_bytes());
            return self.pass(message, &[], &[]);
        }
        let [file] = &files[..] else {
            return self.pass(message, &payload, &files);
        };
        if request == SET_REQUEST_SOCKET {
            *requests = Some(file.try_clone()?);
        }
        self.pass(message, &payload, &files)
    }

    /// Hand the handler a message that the server before this one was given. Its reply, if there is one, is let go by
    /// [`Relay::drop_reply`].
    pub(super) fn replay(&mut self, message: &Message) -> io::Result<()> {
        let Message { request, payload, files } = message;
        if let (SET_PROTOCOL_FEATURES, Some(bits)) = (*request, payload.first_chunk()) {
            self.acks = u64::from_ne_bytes(*bits) & REPLY_ACK != 0;
        }
        let head = [*request, VERSION, payload.len() as u32].map(u32::to_ne_bytes).concat();
        send(&self.handler, &[&head[..], payload].concat(), files)
    }

    /// What the handler answered is known already.
    pub(super) fn drop_reply(&mut self) -> io::Result<()> {
        let mut reply = [0; HEADER + MOST_PAYLOAD];
        self.handler.set_nonblocking(true)?;
        let got = loop {
            match receive(&self.handler, &mut reply, &mut Vec::new()) {
                Ok(0) => break Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        self.handler.set_nonblocking(false)?;
        got
    }

    /// Receive as much as there is room for; false where the stream ends before it.
    fn fill(
        &self,
        bytes: &mut [u8],
        files: &mut Vec<OwnedFd>,
        wait: &mut Wait<'_>,
    ) -> io::Result<bool> {
        let mut got = 0;
        while got < bytes.len() {
            wait.wait(&self.front_end, PollFlags::IN)?;
            match receive(&self.front_end, &mut bytes[got..], files) {
                Ok(0) if got == 0 => return Ok(false),
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                // No message has more, however it is cut.
                Ok(_) if files.len() > MOST_FILES => {
                    let text = format!("a message comes with more than {MOST_FILES} descriptors");
                    return Err(io::Error::new(io::ErrorKind::InvalidData, text));
                }
                Ok(n) => got += n,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    fn pass(
        &self,
        mut header: [u8; HEADER],
        payload: &[u8],
        files: &[OwnedFd],
    ) -> io::Result<bool> {
        header[8..12].copy_from_slice(&(payload.len() as u32).to_ne_bytes());
        send(&self.handler, &[&header[..], payload].concat(), files)?;
        Ok(true)
    }

    /// Hand back what the handler answered. Where that is nothing, and the front-end wants to know, it is told
    /// whether the message was `taken`.
    pub(crate) fn forward_reply(&mut self, taken: bool, stops: Stops<'_>) -> io::Result<()> {
        let mut wait = Wait::new(self.patience, stops);
        let mut files = Vec::new();
        let mut reply = [0; HEADER + MOST_PAYLOAD];
        loop {
            self.handler.set_nonblocking(true)?;
            let got = receive(&self.handler, &mut reply, &mut files);
            self.handler.set_nonblocking(false)?;
            match got {
                Ok(0) => break,
                Ok(n) => {
                    self.wants_reply = None;
                    self.answer(&reply[..n], &std::mem::take(&mut files), &mut wait)?;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        let Some(request) = self.wants_reply.take() else { return Ok(()) };
        let head = [request, VERSION | REPLY, 8].map(u32::to_ne_bytes).concat();
        let reply = [head, u64::from(!taken).to_ne_bytes().to_vec()].concat();
        self.answer(&reply, &[], &mut wait)
    }

    fn answer(&self, bytes: &[u8], files: &[OwnedFd], wait: &mut Wait<'_>) -> io::Result<()> {
        let full = || wait.wait(&self.front_end, PollFlags::OUT);
        send_or(&self.front_end, bytes, files, SendFlags::DONTWAIT, full)
    }
}

/// Cut a memory table to the regions it says it has.
fn trim_table(payload: &mut Vec<u8>) {
    if let Some(count) = payload.first_chunk::<4>() {
        let regions = u32::from_ne_bytes(*count) as usize;
        let len = regions.saturating_mul(REGION).saturating_add(TABLE_HEADER);
        payload.truncate(len);
    }
}

fn receive(from: impl AsFd, bytes: &mut [u8], files: &mut Vec<OwnedFd>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FILES))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = [IoSliceMut::new(bytes)];
    let message = loop {
        match recvmsg(&from, &mut bytes, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => {}
            end => break end?,
        }
    };
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            files.extend(rights);
        }
    }
    Ok(message.bytes)
}

pub(super) fn send(to: impl AsFd, bytes: &[u8], files: &[OwnedFd]) -> io::Result<()> {
    let full = || Err(io::ErrorKind::WouldBlock.into());
    send_or(to, bytes, files, SendFlags::empty(), full)
}

/// Where there is no room, `full` says whether to go on.
fn send_or(
    to: impl AsFd,
    mut bytes: &[u8],
    files: &[OwnedFd],
    flags: SendFlags,
    mut full: impl FnMut() -> io::Result<()>,
) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FILES))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let fds: Vec<_> = files.iter().map(AsFd::as_fd).collect();
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "too many descriptors"));
    }
    while !bytes.is_empty() {
        let sent =
            sendmsg(&to, &[IoSlice::new(bytes)], &mut ancillary, flags | SendFlags::NOSIGNAL);
        match sent {
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::AGAIN) => full()?,
            sent => {
                bytes = &bytes[sent?..];
                ancillary.clear();
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

    use crate::Stop;

    /// All disks of a server stand still as it stops: half a message is not waited for as long as at other times.
    #[test]
    fn half_a_message_is_not_waited_for_once_the_server_stops() {
        let (mut client, ours) = UnixStream::pair().expect("a socket pair");
        let (mut relay, _handler) = Relay::new(ours).expect("a relay");
        relay.patience = Duration::from_secs(u64::from(u32::MAX));
        client.write_all(&[1; 6]).expect("half a head");
        let [stop, failed] = [(); 2].map(|()| Stop::new().expect("a stop"));
        stop.raise();
        let (told, end) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let stops = [&stop, &failed];
            let error = relay.forward_message(&mut None, stops).map(drop);
            // Nor one who takes no replies.
            relay.front_end.set_nonblocking(true).expect("its flags");
            while (&relay.front_end).write(&[0; 4096]).is_ok() {}
            while (&relay.front_end).write(&[0]).is_ok() {}
            relay.front_end.set_nonblocking(false).expect("its flags");
            relay.wants_reply = Some(SET_OWNER);
            let reply = relay.forward_reply(true, stops);
            let _ = told.send([error, reply].map(|end| end.map_err(|error| error.kind())));
        });
        let ends = end.recv_timeout(Duration::from_secs(60)).expect("it is let go");
        assert_eq!(ends, [Err(io::ErrorKind::TimedOut); 2]);
        drop(client);
    }

    #[test]
    fn descriptors_that_come_byte_by_byte_are_no_more_than_those_of_a_message() {
        let many: Vec<OwnedFd> = (0..MOST_FILES)
            .map(|_| OwnedFd::from(std::fs::File::open("/dev/null").expect("it is everywhere")))
            .collect();
        let [stop, failed] = [(); 2].map(|()| Stop::new().expect("a stop"));
        // Within the head, and behind it.
        for first in [1, HEADER] {
            let (client, ours) = UnixStream::pair().expect("a socket pair");
            let (mut relay, _handler) = Relay::new(ours).expect("a relay");
            let head = [1u32, 1, 64].map(u32::to_ne_bytes).concat();
            send(&client, &head[..first], &[]).expect("the head");
            for _ in 0..4 {
                send(&client, &[0], &many).expect("a byte with descriptors");
            }
            drop(client);
            let end = relay.forward_message(&mut None, [&stop, &failed]);
            let error = end.map(drop).expect_err("it was let through");
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");
            // The kernel drops what nobody has received.
            let mut rest = Vec::new();
            let left = receive(&relay.front_end, &mut [0; 64], &mut rest).expect("the rest");
            assert_eq!((left > 0, rest.len() <= MOST_FILES), (true, true));
        }
    }

    #[test]
    fn a_message_that_comes_too_slowly_is_given_up() {
        let (mut client, ours) = UnixStream::pair().expect("a socket pair");
        let (mut relay, _handler) = Relay::new(ours).expect("a relay");
        relay.patience = Duration::from_millis(300);
        let over = AtomicBool::new(false);
        std::thread::scope(|all| {
            // Always well within the patience for one piece; all of it would take minutes.
            all.spawn(|| {
                let head = [1u32, 1, MOST_PAYLOAD as u32].map(u32::to_ne_bytes).concat();
                client.write_all(&head).expect("the head");
                for _ in 0..MOST_PAYLOAD - 1 {
                    std::thread::sleep(Duration::from_millis(30));
                    if over.load(SeqCst) {
                        return;
                    }
                    client.write_all(&[0]).expect("a byte");
                }
            });
            let [stop, failed] = [(); 2].map(|()| Stop::new().expect("a stop"));
            let end = relay.forward_message(&mut None, [&stop, &failed]);
            assert!(!over.swap(true, SeqCst));
            let error = end.map(|_| ()).expect_err("it was let through");
            assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
        });
    }
}
