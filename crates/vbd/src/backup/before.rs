//! What requests wait for before they change what the disk held at a moment.

use std::cell::Cell;
use std::ops::Range;
use std::rc::Rc;

use ringtap_image::Error;
use ringtap_io::Io;

use super::kept::Kept;
use crate::filter::{BeforeWrite, Filtered};
use crate::level::Pass;
use crate::mirror::content::give;
use crate::mirror::error::MirrorError;
use crate::mirror::together::within;

impl BeforeWrite for Kept {
    fn before_write<'a>(
        &'a self,
        io: &'a Io,
        pass: Pass<'a>,
        range: Range<u64>,
    ) -> Filtered<'a, Result<(), Error>> {
        Box::pin(async move {
            #[cfg(feature = "sabotage")]
            if self.wrongs.misses > 0 && (range.start / 512) % self.wrongs.misses == 0 {
                return Ok(());
            }
            let lacks = Cell::new(None);
            let save = self.before_change(io, pass, range, &lacks);
            let end = match self.limit {
                Some(limit) => {
                    let late = || lacks.take().unwrap_or(MirrorError::Late { limit });
                    within(save, io.sleep(limit)).await.unwrap_or_else(|| Err(late()))
                }
                None => save.await,
            };
            end.or_else(|why| self.unsaved(why))
        })
    }
}

impl Kept {
    /// Have the target hold what the regions of a range held, where it does not yet.
    pub(super) async fn save(
        &self,
        io: &Io,
        pass: Pass<'_>,
        range: Range<u64>,
    ) -> Result<(), MirrorError> {
        let range = self.regions(range);
        if self.target.has_failed() || self.is_left(&range).is_none() {
            return Ok(());
        }
        let held = Rc::new(self.target.ranges.ask(range.clone()));
        if !self.target.alone(&held).await {
            return Err(MirrorError::Cancelled);
        }
        let mut rest = range;
        while let Some(part) = self.is_left(&rest) {
            let mut at = part.start;
            let mut taken = self.take_room(part.end - part.start)?;
            while at < part.end {
                let (len, content) = self.old(io, pass, at..part.end).await?;
                give(io, &self.target, at, len, content, self.zeroed, &held).await?;
                at += len;
            }
            taken.bytes = 0;
            self.has_saved(io, part.clone()).await;
            rest.start = part.end;
        }
        Ok(())
    }
}
