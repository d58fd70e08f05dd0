//! What jobs that copy disks have in common; and mirrors.

use std::ops::RangeInclusive;
use std::sync::Arc;

use ringtap_image::OpenOptions;
use ringtap_vbd::{OnError, OnErrors, Scope, Tracker};
use serde_json::{Value, json};

use super::bitmaps::{Known, usable};
use super::command::Command;
use super::job_words::{JobStatus, JobType};
use super::jobs::tell_of_phase;
use super::outgoing::Reply;
use super::refusal::Refusal;
use super::shape::{Done, arguments, words};
use crate::commit::Moved;
use crate::identity::identity;
use crate::ids::DiskId;
use crate::jobs::New;
use crate::layers::recount_layers;
use crate::ledger::{COPY, Line, whole};
use crate::mirror::Copy;
use crate::running::{Running, Then};

words! {
    /// What becomes of a job that meets an error.
    enum OnErrorWord { "report" Report, "ignore" Ignore, "stop" Stop, "enospc" Enospc, "auto" Auto }
}

impl OnErrorWord {
    pub(super) fn meant(of: Option<OnErrorWord>) -> OnError {
        match of {
            None | Some(OnErrorWord::Report) => OnError::Report,
            Some(OnErrorWord::Ignore) => OnError::Ignore,
            Some(OnErrorWord::Stop) => OnError::Stop,
            Some(OnErrorWord::Enospc | OnErrorWord::Auto) => OnError::StopWhereFull,
        }
    }
}

words! {
    /// What of a disk is copied: all, its topmost image, what changes from then on, or what a bitmap marks, too. QEMU has the
    /// last word, and refuses it.
    enum MirrorSync { "top" Top, "full" Full, "none" Nothing, "incremental" Incremental, "bitmap" Bitmap }
}

words! {
    /// How writes get to the copy: by passes, and once those do not lead to an end at once; or at once as soon as all has been
    /// copied once, and guests wait for the target.
    enum CopyMode { "background" Background, "write-blocking" WriteBlocking }
}

arguments! {
    /// `blockdev-mirror`
    struct BlockdevMirror {
        "job-id" job_id: Option<String>,
        "device" device: String,
        /// The node that takes the disk's place; nobody may show it.
        "target" target: String,
        "sync" sync: MirrorSync,
        /// With `incremental`: what has changed since the target held the same as the disk.
        "bitmap" bitmap: Option<String>,
        "speed" speed: Option<u64>,
        "on-source-error" on_source_error: Option<OnErrorWord>,
        "on-target-error" on_target_error: Option<OnErrorWord>,
        "copy-mode" copy_mode: Option<CopyMode>,
        /// Bytes of the regions whose changes are noted.
        "granularity" granularity: Option<u32>,
        /// The most bytes that are on their way to the target at once for the job, not for guests.
        "buf-size" buf_size: Option<u64>,
        /// Whether the target reads as zeros.
        "target-is-zero" target_is_zero: Option<bool>,
        /// By how many percent guests may be slowed for the target's sake.
        "__ringtap_max-slowdown" max_slowdown: Option<u32>,
        /// Whether the disk stays where it is: `job-complete`, and `job-cancel` once it is ready, end it as a copy.
        "__ringtap_copy" copy: Option<bool>,
        "auto-finalize" auto_finalize: Option<bool>,
        "auto-dismiss" auto_dismiss: Option<bool>,
    }
}

/// Bytes of regions that a mirror may go by, and the most bytes that marks of them take.
const GRANULARITY: RangeInclusive<u32> = 512..=64 << 20;
const MOST_BYTES: u64 = 64 << 20;

/// By how many percent guests may be slowed where nothing is said, and the most that may be said.
const MAX_SLOWDOWN: u32 = 20;
const MOST_SLOWDOWN: u32 = 95;

/// By how many percent guests may be slowed.
pub(super) fn slowdown(said: Option<u32>) -> Result<u32, Refusal> {
    match said.unwrap_or(MAX_SLOWDOWN) {
        percent if percent <= MOST_SLOWDOWN => Ok(percent),
        percent => Err(Refusal::new(format!(
            "'__ringtap_max-slowdown' takes 0 to {MOST_SLOWDOWN} percent, not {percent}"
        ))),
    }
}

