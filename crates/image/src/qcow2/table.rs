//! The L1 table and what is in memory of the L2 tables: read without a lock, written under one.
//!
//! An L2 table is cut into slices. A slot for each slice says which frame of memory holds it. Whoever
//! reads an entry looks at the slot again afterwards: had the frame been given to another slice
//! meanwhile, the slot would have changed first. A slice that needs no frame is in the slot itself
//! ([`Pattern`]); it gets a frame before it is changed.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

use ringtap_io::sync::atomic::{
    AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release, fence,
};
use ringtap_io::sync::{OnceLock, broken, spin_loop};
use ringtap_io::{Event, Listener};

use super::entry::{Entry, Geometry, Kind};
use super::header::OFFSET_MASK;
use super::pattern::Pattern;
use super::recent::Recent;
use crate::numbered::Numbers;

/// Slots of a chunk; chunks come to be when one of theirs is needed.
const CHUNK: usize = if cfg!(feature = "shuttle") { 16 } else { 4096 };
/// L1 entries that are written together.
pub(super) const L1_BLOCK: usize = 64;
/// Frames there are at least, so that requests side by side find one each.
const FEWEST_FRAMES: u64 = if cfg!(feature = "shuttle") { 2 } else { 64 };
/// Where frames are scarce: so many of them for each place of a single entry.
const FRAMES_PER_PLACE: u64 = if cfg!(feature = "shuttle") { 1 } else { 8 };
/// Neighbouring slices are written together up to so many bytes.
const LARGEST_WRITE: usize = 1 << 20;
/// How often an entry is read again that is being changed, before its lock is asked for.
const TRIES: u32 = 64;

/// In a slot: the index of the frame, from 1; above it, how often the frame was given away.
const FRAME_BITS: u32 = 32;
/// So much of that count is kept; the bit above marks patterns.
const GENERATIONS: u64 = (1 << 31) - 1;

/// Words behind a frame's entries: whether it was used lately, and a count that is odd while a
/// two-word entry is being changed.
const EXTRA: usize = 2;

pub(super) struct Tables {
    pub(super) geometry: Geometry,
    l1: Box<[AtomicU64]>,
    slots: Box<[OnceLock<Box<[AtomicU64]>>]>,
    frames: Box<[OnceLock<Box<[AtomicU64]>>]>,
    /// Whether there are fewer frames than slices.
    scarce: bool,
    recent: Recent,
    /// A frame is pinned no more.
    freed: Event,
}

/// What is known of a cluster's entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lookup {
    /// This.
    Entry(Entry),
    /// It has no L2 table: nothing is allocated in all that the table would tell of.
    NoTable,
    /// Its slice is not in memory.
    NotLoaded,
}

/// Bytes of which the same is to be said.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    pub(super) kind: Kind,
    pub(super) len: u64,
}

impl Tables {
    pub(super) fn new(geometry: Geometry, l1: Vec<u64>, budget: u64) -> Tables {
        let frames = (budget / geometry.bytes_of_slice()).max(FEWEST_FRAMES);
        let slices = geometry.slices();
        let empty = |count: u64| (0..count).map(|_| OnceLock::new()).collect();
        Tables {
            l1: l1.into_iter().map(AtomicU64::new).collect(),
            slots: empty(slices.div_ceil(CHUNK as u64)),
            frames: empty(frames.min(slices)),
            scarce: frames < slices,
            recent: Recent::new(if frames < slices { frames / FRAMES_PER_PLACE } else { 0 }),
            freed: Event::default(),
            geometry,
        }
    }

    /// Told when a frame is pinned no more.
    pub(super) fn freed(&self) -> &Event {
        &self.freed
    }

    /// The L1 entry; 0 past the table's end.
    pub(super) fn l1(&self, table: u64) -> u64 {
        self.l1.get(table as usize).map_or(0, |entry| entry.load(Acquire))
    }

    /// Where the L2 table lies, if there is one.
    pub(super) fn table(&self, table: u64) -> Option<u64> {
        Some(self.l1(table) & OFFSET_MASK).filter(|offset| *offset != 0)
    }

    /// The L1 entries of a block, as they are written.
    pub(super) fn l1_block(&self, block: usize) -> Vec<u64> {
        let entries = self.l1.iter().skip(block * L1_BLOCK).take(L1_BLOCK);
        entries.map(|entry| entry.load(Acquire)).collect()
    }

