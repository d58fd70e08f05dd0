//! A frontend's side of a ring in plain memory, for fuzz targets and property tests.

use std::fs::File;
use std::io;
use std::path::Path;
use std::rc::Rc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use ringtap_image::{CacheMode, Null};
use ringtap_io::{Ring, Tasks};
use ringtap_vbd::Vbd;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::gntdev::{Copy, Foreign, Way};
use super::kept::Kept;
use super::nodes::{Wishes, discards};
use super::pages::Pages;
use super::queue::XenQueue;
use super::record::Record;
use super::ring::BackRing;
pub use super::ring::RingError;
use super::wire::PAGE;
pub use super::wire::{Abi, SECTOR};
use crate::queue::run_slot;

/// Requests that a ring of one page holds.
pub const PLACES: u32 = 32;
/// Pages that are granted, as 1 and so on.
pub const GRANTS: u32 = 64;
/// Requests taken in one turn.
const MOST: usize = 8;
/// Words of the ring.
const REQ_PROD: usize = 0;
const RSP_PROD: usize = 2;
const RSP_EVENT: usize = 3;
const FIRST: usize = 16;

/// The memory of a domain: page 0 is the ring.
struct Memory {
    file: File,
    pages: Pages,
}

impl Memory {
    fn of(file: &File) -> io::Result<Memory> {
        let pages = Pages::shared(file, 0, 1 + GRANTS as usize)?;
        Ok(Memory { file: file.try_clone()?, pages })
    }
}

impl Foreign for Memory {
    fn domain(&self) -> u16 {
        7
    }

    fn map(&self, grants: &[u32]) -> io::Result<Pages> {
        let first = *grants.first().ok_or(io::ErrorKind::InvalidInput)?;
        let known = grants.iter().all(|grant| (1..=GRANTS).contains(grant));
        let together = grants.iter().zip(first..).all(|(grant, next)| *grant == next);
        match known && together {
            true => Pages::shared(&self.file, first as usize, grants.len()),
            false => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    unsafe fn copy(&self, copies: &mut [Copy]) -> io::Result<()> {
        for copy in copies {
            let (grant, offset, local, len, way) = copy.parts();
            let inside = (1..=GRANTS).contains(&grant) && offset + len <= PAGE;
            copy.set_made(inside);
            if !inside {
                continue;
            }
            let foreign = self.pages.address(grant as usize, offset);
            let (from, to) = match way {
                Way::FromFrontend => (foreign, local),
                Way::ToFrontend => (local, foreign),
            };
            // SAFETY: the page is mapped and the bytes lie in it; the local memory is as the caller
            // promises.
            unsafe { std::ptr::copy(from, to, len) };
        }
        Ok(())
    }
}

/// A frontend: it outlives the servers.
pub struct Frontend {
    memory: Memory,
    abi: Abi,
    put: u32,
    taken: u32,
}

/// An answer as the frontend finds it: the request's name, its operation, the status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The request's name.
    pub id: u64,
    /// Its operation.
    pub operation: u8,
    /// 0, -1 or -2.
    pub status: i16,
}

impl Frontend {
    /// A frontend with an empty ring.
    pub fn new(abi: Abi) -> io::Result<Frontend> {
        let file = File::from(memfd_create("frontend", MemfdFlags::CLOEXEC)?);
        ftruncate(&file, (1 + u64::from(GRANTS)) * PAGE as u64)?;
        let memory = Memory::of(&file)?;
        memory.pages.word(RSP_EVENT).store(1, Relaxed);
        Ok(Frontend { memory, abi, put: 0, taken: 0 })
    }

    /// Overwrite words of its memory, from the ring's page on.
    pub fn scribble(&self, from: usize, bytes: &[u8]) {
        let words = from..(1 + GRANTS as usize) * PAGE / 4;
        for (word, bytes) in words.zip(bytes.chunks_exact(4)) {
            let value = u32::from_le_bytes([0, 1, 2, 3].map(|i| bytes[i]));
            self.memory.pages.word(word).store(value, Relaxed);
        }
    }

    /// Put a request: its bytes as the frontend's compiler lays them out.
    pub fn put(&mut self, request: &[u8]) {
        let place = FIRST + (self.put % PLACES) as usize * self.abi.entry_words();
        self.scribble(place, request);
        self.put = self.put.wrapping_add(1);
        self.memory.pages.word(REQ_PROD).store(self.put, Release);
    }

