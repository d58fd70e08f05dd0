//! An image on its way to a store, part by part. Which parts have arrived is noted here (`journal`), so that who is broken off sends
//! the others alone when the same image is published there again.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path as FilePath;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use bytes::Bytes;
use object_store::multipart::PartId;
use object_store::{Attributes, Error};
use tokio::task::JoinSet;

use crate::http::{Refused, cause};
use crate::index::{CHUNK, Index};
use crate::journal::Journal;
use crate::source::{Source, of_error};

/// Bytes of a part, of an image of so many parts at most.
const PART: u64 = 16 << 20;
const PARTS: u64 = 9_000;
/// Parts that are on their way at a time at most, and bytes of them: each is in memory for so long. One part alone may have more.
const WIDE: usize = 8;
const IN_FLIGHT: u64 = 256 << 20;
/// How often it is looked whether it is to be stopped.
const LOOK: Duration = Duration::from_millis(20);
/// For how long parts on their way may arrive once it was stopped.
const GRACE: Duration = Duration::from_secs(10);

/// What a publication that was stopped leaves.
pub const STOPPED: &str = "what was there before is there as it was";

/// How an image is sent.
#[derive(Clone, Copy)]
struct Pieces {
    /// Bytes of a part.
    part: u64,
    /// Parts at a time.
    wide: usize,
}

impl Pieces {
    fn of(size: u64) -> Pieces {
        Pieces::in_parts(PART.max(size.div_ceil(PARTS).next_multiple_of(1 << 20)), IN_FLIGHT)
    }

    fn in_parts(part: u64, in_flight: u64) -> Pieces {
        Pieces { part, wide: ((in_flight / part) as usize).clamp(1, WIDE) }
    }
}

/// Whether the store has not got parts that it had taken.
fn lacks_parts(error: &Error) -> bool {
    let code = cause::<Refused>(error).and_then(|refused| refused.code.as_deref());
    matches!(code, Some("InvalidPart" | "InvalidPartOrder"))
}

/// What is sent.
pub(crate) struct Image<'a> {
    pub(crate) path: &'a FilePath,
    pub(crate) index: &'a Index,
    /// What the store is to keep of it.
    pub(crate) of: Attributes,
    /// Set where it is to be sent no more.
    pub(crate) stop: Option<&'a AtomicBool>,
}

/// Why it was not sent.
enum End {
    /// The store does not know the upload any more.
    Gone,
    /// It is not the image that was begun.
    Changed(String),
    /// Somebody wants no more of it.
    Stopped,
    Failed(String),
}

/// Where a part goes, and how much of the image it is.
struct Part {
    number: usize,
    range: std::ops::Range<u64>,
}

/// Send it, or what is missing of it.
pub(crate) async fn upload(
    source: &Source,
    image: &Image<'_>,
    journal: &mut Journal,
    progress: &dyn Fn(u64),
) -> Result<(), String> {
    let Some(store) = &source.parts else { return Err("the store takes no parts".into()) };
    let size = image.index.size();
    let pieces = Pieces::of(size);
    let part = pieces.part;
    loop {
        let (id, arrived, known) = match journal.begun(part) {
            Some((id, arrived)) => (id, arrived, true),
            None => {
                let begun = store.create_multipart_opts(&source.path, image.of.clone().into());
                let id = begun.await.map_err(|error| of_error(error).text())?;
                journal.begin(&id, part);
                (id, BTreeMap::new(), false)
            }
        };
        let sent = match send(source, image, &id, pieces, arrived, journal, progress).await {
            Ok(parts) => {
                let end = store.complete_multipart(&source.path, &id, parts).await;
                end.map(drop).map_err(|error| match lacks_parts(&error) {
                    true => End::Gone,
                    false => end_of(error),
                })
            }
            Err(end) => Err(end),
        };
        match sent {
            Ok(()) => {
                journal.end();
                return Ok(());
            }
            // It was given up there, or is whole by now and was to be replaced.
            Err(End::Gone) if known => {
                journal.forget();
                // What it still has of it takes room there.
                let _ = store.abort_multipart(&source.path, &id).await;
            }
            Err(End::Gone) => {
                journal.forget();
                return Err("the store has lost the upload".into());
            }
            Err(End::Changed(why)) => {
                journal.end();
                let _ = store.abort_multipart(&source.path, &id).await;
                return Err(why);
            }
            Err(End::Stopped) => {
                journal.end();
                return match store.abort_multipart(&source.path, &id).await {
                    Ok(()) | Err(Error::NotFound { .. }) => Err(STOPPED.to_owned()),
                    Err(error) => Err(format!(
                        "the parts that were sent stay in the store: {}",
                        of_error(error).text()
                    )),
                };
            }
            Err(End::Failed(why)) => return Err(journal.told(why, size.div_ceil(part))),
        }
    }
}

