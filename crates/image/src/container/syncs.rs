//! Making a file stable that is used through the page cache, so that no flush is acknowledged that was none.
//!
//! What the kernel could not write back it tells once for each open file: to whoever next asks for anything there to be
//! stable, be that an fsync or a write with RWF_DSYNC. It takes the lost pages for clean then, and what is asked for next
//! succeeds without them. So a file is made stable by one way alone, which is here, by one sync at a time, whose end
//! everybody knows before the next begins; and where one has failed none is believed any more, unless all that may be lost is
//! written anew.

use std::io;
use std::path::Path;

use ringtap_io::sync::atomic::{AtomicI32, Ordering::SeqCst};
use ringtap_io::{File, Io, Op};

use crate::Error;
use crate::group_commit::GroupCommit;

/// What a sync fails with since what was written may be lost, whatever the kernel called it: room that is made later brings
/// nothing back, so nobody is to wait for some.
const LOST: Error = Error::Lost;

/// The syncs of one open file.
#[derive(Default)]
pub(super) struct Syncs {
    /// The errno of the first one that failed; 0 where none has.
    lost: AtomicI32,
    group: GroupCommit,
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
        let Some(mut turn) = self.group.turn_while(|| self.check()).await? else { return Ok(()) };
        let told = |result| self.heard(path, result);
        let end = io.to_the_end_told(Op::Sync { file }, told).await;
        self.check()?;
        end.map_err(Error::from_errno)?;
        turn.serves(Ok(()));
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

    /// See [`crate::Image::abandon`].
    pub(super) fn abandon(&self) {
        self.group.abandon();
    }
}
