//! Jobs: what there are, how far they are, and what is to become of them.

use ringtap_vbd::{Action, Behind, IoStatus, Job, Trouble};

use super::command::Command;
use super::job_words::{JobStatus, JobType};
use super::outgoing::{Events, Reply, Told};
use super::refusal::Refusal;
use super::shape::{Done, answer, arguments, words};
use crate::entry::Entry;
use crate::running::Running;

answer! {
    /// A job, as `query-jobs` has it.
    struct JobInfo {
        "id" id: String,
        "type" of: JobType,
        "status" status: JobStatus,
        "current-progress" current: u64,
        "total-progress" total: u64,
        "error" error: Option<String>,
        /// Bytes that it moves, and that the guest changes, in a second.
        "__ringtap_rate" rate: u64,
        "__ringtap_guest-rate" guest_rate: u64,
        /// For how long guests' requests waited for the end.
        "__ringtap_pause-ns" pause: u64,
    }
}

answer! {
    /// A job, as `query-block-jobs` has it.
    struct BlockJobInfo {
        "type" of: JobType,
        "device" id: String,
        "len" len: u64,
        "offset" offset: u64,
        "busy" busy: bool,
        "paused" paused: bool,
        "speed" speed: u64,
        "io-status" io_status: String,
        "ready" ready: bool,
        "status" status: JobStatus,
        "auto-finalize" auto_finalize: bool,
        "auto-dismiss" auto_dismiss: bool,
        "error" error: Option<String>,
    }
}

answer! {
    /// `JOB_STATUS_CHANGE`
    struct StatusChange { "id" id: String, "status" status: JobStatus }
}

impl Told for StatusChange {
    const NAME: &'static str = "JOB_STATUS_CHANGE";
}

answer! {
    /// `BLOCK_JOB_READY`
    struct BlockJobReady {
        "type" of: JobType,
        "device" device: String,
        "len" len: u64,
        "offset" offset: u64,
        "speed" speed: u64,
    }
}

impl Told for BlockJobReady {
    const NAME: &'static str = "BLOCK_JOB_READY";
}

words! {
    /// What a job was at.
    enum JobOperation { "read" Read, "write" Write }
}

words! {
    /// What was done about an error.
    enum JobErrorAction { "report" Report, "ignore" Ignore, "stop" Stop }
}

answer! {
    /// `BLOCK_JOB_ERROR`
    struct BlockJobError {
        "device" device: String,
        "operation" operation: JobOperation,
        "action" action: JobErrorAction,
    }
}

impl Told for BlockJobError {
    const NAME: &'static str = "BLOCK_JOB_ERROR";
}

answer! {
    /// `BLOCK_JOB_PENDING`
    struct BlockJobPending { "type" of: JobType, "id" id: String }
}

impl Told for BlockJobPending {
    const NAME: &'static str = "BLOCK_JOB_PENDING";
}

answer! {
    /// `BLOCK_JOB_COMPLETED`
    struct BlockJobCompleted {
        "type" of: JobType,
        "device" device: String,
        "len" len: u64,
        "offset" offset: u64,
        "speed" speed: u64,
        "error" error: Option<String>,
    }
}

impl Told for BlockJobCompleted {
    const NAME: &'static str = "BLOCK_JOB_COMPLETED";
}

answer! {
    /// `BLOCK_JOB_CANCELLED`
    struct BlockJobCancelled {
        "type" of: JobType,
        "device" device: String,
        "len" len: u64,
        "offset" offset: u64,
        "speed" speed: u64,
    }
}

impl Told for BlockJobCancelled {
    const NAME: &'static str = "BLOCK_JOB_CANCELLED";
}

answer! {
    /// `__ringtap_JOB_BEHIND`
    struct JobBehind {
        "device" device: String,
        /// Bytes that the target takes in a second, and that guests change.
        "rate" rate: u64,
        "guest-rate" guest_rate: u64,
    }
}

