//! The log of a migration, by the whole server and a front-end made of messages.
//!
//! The model is the guest's memory before and after: what differs was written to, and is to be marked.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use proptest::prelude::*;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_S_OK, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
};

use super::chains::*;
use super::front_end::*;
use super::residence::Residence;
use super::testing::{ADDRESSES, GUEST, GuestRing, REGION, USED};

const SET_LOG_BASE: u32 = 6;
const SET_LOG_FD: u32 = 7;
const GET_VRING_BASE: u32 = 11;
const LOG_ALL: u64 = 1 << 26;
/// VHOST_VRING_F_LOG, in the second half of the first word.
const LOG_USED: u64 = 1 << 32;

const PAGE: u64 = 4096;
const PAGES: u64 = 2 * REGION / PAGE;
/// Bytes that hold a bit for each page of a [`GuestRing`], and then some.
const LOG: u64 = 4096;
/// Where the used ring counts in the log: a page that is nobody's memory.
const USED_LOG: u64 = 0x40_0000;

fn memory(len: u64) -> File {
    let file = File::from(memfd_create("log", MemfdFlags::CLOEXEC).expect("memfd"));
    ftruncate(&file, len).expect("its size");
    file
}

fn bits(log: &File) -> Vec<u8> {
    let mut bits = vec![0; LOG as usize];
    log.read_exact_at(&mut bits, 0).expect("the log");
    bits
}

/// The pages that are marked.
fn marked(bits: &[u8]) -> Vec<u64> {
    let all = 0..bits.len() as u64 * 8;
    all.filter(|page| bits[*page as usize / 8] >> (page % 8) & 1 != 0).collect()
}

/// The guest addresses of pages that differ.
fn changed(before: &[u8], after: &[u8]) -> Vec<u64> {
    let pages = before.chunks(PAGE as usize).zip(after.chunks(PAGE as usize));
    let differs = pages.enumerate().filter(|(_, (before, after))| before != after);
    differs.map(|(number, _)| GUEST / PAGE + number as u64).collect()
}

impl FrontEnd {
    fn set_log(&mut self, log: &File, len: u64) {
        self.send(SET_LOG_BASE, 0, &words(&[len, 0]), &[log.try_clone().expect("its own").into()]);
        assert_eq!(self.reply_of::<2>(SET_LOG_BASE), [len, 0]);
    }

    fn place_ring(&mut self, flags: u64, log: u64) -> bool {
        let at = [flags, ADDRESSES.descriptors, ADDRESSES.used, ADDRESSES.available, log];
        self.tell(SET_VRING_ADDR, &words(&at), &[])
    }

    /// As a front-end does whose guest runs: nothing is stopped for it.
    fn log_into(&mut self, log: &File) {
        self.set_log(log, LOG);
        assert!(self.tell(SET_FEATURES, &words(&[FEATURES | LOG_ALL]), &[]));
        assert!(self.place_ring(LOG_USED, USED_LOG));
    }

    fn log_no_more(&mut self) {
        assert!(self.tell(SET_FEATURES, &words(&[FEATURES]), &[]));
        assert!(self.place_ring(0, 0));
    }

    fn stop_queue(&mut self) -> u64 {
        self.send(GET_VRING_BASE, 0, &vring(0, 0), &[]);
        self.reply_of::<1>(GET_VRING_BASE)[0] >> 32
    }
}

/// A running queue of a guest whose second region is there, too; its memory is as nothing writes it.
fn run(chain: &[Entry], kind: u32) -> (FrontEnd, GuestRing, OwnedFd) {
    let guest = GuestRing::new(&with_header(chain, kind), 16, &[]);
    let mut front_end = FrontEnd::connect();
    let kick = front_end.start_queue(&guest);
    let second = words(&[&[0][..], &region(1)[..]].concat());
    let file = [OwnedFd::from(guest.file.try_clone().expect("a descriptor"))];
    assert!(front_end.tell(ADD_MEM_REG, &second, &file));
    (front_end, guest, kick)
}

/// All of the guest's memory.
fn all(guest: &GuestRing) -> Vec<u8> {
    guest.read(GUEST, 2 * REGION as usize)
}

