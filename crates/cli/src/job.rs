//! `ringtap job`, and the verbs of `ringtap disk` that begin one.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use ringtap_vbd::Progress;
use serde_json::{Value, json};

use crate::args::Output;
use crate::checkpoint;
use crate::daemon::CONTROL;
use crate::disk::{absolute, found};
use crate::names;
use crate::qmp::Qmp;
use crate::serve::control;
use crate::verbs::bar::{Bar, Talk};

/// How often a job is looked at.
const LOOK: Duration = Duration::from_millis(100);

/// What `ringtap job` is told.
#[derive(Debug, Args)]
pub(crate) struct JobArgs {
    /// The control socket of the server
    #[arg(long, global = true, value_name = "unix:PATH", value_parser = control, default_value = CONTROL)]
    control: PathBuf,

    /// How to print it
    #[arg(long, global = true, value_enum, value_name = "FORM", default_value = "text")]
    output: Output,

    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// List the jobs there are, and how far they are
    List,
    /// End a job without its work: the disk stays as it is
    Cancel {
        /// The job
        job: String,
    },
    /// Have a job copy no more until it is resumed
    Pause {
        /// The job
        job: String,
    },
    /// Have a job go on
    Resume {
        /// The job
        job: String,
    },
    /// Change a job's limit
    Rate {
        /// The job
        job: String,
        /// Bytes in a second; 0 for no limit
        #[arg(value_parser = names::size)]
        rate: u64,
    },
    /// Wait for a job's end, and have it end when all is copied
    Wait {
        /// The job
        job: String,
        #[command(flatten)]
        talk: Talk,
    },
}

/// A snapshot of disks that are served.
#[derive(Debug, Args)]
pub(crate) struct SnapshotArgs {
    /// A disk's name, and the overlay to be made that the disk goes on in; several pairs are one moment
    #[arg(required = true, num_args = 2.., value_names = ["NODE", "FILE"])]
    pairs: Vec<String>,

    /// The overlays are there already: qcow2 images that hold nothing, and name the disks' images
    #[arg(long)]
    existing: bool,

    /// A command to be run before, by the shell: one that has the guest's file systems stand still, say. Where it
    /// fails nothing is done
    #[arg(long, value_name = "COMMAND")]
    before: Option<String>,

    /// A command to be run after, whatever came of it
    #[arg(long, value_name = "COMMAND")]
    after: Option<String>,
}

/// A commit of a disk that is served.
#[derive(Debug, Args)]
pub(crate) struct CommitArgs {
    /// The disk's name
    node: String,

    /// The image below in which it is to go on [default: the deepest]
    #[arg(short, long, value_name = "FILE")]
    base: Option<PathBuf>,

    /// The uppermost of the images that go; the disk goes on in its topmost image where that is another [default: the topmost]
    #[arg(short, long, value_name = "FILE")]
    top: Option<PathBuf>,

    /// By how many percent the guest may be slowed where it changes more than can be copied [default: 20]
    #[arg(long, value_name = "PERCENT")]
    max_slowdown: Option<u32>,

    #[command(flatten)]
    how: How,
}

/// A stream of a disk that is served.
#[derive(Debug, Args)]
pub(crate) struct StreamArgs {
    /// The disk's name
    node: String,

    /// The image that stays below [default: none]
    #[arg(short, long, value_name = "FILE")]
    base: Option<PathBuf>,

    /// The lowest image that is brought up: what lies below it stays
    #[arg(long, value_name = "FILE", conflicts_with = "base")]
    bottom: Option<PathBuf>,

    /// The image that takes what lies below it [default: the topmost]
    #[arg(long, value_name = "FILE")]
    into: Option<PathBuf>,

    #[command(flatten)]
    how: How,
}

/// A mirror of a disk that is served.
#[derive(Debug, Args)]
pub(crate) struct MirrorArgs {
    /// The disk's name
    pub(crate) node: String,

