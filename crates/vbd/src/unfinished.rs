//! What a job leaves that ends for another to go on with, here or in another process.

use std::sync::Arc;

use ringtap_image::bitmap_store::BitPage;
use ringtap_io::Time;

use crate::Disk;
use crate::phase::Phase;
use crate::track::Tracker;

/// A mirror that was left. For as long as this is there it notes what changes of the disk.
pub struct Unfinished {
    pub(crate) tracker: Arc<Tracker>,
    /// The first pass has dealt with all before this; at the end of numbers once it is over.
    pub(crate) from: u64,
    /// Bytes of the disk when the job looked last: by what it has grown since nobody has marked.
    pub(crate) size: u64,
    /// The copy has been as good as the disk.
    pub(crate) was_ready: bool,
    /// Nothing was left but the end, which waited for a word.
    pub(crate) is_pending: bool,
    /// Bytes that were dealt with.
    pub(crate) offset: u64,
}

/// What is still to be copied, in words for another process. It holds once the disk stands still.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeftToCopy {
    /// Bytes of a region.
    pub granularity: u64,
    /// The first pass has dealt with all before this.
    pub from: u64,
    /// Bytes of the disk.
    pub size: u64,
    /// Whether the copy has been as good as the disk.
    pub was_ready: bool,
    /// Whether nothing was left but the end, which waited for a word.
    pub is_pending: bool,
    /// Bytes that were dealt with.
    pub offset: u64,
    /// The regions that have changed since they were copied.
    pub marks: Vec<BitPage>,
}

/// What of a moment is still to be saved, in words for another process. It holds once the disk stands still.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeftToSave {
    /// Bytes of a region.
    pub granularity: u64,
    /// Bytes of the disk at that moment.
    pub size: u64,
    /// Whether the target read as zeros at first.
    pub zeroed: bool,
    /// Whether the target was a copy already, and only some of the disk is saved.
    pub some: bool,
    /// The longest that a guest's write may wait, in nanoseconds.
    pub limit: Option<Time>,
    /// The most bytes that may still be saved before requests, where that was said.
    pub room: Option<u64>,
    /// Bytes that were dealt with.
    pub offset: u64,
    /// The regions whose old content has not been saved.
    pub marks: Vec<BitPage>,
    /// What is to take a bitmap's place in the end.
    pub successor: Option<LeftMarks>,
}

/// The marks that are to take a bitmap's place, in words for another process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeftMarks {
    /// The bitmap's name.
    pub bitmap: String,
    /// Bytes of a region.
    pub granularity: u64,
    /// Whether requests are noted in it.
    pub recording: bool,
    /// The regions that have changed since the moment.
    pub marks: Vec<BitPage>,
}

impl Unfinished {
    /// What is left of it.
    pub fn left(&self) -> LeftToCopy {
        let Unfinished { tracker, from, size, was_ready, is_pending, offset } = self;
        LeftToCopy {
            granularity: tracker.granularity(),
            from: *from,
            size: *size,
            was_ready: *was_ready,
            is_pending: *is_pending,
            offset: *offset,
            marks: tracker.map().set_pages(),
        }
    }

    /// One that another process has left, on a disk that nobody has changed since: from now on what changes is noted. Behind the
    /// disk's end there is nothing to copy, however large it is said to be: marks there would take memory without end.
    pub fn of(disk: &Disk, left: &LeftToCopy) -> Unfinished {
        let tracker = disk.track(left.granularity);
        tracker.map().add_pages(&left.marks, disk.size());
        let LeftToCopy { from, size, was_ready, is_pending, offset, .. } = *left;
        let size = size.min(disk.size());
        Unfinished { tracker: tracker.into(), from, size, was_ready, is_pending, offset }
    }

    /// What another job begins with.
    pub(crate) fn phase(&self) -> Phase {
        match (self.was_ready, self.is_pending) {
            (true, _) => Phase::Ready,
            (false, true) => Phase::Pending,
            (false, false) => Phase::Copying,
        }
    }

    pub(crate) fn is_of(&self, disk: &Disk) -> bool {
        disk.is_noted_in(&self.tracker)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Vbd;
    use ringtap_image::{CacheMode, Null};

    #[test]
    fn what_is_left_behind_the_end_of_the_disk_is_left() {
        let size = 1 << 20;
        let disk: Disk = Vbd::new(Box::new(Null::new(size, false)), CacheMode::None).into();
        let marks = vec![(0, vec![u64::MAX; 512]), (1 << 39, vec![1])];
        let left = LeftToCopy { granularity: 4096, size: u64::MAX, marks, ..Default::default() };
        let left = Unfinished::of(&disk, &left).left();
        assert_eq!(left.size, size);
        let set = left.marks.iter().flat_map(|(_, words)| words).map(|word| word.count_ones());
        assert_eq!((left.marks.len(), set.sum::<u32>()), (1, 256));
    }
}
