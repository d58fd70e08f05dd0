//! A ring served in plain memory: what goes in, what comes out, and what is refused.

mod replaced;

use super::*;
use crate::heard;
use crate::xen::queue::MOST_BYTES;
use proptest::prelude::*;
use ringtap_image::{Format, OpenOptions, open};
use serde_json::Value;

const SIZE: u64 = 1 << 20;
const READ: u8 = 0;
const WRITE: u8 = 1;
const BARRIER: u8 = 2;
const FLUSH: u8 = 3;
const DISCARD: u8 = 5;
const INDIRECT: u8 = 6;

fn request(abi: Abi, head: [u8; 4], id: u64, sector: u64, rest: &[u8]) -> Vec<u8> {
    let pad: &[u8] = if abi == Abi::Wide { &[0; 4] } else { &[] };
    [&head[..], pad, &id.to_le_bytes(), &sector.to_le_bytes(), rest].concat()
}

fn segment(grant: u32, first: u8, last: u8) -> Vec<u8> {
    [&grant.to_le_bytes()[..], &[first, last, 0, 0]].concat()
}

/// A transfer of whole pages.
fn transfer(abi: Abi, operation: u8, id: u64, page: u64, grants: &[u32]) -> Vec<u8> {
    let table: Vec<u8> = grants.iter().flat_map(|grant| segment(*grant, 0, 7)).collect();
    request(abi, [operation, grants.len() as u8, 0, 0], id, page * 8, &table)
}

fn disk(dir: &Path) -> Vbd {
    let path = dir.join("disk");
    let file = File::options().create(true).truncate(false).write(true).open(&path);
    file.expect("a file").set_len(SIZE).expect("its size");
    let (format, cache) = (Some(Format::Raw), CacheMode::Writeback);
    let options = OpenOptions { format, cache, ..OpenOptions::default() };
    Vbd::new(open(&path, &options).expect("an image"), cache)
}

fn done(id: u64, operation: u8) -> Answer {
    Answer { id, operation, status: 0 }
}

#[test]
fn bytes_go_to_the_disk_and_back_in_both_layouts_mapped_or_copied() {
    for (abi, kept) in [(Abi::Wide, 0), (Abi::X86_32, 0), (Abi::Wide, 40), (Abi::X86_32, 40)] {
        let dir = tempfile::tempdir().expect("a folder");
        let mut front = Frontend::new(abi).expect("memory");
        let mut back = Backend::new(&front, disk(dir.path()), None, true, kept).expect("a ring");
        front.fill(1, 0x11);
        front.fill(2, 0x22);
        front.put(&transfer(abi, WRITE, 9, 3, &[1, 2]));
        front.put(&request(abi, [FLUSH, 0, 0, 0], 10, 0, &[]));
        back.serve().expect("a sound ring");
        let mut answers = front.take();
        answers.sort_by_key(|answer| answer.id);
        assert_eq!(answers, [done(9, WRITE), done(10, FLUSH)]);
        // A piece of both, read into the middle of another page; then all, by a table.
        front.put(&request(abi, [READ, 1, 0, 0], 11, 3 * 8 + 7, &segment(5, 2, 3)));
        let table: Vec<u8> = (20..52).flat_map(|grant| segment(grant, 0, 7)).collect();
        front.scribble(60 * PAGE / 4, &table);
        let rest = [&[0; 4][..], &60u32.to_le_bytes()].concat();
        front.put(&request(abi, [INDIRECT, READ, 32, 0], 12, 0, &rest));
        back.serve().expect("a sound ring");
        let mut answers = front.take();
        answers.sort_by_key(|answer| answer.id);
        assert_eq!(answers, [done(11, READ), done(12, READ)]);
        let page = front.page(5);
        assert_eq!(page[..1024], [0; 1024]);
        assert_eq!(page[1024..1536], [0x11; 512]);
        assert_eq!(page[1536..2048], [0x22; 512]);
        assert_eq!((front.page(22)[0], front.page(23)[0]), (0, 0x11));
        assert_eq!((front.page(24)[4095], front.page(25)[0]), (0x22, 0));
    }
}