    fn slot(&self, slice: u64) -> Option<&AtomicU64> {
        let chunk = self.slots.get(slice as usize / CHUNK)?.get()?;
        chunk.get(slice as usize % CHUNK)
    }

    fn slot_made(&self, slice: u64) -> Option<&AtomicU64> {
        let chunk = self.slots.get(slice as usize / CHUNK)?;
        let make = || (0..CHUNK).map(|_| AtomicU64::new(0)).collect();
        chunk.get_or_init(make).get(slice as usize % CHUNK)
    }

    fn frame(&self, slot: u64) -> Option<&[AtomicU64]> {
        self.frames.get(frame_index(slot)?)?.get().map(|frame| &**frame)
    }

    /// The entry of a cluster. Locks nothing.
    #[inline]
    pub(super) fn entry(&self, cluster: u64) -> Lookup {
        let slice = self.geometry.slice_of(cluster);
        let Some(slot) = self.slot(slice) else { return self.without_slice(cluster) };
        let at = self.geometry.word_of(cluster);
        for _ in 0..TRIES {
            let seen = slot.load(Acquire);
            if let Some(pattern) = Pattern::in_slot(seen) {
                let index = self.geometry.index_of(cluster);
                return Lookup::Entry(pattern.entry(&self.geometry, index));
            }
            let Some(frame) = self.frame(seen) else { return self.without_slice(cluster) };
            let Some(word) = frame.get(at) else { return Lookup::NotLoaded };
            if self.scarce {
                if let Some(used) = frame.get(self.geometry.words_of_slice()) {
                    if used.load(Relaxed) == 0 {
                        used.store(1, Relaxed);
                    }
                }
            }
            let entry = if self.geometry.extended() {
                let (Some(bitmap), Some(count)) =
                    (frame.get(at + 1), frame.get(self.geometry.words_of_slice() + 1))
                else {
                    return Lookup::NotLoaded;
                };
                let before = count.load(Acquire);
                let entry = Entry { word: word.load(Acquire), bitmap: bitmap.load(Acquire) };
                fence(Acquire);
                let whole = before & 1 == 0 && count.load(Relaxed) == before;
                if !whole && !broken("entry torn") {
                    spin_loop();
                    continue;
                }
                entry
            } else {
                Entry { word: word.load(Acquire), bitmap: 0 }
            };
            fence(Acquire);
            if slot.load(Relaxed) == seen || broken("slot not seen again") {
                return Lookup::Entry(entry);
            }
        }
        Lookup::NotLoaded
    }

    #[inline(never)]
    fn without_slice(&self, cluster: u64) -> Lookup {
        if self.table(self.geometry.table_of(cluster)).is_none() {
            return Lookup::NoTable;
        }
        self.recent.entry(&self.geometry, cluster).map_or(Lookup::NotLoaded, Lookup::Entry)
    }

    /// Whether a slice is in memory, all of it.
    pub(super) fn is_loaded(&self, slice: u64) -> bool {
        self.slot(slice).is_some_and(|slot| slot.load(Acquire) != 0)
    }

    /// What the bytes from `offset` are; `None` where it is not in memory.
    #[inline]
    pub(super) fn run(&self, offset: u64, len: u64) -> Option<Run> {
        let mut run = self.first_run(offset, len)?;
        while run.len < len {
            let Some(next) = self.first_run(offset + run.len, len - run.len) else { break };
            let goes_on = match (run.kind, next.kind) {
                (Kind::Data { host, own }, Kind::Data { host: next, own: its }) => {
                    host + run.len == next && own == its
                }
                (Kind::Zero { host: Some(host) }, Kind::Zero { host: Some(next) }) => {
                    host + run.len == next
                }
                (Kind::Compressed | Kind::Bad, _) => false,
                (one, other) => one == other,
            };
            if !goes_on {
                break;
            }
            run.len += next.len;
        }
        Some(run)
    }

    /// As [`Tables::run`], to the end of a cluster at most.
    #[inline]
    fn first_run(&self, offset: u64, len: u64) -> Option<Run> {
        let geometry = &self.geometry;
        let cluster = offset >> geometry.cluster_bits;
        let within = offset & (geometry.cluster() - 1);
        let entry = match self.entry(cluster) {
            Lookup::Entry(entry) => entry,
            Lookup::NoTable => {
                let last = geometry.clusters_of_table(geometry.table_of(cluster)).end;
                let to = (last << geometry.cluster_bits) - offset;
                return Some(Run { kind: Kind::Unallocated, len: to.min(len) });
            }
            Lookup::NotLoaded => return None,
        };
        let unit = within >> geometry.unit_bits;
        let within = within & ((1 << geometry.unit_bits) - 1);
        let kind = match entry.kind(geometry, unit) {
            // In an external data file every cluster has its one place.
            Kind::Data { host, .. } if geometry.data_file && host + within != offset => Kind::Bad,
            Kind::Data { host, own } => Kind::Data { host: host + within, own },
            Kind::Zero { host: Some(host) } => {
                Kind::Zero { host: Some(host + (unit << geometry.unit_bits) + within) }
            }
            kind => kind,
        };
        let same = (entry.same(geometry, unit) << geometry.unit_bits) - within;
        Some(Run { kind, len: same.min(len) })
    }
}

