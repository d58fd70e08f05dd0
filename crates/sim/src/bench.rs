//! The bench of every test of power cuts and kills: what is left when a server ends, and what a guest may find then.

use std::cell::RefCell;
use std::fmt::Display;
use std::rc::Rc;

use ringtap_io::Io;

use crate::{Device, Disk, End, Guest, alone, read_all};

/// A disk under test, and how it is served. Clones are of the same disk.
pub trait Bench: Clone {
    /// The disk.
    fn disk(&self) -> &Disk;

    /// The same with what such an end has left of the disk, and of memory ([`End::leaves`]).
    fn on(&self, disk: Disk, end: End) -> Self;

    /// What the orders follow from by which one task has the disk to itself.
    fn seed(&self) -> u64;

    /// All that the disk shows to whoever opens it after such an end, or what is wrong with it.
    fn look(&self, end: End) -> Result<Vec<u8>, String>;

    /// Run one task to its end, with nothing else on the disk.
    fn alone<T: 'static>(&self, task: impl AsyncFnOnce(Io) -> T + 'static) -> T {
        alone(self.disk(), self.seed(), task)
    }

    /// All that a device on it shows.
    fn shown<D: Device<Error: Display> + 'static>(
        &self,
        device: D,
        sectors: u64,
    ) -> Result<Vec<u8>, String> {
        let found = self.alone(async move |io| read_all(&io, &device, sectors).await);
        found.map_err(|error| error.to_string())
    }

    /// What an end now leaves.
    fn after(&self, end: End, seed: u64) -> Self {
        self.on(self.disk().after(end, seed), end)
    }

    /// The guest as it goes on after such an end, which must leave what it may find.
    fn finds(&self, guest: &Guest, end: End) -> Result<Guest, String> {
        let after = |wrong: String| format!("after {end:?}: {wrong}");
        let found = self.look(end).map_err(after)?;
        guest.after(end, &found).map_err(|wrong| after(wrong.to_string()))
    }

    /// The server ends, and what it leaves is what the guest may find.
    fn ends(&self, end: End, seed: u64, guest: &Guest) -> Result<(Self, Guest), String> {
        let left = self.after(end, seed);
        // To look is to take up what was left: not of the disk that goes on.
        let guest = match end {
            End::PowerCut => left.finds(guest, end)?,
            End::Kill => left.after(end, 0).finds(guest, end)?,
        };
        Ok((left, guest))
    }
}

/// Tries ends at the turns of a run ([`crate::Run::watched`]), and keeps what is wrong first. Clones are the same.
#[derive(Clone)]
pub struct Ends {
    seen: Rc<RefCell<Result<u64, String>>>,
}

impl Default for Ends {
    fn default() -> Ends {
        Ends { seen: Rc::new(RefCell::new(Ok(0))) }
    }
}

impl Ends {
    /// Looks at what such an end leaves: at each turn by each of the seeds that `seeds` gives for it, counted from 1.
    pub fn watch<I: IntoIterator<Item = u64>>(
        &self,
        end: End,
        mut seeds: impl FnMut(u64) -> I + 'static,
        mut look: impl FnMut(Disk, u64) -> Result<(), String> + 'static,
    ) -> impl FnMut(&Disk) + 'static {
        let (seen, mut turn) = (self.seen.clone(), 0);
        move |disk| {
            turn += 1;
            for seed in seeds(turn) {
                let Ok(count) = *seen.borrow() else { return };
                let looked = look(disk.after(end, seed), seed);
                let wrong = |wrong| format!("{end:?} at turn {turn}, by {seed}: {wrong}");
                *seen.borrow_mut() = looked.map(|()| count + 1).map_err(wrong);
            }
        }
    }

    /// The same, on a bench that a guest uses.
    pub fn watch_bench<B: Bench + 'static, I: IntoIterator<Item = u64>>(
        &self,
        bench: &B,
        guest: &Guest,
        end: End,
        seeds: impl FnMut(u64) -> I + 'static,
    ) -> impl FnMut(&Disk) + 'static {
        let (bench, guest) = (bench.clone(), guest.clone());
        let look = move |disk, _| bench.on(disk, end).finds(&guest, end).map(drop);
        self.watch(end, seeds, look)
    }

    /// How many were tried, or what was wrong first.
    pub fn seen(&self) -> Result<u64, String> {
        self.seen.borrow().clone()
    }
}
