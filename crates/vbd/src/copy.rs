//! Copying one disk's content into another: many requests in flight, holes kept, zeros found.

use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use ringtap_image::{Error, Status};
use ringtap_io::{Io, Mem};

use crate::bytes::{is_zero, runs};
use crate::walk::Walk;
use crate::workers::{self, Outcome, Progress, Workers};
use crate::{Disk, Kind, Request, Vbd};

/// The most zeros made at once: one request, and progress goes on.
const ZEROS: u64 = 256 << 20;
/// The most nanoseconds that a rate has a task sleep before it looks whether it is to stop.
const NAP: u64 = 100_000_000;

/// Told of bytes that are lost: where, how many, and why.
pub type Lost = Box<dyn Fn(u64, u64, Error) + Send + Sync>;

/// What is copied, and how.
pub struct Copy {
    /// The disk read.
    pub from: Disk,
    /// The disk written.
    pub to: Disk,
    /// The part of `from`, in bytes.
    pub range: Range<u64>,
    /// Of that only these, in order, where they are given; the rest of `to` stays as it is.
    pub only: Option<Vec<Range<u64>>>,
    /// Where in `to` the range begins.
    pub to_offset: u64,
    /// Only what comes from these layers of `from` (0 is the image itself); the rest stays as it is.
    pub layers: Range<u32>,
    /// Only what differs from this disk, over which zeros follow: what shows where `to` holds nothing.
    pub unless_in: Option<Disk>,
    /// `to` reads as zeros wherever it is to, so that zeros need not be made.
    pub zeroed: bool,
    /// Zeros are written down in `to`, though it may read as zeros there now: another image may come to lie below.
    pub zeros_stay: bool,
    /// Zeros found in so many consecutive bytes become holes; 0 keeps all as it is found.
    pub sparse: usize,
    /// Bytes read and written at once.
    pub piece: usize,
    /// Data is to be compressed, in clusters of so many bytes; `piece` is a multiple of it.
    pub compress: Option<usize>,
    /// The most bytes to move in a second.
    pub rate: Option<u64>,
    /// What cannot be read is taken for zeros, and told of: where, how many bytes, and why.
    pub salvage: Option<Lost>,
    /// How many work at once.
    pub workers: Workers,
}

impl Copy {
    /// All of one disk into another from its beginning, as the tools do it on images at rest.
    pub fn new(from: impl Into<Disk>, to: impl Into<Disk>) -> Copy {
        let (from, to) = (from.into(), to.into());
        Copy {
            range: 0..from.size(),
            from,
            to,
            only: None,
            to_offset: 0,
            layers: 0..u32::MAX,
            unless_in: None,
            zeroed: false,
            zeros_stay: false,
            sparse: 4096,
            piece: 1 << 20,
            compress: None,
            rate: None,
            salvage: None,
            workers: Workers::of(8),
        }
    }
}

/// Why a copy stopped.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// The source could not be read.
    #[error("reading {len} bytes at {offset} of the source failed: {error}")]
    Read {
        /// Where.
        offset: u64,
        /// How many bytes.
        len: u64,
        /// Why.
        error: Error,
    },
    /// The disk that differences are looked for in could not be read.
    #[error("reading {len} bytes at {offset} of the backing image failed: {error}")]
    ReadBase {
        /// Where.
        offset: u64,
        /// How many bytes.
        len: u64,
        /// Why.
        error: Error,
    },
    /// Where the source has data could not be found.
    #[error("finding out what the source holds at {offset} failed: {error}")]
    Status {
        /// Where.
        offset: u64,
        /// Why.
        error: Error,
    },
    /// The target could not be written.
    #[error("writing {len} bytes at {offset} of the target failed: {error}")]
    Write {
        /// Where.
        offset: u64,
        /// How many bytes.
        len: u64,
        /// Why.
        error: Error,
    },
    /// There is no ring to work with.
    #[error("io_uring: {0}")]
    Ring(#[from] std::io::Error),
    /// [`Progress::stop`] was called.
    #[error("stopped before the end")]
    Stopped,
}

struct Job {
    copy: Copy,
    walk: Walk<Status>,
    outcome: Arc<Outcome<CopyError>>,
    progress: Arc<Progress>,
    began: Instant,
    /// Bytes read so far.
    moved: AtomicU64,
}

