//! The bitmaps of a disk, as its users have them kept, bound to another image and closed.

use std::sync::Arc;

use ringtap_image::bitmap_store::{Binding, BitMemory, BitmapStore, How, KeptIn};
use ringtap_image::{Container, Error};
use ringtap_io::Io;

#[cfg(feature = "sabotage")]
use super::BitmapWrongs;
use super::{DirtyBitmap, lock, numbers, restore, write};
use crate::Disk;
use crate::keep::Keep;

impl Disk {
    /// Its dirty bitmaps, in the order in which they were made.
    pub fn dirty_bitmaps(&self) -> Vec<DirtyBitmap> {
        let broken = self.shared.medium.bitmaps.keep().is_some_and(|keep| keep.is_broken());
        let mut all = lock(&self.shared.medium.bitmaps.all).clone();
        for one in all.iter_mut().filter(|one| broken && one.persistent && one.lost.is_none()) {
            one.lost = Some("its log could not be written".into());
        }
        all
    }

    /// Whether persistent bitmaps can be added.
    pub fn keeps_bitmaps(&self) -> bool {
        self.shared.medium.bitmaps.keep().is_some()
    }

    /// How often a request to a clean region has had its bitmaps' log made stable.
    pub fn bitmap_log_syncs(&self) -> u64 {
        self.shared.medium.bitmaps.keep().map_or(0, |keep| keep.syncs())
    }

    /// Have bitmaps be kept, and find those that are there. Nothing is in flight, and nobody else changes them.
    ///
    /// # Errors
    /// Where they cannot be kept there: nothing is changed.
    pub async fn keep_bitmaps(&self, io: &Io, kept: KeptIn) -> std::io::Result<()> {
        let (store, restored) = BitmapStore::open(io, kept).await?;
        let (memory, size) = (store.memory().clone(), self.size());
        let found: Vec<DirtyBitmap> =
            restored.into_iter().map(|one| restore(one, &memory, size)).collect();
        if let Some(next) = lock(&self.shared.medium.bitmaps.next).take() {
            store.announce(next)?;
        }
        let keep = Arc::new(Keep::new(store));
        // Before the first write: from now on a power cut finds this state and what is logged in it.
        let end = write(&keep, io, size, &found, How::Open).await;
        end.map_err(|error| std::io::Error::from_raw_os_error(error.errno()))?;
        keep.store.forget_but(&numbers(&found));
        let bitmaps = &self.shared.medium.bitmaps;
        *lock(&bitmaps.keep) = Some(keep);
        lock(&bitmaps.all).extend(found);
        bitmaps.mark_those_there_are();
        Ok(())
    }

    /// The disk goes on in another image, `binding` is of: what is kept is of that from now on.
    ///
    /// # Errors
    /// Where that cannot be written: after a stop the bitmaps are lost.
    pub async fn rebind_bitmaps(&self, io: &Io, binding: Binding) -> std::io::Result<()> {
        let bitmaps = &self.shared.medium.bitmaps;
        let _alone = self.bitmaps_alone().await;
        *lock(&bitmaps.next) = None;
        let Some(keep) = bitmaps.keep() else { return Ok(()) };
        let former = keep.store.rebind(binding)?;
        let all = lock(&bitmaps.all).clone();
        let end = write(&keep, io, self.size(), &all, How::Open).await;
        end.map_err(|error| std::io::Error::from_raw_os_error(error.errno()))?;
        keep.store.memory().forget(former);
        Ok(())
    }

    /// The disk is about to go on in another image, `binding` is of: [`Disk::rebind_bitmaps`] comes once it has. It is stable
    /// when this returns: a server after one that is killed meanwhile, or after a power cut, finds what is kept in either.
    ///
    /// # Errors
    /// Where that cannot be noted.
    pub async fn announce_rebind(&self, io: &Io, binding: Binding) -> std::io::Result<()> {
        let bitmaps = &self.shared.medium.bitmaps;
        let _alone = self.bitmaps_alone().await;
        let Some(keep) = bitmaps.keep() else {
            *lock(&bitmaps.next) = Some(binding);
            return Ok(());
        };
        keep.store.announce(binding)?;
        let all = lock(&bitmaps.all).clone();
        let end = write(&keep, io, self.size(), &all, How::Open).await;
        end.map_err(|error| {
            keep.store.stays();
            std::io::Error::from_raw_os_error(error.errno())
        })
    }

    /// The image that it is about to go on in, where bitmaps are kept.
    pub fn announced_image(&self) -> Option<Container> {
        self.shared.medium.bitmaps.keep()?.store.announced()
    }

    /// It stays in its image, unlike [`Disk::announce_rebind`] has it.
    pub fn forget_announced(&self) {
        let bitmaps = &self.shared.medium.bitmaps;
        *lock(&bitmaps.next) = None;
        bitmaps.keep().iter().for_each(|keep| keep.store.stays());
    }

    /// Where the bitmaps are kept, and their bits meanwhile: none where they are not.
    pub fn bitmap_sidecar(&self) -> Option<(Container, Arc<dyn BitMemory>)> {
        let keep = self.shared.medium.bitmaps.keep()?;
        Some((keep.store.sidecar().clone(), keep.store.memory().clone()))
    }

    /// The image is closed, and another has what was kept of it: nothing of that is known here any more. What was kept nowhere
    /// is.
    pub fn forget_bitmaps(&self) {
        let bitmaps = &self.shared.medium.bitmaps;
        lock(&bitmaps.all).retain(|one| !one.persistent);
        bitmaps.mark_those_there_are();
        *lock(&bitmaps.keep) = None;
        *lock(&bitmaps.next) = None;
    }

    /// The image is closed, and the bitmaps are written as they are; where there is none any more their file goes. After the
    /// last request.
    pub(crate) async fn close_bitmaps(&self, io: &Io) -> Result<(), Error> {
        let bitmaps = &self.shared.medium.bitmaps;
        let Some(keep) = bitmaps.keep() else { return Ok(()) };
        let _alone = self.bitmaps_alone().await;
        let all = lock(&bitmaps.all).clone();
        if keep.is_broken() {
            return Ok(());
        }
        write(&keep, io, self.size(), &all, How::Closed).await?;
        keep.store.memory().forget_but(&[]);
        if all.iter().any(|one| one.persistent) {
            return Ok(());
        }
        // Only now: until it is gone it says that there are none.
        match keep.store.remove_empty() {
            Ok(true) => *lock(&bitmaps.keep) = None,
            Ok(false) => {}
            Err(error) => tracing::warn!(
                "cannot remove {}, in which no bitmap is kept any more: {error}",
                keep.store.sidecar().path().display()
            ),
        }
        Ok(())
    }

    /// For tests.
    #[cfg(feature = "sabotage")]
    #[doc(hidden)]
    pub fn sabotage_bitmaps(&self, wrongs: BitmapWrongs) {
        lock(&self.shared.medium.bitmaps.marked).wrongs = wrongs;
    }
}
