//! Requests sent to an image as fast as it answers them, with the time that takes.

use std::cell::Cell;
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

use ringtap_image::{CacheMode, Format, on_a_ring, open};
use ringtap_io::{Io, Mem, Signal};
use ringtap_vbd::{Kind, Request, Vbd};

use crate::unfinished::finish;
use crate::{Doing, Error, Reading, Watcher, format_to_write};

/// The most memory of the requests that are in flight together.
const MOST_MEMORY: u64 = 4 << 30;

/// What is sent, and to what.
#[derive(Clone, Debug)]
pub struct Bench<'a> {
    /// The image; one that is written to nobody may use.
    pub path: &'a Path,
    /// The format, if that is named; else it is recorded, or of one that is read told by the signature.
    pub format: Option<Format>,
    /// Write, with every byte this one; what the image holds is lost.
    pub write: Option<u8>,
    /// Write to it though it is recorded as of another format.
    pub force_format: bool,
    /// How many requests.
    pub count: u64,
    /// How many are in flight at once, at least one.
    pub depth: u32,
    /// Where the first one begins.
    pub offset: u64,
    /// Bytes of each, at least one.
    pub size: u32,
    /// How many bytes further each begins than the one before. What would end behind the disk's end begins again at the front.
    pub step: u64,
    /// Flush each time so many writes have ended.
    pub flush: Option<u32>,
    /// Let what is in flight end before a flush.
    pub drain: bool,
    /// How host caching is used.
    pub cache: CacheMode,
    /// How the image is opened.
    pub reading: Reading,
}

/// Where requests begin, one after the other.
struct Places {
    /// Where the next one begins.
    next: Cell<u64>,
    step: u64,
    /// Where the last one may begin.
    last: u64,
}

impl Places {
    fn next(&self) -> u64 {
        let place = self.next.get();
        let further = place.saturating_add(self.step);
        self.next.set(match further > self.last {
            true if self.last == 0 => 0,
            true => further % self.last,
            false => further,
        });
        place
    }
}

/// What the tasks that send requests share.
struct Sending {
    disk: Vbd,
    kind: Kind,
    places: Places,
    /// Requests that are not sent yet, before the next flush that waits for all of them.
    left: Cell<u64>,
    /// Requests that have ended, where flushes wait for none.
    ended: Cell<u64>,
    flush_beside: Option<u64>,
    running: Cell<u32>,
    end: Cell<Result<(), (u64, ringtap_image::Error)>>,
    over: Signal,
}

impl Sending {
    /// Send one request after the other until none is left.
    async fn send(&self, io: &Io, mem: Mem) {
        while self.left.get() > 0 && self.end.get().is_ok() {
            self.left.set(self.left.get() - 1);
            let offset = self.places.next();
            let request =
                Request { kind: self.kind, offset, len: mem.len() as u64, mem, fua: false };
            let mut end = self.disk.serve(io, request).await;
            self.ended.set(self.ended.get() + 1);
            let due = self.flush_beside.is_some_and(|every| self.ended.get() % every == 0);
            if end.is_ok() && due {
                end = self.disk.flush(io).await;
            }
            if let Err(error) = end {
                self.end.set(self.end.get().and(Err((offset, error))));
            }
        }
        self.running.set(self.running.get() - 1);
        self.over.notify(io);
    }
}

