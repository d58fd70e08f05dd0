//! A front-end made of messages, against the whole server.
//!
//! Source of the numbers: QEMU, docs/interop/vhost-user.rst, "Front-end message types".

use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ringtap_image::{CacheMode, Null};
use ringtap_vbd::Vbd;
use rustix::event::{EventfdFlags, eventfd};
use virtio_bindings::bindings::virtio_blk::{VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK};

use super::chains::*;
use super::testing::{ADDRESSES, GUEST, GuestRing, REGION, USER};
use super::{Error, Options, Server, relay};
use crate::Stop;

const GET_FEATURES: u32 = 1;
const SET_FEATURES: u32 = 2;
const SET_OWNER: u32 = 3;
const SET_MEM_TABLE: u32 = 5;
const SET_VRING_NUM: u32 = 8;
const SET_VRING_ADDR: u32 = 9;
const SET_VRING_BASE: u32 = 10;
const SET_VRING_KICK: u32 = 12;
const GET_PROTOCOL_FEATURES: u32 = 15;
const SET_PROTOCOL_FEATURES: u32 = 16;
const SET_VRING_ENABLE: u32 = 18;
const GET_MAX_MEM_SLOTS: u32 = 36;
const ADD_MEM_REG: u32 = 37;
const REM_MEM_REG: u32 = 38;

const VERSION: u32 = 1;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;

/// VHOST_USER_F_PROTOCOL_FEATURES and VIRTIO_F_VERSION_1.
const FEATURES: u64 = 1 << 30 | 1 << 32;
/// REPLY_ACK and CONFIGURE_MEM_SLOTS.
const PROTOCOL_FEATURES: u64 = 1 << 3 | 1 << 15;

/// A server of a null disk, and a connection on which replies to everything are agreed on.
struct FrontEnd {
    stream: UnixStream,
    stop: Stop,
    server: Option<JoinHandle<Result<(), Error>>>,
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

fn vring(index: u32, number: u32) -> Vec<u8> {
    [index.to_ne_bytes(), number.to_ne_bytes()].concat()
}

/// The description of a region of a [`GuestRing`].
fn region(number: u64) -> [u64; 4] {
    let offset = number * REGION;
    [GUEST + offset, REGION, USER[number as usize], offset]
}

impl FrontEnd {
    fn connect() -> FrontEnd {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).expect("a socket");
        let stream = UnixStream::connect(&path).expect("a connection");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
        let vbd = Arc::new(Vbd::new(Box::new(Null::new(1 << 20, false)), CacheMode::None));
        let stop = Stop::new().expect("an eventfd");
        let theirs = stop.clone();
        let server = Server::new(listener, vbd, Options::default());
        let server = Some(std::thread::spawn(move || server.serve(&theirs)));
        let mut front_end = FrontEnd { stream, stop, server };
        front_end.send(SET_OWNER, 0, &[], &[]);
        assert_eq!(front_end.ask(GET_FEATURES) & FEATURES, FEATURES);
        front_end.send(SET_FEATURES, 0, &words(&[FEATURES]), &[]);
        let offered = front_end.ask(GET_PROTOCOL_FEATURES);
        assert_eq!(offered & PROTOCOL_FEATURES, PROTOCOL_FEATURES);
        front_end.send(SET_PROTOCOL_FEATURES, 0, &words(&[PROTOCOL_FEATURES]), &[]);
        front_end
    }

    fn send(&mut self, request: u32, flags: u32, payload: &[u8], files: &[OwnedFd]) {
        let head = [request, VERSION | flags, payload.len() as u32];
        let mut bytes: Vec<u8> = head.iter().flat_map(|word| word.to_ne_bytes()).collect();
        bytes.extend(payload);
        relay::send(&self.stream, &bytes, files).expect("sent");
    }

    /// The number that a reply carries.
    fn reply(&mut self, request: u32) -> u64 {
        let mut reply = [0; 20];
        self.stream.read_exact(&mut reply).expect("a reply");
        let word = |at: usize| u32::from_ne_bytes([0, 1, 2, 3].map(|i| reply[at + i]));
        assert_eq!((word(0), word(4), word(8)), (request, VERSION | REPLY, 8));
        u64::from_ne_bytes(*reply.last_chunk().expect("eight bytes"))
    }

    fn ask(&mut self, request: u32) -> u64 {
        self.send(request, 0, &[], &[]);
        self.reply(request)
    }

    /// Whether a message was taken, by the reply that was asked for.
    fn tell(&mut self, request: u32, payload: &[u8], files: &[OwnedFd]) -> bool {
        self.send(request, NEED_REPLY, payload, files);
        self.reply(request) == 0
    }

    fn is_let_go(&mut self) -> bool {
        matches!(self.stream.read(&mut [0]), Ok(0))
    }
}

