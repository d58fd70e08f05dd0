//! What a server passes to the next: as JSON behind a line that says of which version it is, how long, and its checksum.
//!
//! Versions are read for ever: `tests/handover` has some of each. What is new in a version is optional, with a default; where
//! there is something that an older program could not do without the version is higher, so that it refuses. Version 2 has jobs (and block devices, which
//! programs know that read it), version 3 backups, version 4
//! those that go by a bitmap, version 5 names given at run time, version 6 certificates among them, NBD
//! servers that show nothing, bitmaps that are kept nowhere, jobs that do not end where they meet an error, and
//! disks opened with `backing`, version 7 backups whose checkpoint goes where they fail, version 8 those that only keep their
//! moment, for others to read, version 9 jobs that have ended and wait to be dismissed.

use std::path::PathBuf;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::names::Names;

/// The newest that is read.
const NEWEST: u32 = WITH_ENDED;
const WITH_ENDED: u32 = 9;
const WITH_MOMENTS: u32 = 8;
const WITH_CHECKPOINTS: u32 = 7;
const WITH_CERTIFICATES: u32 = 6;
const WITH_NAMES: u32 = 5;
const WITH_BITMAPS: u32 = 4;
const WITH_BACKUPS: u32 = 3;
const WITH_JOBS: u32 = 2;
/// What is written where nothing needs more.
const PLAIN: u32 = 1;
/// How all programs begin to say that they do not read a version, and how they go on.
const OF_VERSION: &str = "its state is of version ";
const READS: &str = ", and this program reads ";
const FORMAT: &str = "ringtap-handover";

/// Everything but connections: what the next server prepares from while this one serves. Descriptors are named by their
/// places among those that come with it.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct State {
    /// The version of the program that wrote it.
    pub(crate) program: String,
    pub(crate) disks: Vec<DiskState>,
    pub(crate) groups: Vec<GroupState>,
    pub(crate) listeners: Vec<ListenerState>,
    #[serde(default)]
    pub(crate) mounts: Vec<MountState>,
    #[serde(default)]
    pub(crate) devices: Vec<DeviceState>,
    /// Jobs that come with the connections.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) jobs: Vec<String>,
    /// Those of them that are backups.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) backups: Vec<String>,
    /// Those of these that go by a bitmap.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) by_bitmaps: Vec<String>,
    /// Jobs whose errors are met otherwise than by their end. What becomes of those stands in the ledger.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) meet_errors: Vec<String>,
    /// Backups whose checkpoint goes where they fail, as stands in the ledger.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) checkpoints: Vec<String>,
    /// Backups that only keep their moment, which their targets show.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) moments: Vec<String>,
    /// Jobs that have ended, and wait to be dismissed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) ended: Vec<EndedState>,
    /// Disks with bitmaps that are kept nowhere, which come with the connections.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) bitmaps: Vec<String>,
    /// What was named at run time.
    #[serde(default, skip_serializing_if = "Names::is_empty")]
    pub(crate) names: Names,
}

/// A disk that is a block device of this host, which the driver keeps: no descriptor goes with it.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct DeviceState {
    /// The node name of the disk.
    pub(crate) disk: String,
    /// The N of /dev/ublkbN.
    pub(crate) number: u32,
}

/// A disk that is mounted as a file.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct MountState {
    pub(crate) path: PathBuf,
    /// Of the FUSE device.
    pub(crate) device: usize,
    /// Whether the file under it is removed at the end.
    pub(crate) made: bool,
}

/// A disk.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct DiskState {
    /// As a file of a folder of disks describes it.
    pub(crate) described: String,
    /// That file, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) file: Option<PathBuf>,
    /// Why it is not served, if it is not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) left_out: Option<String>,
    /// No file is to describe it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) passes: bool,
}

/// A group of disks.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct GroupState {
    /// As a file of a folder of disks describes it.
    pub(crate) described: String,
    /// That file, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) file: Option<PathBuf>,
}

