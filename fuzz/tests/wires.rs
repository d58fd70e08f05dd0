//! Messages of arbitrary bytes where a wire brings them: the FUSE device, a vhost-user front-end, the region of
//! requests in flight that it keeps.

use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::Duration;

use bolero::{TypeGenerator, check};
use ringtap_export::Stop;
use ringtap_export::fuse::testing::{Shows, understand_message};
use ringtap_export::vhost_user::testing::take_up;
use ringtap_export::vhost_user::{Options, Server};
use ringtap_image::{CacheMode, Null};
use ringtap_vbd::Vbd;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

fn nothing() -> Vbd {
    Vbd::new(Box::new(Null::new(1 << 20, false)), CacheMode::None)
}

/// The input: how the file is shown, then a message from its header on. Where the first byte's fourth bit is not
/// set the header is made right: its length, and the one file there is.
#[test]
fn fuse_messages() {
    let vbd = std::panic::AssertUnwindSafe(nothing());
    check!().with_max_len(300).for_each(|input: &[u8]| {
        let [flags, message @ ..] = input else { return };
        let mut message = message.to_vec();
        if flags & 8 == 0 && message.len() >= 40 {
            let len = message.len() as u32;
            message[..4].copy_from_slice(&len.to_ne_bytes());
            message[16..24].copy_from_slice(&1u64.to_ne_bytes());
        }
        let shows =
            Shows { read_only: flags & 1 != 0, growable: flags & 2 != 0, honest: flags & 4 != 0 };
        understand_message(&message, &vbd, shows);
    });
}

/// The input: queues, entries, which queue, how long it is, what its used index says; then the region.
#[test]
fn inflight_regions() {
    check!().with_max_len(5000).for_each(|input: &[u8]| {
        let [queues, entries, index, size, low, high, region @ ..] = input else { return };
        let mut region = region.to_vec();
        let entries = 1u16 << (entries % 12);
        // Mostly as long as it says.
        if queues & 128 == 0 {
            let wanted = (16 + 16 * usize::from(entries)).next_multiple_of(64);
            region.resize((wanted * usize::from(queues % 4)).min(1 << 20), 0);
        }
        let size = 1u16 << (size % 12);
        let used = u16::from_le_bytes([*low, *high]);
        take_up(&region, (u16::from(queues % 4), entries), u16::from(index % 5), size, used);
    });
}

/// A message that is nearly right.
#[derive(Debug, TypeGenerator)]
struct Message {
    #[generator(0..46)]
    request: u8,
    /// The version, whether it is a reply, whether it wants one.
    #[generator(0..16)]
    flags: u8,
    payload: Payload,
    /// Descriptors that come along, and which kind each is.
    #[generator(0..10)]
    fds: u8,
    kinds: u16,
    /// The length that is said, where it is not that of the payload.
    wrong_len: Option<u16>,
}

