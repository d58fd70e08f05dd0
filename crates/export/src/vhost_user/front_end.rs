//! A front-end made of messages, against the whole server.
//!
//! Source of the numbers: QEMU, docs/interop/vhost-user.rst, "Front-end message types".

use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ringtap_image::{CacheMode, Image, Null};
use ringtap_vbd::sabotage::Trapped;
use rustix::event::{EventfdFlags, eventfd};
use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_T_FLUSH,
};

use super::chains::*;
use super::testing::{ADDRESSES, GUEST, GuestRing, REGION, USER};
use super::{Error, Options, Residence, Server, relay};
use crate::Stop;

const GET_FEATURES: u32 = 1;
pub(super) const SET_FEATURES: u32 = 2;
const SET_OWNER: u32 = 3;
const SET_MEM_TABLE: u32 = 5;
const SET_VRING_NUM: u32 = 8;
pub(super) const SET_VRING_ADDR: u32 = 9;
pub(super) const SET_VRING_BASE: u32 = 10;
const SET_VRING_KICK: u32 = 12;
const SET_VRING_CALL: u32 = 13;
pub(super) const SET_VRING_ERR: u32 = 14;
const GET_PROTOCOL_FEATURES: u32 = 15;
const SET_PROTOCOL_FEATURES: u32 = 16;
const SET_VRING_ENABLE: u32 = 18;
const GET_MAX_MEM_SLOTS: u32 = 36;
pub(super) const ADD_MEM_REG: u32 = 37;
const REM_MEM_REG: u32 = 38;

const VERSION: u32 = 1;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;

/// VHOST_USER_F_PROTOCOL_FEATURES and VIRTIO_F_VERSION_1.
pub(super) const FEATURES: u64 = 1 << 30 | 1 << 32;
/// LOG_SHMFD, REPLY_ACK and CONFIGURE_MEM_SLOTS.
const PROTOCOL_FEATURES: u64 = 1 << 1 | 1 << 3 | 1 << 15;

/// A server of a null disk, and a connection on which replies to everything are agreed on.
pub(super) struct FrontEnd {
    stream: UnixStream,
    stop: Stop,
    server: Option<JoinHandle<Result<(), Error>>>,
}

pub(super) fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

pub(super) fn vring(index: u32, number: u32) -> Vec<u8> {
    [index.to_ne_bytes(), number.to_ne_bytes()].concat()
}

/// The description of a region of a [`GuestRing`].
pub(super) fn region(number: u64) -> [u64; 4] {
    let offset = number * REGION;
    [GUEST + offset, REGION, USER[number as usize], offset]
}

impl FrontEnd {
    pub(super) fn connect() -> FrontEnd {
        FrontEnd::connect_only().agree()
    }

    fn agree(self) -> FrontEnd {
        let mut front_end = self;
        front_end.send(SET_OWNER, 0, &[], &[]);
        assert_eq!(front_end.ask(GET_FEATURES) & FEATURES, FEATURES);
        front_end.send(SET_FEATURES, 0, &words(&[FEATURES]), &[]);
        let offered = front_end.ask(GET_PROTOCOL_FEATURES);
        assert_eq!(offered & PROTOCOL_FEATURES, PROTOCOL_FEATURES);
        front_end.send(SET_PROTOCOL_FEATURES, 0, &words(&[PROTOCOL_FEATURES]), &[]);
        front_end
    }

    /// Before the first message.
    fn connect_only() -> FrontEnd {
        FrontEnd::connect_to(Box::new(Null::new(1 << 20, false)))
    }

    /// Before the first message to a server of that image.
    fn connect_to(image: Box<dyn Image>) -> FrontEnd {
        FrontEnd::connect_by(image, |server| server)
    }

    /// To a disk whose image comes and goes.
    pub(super) fn connect_to_resident(residence: Arc<dyn Residence>) -> FrontEnd {
        let image = Box::new(Null::new(1 << 20, false));
        FrontEnd::connect_by(image, |server| server.with_residence(residence)).agree()
    }

