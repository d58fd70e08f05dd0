//! The files that a ring has met, most of them in its own table.

use std::os::fd::RawFd;

use io_uring::{IoUring, types};

use super::pace::Pace;
use crate::watched::Watched;
use crate::{File, Nature, Watch};

/// Places in the ring's own table of files; files past that go by descriptor.
const FIXED_FILES: u32 = 64;

#[derive(Clone, Copy)]
pub(super) enum Target {
    Fixed(u32),
    Plain(RawFd),
}

/// What the ring knows of a file.
#[derive(Clone, Copy)]
pub(super) struct Known {
    generation: u32,
    pub(super) fd: RawFd,
    pub(super) target: Target,
    pub(super) nature: Nature,
    pub(super) pace: Pace,
    /// Somebody may want to know of its changes.
    pub(super) watched: bool,
}

pub(super) struct Files {
    known: Vec<Option<Known>>,
    used: u32,
    /// Places below that which are empty again.
    free: Vec<u32>,
    /// Those of images are to leave the ring's table.
    forgets: bool,
    pub(super) watched: Watched,
}

impl Files {
    pub(super) fn new(ring: &IoUring) -> Files {
        // Without a table every file goes by descriptor: slower, not wrong.
        let sparse = ring.submitter().register_files_sparse(FIXED_FILES);
        let used = if sparse.is_ok() { 0 } else { FIXED_FILES };
        Files {
            known: Vec::new(),
            used,
            free: Vec::new(),
            forgets: false,
            watched: Watched::default(),
        }
    }

    /// Have images' files met anew, and until then not in the ring's table, which would keep them open: once nothing is in
    /// flight on a disk, for a worker of the kernel finds the file by its place only as it begins, and nothing is to be noted
    /// of what was.
    pub(super) fn forget(&mut self, ring: &IoUring, on_disk: usize) {
        self.forgets = true;
        self.forget_at_rest(ring, on_disk);
    }

    /// Do what [`Files::forget`] was asked for, if that is still to be done and may be.
    #[inline]
    pub(super) fn forget_at_rest(&mut self, ring: &IoUring, on_disk: usize) {
        if self.forgets && on_disk == 0 && self.watched.is_settled() {
            self.forget_now(ring);
        }
    }

    #[cold]
    fn forget_now(&mut self, ring: &IoUring) {
        self.forgets = false;
        for (slot, place) in self.images() {
            if ring.submitter().register_files_update(place, &[-1]).is_ok() {
                self.known[slot] = None;
                self.watched.put(slot, None);
                self.free.push(place);
            }
        }
    }

    /// Images in the ring's table: what is known by which number, and where they are there.
    pub(super) fn images(&self) -> Vec<(usize, u32)> {
        let known = self.known.iter().enumerate();
        let fixed = known.filter_map(|(slot, known)| match known {
            Some(Known { target: Target::Fixed(place), nature, .. }) if nature.image => {
                Some((slot, *place))
            }
            _ => None,
        });
        fixed.collect()
    }

    #[inline]
    pub(super) fn find(&mut self, ring: &IoUring, file: File) -> Option<Known> {
        match self.known.get(file.slot() as usize) {
            Some(Some(known)) if known.generation == file.generation() => Some(*known),
            _ => self.learn(ring, file),
        }
    }

    /// Have small writes into its page cache go like that from now on.
    pub(super) fn goes(&mut self, file: File, pace: Pace) {
        if let Some(Some(known)) = self.known.get_mut(file.slot() as usize) {
            known.pace = pace;
        }
    }

    #[cfg(test)]
    pub(super) fn pace(&self, file: File) -> Option<Pace> {
        self.known.get(file.slot() as usize)?.map(|known| known.pace)
    }

    #[inline]
    pub(super) fn target(&mut self, ring: &IoUring, file: File) -> Option<Target> {
        Some(self.find(ring, file)?.target)
    }

    /// For what may wait long: before Linux 6.13, one operation in flight on a file of the ring's table keeps each open that
    /// left the table after it began.
    #[inline]
    pub(super) fn plain(&mut self, ring: &IoUring, file: File) -> Option<types::Fd> {
        Some(types::Fd(self.find(ring, file)?.fd))
    }

    /// An empty one in the ring's table.
    fn place(&mut self) -> Option<u32> {
        self.free.pop().or_else(|| {
            (self.used < FIXED_FILES).then(|| {
                self.used += 1;
                self.used - 1
            })
        })
    }

    #[cold]
    fn learn(&mut self, ring: &IoUring, file: File) -> Option<Known> {
        let fd = file.raw_fd()?;
        let slot = file.slot() as usize;
        if self.known.len() <= slot {
            self.known.resize(slot + 1, None);
        }
        let place = match self.known[slot] {
            Some(Known { target: Target::Fixed(place), .. }) => Some(place),
            _ => self.place(),
        };
        let fixed =
            place.filter(|place| ring.submitter().register_files_update(*place, &[fd]).is_ok());
        let target = fixed.map_or(Target::Plain(fd), Target::Fixed);
        let witness = file.witness();
        let (watched, nature) = (witness.is_some(), file.nature());
        self.watched.put(slot, witness.map(Watch::new));
        let pace = Pace::default();
        let known = Known { generation: file.generation(), fd, target, nature, pace, watched };
        self.known[slot] = Some(known);
        Some(known)
    }
}