/// The pages that a piece of guest memory lies in.
fn pages(address: u64, len: u64) -> std::ops::RangeInclusive<u64> {
    address / PAGE..=(address + len - 1) / PAGE
}

#[test]
fn what_a_running_queue_writes_is_marked_from_when_that_is_asked_for_until_it_no_more_is() {
    let status = STATUS + 0x800;
    let read = [
        Entry(HEADER, 16, NEXT, 1),
        Entry(DATA + 0xe00, 1024, NEXT | WRITE, 2),
        Entry(status, 1, WRITE, 0),
    ];
    let (mut front_end, guest, kick) = run(&read, VIRTIO_BLK_T_IN);
    let ask = || assert_eq!(answers(&guest, &kick, status), Some(VIRTIO_BLK_S_OK));
    let (first, second) = (memory(LOG), memory(LOG));
    ask();
    front_end.set_log(&first, LOG);
    ask();
    assert!(marked(&bits(&first)).is_empty(), "a log alone");

    front_end.log_into(&first);
    let data = pages(DATA + 0xe00, 1024);
    let mut expected: Vec<u64> = data.chain(pages(status, 1)).chain([USED_LOG / PAGE]).collect();
    expected.sort_unstable();
    ask();
    // The used index is shown before it is marked; stopping is what makes sure of it.
    front_end.log_no_more();
    assert_eq!(marked(&bits(&first)), expected);
    first.write_all_at(&vec![0; LOG as usize], 0).expect("cleared");
    ask();
    assert!(marked(&bits(&first)).is_empty(), "it is over");

    // Another log takes its place while the queue runs: the first is left alone from then on.
    front_end.log_into(&first);
    front_end.set_log(&second, LOG);
    let before = bits(&first);
    ask();
    assert_eq!(front_end.stop_queue(), 5);
    assert_eq!((bits(&first), marked(&bits(&second))), (before, expected));
}

