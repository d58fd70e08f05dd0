//! Dirty bitmaps that outlive their server, of images of every format, in a file beside them: the sidecar.
//!
//! The sidecar lies in the state folder, found by the identity of the image's file (`record`), so that a block device has
//! one as well and nobody who may write the image chooses what is read there. It holds the bits as they were when it was
//! last written as a whole, and the log of regions: a byte for each 64 MiB of the disk, which is stable before the first
//! write to the region is submitted. The bits themselves are in memory that outlives the process, as the restart log does.
//! So a server that is killed leaves them exact; a power cut leaves what was written as a whole, and the regions logged
//! since, which is more than was changed and never less; a clean stop writes them as a whole.
//!
//! A sidecar is believed only of the image in the state in which its writer left it (`binding`).
//!
//! Where a disk is about to go on in another image the sidecar says so, stable before it does, and is found by the name of that
//! one, too: whichever of the two the disk is in then, its bitmaps are there.
//!
//! Two headers take turns: what is written as a whole goes where the present whole does not lie, is made stable, and is the
//! present one once the other header says so. From the moment that the new whole is of until then, regions are logged
//! for both.

mod binding;
mod layout;
mod memory;
mod sidecar;
#[doc(hidden)]
pub mod testing;

use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringtap_io::Io;
use ringtap_io::sync::broken;

use crate::record::Part;
use crate::{Container, Error};

pub use crate::number::new_number;
pub use binding::Binding;
use binding::Verdict;
pub use layout::{BitPage, KeptBitmap, PAGE_WORDS};
use layout::{FIRST, HEADERS, Header, Meta, Next, Whole};
pub use memory::{BitMemory, FolderMemory};
pub use sidecar::{
    Sidecar, move_sidecar, point_no_more, point_to, remove_sidecar, remove_sidecar_of,
};

/// Bytes of a region of the log.
pub const LOGGED: u64 = 64 << 20;
/// Regions that a log has room for beyond those of the disk, which may grow.
const SPARE: u64 = 1024;
/// A zeroed log is written in pieces of so many bytes.
const PIECE: usize = 1 << 16;

/// A bitmap of an image that was opened.
#[derive(Debug)]
pub struct Restored {
    /// What is known of it.
    pub bitmap: KeptBitmap,
    /// Its bits.
    pub bits: RestoredBits,
}

/// Where the bits of a bitmap are that was found.
#[derive(Debug)]
pub enum RestoredBits {
    /// In the memory of its number, exact.
    InMemory,
    /// Here: pages, and ranges of the disk of which all may have changed.
    Stored(Vec<BitPage>, Vec<Range<u64>>),
    /// Not to be had, and this is why: everything may have changed.
    Lost(String),
}

/// A bitmap that is to be written.
pub struct ToKeep {
    /// What is known of it.
    pub bitmap: KeptBitmap,
    /// Its pages in which a bit is set.
    pub pages: Vec<BitPage>,
}

/// The bitmaps of one image in use. All its threads share it.
pub struct BitmapStore {
    sidecar: Container,
    memory: Arc<dyn BitMemory>,
    /// Bytes of a region of the log.
    region: u64,
    state: Mutex<State>,
}

struct State {
    binding: Arc<Binding>,
    /// The number of its memory.
    session: u64,
    /// The image that the disk is about to go on in, and what is written of it.
    announced: Option<(Arc<Binding>, Next)>,
    sequence: u64,
    /// The present whole.
    present: Option<Slot>,
    /// The one that is being written, from its moment on.
    next: Option<Slot>,
    /// The one before the present one, which does not hold yet.
    former: Option<Slot>,
    /// A part of a transaction that does not hold, which the next whole takes the place of.
    unfinished: Option<Part>,
}

/// Where a whole lies.
#[derive(Clone, Debug)]
struct Slot {
    log: Range<u64>,
    body: Range<u64>,
}

/// What a whole is written for.
#[derive(Clone, Debug)]
pub enum How {
    /// The disk goes on.
    Open,
    /// The image is closed and stable, and nobody writes to it any more.
    Closed,
    /// The disk goes on; the whole holds once all of a transaction is written.
    InPart(Part),
}

/// A whole that is written.
#[derive(Debug)]
pub struct Put {
    header: Header,
    slot: Slot,
    /// Whether it is a part of a transaction.
    in_part: bool,
}

/// Where bitmaps of an image are kept.
pub struct KeptIn {
    /// The file.
    pub sidecar: Container,
    /// Where their bits are meanwhile.
    pub memory: Arc<dyn BitMemory>,
    /// The image.
    pub binding: Binding,
    /// Bytes of a region of the log: [`LOGGED`].
    pub region: u64,
}

