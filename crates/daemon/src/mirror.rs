//! A disk that is copied to another image while it is served, and goes on there.

use std::ops::RangeInclusive;

use ringtap_io::Tasks;
use ringtap_vbd::{Ending, Job, Mirror, OnErrors, Scope};

use crate::commit::{Moved, left, moved};
use crate::{Disk, Error, checkpoints};

/// What is copied where.
pub(crate) struct Copy {
    pub(crate) disk: Disk,
    pub(crate) from: ringtap_vbd::Disk,
    pub(crate) target: Disk,
    pub(crate) to: ringtap_vbd::Disk,
    /// What of the disk.
    pub(crate) scope: Scope,
    /// Whether the target reads as zeros.
    pub(crate) zeroed: bool,
    /// By how many percent guests may be slowed; where there is none their writes wait for the target, from when all has been
    /// copied once.
    pub(crate) max_slowdown: Option<u32>,
    /// Bytes of the regions whose changes are noted.
    pub(crate) granularity: u64,
    /// The most bytes that the job copies at once, where that is said.
    pub(crate) in_flight: Option<u64>,
    /// What becomes of the job where it meets an error.
    pub(crate) on_errors: OnErrors,
}

/// The least and the most bytes that are copied by one request, and the most requests.
const PIECES: RangeInclusive<u64> = 64 << 10..=1 << 20;
const MOST_REQUESTS: u64 = 64;

impl Copy {
    /// Do it, on this thread; none where the job was told to leave the disk where it is.
    pub(crate) fn run(self, job: &Job) -> Result<Option<Moved>, Error> {
        let Copy { disk, from, target, to, scope, zeroed, max_slowdown, granularity, .. } = self;
        let (in_flight, on_errors) = (self.in_flight, self.on_errors);
        let failed = |why: String| Error::Mirror { path: disk.path.clone(), why };
        let mut tasks = Tasks::new(ringtap_io::reactor().map_err(Error::Ring)?);
        let (io, job) = (tasks.io().clone(), job.clone());
        let (old, new) = (disk.path.clone(), target.path.clone());
        let end = tasks.block_on(async move {
            if let Ok(image) = to.image() {
                checkpoints::moves(&io, &from, &*image).await;
            }
            let usual = Mirror::new(from.clone(), to.clone());
            let mut mirror =
                Mirror { scope, zeroed, max_slowdown, granularity, on_errors, ..usual };
            if max_slowdown.is_none() {
                mirror.patience = Some(0);
            }
            if let Some(bytes) = in_flight {
                mirror.piece = (bytes / 2 + 1).next_power_of_two();
                mirror.piece = mirror.piece.clamp(*PIECES.start(), *PIECES.end());
                mirror.requests = (bytes / mirror.piece).clamp(1, MOST_REQUESTS) as usize;
            }
            let still = async || moved(&old, &new);
            let end = mirror.run(&io, &job, Ending::Pivot, still).await;
            if !matches!(end, Ok(Some(_))) {
                checkpoints::stays(&from);
            }
            let end = end.map_err(|error| error.to_string())?;
            match end {
                Some(former) => {
                    checkpoints::moved(&io, &from).await;
                    left(&io, &old, &*former).await;
                    Ok(true)
                }
                None => Ok::<bool, String>(false),
            }
        });
        let end = end.map_err(|source| Error::Process { tried: "drive the io_uring", source })?;
        let format = target.options.format;
        let opened = Some((target.options, target.keeping.secret));
        Ok(end.map_err(failed)?.then_some(Moved { path: target.path, format, opened }))
    }
}
