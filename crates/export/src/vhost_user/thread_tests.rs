//! The thread of a queue, as its guest sees it.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use ringtap_image::{
    Boxed, CacheMode, Discard, Error, Extent, Format, Image, Info, Null, OpenOptions, Status,
};
use ringtap_io::{Io, OpenFile};
use ringtap_vbd::Vbd;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{MemfdFlags, OFlags, fcntl_setfl, ftruncate, memfd_create};
use vhost::vhost_user::message::VhostUserMemoryRegion;
use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
};

use super::chains::*;
use super::mapping::Maps;
use super::memory::{Memory, Region};
use super::request::ID_BYTES;
use super::testing::{ADDRESSES, GUEST, GuestRing, REGION};
use super::thread::{QueueThread, Start};
use crate::heard;

/// A thread at work, and the guest's ends of what it is kicked and told by.
pub(super) struct Served {
    pub(super) thread: QueueThread,
    kick: Arc<OpenFile>,
    pub(super) call: Arc<OpenFile>,
    error: Arc<OpenFile>,
}

pub(super) fn event() -> Arc<OpenFile> {
    Arc::new(OpenFile::new(eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd")))
}

pub(super) fn signal(event: &OpenFile) {
    rustix::io::write(event, &1u64.to_ne_bytes()).expect("it takes a signal");
}

pub(super) fn wait_for(event: &OpenFile) -> u64 {
    let most = Timespec { tv_sec: 20, tv_nsec: 0 };
    let ready = poll(&mut [PollFd::new(event, PollFlags::IN)], Some(&most)).expect("poll");
    assert_eq!(ready, 1, "the guest is not told");
    let mut count = [0; 8];
    rustix::io::read(event, &mut count).expect("the count");
    u64::from_ne_bytes(count)
}

pub(super) fn nothing() -> Vbd {
    Vbd::new(Box::new(Null::new(1 << 20, false)), CacheMode::None)
}

pub(super) fn serve(guest: &GuestRing, memory: &Arc<Memory>, vbd: Vbd) -> Served {
    serve_by(guest, memory, vbd, event(), event())
}

pub(super) fn serve_by(
    guest: &GuestRing,
    memory: &Arc<Memory>,
    vbd: Vbd,
    kick: Arc<OpenFile>,
    error: Arc<OpenFile>,
) -> Served {
    serve_with(guest, memory, vbd, [kick, event(), error])
}

fn serve_with(
    guest: &GuestRing,
    memory: &Arc<Memory>,
    vbd: Vbd,
    [kick, call, error]: [Arc<OpenFile>; 3],
) -> Served {
    let start = Start {
        index: 0,
        vbd,
        ring: guest.another_ring(memory),
        addresses: ADDRESSES,
        event_idx: false,
        memory: memory.clone(),
        inflight: None,
        logging: None,
        kick: kick.clone(),
        call: Some(call.clone()),
        error: Some(error.clone()),
        identity: [0; ID_BYTES],
        told: Arc::default(),
    };
    Served { thread: QueueThread::start(start).expect("a thread"), kick, call, error }
}

impl Served {
    /// Make the chain from descriptor 0 available, and wait until the guest is told of its answer.
    pub(super) fn ask(&self, guest: &GuestRing) {
        let used = guest.used().wrapping_add(1);
        guest.make_available(0);
        signal(&self.kick);
        while guest.used() != used {
            wait_for(&self.call);
        }
    }
}

#[test]
fn a_guest_is_told_of_what_a_killed_server_answered_last() {
    let guest = GuestRing::new(&[], 16, &[]);
    let served = serve(&guest, &guest.memory, nothing());
    wait_for(&served.call);
    assert_eq!(served.thread.stop().expect("it ends"), 0);
}

#[test]
fn many_quick_answers_are_told_together() {
    let chain = [Entry(HEADER, 16, NEXT, 1), Entry(STATUS, 1, WRITE, 0)];
    let guest = GuestRing::new(&with_header(&chain, VIRTIO_BLK_T_FLUSH), 256, &[0; 200]);
    let served = serve(&guest, &guest.memory, nothing());
    let mut told = 0;
    while guest.used() < 200 {
        told += wait_for(&served.call);
    }
    assert_eq!(served.thread.stop().expect("it ends"), 200);
    assert!(told <= 1 + 200_u64.div_ceil(16), "{told} signals");
}

#[test]
fn the_front_end_is_told_of_a_broken_ring_and_its_thread_still_takes_orders() {
    let looping = [Entry(HEADER, 16, NEXT, 0)];
    let guest = GuestRing::new(&with_header(&looping, 0), 16, &[0]);
    let served = serve(&guest, &guest.memory, nothing());
    assert_eq!(wait_for(&served.error), 1);
    let call = event();
    served.thread.set_call(Some(call.clone()));
    wait_for(&call);
    served.thread.set_memory(guest.memory.clone());
    assert_eq!(served.thread.stop().expect("it ends"), 1);
    assert_eq!(guest.used(), 0);
}

/// A pipe that nobody reads from, full.
pub(super) fn full_pipe() -> (OwnedFd, OwnedFd) {
    let (end, full) = rustix::pipe::pipe().expect("a pipe");
    fcntl_setfl(&full, OFlags::NONBLOCK).expect("its flags");
    while rustix::io::write(&full, &[0; 4096]).is_ok() {}
    fcntl_setfl(&full, OFlags::empty()).expect("its flags");
    (end, full)
}

#[test]
fn descriptors_that_always_give_or_never_take_hold_nobody_up() {
    let looping = [Entry(HEADER, 16, NEXT, 0)];
    let guest = GuestRing::new(&with_header(&looping, 0), 16, &[0]);
    let zeros = File::open("/dev/zero").expect("it is everywhere");
    let (_end, full) = full_pipe();
    let file = |file: OwnedFd| Arc::new(OpenFile::new(file));
    let served = serve_by(&guest, &guest.memory, nothing(), file(zeros.into()), file(full));
    wait_for(&served.call);
    let (told, ended) = channel();
    std::thread::spawn(move || told.send(served.thread.stop().expect("it ends")));
    assert_eq!(ended.recv_timeout(Duration::from_secs(30)), Ok(1));
}

#[test]
fn a_guest_that_takes_no_signal_does_not_hold_up_the_end() {
    let chain = [Entry(HEADER, 16, NEXT, 1), Entry(STATUS, 1, WRITE, 0)];
    let guest = GuestRing::new(&with_header(&chain, VIRTIO_BLK_T_FLUSH), 16, &[]);
    let (_end, full) = full_pipe();
    let files = [event(), Arc::new(OpenFile::new(full)), event()];
    let served = serve_with(&guest, &guest.memory, nothing(), files);
    // Two more to be told of, while it is still being told that there is a server.
    for _ in 0..2 {
        let used = guest.used().wrapping_add(1);
        guest.make_available(0);
        signal(&served.kick);
        let began = Instant::now();
        while guest.used() != used {
            assert!(began.elapsed() < Duration::from_secs(60), "no answer");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    let (told, ended) = channel();
    std::thread::spawn(move || told.send(served.thread.stop().expect("it ends")));
    assert_eq!(ended.recv_timeout(Duration::from_secs(30)), Ok(2));
}

#[test]
fn memory_may_be_replaced_between_two_requests() {
    let chain = [Entry(HEADER, 16, NEXT, 1), Entry(STATUS, 1, WRITE, 0)];
    let guest = GuestRing::new(&with_header(&chain, VIRTIO_BLK_T_FLUSH), 16, &[]);
    let served = serve(&guest, &guest.memory, nothing());
    served.ask(&guest);
    let moved = GuestRing::new(&[], 16, &[]);
    moved.write(GUEST, &guest.read(GUEST, 2 * REGION as usize));
    served.thread.set_memory(moved.memory.clone());
    assert_eq!(Arc::strong_count(&guest.memory), 1, "the thread still uses the old memory");
    served.ask(&moved);
    assert_eq!((guest.used(), moved.used()), (1, 2));
    assert_eq!(served.thread.stop().expect("it ends"), 2);
}

/// A disk of zeros whose second half, and whose flushes, fail.
struct Failing(Null);

impl Image for Failing {
    fn info(&self) -> &Info {
        self.0.info()
    }

    fn fork(&self) -> Box<dyn Image> {
        Box::new(Failing(self.0.clone()))
    }

    fn map(&self, offset: u64, len: u64) -> Extent<'_> {
        if offset < self.info().size / 2 { self.0.map(offset, len) } else { Extent::NotLoaded }
    }

    fn load<'a>(&'a self, _: &'a Io, _: u64) -> Boxed<'a, Result<(), Error>> {
        Box::pin(async { Err(Error::Os(libc::EIO)) })
    }

    fn flush<'a>(&'a self, _: &'a Io) -> Boxed<'a, Result<(), Error>> {
        Box::pin(async { Err(Error::Os(libc::EIO)) })
    }

    fn discard<'a>(
        &'a self,
        io: &'a Io,
        offset: u64,
        len: u64,
        mode: Discard,
    ) -> Boxed<'a, Result<(), Error>> {
        self.0.discard(io, offset, len, mode)
    }

    fn status<'a>(&'a self, io: &'a Io, offset: u64, len: u64) -> Boxed<'a, Result<Status, Error>> {
        self.0.status(io, offset, len)
    }

    fn current_size(&self) -> Result<u64, Error> {
        self.0.current_size()
    }
}

#[test]
fn a_request_that_fails_says_so_and_the_next_is_served() {
    let (ok, failed) = (VIRTIO_BLK_S_OK as u8, VIRTIO_BLK_S_IOERR as u8);
    let read =
        [Entry(HEADER, 16, NEXT, 1), Entry(DATA, 512, NEXT | WRITE, 2), Entry(STATUS, 1, WRITE, 0)];
    let guest = GuestRing::new(&table(&read), 16, &[]);
    let failing = Vbd::new(Box::new(Failing(Null::new(1 << 20, false))), CacheMode::Writeback);
    let served = serve(&guest, &guest.memory, failing);
    for (kind, sector, status) in [
        (VIRTIO_BLK_T_IN, 0, ok),
        (VIRTIO_BLK_T_IN, 1 << 40, failed),
        (VIRTIO_BLK_T_IN, 1, ok),
        (VIRTIO_BLK_T_IN, 1 << 60, failed),
        (VIRTIO_BLK_T_IN, 2047, failed),
        (VIRTIO_BLK_T_IN, 2048, failed),
        (VIRTIO_BLK_T_IN, 2, ok),
        (VIRTIO_BLK_T_FLUSH, 0, failed),
        (VIRTIO_BLK_T_IN, 3, ok),
    ] {
        guest.write(HEADER, &header(kind, sector));
        guest.write(STATUS, &[0xff]);
        served.ask(&guest);
        assert_eq!(guest.read(STATUS, 1), [status], "request {kind} of sector {sector}");
    }
    assert_eq!(served.thread.stop().expect("it ends"), 9);
}

const PAGE: usize = 4096;
const PAGES: usize = 256;
/// Pages of the guest for data, each beside one that is not used, so that no two can be joined.
pub(super) const SCATTERED: u64 = GUEST + (1 << 24);

/// The guest's memory, and scattered pages.
pub(super) fn with_pages(guest: &GuestRing, pages: &File) -> Arc<Memory> {
    let len = 2 * PAGES * PAGE;
    ftruncate(pages, len as u64).expect("its size");
    let region = VhostUserMemoryRegion::new(SCATTERED, len as u64, 0x7e00_0000_0000, 0);
    let region = Region::map(&region, pages, &Maps::default()).expect("a mapping");
    let mut regions = guest.memory.regions().to_vec();
    regions.push(region);
    Arc::new(Memory::new(regions))
}

/// A chain whose data is so many pieces, one in each scattered page.
fn scattered(pieces: usize, skip: u64, flags: u16) -> Vec<u8> {
    let mut entries = vec![Entry(HEADER, 16, NEXT, 1)];
    for piece in 0..pieces {
        let place = SCATTERED + (2 * piece * PAGE) as u64 + skip;
        entries.push(Entry(place, PAGE as u32, NEXT | flags, piece as u16 + 2));
    }
    entries.push(Entry(STATUS, 1, WRITE, 0));
    table(&entries)
}

#[test]
fn a_mebibyte_over_256_pages_goes_straight_between_guest_and_disk() {
    // Not in /tmp, which may be a tmpfs: O_DIRECT is what is meant.
    let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
    let path = dir.path().join("disk");
    let disk = File::create_new(&path).expect("a file");
    disk.set_len(2 << 20).expect("its size");
    let options = OpenOptions { format: Some(Format::Raw), ..OpenOptions::default() };
    let vbd = Vbd::new(ringtap_image::open(&path, &options).expect("it opens"), CacheMode::None);
    let align = vbd.info().memory_alignment;
    assert!(align > 1 && PAGE % align == 0, "{align}: no O_DIRECT on /var/tmp");

    let guest = GuestRing::new(&[], 512, &[]);
    let pages = File::from(memfd_create("pages", MemfdFlags::CLOEXEC).expect("memfd"));
    let memory = with_pages(&guest, &pages);
    let content: Vec<u8> = (0..PAGES).flat_map(|page| [page as u8; PAGE]).collect();
    for (page, bytes) in content.chunks(PAGE).enumerate() {
        pages.write_all_at(bytes, (2 * page * PAGE) as u64).expect("guest memory");
    }
    let served = serve(&guest, &memory, vbd.fork());
    let ask = |kind, sector, chain: Vec<u8>| {
        guest.write(GUEST, &chain);
        guest.write(HEADER, &header(kind, sector));
        guest.write(STATUS, &[0xff]);
        served.ask(&guest);
        assert_eq!(guest.read(STATUS, 1), [0], "request {kind} of sector {sector}");
    };

    ask(VIRTIO_BLK_T_OUT, 8, scattered(PAGES, 0, 0));
    let mut written = vec![0; content.len()];
    File::open(&path).and_then(|disk| disk.read_exact_at(&mut written, 4096)).expect("the disk");
    assert!(written == content);
    // Backwards, so that each page gets what another had.
    disk.write_all_at(&content.iter().rev().copied().collect::<Vec<_>>(), 4096).expect("the disk");
    ask(VIRTIO_BLK_T_IN, 8, scattered(PAGES, 0, WRITE));
    for page in 0..PAGES {
        let mut bytes = [0; PAGE];
        pages.read_exact_at(&mut bytes, (2 * page * PAGE) as u64).expect("guest memory");
        assert!(bytes.iter().all(|byte| usize::from(*byte) == 255 - page), "page {page}");
    }
    let stats = vbd.stats();
    assert_eq!((stats.write.bytes, stats.read.bytes), (1 << 20, 1 << 20));
    assert_eq!(stats.bounced_bytes, 0);

    ask(VIRTIO_BLK_T_OUT, 8, scattered(1, 1, 0));
    assert_eq!(vbd.stats().bounced_bytes, PAGE as u64);
    ask(VIRTIO_BLK_T_IN, 8, scattered(1, 1, WRITE));
    assert_eq!(vbd.stats().bounced_bytes, 2 * PAGE as u64);
    served.thread.stop().expect("it ends");
}

#[test]
fn the_log_is_told_of_chains_that_come_to_no_disk() {
    heard::listen();
    let status = Entry(STATUS, 1, WRITE, 0);
    let outside = [Entry(HEADER, 16, NEXT, 1), Entry(0x10, 512, NEXT | WRITE, 2), status.clone()];
    let short = [Entry(HEADER, 15, NEXT, 1), status.clone()];
    let part = [Entry(HEADER, 16, NEXT, 1), Entry(DATA, 100, NEXT | WRITE, 2), status.clone()];
    let unknown = [Entry(HEADER, 16, NEXT, 1), status];
    for (name, chain, kind, operation, offset, why) in [
        ("outside", &outside[..], VIRTIO_BLK_T_IN, "unknown", None, "not the guest's"),
        ("short", &short[..], VIRTIO_BLK_T_IN, "unknown", None, "shorter than 16 bytes"),
        ("part", &part[..], VIRTIO_BLK_T_IN, "read", Some(3 * 512), "whole sectors"),
        ("unknown", &unknown[..], 77, "unknown", None, "no such operation"),
    ] {
        let guest = GuestRing::new(&with_header(chain, kind), 16, &[]);
        let served = serve(&guest, &guest.memory, nothing().named(name, name));
        (0..12).for_each(|_| served.ask(&guest));
        served.thread.stop().expect("it ends");
        let said = heard::of(name);
        assert_eq!(said.len(), 11, "{said:?}");
        for line in &said[..10] {
            let text = line["message"].as_str().expect("text");
            assert!(text.starts_with("request refused: ") && text.contains(why), "{text}");
            assert_eq!(line["operation"], operation, "{line}");
            assert_eq!(line.get("offset").and_then(|offset| offset.as_u64()), offset, "{line}");
        }
        assert_eq!(said[10]["count"], 2, "the rest is counted");
    }
}

/// Not of a request that the disk serves: the thread itself panics, between one request and the next.
#[test]
fn a_panic_of_the_thread_itself_stops_its_disk() {
    heard::listen();
    let status = Entry(STATUS, 1, WRITE, 0);
    let flush = [Entry(HEADER, 16, NEXT, 1), status];
    let guest = GuestRing::new(&with_header(&flush, VIRTIO_BLK_T_FLUSH), 16, &[]);
    let vbd = nothing().named(heard::TRAPPED, heard::TRAPPED);
    let health = vbd.health().clone();
    let served = serve(&guest, &guest.memory, vbd);
    served.ask(&guest);
    assert!(health.failure().is_none());
    // No such request.
    guest.write(HEADER, &header(77, 3));
    guest.make_available(0);
    signal(&served.kick);
    let until = Instant::now() + Duration::from_secs(20);
    while health.failure().is_none() {
        assert!(Instant::now() < until, "the disk goes on");
        std::thread::sleep(Duration::from_millis(1));
    }
    let failure = health.failure().map(|panic| &*panic.message);
    assert_eq!(failure, Some("as the test has it"));
    assert!(served.thread.stop().is_err());
}