/// One thread's part: its own handles of the disks.
struct Hands {
    job: Arc<Job>,
    from: Vbd,
    to: Vbd,
    base: Option<Vbd>,
}

/// Copy. Nothing is flushed: the caller does when all is done.
pub fn copy(copy: Copy, progress: &Arc<Progress>) -> Result<(), CopyError> {
    let outcome = Arc::new(Outcome::default());
    let job = Arc::new(Job {
        walk: Walk::new(copy.range.start, copy.range.end),
        outcome: outcome.clone(),
        progress: progress.clone(),
        began: Instant::now(),
        moved: AtomicU64::new(0),
        copy,
    });
    let tools = || Hands {
        from: job.copy.from.fork(),
        to: job.copy.to.fork(),
        base: job.copy.unless_in.as_ref().map(Disk::fork),
        job: job.clone(),
    };
    workers::run(job.copy.workers, &outcome, tools, |io, hands: Rc<Hands>| async move {
        hands.work(&io).await
    })
}

/// The first of ranges in order that does not end before an offset.
fn next_of(ranges: &[Range<u64>], offset: u64) -> Option<Range<u64>> {
    let at = ranges.partition_point(|range| range.end <= offset);
    ranges.get(at).cloned()
}

impl Hands {
    async fn work(&self, io: &Io) -> Result<(), CopyError> {
        let copy = &self.job.copy;
        let no_memory = |errno| CopyError::Ring(std::io::Error::from_raw_os_error(errno));
        let mut data = io.buffer(copy.piece).map_err(no_memory)?;
        let mut base = match self.base {
            Some(_) => Some(io.buffer(copy.piece).map_err(no_memory)?),
            None => None,
        };
        let unread = |status: &Status| !copy.layers.contains(&status.depth) || self.skips(status);
        let most = |status: &Status| if unread(status) { ZEROS } else { copy.piece as u64 };
        let look = async |offset, len: u64| {
            let wanted = copy.only.as_ref().map(|only| next_of(only, offset));
            let len = match wanted {
                Some(Some(next)) if next.start <= offset => len.min(next.end - offset),
                Some(next) => {
                    let left_out = next.map_or(len, |next| len.min(next.start - offset));
                    let status = Status { depth: copy.layers.end, ..Status::data(left_out) };
                    return Ok::<_, CopyError>((status, left_out));
                }
                None => len,
            };
            let mut status = match self.from.status(io, offset, len).await {
                // Reading will tell.
                Err(_) if copy.salvage.is_some() => Status::data(len.min(copy.piece as u64)),
                status => status.map_err(|error| CopyError::Status { offset, error })?,
            };
            // Behind the end of what lies below now: what is to lie there may be longer.
            if copy.zeros_stay && status.zero && !status.present {
                status.depth = status.depth.max(copy.layers.start);
            }
            let len = match copy.compress {
                Some(cluster) => self.whole_clusters(cluster as u64, offset, &mut status, unread),
                None => status.len,
            };
            Ok((status, len))
        };
        while let Some(piece) = self.job.walk.next(most, look).await? {
            if self.job.outcome.failed() {
                return Ok(());
            }
            if self.job.progress.stopped() {
                return Err(CopyError::Stopped);
            }
            let len = piece.len as usize;
            if !copy.layers.contains(&piece.what.depth) {
                // What lies below shows through.
            } else if self.skips(&piece.what) {
                self.zero(io, piece.offset, piece.len).await?;
            } else {
                let at = piece.offset;
                if piece.what.zero {
                    data.bytes_mut()[..len].fill(0);
                } else {
                    self.hold_back(io, piece.len).await?;
                    self.read(io, at, data.mem().window(0, len)).await?;
                    self.job.progress.add_read(piece.len);
                }
                match &mut base {
                    Some(buffer) => {
                        self.read_base(io, at, buffer.mem().window(0, len)).await?;
                        let (data_mem, old) = (data.mem(), &buffer.bytes()[..len]);
                        self.differences(io, at, &data.bytes()[..len], data_mem, old).await?;
                    }
                    None => self.data(io, at, &data.bytes()[..len], data.mem()).await?,
                }
            }
            self.job.progress.add(piece.len);
        }
        Ok(())
    }

