//! qcow2 images (source: docs/interop/qcow2 of QEMU).

mod bitmap;
pub mod bitmap_directory;
mod bits;
pub mod bytes;
mod check;
pub mod compressed;
mod counts;
mod create;
mod decoder;
pub mod extension;
pub mod header;
mod offline;
mod resize;
mod rewrite;
mod snapshot;
pub mod snapshot_table;
mod tool;
mod walk;

pub use bitmap::{BitmapChange, BitmapSet, change_bitmaps, list_bitmaps, load_bitmap};
pub use bitmap_directory::BitmapEntry;
pub use bits::Bits;
pub use check::{Repair, Report, check};
pub use create::{CreateOptions, Preallocation, create};
pub use decoder::Decoder;
pub use header::{Compression, Crypt, Header, HeaderError};
pub use resize::{ResizeOptions, resize};
pub use snapshot::{apply_snapshot, create_snapshot, delete_snapshot, list_snapshots};
pub use snapshot_table::Snapshot;
pub use tool::ToolError;
