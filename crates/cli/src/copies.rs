//! The verbs of `ringtap disk` that copy a disk to another image: a mirror, and a backup.

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Args;
use ringtap_image::{Format, SecretSource};
use serde_json::{Value, json};

use crate::checkpoint;
use crate::job::{How, OnErrors, concluded, dismiss, tell};
use crate::names;
use crate::output::Output;
use crate::qmp::Qmp;
use crate::running::{absolute, opened_by, with_secret};
use crate::secret;
use crate::verbs::stop::Stopped;

/// A mirror of a disk that is served.
#[derive(Debug, Args)]
pub(crate) struct MirrorArgs {
    /// The disk's name
    pub(crate) node: String,

    /// The image in which it is to go on: one that is there, just as large
    pub(crate) file: PathBuf,

    /// Format of that image; it is never guessed
    #[arg(short, long, value_name = "FORMAT", value_parser = names::format())]
    pub(crate) format: Format,

    /// Where the secret of that image is, where it is encrypted: file:PATH, which the server reads
    #[arg(long, value_name = "file:PATH", value_parser = secret::source)]
    pub(crate) target_secret: Option<SecretSource>,

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
    pub(crate) on_errors: OnErrors,

    #[command(flatten)]
    pub(crate) how: How,
}

/// What is read, and what is written.
const SIDES: [&str; 2] = ["on-source-error", "on-target-error"];

/// A backup of a disk that is served.
#[derive(Debug, Args)]
pub(crate) struct BackupArgs {
    /// The disk's name
    node: String,

    /// The image that becomes a copy of the disk as it is now: one that is there, just as large
    file: PathBuf,

    /// Format of that image; it is never guessed
    #[arg(short, long, value_name = "FORMAT", value_parser = names::format())]
    format: Format,

    /// Where the secret of that image is, where it is encrypted: file:PATH, which the server reads
    #[arg(long, value_name = "file:PATH", value_parser = secret::source)]
    target_secret: Option<SecretSource>,

    /// The image reads as zeros, as one just made does: zeros need not be written
    #[arg(long)]
    zeroed: bool,

    /// Copy only what has changed since this checkpoint, when the image was a copy; it begins anew once that has ended well
    #[arg(long, value_name = "CHECKPOINT", alias = "bitmap")]
    since: Option<String>,

    /// Make this checkpoint at the moment of the copy
    #[arg(long, value_name = "CHECKPOINT")]
    checkpoint: Option<String>,

    /// The longest that a guest's write may wait, in milliseconds: for room in scratch, or without scratch for the image; then
    /// the backup is given up. So it is where the image takes nothing for as long
    #[arg(long, value_name = "MS", default_value = "1000")]
    guest_timeout: u64,

    /// The server's folder for scratch, where what the guest overwrites lies until the image has it [default: `scratch` in the
    /// folder of records]
    #[arg(long, value_name = "DIR")]
    scratch: Option<PathBuf>,

    /// The most bytes that lie there at once; 0: the guest's writes wait for the image [default: 1G]
    #[arg(long, value_name = "SIZE", value_parser = names::size)]
    scratch_limit: Option<u64>,

    #[command(flatten)]
    on_errors: OnErrors,

    #[command(flatten)]
    how: How,
}

/// Have the server open an image that a job of that name is to write to, as that node. One before it that nobody has waited for is
/// forgotten once it has ended.
fn open_target(
    qmp: &mut Qmp,
    (id, node): (&str, &str),
    file: &Path,
    format: Format,
    secret: Option<&SecretSource>,
) -> anyhow::Result<()> {
    if let Some(before) = concluded(qmp, id)? {
        if let Some(error) = before["error"].as_str() {
            tracing::warn!("{id}, which nobody has waited for, had failed: {error}");
        }
        dismiss(qmp, id);
    }
    let driver = if format == ringtap_image::Format::Vhd { "vpc" } else { format.name() };
    let file =
        json!({ "driver": "file", "filename": absolute(file)?, "cache": { "direct": true } });
    // Where it is full the job fails, and nobody waits.
    let mut target = json!({
        "driver": driver,
        "node-name": node,
        "file": file,
        "__ringtap_on-error": "report",
        // The job ends with the server; what it wrote to is no disk of the next one.
        "__ringtap_persist": false,
    });
    opened_by(&mut target, format, node, secret)?;
    let opened = with_secret(qmp, node, secret, |qmp| qmp.call("blockdev-add", target).map(drop));
    match opened {
        Err(error) if error.to_string().contains(&format!("node-name='{node}'")) => {
            Err(in_the_way(qmp, (id, node), error)?)
        }
        opened => opened,
    }
}

/// The error of a job whose target's node is there already, and what to do about it.
fn in_the_way(
    qmp: &mut Qmp,
    (id, node): (&str, &str),
    error: anyhow::Error,
) -> anyhow::Result<anyhow::Error> {
    let jobs = qmp.call("query-jobs", json!({}))?;
    let is_at_work = jobs.as_array().into_iter().flatten().any(|job| job["id"] == id);
    Ok(error.context(match is_at_work {
        true => format!("the job {id} is at work: see ringtap job list, ringtap job wait {id}"),
        false => format!(
            "{node} is what an earlier job wrote to, which ended with its server: close it by ringtap disk remove {node}"
        ),
    }))
}

