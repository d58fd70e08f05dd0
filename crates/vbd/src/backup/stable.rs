//! The end of a backup: its target is made stable. Where that fails, what was given to it since the last time may be lost: it is
//! saved once more, as far as the disk still holds it, or scratch does.

use std::cell::Cell;
use std::ops::Range;
use std::rc::Rc;
use std::sync::atomic::Ordering::SeqCst;

use ringtap_io::Io;

use super::kept::Kept;
use super::saving::Saving;
use super::stability::Turn;
use crate::level::Pass;
use crate::mirror::again::Attempt;
use crate::mirror::error::MirrorError;
use crate::mirror::unstable::Flushing;
use crate::trouble::{Action, Trouble};

impl Saving<'_> {
    /// Make what the target has stable; whether it is. Else it was saved again, or is to be.
    pub(super) async fn make_stable(&self, io: &Io) -> Result<bool, MirrorError> {
        let Saving { moment, job, pace, .. } = self;
        let kept = &*moment.kept;
        if kept.stable.flushes.swap(true, SeqCst) {
            return Ok(false);
        }
        let attempt = Attempt::begin(job, &kept.target, moment.on_errors);
        let turn = Turn(&kept.stable);
        let spent = kept.aside.get().map(|aside| aside.flushing());
        let end = kept.target.flush(io, kept.limit).await;
        let why = match end.map_err(|why| kept.target.known(why)) {
            Ok(()) => {
                let stable = spent.and_then(Flushing::ended_well);
                if let (Some(aside), Some(stable)) = (kept.aside.get(), stable) {
                    aside.free_all(io, &stable, kept.size).await;
                }
                drop(turn);
                kept.tell_of_scratch();
                return Ok(true);
            }
            Err(why) => why,
        };
        drop(spent);
        let MirrorError::Flush { error } = why else { return Err(why) };
        let report = Trouble { write: true, error, action: Action::Report };
        if !moment.on_errors.try_again(&why) {
            job.meets(report);
            return Err(why);
        }
        match kept.save_again().await? {
            0 => kept.target.is_written_anew(),
            bytes => {
                job.meets(report);
                return Err(MirrorError::Gone { error, bytes });
            }
        }
        drop(turn);
        kept.tell_of_scratch();
        Box::pin(attempt.failed(io, pace, why)).await?;
        Ok(false)
    }
}

impl Kept {
    /// Whether the target is to be stable before there is room in scratch.
    pub(super) fn is_scratch_spent(&self) -> bool {
        // Who is about it already tells of the end: others have nothing to do until then.
        let flushes = self.stable.flushes.load(SeqCst);
        !flushes && self.aside.get().is_some_and(|aside| aside.is_spent())
    }

    /// Have what the target may have lost be left to save; how many bytes of it are nowhere any more.
    async fn save_again(&self) -> Result<u64, MirrorError> {
        // Nobody saves meanwhile, nor asks whether something is saved.
        let held = Rc::new(self.target.ranges.ask(0..self.size.max(1)));
        if !self.target.alone(&held).await {
            return Err(MirrorError::Cancelled);
        }
        self.stable.lost.fetch_add(1, SeqCst);
        let lost = self.target.take_unstable();
        #[cfg(feature = "sabotage")]
        let lost = lost.filter(|_| !self.wrongs.trusts);
        if let Some(aside) = self.aside.get() {
            aside.take_back(self.size);
        }
        let (mut gone, mut at) = (0, 0);
        while let Some(range) = lost.as_ref().and_then(|lost| lost.next(at, self.granularity)) {
            at = range.end;
            let range = range.start..range.end.min(self.size);
            self.left.mark(range.clone());
            let is_aside = self.aside.get().is_some_and(|aside| aside.has(&range));
            if !is_aside && self.changed.has_all(&range) {
                gone += range.end - range.start;
            }
        }
        Ok(gone)
    }

    /// Whether what a range held would be lost by a request: it is neither saved nor in scratch.
    fn would_be_lost(&self, range: Range<u64>) -> bool {
        let mut rest = self.regions(range);
        while let Some(part) = self.is_left(&rest) {
            if !self.aside.get().is_some_and(|aside| aside.has(&part)) {
                return true;
            }
            rest.start = part.end;
        }
        false
    }

    /// Before a request changes a range. What was saved may be to be saved again: that is looked at once more after it is said that
    /// the disk does not hold it any more, while who has it saved again says that first.
    pub(super) async fn before_change(
        &self,
        io: &Io,
        pass: Pass<'_>,
        range: Range<u64>,
        lacks: &Cell<Option<MirrorError>>,
    ) -> Result<(), MirrorError> {
        loop {
            self.save_or_set_aside(io, pass, range.clone(), lacks).await?;
            let regions = self.regions(range.clone());
            if !regions.is_empty() {
                self.changed.mark_lacking(regions);
            }
            if self.target.has_failed() || !self.would_be_lost(range.clone()) {
                return Ok(());
            }
        }
    }
}
