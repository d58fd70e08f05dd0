//! Backups: jobs that make another node a copy of a disk's moment, or keep the moment to be read.

use std::path::PathBuf;
use std::time::Duration;

use ringtap_vbd::{Breaks, Moment, OnErrors};
use serde_json::json;

use super::bitmaps::{Known, usable};
use super::copies::{Common, OnErrorWord};
use super::job_words::JobType;
use super::refusal::Refusal;
use super::shape::{Done, arguments, words};
use crate::ids::DiskId;
use crate::jobs::New;
use crate::ledger::CHECKPOINT;
use crate::moment::{Begun, Wanted};
use crate::running::{Running, Served};
use crate::scratch::{ROOM, ScratchAt};

/// How long a guest's write may wait for the target, where nothing is said.
const GUEST_TIMEOUT: u64 = 1000;

words! {
    /// What of a disk is copied.
    enum BackupSync { "full" Full, "incremental" Incremental, "bitmap" Bitmap, "none" Nothing }
}

words! {
    /// When the bitmap is as if it had been cleared at the backup's moment.
    enum BitmapMode { "on-success" OnSuccess, "never" Never, "always" Always }
}

arguments! {
    /// `blockdev-backup`
    struct BlockdevBackup {
        "job-id" job_id: Option<String>,
        "device" device: String,
        /// The node that becomes the copy; nobody may show it. With `none`: what takes what guests change, and shows the
        /// moment as long as the job is there.
        "target" target: String,
        "sync" sync: BackupSync,
        /// With `incremental` and `bitmap`: what has changed since the target was a copy.
        "bitmap" bitmap: Option<String>,
        "bitmap-mode" bitmap_mode: Option<BitmapMode>,
        "speed" speed: Option<u64>,
        "on-source-error" on_source_error: Option<OnErrorWord>,
        "on-target-error" on_target_error: Option<OnErrorWord>,
        /// Whether the copy is compressed: it is not.
        "compress" compress: Option<bool>,
        /// Whether the target reads as zeros.
        "__ringtap_target-is-zero" target_is_zero: Option<bool>,
        /// How long a guest's write may wait, in milliseconds, before the backup is given up: for room in scratch, or for the
        /// target where there is no scratch.
        "__ringtap_guest-timeout" guest_timeout: Option<u64>,
        /// Where what guests change is set aside until the target has it: a folder. Not with `none`.
        "__ringtap_scratch" scratch: Option<String>,
        /// The most bytes that lie there at once, 1 GiB where nothing is said; 0: there is none, and guests' writes wait for
        /// the target. With `none`: the most bytes that the target takes, before the backup is given up.
        "__ringtap_scratch-limit" scratch_limit: Option<u64>,
        /// A bitmap of the disk that was made at the backup's moment: it goes where there is no copy from which it could go on.
        "__ringtap_checkpoint" checkpoint: Option<String>,
        "auto-finalize" auto_finalize: Option<bool>,
        "auto-dismiss" auto_dismiss: Option<bool>,
    }
}

/// A backup that is asked for, and can be.
pub(super) struct Asked {
    pub(super) new: New,
    wanted: Wanted,
    clears_always: bool,
    checkpoint: Option<String>,
}

/// What of it is needed once it has begun.
pub(super) struct Own {
    pub(super) new: New,
    pub(super) clears_always: bool,
    pub(super) checkpoint: Option<String>,
}

impl Own {
    /// The disks that it has to do with.
    pub(super) fn disks(&self) -> impl Iterator<Item = DiskId> {
        self.new.disk.into_iter().chain(self.new.other)
    }
}

impl Asked {
    pub(super) fn split(self) -> (Wanted, Own) {
        let Asked { new, wanted, clears_always, checkpoint } = self;
        (wanted, Own { new, clears_always, checkpoint })
    }
}

/// Whether some of what a disk holds is enciphered where it lies.
fn is_enciphered(disk: &ringtap_vbd::Disk) -> bool {
    let mut layer = Some(Box::new(disk.inspect().layers));
    while let Some(own) = layer {
        if own.encrypted || own.format == "luks" {
            return true;
        }
        layer = own.below;
    }
    false
}

impl BlockdevBackup {
    pub(super) fn device(&self) -> &str {
        &self.device
    }

    /// The command's name.
    pub(super) const COMMAND: &str = "blockdev-backup";

    /// What its job is called.
    pub(super) fn id(&self) -> &str {
        self.job_id.as_deref().unwrap_or(&self.device)
    }

    /// Bring that moment to its end, which another job has kept until now.
    pub(super) fn go_on(self, running: &mut Running, moment: Moment) -> Result<Done, Refusal> {
        let id = running.one_of(Some(&self.device), None)?;
        let known: Vec<_> = moment.disk().dirty_bitmaps().into_iter().map(Known::from).collect();
        let (wanted, own) = self.ask(running, id, &known, true)?.split();
        let mut moment = moment.take_up().with_errors(wanted.on_errors);
        if let Some(at) = wanted.scratch.filter(|_| !moment.has_scratch()) {
            match at.make(moment.disk().size()) {
                Ok(scratch) => moment = moment.with_scratch(scratch),
                Err(why) => tracing::warn!(
                    "guests wait for the target of the job {id}: {why}",
                    id = own.new.id
                ),
            }
        }
        let target = own.new.other.and_then(|target| running.disks.get(&target));
        let shown = target.and_then(|target| target.moment.clone());
        if shown.is_some() != wanted.held.is_some() {
            return Err(Refusal::new("what shows its moment is gone"));
        }
        running.begin_backup(Begun { moment, shown }, own)?;
        Ok(Done {})
    }

