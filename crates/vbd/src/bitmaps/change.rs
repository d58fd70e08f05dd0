//! Changes of a disk's bitmaps.

use std::sync::Arc;

use ringtap_image::Error;
use ringtap_image::bitmap_store::{How, Put, Staged, new_number};
use ringtap_image::record::Part;
use ringtap_io::Io;

use super::{BitmapsAlone, DirtyBitmap, lock, room_for, to_keep, write};
use crate::keep::Keep;
use crate::map::Map;
use crate::track::Tracker;
use crate::{Disk, Quiesced};

/// A change. What it names is there, and nobody uses it; what it adds is not there.
pub enum BitmapChange {
    /// One more, with nothing marked.
    Add {
        /// Its name.
        name: String,
        /// Bytes of a region: a power of two, 512 at least.
        granularity: u64,
        /// Whether it outlives the server: the disk keeps bitmaps.
        persistent: bool,
        /// Whether requests are noted in it.
        recording: bool,
    },
    /// One less.
    Remove(String),
    /// Its marks are forgotten.
    Clear(String),
    /// Whether requests are noted in it.
    Record(String, bool),
    /// What is marked in others is marked in it, too.
    Merge(String, Vec<MergedFrom>),
    /// It has these marks: a [`super::Successor`]'s.
    Replace(String, Arc<Tracker>),
}

/// What is merged.
pub enum MergedFrom {
    /// The disk's bitmap of that name.
    Named(String),
    /// Marks of another disk.
    Marks(Arc<Tracker>),
}

impl BitmapChange {
    fn name(&self) -> &str {
        match self {
            BitmapChange::Add { name, .. }
            | BitmapChange::Remove(name)
            | BitmapChange::Clear(name)
            | BitmapChange::Record(name, _)
            | BitmapChange::Merge(name, _)
            | BitmapChange::Replace(name, _) => name,
        }
    }
}

/// Changes on their way.
pub struct StagedBitmaps {
    disk: Disk,
    after: Vec<DirtyBitmap>,
    /// What is to be marked in what at the moment.
    fills: Vec<(Arc<Tracker>, Vec<Arc<Tracker>>)>,
    whole: Option<(Arc<Keep>, Staged)>,
    /// What is written of them, and is not the present whole yet.
    put: Option<(Arc<Keep>, Put)>,
    /// Where what is written says that they are, and those before are in memory yet.
    presented: Option<Arc<Keep>>,
    committed: bool,
    /// The last to go.
    _alone: BitmapsAlone,
}

impl Drop for StagedBitmaps {
    fn drop(&mut self) {
        if !self.committed {
            let bitmaps = &self.disk.shared.medium.bitmaps;
            let whole = self.whole.iter().map(|(keep, _)| keep);
            let put = self.put.iter().map(|(keep, _)| keep);
            whole.chain(put).for_each(|keep| keep.store.forget());
            lock(&bitmaps.staged).clear();
            bitmaps.mark_those_there_are();
            bitmaps.forget_memory(&self.after, &lock(&bitmaps.all));
        }
    }
}

impl Disk {
    pub(super) fn new_marks(&self, granularity: u64, persistent: bool) -> Arc<Tracker> {
        let keep = self.shared.medium.bitmaps.keep().filter(|_| persistent);
        let map = match keep {
            Some(keep) => Map::outliving(granularity, keep.store.memory().clone(), new_number()),
            None => Map::new(granularity),
        };
        Arc::new(Tracker::of(Arc::new(map)))
    }

    /// Prepare changes, in their order. Others wait until they are committed or given up.
    ///
    /// # Errors
    /// Where there is no room for them: nothing is changed.
    pub async fn stage_bitmaps(
        &self,
        io: &Io,
        changes: Vec<BitmapChange>,
    ) -> Result<StagedBitmaps, Error> {
        let alone = self.bitmaps_alone().await;
        let mut after = lock(&self.shared.medium.bitmaps.all).clone();
        let persistent = |all: &[DirtyBitmap], name: &str| {
            all.iter().any(|one| one.name == name && one.persistent)
        };
        let (mut fills, mut kept) = (vec![], false);
        for change in changes {
            kept |= persistent(&after, change.name());
            self.stage_one(change, &mut after, &mut fills);
            kept |= after.last().is_some_and(|last| last.persistent);
        }
        let (disk, committed, _alone) = (self.clone(), false, alone);
        let (whole, put, presented) = (None, None, None);
        let mut staged =
            StagedBitmaps { disk, after, fills, whole, put, presented, committed, _alone };
        if let Some(keep) = self.shared.medium.bitmaps.keep().filter(|_| kept) {
            let size = self.size();
            let place = keep.stage(io, room_for(&staged.after, size), size).await?;
            staged.whole = Some((keep, place));
        }
        Ok(staged)
    }

