//! The restart log of a qcow2 image: every L2 entry that changed since the last flush.
//!
//! The rest of what is in memory only follows from it. A record is the cluster, its new entry, and the
//! bitmap of an extended entry or what a standard one said before.
//!
//! In a version 3 image autoclear bits say which log belongs to it, and in which state: another program
//! that wrote to the image has cleared them, another server has set others, and each flush of tables moves
//! their generation on. That, and the witness of the file's last write ([`crate::Standing`]), decide whether
//! the log is taken up. Version 2 has no such bits: that there is a log is noted beside the image, and nothing
//! else in the file may lie in the clusters that the log names either. Standard entries show by what they said
//! before whether anybody has changed them.

use std::collections::HashMap;

use ringtap_io::Io;

use super::counts::Counts;
use super::entry::{Entry, Geometry, Kind};
use super::header::{COPIED, OFFSET_MASK, autoclear};
use super::offline::Offline;
use super::table::Lookup;
use super::tool::ToolError;
use super::walk::{self, Problems};
use super::{Header, Sabotage, Shared, State};
use crate::container::os;
use crate::restart::{Moved, Said, Sign, is_any, seek, seek_beside};
use crate::{Container, Error, Left, LeftBehind, OpenError, RestartChoice, RestartLog, Standing};

/// Changes that a log has room for between two flushes: 2 MiB of memory, twice.
pub(super) const RESTART_RECORDS: u64 = 1 << 16;

/// Slices in memory beside those that show what a log holds.
const FRAMES_BESIDE: u64 = 128;

/// Bits of a stamp: which boot of the machine,
const BOOT: u64 = 0xffff << 47;
/// which file,
const FILE: u64 = 0x3fff << 33;
/// and the generation.
const GENERATION: u64 = 0x1ff_ffff << 8;

/// A copy from before more flushes of tables than these is one of another image.
const FORMER: u64 = 1 << 20;

/// What an image says in its autoclear bits that has a log on that boot, in that file and generation.
fn stamp((boot, file): (u128, u64), generation: u64) -> u64 {
    let fold = |number: u64| {
        let folded = number ^ number >> 32;
        folded ^ folded >> 16
    };
    let boot = fold((boot >> 64) as u64 ^ boot as u64) << 47 & BOOT;
    let file = fold(file) << 33 & FILE;
    autoclear::RESTART_LOG | boot | file | generation << 8 & GENERATION
}

/// The number of its fingerprint, see [`RestartLog::note_beside`].
fn fingerprint(header: &Header) -> u64 {
    // Sizes are multiples of 512 bytes, and versions and cluster sizes small numbers.
    (header.size << 9 | u64::from(header.cluster_bits) << 2 | u64::from(header.version)).max(1)
}

/// What an image says of its log.
fn said_of(header: &Header) -> u64 {
    header.autoclear & (autoclear::RESTART_LOG | autoclear::RESTART_STAMP)
}

/// A generation to begin with.
fn draw() -> Result<u64, Error> {
    Ok(getrandom::u64().map_err(|_| Error::Os(libc::EIO))? & GENERATION >> 8)
}

/// See from what the image says of itself whether the log found beside it is its own. `own`: what it would
/// say of its log on this boot; none where nobody looked for one.
fn compare(
    container: &Container,
    header: &Header,
    log: Option<&mut RestartLog>,
    own: Option<(u128, u64)>,
) -> Said {
    let own = log.as_ref().map(|log| log.own()).or(own);
    if header.version == 2 {
        return own.map_or(Said::default(), |_| Said::beside(container, log.as_deref()));
    }
    let said = said_of(header);
    let of_boot = is_of_boot(said, own);
    let noted = log.as_ref().map(|log| log.noted_own());
    let of_file = of_boot && [own, noted].into_iter().flatten().any(|own| names(said, own));
    let is_kept = || is_any(container, |number, last| is_of_former(said, own, number, last));
    let end = Said::of(of_boot, of_file, log.as_deref(), is_kept);
    if let Some(log) = log
        && let Some(why) = disowned(said, log)
    {
        log.belongs_to_another(why);
    }
    end
}

/// Whether an image that says this has a log of the boot that `own` is of.
fn is_of_boot(said: u64, own: Option<(u128, u64)>) -> bool {
    let here = own.map(|own| stamp(own, 0));
    said & autoclear::RESTART_LOG != 0 && here.is_some_and(|here| (said ^ here) & BOOT == 0)
}

