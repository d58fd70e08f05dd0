//! What the files of a VMDK have in common.

use std::fmt::Display;

use crate::container::malformed;
use crate::{Container, OpenError};

pub(super) const SECTOR: u64 = 512;
/// The longest descriptor that is read.
pub(super) const DESCRIPTOR: u64 = 1 << 20;
/// The most grain tables of an image: 16 TiB of 64 KiB grains.
pub(super) const MOST_TABLES: usize = 1 << 19;
/// The largest disk: 62 TiB.
pub(super) const MOST: u64 = 62 << 40;

/// What is wrong with a VMDK.
pub(super) fn bad(
    container: &Container,
    at: u64,
    found: impl Display,
    advice: &'static str,
) -> OpenError {
    malformed("VMDK", container, at, found, advice)
}