    fn stage_one(
        &self,
        change: BitmapChange,
        after: &mut Vec<DirtyBitmap>,
        fills: &mut Vec<(Arc<Tracker>, Vec<Arc<Tracker>>)>,
    ) {
        match change {
            BitmapChange::Add { name, granularity, persistent, recording } => {
                let marks = self.new_marks(granularity, persistent);
                after.push(DirtyBitmap { name, marks, persistent, recording, lost: None });
            }
            BitmapChange::Remove(name) => after.retain(|one| one.name != name),
            BitmapChange::Merge(name, others) => {
                let of = |other| match other {
                    MergedFrom::Marks(marks) => Some(marks),
                    MergedFrom::Named(name) => {
                        let found = after.iter().find(|one| one.name == name);
                        found.map(|one| one.marks.clone())
                    }
                };
                let mut from: Vec<Arc<Tracker>> = others.into_iter().filter_map(of).collect();
                let Some(one) = after.iter_mut().find(|one| one.name == name) else { return };
                let merged = self.new_marks(one.marks.granularity(), one.persistent);
                from.push(one.marks.clone());
                fills.push((merged.clone(), from));
                one.marks = merged;
            }
            change => {
                let found = after.iter_mut().find(|one| one.name == change.name());
                let Some(one) = found else { return };
                match change {
                    BitmapChange::Clear(_) => {
                        one.marks = self.new_marks(one.marks.granularity(), one.persistent);
                    }
                    BitmapChange::Record(_, recording) => one.recording = recording,
                    BitmapChange::Replace(_, marks) => one.marks = marks,
                    BitmapChange::Add { .. }
                    | BitmapChange::Remove(_)
                    | BitmapChange::Merge(..) => {}
                }
            }
        }
    }
}

impl StagedBitmaps {
    /// The bitmaps as they will be, for who refers to them in the same transaction.
    pub fn after(&self) -> &[DirtyBitmap] {
        &self.after
    }

    /// Now, while the disk stands still, the changes take place, in memory.
    pub async fn switch(&self, _: &Quiesced<'_>) {
        let bitmaps = &self.disk.shared.medium.bitmaps;
        let moment = || {
            for (to, from) in &self.fills {
                from.iter().for_each(|from| to.map().merge(from.map(), self.disk.size()));
                if to.map().has_become_short() {
                    bitmaps.keep().iter().for_each(|keep| keep.store.memory_is_short());
                }
            }
            // What is replaced is marked on, until it is.
            lock(&bitmaps.staged).clone_from(&self.after);
            bitmaps.mark_those_there_are();
        };
        match &self.whole {
            Some((keep, staged)) => keep.switch(staged, moment).await,
            None => moment(),
        }
    }

    /// Make them stable: from now on they are.
    ///
    /// # Errors
    /// Where that cannot be: everything is as before.
    pub async fn commit(mut self, io: &Io) -> Result<(), Error> {
        self.put(io, None).await?;
        self.present(io).await?;
        self.finish();
        Ok(())
    }

    /// Whether something is to be written down.
    pub fn is_kept(&self) -> bool {
        self.whole.is_some()
    }

    /// Write them down, beside what was written before: as a part of a transaction, where there are others.
    ///
    /// # Errors
    /// Where that cannot be: everything is as before.
    pub async fn put(&mut self, io: &Io, part: Option<Part>) -> Result<(), Error> {
        if self.whole.is_some() && self.disk.shared.medium.bitmaps.flushes() {
            // What is not marked any more is stable first: a power cut would put it back to what it was before.
            self.disk.fork().flush(io).await?;
        }
        if let Some((keep, staged)) = self.whole.take() {
            let how = part.map_or(How::Open, How::InPart);
            let put = keep.put(io, staged, to_keep(&self.after), how).await?;
            self.put = Some((keep, put));
        }
        Ok(())
    }

    /// What was put is what a server after this one finds, once the transaction is decided that it is a part of. Those before
    /// are still marked, so that they can be had again: [`StagedBitmaps::take_back`].
    ///
    /// # Errors
    /// Where that cannot be written: in memory everything is as before.
    pub async fn present(&mut self, io: &Io) -> Result<(), Error> {
        if let Some((keep, put)) = self.put.take() {
            keep.present(io, put).await?;
            self.presented = Some(keep);
        }
        Ok(())
    }

    /// They were presented, and are not to be: everything is as before, with what was marked meanwhile. Where that cannot be
    /// written the persistent ones are lost.
    pub async fn take_back(self, io: &Io) {
        let Some(keep) = &self.presented else { return };
        let before = lock(&self.disk.shared.medium.bitmaps.all).clone();
        if let Err(error) = write(keep, io, self.disk.size(), &before, How::Open).await {
            keep.give_up(io, error).await;
        }
    }

    /// They were presented, and are the disk's.
    pub fn finish(mut self) {
        let bitmaps = &self.disk.shared.medium.bitmaps;
        self.presented.iter().for_each(|keep| keep.store.is_decided());
        let after = std::mem::take(&mut self.after);
        let before = std::mem::replace(&mut *lock(&bitmaps.all), after.clone());
        lock(&bitmaps.staged).clear();
        bitmaps.forget_memory(&before, &after);
        bitmaps.mark_those_there_are();
        self.committed = true;
    }
}
