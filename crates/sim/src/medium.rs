//! The bytes of one simulated file or device, sector by sector.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use crate::versions::{OpId, Versions};

/// What one sector holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Cell {
    /// No space; reads as zeros.
    Hole,
    /// Space that was not written; reads as zeros.
    Reserved,
    Data(Arc<[u8]>),
}

impl Cell {
    pub(crate) fn bytes(&self) -> Option<&[u8]> {
        match self {
            Cell::Data(bytes) => Some(bytes),
            Cell::Hole | Cell::Reserved => None,
        }
    }
}

/// A change of one sector, or a read of it.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    pub(crate) sector: u64,
    /// Bytes of the sector.
    pub(crate) within: Range<usize>,
    /// Where these bytes lie in the operation's memory.
    pub(crate) at: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Grows when written past its end.
    Regular,
    /// Has the size it has.
    Device,
}

/// What a file system does not do: EOPNOTSUPP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lacks {
    /// Punch holes.
    pub punch: bool,
    /// Zero a range without writing zeros.
    pub zero_range: bool,
    /// Reserve space.
    pub allocate: bool,
}

impl Lacks {
    /// Some of it, on one file system of so many.
    pub fn any(rng: &mut fastrand::Rng, of: u8) -> Lacks {
        let some = rng.u8(0..of) == 0;
        Lacks {
            punch: some && rng.bool(),
            zero_range: some && rng.bool(),
            allocate: some && rng.bool(),
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Bad {
    pub(crate) range: Range<u64>,
    pub(crate) reads: bool,
    pub(crate) writes: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct Medium {
    pub(crate) kind: Kind,
    /// What offset, length and memory of a transfer must be a multiple of (O_DIRECT), else EINVAL.
    pub(crate) align: usize,
    pub(crate) bad: Vec<Bad>,
    pub(crate) lacks: Lacks,
    sector: usize,
    size: Versions<u64>,
    sectors: BTreeMap<u64, Versions<Cell>>,
    dirty: BTreeSet<u64>,
    /// When it was last written to.
    pub(crate) modified: u64,
}

impl Medium {
    pub(crate) fn new(kind: Kind, sector: usize, align: usize, size: u64) -> Medium {
        Medium {
            kind,
            align,
            bad: Vec::new(),
            lacks: Lacks::default(),
            sector,
            size: Versions::new(size),
            sectors: BTreeMap::new(),
            dirty: BTreeSet::new(),
            modified: 0,
        }
    }

    /// Transfers stop short at multiples of this: never inside a sector, as the page cache does not.
    pub(crate) fn grain(&self) -> usize {
        self.align.max(self.sector)
    }

    pub(crate) fn size(&self) -> u64 {
        *self.size.view()
    }

    /// The range cut into pieces of one sector each.
    pub(crate) fn pieces(&self, offset: u64, len: usize) -> Vec<Piece> {
        let sector = self.sector as u64;
        let mut pieces = Vec::with_capacity(len / self.sector + 2);
        let mut at = 0;
        while at < len {
            let from = offset + at as u64;
            let start = (from % sector) as usize;
            let end = (start + len - at).min(self.sector);
            pieces.push(Piece { sector: from / sector, within: start..end, at });
            at += end - start;
        }
        pieces
    }

    /// The pieces of the range whose sectors have space, or may have it again after a power cut: all
    /// that a hole can be punched into.
    pub(crate) fn pieces_with_space(&self, offset: u64, len: u64) -> Vec<Piece> {
        let sector = self.sector as u64;
        let end = offset.saturating_add(len);
        let with_space = self.sectors.range(offset / sector..end.div_ceil(sector));
        with_space
            .filter(|(_, place)| place.is_dirty() || *place.view() != Cell::Hole)
            .map(|(index, _)| {
                let base = index * sector;
                let within = offset.saturating_sub(base) as usize
                    ..end.saturating_sub(base).min(sector) as usize;
                Piece { sector: *index, within, at: 0 }
            })
            .collect()
    }

    /// Where the first bad range begins that this range meets.
    pub(crate) fn first_bad(&self, range: Range<u64>, writes: bool) -> Option<u64> {
        let met = self.bad.iter().filter(|bad| {
            let refuses = if writes { bad.writes } else { bad.reads };
            refuses && bad.range.start < range.end && bad.range.end > range.start
        });
        met.map(|bad| bad.range.start).min()
    }

    /// Whether this piece cannot be written.
    pub(crate) fn is_bad(&self, piece: &Piece) -> bool {
        let base = piece.sector * self.sector as u64;
        let range = base + piece.within.start as u64..base + piece.within.end as u64;
        self.first_bad(range, true).is_some()
    }

    fn cell(&self, sector: u64) -> &Cell {
        self.sectors.get(&sector).map_or(&Cell::Hole, Versions::view)
    }

    pub(crate) fn has_space(&self, sector: u64) -> bool {
        *self.cell(sector) != Cell::Hole
    }

    pub(crate) fn read(&self, piece: &Piece, to: &mut [u8]) {
        match self.cell(piece.sector).bytes() {
            Some(bytes) => to.copy_from_slice(&bytes[piece.within.clone()]),
            None => to.fill(0),
        }
    }

    fn push(&mut self, by: OpId, sector: u64, cell: Cell) {
        let place = self.sectors.entry(sector).or_insert_with(|| Versions::new(Cell::Hole));
        place.push(by, cell);
        self.dirty.insert(sector);
    }

    fn patched(&self, piece: &Piece, change: impl FnOnce(&mut [u8])) -> Cell {
        let mut bytes = match self.cell(piece.sector).bytes() {
            Some(bytes) => bytes.to_vec(),
            None => vec![0; self.sector],
        };
        change(&mut bytes[piece.within.clone()]);
        Cell::Data(bytes.into())
    }

    pub(crate) fn write(&mut self, by: OpId, piece: &Piece, from: &[u8]) {
        let cell = match piece.within.len() == self.sector {
            true => Cell::Data(from.into()),
            false => self.patched(piece, |bytes| bytes.copy_from_slice(from)),
        };
        self.push(by, piece.sector, cell);
        let end = piece.sector * self.sector as u64 + piece.within.end as u64;
        // Also where another operation has grown the file already: that one may yet be lost.
        if end > *self.size.stable() || end > self.size() {
            self.size.push(by, end.max(self.size()));
        }
    }

    /// Zeros: with space where `keep_space`, else a hole where the whole sector is meant.
    pub(crate) fn zero(&mut self, by: OpId, piece: &Piece, keep_space: bool) {
        let whole = piece.within.len() == self.sector;
        let cell = match (whole, keep_space) {
            (true, true) => Cell::Reserved,
            (true, false) => Cell::Hole,
            (false, true) if !self.has_space(piece.sector) => Cell::Reserved,
            (false, false) if !self.has_space(piece.sector) => Cell::Hole,
            (false, _) => self.patched(piece, |bytes| bytes.fill(0)),
        };
        self.push(by, piece.sector, cell);
    }

    pub(crate) fn reserve(&mut self, by: OpId, piece: &Piece) {
        // Also where another operation has reserved it already: that one may yet be lost.
        if self.cell(piece.sector).bytes().is_none() {
            self.push(by, piece.sector, Cell::Reserved);
        }
    }

    /// Change the file's length; gives the sectors that changed with it.
    pub(crate) fn set_len(&mut self, by: OpId, len: u64) -> Vec<u64> {
        let first = len / self.sector as u64;
        let within = (len % self.sector as u64) as usize;
        let shrinks = len < self.size();
        self.size.push(by, len);
        let behind = self.sectors.range(first..).map(|(sector, _)| *sector);
        let touched: Vec<u64> = if shrinks { behind.collect() } else { Vec::new() };
        for sector in &touched {
            let from = if *sector == first { within } else { 0 };
            let piece = Piece { sector: *sector, within: from..self.sector, at: 0 };
            self.zero(by, &piece, false);
        }
        touched
    }

    /// An operation has completed on these sectors; `durable` makes what it wrote stable.
    pub(crate) fn complete(&mut self, by: OpId, sectors: &[u64], at: u64, durable: bool) {
        for sector in sectors {
            let Some(place) = self.sectors.get_mut(sector) else { continue };
            place.complete(by, at);
            if durable {
                place.harden(by);
            }
            if !place.is_dirty() {
                self.dirty.remove(sector);
            }
        }
        self.size.complete(by, at);
        if durable {
            self.size.harden(by);
        }
    }

    pub(crate) fn sync(&mut self, mark: u64) {
        self.size.sync(mark);
        let sectors = &mut self.sectors;
        self.dirty.retain(|sector| {
            let Some(place) = sectors.get_mut(sector) else { return false };
            place.sync(mark);
            place.is_dirty()
        });
    }

    pub(crate) fn forget(&mut self, mark: u64) {
        if self.align > 1 {
            return;
        }
        for sector in &self.dirty {
            if let Some(place) = self.sectors.get_mut(sector) {
                place.forget(mark);
            }
        }
    }

    /// Sectors with space, as a reader sees the file.
    pub(crate) fn sectors_with_space(&self) -> u64 {
        self.sectors.values().filter(|place| *place.view() != Cell::Hole).count() as u64
    }

    /// Call `each` with every sector that ever had space and everything it may hold after a cut.
    pub(crate) fn outcomes(&self, mut each: impl FnMut(u64, &Cell)) {
        for (sector, place) in &self.sectors {
            for cell in place.outcomes() {
                each(*sector, cell);
            }
        }
    }

    /// What a power cut leaves, as `style` says.
    pub(crate) fn after_power_cut(&self, style: Style, rng: &mut fastrand::Rng) -> Medium {
        let size = *style.pick(&self.size, rng);
        let mut left = Medium::new(self.kind, self.sector, self.align, size);
        left.bad.clone_from(&self.bad);
        left.lacks = self.lacks;
        left.modified = self.modified;
        for (index, place) in &self.sectors {
            let cell = self.inside(*index, style.pick(place, rng).clone(), size);
            if cell != Cell::Hole {
                left.sectors.insert(*index, Versions::new(cell));
            }
        }
        left
    }

    /// What a killed program leaves: nothing that had completed is lost while the power is on.
    pub(crate) fn kill(&mut self, at: u64, rng: &mut fastrand::Rng) {
        let mut choose = |in_flight: usize| rng.usize(0..=in_flight);
        self.size.kill(at, |in_flight| in_flight);
        for place in self.sectors.values_mut() {
            place.kill(at, &mut choose);
        }
        self.dirty = self
            .sectors
            .iter()
            .filter(|(_, place)| place.is_dirty())
            .map(|(index, _)| *index)
            .collect();
    }

    /// The cell in a file of that size: what lies past the end is zeros.
    fn inside(&self, index: u64, cell: Cell, size: u64) -> Cell {
        let inside = size.saturating_sub(index * self.sector as u64);
        match &cell {
            Cell::Data(_) if inside == 0 => Cell::Reserved,
            Cell::Data(bytes) if inside < self.sector as u64 => {
                let mut bytes = bytes.to_vec();
                bytes[inside as usize..].fill(0);
                Cell::Data(bytes.into())
            }
            _ => cell,
        }
    }
}

/// How a power cut chooses among the values that a sector may hold.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Style {
    /// Nothing of the cache was written.
    Oldest,
    /// All of it was.
    Newest,
    /// It was written in the order of operations, up to this one.
    Prefix(OpId),
    /// Each sector for itself.
    Any,
}

impl Style {
    fn pick<'a, T: Clone>(self, place: &'a Versions<T>, rng: &mut fastrand::Rng) -> &'a T {
        match self {
            Style::Oldest => place.stable(),
            Style::Newest => place.view(),
            Style::Prefix(last) => place.as_of(last),
            Style::Any => {
                let mut outcomes = place.outcomes();
                let chosen = rng.usize(0..outcomes.len());
                outcomes.nth(chosen).unwrap_or_else(|| place.stable())
            }
        }
    }
}
