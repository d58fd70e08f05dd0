//! What every image format answers.

use std::future::Future;
use std::pin::Pin;

use ringtap_io::{File, Io};

use crate::Error;

/// A future of an image's slow path.
pub type Boxed<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// How host caching is used, with QEMU's meanings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum CacheMode {
    /// O_DIRECT; the guest's flushes are carried out.
    #[default]
    None,
    /// The host's page cache; the guest's flushes are carried out.
    Writeback,
    /// The host's page cache for reads; every write is stable before it is acknowledged.
    Writethrough,
    /// O_DIRECT, and every write is stable before it is acknowledged.
    DirectSync,
    /// The host's page cache, and flushes are not carried out: a power cut may lose anything.
    Unsafe,
}

impl CacheMode {
    /// Whether the image's file is opened with O_DIRECT.
    pub fn direct(self) -> bool {
        matches!(self, CacheMode::None | CacheMode::DirectSync)
    }

    /// Whether each write is stable before it is acknowledged, so that the guest sees no write cache.
    pub fn writethrough(self) -> bool {
        matches!(self, CacheMode::Writethrough | CacheMode::DirectSync)
    }

    /// Whether flushes are carried out.
    pub fn flushes(self) -> bool {
        self != CacheMode::Unsafe
    }
}

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
}

/// Where the bytes at an offset are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// In a file, as they are.
    Data {
        /// The file.
        file: File,
        /// The offset in it.
        offset: u64,
        /// Bytes from there on, never 0.
        len: u64,
        /// Whether a write may go there.
        writable: bool,
    },
    /// Nowhere: they read as zeros.
    Zero {
        /// Bytes, never 0.
        len: u64,
        /// Whether a write is taken, and forgotten.
        writable: bool,
    },
}

/// What to make of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Discard {
    /// The content is not needed any more. Reads give zeros or the old bytes.
    Free,
    /// It must read as zeros; `unmap` allows its space to be freed.
    Zero {
        /// Whether space may be freed.
        unmap: bool,
    },
}

/// What a range holds, for block status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// Bytes this holds for, never 0.
    pub len: u64,
    /// Whether space is allocated.
    pub allocated: bool,
    /// Whether it reads as zeros.
    pub zero: bool,
}

/// An image of some format.
pub trait Image: Send + Sync {
    /// The facts.
    fn info(&self) -> &Info;

    /// The same image for another queue thread.
    fn fork(&self) -> Box<dyn Image>;

    /// Where the bytes at `offset` are; `len` > 0 lies within the disk. Memory only: never waits.
    fn map(&self, offset: u64, len: u64) -> Extent;

    /// Make all completed writes stable.
    fn flush<'a>(&'a self, io: &'a Io) -> Boxed<'a, Result<(), Error>>;

    /// Free or zero a range whose ends are multiples of `discard_alignment`.
    /// [`Error::Unsupported`] where it would take writing the zeros.
    fn discard<'a>(
        &'a self,
        io: &'a Io,
        offset: u64,
        len: u64,
        mode: Discard,
    ) -> Boxed<'a, Result<(), Error>>;

    /// What the range from `offset` holds; `len` > 0 lies within the disk. May block on the file
    /// system.
    fn status(&self, offset: u64, len: u64) -> Result<Status, Error>;

    /// The disk's size as it is now, where someone may have resized the image's file.
    fn current_size(&self) -> Result<u64, Error>;
}