#[test]
fn a_queue_that_starts_during_a_migration_logs_from_its_first_request() {
    let status = HEADER + 0x100;
    let flush = [Entry(HEADER, 16, NEXT, 1), Entry(status, 1, WRITE, 0)];
    let guest = GuestRing::new(&with_header(&flush, VIRTIO_BLK_T_FLUSH), 16, &[]);
    let (mut front_end, log) = (FrontEnd::connect(), memory(LOG));
    assert!(front_end.tell(SET_FEATURES, &words(&[FEATURES | LOG_ALL]), &[]));
    front_end.share(&guest);
    front_end.place_queue();
    assert!(front_end.place_ring(LOG_USED, GUEST + USED));
    front_end.set_log(&log, LOG);
    let kick = front_end.run_queue(eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd"));
    assert_eq!(answers(&guest, &kick, status), Some(VIRTIO_BLK_S_OK));
    assert_eq!(front_end.stop_queue(), 1);
    let mut expected = [status / PAGE, (GUEST + USED) / PAGE];
    expected.sort_unstable();
    assert_eq!(marked(&bits(&log)), expected);
}

#[test]
fn bits_of_others_stay_while_many_set_theirs() {
    let status = HEADER + 0x100;
    let flush = [Entry(HEADER, 16, NEXT, 1), Entry(status, 1, WRITE, 0)];
    let (mut front_end, guest, kick) = run(&flush, VIRTIO_BLK_T_FLUSH);
    let log = memory(LOG);
    let others = !(1u8 << (status / PAGE % 8));
    let at = status / PAGE / 8;
    log.write_all_at(&[others], at).expect("what others have marked");
    front_end.log_into(&log);
    assert_eq!(answers(&guest, &kick, status), Some(VIRTIO_BLK_S_OK));
    front_end.stop_queue();
    assert_eq!(bits(&log)[at as usize], 0xff);
}

#[test]
fn a_log_that_has_no_room_for_what_is_written_is_refused() {
    let flush = [Entry(HEADER, 16, NEXT, 1), Entry(HEADER + 0x100, 1, WRITE, 0)];
    let send = |front_end: &mut FrontEnd, file: OwnedFd, len: u64, offset: u64| {
        front_end.send(SET_LOG_BASE, 0, &words(&[len, offset]), &[file]);
    };
    let memory_of = |len| OwnedFd::from(memory(len));
    let enough = (GUEST + 2 * REGION) / PAGE / 8;
    let sealed = || {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("log", flags).expect("memfd");
        ftruncate(&file, LOG).expect("its size");
        rustix::fs::fcntl_add_seals(&file, rustix::fs::SealFlags::WRITE).expect("sealed");
        file
    };
    let cases: [(&str, OwnedFd, u64, u64); 8] = [
        ("longer than its file", memory_of(LOG), LOG + 1, 0),
        ("behind its end", memory_of(LOG), LOG, LOG),
        ("not at a page", memory_of(LOG), 512, 1),
        ("of no size", memory_of(LOG), 0, 0),
        ("past all numbers", memory_of(LOG), u64::MAX, 2),
        ("no memory", eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd"), LOG, 0),
        ("a pipe", rustix::pipe::pipe().expect("a pipe").0, LOG, 0),
        ("not to be written to", sealed(), LOG, 0),
    ];
    for (why, file, len, offset) in cases {
        let mut front_end = FrontEnd::connect();
        send(&mut front_end, file, len, offset);
        assert!(front_end.is_let_go(), "{why}");
    }
    // Without a file, or with two.
    for files in [vec![], vec![memory_of(LOG), memory_of(LOG)]] {
        let mut front_end = FrontEnd::connect();
        front_end.send(SET_LOG_BASE, 0, &words(&[LOG, 0]), &files);
        assert!(front_end.is_let_go());
    }

    // One byte too short for the guest's memory, while a queue runs.
    for (len, enough) in [(enough, true), (enough - 1, false)] {
        let (mut front_end, guest, kick) = run(&flush, VIRTIO_BLK_T_FLUSH);
        front_end.set_log(&memory(LOG), len);
        assert_eq!(front_end.tell(SET_FEATURES, &words(&[FEATURES | LOG_ALL]), &[]), enough);
        if enough {
            assert_eq!(answers(&guest, &kick, HEADER + 0x100), Some(VIRTIO_BLK_S_OK));
        } else {
            assert!(front_end.is_let_go());
        }
    }
    // The last byte of the used ring lies outside, or far outside.
    for (at, within) in [
        (LOG * 8 * PAGE - 6 - 8 * 16, true),
        (LOG * 8 * PAGE - 6 - 8 * 16 + 1, false),
        (u64::MAX - 3, false),
    ] {
        let (mut front_end, _guest, _kick) = run(&flush, VIRTIO_BLK_T_FLUSH);
        front_end.set_log(&memory(LOG), LOG);
        assert_eq!(front_end.place_ring(LOG_USED, at), within, "{at:#x}");
    }
}

#[test]
fn a_descriptor_to_be_told_by_is_taken_and_left_alone() {
    let event = || eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
    let mut front_end = FrontEnd::connect();
    assert!(front_end.tell(SET_LOG_FD, &words(&[0]), &[event()]));
    front_end.send(SET_LOG_FD, 0, &words(&[0]), &[event()]);
    assert!(
        front_end.tell(SET_LOG_FD, &words(&[0]), &[event()]),
        "one reply for each that wants one"
    );
    for files in [vec![], vec![event(), event()]] {
        let mut front_end = FrontEnd::connect();
        assert!(!front_end.tell(SET_LOG_FD, &words(&[0]), &files));
        assert!(front_end.is_let_go());
    }
}

#[test]
fn a_log_that_is_cut_short_stops_its_own_queue_alone() {
    let status = HEADER + 0x100;
    let flush = [Entry(HEADER, 16, NEXT, 1), Entry(status, 1, WRITE, 0)];
    let (mut other, other_guest, other_kick) = run(&flush, VIRTIO_BLK_T_FLUSH);
    other.log_into(&memory(LOG));
    let guest = GuestRing::new(&with_header(&flush, VIRTIO_BLK_T_FLUSH), 16, &[]);
    let (mut front_end, log, errors) =
        (FrontEnd::connect(), memory(LOG), eventfd(0, EventfdFlags::CLOEXEC));
    let errors = errors.expect("an eventfd");
    front_end.share(&guest);
    front_end.place_queue();
    let theirs = [errors.try_clone().expect("a descriptor")];
    assert!(front_end.tell(SET_VRING_ERR, &words(&[0]), &theirs));
    let kick = front_end.run_queue(eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd"));
    front_end.log_into(&log);
    assert_eq!(answers(&guest, &kick, status), Some(VIRTIO_BLK_S_OK));
    ftruncate(&log, 0).expect("cut");
    guest.make_available(0);
    rustix::io::write(&kick, &1u64.to_ne_bytes()).expect("a kick");
    rustix::io::read(&errors, &mut [0; 8]).expect("its front-end is told");
    front_end.stop_queue();
    assert_eq!(answers(&other_guest, &other_kick, status), Some(VIRTIO_BLK_S_OK));
}

/// An image that somebody else has for a while.
#[derive(Default)]
struct Elsewhere {
    /// How often it is refused yet.
    refusals: AtomicUsize,
    asked: AtomicUsize,
    /// How often it cannot be let go of yet.
    stays: AtomicUsize,
    left: AtomicUsize,
}

impl Residence for Elsewhere {
    fn arrive(&self) -> Result<(), String> {
        self.asked.fetch_add(1, SeqCst);
        let refused = self.refusals.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1));
        refused.map_or(Ok(()), |_| Err("another has it".into()))
    }

    fn leave(&self) -> Result<(), String> {
        let stays = self.stays.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1));
        if stays.is_ok() {
            return Err("the server is busy".into());
        }
        self.left.fetch_add(1, SeqCst);
        Ok(())
    }
}

