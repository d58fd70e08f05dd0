//! What an L2 entry says, and where it is found (docs/interop/qcow2 of QEMU: "Cluster mapping").

use std::ops::Range;

use super::header::{COMPRESSED, COPIED, Header, OFFSET_MASK, ZERO, incompatible};

/// Tables are kept in memory in slices of so many bytes, or of a cluster where that is less.
const SLICE_OF_DEVICE: u64 = 4096;
/// The same where bringing a slice to memory is no more than copying it.
const SLICE_OF_MEMORY: u64 = 1024;
/// The most slices there are, each of which may take a word of memory; those of larger disks (beyond
/// 64 TiB with clusters of 64 KiB, or 256) are longer.
const MOST_SLICES: u64 = 8 << 20;
/// Subclusters of a cluster with extended L2 entries.
const SUBCLUSTERS: u64 = 32;

/// The sizes of an image's structures.
#[derive(Clone, Debug)]
pub(super) struct Geometry {
    /// Bytes the guest sees, a multiple of 512.
    pub(super) size: u64,
    pub(super) cluster_bits: u32,
    /// A unit is what can be allocated by itself: a subcluster with extended entries, else a cluster.
    pub(super) unit_bits: u32,
    /// 64-bit words of an entry: 2 to the power of this.
    word_bits: u32,
    /// Entries of a table and of a slice: 2 to the power of these.
    table_bits: u32,
    slice_bits: u32,
    /// Whether plain zero clusters exist.
    pub(super) zero_flag: bool,
    /// Whether host offsets are those of an external file, and equal to the guest's.
    pub(super) data_file: bool,
}

impl Geometry {
    /// `copied`: whether the image's bytes are in the host's memory.
    pub(super) fn new(header: &Header, copied: bool) -> Geometry {
        let slice = if copied { SLICE_OF_MEMORY } else { SLICE_OF_DEVICE };
        let cluster = header.cluster_size();
        let word_bits = u32::from(header.extended_l2());
        let entries = |bytes: u64| (bytes / 8 >> word_bits).trailing_zeros();
        let table_bits = entries(cluster);
        let mut slice_bits = entries(cluster.min(slice));
        let clusters = header.size.div_ceil(cluster);
        while slice_bits < table_bits && clusters >> slice_bits >= MOST_SLICES {
            slice_bits += 1;
        }
        Geometry {
            size: header.size - header.size % 512,
            cluster_bits: header.cluster_bits,
            unit_bits: header.subcluster_size().trailing_zeros(),
            word_bits,
            table_bits,
            slice_bits,
            zero_flag: header.version > 2,
            data_file: header.has(incompatible::DATA_FILE),
        }
    }

    pub(super) fn cluster(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Whether entries tell of subclusters.
    pub(super) fn extended(&self) -> bool {
        self.word_bits > 0
    }

    pub(super) fn units(&self) -> u64 {
        if self.extended() { SUBCLUSTERS } else { 1 }
    }

    /// Clusters of the disk.
    pub(super) fn clusters(&self) -> u64 {
        self.size.div_ceil(self.cluster())
    }

    pub(super) fn tables(&self) -> u64 {
        self.clusters().div_ceil(1 << self.table_bits)
    }

    pub(super) fn slices(&self) -> u64 {
        self.tables() * self.slices_of_table()
    }

    pub(super) fn slices_of_table(&self) -> u64 {
        1 << (self.table_bits - self.slice_bits)
    }

    pub(super) fn words_of_slice(&self) -> usize {
        1 << (self.slice_bits + self.word_bits)
    }

    pub(super) fn bytes_of_slice(&self) -> u64 {
        8 << (self.slice_bits + self.word_bits)
    }

    pub(super) fn slice_of(&self, cluster: u64) -> u64 {
        cluster >> self.slice_bits
    }

    pub(super) fn table_of_slice(&self, slice: u64) -> u64 {
        slice >> (self.table_bits - self.slice_bits)
    }

    pub(super) fn table_of(&self, cluster: u64) -> u64 {
        cluster >> self.table_bits
    }

    /// Where in its table a slice begins, in bytes.
    pub(super) fn offset_in_table(&self, slice: u64) -> u64 {
        (slice % self.slices_of_table()) * self.bytes_of_slice()
    }

    /// The first word of a cluster's entry in its slice.
    pub(super) fn word_of(&self, cluster: u64) -> usize {
        (self.index_of(cluster) << self.word_bits) as usize
    }

    /// The index of a cluster's entry in its slice.
    pub(super) fn index_of(&self, cluster: u64) -> u64 {
        cluster & ((1 << self.slice_bits) - 1)
    }

    /// The clusters of a slice, past the disk's end too.
    pub(super) fn clusters_of_slice(&self, slice: u64) -> Range<u64> {
        slice << self.slice_bits..(slice + 1) << self.slice_bits
    }

    /// The clusters of a table, past the disk's end too.
    pub(super) fn clusters_of_table(&self, table: u64) -> Range<u64> {
        table << self.table_bits..(table + 1) << self.table_bits
    }

    /// Bytes of a cluster that lie on the disk: fewer than a cluster at its end.
    pub(super) fn bytes_of(&self, cluster: u64) -> u64 {
        self.size.saturating_sub(cluster << self.cluster_bits).min(self.cluster())
    }

    /// The units that a range within a cluster touches, as bits.
    pub(super) fn touched(&self, range: &Range<u64>) -> u32 {
        bits(range.start >> self.unit_bits..range.end.div_ceil(1 << self.unit_bits))
    }

    /// The units that a range within a cluster covers; the disk's end ends its last unit.
    pub(super) fn covered(&self, cluster: u64, range: &Range<u64>) -> u32 {
        let first = range.start.div_ceil(1 << self.unit_bits);
        let last = match range.end == self.bytes_of(cluster) {
            true => self.units(),
            false => range.end >> self.unit_bits,
        };
        bits(first..last)
    }
}

/// The bits of a range.
pub(super) fn bits(range: Range<u64>) -> u32 {
    let below = |end: u64| ((1u64 << end.min(32)) - 1) as u32;
    below(range.end) & !below(range.start)
}

/// An L2 entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) word: u64,
    /// Allocated units in the low half, units of zeros in the high half; 0 without extended entries.
    pub(super) bitmap: u64,
}

