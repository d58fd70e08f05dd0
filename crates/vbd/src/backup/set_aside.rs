//! Setting aside in scratch what requests change, and bringing it back.

use std::cell::Cell;
use std::ops::Range;
use std::rc::Rc;
use std::sync::atomic::Ordering::SeqCst;

use ringtap_image::Error;
use ringtap_io::{Io, Mem, Time};

use super::aside::{Aside, PIECE, Scratch};
use super::kept::Kept;
use super::moment::Moment;
use crate::level::Pass;
use crate::mirror::content::{Content, give, look};
use crate::mirror::error::MirrorError;
use crate::mirror::together::within;
use crate::{Kind, Request};

/// Who is to take over does not wait for longer.
const EMPTIED_WITHIN: Time = 20_000_000_000;

/// Somebody who waits for room.
struct Lacking<'a>(&'a Aside);

impl Drop for Lacking<'_> {
    fn drop(&mut self) {
        self.0.lacking.fetch_sub(1, SeqCst);
    }
}

impl Kept {
    /// Have what requests change go to scratch first, where it does not yet.
    fn set_scratch(&self, scratch: Scratch) {
        let _the_first_stays = self.aside.set(Aside::new(scratch, self.granularity));
    }

    /// The next regions that lie in scratch, from an offset on.
    pub(super) fn next_aside(&self, from: u64) -> Option<Range<u64>> {
        self.aside.get()?.holds.next(from, PIECE)
    }

    /// The first part of a range that lies in scratch.
    pub(super) fn first_aside(&self, range: &Range<u64>) -> Option<Range<u64>> {
        self.aside.get()?.holds.first_in(range)
    }

    /// Wait until that is so; who brings something there has it looked at again.
    pub(super) async fn wait_for_scratch(&self, is_so: impl Fn() -> bool) {
        let Some(aside) = self.aside.get() else { return };
        loop {
            let told = aside.told.listen();
            if is_so() {
                return;
            }
            told.await;
        }
    }

    /// Have whoever waits for something in scratch look again.
    pub(super) fn tell_of_scratch(&self) {
        self.aside.get().inspect(|aside| aside.told.notify());
    }

    /// The next part of what the disk held in regions that are not saved, whose range the caller has.
    pub(super) async fn old(
        &self,
        io: &Io,
        pass: Pass<'_>,
        range: Range<u64>,
    ) -> Result<(u64, Content), MirrorError> {
        let Some(aside) = self.aside.get() else { return look(io, pass, range, PIECE, None).await };
        #[cfg(feature = "sabotage")]
        if self.wrongs.ignores_scratch {
            return look(io, pass, range, PIECE, None).await;
        }
        match aside.holds.first_in(&range) {
            Some(there) if there.start == range.start => {
                let scratch = aside.scratch.take();
                let work =
                    scratch.within(async |pass| Ok(look(io, pass, there, PIECE, None).await));
                let stopped = |_| Err(MirrorError::Stopped);
                let end = scratch.health().contain_all(work).await.unwrap_or_else(stopped);
                aside.scratch.give_back(scratch);
                end
            }
            Some(there) => look(io, pass, range.start..there.start, PIECE, None).await,
            None => look(io, pass, range, PIECE, None).await,
        }
    }

    /// Fill memory with that.
    pub(super) async fn read_old(
        &self,
        io: &Io,
        pass: Pass<'_>,
        offset: u64,
        mem: Mem,
    ) -> Result<(), Error> {
        // A region lies there as a whole, and none reads beyond one.
        match self.aside.get().filter(|aside| aside.holds.has_all(&(offset..offset + 1))) {
            Some(aside) => {
                let (kind, len) = (Kind::Read, mem.len() as u64);
                let request = Request { kind, offset, len, mem, fua: false };
                aside.serve(io, request).await
            }
            None => pass.read(io, offset, mem).await,
        }
    }

    /// The target has the regions of a range, which the caller has.
    pub(super) async fn has_saved(&self, io: &Io, range: Range<u64>) {
        self.left.forget(range.clone());
        match self.aside.get() {
            Some(aside) if self.stable.is_kept_until() => aside.spend(range),
            Some(aside) => aside.free(io, range, self.size).await,
            None => {}
        }
    }