    fn connect_by(image: Box<dyn Image>, with: impl FnOnce(Server) -> Server) -> FrontEnd {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).expect("a socket");
        let stream = UnixStream::connect(&path).expect("a connection");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
        let vbd = ringtap_vbd::Disk::from(ringtap_vbd::Vbd::new(image, CacheMode::None));
        let stop = Stop::new().expect("an eventfd");
        let theirs = stop.clone();
        let server = with(Server::new(listener, vbd, Options::default()));
        let server = Some(std::thread::spawn(move || server.serve(&theirs)));
        FrontEnd { stream, stop, server }
    }

    pub(super) fn send(&mut self, request: u32, flags: u32, payload: &[u8], files: &[OwnedFd]) {
        let head = [request, VERSION | flags, payload.len() as u32];
        let mut bytes: Vec<u8> = head.iter().flat_map(|word| word.to_ne_bytes()).collect();
        bytes.extend(payload);
        relay::send(&self.stream, &bytes, files).expect("sent");
    }

    /// The number that a reply carries.
    fn reply(&mut self, request: u32) -> u64 {
        self.reply_of::<1>(request)[0]
    }

    /// Its numbers.
    pub(super) fn reply_of<const N: usize>(&mut self, request: u32) -> [u64; N] {
        let mut reply = vec![0; 12 + 8 * N];
        self.stream.read_exact(&mut reply).expect("a reply");
        let word = |at: usize| u32::from_ne_bytes([0, 1, 2, 3].map(|i| reply[at + i]));
        assert_eq!((word(0), word(4), word(8)), (request, VERSION | REPLY, 8 * N as u32));
        std::array::from_fn(|i| {
            u64::from_ne_bytes(*reply[12 + 8 * i..].first_chunk().expect("eight bytes"))
        })
    }

    pub(super) fn ask(&mut self, request: u32) -> u64 {
        self.send(request, 0, &[], &[]);
        self.reply(request)
    }

    /// Whether a message was taken, by the reply that was asked for.
    pub(super) fn tell(&mut self, request: u32, payload: &[u8], files: &[OwnedFd]) -> bool {
        self.send(request, NEED_REPLY, payload, files);
        self.reply(request) == 0
    }

    /// Start queue 0 of a guest whose rings and memory are as a [`GuestRing`] has them; gives its kick.
    pub(super) fn start_queue(&mut self, guest: &GuestRing) -> OwnedFd {
        let kick = eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
        self.share(guest);
        self.place_queue();
        self.run_queue(kick)
    }

    pub(super) fn run_queue(&mut self, kick: OwnedFd) -> OwnedFd {
        let theirs = [kick.try_clone().expect("a descriptor")];
        assert!(self.tell(SET_VRING_KICK, &words(&[0]), &theirs));
        assert!(self.tell(SET_VRING_ENABLE, &vring(0, 1), &[]));
        kick
    }

    pub(super) fn share(&mut self, guest: &GuestRing) {
        let memory = [OwnedFd::from(guest.file.try_clone().expect("a descriptor"))];
        let one = [vring(1, 0), words(&region(0))].concat();
        assert!(self.tell(SET_MEM_TABLE, &one, &memory));
    }

    pub(super) fn place_queue(&mut self) {
        assert!(self.tell(SET_VRING_NUM, &vring(0, 16), &[]));
        assert!(self.tell(SET_VRING_BASE, &vring(0, 0), &[]));
        let at = [0, ADDRESSES.descriptors, ADDRESSES.used, ADDRESSES.available, 0];
        assert!(self.tell(SET_VRING_ADDR, &words(&at), &[]));
    }

    pub(super) fn is_let_go(&mut self) -> bool {
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
    let mut front_end = FrontEnd::connect();
    assert!(front_end.ask(GET_MAX_MEM_SLOTS) >= 32);
    let kick = front_end.start_queue(&guest);

    // Without a call descriptor the front-end polls.
    let ask = || answers(&guest, &kick, status).expect("an answer");
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

/// The status that a guest's chain 0 is answered with; none within a minute.
pub(super) fn answers(guest: &GuestRing, kick: &OwnedFd, status: u64) -> Option<u32> {
    let used = guest.used().wrapping_add(1);
    guest.write(status, &[0xff]);
    guest.make_available(0);
    rustix::io::write(kick, &1u64.to_ne_bytes()).expect("a kick");
    let began = Instant::now();
    while guest.used() != used {
        if began.elapsed() > Duration::from_secs(60) {
            return None;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Some(u32::from(guest.read(status, 1)[0]))
}

#[test]
fn whoever_wants_a_reply_gets_one() {
    let guest = GuestRing::new(&[], 16, &[]);
    let memory = || [OwnedFd::from(guest.file.try_clone().expect("a descriptor"))];
    let first = words(&[&[0][..], &region(0)[..]].concat());
    assert!(FrontEnd::connect().tell(ADD_MEM_REG, &first, &memory()));
    // One that knows the features from the last time, and does not ask for them.
    let mut again = FrontEnd::connect_only();
    again.send(SET_PROTOCOL_FEATURES, 0, &words(&[PROTOCOL_FEATURES]), &[]);
    again.send(SET_FEATURES, 0, &words(&[FEATURES]), &[]);
    assert!(again.tell(ADD_MEM_REG, &first, &memory()));
    assert!(again.tell(REM_MEM_REG, &first, &[]));
    // What cannot be taken: without its file, with two, of no size, past the end of the file, cut short, of no
    // known kind.
    let of = |size: u64, offset: u64| words(&[0, GUEST, size, USER[0], offset]);
    let two = [memory(), memory()].map(|[file]| file);
    let bad: [(u32, Vec<u8>, &[OwnedFd]); 6] = [
        (ADD_MEM_REG, first.clone(), &[]),
        (ADD_MEM_REG, first.clone(), &two),
        (ADD_MEM_REG, of(0, 0), &two[..1]),
        (ADD_MEM_REG, of(REGION, 2 * REGION), &two[..1]),
        (ADD_MEM_REG, first[..32].to_vec(), &two[..1]),
        (99, first.clone(), &[]),
    ];
    for (request, payload, files) in &bad {
        let mut front_end = FrontEnd::connect();
        assert!(!front_end.tell(*request, payload, files), "{request} {payload:?}");
        assert!(front_end.is_let_go());
    }
    // A value is not mistaken for that.
    let mut front_end = FrontEnd::connect();
    front_end.send(GET_MAX_MEM_SLOTS, NEED_REPLY, &[0; 8], &[]);
    assert!(front_end.is_let_go());
}

#[test]
fn what_always_gives_something_is_no_kick() {
    let guest = GuestRing::new(&[], 16, &[]);
    let open = |path: &str| OwnedFd::from(std::fs::File::open(path).expect("it is everywhere"));
    let (end, _other) = rustix::pipe::pipe().expect("a pipe");
    let event = eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
    for (kick, may) in [
        (open("/dev/zero"), false),
        (open("/proc/self/exe"), false),
        (open("/"), false),
        (tempfile::tempfile().expect("a file").into(), false),
        (end, true),
        (event, true),
    ] {
        let mut front_end = FrontEnd::connect();
        front_end.share(&guest);
        front_end.place_queue();
        assert_eq!(front_end.tell(SET_VRING_KICK, &words(&[0]), &[kick]), may);
        assert_eq!(may, may && front_end.tell(SET_VRING_ENABLE, &vring(0, 1), &[]));
    }
}

#[test]
fn what_may_never_take_a_signal_is_not_signalled() {
    let open = |path: &str| OwnedFd::from(std::fs::File::open(path).expect("it is everywhere"));
    let files: [(fn() -> OwnedFd, bool); 3] = [
        (|| tempfile::tempfile().expect("a file").into(), false),
        (|| rustix::pipe::pipe().expect("a pipe").1, true),
        (|| eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd"), true),
    ];
    for request in [SET_VRING_CALL, SET_VRING_ERR] {
        for (file, may) in files {
            let mut front_end = FrontEnd::connect();
            assert_eq!(front_end.tell(request, &words(&[0]), &[file()]), may, "{request}");
        }
        assert!(!FrontEnd::connect().tell(request, &words(&[0]), &[open("/dev/zero")]));
    }
}

/// Regions that one front-end may have.
const MOST: u64 = 509;

#[test]
fn one_of_32_front_ends_at_their_limit_truncates_its_memory_and_the_others_go_on() {
    const FRONT_ENDS: usize = 32;
    let flush = [Entry(HEADER, 16, NEXT, 1), Entry(HEADER + 0x100, 1, WRITE, 0)];
    let page = |number: u64| [GUEST + (number << 20), 4096, USER[0] + (number << 20), 0];
    let add = |front_end: &mut FrontEnd, guest: &GuestRing, region: [u64; 4]| {
        let memory = [OwnedFd::from(guest.file.try_clone().expect("a descriptor"))];
        front_end.tell(ADD_MEM_REG, &words(&[&[0][..], &region[..]].concat()), &memory)
    };
    let errors = eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
    // That of the rings comes last, after all that others have.
    let mut all: Vec<_> = (0..FRONT_ENDS)
        .map(|_| {
            let guest = GuestRing::new(&with_header(&flush, VIRTIO_BLK_T_FLUSH), 16, &[]);
            let mut front_end = FrontEnd::connect();
            for number in 1..MOST {
                assert!(add(&mut front_end, &guest, page(number)), "{number}");
            }
            assert!(add(&mut front_end, &guest, region(0)));
            front_end.place_queue();
            let theirs = [errors.try_clone().expect("a descriptor")];
            assert!(front_end.tell(SET_VRING_ERR, &words(&[0]), &theirs));
            let kick = eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
            let kick = front_end.run_queue(kick);
            (front_end, guest, kick)
        })
        .collect();
    let ask = |all: &[(FrontEnd, GuestRing, OwnedFd)]| {
        for (_, guest, kick) in all {
            assert_eq!(answers(guest, kick, HEADER + 0x100), Some(VIRTIO_BLK_S_OK));
        }
    };
    ask(&all);
    let (mut front_end, broken, kick) = all.pop().expect("the last of them");
    rustix::fs::ftruncate(&broken.file, 0).expect("cut");
    rustix::io::write(&kick, &1u64.to_ne_bytes()).expect("a kick");
    // Its queue, and nothing else, is beyond serving.
    let mut told = [0; 8];
    rustix::io::read(&errors, &mut told).expect("its front-end is told");
    ask(&all);
    assert!(front_end.tell(SET_VRING_NUM, &vring(1, 16), &[]));
    ask(&all);
    // One more than they may have.
    let (mut front_end, guest, _) = all.pop().expect("another");
    assert!(!add(&mut front_end, &guest, page(MOST)));
    assert!(front_end.is_let_go());
    ask(&all);
}

#[test]
fn a_panic_is_an_error_to_the_guest_and_ends_the_connection() {
    let status = HEADER + 0x100;
    let read =
        [Entry(HEADER, 16, NEXT, 1), Entry(DATA, 512, NEXT | WRITE, 2), Entry(status, 1, WRITE, 0)];
    let guest = GuestRing::new(&with_header(&read, 0), 16, &[]);
    let panics = Arc::new(AtomicBool::new(false));
    let theirs = panics.clone();
    let trap = move |step, _| assert!(step != "map" || !theirs.load(SeqCst), "as the test has it");
    let image = Trapped::boxed(Box::new(Null::new(1 << 20, false)), Arc::new(trap));
    let mut front_end = FrontEnd::connect_to(image).agree();
    let kick = front_end.start_queue(&guest);
    let second = words(&[&[0][..], &region(1)[..]].concat());
    let memory = [OwnedFd::from(guest.file.try_clone().expect("a descriptor"))];
    assert!(front_end.tell(ADD_MEM_REG, &second, &memory));
    assert_eq!(answers(&guest, &kick, status), Some(VIRTIO_BLK_S_OK));
    panics.store(true, SeqCst);
    assert_eq!(answers(&guest, &kick, status), Some(VIRTIO_BLK_S_IOERR));
    assert!(front_end.is_let_go());
    let server = front_end.server.take().expect("the server").join().expect("no panic");
    assert!(matches!(server, Err(Error::Stopped)), "{server:?}");
}
