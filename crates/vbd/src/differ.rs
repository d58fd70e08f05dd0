//! Comparing the content of two disks.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use ringtap_image::{Error, Status};
use ringtap_io::{Io, Mem};

use crate::bytes::is_zero;
use crate::walk::{Piece, Walk};
use crate::workers::{self, Outcome, Progress, Workers};
use crate::{Disk, Kind, Request, Vbd};

/// Bytes read at once from each.
const PIECE: u64 = 256 << 10;
/// The most that is passed over at once.
const SKIP: u64 = 256 << 20;

/// Two disks to compare, from their beginnings; past the end of the shorter one zeros are wanted.
pub struct Compare {
    /// The disks.
    pub disks: [Disk; 2],
    /// Also what is allocated in one must be in the other, and their sizes be the same.
    pub strict: bool,
    /// How many work at once.
    pub workers: Workers,
}

/// What a comparison found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// Nothing that differs.
    Same,
    /// The first byte that differs.
    Content(u64),
    /// The first place that one allocates and the other does not.
    Allocation(u64),
}

/// Why a comparison stopped; `disk` is 0 or 1.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum CompareError {
    /// Reading failed.
    #[error("reading {len} bytes at {offset} failed: {error}")]
    Read { disk: usize, offset: u64, len: u64, error: Error },
    /// What it holds could not be found out.
    #[error("finding out what is allocated at {offset} failed: {error}")]
    Status { disk: usize, offset: u64, error: Error },
    /// There is no ring to work with.
    #[error("io_uring: {0}")]
    Ring(#[from] std::io::Error),
    /// [`Progress::stop`] was called.
    #[error("stopped before the end")]
    Stopped,
}

/// What both hold; none past a disk's end.
type Both = [Option<Status>; 2];

struct Job {
    compare: Compare,
    walk: Walk<Both>,
    /// The first differences found so far.
    content: AtomicU64,
    allocation: AtomicU64,
    outcome: Arc<Outcome<CompareError>>,
    progress: Arc<Progress>,
}

struct Eyes {
    job: Arc<Job>,
    disks: [Vbd; 2],
}

/// Compare.
pub fn compare(compare: Compare, progress: &Arc<Progress>) -> Result<Found, CompareError> {
    let end = compare.disks.iter().map(Disk::size).max().unwrap_or(0);
    let outcome = Arc::new(Outcome::default());
    let job = Arc::new(Job {
        walk: Walk::new(0, end),
        content: AtomicU64::new(u64::MAX),
        allocation: AtomicU64::new(u64::MAX),
        outcome: outcome.clone(),
        progress: progress.clone(),
        compare,
    });
    let tools =
        || Eyes { disks: [0, 1].map(|i: usize| job.compare.disks[i].fork()), job: job.clone() };
    workers::run(job.compare.workers, &outcome, tools, |io, eyes: Rc<Eyes>| async move {
        eyes.work(&io).await
    })?;
    let (content, allocation) = (job.content.load(Relaxed), job.allocation.load(Relaxed));
    Ok(match () {
        () if content == u64::MAX && allocation == u64::MAX => Found::Same,
        () if content <= allocation => Found::Content(content),
        () => Found::Allocation(allocation),
    })
}

impl Eyes {
    async fn work(&self, io: &Io) -> Result<(), CompareError> {
        let job = &*self.job;
        let no_memory = |errno| CompareError::Ring(std::io::Error::from_raw_os_error(errno));
        let buffers = [
            io.buffer(PIECE as usize).map_err(no_memory)?,
            io.buffer(PIECE as usize).map_err(no_memory)?,
        ];
        let most = |both: &Both| if both_zero(both) { SKIP } else { PIECE };
        let look = async |offset, len| self.look(io, offset, len).await;
        while let Some(piece) = job.walk.next(most, look).await? {
            if job.outcome.failed() || piece.offset >= job.first() {
                return Ok(());
            }
            if job.progress.stopped() {
                return Err(CompareError::Stopped);
            }
            if job.compare.strict {
                let allocated = piece.what.map(|status| status.map(|it| it.allocated));
                if let [Some(one), Some(other)] = allocated {
                    if one != other {
                        job.allocation.fetch_min(piece.offset, Relaxed);
                    }
                }
            }
            if !both_zero(&piece.what) {
                self.read_and_compare(io, &piece, [&buffers[0], &buffers[1]]).await?;
            }
            job.progress.add(piece.len);
        }
        Ok(())
    }

    async fn look(&self, io: &Io, offset: u64, len: u64) -> Result<(Both, u64), CompareError> {
        let mut both = [None, None];
        let mut least = len;
        for (disk, (vbd, found)) in self.disks.iter().zip(&mut both).enumerate() {
            let there = vbd.size().saturating_sub(offset).min(len);
            if there > 0 {
                let status = vbd.status(io, offset, there).await;
                let status =
                    status.map_err(|error| CompareError::Status { disk, offset, error })?;
                least = least.min(status.len);
                *found = Some(status);
            }
        }
        Ok((both, least))
    }

    async fn read_and_compare(
        &self,
        io: &Io,
        piece: &Piece<Both>,
        buffers: [&ringtap_io::Buffer; 2],
    ) -> Result<(), CompareError> {
        let len = piece.len as usize;
        let mut read = [None, None];
        for disk in [0, 1] {
            if piece.what[disk].is_some_and(|status| !status.zero) {
                let mem = buffers[disk].mem().window(0, len);
                self.read(io, disk, piece.offset, mem).await?;
                read[disk] = Some(&buffers[disk].bytes()[..len]);
            }
        }
        if let Some(at) = first_difference(read) {
            self.job.content.fetch_min(piece.offset + at as u64, Relaxed);
        }
        Ok(())
    }

    async fn read(&self, io: &Io, disk: usize, offset: u64, mem: Mem) -> Result<(), CompareError> {
        let len = mem.len() as u64;
        let request = Request { kind: Kind::Read, offset, len, mem, fua: false };
        let end = self.disks[disk].serve(io, request).await;
        end.map_err(|error| CompareError::Read { disk, offset, len, error })
    }
}

impl Job {
    fn first(&self) -> u64 {
        self.content.load(Relaxed).min(self.allocation.load(Relaxed))
    }
}

/// Whether both are known to read as zeros, or to have ended.
fn both_zero(both: &Both) -> bool {
    both.iter().all(|status| status.is_none_or(|it| it.zero))
}

/// The first byte that differs; what was not read is zeros.
fn first_difference(read: [Option<&[u8]>; 2]) -> Option<usize> {
    match read {
        [Some(one), Some(other)] if one == other => None,
        [Some(one), Some(other)] => one.iter().zip(other).position(|(one, other)| one != other),
        [Some(bytes), None] | [None, Some(bytes)] if is_zero(bytes) => None,
        [Some(bytes), None] | [None, Some(bytes)] => bytes.iter().position(|byte| *byte != 0),
        [None, None] => None,
    }
}
