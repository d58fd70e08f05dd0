//! What may be wrong with a header, and what tells that it is one.

/// `QFI\xfb`.
pub const MAGIC: [u8; 4] = *b"QFI\xfb";

/// What is wrong with a header. The file's name is put before it by whoever knows it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// Not qcow2 at all.
    #[error(
        "it begins with the bytes {found:02x?}, a qcow2 image with {MAGIC:02x?}: \
         name its real format with -f"
    )]
    Magic {
        /// The first bytes.
        found: [u8; 4],
    },
    /// The file or the first cluster ends inside the header.
    #[error("{len} bytes are too few for a qcow2 header, which needs {need}: the image is cut off")]
    Short {
        /// Bytes there are.
        len: usize,
        /// Bytes needed.
        need: usize,
    },
    /// A field holds what it may not.
    #[error("header byte {at}: {name} is {found:#x}, but {want}")]
    Field {
        /// Where the field is.
        at: usize,
        /// Its name in the specification.
        name: &'static str,
        /// What it holds.
        found: u64,
        /// What it may hold.
        want: &'static str,
    },
    /// Features nobody here knows.
    #[error(
        "it uses features that this version does not know: {names}; \
         use the program that made it, or a later version"
    )]
    Unknown {
        /// Their names, from the image's own table, and their bits.
        names: String,
    },
    /// A header extension runs past the header area.
    #[error(
        "header extension {kind:#010x} at byte {at} says it has {len} bytes, \
         and {room} are left in the header area"
    )]
    Extension {
        /// Its type.
        kind: u32,
        /// Where it begins.
        at: usize,
        /// The length it names.
        len: u64,
        /// The bytes there are.
        room: u64,
    },
    /// A header extension's content makes no sense.
    #[error("header extension {kind:#010x}: {what}")]
    Content {
        /// Its type.
        kind: u32,
        /// What is wrong.
        what: &'static str,
    },
    /// The header is too long for the first cluster.
    #[error(
        "header, extensions and backing file name take {need} bytes, and a cluster has {room}: \
         use larger clusters or a shorter name"
    )]
    Full {
        /// Bytes needed.
        need: usize,
        /// Bytes of a cluster.
        room: usize,
    },
}
