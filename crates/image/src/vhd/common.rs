//! What reading and writing VHDs have in common.

use std::fmt::Display;

use ringtap_io::Io;

use super::footer::{Footer, SECTOR};
use crate::container::malformed;
use crate::{Container, Error, OpenError};

/// New blocks' bytes begin at multiples of this.
pub(super) const BLOCK_ALIGN: u64 = 4096;

/// Put the footer right behind the last structure, and let the file end with it. QEMU takes all but
/// that one sector of what lies there for zeros.
pub(super) async fn end_with_footer(
    io: &Io,
    container: &Container,
    footer: &Footer,
    data_end: u64,
) -> Result<(), Error> {
    container.write(io, data_end, footer.bytes()).await?;
    container.sync(io).await?;
    container.set_len(io, data_end + SECTOR).await?;
    container.sync(io).await
}

/// What is wrong with a VHD.
pub(super) fn bad(
    container: &Container,
    at: u64,
    found: impl Display,
    advice: &'static str,
) -> OpenError {
    malformed("VHD", container, at, found, advice)
}
