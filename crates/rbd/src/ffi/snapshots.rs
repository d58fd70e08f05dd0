//! Snapshots of an image, and clones of them.

use std::ffi::{CStr, c_int};
use std::ptr;

use super::{Image, Pool, SnapshotInfo, c_text, done};
use crate::snapshots::Snapshot;

/// The most that are looked at.
const MANY: usize = 4096;

impl Image {
    /// Its snapshots, the oldest first.
    pub(crate) fn snapshots(&self) -> Result<Vec<Snapshot>, i32> {
        let api = self.pool.api;
        let mut list: Vec<SnapshotInfo> =
            (0..MANY).map(|_| SnapshotInfo { id: 0, size: 0, name: ptr::null() }).collect();
        let mut count = list.len() as c_int;
        // SAFETY: room for so many.
        let found = unsafe { (api.rbd_snap_list)(self.image, list.as_mut_ptr(), &mut count) };
        done(found)?;
        let known = list[..(found as usize).min(MANY)].iter().map(|one| {
            let mut taken = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            // SAFETY: a place for the time. One that is gone meanwhile has none.
            let _ = unsafe { (api.rbd_snap_get_timestamp)(self.image, one.id, &mut taken) };
            // SAFETY: librbd gives texts that end, which are there until the list's end.
            let name = unsafe { CStr::from_ptr(one.name) }.to_string_lossy().into_owned();
            Snapshot { id: one.id, name, size: one.size, taken: taken.tv_sec as u64 }
        });
        let known = known.collect();
        // SAFETY: what it was just given.
        unsafe { (api.rbd_snap_list_end)(list.as_mut_ptr()) };
        Ok(known)
    }

    /// Take one.
    pub(crate) fn take_snapshot(&self, name: &str) -> Result<(), i32> {
        let name = c_text(name)?;
        // SAFETY: a text that ends.
        done(unsafe { (self.pool.api.rbd_snap_create)(self.image, name.as_ptr()) })
    }

    /// Remove one.
    pub(crate) fn remove_snapshot(&self, name: &str) -> Result<(), i32> {
        let name = c_text(name)?;
        // SAFETY: a text that ends.
        done(unsafe { (self.pool.api.rbd_snap_remove)(self.image, name.as_ptr()) })
    }

    /// Be as it was at one.
    pub(crate) fn roll_back(&self, name: &str) -> Result<(), i32> {
        let name = c_text(name)?;
        // SAFETY: a text that ends.
        done(unsafe { (self.pool.api.rbd_snap_rollback)(self.image, name.as_ptr()) })
    }
}

impl Pool {
    /// Make an image in `to` that is, until it is written to, that snapshot of an image here.
    pub(crate) fn clone_to(
        &self,
        image: &str,
        snapshot: &str,
        to: &Pool,
        clone: &str,
    ) -> Result<(), i32> {
        let (image, snapshot, clone) = (c_text(image)?, c_text(snapshot)?, c_text(clone)?);
        let mut options = ptr::null_mut();
        // SAFETY: a place for the handle; texts that end; the options are there until they are destroyed.
        unsafe {
            (self.api.rbd_image_options_create)(&mut options);
            let made = (self.api.rbd_clone3)(
                self.io,
                image.as_ptr(),
                snapshot.as_ptr(),
                to.io,
                clone.as_ptr(),
                options,
            );
            (self.api.rbd_image_options_destroy)(options);
            done(made)
        }
    }
}