#[test]
fn a_barrier_parts_what_is_before_it_from_what_is_behind() {
    let dir = tempfile::tempdir().expect("a folder");
    let abi = Abi::Wide;
    let mut front = Frontend::new(abi).expect("memory");
    let mut back = Backend::new(&front, disk(dir.path()), None, true, 0).expect("a ring");
    for id in 0..5 {
        front.put(&transfer(abi, WRITE, id, id, &[1]));
    }
    front.put(&transfer(abi, BARRIER, 5, 5, &[1]));
    front.put(&request(abi, [BARRIER, 0, 0, 0], 6, 0, &[]));
    for id in 7..12 {
        front.put(&transfer(abi, READ, id, 5, &[2]));
    }
    back.serve().expect("a sound ring");
    let ids: Vec<u64> = front.take().iter().map(|answer| answer.id).collect();
    assert_eq!(ids.len(), 12);
    assert_eq!(ids[5..7], [5, 6]);
    assert!(ids[..5].iter().all(|id| *id < 5) && ids[7..].iter().all(|id| *id > 6));
}

#[test]
fn what_is_wrong_with_one_request_stays_its_own() {
    for kept in [0, 40] {
        let abi = Abi::Wide;
        let mut front = Frontend::new(abi).expect("memory");
        heard::listen();
        let name = format!("ring{kept}");
        let vbd = Vbd::new(Box::new(Null::new(1 << 30, false)), CacheMode::None);
        let vbd = vbd.named(&name, &name);
        let mut back = Backend::new(&front, vbd, None, true, kept).expect("a ring");
        front.put(&transfer(abi, WRITE, 1, 0, &[1, 999]));
        front.put(&transfer(abi, READ, 2, 0, &[999]));
        front.put(&request(abi, [INDIRECT, READ, 1, 0], 3, 0, &[0xff; 12]));
        front.put(&transfer(abi, READ, 4, 1 << 40, &[1]));
        front.put(&request(abi, [DISCARD, 1, 0, 0], 5, 0, &8u64.to_le_bytes()));
        front.put(&request(abi, [DISCARD, 0, 0, 0], 6, 0, &8u64.to_le_bytes()));
        front.put(&transfer(abi, READ, 7, 0, &[1]));
        back.serve().expect("a sound ring");
        let mut answers = front.take();
        answers.sort_by_key(|answer| answer.id);
        let statuses: Vec<i16> = answers.iter().map(|answer| answer.status).collect();
        assert_eq!(statuses, [-1, -1, -1, -1, -2, 0, 0], "kept {kept}");
        let said = heard::of(&name);
        let mut operations: Vec<&str> =
            said.iter().map(|line| line["operation"].as_str().expect("a name")).collect();
        operations.sort_unstable();
        assert_eq!(operations, ["discard", "read", "read", "read", "write"], "{said:?}");
        let why = |line: &Value| line["message"].as_str().map(str::to_owned).expect("text");
        assert!(said.iter().all(|line| why(line).starts_with("request refused: ")), "{said:?}");
    }
}

#[test]
fn a_ring_of_several_pages_is_served_around_its_end() {
    for (abi, pages) in [(Abi::Wide, 2), (Abi::X86_32, 4), (Abi::Wide, 16)] {
        let dir = tempfile::tempdir().expect("a folder");
        let mut front = Frontend::with_ring(abi, pages).expect("memory");
        let places = u64::from(front.places());
        assert_eq!(places, u64::from(PLACES) * pages as u64);
        let mut back = Backend::new(&front, disk(dir.path()), None, true, 0).expect("a ring");
        // Two thirds of it at a time, so that the third lot goes around the end.
        let lot = places * 2 / 3;
        for round in 0..3 {
            let page = |n: u64| (round * 7 + n) % (SIZE / PAGE as u64);
            let grant = |n: u64| 1 + (n % u64::from(GRANTS)) as u32;
            for n in 0..lot {
                front.fill(grant(n), 1 + page(n) as u8 % 200);
                front.put(&transfer(abi, WRITE, round << 16 | n, page(n), &[grant(n)]));
                if n % u64::from(GRANTS) == u64::from(GRANTS) - 1 {
                    back.serve().expect("a sound ring");
                }
            }
            back.serve().expect("a sound ring");
            let mut answers = front.take();
            answers.sort_by_key(|answer| answer.id);
            let wanted: Vec<Answer> = (0..lot).map(|n| done(round << 16 | n, WRITE)).collect();
            assert_eq!(answers, wanted);
            let last = lot - 1;
            front.fill(1, 0);
            front.put(&transfer(abi, READ, 1, page(last), &[1]));
            back.serve().expect("a sound ring");
            assert_eq!(front.take(), [done(1, READ)]);
            let byte = 1 + page(last) as u8 % 200;
            assert!(front.page(1).iter().all(|found| *found == byte), "round {round}");
        }
    }
}