    /// The image in which it is to go on: one that is there, just as large
    pub(crate) file: PathBuf,

    /// Format of that image; it is never guessed
    #[arg(short, long, value_name = "FORMAT", value_parser = names::format())]
    pub(crate) format: ringtap_image::Format,

    /// The image reads as zeros, as one just made does: zeros need not be written
    #[arg(long)]
    pub(crate) zeroed: bool,

    /// Copy only what has changed since this checkpoint, when the image held what the disk did
    #[arg(long, value_name = "CHECKPOINT", conflicts_with = "zeroed")]
    pub(crate) since: Option<String>,

    /// Leave the disk where it is, and the image as a copy of the moment at which the job ends
    #[arg(long)]
    pub(crate) copy: bool,

    /// By how many percent the guest may be slowed where it changes more than the image takes [default: 20]
    #[arg(long, value_name = "PERCENT")]
    pub(crate) max_slowdown: Option<u32>,

    #[command(flatten)]
    pub(crate) how: How,
}

/// A backup of a disk that is served.
#[derive(Debug, Args)]
pub(crate) struct BackupArgs {
    /// The disk's name
    node: String,

    /// The image that becomes a copy of the disk as it is now: one that is there, and at least as large
    file: PathBuf,

    /// Format of that image; it is never guessed
    #[arg(short, long, value_name = "FORMAT", value_parser = names::format())]
    format: ringtap_image::Format,

    /// The image reads as zeros, as one just made does: zeros need not be written
    #[arg(long)]
    zeroed: bool,

    /// Copy only what has changed since this checkpoint, when the image was a copy; it begins anew once that has ended well
    #[arg(long, value_name = "CHECKPOINT", alias = "bitmap")]
    since: Option<String>,

    /// Make this checkpoint at the moment of the copy
    #[arg(long, value_name = "CHECKPOINT")]
    checkpoint: Option<String>,

    /// The longest that a guest's write may wait for the image, in milliseconds; then the backup is given up
    #[arg(long, value_name = "MS", default_value = "1000")]
    guest_timeout: u64,

    #[command(flatten)]
    how: How,
}

/// How a job is carried out.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct How {
    /// Copy no more than so many bytes in a second
    #[arg(short, long, value_name = "SIZE", value_parser = names::size)]
    pub(crate) rate: Option<u64>,

    /// Begin the job, and do not wait for it: `ringtap job wait` does
    #[arg(long)]
    pub(crate) no_wait: bool,

    #[command(flatten)]
    pub(crate) talk: Talk,
}

/// Carry it out.
pub(crate) fn run(args: &JobArgs) -> anyhow::Result<ExitCode> {
    let mut qmp = Qmp::open(&args.control)?;
    let one = |id: &str| json!({ "id": id });
    match &args.verb {
        Verb::List => list(&mut qmp, args.output)?,
        Verb::Cancel { job } => drop(qmp.call("job-cancel", one(job))?),
        Verb::Pause { job } => drop(qmp.call("job-pause", one(job))?),
        Verb::Resume { job } => drop(qmp.call("job-resume", one(job))?),
        Verb::Rate { job, rate } => {
            qmp.call("block-job-set-speed", json!({ "device": job, "speed": rate }))?;
        }
        Verb::Wait { job, talk } => drop(finish(&mut qmp, job, *talk, "job-complete", &mut || {})?),
    }
    Ok(ExitCode::SUCCESS)
}

fn list(qmp: &mut Qmp, output: Output) -> anyhow::Result<()> {
    let jobs = qmp.call("query-jobs", json!({}))?;
    let mut out = std::io::stdout().lock();
    if output == Output::Json {
        return Ok(writeln!(out, "{jobs}")?);
    }
    for job in jobs.as_array().into_iter().flatten() {
        let [id, kind, status] =
            ["id", "type", "status"].map(|key| job[key].as_str().unwrap_or_default());
        let number = |key: &str| job[key].as_u64().unwrap_or_default();
        let (done, total) = (number("current-progress"), number("total-progress"));
        let [rate, guest] = ["__ringtap_rate", "__ringtap_guest-rate"].map(|key| number(key) >> 20);
        let part = 100.0 * done as f64 / total.max(1) as f64;
        writeln!(
            out,
            "{id}: {kind}, {status}, {part:.0} %, {rate} MiB/s; the guest changes {guest} MiB/s"
        )?;
    }
    Ok(())
}