    /// Wait until so many more bytes may be moved.
    async fn hold_back(&self, io: &Io, len: u64) -> Result<(), CopyError> {
        let Some(rate) = self.job.copy.rate else { return Ok(()) };
        let due = due(self.job.moved.fetch_add(len, Relaxed), rate);
        loop {
            let early = due.saturating_sub(self.job.began.elapsed());
            if early.is_zero() {
                return Ok(());
            }
            if self.job.progress.stopped() {
                return Err(CopyError::Stopped);
            }
            io.sleep(u64::try_from(early.as_nanos()).unwrap_or(u64::MAX).min(NAP)).await;
        }
    }

    /// Read a piece; where that fails and what can be had is to be, sector by sector.
    async fn read(&self, io: &Io, at: u64, mem: Mem) -> Result<(), CopyError> {
        let end = serve(&self.from, io, Kind::Read, at, mem).await;
        let (Err(error), Some(tell)) = (end, &self.job.copy.salvage) else {
            let len = mem.len() as u64;
            return end.map_err(|error| CopyError::Read { offset: at, len, error });
        };
        let step = self.from.info().request_alignment.max(512) as usize;
        let mut lost = (at, 0, error);
        for from in (0..mem.len()).step_by(step) {
            let part = mem.window(from, step.min(mem.len() - from));
            let (offset, len) = (at + from as u64, part.len() as u64);
            let Err(error) = serve(&self.from, io, Kind::Read, offset, part).await else {
                continue;
            };
            part.zero();
            if lost.0 + lost.1 != offset && lost.1 > 0 {
                tell(lost.0, lost.1, lost.2);
                lost.1 = 0;
            }
            lost = if lost.1 == 0 { (offset, len, error) } else { (lost.0, lost.1 + len, error) };
        }
        if lost.1 > 0 {
            tell(lost.0, lost.1, lost.2);
        }
        Ok(())
    }

    /// Whether what is there need not be read.
    fn skips(&self, status: &Status) -> bool {
        status.zero && self.job.copy.sparse > 0 && self.base.is_none()
    }

    /// How far a status goes in whole clusters of the target. One that is of several kinds is read.
    fn whole_clusters(
        &self,
        cluster: u64,
        offset: u64,
        status: &mut Status,
        unread: impl Fn(&Status) -> bool,
    ) -> u64 {
        let copy = &self.job.copy;
        let (begin, end) = (self.place(offset), self.place(offset + status.len));
        let last = self.place(copy.range.end);
        if end >= last {
            return status.len;
        }
        let down = end - end % cluster;
        if unread(status) && down > begin {
            return down - begin;
        }
        let up = end.next_multiple_of(cluster).min(last) - begin;
        if unread(status) || up > status.len {
            // Read, whatever shows there: nothing was said of what was rounded up to.
            *status = Status { depth: copy.layers.start, ..Status::data(up) };
        }
        up
    }

    /// Where a byte of the source goes.
    fn place(&self, offset: u64) -> u64 {
        offset - self.job.copy.range.start + self.job.copy.to_offset
    }

    /// Write a piece's bytes, zeros left out.
    async fn data(&self, io: &Io, at: u64, bytes: &[u8], mem: Mem) -> Result<(), CopyError> {
        let sparse = self.job.copy.sparse;
        if let Some(cluster) = self.job.copy.compress {
            return self.compress(io, at, bytes, mem, cluster).await;
        }
        if sparse == 0 {
            return self.write(io, at, mem.window(0, bytes.len())).await;
        }
        for run in runs(bytes.len(), sparse, |range| is_zero(&bytes[range])) {
            let (offset, len) = (at + run.from as u64, run.to - run.from);
            if run.chosen {
                self.zero(io, offset, len as u64).await?;
            } else {
                self.write(io, offset, mem.window(run.from, len)).await?;
            }
        }
        Ok(())
    }