/// Bytes of the regions whose changes are noted, of a disk of so many bytes.
fn granularity(said: Option<u32>, size: u64) -> Result<u64, Refusal> {
    let Some(said) = said else { return Ok(Tracker::GRANULARITY) };
    if !GRANULARITY.contains(&said) {
        return Err(Refusal::new("Parameter 'granularity' expects a value in range [512B, 64MB]"));
    }
    if !said.is_power_of_two() {
        return Err(Refusal::new("Parameter 'granularity' expects a power of 2"));
    }
    let bytes = size / u64::from(said) / 8;
    if bytes > MOST_BYTES {
        return Err(Refusal::new(format!(
            "Parameter 'granularity': marks of {bytes} bytes are too many, choose a coarser one"
        )));
    }
    Ok(said.into())
}

/// The longest id of a job.
const LONGEST_ID: usize = 255;

/// Whether a job may be called so: a letter, then letters, digits, `-`, `.` and `_`, as in QEMU.
fn is_job_id(text: &str) -> bool {
    let rest = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    text.len() <= LONGEST_ID
        && text.bytes().next().is_some_and(|first| first.is_ascii_alphabetic())
        && text.bytes().all(rest)
}

/// What all jobs are told.
pub(super) struct Common {
    pub(super) job_id: Option<String>,
    pub(super) speed: Option<u64>,
    pub(super) auto_finalize: Option<bool>,
    pub(super) auto_dismiss: Option<bool>,
}

impl Running {
    /// An error where a job cannot be called so.
    pub(super) fn check_job_id(&self, id: &str) -> Result<(), Refusal> {
        let refuse = |text: String| Err(Refusal::new(text));
        // What another program has begun is gone on with, whatever that called it.
        let goes_on = self.pending.resuming.as_deref() == Some(id);
        match id {
            _ if !goes_on && !is_job_id(id) => refuse(format!("Invalid job ID '{id}'")),
            _ if self.jobs.contains_key(id) || self.pending.jobs.contains(id) => {
                refuse(format!("Job ID '{id}' already in use"))
            }
            _ => Ok(()),
        }
    }

    /// The disk of a new job, with what is known of the job.
    pub(super) fn new_job(&self, device: &str, kind: JobType, of: Common) -> Result<New, Refusal> {
        let refuse = |text: String| Err(Refusal::new(text));
        let disk = self.one_of(Some(device), None)?;
        let id = of.job_id.unwrap_or_else(|| device.to_owned());
        self.check_job_id(&id)?;
        if let Some(user) = self.user_of_disk(disk) {
            return refuse(format!(
                "Node '{device}' is busy: node is used as backing hd of '{user}'"
            ));
        }
        if self.pending.is_changing(disk) {
            return refuse(format!(
                "Node '{device}' is busy: block device is in use by another job, or is being changed"
            ));
        }
        if let Some(below) = self.written_below(disk) {
            // The job there would be has come and gone.
            for status in [JobStatus::Created, JobStatus::Null] {
                tell_of_phase(&self.told, &id, status);
            }
            let kind = kind.word();
            return refuse(format!(
                "Permission conflict on node '{below}': permissions 'write' are both required by an unnamed block \
                 device (uses node '{below}' as 'root' child) and unshared by {kind} job '{id}' (uses node '{below}' as \
                 'intermediate node' child)."
            ));
        }
        let [stays, pends] = [of.auto_dismiss, of.auto_finalize].map(|own| own == Some(false));
        let (disk, speed) = (Some(disk), of.speed.unwrap_or(0));
        let (other, upon, waits, line) = (None, vec![], true, None);
        let copies = false;
        Ok(New { id, kind, disk, other, upon, speed, stays, pends, waits, copies, line })
    }

    /// What is written down of a job: the command that begins it, but for the disk and what all jobs are told.
    pub(super) fn line(&self, new: &New, command: &str, more: Value) -> Option<Line> {
        let path = |id: DiskId| self.disks.get(&id).map(|served| whole(&served.disk.path));
        let (image, target) = (path(new.disk?)?, new.other.and_then(path));
        // Nothing tells whether what is elsewhere is still the same.
        if ringtap_stores::is_store(&image) {
            return None;
        }
        let files = vec![(image, None)];
        let mut arguments = more.as_object().cloned().unwrap_or_default();
        arguments.retain(|_, value| !value.is_null());
        let own = [
            ("job-id", Value::from(new.id.as_str())),
            ("speed", new.speed.into()),
            ("auto-dismiss", (!new.stays).into()),
            ("auto-finalize", (!new.pends).into()),
        ];
        arguments.extend(own.map(|(key, value)| (key.to_owned(), value)));
        Some(Line { files, id: new.id.clone(), command: command.to_owned(), arguments, target })
    }