/// The frame that a slot names.
#[inline]
fn frame_index(slot: u64) -> Option<usize> {
    if Pattern::in_slot(slot).is_some() { None } else { (slot as u32 as usize).checked_sub(1) }
}

/// What is known of a frame.
#[derive(Default)]
struct Frame {
    slice: u64,
    generation: u64,
    /// Allocations and writes in flight that need it to stay.
    pins: u32,
    dirty: bool,
}

/// Who has which frame, what has to be written. Kept under the image's lock; only its holder changes
/// tables.
#[derive(Default)]
pub(super) struct Cache {
    frames: Vec<Frame>,
    hand: usize,
    dirty: Vec<u64>,
    pub(super) dirty_l1: BTreeSet<usize>,
    /// Slices being read.
    pub(super) loading: Numbers,
    /// L1 entries whose tables are being made or copied.
    pub(super) making: Numbers,
    /// Tables made here that read as zeros where they were not written, with the slices that were in
    /// memory once.
    blank: HashMap<u64, Vec<u64>>,
    /// A bit for each slice that was in memory once.
    known: Vec<u64>,
}

impl Cache {
    fn frame_of(&mut self, tables: &Tables, slice: u64) -> Option<&mut Frame> {
        let slot = tables.slot(slice)?.load(Relaxed);
        self.frames.get_mut(frame_index(slot)?)
    }

    /// Whether a slice has a frame, so that it can be changed.
    pub(super) fn has_frame(&self, tables: &Tables, slice: u64) -> bool {
        tables.slot(slice).is_some_and(|slot| frame_index(slot.load(Relaxed)).is_some())
    }

    /// Give a slice that is in memory a frame and keep it there. False where no frame can be had
    /// before a flush, or the slice is not in memory.
    pub(super) fn pin_frame(&mut self, tables: &Tables, slice: u64) -> bool {
        let slot = tables.slot(slice).map_or(0, |slot| slot.load(Relaxed));
        if let Some(pattern) = Pattern::in_slot(slot) {
            self.put_in_frame(tables, slice, |at| pattern.word(&tables.geometry, at));
        }
        self.pin(tables, slice);
        self.has_frame(tables, slice)
    }

    /// Keep a slice in memory; it is there.
    pub(super) fn pin(&mut self, tables: &Tables, slice: u64) {
        if let Some(frame) = self.frame_of(tables, slice) {
            frame.pins += 1;
        }
    }

    pub(super) fn unpin(&mut self, tables: &Tables, slice: u64) {
        if let Some(frame) = self.frame_of(tables, slice) {
            frame.pins = frame.pins.saturating_sub(1);
            if frame.pins == 0 && !broken("freed in silence") {
                tables.freed.notify();
            }
        }
    }

