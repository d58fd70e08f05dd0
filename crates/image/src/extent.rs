//! Where bytes of a disk lie, and what a range of it holds.

use ringtap_io::File;

/// Where the bytes at an offset are. Lengths count from that offset, are never 0, and reach no
/// further than was asked.
#[derive(Clone, Copy, Debug)]
pub enum Extent<'a> {
    /// In a file, as they are or enciphered.
    Data {
        /// The file.
        file: File,
        /// The offset in it.
        offset: u64,
        /// Bytes from there on.
        len: u64,
        /// Whether a write may go there; else room for it must be allocated.
        writable: bool,
        /// How the bytes there are enciphered.
        cipher: Option<Cipher<'a>>,
    },
    /// Nowhere: they read as zeros.
    Zero {
        /// Bytes.
        len: u64,
        /// Whether a write is taken and forgotten; else room for it must be allocated.
        writable: bool,
    },
    /// In a file, compressed: see [`crate::Image::decompress`]. A write needs room allocated.
    Compressed {
        /// Bytes, once decompressed.
        len: u64,
    },
    /// Not known before [`crate::Image::load`].
    NotLoaded,
}

/// The cipher of an extent's bytes.
#[derive(Clone, Copy)]
pub struct Cipher<'a> {
    /// The cipher with its key.
    pub key: &'a dyn SectorCipher,
    /// Where the extent's first byte lies in the enciphered whole, by which its sectors are numbered.
    pub offset: u64,
}

impl std::fmt::Debug for Cipher<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cipher").field("offset", &self.offset).finish_non_exhaustive()
    }
}

/// A cipher of sectors: each on its own, its number deciding how.
pub trait SectorCipher: Send + Sync {
    /// Bytes of a sector: 512 to 4096. Offsets and lengths are multiples of it.
    fn sector_size(&self) -> u64;

    /// Encipher the sectors from `offset` in place.
    fn encrypt(&self, offset: u64, bytes: &mut [u8]);

    /// Decipher the sectors from `offset` in place.
    fn decrypt(&self, offset: u64, bytes: &mut [u8]);
}

/// Room for a write, made by [`crate::Image::allocate`] and invisible before [`crate::Image::commit`].
///
/// The old content of `head` bytes before the write and of `tail` bytes after it must be written
/// along with the guest's bytes, one after the other from `offset` in the file.
#[derive(Debug)]
pub struct Allocation<'a> {
    /// The file.
    pub file: File,
    /// Where in the file the head begins, or the guest's bytes where there is no head.
    pub offset: u64,
    /// Bytes of old content before the write.
    pub head: u64,
    /// Bytes of the write that there is room for, never 0, counted from its offset. Where `head` or
    /// `tail` is not 0, the three together are no more than a cluster.
    pub len: u64,
    /// Bytes of old content after those.
    pub tail: u64,
    /// How what is written there must be enciphered.
    pub cipher: Option<Cipher<'a>>,
    /// For the image itself.
    pub token: u64,
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
    /// Whether space is allocated, here or in a backing file.
    pub allocated: bool,
    /// Whether it reads as zeros.
    pub zero: bool,
    /// How many layers below the image the content comes from: 0 is the image itself. Where no layer
    /// has it, one more than the deepest of them for a format with backing files (but 0 past the end of
    /// a shorter one), else 0.
    pub depth: u32,
    /// Whether a layer says what it holds, as against nobody having written it.
    pub present: bool,
    /// Whether it is compressed.
    pub compressed: bool,
    /// Where it lies in that layer's file, if it lies there as it is.
    pub at: Option<u64>,
}

impl Status {
    /// Data, somewhere.
    pub fn data(len: u64) -> Status {
        Status {
            len,
            allocated: true,
            zero: false,
            depth: 0,
            present: true,
            compressed: false,
            at: None,
        }
    }

    /// No space, zeros.
    pub fn hole(len: u64) -> Status {
        Status { allocated: false, zero: true, ..Status::data(len) }
    }
}
