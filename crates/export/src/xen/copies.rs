//! Copies gathered from many requests, made by one call.

use std::ptr;

use super::gntdev::{Copy, Foreign, Way};
use super::persistent::PersistentGrants;
use super::wire::Segment;

/// Copies and whose they are.
#[derive(Default)]
pub(crate) struct Copies {
    list: Vec<Copy>,
    owners: Vec<u16>,
}

impl Copies {
    /// Add those between the segments and `local`, which holds them one after the other. With pages that
    /// are mapped they are made at once.
    pub(crate) fn add(
        &mut self,
        owner: u16,
        domain: u16,
        kept: Option<&PersistentGrants>,
        segments: &[Segment],
        local: &mut [u8],
        way: Way,
    ) {
        let mut rest = local;
        for segment in segments {
            let Some((piece, behind)) = rest.split_at_mut_checked(segment.len.into()) else {
                return;
            };
            match kept.and_then(|kept| kept.address(segment)) {
                // SAFETY: a segment lies in its page (`wire` refuses others), which is mapped while `kept` is
                // borrowed, and is no part of `local`. The frontend may change its bytes meanwhile: any will do.
                Some(page) => unsafe { copy(page, piece, way) },
                None => {
                    let Segment { grant, offset, len } = *segment;
                    self.list.push(Copy::new(domain, grant, offset, piece.as_mut_ptr(), len, way));
                    self.owners.push(owner);
                }
            }
            rest = behind;
        }
    }

    /// Make them all, and begin a new list. `failed` is called with the owner of each that failed.
    ///
    /// # Safety
    /// The local memory of each has not been given back, and nobody uses it.
    pub(crate) unsafe fn make(&mut self, foreign: &impl Foreign, mut failed: impl FnMut(u16)) {
        if self.list.is_empty() {
            return;
        }
        // SAFETY: the caller's promise is the one asked here.
        let made = unsafe { foreign.copy(&mut self.list) };
        if let Err(error) = &made {
            tracing::warn!("cannot copy {} pieces of a frontend's pages: {error}", self.list.len());
        }
        for (copy, owner) in self.list.iter().zip(&self.owners) {
            if made.is_err() || !copy.succeeded() {
                failed(*owner);
            }
        }
        self.list.clear();
        self.owners.clear();
    }
}

/// Copy between a frontend's bytes and ours.
///
/// # Safety
/// At `theirs` are as many bytes as in `ours`, valid for reads and writes, and none of them are ours.
unsafe fn copy(theirs: *mut u8, ours: &mut [u8], way: Way) {
    let (local, len) = (ours.as_mut_ptr(), ours.len());
    match way {
        // SAFETY: the caller's promise.
        Way::FromFrontend => unsafe { ptr::copy_nonoverlapping(theirs, local, len) },
        // SAFETY: the same.
        Way::ToFrontend => unsafe { ptr::copy_nonoverlapping(local, theirs, len) },
    }
}