    /// The bitmap that it goes by, and when that is cleared.
    fn bitmap(&self) -> Result<Option<(&str, BitmapMode)>, Refusal> {
        let refuse = |text: &str| Err(Refusal::new(text));
        match (self.sync, &self.bitmap, self.bitmap_mode) {
            (BackupSync::Full | BackupSync::Nothing, None, None) => Ok(None),
            (BackupSync::Full | BackupSync::Nothing, None, Some(_)) => {
                refuse("Cannot specify bitmap sync mode without a bitmap")
            }
            (BackupSync::Full | BackupSync::Nothing, Some(_), _) => {
                refuse("'bitmap' is for sync=incremental and sync=bitmap")
            }
            (BackupSync::Incremental, Some(name), None | Some(BitmapMode::OnSuccess)) => {
                Ok(Some((name, BitmapMode::OnSuccess)))
            }
            (BackupSync::Incremental, Some(_), Some(_)) => {
                refuse("Bitmap sync mode must be 'on-success' when using sync mode 'incremental'")
            }
            (BackupSync::Bitmap, Some(name), Some(mode)) => Ok(Some((name, mode))),
            (BackupSync::Bitmap, Some(_), None) => {
                refuse("Bitmap sync mode must be given when providing a bitmap")
            }
            (BackupSync::Incremental, None, _) => {
                refuse("must provide a valid bitmap name for 'incremental' sync mode")
            }
            (BackupSync::Bitmap, None, _) => {
                refuse("must provide a valid bitmap name for 'bitmap' sync mode")
            }
        }
    }

    /// See whether it can be, on a disk whose bitmaps are these; or go on where another job was left.
    pub(super) fn ask(
        self,
        running: &Running,
        id: DiskId,
        known: &[Known],
        goes_on: bool,
    ) -> Result<Asked, Refusal> {
        if self.compress == Some(true) {
            return Err(Refusal::new(
                "'compress' true is not done by a backup: `ringtap convert -c` compresses the copy afterwards",
            ));
        }
        let by = self.bitmap()?.map(|(name, mode)| (name.to_owned(), mode));
        if let Some((name, _)) = &by {
            usable(running, id, known, name)?;
        }
        let held = matches!(self.sync, BackupSync::Nothing).then_some(self.scratch_limit);
        if held.is_some() && self.scratch.is_some() {
            return Err(Refusal::new(
                "'__ringtap_scratch' is not for sync=none: 'target' is its scratch",
            ));
        }
        let folder = self.scratch.clone().map(PathBuf::from);
        let is_enciphered = || running.disks.get(&id).is_some_and(|of| is_enciphered(&of.vbd));
        let scratch = match (held, self.scratch_limit.unwrap_or(ROOM)) {
            (Some(_), _) | (None, 0) => None,
            // It would lie there as the guest wrote it, and nobody has said that it may.
            (None, _) if folder.is_none() && is_enciphered() => None,
            (None, room) => Some(ScratchAt { folder, room }),
        };
        let common = Common {
            job_id: self.job_id,
            speed: self.speed,
            auto_finalize: self.auto_finalize,
            auto_dismiss: self.auto_dismiss,
        };
        let mut new = running.new_job(&self.device, JobType::Backup, common)?;
        let target = match goes_on {
            // Clients may read the moment there.
            true => running.named_node(&self.target)?,
            false => running.target_of(&new, &self.target)?,
        };
        let Some(to) = running.disks.get(&target) else {
            return Err(Refusal::new("the disk is gone"));
        };
        // Since then the disk may have grown.
        let differs = |from: &Served| from.vbd.size() != to.vbd.size();
        if !goes_on && running.disks.get(&id).is_some_and(differs) {
            return Err(Refusal::new("Source and target image have different sizes"));
        }
        (new.other, new.waits) = (Some(target), false);
        let more = json!({
            "target": self.target,
            "sync": self.sync.word(),
            "bitmap": self.bitmap,
            "bitmap-mode": self.bitmap_mode.map(BitmapMode::word),
            "__ringtap_guest-timeout": self.guest_timeout,
            "__ringtap_scratch": self.scratch,
            "__ringtap_scratch-limit": self.scratch_limit,
            CHECKPOINT: self.checkpoint,
            "on-source-error": self.on_source_error.map(OnErrorWord::word),
            "on-target-error": self.on_target_error.map(OnErrorWord::word),
        });
        new.line = running.line(&new, Self::COMMAND, more);
        let mode = by.as_ref().map(|(_, mode)| *mode);
        let wanted = Wanted {
            to: to.vbd.clone(),
            by: by.map(|(name, _)| name),
            clears: mode.is_some_and(|mode| mode != BitmapMode::Never),
            held,
            scratch,
            zeroed: self.target_is_zero.unwrap_or(false),
            limit: Some(Duration::from_millis(self.guest_timeout.unwrap_or(GUEST_TIMEOUT))),
            breaks: Breaks::Moment,
            on_errors: OnErrors {
                source: OnErrorWord::meant(self.on_source_error),
                target: OnErrorWord::meant(self.on_target_error),
            },
        };
        let clears_always = mode == Some(BitmapMode::Always);
        Ok(Asked { new, wanted, clears_always, checkpoint: self.checkpoint })
    }
}
