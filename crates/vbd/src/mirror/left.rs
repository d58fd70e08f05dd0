//! A mirror that ends for another to go on with: what has been copied, and what has not.

use std::ops::Range;

use ringtap_io::Io;

use super::first::Owed;
use super::terms::Scope;
use super::together::within;
use super::work::Work;
use crate::disk::lock;
use crate::phase::Phase;
use crate::unfinished::Unfinished;

impl Work {
    pub(super) fn owes(&self, range: &Range<u64>) -> Owed<'_> {
        #[cfg(feature = "sabotage")]
        let forgets = self.mirror.wrongs.forgets;
        #[cfg(not(feature = "sabotage"))]
        let forgets = false;
        Owed { marks: self.tracker.map(), range: (!forgets).then(|| range.clone()) }
    }

    /// It was cancelled, for another job to go on: leave to that what has not been copied. Where the target may still be
    /// written to, nobody can go on.
    pub(super) async fn leave(&self, io: &Io, phase: Phase) {
        let shared = &self.mirror.from.shared;
        // Guests' requests that were to change the target, too, mark what they have not.
        let epochs = lock(&shared.current).epochs.clone();
        let alone = async {
            epochs.over(epochs.epoch()).await;
            self.target.left_alone().await;
        };
        let late = async || match self.mirror.limit {
            Some(limit) => io.sleep(limit).await,
            None => std::future::pending().await,
        };
        if within(alone, late()).await.is_none() {
            return;
        }
        // Who goes on cannot know what a flush that fails would lose.
        let (unstable, to) = (self.target.take_unstable(), self.mirror.to.fork());
        if within(to.flush(io), late()).await != Some(Ok(())) {
            unstable.inspect(|lost| self.tracker.map().merge(lost, self.size.get()));
        }
        let mut from = self.first.dealt_with();
        if let Scope::Changed(changed) = &self.mirror.scope {
            while let Some(range) = changed.next(from, u64::MAX) {
                from = range.end;
                self.tracker.mark(range);
            }
            from = u64::MAX;
        }
        self.job.leave_unfinished(Unfinished {
            tracker: self.tracker.clone(),
            from,
            size: self.size.get(),
            was_ready: self.was_ready.get(),
            is_pending: phase == Phase::Pending,
            offset: self.job.progress().offset,
        });
    }
}
