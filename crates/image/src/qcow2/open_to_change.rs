//! Opening an image at rest to change it.

use ringtap_io::Io;

use super::check;
use super::header::{autoclear, incompatible};
use super::offline::Offline;
use super::tool::ToolError;
use crate::Container;

impl<'a> Offline<'a> {
    /// As [`Offline::open`], to change it: not where it must be repaired first. Refcounts that its last user did not write
    /// are found out again, as where a disk is served from it.
    pub(super) async fn open_to_change(
        io: &'a Io,
        container: &'a Container,
    ) -> Result<Offline<'a>, ToolError> {
        let mut image = Offline::open(io, container).await?;
        if image.header.has(incompatible::CORRUPT) {
            return Err(image.refused("it is marked corrupt: run check --repair all first"));
        }
        if image.header.has(incompatible::DIRTY) {
            if check::repair_unasked(io, container).await?.corruptions > 0 {
                let why = "its refcounts were not written when it was last used and cannot be repaired: look at it with check";
                return Err(image.refused(why));
            }
            image = Offline::open(io, container).await?;
        }
        image.header.autoclear &= autoclear::KNOWN;
        Ok(image)
    }
}
