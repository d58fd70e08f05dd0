//! Files whose changes are noted, and when each was last written to.

use std::collections::HashMap;
use std::sync::Arc;

use ringtap_io::{File, Key, Op, Wall, Watch, Witness};

use crate::disk::{Disk, State};
use crate::medium::Medium;

/// A turn takes so long.
const TURN: Wall = 1_000_000;
/// And an operation.
const OPERATION: Wall = 1_000;

/// A file's content and time, put aside.
#[derive(Clone, Debug)]
pub struct Saved(Arc<Medium>);

/// A file's changes that one reactor has in flight.
#[derive(Default)]
pub(crate) struct Watched {
    files: HashMap<u32, (Arc<Witness>, Watch)>,
    in_flight: HashMap<Key, (u32, usize, bool)>,
}

/// The file that an operation changes, the bytes it writes, and whether it is a write.
fn change(op: &Op) -> Option<(File, u64, bool)> {
    match *op {
        Op::Write { file, mem, .. } => Some((file, mem.len() as u64, true)),
        Op::ZeroRange { file, len, .. } => Some((file, len, false)),
        Op::PunchHole { file, .. } | Op::Allocate { file, .. } | Op::SetLen { file, .. } => {
            Some((file, 0, false))
        }
        _ => None,
    }
}

impl Watched {
    /// Note what is about to begin, as a reactor does that may be killed any time after.
    pub(crate) fn begun(&mut self, state: &mut State, ops: &[(Key, Op)]) {
        state.clock += TURN;
        let now = state.clock;
        for (key, op) in ops {
            let Some((file, bytes, write)) = change(op) else { continue };
            let Some(witness) = state.witness(file) else { continue };
            let slot = file.slot();
            let known = self.files.get(&slot);
            if known.is_none_or(|(known, _)| !Arc::ptr_eq(known, &witness)) {
                self.files.insert(slot, (witness.clone(), Watch::new(witness)));
            }
            let Some((_, watch)) = self.files.get_mut(&slot) else { continue };
            if watch.is_started() {
                self.in_flight.insert(*key, (slot, watch.begin(bytes), write));
            }
        }
        self.files.values_mut().for_each(|(_, watch)| watch.settle_begun(now));
    }

    /// Note what has ended.
    pub(crate) fn ended(&mut self, state: &State, done: &[(Key, i32)]) {
        for (key, result) in done {
            let Some((slot, era, write)) = self.in_flight.remove(key) else { continue };
            if let Some((_, watch)) = self.files.get_mut(&slot) {
                watch.end(era, (write && *result > 0).then_some(*result as u64));
            }
        }
        let now = state.clock;
        self.files.values_mut().for_each(|(_, watch)| watch.settle_ended(now));
    }
}

impl State {
    /// An operation begins now: the file system stamps the file.
    pub(crate) fn stamp(&mut self, op: &Op) {
        self.clock += OPERATION;
        let now = self.clock;
        if let Some(medium) = change(op).and_then(|(file, ..)| self.medium(file)) {
            medium.modified = now;
        }
    }
}

impl Disk {
    /// Have every change of a file noted from now on, by all reactors.
    pub fn watch(&self, file: File, witness: Arc<Witness>) {
        self.lock().set_witness(file, witness);
    }

    /// When a file was last written to, by the clock of the simulated world.
    pub fn modified(&self, file: File) -> Wall {
        self.lock().look(file).map_or(0, |medium| medium.modified)
    }

    /// Let time pass.
    pub fn pass(&self, nanos: Wall) {
        self.lock().clock += nanos;
    }

    /// Put a file's content aside, as a copy of it that takes no time: of what is in flight it has parts,
    /// as the seed says.
    pub fn save(&self, file: File, seed: u64) -> Option<Saved> {
        let state = self.lock();
        let mut medium = state.look(file)?.clone();
        medium.kill(state.completed + 1, &mut fastrand::Rng::with_seed(seed));
        Some(Saved(Arc::new(medium)))
    }

    /// Write what was put aside over a file; with `keep_time` its time goes with it, as by `cp -p`.
    pub fn restore(&self, file: File, saved: &Saved, keep_time: bool) {
        let mut state = self.lock();
        state.clock += TURN;
        let now = state.clock;
        if let Some(medium) = state.medium(file) {
            *medium = (*saved.0).clone();
            if !keep_time {
                medium.modified = now;
            }
        }
    }
}
