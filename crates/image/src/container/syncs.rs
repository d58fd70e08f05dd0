//! Making a file stable that is used through the page cache, so that no flush is acknowledged that was none.
//!
//! What the kernel could not write back it tells once for each open file: to whoever next asks for anything there to be
//! stable, be that an fsync or a write with RWF_DSYNC. It takes the lost pages for clean then, and what is asked for next
//! succeeds without them. So a file is made stable by one way alone, which is here, by one sync at a time, whose end
//! everybody knows before the next begins; and where one has failed none is believed any more, unless all that may be lost is
//! written anew.

use std::io;
use std::path::Path;
use std::sync::PoisonError;

use ringtap_io::sync::atomic::{AtomicI32, Ordering::SeqCst};
use ringtap_io::sync::{Mutex, MutexGuard, broken};
use ringtap_io::{Event, File, Io, Op};

use crate::Error;

/// What a sync fails with since what was written may be lost, whatever the kernel called it: room that is made later brings
/// nothing back, so nobody is to wait for some.
const LOST: Error = Error::Lost;

/// The syncs of one open file.
#[derive(Default)]
pub(super) struct Syncs {
    /// The errno of the first one that failed; 0 where none has.
    lost: AtomicI32,
    turns: Mutex<Turns>,
    ended: Event,
}

/// Whoever asks while a sync is in flight waits for the next, which serves all that wait.
#[derive(Default)]
struct Turns {
    begun: u64,
    running: bool,
    /// The last one that ended well.
    done: u64,
}

impl Syncs {
    /// Fails once something may be lost.
    pub(super) fn check(&self) -> Result<(), Error> {
        if self.lost.load(SeqCst) != 0 { Err(LOST) } else { Ok(()) }
    }

    /// What the kernel called it.
    pub(super) fn lost_by(&self) -> Option<Error> {
        Some(self.lost.load(SeqCst)).filter(|errno| *errno != 0).map(Error::from_errno)
    }

    /// All that may be lost is written anew, from now on: what the next sync says of that is believed.
    pub(super) fn believe_again(&self) {
        self.lost.store(0, SeqCst);
    }

    /// Make every completed write stable.
    pub(super) async fn sync(&self, io: &Io, file: File, path: &Path) -> Result<(), Error> {
        let Some(mut turn) = self.turn().await? else { return Ok(()) };
        let told = |result| self.heard(path, result);
        let end = io.to_the_end_told(Op::Sync { file }, told).await;
        self.check()?;
        end.map_err(Error::from_errno)?;
        turn.well = true;
        Ok(())
    }

    /// What the kernel said to a sync. Also where that is not waited for any more: nobody else is told of it.
    pub(super) fn heard(&self, path: &Path, result: i32) {
        let nothing = [libc::EINTR, libc::EAGAIN, libc::ECANCELED];
        if result >= 0 || nothing.contains(&-result) || self.lost.swap(-result, SeqCst) != 0 {
            return;
        }
        tracing::error!(
            "cannot make {} stable: {}. What was acknowledged since the last good flush may be lost, and no later flush could \
             tell: all of them fail until the image is opened anew. See to its storage, then to what is in it",
            path.display(),
            io::Error::from_raw_os_error(-result)
        );
    }

    /// Have one begin, or wait for one that another began since: then none is needed.
    async fn turn(&self) -> Result<Option<Turn<'_>>, Error> {
        let next = if broken("sync joined") { 0 } else { 1 };
        let wanted = self.turns().begun + next;
        loop {
            let ended = {
                let mut turns = self.turns();
                self.check()?;
                if turns.done >= wanted {
                    return Ok(None);
                }
                if !turns.running || broken("syncs beside one another") {
                    turns.running = true;
                    turns.begun += 1;
                    return Ok(Some(Turn { syncs: self, number: turns.begun, well: false }));
                }
                self.ended.listen()
            };
            ended.await;
        }
    }

    /// See [`crate::Image::abandon`].
    pub(super) fn abandon(&self) {
        self.ended.close();
    }

    /// Nothing in it is ever half changed.
    fn turns(&self) -> MutexGuard<'_, Turns> {
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A sync that is in flight. However it ends, others go on.
struct Turn<'a> {
    syncs: &'a Syncs,
    number: u64,
    well: bool,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        {
            let mut turns = self.syncs.turns();
            turns.running = false;
            if self.well {
                turns.done = self.number;
            }
        }
        if !broken("sync ended in silence") {
            self.syncs.ended.notify();
        }
    }
}
