//! VHD, the format of Virtual PC, Hyper-V generation 1, Azure and Xen's tools: fixed, dynamic and
//! differencing (source: Microsoft's Virtual Hard Disk Image Format Specification 1.0).
//!
//! Disks have up to 2040 GiB, and files of dynamic ones up to 2 TiB: their tables name places by 32-bit
//! sector numbers.
//!
//! A dynamic VHD is cut into blocks, usually of 2 MiB. The allocation table (BAT) says where each
//! block lies, if it does; before a block's bytes lies its sector bitmap: where a bit is clear, the
//! sector reads as the parent's, or as zeros. Blocks never move and are never freed. New blocks are put
//! so that their bytes begin at multiples of 4 KiB.
//!
//! What is changed waits in memory for a flush (`flush.rs`): bitmaps of new blocks, a sync, then the
//! table's entries and the bits of older blocks, a sync. The file grows ahead of need (`room.rs`); the
//! footer at its end moves along, and the copy at its beginning, which is never touched, counts.
//!
//! After a power cut or a kill there may be bytes behind the last block that the table knows. Here and
//! in Xen's tools nothing of them is ever seen; QEMU would take them for zeros in the next block that it
//! allocates, so such an image is to be opened for writing here, or repaired by the check, first.

mod allocate;
mod bitmap;
mod check;
mod common;
mod create;
mod dynamic;
mod fixed;
mod flush;
mod footer;
mod header;
mod layout;
mod open;
mod parent;
mod resize;
mod restart;
mod room;
mod sabotage;
mod shared;

use crate::container::os;
use common::{BLOCK_ALIGN, bad, end_with_footer};

pub use check::{Report, check};
pub use create::{CreateOptions, Parent, create};
pub use footer::{Footer, FooterError, Kind, MOST, geometry, size_and_geometry};
pub use header::{Header, HeaderError, Locator};
pub use open::{Facts, facts, open, open_in, open_in_with, settle};
pub use resize::resize;
pub use restart::left;
#[cfg(feature = "sabotage")]
pub use sabotage::{Sabotage, sabotage};