impl Told for JobBehind {
    const NAME: &'static str = "__ringtap_JOB_BEHIND";
}

/// Tell that guests write more than a job's target takes.
pub(crate) fn tell_of_behind(told: &Events, id: &str, behind: Behind) {
    let Behind { target_rate, guest_rate } = behind;
    told.tell(JobBehind { device: id.to_owned(), rate: target_rate, guest_rate });
}

/// Tell of a job's status.
pub(crate) fn tell_of_phase(told: &Events, id: &str, status: JobStatus) {
    told.tell(StatusChange { id: id.to_owned(), status });
}

/// Tell that all is copied.
pub(crate) fn tell_of_ready(told: &Events, id: &str, of: JobType, job: &Job) {
    let progress = job.progress();
    let (len, offset, speed) = (progress.total, progress.offset, progress.limit);
    told.tell(BlockJobReady { of, device: id.to_owned(), len, offset, speed });
}

/// Tell of an error that a job has met.
pub(crate) fn tell_of_trouble(told: &Events, id: &str, trouble: &Trouble) {
    let operation = if trouble.write { JobOperation::Write } else { JobOperation::Read };
    let action = match trouble.action {
        Action::Report => JobErrorAction::Report,
        Action::Ignore => JobErrorAction::Ignore,
        Action::Stop => JobErrorAction::Stop,
    };
    told.tell(BlockJobError { device: id.to_owned(), operation, action });
}

/// Tell that nothing is left but the end, which waits for a word.
pub(crate) fn tell_of_pending(told: &Events, id: &str, of: JobType) {
    told.tell(BlockJobPending { of, id: id.to_owned() });
}

/// Tell of a job's end.
pub(crate) fn tell_of_end(told: &Events, id: &str, entry: &Entry, cancelled: bool) {
    let progress = entry.job.progress();
    let (of, device, speed) = (entry.kind, id.to_owned(), entry.speed);
    let (len, offset) = (progress.total, progress.offset);
    match cancelled {
        // It is no job of a disk.
        _ if matches!(of, JobType::Create) => {}
        true => told.tell(BlockJobCancelled { of, device, len, offset, speed }),
        false => {
            let error = entry.error();
            told.tell(BlockJobCompleted { of, device, len, offset, speed, error });
        }
    }
    tell_of_phase(told, id, JobStatus::Concluded);
}

/// Tell that a job is no more, which has ended for another to go on with.
pub(super) fn tell_of_loss(told: &Events, id: &str, command: &str) {
    let of = match command {
        "block-commit" => JobType::Commit,
        "block-stream" => JobType::Stream,
        "blockdev-mirror" => JobType::Mirror,
        _ => JobType::Backup,
    };
    told.tell(BlockJobCancelled { of, device: id.to_owned(), len: 0, offset: 0, speed: 0 });
    tell_of_phase(told, id, JobStatus::Null);
}

arguments! {
    /// `query-jobs`
    struct QueryJobs {}
}

impl Command for QueryJobs {
    const NAME: &'static str = "query-jobs";
    type Answer = Vec<JobInfo>;

    fn run(self, running: &mut Running, reply: Reply<Self::Answer>) {
        let info = |(id, entry): (&String, &Entry)| {
            let progress = entry.job.progress();
            JobInfo {
                id: id.clone(),
                of: entry.kind,
                status: entry.status(),
                current: progress.offset,
                total: progress.total,
                error: entry.error(),
                rate: progress.rate,
                guest_rate: progress.guest_rate,
                pause: progress.stillness,
            }
        };
        reply.give(Ok(running.jobs.iter().map(info).collect()));
    }
}

arguments! {
    /// `query-block-jobs`
    struct QueryBlockJobs {}
}

impl Command for QueryBlockJobs {
    const NAME: &'static str = "query-block-jobs";
    type Answer = Vec<BlockJobInfo>;