/// Send the requests; how long they took, once the image is open. `begins` is called before the first.
///
/// # Errors
///
/// What is asked for makes no sense; the image cannot be opened, or a request fails.
pub fn bench(job: &Bench<'_>, watch: &Watcher, begins: impl FnOnce()) -> Result<Duration, Error> {
    refuse(job)?;
    let disk = match job.write {
        Some(_) => {
            let format = format_to_write(job.path, job.format)?;
            let options = job.reading.options_to_write(format, job.cache, job.force_format)?;
            Vbd::new(open(job.path, &options)?, job.cache)
        }
        None => job.reading.open(job.path, job.format, job.cache, watch)?,
    };
    let size = u64::from(job.size);
    let room = disk.size().checked_sub(size);
    let last = room.ok_or_else(|| {
        Error::usage(format!("requests of {size} bytes: the disk has {}", disk.size()))
    })?;
    if job.offset > last {
        return Err(Error::usage(format!(
            "a first request at {}: the disk has {} bytes",
            job.offset,
            disk.size()
        )));
    }
    begins();
    let closed = disk.fork();
    let sending = Sending {
        disk,
        kind: if job.write.is_some() { Kind::Write } else { Kind::Read },
        places: Places { next: Cell::new(job.offset), step: job.step, last },
        left: Cell::new(0),
        ended: Cell::new(0),
        flush_beside: job.flush.filter(|_| !job.drain).map(u64::from),
        running: Cell::new(0),
        end: Cell::new(Ok(())),
        over: Signal::default(),
    };
    let (count, depth, fill) = (job.count, job.depth, job.write.unwrap_or(0));
    let together = job.flush.filter(|_| job.drain).map_or(u64::MAX, u64::from);
    let took = on_a_ring(job.path, move |io| async move {
        send_all(&io, Rc::new(sending), (count, together), (depth, size as usize), fill).await
    })?
    .doing(|| format!("{}: the requests did not all succeed", job.path.display()));
    match job.write {
        // What was written stays, and is no part of what was measured.
        Some(_) => took.and_then(|took| finish(closed, job.path).map(|()| took)),
        None => took,
    }
}

fn refuse(job: &Bench<'_>) -> Result<(), Error> {
    if job.flush.is_some() && job.write.is_none() {
        return Err(Error::usage("flushes come between writes: add -w"));
    }
    if job.flush.is_some_and(|every| every < job.depth) {
        let depth = job.depth;
        return Err(Error::usage(format!(
            "with {depth} in flight, flushes are {depth} requests apart or more"
        )));
    }
    if job.depth == 0 || job.size == 0 || job.flush == Some(0) {
        return Err(Error::usage("a depth, a size and a distance of flushes are at least 1"));
    }
    if u64::from(job.depth) * u64::from(job.size) > MOST_MEMORY {
        return Err(Error::usage("more than 4 GiB of memory for the requests in flight together"));
    }
    Ok(())
}

/// Send `count` requests, and flush where `together` of them have ended.
async fn send_all(
    io: &Io,
    sending: Rc<Sending>,
    (count, together): (u64, u64),
    (depth, size): (u32, usize),
    fill: u8,
) -> Result<Duration, ringtap_image::Error> {
    let depth = u64::from(depth).min(count).max(1) as usize;
    let mut buffers = Vec::with_capacity(depth);
    for _ in 0..depth {
        let mut buffer = io.buffer(size).map_err(ringtap_image::Error::from_errno)?;
        buffer.bytes_mut().fill(fill);
        buffers.push(buffer);
    }
    let begun = Instant::now();
    let mut left = count;
    while left > 0 {
        let now = left.min(together);
        left -= now;
        sending.left.set(now);
        sending.running.set(depth as u32);
        for buffer in &buffers {
            let (task, io_there, mem) = (sending.clone(), io.clone(), buffer.mem());
            io.spawn(async move { task.send(&io_there, mem).await });
        }
        while sending.running.get() > 0 {
            sending.over.wait(io).await;
        }
        sending.end.get().map_err(|(_, error)| error)?;
        if now == together {
            sending.disk.flush(io).await?;
        }
    }
    Ok(begun.elapsed())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_begin_again_at_the_front() {
        let places = Places { next: Cell::new(4096), step: 4096, last: 12288 };
        let begun: Vec<u64> = (0..5).map(|_| places.next()).collect();
        assert_eq!(begun, [4096, 8192, 12288, 4096, 8192]);
        let places = Places { next: Cell::new(0), step: 4096, last: 0 };
        assert_eq!((places.next(), places.next()), (0, 0));
    }
}