#[test]
fn many_pages_are_copied_by_one_call() {
    let dir = tempfile::tempdir().expect("a folder");
    let abi = Abi::Wide;
    let mut front = Frontend::new(abi).expect("memory");
    let mut back = Backend::new(&front, disk(dir.path()), None, true, 0).expect("a ring");
    let grants: Vec<u32> = (1..=8).collect();
    for id in 0..MOST as u64 {
        front.put(&transfer(abi, WRITE, id, id * 8, &grants));
    }
    back.turn(false).expect("a sound ring");
    assert_eq!(front.copied(), (1, 8 * MOST), "writes: when they are taken");
    back.serve().expect("a sound ring");
    assert_eq!(front.copied(), (1, 8 * MOST), "and never again");
    for id in 0..MOST as u64 {
        front.put(&transfer(abi, READ, id, id * 8, &grants));
    }
    back.turn(false).expect("a sound ring");
    assert_eq!(front.copied(), (1, 8 * MOST), "reads: not before they have ended");
    while back.queue.in_flight() > back.queue.answers() {
        back.turn(false).expect("a sound ring");
        back.tasks.turn(false).expect("the io_uring");
    }
    back.turn(true).expect("a sound ring");
    assert_eq!(front.copied(), (1 + MOST / 2, 16 * MOST), "16 pages at a time");
    assert_eq!(front.take().len(), 2 * MOST);
}

#[test]
fn pages_that_stay_mapped_are_copied_without_a_call() {
    let dir = tempfile::tempdir().expect("a folder");
    let abi = Abi::Wide;
    let mut front = Frontend::new(abi).expect("memory");
    let mut back = Backend::new(&front, disk(dir.path()), None, true, 8).expect("a ring");
    let (kept, other): (Vec<u32>, Vec<u32>) = (1..=16).partition(|grant| *grant <= 8);
    let mut go = |front: &mut Frontend, operation, grants: &[u32]| {
        front.put(&transfer(abi, operation, 1, 0, grants));
        back.serve().expect("a sound ring");
        assert_eq!(front.take(), [done(1, operation)]);
        front.copied().1
    };
    for (byte, grant) in (0x11..).zip(&kept) {
        front.fill(*grant, byte);
    }
    assert_eq!(go(&mut front, WRITE, &kept), 0);
    // There is room for no more, and those there were used lately.
    for round in 1..=8 {
        assert_eq!(go(&mut front, READ, &other), 8 * round, "copied by the hypervisor");
        assert_eq!(go(&mut front, READ, &kept), 8 * round, "and not mapped in the place of these");
    }
    for (kept, other) in kept.iter().zip(&other) {
        assert_eq!(front.page(*kept), front.page(*other));
    }
    let before = (0..1100).map(|_| go(&mut front, READ, &other)).last();
    assert_eq!(
        Some(go(&mut front, READ, &other)),
        before,
        "mapped in the place of what nobody uses"
    );
}