/// Whether it has that of this boot and file.
fn names(said: u64, own: (u128, u64)) -> bool {
    (said ^ stamp(own, 0)) & (BOOT | FILE) == 0
}

/// Whether what an image says may have been said of this log before, in the state that it has now or a former one.
fn is_of_former(said: u64, own: Option<(u128, u64)>, number: u64, last: u64) -> bool {
    let flushes = last.wrapping_sub((said & GENERATION) >> 8) & (GENERATION >> 8);
    // The file's number is told by a few bits only.
    own.is_some_and(|(boot, _)| names(said, (boot, number))) && flushes < FORMER
}

/// The log of an image that lies in another file than when it was noted; `log` is what there is under the name of its own.
fn moved(
    container: &Container,
    header: &Header,
    log: Option<&mut RestartLog>,
    own: Option<(u128, u64)>,
) -> Option<Moved> {
    let own = Some(log.as_ref().map(|log| log.own()).or(own)?);
    let said = said_of(header);
    if header.version == 2 {
        return seek_beside(container, log, RESTART_RECORDS, fingerprint(header));
    }
    if is_of_boot(said, own) {
        let is_of = |other: &RestartLog| disowned(said, other).is_none();
        return seek(container, log, RESTART_RECORDS, &Sign::Number(&is_of));
    }
    if log.as_ref().is_some_and(|log| log.left().is_some()) {
        return None;
    }
    let moved = seek(container, log, RESTART_RECORDS, &Sign::Path)?;
    Some(moved.belongs_to_another("it was made anew, or something else has written to it since"))
}

/// Why an image that says this of its log has none, or another.
fn disowned(said: u64, log: &RestartLog) -> Option<&'static str> {
    if said & autoclear::RESTART_LOG == 0 {
        return Some("something else has written to the image since");
    }
    if !names(said, log.noted_own()) {
        return Some("the image is a copy of another");
    }
    let own = log.noted_own();
    let is_own = log.generations().iter().any(|number| said == stamp(own, *number));
    (!is_own).then_some("the image was put back to an earlier state")
}

/// Decide what becomes of what a killed server left.
///
/// # Errors
/// Also where it is to be taken up though the image itself says that it is not of it.
pub(super) fn decide(
    container: &Container,
    header: &Header,
    log: &mut Option<RestartLog>,
    own: Option<(u128, u64)>,
    choice: Option<RestartChoice>,
    data: Option<&Container>,
) -> Result<(), OpenError> {
    let said = compare(container, header, log.as_mut(), own);
    match moved(container, header, log.as_mut(), own) {
        Some(moved) => moved.settle(container, log, choice, data)?,
        // Another process may have taken it up meanwhile.
        None if said != Said::default() => {
            compare(container, header, log.as_mut(), own).heed(container, choice)?;
        }
        None => {}
    }
    let Some(log) = log else { return Ok(()) };
    if let (Some(RestartChoice::Use), Standing::Other(why)) = (choice, log.standing())
        && header.version != 2
        && log.holds_changes()
        && disowned(said_of(header), log).is_some()
    {
        let (path, why) = (container.path().to_owned(), why.clone());
        return Err(OpenError::RestartLogOfAnother { path, why });
    }
    log.decide(choice)
}

/// What a killed server left for an image, as whoever only looks at it finds it. `data` opens the file where its
/// guest data lies.
pub(super) fn left(
    container: &Container,
    header: &Header,
    data: Option<impl FnOnce() -> Result<Container, OpenError>>,
) -> Result<Option<LeftBehind>, OpenError> {
    let mut log = RestartLog::to_read(container, RESTART_RECORDS)?;
    let whose = RestartLog::whose(container);
    let said = compare(container, header, log.as_mut(), whose);
    if let Some(moved) = moved(container, header, log.as_mut(), whose) {
        log = moved.for_telling(container).or(log);
    } else if said.missing && !said.elsewhere {
        return Ok(Some(LeftBehind::missing()));
    }
    let log = log.map(|log| match data.filter(|_| log.holds_changes()).map(|open| open()) {
        Some(Ok(data)) => log.with_data(&data),
        Some(Err(error)) => log.without_data(&error),
        None => log,
    });
    Ok(log.and_then(|log| log.left_behind()))
}

