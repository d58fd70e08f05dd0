//! The restart log of a VHD: which blocks came to be since the last flush, and which sectors of blocks
//! came to hold data.
//!
//! A record is a word of kind and block, and two more: of a new block its place and whether all of its
//! sectors hold data; of sectors the first and the end.

use std::collections::HashMap;
use std::sync::atomic::{Ordering::Release, Ordering::SeqCst};

use ringtap_io::Io;

use super::bitmap::Bitmap;
use super::footer::{Footer, SECTOR};
use super::header::UNUSED;
use super::layout::Layout;
use super::shared::Shared;
use crate::bytes::get;
use crate::container::os;
use crate::restart::{Said, seek_beside};
use crate::{Container, Error, Left, LeftBehind, OpenError, RestartChoice, RestartLog};

/// Changes that a log has room for between two flushes: 512 KiB of memory, twice.
pub(super) const RESTART_RECORDS: u64 = 1 << 14;

const BLOCK: u64 = 1 << 32;
const BITS: u64 = 2 << 32;

/// The number of its fingerprint, see [`RestartLog::note_beside`]: children know it by its id, too.
pub(super) fn fingerprint(footer: &Footer) -> u64 {
    u64::from_ne_bytes(get(&footer.id, 0)) | 1
}

/// The same of one that may be damaged, and has none then.
pub(super) async fn fingerprint_of(io: &Io, container: &Container) -> u64 {
    Layout::read(io, container).await.map_or(0, |layout| fingerprint(&layout.footer))
}

/// What a killed server left for an image, as whoever only looks at it finds it.
pub async fn left(io: &Io, container: &Container) -> Result<Option<LeftBehind>, OpenError> {
    let mut log = RestartLog::to_read(container, RESTART_RECORDS)?;
    let number = fingerprint_of(io, container).await;
    if let Some(moved) = seek_beside(container, log.as_mut(), RESTART_RECORDS, number) {
        log = moved.for_telling(container).or(log);
    } else {
        let said = Said::beside(container, log.as_ref());
        if said.missing && !said.elsewhere {
            return Ok(Some(LeftBehind::missing()));
        }
    }
    Ok(log.and_then(|log| log.left_behind()))
}

/// See whether the log that was found is all that there is, and where it is not, have the image heed that; see
/// [`crate::restart::seek`]. `number`: its [`fingerprint`].
pub(super) fn heed(
    container: &Container,
    number: u64,
    log: &mut Option<RestartLog>,
    choice: Option<RestartChoice>,
) -> Result<(), OpenError> {
    match seek_beside(container, log.as_mut(), RESTART_RECORDS, number) {
        Some(moved) => moved.settle(container, log, choice, None),
        None => Said::beside(container, log.as_ref()).heed(container, choice),
    }
}

/// What the log says of one block.
#[derive(Default)]
struct Change {
    /// Where it came to lie, and whether all of it holds data.
    new: Option<(u64, bool)>,
    /// Sectors that came to hold data.
    bits: Vec<(u64, u64)>,
}

/// By block.
type Changes = HashMap<u32, Change>;

impl Shared {
    /// Whether a flush must come before another write is begun; `begun` are in flight.
    pub(super) fn log_is_crowded(&self, begun: u64) -> bool {
        let Some(log) = self.restart.get() else { return false };
        // A write notes a new block and its sectors.
        let needed = 2 * (begun + 1);
        log.room_for(needed) < needed
            || log.room() < log.capacity() / 2 && !self.flushes.is_running()
    }

    pub(super) fn note_block(&self, block: u32, place: u64, whole: bool) {
        self.note([BLOCK | u64::from(block), place, u64::from(whole)]);
    }

    pub(super) fn note_bits(&self, block: u32, first: u64, end: u64) {
        self.note([BITS | u64::from(block), first, end]);
    }

    fn note(&self, record: [u64; 3]) {
        if let Some(log) = self.restart.get() {
            // There is room: `log_is_crowded` was asked before the write was begun.
            let noted = log.append(record);
            debug_assert!(noted, "a change was not noted");
        }
    }