/// Wait for a job; once it is ready, which `ready` hears of, have it end by that command.
/// For how long guests' requests waited for that end is given.
fn finish(
    qmp: &mut Qmp,
    id: &str,
    talk: Talk,
    end: &str,
    ready: &mut dyn FnMut(),
) -> anyhow::Result<Duration> {
    let progress = Arc::new(Progress::default());
    let (mut bar, mut told) = (None, false);
    loop {
        let jobs = qmp.call("query-jobs", json!({}))?;
        let job = jobs.as_array().into_iter().flatten().find(|job| job["id"] == id);
        let Some(job) = job else { bail!("there is no job {id:?}: see `ringtap job list`") };
        let number = |key: &str| job[key].as_u64().unwrap_or_default();
        let (done, total) = (number("current-progress"), number("total-progress"));
        // The whole grows as the guest writes.
        progress.set(done.saturating_mul(10_000) / total.max(1));
        bar.get_or_insert_with(|| Bar::show(talk, &progress, 10_000));
        match job["status"].as_str().unwrap_or_default() {
            "ready" if !told => {
                ready();
                let key = if end == "block-job-cancel" { "device" } else { "id" };
                qmp.call(end, json!({ key: id }))?;
                told = true;
            }
            "concluded" => {
                let error = job["error"].as_str().map(str::to_owned);
                let pause = Duration::from_nanos(number("__ringtap_pause-ns"));
                // Another client may have done so.
                let _ = qmp.call("job-dismiss", json!({ "id": id }));
                return error.map_or(Ok(pause), |error| bail!("{error}"));
            }
            _ => {}
        }
        thread::sleep(LOOK);
    }
}

fn shell(command: Option<&str>) -> anyhow::Result<()> {
    let Some(command) = command else { return Ok(()) };
    let status = Command::new("sh").args(["-c", command]).status().context("cannot start sh")?;
    if status.success() { Ok(()) } else { bail!("{command:?} failed: {status}") }
}

/// Take a snapshot.
pub(crate) fn snapshot(qmp: &mut Qmp, args: &SnapshotArgs, output: Output) -> anyhow::Result<()> {
    let mut actions = vec![];
    for pair in args.pairs.chunks(2) {
        let [node, file] = pair else {
            let why = "name a disk and a FILE, or several such pairs";
            return Err(ringtap_daemon::Error::Usage(why.into()).into());
        };
        let mode = if args.existing { "existing" } else { "absolute-paths" };
        let file = absolute(file.as_ref())?;
        let data = json!({ "node-name": node, "snapshot-file": file, "mode": mode });
        actions.push(json!({ "type": "blockdev-snapshot-sync", "data": data }));
    }
    shell(args.before.as_deref())?;
    let taken = qmp.call("transaction", json!({ "actions": actions }));
    let after = shell(args.after.as_deref());
    taken?;
    after?;
    let mut out = std::io::stdout().lock();
    for told in qmp.events("__ringtap_SNAPSHOT") {
        let [node, file] = ["node-name", "file"].map(|key| told[key].as_str().unwrap_or_default());
        let pause = Duration::from_nanos(told["pause-ns"].as_u64().unwrap_or_default());
        match output {
            Output::Json => writeln!(out, "{told}")?,
            Output::Text => {
                writeln!(out, "{node} goes on in {file}; its requests waited for {pause:.1?}")?
            }
        }
    }
    Ok(())
}