/// Memory for L2 tables in which all that the log holds can be shown at once.
pub(super) fn memory_to_show(log: &RestartLog, geometry: &Geometry) -> u64 {
    let records = log.left().map(|left| left.records).unwrap_or_default();
    let mut slices: Vec<u64> =
        records.iter().map(|[cluster, ..]| geometry.slice_of(*cluster)).collect();
    slices.sort_unstable();
    slices.dedup();
    (slices.len() as u64 + FRAMES_BESIDE) * geometry.bytes_of_slice()
}

/// What the log says of one cluster.
struct Change {
    entry: Entry,
    /// What its standard entry may say in the file: what it was at any time since the last flush.
    may_be: Vec<u64>,
    /// What it does say there.
    found: Entry,
}

impl Shared {
    /// Note an entry's change before it is acknowledged. Under the lock under which entries change.
    pub(super) fn note(&self, cluster: u64, entry: Entry) {
        let Some(log) = self.restart.get() else { return };
        let second = match (self.tables.geometry.extended(), self.tables.entry(cluster)) {
            (true, _) => entry.bitmap,
            (false, Lookup::Entry(old)) => old.word,
            (false, _) => 0,
        };
        // There is room: `log_is_crowded` was asked before the change was begun.
        let noted = log.append([cluster, entry.word, second]);
        debug_assert!(noted, "a change of cluster {cluster} was not noted");
    }

    /// So much of a write as may have its room at once, in bytes and in clusters: what one slice tells of,
    /// and no more than a flush surely makes room for in the log.
    pub(super) fn noted_at_once(&self, offset: u64, len: u64) -> (u64, u64) {
        let geometry = &self.tables.geometry;
        let first = offset >> geometry.cluster_bits;
        let slice = geometry.clusters_of_slice(geometry.slice_of(first));
        let most = self.restart.get().map_or(u64::MAX, RestartLog::at_once);
        let end = (offset + len + geometry.cluster() - 1) >> geometry.cluster_bits;
        let end = end.min(slice.end).min(first.saturating_add(most));
        (len.min((end << geometry.cluster_bits) - offset), end - first)
    }

    /// Whether a flush must come before so many more changes are begun.
    pub(super) fn log_is_crowded(&self, state: &State, more: u64) -> bool {
        let Some(log) = self.restart.get() else { return false };
        let needed = state.allocations.reserved() + more;
        log.room_for(needed) < needed
            || log.room() < log.capacity() / 8 && !self.flushes.is_running()
    }

    /// Take up what a killed server left, if that was decided, make it stable, and begin a log of our own.
    pub(super) async fn take_up(&self, io: &Io, log: RestartLog) -> Result<(), OpenError> {
        let failed = |error| os(&self.container, "take up the restart log of", error);
        if let Some(left) = self.to_take_up(&log) {
            let (path, told) = (self.container.path().display(), left.told());
            let changes = self.believed(io, left).await.map_err(failed)?;
            let Some(changes) = changes else { return Err(self.contradicts(told)) };
            tracing::info!("{path}: taking up {told} that a killed process left");
            self.replay(io, changes).await.map_err(failed)?;
            self.flush(io).await.map_err(failed)?;
        }
        let generation = draw().map_err(failed)?;
        // First, so that the image never names a log with anything in it that is stable already.
        log.start(generation);
        if self.header.version > 2 {
            let bits = self.header.known_autoclear() | stamp(log.own(), generation);
            // It need not be stable: a power cut ends the log, too.
            self.write_header(io, 88, &bits.to_be_bytes()).await.map_err(failed)?;
        } else {
            log.note_beside(fingerprint(&self.header));
        }
        let _first = self.restart.set(log);
        Ok(())
    }

    fn to_take_up(&self, log: &RestartLog) -> Option<Left> {
        let left = log.left().filter(|_| *log.standing() == Standing::Same);
        let left = left.filter(|left| !left.records.is_empty());
        left.filter(|_| !self.does(Sabotage::RestartLogIgnored))
    }

    fn contradicts(&self, told: String) -> OpenError {
        let (path, why) = (self.container.path().to_owned(), "they contradict it".to_owned());
        OpenError::RestartLogInDoubt { path, told, why }
    }