    /// Take up what a killed server left, if that was decided, make it stable, and begin a log of our own.
    pub(super) async fn take_up(&self, io: &Io, log: RestartLog) -> Result<(), OpenError> {
        let failed = |error| os(&self.container, "take up the restart log of", error);
        if let Some((changes, told)) = self.to_take_up(&log)? {
            let path = self.container.path().display();
            tracing::info!("{path}: taking up {told} that a killed process left");
            self.replay(io, changes).await.map_err(failed)?;
            self.flush(io).await.map_err(failed)?;
        }
        log.start(0);
        log.note_beside(fingerprint(&self.footer));
        let _first = self.restart.set(log);
        Ok(())
    }

    /// Have an image that is only read show what a killed server left. In memory only.
    pub(super) async fn show(&self, io: &Io, log: &RestartLog) -> Result<(), OpenError> {
        let failed = |error| os(&self.container, "read the restart log of", error);
        match self.to_take_up(log)? {
            Some((changes, _)) => self.replay(io, changes).await.map_err(failed),
            None => Ok(()),
        }
    }

    /// What the log holds, and how much that is, if it is to be taken up.
    fn to_take_up(&self, log: &RestartLog) -> Result<Option<(Changes, String)>, OpenError> {
        let left = log.left().filter(|_| log.is_to_be_used());
        let Some(left) = left.filter(|left| !left.records.is_empty()) else { return Ok(None) };
        let told = left.told();
        match self.believed(left) {
            Some(changes) => Ok(Some((changes, told))),
            None => Err(OpenError::RestartLogInDoubt {
                path: self.container.path().to_owned(),
                told,
                why: "they contradict it".to_owned(),
            }),
        }
    }

    /// The changes by block, if the file is as the log's writer left it: new blocks are where the table
    /// says, or the table has none yet and nothing else is there.
    fn believed(&self, left: Left) -> Option<Changes> {
        let mut changes = Changes::new();
        let sectors = self.block_size() / SECTOR;
        for [word, first, second] in left.records {
            let change = changes.entry(word as u32).or_default();
            match word & !u64::from(u32::MAX) {
                BLOCK => change.new = Some((first, second != 0)),
                BITS if first < second && second <= sectors => change.bits.push((first, second)),
                _ => return None,
            }
        }
        let size = self.header.bitmap_size() + self.block_size();
        let mut places: Vec<(u64, u32)> = (0..self.table.len() as u32)
            .filter_map(|block| Some((self.place_of(block)?, block)))
            .collect();
        for (block, change) in &changes {
            let known = self.place_of(*block);
            let fits = match change.new {
                Some((place, _)) if known.is_none() => {
                    places.push((place, *block));
                    place % SECTOR == 0
                        && place / SECTOR < u64::from(UNUSED)
                        && place >= self.header.table_at + self.table.len() as u64 * 4
                        && place + size <= self.container.len()
                        && (*block as usize) < self.table.len()
                }
                Some((place, _)) => known == Some(place),
                None => known.is_some(),
            };
            if !fits {
                return None;
            }
        }
        places.sort_unstable();
        let apart = places.windows(2).all(|pair| match pair {
            [(one, _), (next, _)] => one + size <= *next,
            _ => true,
        });
        apart.then_some(changes)
    }

    async fn replay(&self, io: &Io, changes: Changes) -> Result<(), Error> {
        for (block, change) in changes {
            match (change.new, self.place_of(block)) {
                (Some((place, whole)), None) => {
                    let empty = || Bitmap::empty(self.block_size() / SECTOR);
                    self.bitmaps.put(block, if whole { Bitmap::full() } else { empty() });
                    if let Some(entry) = self.table.get(block as usize) {
                        entry.store((place / SECTOR) as u32, Release);
                    }
                    self.take_up_place(block, place);
                }
                _ => self.load_block(io, u64::from(block) * self.block_size()).await?,
            }
            let Some(bitmap) = self.bitmaps.get(block) else { continue };
            let mut set = false;
            for (first, end) in change.bits {
                set |= !bitmap.is_full() && bitmap.set(first, end);
            }
            if set && !bitmap.mark() {
                self.take_up_bits(block);
            }
        }
        self.dirty.store(true, SeqCst);
        Ok(())
    }
}