    /// What to wait for where every frame is pinned or waits to be written, once a flush has begun.
    pub(super) fn frame_later<'a>(&self, tables: &'a Tables) -> Option<Listener<'a>> {
        let full = self.frames.iter().all(|frame| frame.dirty || frame.pins > 0);
        full.then(|| tables.freed.listen())
    }

    /// Frames in use, and how many there may be.
    pub(super) fn frames_used(&self, tables: &Tables) -> (u64, u64) {
        (self.frames.len() as u64, tables.frames.len() as u64)
    }

    /// Slices that a flush has to write.
    pub(super) fn dirty_slices(&self) -> u64 {
        self.dirty.len() as u64
    }

    pub(super) fn is_dirty(&self) -> bool {
        !self.dirty.is_empty() || !self.dirty_l1.is_empty()
    }

    /// Whether so much waits to be written that it had better be.
    pub(super) fn is_crowded(&self, tables: &Tables) -> bool {
        self.dirty.len() * 2 > tables.frames.len() && tables.scarce
    }

    /// Whether a slice that is about to be read had better come to memory, rather than the one entry
    /// that is asked for: there is room, somebody else of late asked for another entry of it, or, in an
    /// image that is written to, it was never looked at.
    pub(super) fn wants(&self, tables: &Tables, slice: u64, writable: bool) -> bool {
        self.frames.len() < tables.frames.len()
            || !tables.scarce
            || writable && !self.is_known(slice)
            || tables.recent.has(&tables.geometry, slice)
    }

    /// Keep the entry of a cluster whose slice is not in memory.
    pub(super) fn keep_entry(&self, tables: &Tables, cluster: u64, entry: Entry) {
        if !tables.is_loaded(tables.geometry.slice_of(cluster)) {
            tables.recent.keep(&tables.geometry, cluster, entry);
        }
    }

    /// Take a slice, told word by word, into memory. False where no frame can be had before a flush.
    pub(super) fn install(
        &mut self,
        tables: &Tables,
        slice: u64,
        word: impl Fn(usize) -> u64,
    ) -> bool {
        match (Pattern::of(&tables.geometry, &word), tables.slot_made(slice)) {
            (Some(pattern), Some(slot)) => {
                slot.store(pattern.slot(), Release);
                tables.recent.forget(&tables.geometry, slice);
                true
            }
            _ => self.put_in_frame(tables, slice, word),
        }
    }

    fn put_in_frame(&mut self, tables: &Tables, slice: u64, word: impl Fn(usize) -> u64) -> bool {
        let Some(index) = self.find_frame(tables) else { return false };
        self.note_seen(tables, slice);
        let (Some(place), Some(frame), Some(slot)) =
            (tables.frames.get(index), self.frames.get_mut(index), tables.slot_made(slice))
        else {
            return false;
        };
        let count = tables.geometry.words_of_slice() + EXTRA;
        let memory = place.get_or_init(|| (0..count).map(|_| AtomicU64::new(0)).collect());
        // Whoever sees one of the new words sees that the old slot is empty, too.
        fence(Release);
        let (entries, _) = memory.split_at(tables.geometry.words_of_slice());
        for (at, memory) in entries.iter().enumerate() {
            memory.store(word(at), Relaxed);
        }
        frame.generation = (frame.generation + 1) & GENERATIONS;
        (frame.slice, frame.pins, frame.dirty) = (slice, 0, false);
        slot.store(frame.generation << FRAME_BITS | (index as u64 + 1), Release);
        tables.recent.forget(&tables.geometry, slice);
        true
    }

    /// A frame that nobody has, by the clock.
    fn find_frame(&mut self, tables: &Tables) -> Option<usize> {
        if self.frames.len() < tables.frames.len() {
            self.frames.push(Frame::default());
            return Some(self.frames.len() - 1);
        }
        for _ in 0..2 * self.frames.len() {
            let index = self.hand;
            self.hand = (index + 1) % self.frames.len();
            let frame = self.frames.get(index)?;
            if frame.dirty || frame.pins > 0 {
                continue;
            }
            let used = tables.frames.get(index)?.get()?.get(tables.geometry.words_of_slice())?;
            if used.swap(0, Relaxed) != 0 {
                continue;
            }
            if let Some(slot) = tables.slot(frame.slice).filter(|_| !broken("slot kept")) {
                let memory = tables.frames.get(index)?.get()?;
                let word = |at: usize| memory.get(at).map_or(0, |word| word.load(Relaxed));
                let pattern = Pattern::of(&tables.geometry, word);
                slot.store(pattern.map_or(0, Pattern::slot), Relaxed);
            }
            return Some(index);
        }
        None
    }

    /// Change a cluster's entry; its slice has a frame. All changes of L2 tables are made here.
    pub(super) fn set(&mut self, tables: &Tables, cluster: u64, entry: Entry) {
        let slice = tables.geometry.slice_of(cluster);
        let Some(slot) = tables.slot(slice).map(|slot| slot.load(Relaxed)) else { return };
        let Some(memory) = tables.frame(slot) else { return };
        let at = tables.geometry.word_of(cluster);
        let words = tables.geometry.words_of_slice();
        if let (true, Some(word), Some(bitmap), Some(count)) =
            (tables.geometry.extended(), memory.get(at), memory.get(at + 1), memory.get(words + 1))
        {
            let before = count.load(Relaxed);
            count.store(before.wrapping_add(1), Relaxed);
            fence(Release);
            word.store(entry.word, Relaxed);
            bitmap.store(entry.bitmap, Relaxed);
            count.store(before.wrapping_add(2), Release);
        } else if let Some(word) = memory.get(at) {
            word.store(entry.word, Release);
        }
        self.make_dirty(tables, slice);
    }

    pub(super) fn make_dirty(&mut self, tables: &Tables, slice: u64) {
        let Some(frame) = self.frame_of(tables, slice) else { return };
        if !std::mem::replace(&mut frame.dirty, true) {
            self.dirty.push(slice);
        }
    }

    /// Change an L1 entry.
    pub(super) fn set_l1(&mut self, tables: &Tables, table: u64, entry: u64) {
        if let Some(place) = tables.l1.get(table as usize) {
            place.store(entry, Release);
            self.dirty_l1.insert(table as usize / L1_BLOCK);
        }
    }

    /// Whether a slice came into memory for the first time, which is asked once.
    pub(super) fn is_first(&mut self, slice: u64) -> bool {
        let (at, bit) = (slice as usize / 64, 1 << (slice % 64));
        if self.known.len() <= at {
            self.known.resize(at + 1, 0);
        }
        self.known.get_mut(at).is_some_and(|word| std::mem::replace(word, *word | bit) & bit == 0)
    }

    fn is_known(&self, slice: u64) -> bool {
        self.known.get(slice as usize / 64).is_some_and(|word| word >> (slice % 64) & 1 != 0)
    }

    /// A table that was made now, and is zeros where it lies.
    pub(super) fn add_blank(&mut self, tables: &Tables, table: u64) {
        let words = tables.geometry.slices_of_table().div_ceil(64);
        self.blank.insert(table, vec![0; words as usize]);
    }

    /// Whether a slice is known to be zeros without reading it.
    pub(super) fn is_blank(&self, tables: &Tables, slice: u64) -> bool {
        let index = slice % tables.geometry.slices_of_table();
        let seen = self.blank.get(&tables.geometry.table_of_slice(slice));
        let word = seen.and_then(|seen| seen.get(index as usize / 64));
        word.is_some_and(|word| word >> (index % 64) & 1 == 0)
    }

    /// From now on a slice may differ from zeros.
    fn note_seen(&mut self, tables: &Tables, slice: u64) {
        let index = slice % tables.geometry.slices_of_table();
        let seen = self.blank.get_mut(&tables.geometry.table_of_slice(slice));
        if let Some(word) = seen.and_then(|seen| seen.get_mut(index as usize / 64)) {
            *word |= 1 << (index % 64);
        }
    }

    /// The slices that wait to be written, which then wait no more; each is pinned.
    pub(super) fn take_dirty(&mut self, tables: &Tables) -> Vec<Slices> {
        let mut slices = std::mem::take(&mut self.dirty);
        slices.sort_unstable();
        let mut taken: Vec<Slices> = Vec::new();
        for slice in slices {
            let Some(slot) = tables.slot(slice).map(|slot| slot.load(Relaxed)) else { continue };
            let Some(memory) = tables.frame(slot) else { continue };
            let (words, _) = memory.split_at(tables.geometry.words_of_slice());
            match taken.last_mut() {
                Some(last) if last.go_on_with(tables, slice) => last.add(words),
                _ => {
                    let mut new = Slices { first: slice, count: 0, bytes: Vec::new() };
                    new.add(words);
                    taken.push(new);
                }
            }
            if let Some(frame) = self.frame_of(tables, slice) {
                frame.dirty = false;
                frame.pins += 1;
            }
        }
        taken
    }
}

/// Copies of slices of one table, one after the other.
pub(super) struct Slices {
    first: u64,
    count: u64,
    /// As the file has them.
    pub(super) bytes: Vec<u8>,
}

impl Slices {
    /// Which they are.
    pub(super) fn range(&self) -> Range<u64> {
        self.first..self.first + self.count
    }

    fn go_on_with(&self, tables: &Tables, slice: u64) -> bool {
        let table = |slice| tables.geometry.table_of_slice(slice);
        let follows = self.range().end == slice && table(self.first) == table(slice);
        follows && self.bytes.len() < LARGEST_WRITE
    }

    fn add(&mut self, words: &[AtomicU64]) {
        let start = self.bytes.len();
        self.bytes.resize(start + 8 * words.len(), 0);
        let (_, new) = self.bytes.split_at_mut(start);
        for (bytes, word) in new.chunks_exact_mut(8).zip(words) {
            bytes.copy_from_slice(&word.load(Relaxed).to_be_bytes());
        }
        self.count += 1;
    }
}