    fn run(self, running: &mut Running, reply: Reply<Self::Answer>) {
        let info = |(id, entry): (&String, &Entry)| {
            let (progress, status) = (entry.job.progress(), entry.status());
            BlockJobInfo {
                of: entry.kind,
                id: id.clone(),
                len: progress.total,
                offset: progress.offset,
                busy: matches!(status, JobStatus::Running),
                paused: progress.paused,
                speed: entry.speed,
                io_status: match progress.io_status {
                    IoStatus::Ok => "ok",
                    IoStatus::Failed => "failed",
                    IoStatus::NoSpace => "nospace",
                }
                .to_owned(),
                ready: matches!(status, JobStatus::Ready | JobStatus::Standby),
                status,
                auto_finalize: !entry.pends,
                auto_dismiss: !entry.stays,
                error: entry.error(),
            }
        };
        let of_disk = |(_, entry): &(&String, &Entry)| !matches!(entry.kind, JobType::Create);
        reply.give(Ok(running.jobs.iter().filter(of_disk).map(info).collect()));
    }
}

/// What `block-job-*` say where there is no such job; `job-*` know no class of their own.
const NOT_THERE: &str = "DeviceNotActive";

/// A command's refusal, as that command says it.
fn said_by(command: &str, why: Refusal) -> Refusal {
    match why.class == NOT_THERE && !command.starts_with("block-") {
        true => Refusal::new("Job not found"),
        false => why,
    }
}

/// Do something with a job that is there.
fn with(
    running: &mut Running,
    id: &str,
    verb: &str,
    work: impl FnOnce(&mut Entry) -> bool,
) -> Result<Done, Refusal> {
    let Some(entry) = running.jobs.get_mut(id) else {
        return Err(Refusal { class: NOT_THERE, text: format!("Block job '{id}' not found") });
    };
    let status = entry.status();
    match work(entry) {
        true => Ok(Done {}),
        false => Err(Refusal::new(format!(
            "Job '{id}' in state '{}' cannot accept command verb '{verb}'",
            status.word()
        ))),
    }
}

/// How a job is cancelled.
#[derive(Clone, Copy, PartialEq)]
enum Cancel {
    /// As `job-cancel` does: without its work, but where that is a copy and is done.
    Work,
    /// As `block-job-cancel` does: what is copied is left as a copy.
    Leave,
    /// As `block-job-cancel` with `force` does.
    Force,
}

fn cancel(running: &mut Running, id: &str, how: Cancel) -> Result<Done, Refusal> {
    with(running, id, "cancel", |entry| {
        if entry.has_ended() {
            return false;
        }
        let leaves = how == Cancel::Leave || how == Cancel::Work && entry.copies;
        match (entry.status(), entry.kind) {
            // The copy is good, or will be: it ends as one.
            (JobStatus::Ready | JobStatus::Standby, JobType::Mirror) if leaves => {
                entry.job.leave();
                entry.job.resume();
            }
            _ => entry.cancel(),
        }
        true
    })
}

fn pause(running: &mut Running, id: &str) -> Result<Done, Refusal> {
    let paused = with(running, id, "pause", |entry| {
        let ending = matches!(entry.status(), JobStatus::Waiting | JobStatus::Pending);
        let can = !entry.has_ended() && !ending && !entry.job.progress().paused;
        if can {
            entry.job.pause();
        }
        can
    });
    tell_status(running, id, paused)
}

fn resume(running: &mut Running, id: &str) -> Result<Done, Refusal> {
    let resumed = with(running, id, "resume", |entry| {
        let can = !entry.has_ended() && entry.job.progress().paused;
        if can {
            entry.job.resume();
        }
        can
    });
    tell_status(running, id, resumed)
}

fn tell_status(running: &Running, id: &str, end: Result<Done, Refusal>) -> Result<Done, Refusal> {
    if let (Ok(_), Some(entry)) = (&end, running.jobs.get(id)) {
        tell_of_phase(&running.told, id, entry.status());
    }
    end
}

