//! A copy of a disk as it was at the moment at which the copy was begun, while it is served.

use ringtap_io::Tasks;
use ringtap_vbd::{Job, MirrorError};

use crate::moment::{Begun, cleared, withdrawn};
use crate::{Disk, Error};

/// A backup that has begun.
pub(crate) struct Save {
    pub(crate) disk: Disk,
    pub(crate) begun: Begun,
    /// Whether its bitmap is cleared of what was saved even where it does not end well.
    pub(crate) clears_always: bool,
    /// A bitmap that goes where it does not end well.
    pub(crate) checkpoint: Option<String>,
}

impl Save {
    /// Bring it to its end, on this thread.
    pub(crate) fn run(self, job: &Job) -> Result<(), Error> {
        let Save { disk, begun, clears_always, checkpoint } = self;
        let path = disk.path.clone();
        let failed = |why: MirrorError| Error::Backup { path, why: why.to_string() };
        let mut tasks = Tasks::new(ringtap_io::reactor().map_err(Error::Ring)?);
        let (io, job) = (tasks.io().clone(), job.clone());
        let end = tasks.block_on(async move {
            let Begun { moment, shown } = begun;
            let end = match shown {
                Some(_) => moment.hold(&io, &job).await,
                None => moment.save(&io, &job).await,
            };
            if end.is_err() && moment.is_left(&job) {
                moment.leave(&job);
                return end;
            }
            // What the target has of that is not known.
            let unknown = matches!(end, Err(MirrorError::Flush { .. } | MirrorError::Gone { .. }));
            let clears = end.is_ok() || clears_always && !unknown;
            if let Some(successor) = moment.successor().filter(|_| clears) {
                if end.is_err() {
                    moment.mark_unsaved(successor);
                }
                cleared(&io, &disk, moment.disk(), successor).await;
            }
            if let Some(name) = checkpoint.filter(|_| end.is_err()) {
                withdrawn(&io, &disk, moment.disk(), name).await;
            }
            end
        });
        let driven = |source| Error::Process { tried: "drive the io_uring", source };
        end.map_err(driven)?.map_err(failed)
    }
}
