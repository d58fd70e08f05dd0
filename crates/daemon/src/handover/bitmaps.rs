//! Dirty bitmaps that are kept nowhere: their marks are passed on, once the disks stand still.

use ringtap_image::bitmap_store::PAGE_WORDS;
use ringtap_vbd::DirtyBitmap;

use super::state::{BitmapState, MarksState};
use crate::running::{Running, Served};

/// The most bytes of marks that are passed on: no disk stands still for much longer by them.
const MOST: usize = 64 << 20;

/// Those of a disk that are kept nowhere, with their numbers.
fn of(served: &Served) -> impl Iterator<Item = (usize, DirtyBitmap)> {
    served.vbd.dirty_bitmaps().into_iter().enumerate().filter(|(_, one)| !one.persistent)
}

/// One that is about to be passed on.
pub(super) struct Passed {
    disk: String,
    number: usize,
    bitmap: DirtyBitmap,
}

impl Passed {
    /// As it is now that the disks stand still.
    pub(super) fn state(self) -> BitmapState {
        let Passed { disk, number, bitmap } = self;
        BitmapState { disk, number, marks: MarksState::of(bitmap.left()) }
    }
}

impl Running {
    /// Disks that have some.
    pub(super) fn with_bitmaps_passed(&self) -> Vec<String> {
        let has = self.disks.values().filter(|served| of(served).next().is_some());
        has.map(|served| served.node().to_owned()).collect()
    }

    /// Why their marks cannot be passed on, where they cannot.
    pub(super) fn may_pass_bitmaps_on(&self) -> Result<(), String> {
        let mut bytes = 0;
        for served in self.disks.values() {
            let shown = served.moment.iter().flat_map(|moment| moment.shown_marks());
            for one in of(served).map(|(_, one)| one.left()).chain(shown) {
                bytes += one.marks.len() * PAGE_WORDS * 8;
                if bytes > MOST {
                    return Err(format!(
                        "the bitmaps that are not persistent, or are shown with a moment, have more than {} MiB of marks: remove \
                         {} of the disk {} first, or have one of coarser regions",
                        MOST >> 20,
                        one.bitmap,
                        served.node()
                    ));
                }
            }
        }
        Ok(())
    }

    /// All of them: what is kept of the others is written down with their images, and they are known here no more then.
    pub(super) fn bitmaps_passed(&self) -> Vec<Passed> {
        let passed = |served: &Served| {
            let disk = served.node().to_owned();
            of(served)
                .map(|(number, bitmap)| Passed { disk: disk.clone(), number, bitmap })
                .collect::<Vec<_>>()
        };
        self.disks.values().flat_map(passed).collect()
    }

    /// Have those that the server before this one had: what changes of the disks is noted in them from now on, and nobody is
    /// served yet.
    pub(super) fn bitmaps_come(&self, all: &[BitmapState]) -> Result<(), String> {
        for BitmapState { disk, number, marks } in all {
            let name = &marks.bitmap;
            let found = self.disks.values().find(|served| served.node() == disk);
            let served = found
                .ok_or_else(|| format!("its state has no disk {disk} for the bitmap {name}"))?;
            let left = marks.left();
            let left = left.ok_or_else(|| format!("the marks of {name} cannot be read"))?;
            served.vbd.take_up_bitmap(*number, &left);
        }
        Ok(())
    }
}