#[test]
fn a_guest_has_the_first_of_many_bytes_while_others_are_copied() {
    let dir = tempfile::tempdir().expect("a folder");
    let abi = Abi::Wide;
    let table: Vec<u8> = (1..=32).flat_map(|grant| segment(grant, 0, 7)).collect();
    let rest = [&[0; 4][..], &60u32.to_le_bytes()].concat();
    let large = |id| request(abi, [INDIRECT, READ, 32, 0], id, 0, &rest);
    for kept in [0, 64] {
        let mut front = Frontend::new(abi).expect("memory");
        front.scribble(60 * PAGE / 4, &table);
        let mut back = Backend::new(&front, disk(dir.path()), None, true, kept).expect("a ring");
        let mut counts = |requests: Vec<Vec<u8>>| {
            requests.iter().for_each(|request| front.put(request));
            while back.queue.has_requests() || back.queue.in_flight() > back.queue.answers() {
                back.turn(false).expect("a sound ring");
                back.tasks.turn(false).expect("the io_uring");
            }
            let shown = |_| {
                back.queue.publish();
                front.take().len()
            };
            (0..6).map(shown).collect::<Vec<_>>()
        };
        assert_eq!(counts((0..5).map(large).collect()), [1, 1, 1, 1, 1, 0], "of 128 KiB each");
        let small = (0..20).map(|id| transfer(abi, READ, id, 0, &[1])).collect();
        assert_eq!(counts(small), [16, 4, 0, 0, 0, 0], "of 4 KiB each");
    }
}

#[test]
fn a_grant_revoked_under_way_fails_its_request_alone() {
    let dir = tempfile::tempdir().expect("a folder");
    let abi = Abi::Wide;
    let mut front = Frontend::new(abi).expect("memory");
    let mut back = Backend::new(&front, disk(dir.path()), None, true, 0).expect("a ring");
    front.put(&transfer(abi, READ, 1, 0, &[1, 2]));
    front.put(&transfer(abi, READ, 2, 0, &[3]));
    back.turn(false).expect("a sound ring");
    front.revoke(2);
    back.serve().expect("a sound ring");
    let mut answers = front.take();
    answers.sort_by_key(|answer| answer.id);
    assert_eq!(answers, [Answer { id: 1, operation: READ, status: -1 }, done(2, READ)]);
    // The ring goes on, without that page.
    front.put(&transfer(abi, WRITE, 3, 0, &[2]));
    front.put(&transfer(abi, WRITE, 4, 1, &[3]));
    back.serve().expect("a sound ring");
    let mut answers = front.take();
    answers.sort_by_key(|answer| answer.id);
    assert_eq!(answers, [Answer { id: 3, operation: WRITE, status: -1 }, done(4, WRITE)]);
}

#[test]
fn discards_that_were_not_offered_are_refused() {
    for (read_only, status) in [(false, 0), (true, -2)] {
        let mut front = Frontend::new(Abi::Wide).expect("memory");
        let vbd = Vbd::new(Box::new(Null::new(1 << 30, read_only)), CacheMode::None);
        let mut back = Backend::new(&front, vbd, None, true, 0).expect("a ring");
        front.put(&request(Abi::Wide, [DISCARD, 0, 0, 0], 1, 0, &8u64.to_le_bytes()));
        back.serve().expect("a sound ring");
        assert_eq!(front.take(), [Answer { id: 1, operation: DISCARD, status }]);
    }
}

#[test]
fn a_ring_of_large_requests_has_its_share_of_memory_and_no_more() {
    let abi = Abi::Wide;
    let mut front = Frontend::new(abi).expect("memory");
    let mut back = Backend::on_nothing(&front, 0).expect("a ring");
    let table: Vec<u8> = (0..256).flat_map(|n| segment(1 + n % 50, 0, 7)).collect();
    front.scribble(60 * PAGE / 4, &table);
    front.put(&transfer(abi, WRITE, 0, 0, &[1]));
    for id in 1..PLACES.into() {
        let rest = [&[0; 4][..], &60u32.to_le_bytes()].concat();
        front.put(&request(abi, [INDIRECT, WRITE, 0, 1], id, 0, &rest));
    }
    for _ in 0..PLACES {
        back.turn(false).expect("a sound ring");
        let held = back.queue.held();
        assert!(held <= MOST_BYTES + (1 << 20), "{held}");
    }
    back.serve().expect("a sound ring");
    let answers = front.take();
    assert!(answers.iter().all(|answer| answer.status == 0), "{answers:?}");
    assert_eq!((answers.len(), back.queue.held()), (PLACES as usize, 0));
}