impl How {
    /// Begin a job, and see it to its end; for how long guests' requests waited for that.
    pub(crate) fn carry_out(
        &self,
        qmp: &mut Qmp,
        command: &str,
        id: &str,
        arguments: Value,
        end: &str,
    ) -> anyhow::Result<Option<Duration>> {
        let begin = |qmp: &mut Qmp, arguments| qmp.call(command, arguments);
        self.begin(qmp, begin, id, arguments, end, &mut || {})
    }

    fn begin(
        &self,
        qmp: &mut Qmp,
        begin: impl FnOnce(&mut Qmp, Value) -> anyhow::Result<Value>,
        id: &str,
        mut arguments: Value,
        end: &str,
        ready: &mut dyn FnMut(),
    ) -> anyhow::Result<Option<Duration>> {
        arguments["job-id"] = id.into();
        arguments["auto-dismiss"] = false.into();
        arguments["speed"] = self.rate.unwrap_or(0).into();
        begin(qmp, arguments)?;
        self.see_to_its_end(qmp, id, end, ready)
    }

    /// Wait for a job that has begun, where that is to be waited for.
    pub(crate) fn see_to_its_end(
        &self,
        qmp: &mut Qmp,
        id: &str,
        end: &str,
        ready: &mut dyn FnMut(),
    ) -> anyhow::Result<Option<Duration>> {
        match self.no_wait {
            true => {
                writeln!(std::io::stdout(), "{id}")?;
                Ok(None)
            }
            false => finish(qmp, id, self.talk, end, ready).map(Some),
        }
    }
}

/// Bring what the images above hold into one below.
pub(crate) fn commit(qmp: &mut Qmp, args: &CommitArgs) -> anyhow::Result<()> {
    let mut arguments = json!({ "device": args.node });
    for (key, file) in [("base", &args.base), ("top", &args.top)] {
        if let Some(file) = file {
            arguments[key] = absolute(file)?.into();
        }
    }
    if let Some(percent) = args.max_slowdown {
        arguments["__ringtap_max-slowdown"] = percent.into();
    }
    let id = format!("commit-{}", args.node);
    args.how.carry_out(qmp, "block-commit", &id, arguments, "job-complete").map(drop)
}

/// Bring what lies below into the topmost image, or another.
pub(crate) fn stream(qmp: &mut Qmp, args: &StreamArgs) -> anyhow::Result<()> {
    let mut arguments = json!({ "device": args.node });
    if let Some(base) = &args.base {
        arguments["base"] = absolute(base)?.into();
    }
    if let Some(bottom) = &args.bottom {
        match under(qmp, &args.node, bottom)? {
            None => {}
            Some(base) => arguments["base"] = base.into(),
        }
    }
    if let Some(into) = &args.into {
        arguments["__ringtap_into"] = absolute(into)?.into();
    }
    let id = format!("stream-{}", args.node);
    args.how.carry_out(qmp, "block-stream", &id, arguments, "job-complete").map(drop)
}

/// What lies directly below an image of a disk's, as the server has it; none where nothing does.
fn under(qmp: &mut Qmp, node: &str, file: &Path) -> anyhow::Result<Option<String>> {
    let disks = found(qmp, Some(node))?;
    let wanted = absolute(file)?;
    let whole = std::fs::canonicalize(&wanted).unwrap_or_else(|_| wanted.clone().into());
    let mut image = disks.first().map_or(&Value::Null, |disk| &disk["image"]);
    while let Some(name) = image["filename"].as_str() {
        let is_it = name == wanted || std::fs::canonicalize(name).is_ok_and(|name| name == whole);
        image = &image["backing-image"];
        if is_it {
            return Ok(image["filename"].as_str().map(str::to_owned));
        }
    }
    bail!("{} is no image of {node}: see `ringtap disk info {node}`", file.display())
}