fn complete(running: &mut Running, id: &str) -> Result<Done, Refusal> {
    with(running, id, "complete", |entry| {
        let ready = matches!(entry.status(), JobStatus::Ready);
        match ready {
            // The disk stays where it is.
            true if entry.copies => entry.job.leave(),
            true => entry.job.complete(),
            false => {}
        }
        ready
    })
}

fn finalize(running: &mut Running, id: &str) -> Result<Done, Refusal> {
    with(running, id, "finalize", |entry| {
        let pending = matches!(entry.status(), JobStatus::Pending);
        if pending {
            entry.job.finalize();
        }
        pending
    })
}

fn dismiss(running: &mut Running, id: &str) -> Result<Done, Refusal> {
    with(running, id, "dismiss", |entry| entry.has_ended())?;
    running.dismiss(id);
    Ok(Done {})
}

/// Commands that take a job's name alone.
macro_rules! verbs {
    ($($(#[$about:meta])* $Name:ident $name:literal $key:literal => $run:expr;)*) => {
        $(
            arguments! {
                $(#[$about])*
                struct $Name { $key id: String }
            }

            impl Command for $Name {
                const NAME: &'static str = $name;
                type Answer = Done;

                fn run(self, running: &mut Running, reply: Reply<Done>) {
                    let run: fn(&mut Running, &str) -> Result<Done, Refusal> = $run;
                    reply.give(run(running, &self.id).map_err(|why| said_by($name, why)));
                }
            }
        )*
    };
}

verbs! {
    /// `job-cancel`
    JobCancel "job-cancel" "id" => |running, id| cancel(running, id, Cancel::Work);
    /// `job-pause`
    JobPause "job-pause" "id" => pause;
    /// `job-resume`
    JobResume "job-resume" "id" => resume;
    /// `job-complete`
    JobComplete "job-complete" "id" => complete;
    /// `job-finalize`
    JobFinalize "job-finalize" "id" => finalize;
    /// `job-dismiss`
    JobDismiss "job-dismiss" "id" => dismiss;
    /// `block-job-pause`
    BlockJobPause "block-job-pause" "device" => pause;
    /// `block-job-resume`
    BlockJobResume "block-job-resume" "device" => resume;
    /// `block-job-complete`
    BlockJobComplete "block-job-complete" "device" => complete;
    /// `block-job-finalize`
    BlockJobFinalize "block-job-finalize" "id" => finalize;
    /// `block-job-dismiss`
    BlockJobDismiss "block-job-dismiss" "id" => dismiss;
}

arguments! {
    /// `block-job-cancel`
    struct BlockJobCancel { "device" device: String, "force" force: Option<bool> }
}

impl Command for BlockJobCancel {
    const NAME: &'static str = "block-job-cancel";
    type Answer = Done;

    fn run(self, running: &mut Running, reply: Reply<Done>) {
        let how = if self.force == Some(true) { Cancel::Force } else { Cancel::Leave };
        reply.give(cancel(running, &self.device, how));
    }
}

arguments! {
    /// `block-job-set-speed`
    struct SetSpeed { "device" device: String, "speed" speed: u64 }
}

impl Command for SetSpeed {
    const NAME: &'static str = "block-job-set-speed";
    type Answer = Done;

    fn run(self, running: &mut Running, reply: Reply<Done>) {
        let speed = self.speed;
        let set = with(running, &self.device, "set-speed", |entry| {
            entry.speed = speed;
            entry.entered.has_speed(speed);
            entry.job.set_rate(Some(speed).filter(|speed| *speed > 0));
            !entry.has_ended()
        });
        let entered = running.jobs.get(&self.device).map(|entry| entry.entered.clone());
        let (Ok(_), Some(entered)) = (&set, entered) else { return reply.give(set) };
        running.aside("ledger", reply, move || {
            if let Err(error) = entered.keep_speed() {
                tracing::warn!("a server after this one will not know the rate of a job: {error}");
            }
            Ok(Done {})
        });
    }
}