fn end_of(error: Error) -> End {
    match error {
        Error::NotFound { .. } => End::Gone,
        error => End::Failed(of_error(error).text()),
    }
}

/// Send the parts that have not arrived; all of them, in order.
async fn send(
    source: &Source,
    image: &Image<'_>,
    id: &str,
    Pieces { part, wide }: Pieces,
    mut arrived: BTreeMap<usize, String>,
    journal: &mut Journal,
    progress: &dyn Fn(u64),
) -> Result<Vec<PartId>, End> {
    let size = image.index.size();
    let mut sending = JoinSet::new();
    let mut end = Ok(());
    for number in 0..size.div_ceil(part) as usize {
        let from = number as u64 * part;
        let range = from..(from + part).min(size);
        if arrived.contains_key(&number) {
            progress(range.end - range.start);
            continue;
        }
        if sending.len() >= wide {
            end = next(&mut sending, &mut arrived, journal, progress, image.stop).await;
        }
        if is_set(image.stop) {
            end = Err(End::Stopped);
        }
        let bytes = match end {
            Ok(()) => image.read(&Part { number, range }),
            Err(_) => break,
        };
        let bytes = match bytes {
            Ok(bytes) => bytes,
            Err(why) => {
                end = Err(why);
                break;
            }
        };
        let (store, path, id) = (source.parts.clone(), source.path.clone(), id.to_owned());
        sending.spawn(async move {
            let len = bytes.len() as u64;
            let Some(store) = store else { return Err(End::Gone) };
            let put = store.put_part(&path, &id, number, bytes.into()).await.map_err(end_of)?;
            Ok((number, put.content_id, len))
        });
    }
    // What is on its way had better arrive.
    while !sending.is_empty() && !matches!(end, Err(End::Stopped)) {
        let last = next(&mut sending, &mut arrived, journal, progress, image.stop).await;
        end = match last {
            Err(End::Stopped) => last,
            last => end.and(last),
        };
    }
    // None of it is to arrive behind the end of the upload: a store may keep what does.
    let arrive = async { while sending.join_next().await.is_some() {} };
    let _ = tokio::time::timeout(GRACE, arrive).await;
    sending.shutdown().await;
    end?;
    Ok(arrived.into_values().map(|content_id| PartId { content_id }).collect())
}

type Arrived = Result<(usize, String, u64), End>;

/// Wait for one to arrive, and note it.
async fn next(
    sending: &mut JoinSet<Arrived>,
    arrived: &mut BTreeMap<usize, String>,
    journal: &mut Journal,
    progress: &dyn Fn(u64),
    stop: Option<&AtomicBool>,
) -> Result<(), End> {
    let arrived_next = tokio::select! {
        one = sending.join_next() => one,
        () = stopped(stop) => return Err(End::Stopped),
    };
    match arrived_next {
        None => Ok(()),
        Some(Err(error)) => Err(End::Failed(error.to_string())),
        Some(Ok(Err(end))) => Err(end),
        Some(Ok(Ok((number, content_id, len)))) => {
            journal.arrived(number, &content_id);
            arrived.insert(number, content_id);
            progress(len);
            Ok(())
        }
    }
}

pub(crate) fn is_set(stop: Option<&AtomicBool>) -> bool {
    stop.is_some_and(|stop| stop.load(SeqCst))
}

/// Ends when it is set, by the handler of a signal, which wakes nobody.
async fn stopped(stop: Option<&AtomicBool>) {
    if stop.is_none() {
        return std::future::pending().await;
    }
    while !is_set(stop) {
        tokio::time::sleep(LOOK).await;
    }
}

impl Image<'_> {
    /// A part of it as the index names it, and nothing else.
    fn read(&self, part: &Part) -> Result<Bytes, End> {
        let failed = |error: io::Error| {
            End::Failed(format!("{}: part {}: {error}", self.path.display(), part.number))
        };
        let mut file = File::open(self.path).map_err(failed)?;
        file.seek(SeekFrom::Start(part.range.start)).map_err(failed)?;
        let len = (part.range.end - part.range.start) as usize;
        let mut bytes = vec![0; len];
        let first = (part.range.start / CHUNK) as u32;
        let read = file.read_exact(&mut bytes);
        let whole = read.is_ok()
            && bytes
                .chunks(CHUNK as usize)
                .zip(first..)
                .all(|(chunk, number)| self.index.matches(number, chunk));
        match read {
            Err(error) if error.kind() != io::ErrorKind::UnexpectedEof => Err(failed(error)),
            _ if !whole => Err(End::Changed(format!(
                "{} was changed while it was published",
                self.path.display()
            ))),
            _ => Ok(bytes.into()),
        }
    }
}

#[cfg(test)]
mod tests;
