//! VMDK, VMware's format, read-only and without parents: sparse (also stream-optimized) and flat extents,
//! in one file or many (source: VMware's Virtual Disk Format 5.0).

mod common;
mod descriptor;
mod facts;
mod image;
mod open;
mod sparse;

pub use facts::{ExtentFacts, Facts, facts};
pub use open::{open, open_in};