    /// The disk that a job writes to.
    pub(super) fn target_of(&self, new: &New, name: &str) -> Result<DiskId, Refusal> {
        let target = self.named_node(name)?;
        if Some(target) == new.disk {
            return Err(Refusal::new("Source and target cannot be the same"));
        }
        if let Some(user) = self.who_uses(target) {
            return Err(Refusal::new(format!("Node '{name}' is in use: {user}")));
        }
        if self.disks.get(&target).is_some_and(|served| served.vbd.is_paused()) {
            return Err(Refusal::new(format!("Node '{name}' is paused")));
        }
        Ok(target)
    }

    /// Whether a disk lies in an export of another, whichever servers it passes.
    fn lies_in(&self, disk: DiskId, of: DiskId) -> bool {
        let Some(served) = self.disks.get(&disk) else { return false };
        let words = served.vbd.inspect().layers.lies_in;
        let exports = self.exports.iter().filter(|export| export.disk == of);
        !words.is_empty()
            && exports
                .filter_map(|export| Some((self.servers.get(&export.server)?, &export.name)))
                .flat_map(|(serving, name)| serving.transport.lies_in(name))
                .any(|own| words.contains(&own))
    }

    /// The disk goes on in another image.
    pub(super) fn moved(&mut self, disk: DiskId, moved: Option<Moved>) {
        let former = self.as_lower(disk);
        let is_moved = moved.is_some();
        self.put(disk, moved);
        if is_moved {
            self.take_name(disk, former);
        }
    }

    fn put(&mut self, disk: DiskId, moved: Option<Moved>) {
        let (Some(served), Some(moved)) = (self.disks.get_mut(&disk), moved) else { return };
        if let Some((options, secret)) = moved.opened {
            let layers = served.disk.options.layers;
            served.disk.options = OpenOptions { layers, ..options };
            served.disk.keeping.secret = secret;
        }
        served.disk.path = moved.path;
        served.disk.options.format = moved.format;
        served.disk.options.force_format = false;
        served.file = identity(&served.disk.path);
        recount_layers(served);
        served.facts.goes_on(&served.disk, &served.vbd);
        served.vbd.span().in_scope(|| {
            tracing::info!("it goes on in {}", served.disk.path.display());
        });
    }
}

impl Command for BlockdevMirror {
    const NAME: &'static str = "blockdev-mirror";
    type Answer = Done;

    fn run(self, running: &mut Running, reply: Reply<Done>) {
        reply.give(self.begin(running));
    }
}

/// What is known of a job before it begins.
#[derive(Clone, Copy)]
struct Left {
    /// Whether it goes on where another left off.
    goes_on: bool,
    granularity: u64,
}

impl BlockdevMirror {
    /// What is copied.
    fn scope(&self, running: &Running, id: DiskId, of: Left) -> Result<Scope, Refusal> {
        let refuse = |text: String| Err(Refusal::new(text));
        let Some(served) = running.disks.get(&id) else { return refuse("the disk is gone".into()) };
        let name = match (self.sync, &self.bitmap) {
            (MirrorSync::Bitmap, _) => return refuse("Sync mode 'bitmap' not supported".into()),
            (MirrorSync::Incremental, None) => {
                return refuse(
                    "must provide a valid bitmap name for 'incremental' sync mode".into(),
                );
            }
            // What is left of it is known, whatever has become of the bitmap.
            (MirrorSync::Incremental, Some(_)) if of.goes_on => None,
            (MirrorSync::Incremental, Some(name)) => Some(name),
            (_, Some(_)) => return refuse("'bitmap' is for sync=incremental".into()),
            (MirrorSync::Full, None) => return Ok(Scope::All),
            (MirrorSync::Top, None) => return Ok(Scope::Above(1)),
            (MirrorSync::Nothing, None) => None,
        };
        // From before the bitmap is read: what changes between the two is in either. What becomes of the bitmap later is
        // nothing to the job.
        let changed = served.vbd.track(of.granularity);
        if let Some(name) = name {
            let known: Vec<Known> =
                served.vbd.dirty_bitmaps().into_iter().map(Known::from).collect();
            let found = usable(running, id, &known, name)?;
            let Some(marks) = found.marks.as_ref().filter(|_| found.recording) else {
                return refuse(format!(
                    "Bitmap '{name}' does not record: what has changed since it was disabled would be left out"
                ));
            };
            changed.merge(marks, served.vbd.size());
        }
        Ok(Scope::Changed(Arc::new(changed)))
    }