impl Drop for FrontEnd {
    fn drop(&mut self) {
        self.stop.raise();
        if let Some(Err(problem)) = self.server.take().map(JoinHandle::join) {
            if !std::thread::panicking() {
                std::panic::resume_unwind(problem);
            }
        }
    }
}

#[test]
fn replies_say_whether_a_message_was_taken() {
    let mut front_end = FrontEnd::connect();
    assert!(front_end.tell(SET_VRING_NUM, &vring(0, 256), &[]));
    assert!(front_end.tell(SET_VRING_NUM, &vring(15, 1024), &[]));
    assert!(!front_end.tell(SET_VRING_NUM, &vring(0, 3), &[]));
    assert!(front_end.is_let_go());
    assert!(!FrontEnd::connect().tell(SET_VRING_NUM, &vring(16, 256), &[]), "a 17th queue");
}

#[test]
fn a_queue_without_a_size_does_not_start() {
    let guest = GuestRing::new(&[], 16, &[]);
    let memory = [OwnedFd::from(guest.file.try_clone().expect("a descriptor"))];
    let mut front_end = FrontEnd::connect();
    let one = [vring(1, 0), words(&region(0))].concat();
    assert!(front_end.tell(SET_MEM_TABLE, &one, &memory));
    let at = [0, ADDRESSES.descriptors, ADDRESSES.used, ADDRESSES.available, 0];
    assert!(front_end.tell(SET_VRING_ADDR, &words(&at), &[]));
    let kick = [eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd")];
    assert!(front_end.tell(SET_VRING_KICK, &words(&[0]), &kick));
    assert!(!front_end.tell(SET_VRING_ENABLE, &vring(0, 1), &[]));
    assert!(front_end.is_let_go());
}

#[test]
fn memory_comes_and_goes_while_a_queue_runs() {
    // The ring, the header and the status lie in the first region, the data in the second.
    let status = HEADER + 0x100;
    let read =
        [Entry(HEADER, 16, NEXT, 1), Entry(DATA, 512, NEXT | WRITE, 2), Entry(status, 1, WRITE, 0)];
    let guest = GuestRing::new(&with_header(&read, 0), 16, &[]);
    let memory = || [OwnedFd::from(guest.file.try_clone().expect("a descriptor"))];
    let kick = eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");

    let mut front_end = FrontEnd::connect();
    assert!(front_end.ask(GET_MAX_MEM_SLOTS) >= 32);
    let one = [vring(1, 0), words(&region(0))].concat();
    assert!(front_end.tell(SET_MEM_TABLE, &one, &memory()));
    assert!(front_end.tell(SET_VRING_NUM, &vring(0, 16), &[]));
    assert!(front_end.tell(SET_VRING_BASE, &vring(0, 0), &[]));
    let at = [0, ADDRESSES.descriptors, ADDRESSES.used, ADDRESSES.available, 0];
    assert!(front_end.tell(SET_VRING_ADDR, &words(&at), &[]));
    let theirs = [kick.try_clone().expect("a descriptor")];
    assert!(front_end.tell(SET_VRING_KICK, &words(&[0]), &theirs));
    assert!(front_end.tell(SET_VRING_ENABLE, &vring(0, 1), &[]));

    // Without a call descriptor the front-end polls.
    let ask = || {
        let used = guest.used().wrapping_add(1);
        guest.write(status, &[0xff]);
        guest.make_available(0);
        rustix::io::write(&kick, &1u64.to_ne_bytes()).expect("a kick");
        let began = Instant::now();
        while guest.used() != used {
            assert!(began.elapsed() < Duration::from_secs(60), "no answer");
            std::thread::sleep(Duration::from_millis(1));
        }
        u32::from(guest.read(status, 1)[0])
    };
    let second = words(&[&[0][..], &region(1)[..]].concat());
    assert_eq!(ask(), VIRTIO_BLK_S_IOERR);
    for _ in 0..20 {
        assert!(front_end.tell(ADD_MEM_REG, &second, &memory()));
        assert_eq!(ask(), VIRTIO_BLK_S_OK);
        assert!(front_end.tell(REM_MEM_REG, &second, &[]));
        assert_eq!(ask(), VIRTIO_BLK_S_IOERR);
    }
    // The ring goes, and comes back with its memory.
    let first = words(&[&[0][..], &region(0)[..]].concat());
    assert!(front_end.tell(REM_MEM_REG, &first, &[]));
    assert!(front_end.tell(ADD_MEM_REG, &first, &memory()));
    assert_eq!(ask(), VIRTIO_BLK_S_IOERR);
    assert!(!front_end.tell(REM_MEM_REG, &second, &[]), "it is gone already");
    assert!(front_end.is_let_go());
}