#[derive(Debug, TypeGenerator)]
enum Payload {
    Bytes(Vec<u8>),
    Number(u64),
    /// A queue's index, mostly one there is, and a number.
    State(#[generator(0..5)] u8, u32),
    /// Regions of memory, at places that are mostly near.
    Memory(#[generator(0..10)] u8, [Region; 3]),
    /// One region, as in ADD_MEM_REG.
    Region(Region),
    /// A queue's addresses.
    Rings(#[generator(0..5)] u8, [u16; 3]),
    Config(u16, u16, Vec<u8>),
    Inflight(u16, u16, #[generator(0..5)] u8, u16),
}

#[derive(Clone, Copy, Debug, TypeGenerator)]
struct Region {
    guest: u32,
    len: u32,
    user: u32,
    offset: u16,
    near: bool,
}

impl Region {
    fn write(&self, to: &mut Vec<u8>) {
        let page = |value: u32| u64::from(value) % 64 * 4096;
        let (guest, len, user, offset) = match self.near {
            true => (page(self.guest), page(self.len % 16), page(self.user) + (1 << 20), 0),
            false => (self.guest.into(), self.len.into(), self.user.into(), self.offset.into()),
        };
        for word in [guest, len, user, offset] {
            to.extend(word.to_ne_bytes());
        }
    }
}

impl Payload {
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        match self {
            Payload::Bytes(given) => bytes.extend(given.iter().take(4096)),
            Payload::Number(number) => bytes.extend(number.to_ne_bytes()),
            Payload::State(queue, number) => {
                bytes.extend(u32::from(*queue).to_ne_bytes());
                bytes.extend(number.to_ne_bytes());
            }
            Payload::Memory(count, regions) => {
                bytes.extend(u32::from(*count).to_ne_bytes());
                bytes.extend(0u32.to_ne_bytes());
                for region in regions.iter().cycle().take((*count).into()) {
                    region.write(&mut bytes);
                }
            }
            Payload::Region(region) => {
                bytes.extend(0u64.to_ne_bytes());
                region.write(&mut bytes);
            }
            Payload::Rings(queue, places) => {
                bytes.extend(u32::from(*queue).to_ne_bytes());
                bytes.extend(0u32.to_ne_bytes());
                let [descriptors, used, available] =
                    places.map(|at| (1 << 20) + u64::from(at) * 16);
                for word in [descriptors, used, available, 0] {
                    bytes.extend(word.to_ne_bytes());
                }
            }
            Payload::Config(offset, size, given) => {
                for word in [u32::from(*offset), u32::from(*size), 0] {
                    bytes.extend(word.to_ne_bytes());
                }
                bytes.extend(given.iter().take(256));
            }
            Payload::Inflight(size, offset, queues, entries) => {
                bytes.extend(u64::from(*size).to_ne_bytes());
                bytes.extend(u64::from(*offset).to_ne_bytes());
                bytes.extend(u16::from(*queues).to_ne_bytes());
                bytes.extend(entries.to_ne_bytes());
            }
        }
        bytes
    }
}

/// A server on a null disk, for as long as the test runs.
struct Live {
    socket: PathBuf,
    stop: Stop,
    thread: Option<std::thread::JoinHandle<()>>,
    _dir: tempfile::TempDir,
}

impl Live {
    fn new() -> Live {
        let dir = tempfile::TempDir::new().expect("a folder");
        let socket = dir.path().join("vhost");
        let listener = UnixListener::bind(&socket).expect("a socket");
        let options = Options { queues: 4, ..Options::default() };
        let server = Server::new(listener, nothing().into(), options);
        let stop = Stop::new().expect("an eventfd");
        let theirs = stop.clone();
        let thread = std::thread::spawn(move || server.serve(&theirs).expect("the server"));
        Live { socket, stop, thread: Some(thread), _dir: dir }
    }

    fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(&self.socket).expect("a connection");
        let limit = Some(Duration::from_secs(30));
        stream.set_read_timeout(limit).expect("a timeout");
        stream.set_write_timeout(limit).expect("a timeout");
        stream
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.stop.raise();
        if let Some(thread) = self.thread.take() {
            let end = thread.join();
            if !std::thread::panicking() {
                end.expect("the server's thread");
            }
        }
    }
}

fn send(stream: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    }
    sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL).is_ok()
}

fn header(request: u8, flags: u8, len: u32) -> Vec<u8> {
    [u32::from(request), u32::from(flags), len].iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// It answers the next front-end that asks for its features.
fn still_serves(live: &Live) {
    let mut stream = live.connect();
    assert!(send(&stream, &header(1, 1, 0), &[]));
    let mut answer = [0; 20];
    stream.read_exact(&mut answer).expect("the features");
    assert_eq!(answer[..4], 1u32.to_ne_bytes());
}

#[test]
fn a_vhost_user_server_of_messages() {
    let live = Live::new();
    let memory = memfd_create("guest", MemfdFlags::CLOEXEC).expect("memory");
    ftruncate(&memory, 64 << 10).expect("its size");
    let event = eventfd(0, EventfdFlags::CLOEXEC).expect("an event");
    let zeros: OwnedFd = std::fs::File::open("/dev/zero").expect("zeros").into();
    let all = [&memory, &event, &zeros].map(AsFd::as_fd);
    let served = std::panic::AssertUnwindSafe((&live, all));
    check!().with_iterations(300).with_type::<Vec<Message>>().for_each(move |messages| {
        let (live, all) = *served;
        let mut stream = live.connect();
        for message in messages.iter().take(40) {
            let payload = message.payload.bytes();
            let len = message.wrong_len.map_or(payload.len() as u32, u32::from);
            let mut bytes = header(message.request, message.flags, len);
            bytes.extend(payload);
            let kind = |at: u8| all[usize::from(message.kinds >> (at % 8) & 3) % 3];
            let fds: Vec<BorrowedFd<'_>> = (0..message.fds).map(kind).collect();
            if !send(&stream, &bytes, &fds) {
                break;
            }
        }
        let _gone = stream.shutdown(std::net::Shutdown::Write);
        // Until the server lets go, which it does at once.
        let mut heard = Vec::new();
        if let Err(error) = stream.read_to_end(&mut heard) {
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
        }
    });
    still_serves(&live);
}
