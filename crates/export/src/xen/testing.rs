//! A frontend's side of a ring in plain memory, for fuzz targets and property tests.

use std::cell::Cell;
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
use super::nodes::{Wishes, discards};
use super::pages::Pages;
use super::persistent::PersistentGrants;
use super::queue::{Remembered, XenQueue};
use super::record::Record;
pub use super::ring::RingError;
use super::ring::{BackRing, places};
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

/// The memory of a domain: the ring's pages, then those that are granted.
struct Memory {
    file: File,
    pages: Pages,
    /// Pages of the ring.
    ring: usize,
    /// What all that see this memory know.
    shared: Rc<Shared>,
}

#[derive(Default)]
struct Shared {
    /// A bit for each grant that was revoked.
    revoked: Cell<u64>,
    /// Calls for copies, and what they copied.
    calls: Cell<usize>,
    copies: Cell<usize>,
}

impl Memory {
    fn of(file: &File, ring: usize, shared: Rc<Shared>) -> io::Result<Memory> {
        let pages = Pages::shared(file, 0, ring + GRANTS as usize)?;
        Ok(Memory { file: file.try_clone()?, pages, ring, shared })
    }

    /// The same memory, seen from the other side.
    fn again(&self) -> io::Result<Memory> {
        Memory::of(&self.file, self.ring, self.shared.clone())
    }

    /// The page granted as `grant`.
    fn place(&self, grant: u32) -> usize {
        self.ring - 1 + grant as usize
    }

    fn is_granted(&self, grant: u32) -> bool {
        (1..=GRANTS).contains(&grant) && self.shared.revoked.get() & 1 << (grant - 1) == 0
    }
}

impl Foreign for Memory {
    fn domain(&self) -> u16 {
        7
    }

    fn map(&self, grants: &[u32]) -> io::Result<Pages> {
        let first = *grants.first().ok_or(io::ErrorKind::InvalidInput)?;
        let known = grants.iter().all(|grant| self.is_granted(*grant));
        let together = grants.windows(2).all(|pair| pair[0].checked_add(1) == Some(pair[1]));
        match known && together {
            true => Pages::shared(&self.file, self.place(first), grants.len()),
            false => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    unsafe fn copy(&self, copies: &mut [Copy]) -> io::Result<()> {
        self.shared.calls.set(self.shared.calls.get() + 1);
        self.shared.copies.set(self.shared.copies.get() + copies.len());
        for copy in copies {
            let (grant, offset, local, len, way) = copy.parts();
            let inside = self.is_granted(grant) && offset + len <= PAGE;
            copy.set_made(inside);
            if !inside {
                continue;
            }
            let foreign = self.pages.address(self.place(grant), offset);
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
    /// A frontend with an empty ring of one page.
    pub fn new(abi: Abi) -> io::Result<Frontend> {
        Frontend::with_ring(abi, 1)
    }

    /// A frontend with an empty ring of so many pages.
    pub fn with_ring(abi: Abi, ring: usize) -> io::Result<Frontend> {
        let file = File::from(memfd_create("frontend", MemfdFlags::CLOEXEC)?);
        ftruncate(&file, (ring as u64 + u64::from(GRANTS)) * PAGE as u64)?;
        let memory = Memory::of(&file, ring, Rc::default())?;
        memory.pages.word(RSP_EVENT).store(1, Relaxed);
        Ok(Frontend { memory, abi, put: 0, taken: 0 })
    }

    /// Requests that its ring holds.
    pub fn places(&self) -> u32 {
        places(self.memory.ring, self.abi)
    }

    /// The server can reach that page no more, unless it has mapped it.
    pub fn revoke(&self, grant: u32) {
        let Shared { revoked, .. } = &*self.memory.shared;
        revoked.set(revoked.get() | 1 << (grant - 1));
    }

    /// Calls for copies so far, and how many copies they made.
    pub fn copied(&self) -> (usize, usize) {
        (self.memory.shared.calls.get(), self.memory.shared.copies.get())
    }

    /// Overwrite words of its memory, from the ring's first page on.
    pub fn scribble(&self, from: usize, bytes: &[u8]) {
        let words = from..(self.memory.ring + GRANTS as usize) * PAGE / 4;
        for (word, bytes) in words.zip(bytes.chunks_exact(4)) {
            let value = u32::from_le_bytes([0, 1, 2, 3].map(|i| bytes[i]));
            self.memory.pages.word(word).store(value, Relaxed);
        }
    }

    /// Put a request: its bytes as the frontend's compiler lays them out.
    pub fn put(&mut self, request: &[u8]) {
        let place = FIRST + (self.put % self.places()) as usize * self.abi.entry_words();
        self.scribble(place, request);
        self.put = self.put.wrapping_add(1);
        self.memory.pages.word(REQ_PROD).store(self.put, Release);
    }

    /// Take the answers that have come.
    pub fn take(&mut self) -> Vec<Answer> {
        let end = self.memory.pages.word(RSP_PROD).load(Acquire);
        let mut answers = vec![];
        while self.taken != end && answers.len() < self.places() as usize {
            let place = FIRST + (self.taken % self.places()) as usize * self.abi.entry_words();
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
        self.scribble(self.memory.place(grant) * PAGE / 4, &[byte; PAGE]);
    }

    /// The bytes of a granted page.
    pub fn page(&self, grant: u32) -> Vec<u8> {
        let first = self.memory.place(grant) * PAGE / 4;
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
    /// Serve the ring on `vbd`, and note in `record` what is in flight. `first` begins the record;
    /// others take it up. `kept` pages stay mapped.
    pub fn new(
        frontend: &Frontend,
        vbd: Vbd,
        record: Option<&Path>,
        first: bool,
        kept: usize,
    ) -> io::Result<Backend> {
        let memory = frontend.memory.again()?;
        let back = BackRing::new(Pages::shared(&memory.file, 0, memory.ring)?, frontend.abi);
        let mut record = match (record, first) {
            (None, _) => None,
            (Some(path), true) => Some(Record::create(path, back.size(), "test")?),
            (Some(path), false) => Some(Record::open(path, back.size(), "test")?),
        };
        let left = record.as_mut().map(|record| record.take_up(back.published()));
        let left = left.unwrap_or_default();
        let back = back.with_left(left.len() as u32);
        let mut tasks = Tasks::new(Box::new(Ring::new()?));
        let io = tasks.io().clone();
        let kept = (kept > 0).then(|| PersistentGrants::new(kept));
        let discards = discards(&vbd, &Wishes { discard: true, ..Wishes::default() });
        let (vbd, past) = (Rc::new(vbd), Remembered { record, left });
        let queue = XenQueue::new(io.clone(), vbd.clone(), back, memory, kept, discards, past);
        let queue = Rc::new(queue);
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
            if self.queue.in_flight() == 0 && !self.queue.has_requests() {
                return Ok(());
            }
            let wait = !self.tasks.has_work() && self.queue.in_flight() > 0;
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

mod store;
#[cfg(test)]
mod tests;

pub use store::ask_store;