/// A place for the next whole.
#[derive(Debug)]
pub struct Staged {
    slot: Slot,
}

impl BitmapStore {
    /// The bitmaps that are kept of an image, which nobody has written to since it was opened. From now on changes of the
    /// image are noted. Nothing is written before the first [`BitmapStore::put`].
    ///
    /// # Errors
    /// Where the sidecar cannot be read, or there is no memory that outlives the process.
    pub async fn open(io: &Io, kept: KeptIn) -> io::Result<(BitmapStore, Vec<Restored>)> {
        let KeptIn { sidecar, memory, binding, region } = kept;
        let found = find(io, &sidecar).await?;
        let (mut restored, mut state) = (vec![], State::new(Arc::new(binding)));
        if let Some(Present { header, whole, unfinished }) = found {
            state.sequence = header.sequence;
            state.present = Some(Slot { log: header.log.clone(), body: header.body.clone() });
            state.unfinished = unfinished;
            if let Some(found) = state.binding.found_in(&whole.meta) {
                let verdict = state.binding.judge(&whole.meta, &found, &*memory);
                let logged = match verdict {
                    Verdict::StoredAndLogged => {
                        logged(io, &sidecar, &header, whole.meta.region).await?
                    }
                    _ => vec![],
                };
                restored = whole.restore(&verdict, &logged, &*memory);
            }
        }
        state.session = state.binding.begin(&*memory)?;
        let state = Mutex::new(state);
        Ok((BitmapStore { sidecar, memory, region, state }, restored))
    }