/// A socket that listens.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct ListenerState {
    /// The address that was asked for.
    pub(crate) asked: String,
    /// The address that it has.
    pub(crate) place: String,
    pub(crate) socket: usize,
}

/// What goes on elsewhere once nothing of it is in flight any more.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Connections {
    /// When the first disk stood still, in nanoseconds of the monotonic clock.
    pub(crate) began: u64,
    #[serde(default)]
    pub(crate) vhost_user: Vec<FrontEnd>,
    #[serde(default)]
    pub(crate) nbd: Vec<Client>,
    /// When mounted files changed the last time, in nanoseconds since 1970.
    #[serde(default)]
    pub(crate) modified: Vec<(PathBuf, u64)>,
    /// Clients of control sockets that were greeted and have said nothing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) control: Vec<usize>,
    /// Those that are kept nowhere.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) bitmaps: Vec<BitmapState>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) jobs: Vec<JobState>,
}

/// A job that is at work on a disk: what does not stand in the ledger of jobs.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct JobState {
    pub(crate) id: String,
    /// The node name of the disk.
    pub(crate) disk: String,
    /// It pauses: `ok` where somebody has asked for that, else why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) paused: Option<String>,
    /// It is to end once the copy is as good as the disk, and whether the disk is to stay where it is then.
    #[serde(default)]
    pub(crate) completes: bool,
    #[serde(default)]
    pub(crate) leaves: bool,
    /// Its end waits for no word any more.
    #[serde(default)]
    pub(crate) finalized: bool,
    /// Of a mirror.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) copied: Option<CopyState>,
    /// Of a backup.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) saved: Option<SaveState>,
}

/// A job that has ended, and waits to be dismissed.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct EndedState {
    pub(crate) id: String,
    /// What it did, as clients are told.
    pub(crate) kind: String,
    /// Why it has failed, if it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<String>,
    /// Bytes that it has dealt with, and that there were.
    pub(crate) offset: u64,
    pub(crate) total: u64,
    /// Bytes a second; 0 is no limit.
    #[serde(default)]
    pub(crate) speed: u64,
    /// Whether its end waited for a word.
    #[serde(default)]
    pub(crate) pends: bool,
    /// For how long requests of guests waited for its end, in nanoseconds.
    #[serde(default)]
    pub(crate) pause: u64,
}

/// How far a backup is.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct SaveState {
    /// The node name of the disk that takes it.
    pub(crate) target: String,
    /// Bytes of a region.
    pub(crate) granularity: u64,
    /// Bytes of the disk at its moment.
    pub(crate) size: u64,
    /// Whether the target read as zeros at first.
    pub(crate) zeroed: bool,
    /// Whether the target was a copy already, and only some of the disk is saved.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) some: bool,
    /// How long a guest's write may wait, in nanoseconds.
    pub(crate) limit: Option<u64>,
    /// How many bytes may still be saved before requests, where that was said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) room: Option<u64>,
    /// Bytes that were dealt with.
    #[serde(default)]
    pub(crate) offset: u64,
    /// Where the moment is only kept: the bitmaps that are shown with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) shown: Option<Vec<MarksState>>,
    /// The regions whose old content has not been saved.
    pub(crate) marks: Vec<PageState>,
    /// What is to take a bitmap's place in the end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) successor: Option<MarksState>,
}

impl SaveState {
    /// Whether it goes by a bitmap.
    pub(crate) fn is_by_bitmap(&self) -> bool {
        self.some || self.successor.is_some()
    }
}

/// A bitmap of a disk.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct BitmapState {
    /// The node name of the disk.
    pub(crate) disk: String,
    /// How many there are before it, those that are kept among them.
    pub(crate) number: usize,
    pub(crate) marks: MarksState,
}

/// Marks that are to take a bitmap's place.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct MarksState {
    /// The bitmap's name.
    pub(crate) bitmap: String,
    /// Bytes of a region.
    pub(crate) granularity: u64,
    /// Whether requests are noted in it.
    pub(crate) recording: bool,
    /// The regions that have changed since the backup's moment.
    pub(crate) marks: Vec<PageState>,
}