/// Copy a disk as it is now.
pub(crate) fn backup(qmp: &mut Qmp, args: &BackupArgs, output: Output) -> anyhow::Result<()> {
    let (id, target) = (format!("backup-{}", args.node), format!("{}-backup", args.node));
    open_target(qmp, (&id, &target), &args.file, args.format, args.target_secret.as_ref())?;
    let mut arguments = json!({
        "device": args.node,
        "target": target,
        "sync": if args.since.is_some() { "incremental" } else { "full" },
        "__ringtap_guest-timeout": args.guest_timeout,
    });
    if args.zeroed {
        arguments["__ringtap_target-is-zero"] = true.into();
    }
    if let Some(since) = &args.since {
        arguments["bitmap"] = since.clone().into();
    }
    if let Some(scratch) = &args.scratch {
        arguments["__ringtap_scratch"] = absolute(scratch)?.into();
    }
    if let Some(bytes) = args.scratch_limit {
        arguments["__ringtap_scratch-limit"] = bytes.into();
    }
    args.on_errors.put(&mut arguments, &SIDES);
    let checkpoint = args.checkpoint.as_ref().map(|name| checkpoint::add(&args.node, name));
    let mut made = None;
    let begin = |qmp: &mut Qmp, backup: Value| match checkpoint {
        None => qmp.call("blockdev-backup", backup),
        Some(add) => {
            let name = json!({ "node": add["node"], "name": add["name"] });
            let action = |of: &str, data: Value| json!({ "type": of, "data": data });
            let both = [action("block-dirty-bitmap-add", add), action("blockdev-backup", backup)];
            let begun = qmp.call("transaction", json!({ "actions": both }));
            made = begun.is_ok().then_some(name);
            begun
        }
    };
    let how = args.how.beside(output);
    if let Some(checkpoint) = &args.checkpoint {
        // Whoever could take it away where the backup fails may be gone by then.
        arguments["__ringtap_checkpoint"] = checkpoint.as_str().into();
    }
    let ended = how.begin(qmp, begin, &id, arguments, "job-complete", &mut || {});
    // What goes on writes there, and to a moment that the checkpoint is of.
    if ended.as_ref().is_err_and(|error| error.is::<Stopped>()) {
        return ended.map(drop);
    }
    if let (Err(_), Some(checkpoint)) = (&ended, made) {
        // There is no copy from which it could go on. The server has taken it away where that went well.
        let _ = qmp.call("block-dirty-bitmap-remove", checkpoint);
    }
    if !how.no_wait || ended.is_err() {
        let closed = qmp.call("blockdev-del", json!({ "node-name": target }));
        ended.as_ref().map_or(Ok(()), |_| closed.map(drop))?;
    }
    let ended = ended?;
    match output {
        Output::Json => {
            let mut more = json!({ "file": absolute(&args.file)? });
            if let Some(checkpoint) = &args.checkpoint {
                more["checkpoint"] = checkpoint.as_str().into();
            }
            tell(&args.node, &id, ended.as_ref(), more)
        }
        Output::Text => Ok(()),
    }
}

/// Copy a disk to another image, and have it go on there; `ready` hears of it when little is left.
pub(crate) fn mirror(
    qmp: &mut Qmp,
    args: &MirrorArgs,
    output: Output,
    ready: &mut dyn FnMut(),
) -> anyhow::Result<()> {
    let (id, target) = (format!("mirror-{}", args.node), format!("{}-mirror", args.node));
    open_target(qmp, (&id, &target), &args.file, args.format, args.target_secret.as_ref())?;
    let mut arguments = json!({
        "device": args.node,
        "target": target,
        "sync": if args.since.is_some() { "incremental" } else { "full" },
        "target-is-zero": args.zeroed,
    });
    if args.copy {
        // However the job is ended, by whoever.
        arguments["__ringtap_copy"] = true.into();
    }
    if let Some(since) = &args.since {
        arguments["bitmap"] = since.clone().into();
    }
    if let Some(percent) = args.max_slowdown {
        arguments["__ringtap_max-slowdown"] = percent.into();
    }
    args.on_errors.put(&mut arguments, &SIDES);
    let end = if args.copy { "block-job-cancel" } else { "job-complete" };
    let begin = |qmp: &mut Qmp, arguments| qmp.call("blockdev-mirror", arguments);
    let how = args.how.beside(output);
    let ended = how.begin(qmp, begin, &id, arguments, end, ready);
    if ended.as_ref().is_err_and(|error| error.is::<Stopped>()) {
        return ended.map(drop);
    }
    // It is gone where the disk goes on in it, and in use where nobody has waited.
    if ended.is_err() || args.copy && !how.no_wait {
        let closed = qmp.call("blockdev-del", json!({ "node-name": target }));
        ended.as_ref().map_or(Ok(()), |_| closed.map(drop))?;
    }
    let ended = ended?;
    let (node, file) = (&args.node, args.file.display());
    match (output, ended) {
        (Output::Json, ended) => {
            let mut more = json!({ "file": file.to_string() });
            if ended.is_some() {
                more["goes-on-there"] = (!args.copy).into();
            }
            tell(node, &id, ended.as_ref(), more)?;
        }
        (Output::Text, Some(ended)) if !args.copy => {
            let pause = ended.pause();
            let mut out = std::io::stdout().lock();
            writeln!(out, "{node} goes on in {file}; its requests waited for {pause:.1?}")?;
        }
        (Output::Text, _) => {}
    }
    Ok(())
}
