//! What a reactor has in flight on files whose changes are noted.

use crate::{File, Key, Op, Watch, coarse_wall, wall};

/// Beside the key of an operation that changes a watched file.
const WATCHED: u64 = 1 << 36;
/// Beside that: its era,
const ERA: u64 = 1 << 37;
/// and whether it is a write, which puts a stamp on the file.
const WRITE: u64 = 1 << 38;
/// The file's place from this bit on.
const PLACE: u32 = 40;

/// The files by their places.
#[derive(Default)]
pub(crate) struct Watched {
    files: Vec<Option<Watch>>,
    /// Places of files with changes that are not noted yet.
    begun: Vec<usize>,
    ended: Vec<usize>,
    /// What stands beside each key.
    beside: Vec<u64>,
}

impl Watched {
    pub(crate) fn put(&mut self, place: usize, watch: Option<Watch>) {
        if watch.is_some() && self.files.len() <= place {
            self.files.resize_with(place + 1, || None);
        }
        if let Some(file) = self.files.get_mut(place) {
            *file = watch;
        }
    }

    /// Whether nothing is to be noted of what has begun or ended.
    pub(crate) fn is_settled(&self) -> bool {
        self.begun.is_empty() && self.ended.is_empty()
    }

    /// A change of the file in that place, which is watched: what to say beside its key.
    pub(crate) fn begin(&mut self, place: usize, bytes: u64, write: bool) -> u64 {
        let Some(Some(watch)) = self.files.get_mut(place) else { return 0 };
        if !watch.is_started() || place >> (64 - PLACE) != 0 {
            return 0;
        }
        if !self.begun.contains(&place) {
            self.begun.push(place);
        }
        let era = if watch.begin(bytes) == 0 { 0 } else { ERA };
        WATCHED | era | if write { WRITE } else { 0 } | (place as u64) << PLACE
    }

    /// Remember what stands beside a key whose operation is in flight on a watched file.
    pub(crate) fn keep(&mut self, key: Key, beside: u64) {
        let key = key as usize;
        if self.beside.len() <= key {
            self.beside.resize(key + 1, 0);
        }
        self.beside[key] = beside;
    }

    /// What stands beside a key whose operation is in flight on a watched file.
    pub(crate) fn beside(&self, key: Key) -> Option<u64> {
        self.beside.get(key as usize).copied().filter(|beside| *beside != 0)
    }

    /// The same for the last time.
    pub(crate) fn take(&mut self, key: Key) -> Option<u64> {
        let beside = self.beside.get_mut(key as usize)?;
        Some(std::mem::take(beside)).filter(|beside| *beside != 0)
    }

    /// Before what was begun is handed over.
    #[inline]
    pub(crate) fn settle_begun(&mut self) {
        if !self.begun.is_empty() {
            let now = coarse_wall();
            for place in self.begun.drain(..) {
                if let Some(Some(watch)) = self.files.get_mut(place) {
                    watch.settle_begun(now);
                }
            }
        }
    }

    /// A completion with that beside its key.
    #[inline]
    pub(crate) fn end(&mut self, beside: u64, result: i32) {
        if beside & WATCHED != 0 {
            let place = (beside >> PLACE) as usize;
            let Some(Some(watch)) = self.files.get_mut(place) else { return };
            let written = (beside & WRITE != 0 && result > 0).then_some(result as u64);
            watch.end(usize::from(beside & ERA != 0), written);
            if !self.ended.contains(&place) {
                self.ended.push(place);
            }
        }
    }

    /// Before anybody is told of what has ended.
    #[inline]
    pub(crate) fn settle_ended(&mut self) {
        if !self.ended.is_empty() {
            let now = wall();
            for place in self.ended.drain(..) {
                if let Some(Some(watch)) = self.files.get_mut(place) {
                    watch.settle_ended(now);
                }
            }
        }
    }
}

/// The file that an operation changes, how many bytes it may write, and whether it is a write.
#[inline]
pub(crate) fn change_of(op: &Op) -> Option<(File, u64, bool)> {
    match *op {
        Op::Write { file, mem, .. } => Some((file, mem.len() as u64, true)),
        Op::Allocate { file, .. } | Op::SetLen { file, .. } => Some((file, 0, false)),
        // A block device may write zeros for it.
        Op::PunchHole { file, len, .. } | Op::ZeroRange { file, len, .. } => {
            Some((file, len, false))
        }
        _ => None,
    }
}