/// How far a mirror is.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct CopyState {
    /// Bytes of a region.
    pub(crate) granularity: u64,
    /// The first pass has dealt with all before this.
    pub(crate) from: u64,
    /// Bytes of the disk.
    pub(crate) size: u64,
    pub(crate) was_ready: bool,
    pub(crate) is_pending: bool,
    /// Bytes that were dealt with.
    pub(crate) offset: u64,
    /// The regions that have changed since they were copied.
    pub(crate) marks: Vec<PageState>,
}

/// A bit for each of so many regions, where one is set.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct PageState {
    pub(crate) number: u64,
    /// In hexadecimal digits, the first region in the lowest bit of the first byte.
    pub(crate) bits: String,
}

impl PageState {
    pub(crate) fn new(number: u64, words: &[u64]) -> PageState {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        PageState { number, bits: hex::encode(&bytes) }
    }

    /// Its number and its bits; none where these are none, or not whole words.
    pub(crate) fn words(&self) -> Option<(u64, Vec<u64>)> {
        let bytes = hex::decode(&self.bits).ok().filter(|bytes| bytes.len() % 8 == 0)?;
        let words = bytes.chunks_exact(8).map(|word| word.try_into().map(u64::from_le_bytes));
        Some((self.number, words.collect::<Result<_, _>>().ok()?))
    }
}

/// What is passed on, by the oldest version whose readers know all of it.
pub(crate) trait Versioned: Serialize {
    fn version(&self) -> u32;
}

fn version(jobs: bool, backups: bool, by_bitmaps: bool) -> u32 {
    match (jobs, backups, by_bitmaps) {
        (_, _, true) => WITH_BITMAPS,
        (_, true, false) => WITH_BACKUPS,
        (true, false, false) => WITH_JOBS,
        (false, false, false) => PLAIN,
    }
}

impl State {
    /// What programs do not know that read less than a version, each with that version and what may be done about it.
    fn needs(&self) -> Vec<(u32, String)> {
        let jobs = "wait for their end, or cancel them";
        let ended: Vec<String> = self.ended.iter().map(|job| job.id.clone()).collect();
        let devices: Vec<String> = self.devices.iter().map(|it| it.disk.clone()).collect();
        let lists = [
            (WITH_ENDED, "jobs that have ended", &ended, "dismiss them (job-dismiss)"),
            (WITH_MOMENTS, "backups that keep their moment", &self.moments, jobs),
            (WITH_CHECKPOINTS, "backups with a checkpoint of their own", &self.checkpoints, jobs),
            (WITH_CERTIFICATES, "jobs told what to do about errors", &self.meet_errors, jobs),
            (
                WITH_CERTIFICATES,
                "disks with bitmaps that are not persistent",
                &self.bitmaps,
                "remove these bitmaps",
            ),
            (WITH_BITMAPS, "backups by a bitmap", &self.by_bitmaps, jobs),
            (WITH_BACKUPS, "backups", &self.backups, jobs),
            (WITH_JOBS, "jobs at work", &self.jobs, jobs),
            (WITH_JOBS, "block devices by ublk", &devices, "take these exports away"),
        ];
        let some = lists.into_iter().filter(|(_, _, ids, _)| !ids.is_empty());
        let some = some.map(|(version, what, ids, cure)| {
            (version, format!("{what} ({}): {cure}", ids.join(", ")))
        });
        let names = match (self.names.are_newest(), self.names.are_new()) {
            (true, _) => Some(WITH_CERTIFICATES),
            (false, true) => Some(WITH_NAMES),
            (false, false) => None,
        };
        let what = "what was named at run time (images, files, secrets, certificates): remove it";
        let names = names.map(|version| (version, what.to_owned()));
        some.chain(names).collect()
    }