#[test]
fn more_requests_than_the_ring_holds_end_it() {
    for index in [PLACES + 1, u32::MAX, 1 << 31] {
        let front = Frontend::new(Abi::Wide).expect("memory");
        let mut back = Backend::on_nothing(&front, 0).expect("a ring");
        front.scribble(REQ_PROD, &index.to_le_bytes());
        let wanted = RingError::Index { from: 0, to: index, size: PLACES };
        assert_eq!(back.serve(), Err(wanted));
    }
}

#[derive(Clone, Debug)]
enum Step {
    Write {
        page: u8,
        byte: u8,
    },
    Read {
        page: u8,
    },
    Flush,
    Serve,
    /// Begin with what was put, show no answers or some, and die.
    Kill {
        turns: u8,
        publish: bool,
    },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0u8..16, 1u8..).prop_map(|(page, byte)| Step::Write { page, byte }),
        2 => (0u8..16).prop_map(|page| Step::Read { page }),
        1 => Just(Step::Flush),
        2 => Just(Step::Serve),
        1 => (0u8..4, any::<bool>()).prop_map(|(turns, publish)| Step::Kill { turns, publish }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// However often the server is killed, every request is answered once, and reads find what
    /// was written last.
    #[test]
    fn nothing_is_lost_or_answered_twice(
        steps in prop::collection::vec(step(), 1..60),
        kept in prop_oneof![Just(0usize), Just(40)],
    ) {
        let dir = tempfile::tempdir().expect("a folder");
        let record = dir.path().join("record");
        let abi = Abi::Wide;
        let mut front = Frontend::new(abi).expect("memory");
        let serve = |front: &Frontend, first| {
            Backend::new(front, disk(dir.path()), Some(&record), first, kept).expect("a ring")
        };
        let mut back = serve(&front, true);
        let mut model = [0u8; 16];
        // Requests in flight, by name: what a read is to find, and its grant. Those of one page
        // never overtake each other here: each is waited for where it matters.
        let mut open = std::collections::HashMap::new();
        let mut next = 0u64;
        let settle = |front: &mut Frontend, open: &mut std::collections::HashMap<_, _>| {
            for answer in front.take() {
                let Some(wanted) = open.remove(&answer.id) else {
                    panic!("{answer:?} answers nothing that is open");
                };
                assert_eq!(answer.status, 0);
                if let (_, Some((grant, byte))) = wanted {
                    assert!(front.page(grant).iter().all(|found| *found == byte));
                }
            }
        };
        for step in steps.into_iter().chain([Step::Serve]) {
            let busy = |open: &std::collections::HashMap<u64, (Option<u8>, _)>, page: u8| {
                open.values().any(|(other, _)| *other == Some(page))
            };
            let grant = 1 + next as u32 % PLACES;
            match step {
                Step::Write { page, byte } if open.len() < 31 && !busy(&open, page) => {
                    front.fill(grant, byte);
                    front.put(&transfer(abi, WRITE, next, page.into(), &[grant]));
                    model[usize::from(page)] = byte;
                    open.insert(next, (Some(page), None));
                    next += 1;
                }
                Step::Read { page } if open.len() < 31 && !busy(&open, page) => {
                    front.put(&transfer(abi, READ, next, page.into(), &[grant]));
                    let wanted = Some((grant, model[usize::from(page)]));
                    open.insert(next, (Some(page), wanted));
                    next += 1;
                }
                Step::Flush if open.len() < 31 => {
                    front.put(&request(abi, [FLUSH, 0, 0, 0], next, 0, &[]));
                    open.insert(next, (None, None));
                    next += 1;
                }
                Step::Kill { turns, publish } => {
                    for _ in 0..turns {
                        back.turn(publish).expect("a sound ring");
                    }
                    drop(back);
                    back = serve(&front, false);
                }
                _ => {
                    back.serve().expect("a sound ring");
                    settle(&mut front, &mut open);
                    prop_assert!(open.is_empty());
                }
            }
        }
    }
}