    /// Bytes of a region of the log.
    pub fn region(&self) -> u64 {
        self.region
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The file.
    pub fn sidecar(&self) -> &Container {
        &self.sidecar
    }

    /// Memory for bits.
    pub fn memory(&self) -> &Arc<dyn BitMemory> {
        &self.memory
    }

    /// What is in the memory is not all that is to be noted there any more: a killed server is then as a power cut.
    pub fn memory_is_short(&self) {
        let state = self.lock();
        state.binding.memory_is_short();
    }

    /// Find a place for the next whole, of `bytes` at most, of a disk of `size` bytes, and make its log empty. Nobody logs
    /// meanwhile.
    pub async fn stage(&self, io: &Io, bytes: u64, size: u64) -> Result<Staged, Error> {
        let regions = (size.div_ceil(self.region) + SPARE).next_multiple_of(layout::ALIGN);
        let kept: Vec<Slot> = {
            let state = self.lock();
            state.present.iter().chain(&state.former).cloned().collect()
        };
        let place = place(&kept, regions + bytes);
        let log = place..place + regions;
        let zeros = vec![0; PIECE.min(regions as usize)];
        let mut at = log.start;
        while at < log.end {
            let len = (log.end - at).min(zeros.len() as u64);
            self.sidecar.write(io, at, zeros.get(..len as usize).unwrap_or_default()).await?;
            at += len;
        }
        Ok(Staged { slot: Slot { body: log.end..log.end + bytes, log } })
    }

    /// This is the moment that the next whole is of: from now on regions are logged for both. Nothing is in flight on the
    /// disk, and nothing is logged.
    pub fn switch(&self, staged: &Staged) {
        self.lock().next = Some(staged.slot.clone());
    }

    /// The next whole is not to be: [`BitmapStore::switch`] is undone.
    pub fn forget(&self) {
        self.lock().next = None;
    }

    /// Write the whole, which holds at least what was marked at its moment. It is not the present one yet.
    ///
    /// # Errors
    /// Where it cannot be written: the present one is as it was.
    pub async fn put(
        &self,
        io: &Io,
        staged: Staged,
        bitmaps: Vec<ToKeep>,
        how: How,
    ) -> Result<Put, Error> {
        let (closed, part) = match how {
            How::Open => (false, None),
            How::Closed => (true, None),
            How::InPart(part) => (false, Some(part)),
        };
        let in_part = part.is_some();
        let (sequence, meta) = {
            let state = self.lock();
            let next = state.announced.as_ref().map(|(_, next)| next);
            let meta = state.binding.describe(state.session, closed, next, self.region);
            let bitmaps = bitmaps.iter().map(|one| one.bitmap.clone()).collect();
            (state.sequence + 1, Meta { bitmaps, part, ..meta })
        };
        let body = Whole { meta, pages: bitmaps.into_iter().map(|one| one.pages).collect() };
        let body = body.encode();
        let Slot { log, body: place } = staged.slot;
        if body.len() as u64 > place.end - place.start {
            // The disk has grown since: what lies behind its place is the present whole's.
            return Err(Error::Full);
        }
        let slot = Slot { log, body: place.start..place.start + body.len() as u64 };
        self.sidecar.write(io, slot.body.start, &body).await?;
        self.sidecar.sync(io).await?;
        let header = Header::new(sequence, &slot.log, &slot.body, &body);
        Ok(Put { header, slot, in_part })
    }

    /// What was put is the present whole from now on.
    ///
    /// # Errors
    /// Where which of the two is cannot be told: [`BitmapStore::break_off`] is all that is left.
    pub async fn present(&self, io: &Io, put: Put) -> Result<(), Error> {
        let sequence = put.header.sequence;
        let at = HEADERS[(sequence % 2) as usize];
        self.sidecar.write(io, at, &put.header.encode()).await?;
        self.sidecar.sync(io).await?;
        let mut state = self.lock();
        let before = state.present.replace(put.slot);
        state.former = before.filter(|_| put.in_part);
        (state.sequence, state.next) = (sequence, None);
        state.unfinished.take().iter().for_each(Part::is_gone);
        Ok(())
    }

    /// The transaction that the present whole is a part of is decided: the one before is not needed any more.
    pub fn is_decided(&self) {
        self.lock().former = None;
    }

    /// Of the memory only that of these numbers is needed, and what says how the image stands.
    pub fn forget_but(&self, numbers: &[u64]) {
        let all: Vec<u64> = {
            let state = self.lock();
            let announced = state.announced.iter().map(|(_, next)| next.session);
            numbers.iter().copied().chain([state.session]).chain(announced).collect()
        };
        self.memory.forget_but(&all);
    }

    /// Make stable that these regions may change from now on. One at a time.
    pub async fn log(&self, io: &Io, regions: &[u64]) -> Result<(), Error> {
        let slots: Vec<Slot> = {
            let state = self.lock();
            let next = state.next.iter().filter(|_| !broken("next whole without a log"));
            state.present.iter().chain(next).chain(&state.former).cloned().collect()
        };
        for slot in slots {
            for region in regions {
                let last = (slot.log.end - slot.log.start).saturating_sub(1);
                self.sidecar.write(io, slot.log.start + (*region).min(last), &[1]).await?;
            }
        }
        self.sidecar.sync(io).await
    }

    /// Nothing that is there is to be believed any more: a region could not be logged.
    pub async fn break_off(&self, io: &Io) -> Result<(), Error> {
        self.memory.forget_but(&[]);
        for at in HEADERS {
            self.sidecar.write(io, at, &[0; layout::HEADER]).await?;
        }
        self.sidecar.sync(io).await
    }

    /// The present whole has no bitmaps and nobody adds any: the file is not needed. Whether it is gone.
    ///
    /// # Errors
    /// Where it cannot be removed.
    pub fn remove_empty(&self) -> io::Result<bool> {
        sidecar::remove_empty(&self.sidecar)
    }

    /// The disk is about to go on in another image: from now on its changes are noted, and each whole that is written says so.
    /// What is kept is found to be of that one, too, once the next whole is the present one.
    pub fn announce(&self, binding: Binding) -> io::Result<()> {
        let session = binding.begin(&*self.memory)?;
        let next = binding.as_next(session);
        let mut state = self.lock();
        if let Some((_, former)) = state.announced.replace((Arc::new(binding), next)) {
            self.memory.forget(former.session);
        }
        Ok(())
    }

    /// The image that the disk is about to go on in.
    pub fn announced(&self) -> Option<Container> {
        self.lock().announced.as_ref().map(|(binding, _)| binding.container().clone())
    }

    /// The disk stays in its image.
    pub fn stays(&self) {
        let announced = self.lock().announced.take();
        announced.iter().for_each(|(_, next)| self.memory.forget(next.session));
    }

    /// The disk goes on in another image, which it was moved to with nothing in flight: the next whole is of that. Gives the
    /// number of the memory that is not needed once it is written.
    pub fn rebind(&self, binding: Binding) -> io::Result<u64> {
        let announced = self.lock().announced.take();
        let (binding, session) = match announced {
            Some((announced, next)) if announced.is_same(&binding) => (announced, next.session),
            other => {
                other.iter().for_each(|(_, next)| self.memory.forget(next.session));
                let session = binding.begin(&*self.memory)?;
                (Arc::new(binding), session)
            }
        };
        let mut state = self.lock();
        state.binding = binding;
        Ok(std::mem::replace(&mut state.session, session))
    }
}

/// Whether a sidecar that another image has is of this one: that one's disk was about to go on here.
pub async fn is_of(io: &Io, sidecar: &Container, binding: &Binding) -> io::Result<bool> {
    let found = find(io, sidecar).await?;
    Ok(found.is_some_and(|found| binding.found_in(&found.whole.meta).is_some()))
}

impl State {
    fn new(binding: Arc<Binding>) -> State {
        let (session, sequence, announced, unfinished) = (0, 0, None, None);
        let (present, next, former) = (None, None, None);
        State { binding, session, announced, sequence, present, next, former, unfinished }
    }
}

/// A place of so many bytes that meets none of these.
fn place(kept: &[Slot], bytes: u64) -> u64 {
    let first = kept.iter().map(|one| one.log.start.min(one.body.start)).min();
    let end = kept.iter().map(|one| one.log.end.max(one.body.end)).max();
    let (Some(first), Some(end)) = (first, end) else { return FIRST };
    match FIRST.checked_add(bytes).is_some_and(|end| end <= first) {
        true => FIRST,
        false => end.next_multiple_of(layout::ALIGN).max(FIRST),
    }
}

/// What is found in a sidecar.
struct Present {
    header: Header,
    whole: Whole,
    /// A later one that does not hold.
    unfinished: Option<Part>,
}

/// The present whole.
async fn find(io: &Io, sidecar: &Container) -> io::Result<Option<Present>> {
    let failed = |error: Error| io::Error::from_raw_os_error(error.errno());
    let mut headers = vec![];
    for at in HEADERS {
        let mut bytes = [0; layout::HEADER];
        sidecar.read(io, at, &mut bytes).await.map_err(failed)?;
        headers.extend(Header::decode(&bytes));
    }
    headers.sort_by_key(|header| std::cmp::Reverse(header.sequence));
    let mut later = None;
    for header in headers {
        let (start, len) = (header.body.start, header.body.end - header.body.start);
        if header.body.end.max(header.log.end) > sidecar.len().next_multiple_of(layout::ALIGN) {
            continue;
        }
        let mut body = vec![0; usize::try_from(len).unwrap_or(0)];
        sidecar.read(io, start, &mut body).await.map_err(failed)?;
        let decoded = header.is_of(&body).then(|| Whole::decode(&body)).flatten();
        let Some(whole) = decoded else { continue };
        match whole.meta.part.clone().filter(|part| !part.holds()) {
            Some(part) if later.is_none() => later = Some((header, whole, part)),
            _ => {
                let unfinished = later.map(|(_, _, part)| part);
                return Ok(Some(Present { header, whole, unfinished }));
            }
        }
    }
    // Nothing is left of what was before it.
    Ok(later.map(|(header, whole, part)| Present { header, whole, unfinished: Some(part) }))
}

/// The ranges of the disk that were logged.
async fn logged(
    io: &Io,
    sidecar: &Container,
    header: &Header,
    region: u64,
) -> io::Result<Vec<Range<u64>>> {
    let count = header.log.end - header.log.start;
    let mut bytes = vec![0; usize::try_from(count).unwrap_or(0)];
    let read = sidecar.read(io, header.log.start, &mut bytes).await;
    read.map_err(|error| io::Error::from_raw_os_error(error.errno()))?;
    let last = bytes.len().saturating_sub(1);
    let set = bytes.iter().enumerate().filter(|(_, byte)| **byte != 0);
    let range = |at: usize| {
        // The last stands for all that lies behind it, too.
        let end = if at == last { u64::MAX } else { (at as u64 + 1).saturating_mul(region) };
        (at as u64).saturating_mul(region)..end
    };
    Ok(set.map(|(at, _)| range(at)).collect())
}

impl Whole {
    fn restore(
        self,
        verdict: &Verdict,
        logged: &[Range<u64>],
        memory: &dyn BitMemory,
    ) -> Vec<Restored> {
        let all = self.meta.bitmaps.into_iter().zip(self.pages);
        let one = |(bitmap, pages): (KeptBitmap, Vec<BitPage>)| {
            let bits = match verdict {
                _ if bitmap.lost => RestoredBits::Lost("it was lost before".into()),
                Verdict::Lost(why) => RestoredBits::Lost(why.clone()),
                Verdict::InMemory if bitmap.recording => match memory.words(bitmap.id, None) {
                    Ok(_) => RestoredBits::InMemory,
                    Err(error) => RestoredBits::Lost(format!("its memory is gone: {error}")),
                },
                Verdict::StoredAndLogged if bitmap.recording => {
                    RestoredBits::Stored(pages, logged.to_vec())
                }
                _ => RestoredBits::Stored(pages, vec![]),
            };
            Restored { bitmap, bits }
        };
        all.map(one).collect()
    }
}

#[cfg(test)]
mod tests;
