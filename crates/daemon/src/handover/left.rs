//! What jobs have left: as the state says it, and as the jobs of the next server take it.

use ringtap_image::bitmap_store::{BitPage, PAGE_WORDS};
use ringtap_vbd::{LeftMarks, LeftToCopy, LeftToSave};

use super::state::{CopyState, MarksState, PageState, SaveState};

/// The smallest region.
const SMALLEST: u64 = 512;

fn pages(marks: Vec<BitPage>) -> Vec<PageState> {
    marks.into_iter().map(|(number, words)| PageState::new(number, &words)).collect()
}

/// None where some bits cannot be read, or there are more of them than a page has.
fn marks(pages: &[PageState]) -> Option<Vec<BitPage>> {
    let all: Option<Vec<BitPage>> = pages.iter().map(PageState::words).collect();
    all.filter(|all| all.iter().all(|(_, words)| words.len() <= PAGE_WORDS))
}

/// Marks of regions of another size would stand for other bytes.
fn is_granularity(bytes: u64) -> bool {
    bytes.is_power_of_two() && bytes >= SMALLEST
}

impl CopyState {
    pub(crate) fn of(left: LeftToCopy) -> CopyState {
        let LeftToCopy { granularity, from, size, was_ready, is_pending, offset, marks } = left;
        let marks = pages(marks);
        CopyState { granularity, from, size, was_ready, is_pending, offset, marks }
    }

    /// None where it makes no sense.
    pub(crate) fn left(&self) -> Option<LeftToCopy> {
        let CopyState { granularity, from, size, was_ready, is_pending, offset, .. } = *self;
        let marks = marks(&self.marks).filter(|_| is_granularity(granularity))?;
        Some(LeftToCopy { granularity, from, size, was_ready, is_pending, offset, marks })
    }
}

impl SaveState {
    /// `target`: the node name of the disk that takes it.
    pub(crate) fn of(target: String, left: LeftToSave) -> SaveState {
        let LeftToSave { granularity, size, zeroed, some, limit, room, offset, marks, successor } =
            left;
        let (marks, successor) = (pages(marks), successor.map(MarksState::of));
        let shown = None;
        SaveState {
            target,
            granularity,
            size,
            zeroed,
            some,
            limit,
            room,
            offset,
            shown,
            marks,
            successor,
        }
    }

    /// None where it makes no sense.
    pub(crate) fn left(&self) -> Option<LeftToSave> {
        let SaveState { granularity, size, zeroed, some, limit, room, offset, .. } = *self;
        let marks = marks(&self.marks).filter(|_| is_granularity(granularity))?;
        let successor = match &self.successor {
            Some(successor) => Some(successor.left()?),
            None => None,
        };
        Some(LeftToSave { granularity, size, zeroed, some, limit, room, offset, marks, successor })
    }

    /// The same, which shows its moment with these bitmaps.
    pub(crate) fn showing(self, bitmaps: Vec<LeftMarks>) -> SaveState {
        let shown = Some(bitmaps.into_iter().map(MarksState::of).collect());
        SaveState { shown, ..self }
    }

    /// The bitmaps that its moment is shown with, where it is; none where they make no sense.
    pub(crate) fn shown(&self) -> Option<Option<Vec<LeftMarks>>> {
        let all = self.shown.as_ref().map(|all| all.iter().map(MarksState::left).collect());
        all.map_or(Some(None), |all: Option<_>| all.map(Some))
    }
}

impl MarksState {
    pub(super) fn of(left: LeftMarks) -> MarksState {
        let LeftMarks { bitmap, granularity, recording, marks } = left;
        MarksState { bitmap, granularity, recording, marks: pages(marks) }
    }

    pub(super) fn left(&self) -> Option<LeftMarks> {
        let (bitmap, granularity) = (self.bitmap.clone(), self.granularity);
        let marks = marks(&self.marks).filter(|_| is_granularity(granularity))?;
        Some(LeftMarks { bitmap, granularity, recording: self.recording, marks })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copy() -> CopyState {
        let marks = vec![PageState::new(3, &[5, 1 << 63])];
        CopyState { granularity: 65536, size: 1 << 20, marks, ..CopyState::default() }
    }

    #[test]
    fn what_is_left_reads_as_it_was_written() {
        assert_eq!(CopyState::of(copy().left().expect("it makes sense")), copy());
        let CopyState { granularity, marks, size, .. } = copy();
        let (bitmap, recording) = ("b".to_owned(), true);
        let successor = Some(MarksState { bitmap, granularity, recording, marks });
        let marks = copy().marks;
        let save = SaveState { granularity, size, marks, successor, ..SaveState::default() };
        assert_eq!(SaveState::of(String::new(), save.left().expect("it makes sense")), save);
        let shown = save.successor.as_ref().and_then(MarksState::left).expect("it makes sense");
        let left = LeftToSave { room: Some(5), offset: 7, ..save.left().expect("it makes sense") };
        let kept = SaveState::of(String::new(), left).showing(vec![shown.clone()]);
        assert_eq!(kept.left().map(|left| (left.room, left.offset)), Some((Some(5), 7)));
        assert_eq!((save.shown(), kept.shown()), (Some(None), Some(Some(vec![shown]))));
    }

    #[test]
    fn marks_are_taken_whole_or_not_at_all() {
        let none = |change: fn(&mut CopyState)| {
            let mut copy = copy();
            change(&mut copy);
            copy.left().is_none()
        };
        assert!(none(|copy| _ = copy.marks[0].bits.pop()), "half a byte is missing");
        assert!(none(|copy| copy.marks[0].bits.truncate(20)), "a word is cut short");
        assert!(none(|copy| copy.marks[0].bits.replace_range(..2, "+5")), "no digits");
        assert!(none(|copy| copy.marks[0] = PageState::new(0, &[0; PAGE_WORDS + 1])));
        assert!(none(|copy| copy.granularity = 0) && none(|copy| copy.granularity = 65537));
    }
}