/// Have the server open an image that a job is to write to, as that node.
fn open_target(
    qmp: &mut Qmp,
    node: &str,
    file: &Path,
    format: ringtap_image::Format,
) -> anyhow::Result<()> {
    let driver = if format == ringtap_image::Format::Vhd { "vpc" } else { format.name() };
    let file =
        json!({ "driver": "file", "filename": absolute(file)?, "cache": { "direct": true } });
    // Where it is full the job fails, and nobody waits.
    let target = json!({
        "driver": driver,
        "node-name": node,
        "file": file,
        "__ringtap_on-error": "report",
    });
    qmp.call("blockdev-add", target).map(drop)
}

/// Copy a disk as it is now.
pub(crate) fn backup(qmp: &mut Qmp, args: &BackupArgs) -> anyhow::Result<()> {
    let target = format!("{}-backup", args.node);
    open_target(qmp, &target, &args.file, args.format)?;
    let mut arguments = json!({
        "device": args.node,
        "target": target,
        "sync": if args.since.is_some() { "incremental" } else { "full" },
        "__ringtap_target-is-zero": args.zeroed,
        "__ringtap_guest-timeout": args.guest_timeout,
    });
    if let Some(since) = &args.since {
        arguments["bitmap"] = since.clone().into();
    }
    let id = format!("backup-{}", args.node);
    let checkpoint = args.checkpoint.as_ref().map(|name| checkpoint::add(&args.node, name));
    let begin = |qmp: &mut Qmp, backup: Value| match checkpoint {
        None => qmp.call("blockdev-backup", backup),
        Some(add) => {
            let action = |of: &str, data: Value| json!({ "type": of, "data": data });
            let both = [action("block-dirty-bitmap-add", add), action("blockdev-backup", backup)];
            qmp.call("transaction", json!({ "actions": both }))
        }
    };
    let ended = args.how.begin(qmp, begin, &id, arguments, "job-complete", &mut || {}).map(drop);
    if args.how.no_wait && ended.is_ok() {
        return ended;
    }
    let closed = qmp.call("blockdev-del", json!({ "node-name": target }));
    ended.and(closed.map(drop))
}

/// Copy a disk to another image, and have it go on there; `ready` hears of it when little is left.
pub(crate) fn mirror(
    qmp: &mut Qmp,
    args: &MirrorArgs,
    output: Output,
    ready: &mut dyn FnMut(),
) -> anyhow::Result<()> {
    let target = format!("{}-mirror", args.node);
    open_target(qmp, &target, &args.file, args.format)?;
    let mut arguments = json!({
        "device": args.node,
        "target": target,
        "sync": if args.since.is_some() { "incremental" } else { "full" },
        "target-is-zero": args.zeroed,
    });
    if let Some(since) = &args.since {
        arguments["bitmap"] = since.clone().into();
    }
    if let Some(percent) = args.max_slowdown {
        arguments["__ringtap_max-slowdown"] = percent.into();
    }
    let id = format!("mirror-{}", args.node);
    let end = if args.copy { "block-job-cancel" } else { "job-complete" };
    let begin = |qmp: &mut Qmp, arguments| qmp.call("blockdev-mirror", arguments);
    let ended = args.how.begin(qmp, begin, &id, arguments, end, ready);
    // It is gone where the disk goes on in it, and in use where nobody has waited.
    let stays = args.copy || ended.is_err();
    if stays && (ended.is_err() || !args.how.no_wait) {
        let closed = qmp.call("blockdev-del", json!({ "node-name": target }));
        ended?;
        return closed.map(drop);
    }
    let Some(pause) = ended? else { return Ok(()) };
    let (node, file) = (&args.node, args.file.display());
    let mut out = std::io::stdout().lock();
    match output {
        Output::Json => {
            let pause = u64::try_from(pause.as_nanos()).unwrap_or(u64::MAX);
            writeln!(
                out,
                "{}",
                json!({ "node-name": node, "file": file.to_string(), "pause-ns": pause })
            )?;
        }
        Output::Text => {
            writeln!(out, "{node} goes on in {file}; its requests waited for {pause:.1?}")?;
        }
    }
    Ok(())
}