    fn begin(self, running: &mut Running) -> Result<Done, Refusal> {
        let common = Common {
            job_id: self.job_id.clone(),
            speed: self.speed,
            auto_finalize: self.auto_finalize,
            auto_dismiss: self.auto_dismiss,
        };
        let mut new = running.new_job(&self.device, JobType::Mirror, common)?;
        let target = running.target_of(&new, &self.target)?;
        let Some(of) = new.disk else { return Err(Refusal::new("the disk is gone")) };
        let (Some(from), Some(to)) = (running.disks.get(&of), running.disks.get(&target)) else {
            return Err(Refusal::new("the disk is gone"));
        };
        if from.vbd.cache().flushes() && !to.vbd.cache().flushes() {
            return Err(Refusal::new(format!(
                "Node '{}' has cache.no-flush, and the disk's flushes are to be carried out",
                self.target
            )));
        }
        if to.vbd.cache().flushes() && !from.vbd.cache().flushes() {
            return Err(Refusal::new(format!(
                "Node '{}' has cache.no-flush, and its flushes would go on being dropped in '{}', which has not: open both \
                 alike",
                from.node(),
                self.target
            )));
        }
        if running.lies_in(target, of) {
            let name = from.node();
            return Err(Refusal::new(format!(
                "Node '{}' is an export of '{name}' itself, or of a server that has '{name}' from here and passes all on to here: \
                 what is copied would come back without end. Have that server let go of it ('ringtap disk remove' there, or its end), \
                 and serve an image of its own there",
                self.target
            )));
        }
        let blocking = self.copy_mode == Some(CopyMode::WriteBlocking);
        if blocking && self.max_slowdown.is_some() {
            return Err(Refusal::new(
                "'__ringtap_max-slowdown' is for copy-mode background: write-blocking has guests wait for the target",
            ));
        }
        let granularity = granularity(self.granularity, from.vbd.size())?;
        let left = Left { goes_on: running.goes_on_where_left(&new.id), granularity };
        let copy = Copy {
            disk: from.disk.clone(),
            from: from.vbd.clone(),
            target: to.disk.clone(),
            to: to.vbd.clone(),
            scope: self.scope(running, of, left)?,
            zeroed: self.target_is_zero.unwrap_or(false),
            max_slowdown: if blocking { None } else { Some(slowdown(self.max_slowdown)?) },
            granularity,
            in_flight: self.buf_size.filter(|bytes| *bytes > 0),
            on_errors: OnErrors {
                source: OnErrorWord::meant(self.on_source_error),
                target: OnErrorWord::meant(self.on_target_error),
            },
        };
        new.other = Some(target);
        new.copies = self.copy.unwrap_or(false);
        let more = json!({
            "target": self.target,
            "sync": self.sync.word(),
            "bitmap": self.bitmap,
            "target-is-zero": self.target_is_zero,
            "copy-mode": self.copy_mode.map(CopyMode::word),
            "granularity": self.granularity,
            "buf-size": self.buf_size,
            "on-source-error": self.on_source_error.map(OnErrorWord::word),
            "on-target-error": self.on_target_error.map(OnErrorWord::word),
            "__ringtap_max-slowdown": self.max_slowdown,
            COPY: self.copy.filter(|copy| *copy),
        });
        new.line = running.line(&new, Self::NAME, more);
        let begun = running.begin_job(new, move |job| {
            let moved = copy.run(job)?;
            Ok(Box::new(move |running: &mut Running| {
                let has_moved = moved.is_some();
                let by_image = running.disks.get(&target).is_some_and(|to| to.ties.by_image);
                // Its image is the disk's from now on, and its name, too, where names are images'.
                match has_moved && !by_image {
                    true => {
                        drop(running.take_back(target));
                        running.put(of, moved);
                        let upon = running.lying().remove(&of).flatten();
                        if let Some(served) = running.disks.get_mut(&of) {
                            served.ties.upon = upon;
                        }
                    }
                    false => running.moved(of, moved),
                }
            }) as Then)
        });
        begun.map(|()| Done {}).map_err(Refusal::from)
    }
}