    /// Before a request changes a range: where there is no room, `lacks` has the error that waiting for it longer would be.
    pub(super) async fn save_or_set_aside(
        &self,
        io: &Io,
        pass: Pass<'_>,
        range: Range<u64>,
        lacks: &Cell<Option<MirrorError>>,
    ) -> Result<(), MirrorError> {
        let Some(aside) = self.aside.get() else { return self.save(io, pass, range).await };
        loop {
            let Some(_coming) = aside.enter() else { return self.save(io, pass, range).await };
            let Err(bytes) = self.set_aside(aside, io, pass, range.clone()).await? else {
                aside.told.notify();
                return Ok(());
            };
            let left = aside.room.saturating_sub(aside.used.load(SeqCst));
            if bytes > aside.room {
                return Err(MirrorError::Room { left, bytes });
            }
            lacks.set(Some(MirrorError::Room { left, bytes }));
            aside.lacking.fetch_add(1, SeqCst);
            let _lacking = Lacking(aside);
            aside.told.notify();
            within(aside.has_room(bytes), self.target.broken()).await;
            lacks.set(None);
        }
    }

    /// Have scratch hold what the regions of a range held that are not saved; or how much room is lacking.
    async fn set_aside(
        &self,
        aside: &Aside,
        io: &Io,
        pass: Pass<'_>,
        range: Range<u64>,
    ) -> Result<Result<(), u64>, MirrorError> {
        let mut rest = self.regions(range);
        if self.target.has_failed() || self.is_left(&rest).is_none() {
            return Ok(Ok(()));
        }
        let held = Rc::new(self.target.ranges.ask(rest.clone()));
        if !self.target.alone(&held).await {
            return Err(MirrorError::Cancelled);
        }
        while let Some(part) = self.is_left(&rest) {
            let part = match aside.holds.first_in(&part) {
                Some(there) if there.start == part.start => {
                    rest.start = there.end;
                    continue;
                }
                there => part.start..there.map_or(part.end, |there| there.start),
            };
            let mut at = part.start;
            while at < part.end {
                let (len, content) = look(io, pass, at..part.end, PIECE, None).await?;
                let takes = matches!(content, Content::Data(_));
                if let (true, Err(bytes)) = (takes, aside.take(&(at..at + len), self.size)) {
                    // The regions that lie there as a whole may go on to the target, which makes room.
                    aside.holds.mark(part.start..at - at % aside.holds.granularity());
                    return Ok(Err(bytes));
                }
                give(io, &aside.scratch, at, len, content, true, &held).await?;
                at += len;
            }
            aside.holds.mark(part.clone());
            rest.start = part.end;
        }
        Ok(Ok(()))
    }
}

impl Moment {
    /// The same, which sets aside in scratch what requests change, until a job has brought it to the target. Where there is no
    /// room they wait for some, as long as they may wait for the target without.
    #[must_use]
    pub fn with_scratch(self, scratch: Scratch) -> Moment {
        self.kept.set_scratch(scratch);
        self
    }

    /// Whether what requests change goes to scratch.
    pub fn has_scratch(&self) -> bool {
        self.kept.aside.get().is_some()
    }

    /// Bytes that lie in scratch: they are in no words for another process.
    pub fn set_aside(&self) -> u64 {
        self.kept.aside.get().map_or(0, |aside| aside.holds.marked().min(self.kept.size))
    }

    /// Have requests set aside what they change again.
    pub(super) fn reopen_scratch(&self) {
        self.kept.aside.get().inspect(|aside| aside.set_open(true));
    }

    /// Bring what lies in scratch to the target, and have requests wait for that from now on, for another process is to go on
    /// with the moment. Where that fails it stays there, and requests go on setting aside.
    pub(super) async fn empty_scratch(&self, io: &Io) {
        let (kept, from) = (&self.kept, self.from.fork());
        let Some(aside) = kept.aside.get() else { return };
        let until = io.now().saturating_add(EMPTIED_WITHIN);
        let bring = async || {
            let mut at = 0;
            while let Some(range) = kept.next_aside(at) {
                at = range.end;
                kept.bring(io, &from, range).await.map_err(|why| why.to_string())?;
                if io.now() > until && kept.next_aside(at).is_some() {
                    return Err("its target takes too long".to_owned());
                }
            }
            Ok(())
        };
        // First while requests set aside: they wait for no target that takes nothing.
        let mut end = bring().await;
        if end.is_ok() {
            aside.shut().await;
            end = bring().await;
        }
        if let Err(why) = end {
            tracing::warn!("what guests have changed since the moment stays in scratch: {why}");
            aside.set_open(true);
        }
    }
}