    /// What to do where a program refuses that reads less: it says so in these words, of whatever version it is. Nothing
    /// where it says something else.
    pub(super) fn what_to_do(&self, why: &str) -> Option<String> {
        let (version, reads) = why.strip_prefix(OF_VERSION)?.split_once(READS)?;
        let newest: u32 = reads.rsplit(' ').next()?.parse().ok()?;
        if version.parse() != Ok(self.version()) {
            return None;
        }
        let lacks = self.needs().into_iter().filter(|(version, _)| *version > newest);
        let lacks: Vec<String> = lacks.map(|(_, what)| what).collect();
        let lacks = lacks.join("; ");
        Some(format!(
            "what it does not know is here: {lacks}; then try again, or by a later program"
        ))
    }
}

impl Versioned for State {
    fn version(&self) -> u32 {
        self.needs().into_iter().map(|(version, _)| version).max().unwrap_or(PLAIN)
    }
}

impl Versioned for Connections {
    fn version(&self) -> u32 {
        let mut saved = self.jobs.iter().filter_map(|job| job.saved.as_ref());
        if saved.any(|saved| saved.shown.is_some()) {
            return WITH_MOMENTS;
        }
        if !self.bitmaps.is_empty() {
            return WITH_CERTIFICATES;
        }
        let mut saved = self.jobs.iter().filter_map(|job| job.saved.as_ref()).peekable();
        let backups = saved.peek().is_some();
        version(!self.jobs.is_empty(), backups, saved.any(SaveState::is_by_bitmap))
    }
}

/// An NBD client.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Client {
    /// The first socket of its server.
    pub(crate) place: String,
    pub(crate) socket: usize,
    /// The name of its export.
    pub(crate) export: String,
    pub(crate) structured: bool,
    pub(crate) extended: bool,
    /// A bit for each metadata context, by its number.
    pub(crate) contexts: u64,
    /// What it has sent that was not looked at, in hexadecimal digits.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) input: String,
}

/// A vhost-user front-end.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct FrontEnd {
    /// The socket that it came by.
    pub(crate) place: String,
    pub(crate) socket: usize,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) requests: Option<usize>,
    pub(crate) messages: Vec<MessageState>,
}

/// A message that brings a back-end where the last one was.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct MessageState {
    pub(crate) request: u32,
    /// In hexadecimal digits.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) payload: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) files: Vec<usize>,
}

/// Write it down.
pub(crate) fn encode<T: Versioned>(what: &T) -> Result<Vec<u8>, String> {
    let version = what.version();
    let body = serde_json::to_vec(what).map_err(|error| error.to_string())?;
    Ok(headed(version, &body))
}

pub(super) fn headed(version: u32, body: &[u8]) -> Vec<u8> {
    let sum = crc32c::crc32c(body);
    let head = format!("{FORMAT} {version} {} {sum:08x}\n", body.len());
    [head.as_bytes(), body].concat()
}

/// Read it; what is wrong is said for people.
pub(crate) fn decode<T: DeserializeOwned>(text: &[u8]) -> Result<T, String> {
    let end = text.iter().position(|byte| *byte == b'\n').ok_or("its state has no first line")?;
    let (head, body) = (String::from_utf8_lossy(&text[..end]), &text[end + 1..]);
    let words: Vec<&str> = head.split(' ').collect();
    let [FORMAT, version, len, sum] = words[..] else {
        return Err(format!("its state begins with {head:?}"));
    };
    if !version.parse().is_ok_and(|version| (PLAIN..=NEWEST).contains(&version)) {
        return Err(format!("{OF_VERSION}{version}{READS}{PLAIN} to {NEWEST}"));
    }
    if len.parse() != Ok(body.len()) {
        return Err(format!("its state has {} bytes, and says {len}", body.len()));
    }
    if u32::from_str_radix(sum, 16) != Ok(crc32c::crc32c(body)) {
        return Err("the checksum of its state is wrong".into());
    }
    serde_json::from_slice(body).map_err(|error| format!("its state cannot be read: {error}"))
}

#[cfg(test)]
mod tests;
