//! `ringtap job`, and the verbs of `ringtap disk` that begin one.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::thread;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::{Args, Subcommand, ValueEnum};
use ringtap_vbd::Progress;
use serde_json::{Value, json};

use crate::names;
use crate::output::Output;
use crate::qmp::Qmp;
use crate::running::{absolute, found};
use crate::sockets::{CONTROL, control};
use crate::verbs::bar::{Bar, Talk};
use crate::verbs::stop::{Signals, Stopped};

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
    /// End a job without its work: the disk stays as it is; a copy (`disk mirror --copy`) that is ready ends whole
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
    /// Wait for a job's end, and have it end when all is copied; after `disk mirror --copy` the disk stays where it is
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

    /// A command to be run after, whatever came of it: also where the one before failed, which may have begun
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
    on_errors: OnErrors,

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
    on_errors: OnErrors,

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

/// What becomes of a job that meets an error.
#[derive(Clone, Copy, Debug, Default, Args)]
pub(crate) struct OnErrors {
    /// Where something cannot be read or written: the job fails (report), pauses until `ringtap job resume` (stop), does so where
    /// no space is left and fails else (enospc), or tries again until it can (ignore) [default: report]
    #[arg(long, value_enum, value_name = "WHAT", hide_possible_values = true)]
    on_error: Option<OnError>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum OnError {
    Report,
    Stop,
    Enospc,
    Ignore,
}

impl OnErrors {
    /// Say so in the arguments of those names.
    pub(crate) fn put(self, arguments: &mut Value, keys: &[&str]) {
        let Some(on_error) = self.on_error.and_then(|one| one.to_possible_value()) else { return };
        for key in keys {
            arguments[*key] = on_error.get_name().into();
        }
    }
}

/// Carry it out.
pub(crate) fn run(args: &JobArgs) -> anyhow::Result<ExitCode> {
    let mut qmp = Qmp::open(&args.control)?;
    let one = |id: &str| json!({ "id": id });
    match &args.verb {
        Verb::List => list(&mut qmp, args.output)?,
        Verb::Cancel { job } => match concluded(&mut qmp, job)? {
            Some(_) => dismiss(&mut qmp, job),
            None => drop(qmp.call("job-cancel", one(job))?),
        },
        Verb::Pause { job } => drop(qmp.call("job-pause", one(job))?),
        Verb::Resume { job } => drop(qmp.call("job-resume", one(job))?),
        Verb::Rate { job, rate } => {
            qmp.call("block-job-set-speed", json!({ "device": job, "speed": rate }))?;
        }
        Verb::Wait { job, talk } => {
            let ended = finish(&mut qmp, job, *talk, "job-complete", &mut || {});
            if !ended.as_ref().is_err_and(|error| error.is::<Stopped>()) {
                close_target(&mut qmp, job);
            }
            ended?;
        }
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

/// How a job has ended.
pub(crate) struct Ended {
    /// What the server said of it at last.
    job: Value,
}

impl Ended {
    fn number(&self, key: &str) -> u64 {
        self.job[key].as_u64().unwrap_or_default()
    }

    /// For how long guests' requests waited for the end.
    pub(crate) fn pause(&self) -> Duration {
        Duration::from_nanos(self.number("__ringtap_pause-ns"))
    }
}

/// Print as JSON what became of a job, or that it is at work where nobody has waited; `more` is what the verb knows beyond that.
pub(crate) fn tell(node: &str, id: &str, ended: Option<&Ended>, more: Value) -> anyhow::Result<()> {
    let mut told = json!({ "node-name": node, "job-id": id, "status": "running" });
    if let Some(ended) = ended {
        told["status"] = "concluded".into();
        told["bytes"] = ended.number("current-progress").into();
        told["pause-ns"] = ended.number("__ringtap_pause-ns").into();
    }
    for (key, value) in more.as_object().into_iter().flatten() {
        told[key] = value.clone();
    }
    Ok(writeln!(std::io::stdout(), "{told}")?)
}

/// Print as JSON what became of a job that changes in which images a disk is.
fn tell_of_chain(qmp: &mut Qmp, node: &str, id: &str, ended: Option<&Ended>) -> anyhow::Result<()> {
    // It is called otherwise where names are images': the work is done all the same.
    let disks = found(qmp, Some(node)).unwrap_or_default();
    let more = match (ended, disks.first().map(|disk| &disk["image"])) {
        (Some(_), Some(image)) => {
            json!({ "file": image["filename"], "size": image["virtual-size"] })
        }
        _ => json!({}),
    };
    tell(node, id, ended, more)
}

/// The node that `ringtap disk backup` or `mirror` had opened for that job to write to.
fn target_of(id: &str) -> Option<String> {
    ["backup", "mirror"].iter().find_map(|kind| {
        let node = id.strip_prefix(kind)?.strip_prefix('-')?;
        Some(format!("{node}-{kind}"))
    })
}

/// Close what a job that has ended wrote to, where that is still open.
fn close_target(qmp: &mut Qmp, id: &str) {
    if let Some(node) = target_of(id) {
        // It is gone where the disk goes on in it.
        let _ = qmp.call("blockdev-del", json!({ "node-name": node }));
    }
}

/// What is left of that job, if nothing is but what became of it.
pub(crate) fn concluded(qmp: &mut Qmp, id: &str) -> anyhow::Result<Option<Value>> {
    let jobs = qmp.call("query-jobs", json!({}))?;
    let job = jobs.as_array().into_iter().flatten().find(|job| job["id"] == id);
    Ok(job.filter(|job| job["status"] == "concluded").cloned())
}

/// Forget a job that has ended, and close what it wrote to.
pub(crate) fn dismiss(qmp: &mut Qmp, id: &str) {
    // Another client may have done so.
    let _ = qmp.call("job-dismiss", json!({ "id": id }));
    close_target(qmp, id);
}

/// Wait for a job; once it is ready, which `ready` hears of, have it end by that command. A signal ends the waiting alone.
fn finish(
    qmp: &mut Qmp,
    id: &str,
    talk: Talk,
    end: &str,
    ready: &mut dyn FnMut(),
) -> anyhow::Result<Ended> {
    let progress = Arc::new(Progress::default());
    let signals = Signals::stop(&progress)?;
    let (mut bar, mut told, mut paused) = (None, false, false);
    loop {
        if progress.stop_flag().load(SeqCst) {
            let next = match end {
                "block-job-cancel" => format!(
                    "ringtap job wait {id} ends it once it is ready, and the copy is whole; ringtap job cancel {id} before that \
                     leaves no copy"
                ),
                _ => format!("ringtap job wait {id}, or ringtap job cancel {id}"),
            };
            tell!("ringtap: {id} goes on: {next}");
            return Err(signals.stopped().into());
        }
        let jobs = qmp.call("query-jobs", json!({}))?;
        let job = jobs.as_array().into_iter().flatten().find(|job| job["id"] == id);
        let Some(job) = job else { bail!("there is no job {id:?}: see `ringtap job list`") };
        let number = |key: &str| job[key].as_u64().unwrap_or_default();
        let (done, total) = (number("current-progress"), number("total-progress"));
        // The whole grows as the guest writes.
        progress.set(done.saturating_mul(10_000) / total.max(1));
        bar.get_or_insert_with(|| Bar::show(talk, &progress, 10_000));
        let status = job["status"].as_str().unwrap_or_default();
        let pauses = matches!(status, "paused" | "standby");
        if pauses && !std::mem::replace(&mut paused, pauses) {
            tracing::warn!("{id} pauses: ringtap job resume {id} has it go on");
        }
        paused = pauses;
        match status {
            "ready" if !told => {
                ready();
                let key = if end == "block-job-cancel" { "device" } else { "id" };
                qmp.call(end, json!({ key: id }))?;
                told = true;
            }
            "concluded" => {
                let error = job["error"].as_str().map(str::to_owned);
                let ended = Ended { job: job.clone() };
                // Another client may have done so.
                let _ = qmp.call("job-dismiss", json!({ "id": id }));
                return error.map_or(Ok(ended), |error| bail!("{error}"));
            }
            _ => {}
        }
        thread::sleep(LOOK);
    }
}

fn shell(command: Option<&str>) -> anyhow::Result<()> {
    let Some(command) = command else { return Ok(()) };
    let mut program = Command::new("sh");
    // Stdout is for what was done.
    let status = program.args(["-c", command]).stdout(std::io::stderr()).status();
    let status = status.context("cannot start sh")?;
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
    // What was stopped before is not left so by a signal.
    let progress = Progress::default();
    let signals = Signals::stop_by_any(&progress)?;
    let stopped = || match progress.stop_flag().load(SeqCst) {
        true => Err(signals.stopped().into()),
        false => Ok(()),
    };
    let begun = shell(args.before.as_deref());
    let taken =
        stopped().and(begun).and_then(|()| qmp.call("transaction", json!({ "actions": actions })));
    let after = shell(args.after.as_deref());
    taken?;
    tell_of_snapshots(qmp, output)?;
    after.context("the snapshot is taken, and the command to be run after it failed")?;
    stopped()
}

fn tell_of_snapshots(qmp: &mut Qmp, output: Output) -> anyhow::Result<()> {
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
    /// The same beside results in that form.
    pub(crate) fn beside(self, output: Output) -> How {
        How { talk: self.talk.beside(output), ..self }
    }

    /// Begin a job, and see it to its end; how that was, where it was waited for.
    pub(crate) fn carry_out(
        &self,
        qmp: &mut Qmp,
        command: &str,
        id: &str,
        arguments: Value,
        end: &str,
    ) -> anyhow::Result<Option<Ended>> {
        let begin = |qmp: &mut Qmp, arguments| qmp.call(command, arguments);
        self.begin(qmp, begin, id, arguments, end, &mut || {})
    }

    pub(crate) fn begin(
        &self,
        qmp: &mut Qmp,
        begin: impl FnOnce(&mut Qmp, Value) -> anyhow::Result<Value>,
        id: &str,
        mut arguments: Value,
        end: &str,
        ready: &mut dyn FnMut(),
    ) -> anyhow::Result<Option<Ended>> {
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
    ) -> anyhow::Result<Option<Ended>> {
        match self.no_wait {
            // The verb says so itself.
            true if self.talk.beside => Ok(None),
            true => {
                writeln!(std::io::stdout(), "{id}")?;
                Ok(None)
            }
            false => finish(qmp, id, self.talk, end, ready).map(Some),
        }
    }
}

/// Bring what the images above hold into one below.
pub(crate) fn commit(qmp: &mut Qmp, args: &CommitArgs, output: Output) -> anyhow::Result<()> {
    let mut arguments = json!({ "device": args.node });
    for (key, file) in [("base", &args.base), ("top", &args.top)] {
        if let Some(file) = file {
            arguments[key] = absolute(file)?.into();
        }
    }
    if let Some(percent) = args.max_slowdown {
        arguments["__ringtap_max-slowdown"] = percent.into();
    }
    args.on_errors.put(&mut arguments, &["on-error"]);
    let id = format!("commit-{}", args.node);
    let how = args.how.beside(output);
    let ended = how.carry_out(qmp, "block-commit", &id, arguments, "job-complete")?;
    match output {
        Output::Json => tell_of_chain(qmp, &args.node, &id, ended.as_ref()),
        Output::Text => Ok(()),
    }
}

/// Bring what lies below into the topmost image, or another.
pub(crate) fn stream(qmp: &mut Qmp, args: &StreamArgs, output: Output) -> anyhow::Result<()> {
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
    args.on_errors.put(&mut arguments, &["on-error"]);
    let id = format!("stream-{}", args.node);
    let how = args.how.beside(output);
    let ended = how.carry_out(qmp, "block-stream", &id, arguments, "job-complete")?;
    match output {
        Output::Json => tell_of_chain(qmp, &args.node, &id, ended.as_ref()),
        Output::Text => Ok(()),
    }
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