    /// Take the answers that have come.
    pub fn take(&mut self) -> Vec<Answer> {
        let end = self.memory.pages.word(RSP_PROD).load(Acquire);
        let mut answers = vec![];
        while self.taken != end && answers.len() < PLACES as usize {
            let place = FIRST + (self.taken % PLACES) as usize * self.abi.entry_words();
            let word = |i: usize| self.memory.pages.word(place + i).load(Relaxed);
            let id = u64::from(word(0)) | u64::from(word(1)) << 32;
            let tail = word(2);
            answers.push(Answer { id, operation: tail as u8, status: (tail >> 16) as i16 });
            self.taken = self.taken.wrapping_add(1);
        }
        answers
    }

    /// Fill a granted page.
    pub fn fill(&self, grant: u32, byte: u8) {
        self.scribble(grant as usize * PAGE / 4, &[byte; PAGE]);
    }

    /// The bytes of a granted page.
    pub fn page(&self, grant: u32) -> Vec<u8> {
        let first = grant as usize * PAGE / 4;
        let words = first..first + PAGE / 4;
        words.flat_map(|word| self.memory.pages.word(word).load(Relaxed).to_le_bytes()).collect()
    }
}

/// A server of a frontend's ring.
pub struct Backend {
    // Dropped in this order: tasks use the memory of the queue.
    tasks: Tasks,
    vbd: Rc<Vbd>,
    queue: Rc<XenQueue<Memory>>,
}

impl Backend {
    /// Serve the ring on `vbd`, and note in `record` what is under way. `first` begins the record;
    /// others take it up. `kept` pages stay mapped.
    pub fn new(
        frontend: &Frontend,
        vbd: Vbd,
        record: Option<&Path>,
        first: bool,
        kept: usize,
    ) -> io::Result<Backend> {
        let file = &frontend.memory.file;
        let back = BackRing::new(Pages::shared(file, 0, 1)?, frontend.abi);
        let mut record = match (record, first) {
            (None, _) => None,
            (Some(path), true) => Some(Record::create(path, PLACES, "test")?),
            (Some(path), false) => Some(Record::open(path, PLACES, "test")?),
        };
        let left = record.as_mut().map(|record| record.take_up(back.published()));
        let left = left.unwrap_or_default();
        let back = back.with_left(left.len() as u32);
        let mut tasks = Tasks::new(Box::new(Ring::new()?));
        let io = tasks.io().clone();
        let kept = (kept > 0).then(|| Kept::new(kept));
        let memory = Memory::of(file)?;
        let discards = discards(&vbd, &Wishes { discard: true, ..Wishes::default() });
        let queue = XenQueue::new(io.clone(), back, memory, kept, discards, record, left);
        let queue = Rc::new(queue);
        let vbd = Rc::new(vbd);
        for tag in 0..queue.slots() {
            tasks.spawn(run_slot(queue.clone(), vbd.clone(), io.clone(), tag));
        }
        Ok(Backend { tasks, vbd, queue })
    }

    /// The same on a disk of 1 GiB that holds nothing.
    pub fn on_nothing(frontend: &Frontend, kept: usize) -> io::Result<Backend> {
        let vbd = Vbd::new(Box::new(Null::new(1 << 30, false)), CacheMode::None);
        Backend::new(frontend, vbd, None, true, kept)
    }

    /// Take requests and begin with them; answers are shown only with `publish`.
    pub fn turn(&mut self, publish: bool) -> Result<(), RingError> {
        let mut new = vec![];
        let polled = self.queue.poll(&mut new, MOST);
        let io = self.tasks.io().clone();
        for tag in new {
            let (queue, vbd) = (self.queue.clone(), self.vbd.clone());
            self.tasks.spawn(run_slot(queue, vbd, io.clone(), tag));
        }
        self.tasks.run_ready();
        while publish && self.queue.has_answers() {
            self.queue.publish();
            self.tasks.run_ready();
        }
        polled
    }

    /// Serve until there is nothing left to do.
    ///
    /// # Panics
    /// Where the io_uring fails.
    pub fn serve(&mut self) -> Result<(), RingError> {
        loop {
            self.turn(true)?;
            if self.queue.under_way() == 0 && !self.queue.has_requests() {
                return Ok(());
            }
            let wait = !self.tasks.has_work() && self.queue.under_way() > 0;
            self.tasks.turn(wait).expect("the io_uring");
        }
    }
}

impl Drop for Backend {
    /// As kill -9: what has not been answered is not.
    fn drop(&mut self) {
        self.queue.stop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::xen::queue::MOST_BYTES;
    use proptest::prelude::*;
    use ringtap_image::{Format, OpenOptions, open};

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
            let mut back =
                Backend::new(&front, disk(dir.path()), None, true, kept).expect("a ring");
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
            let mut back = Backend::on_nothing(&front, kept).expect("a ring");
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
        }
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
            // Requests under way, by name: what a read is to find, and its grant. Those of one page
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
}
