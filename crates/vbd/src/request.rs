//! What a guest or client asks for.

use ringtap_io::Mem;

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Fill `mem` from the disk.
    Read,
    /// Write `mem` to the disk.
    Write,
    /// Make every write acknowledged before stable.
    Flush,
    /// The range is not needed any more.
    Discard,
    /// The range must read as zeros.
    WriteZeroes {
        /// Whether its space may be freed.
        unmap: bool,
        /// Fail with [`crate::Error::Unsupported`] rather than write zeros.
        fast: bool,
    },
}

/// One request of a guest or client.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// What it asks for.
    pub kind: Kind,
    /// Where it begins, in bytes.
    pub offset: u64,
    /// How many bytes; for reads and writes the length of `mem`.
    pub len: u64,
    /// The guest's memory.
    pub mem: Mem,
    /// Whether what it writes must be stable when it is acknowledged.
    pub fua: bool,
}
