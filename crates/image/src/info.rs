//! The facts of an open image.

/// The facts of an open image.
#[derive(Clone, Debug)]
pub struct Info {
    /// The format's name.
    pub format: &'static str,
    /// Bytes the guest sees; a multiple of 512.
    pub size: u64,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Offsets and lengths of reads and writes must be multiples of this (1: any will do).
    pub request_alignment: u64,
    /// Memory must start and end at multiples of this.
    pub memory_alignment: usize,
    /// Discards and write-zeroes work on multiples of this.
    pub discard_alignment: u64,
    /// Sector size to show the guest.
    pub logical_block_size: u32,
    /// Size the guest had better write in.
    pub physical_block_size: u32,
    /// Whether discards free space.
    pub discard: bool,
    /// Whether zeros can be written without writing them.
    pub fast_zero: bool,
    /// Whether the disk below seeks.
    pub rotational: bool,
}