    /// Compress whole clusters, zeros left out; what shares its cluster with another source is written
    /// as it is.
    async fn compress(
        &self,
        io: &Io,
        at: u64,
        bytes: &[u8],
        mem: Mem,
        cluster: usize,
    ) -> Result<(), CopyError> {
        let copy = &self.job.copy;
        let offset = self.place(at);
        let head = offset.next_multiple_of(cluster as u64) - offset;
        let head = (head as usize).min(bytes.len());
        let tail = match offset + bytes.len() as u64 == self.to.size() {
            true => 0,
            false => (bytes.len() - head) % cluster,
        };
        let whole = bytes.len() - tail;
        for part in [0..head, whole..bytes.len()] {
            if !part.is_empty() {
                let window = mem.window(part.start, part.len());
                self.write(io, at + part.start as u64, window).await?;
            }
        }
        let bytes = bytes.get(head..whole).unwrap_or_default();
        let zero = |range: Range<usize>| copy.sparse > 0 && is_zero(&bytes[range]);
        for run in runs(bytes.len(), cluster, zero) {
            let (from, len) = ((head + run.from) as u64, (run.to - run.from) as u64);
            if run.chosen {
                self.zero(io, at + from, len).await?;
                continue;
            }
            let (offset, part) = (offset + from, &bytes[run.from..run.to]);
            let end = self.to.compress(io, offset, part).await;
            end.map_err(|error| CopyError::Write { offset, len, error })?;
        }
        Ok(())
    }

    /// Write what is not as it is in the base.
    async fn differences(
        &self,
        io: &Io,
        at: u64,
        bytes: &[u8],
        mem: Mem,
        old: &[u8],
    ) -> Result<(), CopyError> {
        let grain = self.job.copy.sparse.clamp(512, 4096);
        let grain = self.job.copy.compress.unwrap_or(grain);
        for run in runs(bytes.len(), grain, |range| bytes[range.clone()] == old[range]) {
            let (offset, len) = (at + run.from as u64, run.to - run.from);
            if !run.chosen {
                let part = &bytes[run.from..run.to];
                self.data(io, offset, part, mem.window(run.from, len)).await?;
            }
        }
        Ok(())
    }

    async fn read_base(&self, io: &Io, at: u64, mem: Mem) -> Result<(), CopyError> {
        let Some(base) = &self.base else { return Ok(()) };
        let there = base.size().saturating_sub(at).min(mem.len() as u64);
        mem.window(there as usize, mem.len()).zero();
        if there == 0 {
            return Ok(());
        }
        let end = serve(base, io, Kind::Read, at, mem.window(0, there as usize)).await;
        end.map_err(|error| CopyError::ReadBase { offset: at, len: there, error })
    }

    async fn zero(&self, io: &Io, at: u64, len: u64) -> Result<(), CopyError> {
        if self.job.copy.zeroed {
            return Ok(());
        }
        let offset = self.place(at);
        let kind = Kind::WriteZeroes { unmap: !self.job.copy.zeros_stay, fast: false };
        let request = Request { kind, offset, len, mem: Mem::EMPTY, fua: false };
        let end = self.to.serve(io, request).await;
        end.map_err(|error| CopyError::Write { offset, len, error })
    }

    async fn write(&self, io: &Io, at: u64, mem: Mem) -> Result<(), CopyError> {
        let (offset, len) = (self.place(at), mem.len() as u64);
        let end = serve(&self.to, io, Kind::Write, offset, mem).await;
        end.map_err(|error| CopyError::Write { offset, len, error })
    }
}

/// When the byte behind so many may be moved, at so many bytes in a second.
fn due(moved: u64, rate: u64) -> Duration {
    let nanos = u128::from(moved) * 1_000_000_000 / u128::from(rate.max(1));
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

async fn serve(vbd: &Vbd, io: &Io, kind: Kind, offset: u64, mem: Mem) -> Result<(), Error> {
    let request = Request { kind, offset, len: mem.len() as u64, mem, fua: false };
    vbd.serve(io, request).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_says_when_bytes_are_due() {
        assert_eq!(due(0, 1), Duration::ZERO);
        assert_eq!(due(3 << 20, 2 << 20), Duration::from_millis(1500));
        assert_eq!(due(1000, 0), Duration::from_secs(1000));
        assert_eq!(due(u64::MAX, 1), Duration::from_nanos(u64::MAX));
    }
}
