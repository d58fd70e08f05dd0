//! Bitmaps that are kept nowhere, and go on in another process.

use std::sync::Arc;

use super::{DirtyBitmap, lock};
use crate::Disk;
use crate::map::Map;
use crate::track::Tracker;
use crate::unfinished::LeftMarks;

impl DirtyBitmap {
    /// What is marked, in words for another process. It holds once the disk stands still.
    pub fn left(&self) -> LeftMarks {
        LeftMarks {
            bitmap: self.name.clone(),
            granularity: self.marks.granularity(),
            recording: self.recording,
            marks: self.marks.map().set_pages(),
        }
    }
}

impl Disk {
    /// Have a bitmap, the one of that number, that another process had, which no server keeps: of a disk that nobody has changed
    /// since.
    pub fn take_up_bitmap(&self, number: usize, left: &LeftMarks) {
        let LeftMarks { bitmap, granularity, recording, marks } = left;
        let map = Map::new(*granularity);
        map.add_pages(marks, self.size());
        let (name, marks) = (bitmap.clone(), Arc::new(Tracker::of(Arc::new(map))));
        let (persistent, recording, lost) = (false, *recording, None);
        let one = DirtyBitmap { name, marks, persistent, recording, lost };
        let bitmaps = &self.shared.medium.bitmaps;
        let mut all = lock(&bitmaps.all);
        let number = number.min(all.len());
        all.insert(number, one);
        drop(all);
        bitmaps.mark_those_there_are();
    }
}

#[cfg(test)]
mod tests {
    use ringtap_image::{CacheMode, Null};

    use super::*;
    use crate::Vbd;

    fn disk() -> Disk {
        Vbd::new(Box::new(Null::new(1 << 20, false)), CacheMode::None).into()
    }

    #[test]
    fn another_process_has_the_same_bitmaps_in_their_order() {
        let (one, other) = (disk(), disk());
        let bits = |word: u64| vec![(0, vec![word])];
        for (name, recording, word) in [("a", true, 0b1011), ("b", false, 1 << 15)] {
            let (bitmap, marks) = (name.to_owned(), bits(word));
            let left = LeftMarks { bitmap, granularity: 65536, recording, marks };
            one.take_up_bitmap(7, &left);
        }
        let left: Vec<LeftMarks> = one.dirty_bitmaps().iter().map(DirtyBitmap::left).collect();
        other.take_up_bitmap(0, &left[1]);
        other.take_up_bitmap(0, &left[0]);
        let same: Vec<LeftMarks> = other.dirty_bitmaps().iter().map(DirtyBitmap::left).collect();
        assert_eq!(same, left);
        // One that does not record is marked by nobody.
        other.shared.medium.bitmaps.note(512 << 10, 65536);
        let marked: Vec<u64> = other.dirty_bitmaps().iter().map(|one| one.marks.marked()).collect();
        assert_eq!(marked, [4 << 16, 1 << 16]);
        // What is kept nowhere stays where an image is closed for another process.
        other.forget_bitmaps();
        assert_eq!(other.dirty_bitmaps().len(), 2);
    }
}