#[test]
fn a_guest_waits_for_its_image_and_leaves_it_when_it_was_migrated() {
    let status = HEADER + 0x100;
    let flush = [Entry(HEADER, 16, NEXT, 1), Entry(status, 1, WRITE, 0)];
    let guest = GuestRing::new(&with_header(&flush, VIRTIO_BLK_T_FLUSH), 16, &[]);
    let elsewhere = Arc::new(Elsewhere { refusals: 3.into(), ..Elsewhere::default() });
    let counts = || [&elsewhere.asked, &elsewhere.left].map(|count| count.load(SeqCst));
    let mut front_end = FrontEnd::connect_to_resident(elsewhere.clone());
    assert_eq!(counts(), [0, 0], "nobody has begun");
    let kick = front_end.start_queue(&guest);
    assert_eq!(answers(&guest, &kick, status), Some(VIRTIO_BLK_S_OK));
    let [asked, left] = counts();
    assert!(asked > 3 && left == 0, "{asked} {left}");
    // It stops, and goes on here: a reboot.
    assert_eq!((front_end.stop_queue(), counts()), (1, [asked, 0]));
    let again = |front_end: &mut FrontEnd, base: u32| {
        assert!(front_end.tell(SET_VRING_BASE, &vring(0, base), &[]));
        front_end.run_queue(eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd"))
    };
    let kick = again(&mut front_end, 1);
    assert_eq!(answers(&guest, &kick, status), Some(VIRTIO_BLK_S_OK));
    // It is migrated.
    front_end.log_into(&memory(LOG));
    elsewhere.stays.store(2, SeqCst);
    assert_eq!(front_end.stop_queue(), 2);
    // The front-end says no more, and the image leaves when it can.
    let until = std::time::Instant::now() + std::time::Duration::from_secs(30);
    while elsewhere.left.load(SeqCst) == 0 {
        assert!(std::time::Instant::now() < until, "the image does not leave");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    // That failed, and somebody still has the image; the guest stops before it is here, and no more is asked for it.
    elsewhere.refusals.store(usize::MAX, SeqCst);
    again(&mut front_end, 2);
    assert_eq!(front_end.stop_queue(), 2);
    front_end.log_no_more();
    let asked = elsewhere.asked.load(SeqCst);
    std::thread::sleep(std::time::Duration::from_millis(200));
    assert!(elsewhere.asked.load(SeqCst) <= asked + 1, "it is asked for though nobody wants it");
}

/// A request: what it is, where its data begin in the second region, pieces of that, where its status is.
#[derive(Clone, Debug)]
struct Asks {
    kind: u32,
    sector: u64,
    data: u64,
    pieces: Vec<u32>,
    status: u64,
}

impl Asks {
    fn entries(&self) -> Vec<Entry> {
        let mut entries = vec![Entry(HEADER, 16, NEXT, 1)];
        let way = if self.kind == VIRTIO_BLK_T_OUT { NEXT } else { NEXT | WRITE };
        let mut at = self.data;
        for len in &self.pieces {
            entries.push(Entry(at, *len, way, entries.len() as u16 + 1));
            // The pieces lie apart.
            at += u64::from(*len) + 700;
        }
        entries.push(Entry(self.status, 1, WRITE, 0));
        entries
    }

    /// Pages that such a request may be marked for: those it names, and no more.
    fn may_mark(&self) -> Vec<u64> {
        let mut all: Vec<u64> = pages(self.status, 1).collect();
        let writes = matches!(self.kind, VIRTIO_BLK_T_IN | VIRTIO_BLK_T_GET_ID);
        for Entry(at, len, flags, _) in self.entries() {
            if writes && flags & WRITE != 0 {
                all.extend(pages(at, len.into()));
            }
        }
        all
    }
}

fn asks() -> impl Strategy<Value = Asks> {
    let kind = prop_oneof![
        6 => Just(VIRTIO_BLK_T_IN),
        2 => Just(VIRTIO_BLK_T_OUT),
        1 => Just(VIRTIO_BLK_T_GET_ID),
        1 => Just(VIRTIO_BLK_T_FLUSH),
        1 => Just(99u32),
    ];
    // Most are whole sectors of a disk of 2048; some are not.
    let piece = prop_oneof![8 => (1u32..8).prop_map(|n| 512 * n), 1 => 1u32..3000];
    let pieces = prop::collection::vec(piece, 0..5);
    // Into the first region's last page, and over the border of both.
    let data = 0..REGION + 2 * PAGE;
    (kind, 0u64..2100, data, pieces, 0u64..REGION).prop_map(
        |(kind, sector, data, pieces, status)| {
            let data = DATA - PAGE + data / 2;
            Asks { kind, sector, data, pieces, status: DATA + status }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_page_that_changes_is_marked(all_asks in prop::collection::vec(asks(), 1..12)) {
        let (mut front_end, guest, kick) = run(&[], VIRTIO_BLK_T_FLUSH);
        let log = memory(LOG);
        front_end.log_into(&log);
        let mut written = Vec::new();
        for asks in &all_asks {
            log.write_all_at(&vec![0; LOG as usize], 0).expect("cleared");
            guest.write(GUEST, &table(&asks.entries()));
            guest.write(HEADER, &header(asks.kind, asks.sector));
            // What the disk gives is all zeros.
            guest.write(DATA - PAGE, &vec![0xa5; (REGION + PAGE) as usize]);
            let used = guest.used().wrapping_add(1);
            guest.make_available(0);
            let before = all(&guest);
            rustix::io::write(&kick, &1u64.to_ne_bytes()).expect("a kick");
            while guest.used() != used {
                std::thread::yield_now();
            }
            // What was to be marked before the used index changed is marked now.
            let found = marked(&bits(&log));
            let after = all(&guest);
            let used_page = (GUEST + USED) / PAGE;
            let differ: Vec<u64> =
                changed(&before, &after).into_iter().filter(|page| *page != used_page).collect();
            let missing: Vec<_> = differ.iter().filter(|page| !found.contains(page)).collect();
            prop_assert!(missing.is_empty(), "{asks:?}: {missing:?} of {differ:?} are not in {found:?}");
            let mut may = asks.may_mark();
            may.push(USED_LOG / PAGE);
            let more: Vec<_> = found.iter().filter(|page| !may.contains(page)).collect();
            prop_assert!(more.is_empty(), "{asks:?}: {more:?} are marked");
            prop_assert!(found.contains(&(USED_LOG / PAGE)), "the used entry");
            written.extend(differ);
        }
        front_end.stop_queue();
        prop_assert!(written.iter().all(|page| *page < GUEST / PAGE + PAGES));
    }
}