    /// Have an image that is only read show what a killed server left. In memory only, for good: the
    /// tables are never written.
    pub(super) async fn show(&self, io: &Io, log: &RestartLog) -> Result<(), OpenError> {
        let failed = |error| os(&self.container, "read the restart log of", error);
        let Some(left) = self.to_take_up(log) else { return Ok(()) };
        let told = left.told();
        let changes = self.believed(io, left).await.map_err(failed)?;
        let Some(changes) = changes else { return Err(self.contradicts(told)) };
        let geometry = &self.tables.geometry;
        for (cluster, change) in changes {
            let (table, slice) = (geometry.table_of(cluster), geometry.slice_of(cluster));
            if self.tables.l1(table) == 0 {
                let state = &mut *self.state();
                state.cache.add_blank(&self.tables, table);
                // Nothing is ever read there.
                state.cache.set_l1(&self.tables, table, geometry.cluster() | COPIED);
            }
            self.bring_slice(io, cluster).await.map_err(failed)?;
            let mut state = self.state();
            if !state.cache.pin_frame(&self.tables, slice) {
                return Err(failed(Error::Os(libc::ENOMEM)));
            }
            state.cache.set(&self.tables, cluster, change.entry);
        }
        Ok(())
    }

    /// Say in the image that its tables are in another state than before. It is stable with the sync of
    /// the flush that wrote them.
    pub(super) async fn advance_generation(&self, io: &Io) -> Result<(), Error> {
        let Some(log) = self.restart.get().filter(|_| self.header.version > 2) else {
            return Ok(());
        };
        let bits = self.header.known_autoclear() | stamp(log.own(), log.begin_generation());
        self.write_header(io, 88, &bits.to_be_bytes()).await?;
        log.end_generation();
        Ok(())
    }

    /// The image is closed in good order: there is nothing to be taken up.
    pub(super) async fn close_log(&self, io: &Io) -> Result<(), Error> {
        let Some(log) = self.restart.get() else { return Ok(()) };
        if self.header.version == 2 {
            log.close_beside();
            return Ok(());
        }
        let bits = self.header.known_autoclear().to_be_bytes();
        let traits = self.container.traits();
        if traits.regular || traits.request_alignment > 1 {
            // As when it was named: not stable, since a power cut ends the log that it would still name.
            self.write_header(io, 88, &bits).await?;
        } else {
            // Of a device it would stay in this host's page cache, and be written some time after it was closed: another host
            // may have the device by then.
            self.patch_header(io, 88, &bits).await?;
        }
        log.close(true);
        Ok(())
    }

    /// The last change of each cluster, if the file is as the log's writer left it.
    async fn believed(&self, io: &Io, left: Left) -> Result<Option<HashMap<u64, Change>>, Error> {
        let geometry = &self.tables.geometry;
        let mut changes: HashMap<u64, Change> = HashMap::new();
        for [cluster, word, second] in left.records {
            let entry = match geometry.extended() {
                true => Entry { word, bitmap: second },
                false => Entry { word, bitmap: 0 },
            };
            let wrong = (0..geometry.units())
                .any(|unit| matches!(entry.kind(geometry, unit), Kind::Bad | Kind::Compressed));
            // A server makes the file longer before it uses what is new.
            let host = entry.host(geometry).filter(|_| !geometry.data_file);
            let behind = host.is_some_and(|host| host >= self.container.len());
            if cluster >= geometry.clusters() || wrong || behind {
                return Ok(None);
            }
            let new = Change { entry, may_be: Vec::new(), found: Entry::default() };
            let change = changes.entry(cluster).or_insert(new);
            change.entry = entry;
            change.may_be.extend([word, second]);
        }
        if !geometry.extended() {
            for (cluster, change) in &mut changes {
                change.found = self.load_entry(io, *cluster).await?.unwrap_or_default();
                if !change.may_be.contains(&change.found.word) {
                    return Ok(None);
                }
            }
        }
        let fits = self.header.version > 2 || self.are_free(io, &changes).await?;
        Ok(Some(changes).filter(|_| fits))
    }

    /// Whether nothing lies in the clusters that the log names but what it says.
    async fn are_free(&self, io: &Io, changes: &HashMap<u64, Change>) -> Result<bool, Error> {
        let (header, moment) = (self.header.clone(), None);
        let image = Offline { io, container: &self.container, header, moment };
        let mut counts = Counts::new(0, usize::MAX);
        let counted = async {
            let mut problems = Problems::default();
            let tables = walk::Tables::read(&image, &mut problems).await?;
            tables.count(&image, &mut counts, None).await?;
            Ok(!problems.blind)
        };
        match counted.await {
            Ok(true) => {}
            Ok(false) => return Ok(false),
            Err(ToolError::Io { source, .. }) => return Err(source),
            Err(_) => return Ok(false),
        }
        let geometry = &self.tables.geometry;
        Ok(changes.values().all(|Change { entry, found, .. }| {
            let Some(host) = entry.host(geometry) else { return true };
            let own = found.host(geometry) == Some(host);
            counts.get(host >> geometry.cluster_bits) <= i64::from(own)
        }))
    }