/// What an entry says of one unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Nothing: a backing file may have it.
    Unallocated,
    /// It reads as zeros; the host cluster is one that waits to be used.
    Zero { host: Option<u64> },
    /// It lies there. `own`: nobody else refers to it.
    Data { host: u64, own: bool },
    /// The whole cluster is compressed.
    Compressed,
    /// What no entry may say.
    Bad,
}

impl Entry {
    pub(super) fn is_compressed(self) -> bool {
        self.word & COMPRESSED != 0
    }

    /// The host cluster, where the entry has one.
    pub(super) fn host(self, geometry: &Geometry) -> Option<u64> {
        let host = self.word & OFFSET_MASK;
        let there = host != 0 || (geometry.data_file && self.word & COPIED != 0);
        (there && !self.is_compressed()).then_some(host)
    }

    /// Whether nobody else refers to the host cluster.
    pub(super) fn is_own(self) -> bool {
        self.word & (COPIED | COMPRESSED) == COPIED
    }

    pub(super) fn allocated(self) -> u32 {
        self.bitmap as u32
    }

    pub(super) fn zeros(self) -> u32 {
        (self.bitmap >> 32) as u32
    }

    pub(super) fn kind(self, geometry: &Geometry, unit: u64) -> Kind {
        if self.is_compressed() {
            return if geometry.data_file { Kind::Bad } else { Kind::Compressed };
        }
        let zero_flag = if geometry.zero_flag && !geometry.extended() { ZERO } else { 0 };
        let offset = self.word & OFFSET_MASK;
        let wrong = self.word & !(OFFSET_MASK | COPIED | zero_flag) != 0
            || offset & (geometry.cluster() - 1) != 0
            || self.allocated() & self.zeros() != 0;
        if wrong {
            return Kind::Bad;
        }
        let host = self.host(geometry);
        let own = self.word & COPIED != 0;
        let (data, zero) = match geometry.extended() {
            true => (self.allocated() >> unit & 1 != 0, self.zeros() >> unit & 1 != 0),
            false => (self.word & zero_flag == 0, self.word & zero_flag != 0),
        };
        match host {
            _ if zero => Kind::Zero { host },
            Some(host) if data => Kind::Data { host: host + (unit << geometry.unit_bits), own },
            None if data && geometry.extended() => Kind::Bad,
            _ => Kind::Unallocated,
        }
    }

    /// How many units from `unit` on the entry says the same of.
    pub(super) fn same(self, geometry: &Geometry, unit: u64) -> u64 {
        if !geometry.extended() || self.is_compressed() {
            return geometry.units() - unit;
        }
        let run = |bits: u32| {
            let bits = bits >> unit;
            let same = if bits & 1 != 0 { bits.trailing_ones() } else { bits.trailing_zeros() };
            u64::from(same)
        };
        run(self.allocated()).min(run(self.zeros())).min(geometry.units() - unit)
    }
}