    async fn replay(&self, io: &Io, changes: HashMap<u64, Change>) -> Result<(), Error> {
        if !self.tables.geometry.data_file {
            self.count_hosts(io, &changes).await?;
        }
        let mut changes: Vec<(u64, Change)> = changes.into_iter().collect();
        changes.sort_unstable_by_key(|(cluster, _)| *cluster);
        for (cluster, Change { entry, .. }) in changes {
            self.own_table(io, cluster).await?;
            let slice = self.tables.geometry.slice_of(cluster);
            let crowded = {
                let mut state = self.state();
                if let Lookup::Entry(old) = self.tables.entry(cluster) {
                    if old != entry {
                        self.set_entry(&mut state, cluster, entry);
                    }
                    if old.word & OFFSET_MASK != entry.word & OFFSET_MASK {
                        self.release_entry(&mut state, old);
                    }
                }
                state.cache.unpin(&self.tables, slice);
                state.cache.is_crowded(&self.tables)
            };
            if crowded {
                self.flush(io).await?;
            }
        }
        Ok(())
    }

    /// Where the last cluster ends that the file's refcounts count.
    async fn end_of_counted(&self, io: &Io) -> Result<u64, Error> {
        let blocks = self.refcounts().blocks();
        for block in (0..blocks).rev() {
            if self.refcounts().offset_of(block).is_none() {
                continue;
            }
            self.load_refcounts(io, block).await?;
            let refcounts = self.refcounts();
            let mut clusters = refcounts.clusters_of_block(block).rev();
            if let Some(last) = clusters.find(|cluster| refcounts.get(*cluster) > 0) {
                return Ok(last + 1);
            }
        }
        Ok(0)
    }

    /// Give every host cluster of the log a refcount, before anybody looks for free ones.
    async fn count_hosts(&self, io: &Io, changes: &HashMap<u64, Change>) -> Result<(), Error> {
        let geometry = &self.tables.geometry;
        let hosts = changes.values().filter_map(|change| change.entry.host(geometry));
        let mut hosts: Vec<u64> = hosts.map(|host| host >> geometry.cluster_bits).collect();
        hosts.sort_unstable();
        let covered = |host: &u64| {
            let refcounts = self.refcounts();
            refcounts.offset_of(refcounts.block_of(*host)).is_some()
        };
        let missing: Vec<u64> = hosts.iter().copied().filter(|host| !covered(host)).collect();
        if let (Some(first), Some(last)) = (missing.first(), missing.last()) {
            self.make_blocks(io, *first, *last).await?;
        }
        for host in hosts {
            let block = self.refcounts().block_of(host);
            self.load_refcounts(io, block).await?;
            let mut refcounts = self.refcounts();
            if refcounts.get(host) == 0 {
                refcounts.change(host, 1).map_err(|_| Error::Corrupt)?;
            }
        }
        self.dirty.store(true, std::sync::atomic::Ordering::SeqCst);
        Ok(())
    }

    /// Make the refcount blocks that the killed server had in memory only, for clusters `first` to
    /// `last`: behind those and all that are counted.
    async fn make_blocks(&self, io: &Io, first: u64, last: u64) -> Result<(), Error> {
        let place = self.end_of_counted(io).await?.max(last + 1);
        let mut end = place + 1;
        loop {
            let need = self.refcounts().need(&(first..end));
            if place + need <= end {
                break;
            }
            end = place + need;
        }
        let bits = self.tables.geometry.cluster_bits;
        if !self.container.traits().regular && self.container.len() < end << bits {
            return Err(Error::Full);
        }
        // Before the file is made longer: the table may not become large enough.
        self.refcounts().cover_from(&(first..end), place).ok_or(Error::Full)?;
        if self.container.len() < end << bits {
            self.container.set_len(io, end << bits).await?;
        }
        let uncounted = self.refcounts().take_uncounted();
        for cluster in uncounted {
            let block = self.refcounts().block_of(cluster);
            self.load_refcounts(io, block).await?;
            self.refcounts().change(cluster, 1).map_err(|_| Error::Corrupt)?;
            self.state().add_structure(cluster);
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "restart_tests.rs"]
mod tests;
