//! `ringtap disk`: the disks of a running server, by its control socket.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use ringtap_daemon::{Address, Error};
use ringtap_image::{CacheMode, Format, SecretSource};
use serde_json::{Value, json};

use crate::checkpoint::{self, CheckpointArgs};
use crate::copies::{self, BackupArgs, MirrorArgs};
use crate::detach::{DetachArgs, detach};
use crate::disk_info;
use crate::job::{self, CommitArgs, SnapshotArgs, StreamArgs};
use crate::limits::{self, LimitArgs};
use crate::migrate::{self, MigrateArgs};
use crate::names::{self, CacheName};
use crate::online_check::{self, OnlineCheckArgs};
use crate::output::Output;
use crate::qmp::Qmp;
use crate::running::{absolute, elements, found, opened_by, text, with_secret};
use crate::secret;
use crate::sockets::{CONTROL, control};

/// What `ringtap disk` is told.
#[derive(Debug, Args)]
pub(crate) struct DiskArgs {
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
    /// List the disks that are served, each with its exports
    List,
    /// Say all that is known of a disk
    Info {
        /// The disk's name
        node: String,
    },
    /// Have another disk served
    Add(Box<AddArgs>),
    /// Look whether a disk's image contradicts itself, as it is at one moment, while its guest goes on
    Check(OnlineCheckArgs),
    /// End a disk's exports, and close its image
    Remove {
        /// The disk's name
        node: String,
        /// Also where NBD clients are connected
        #[arg(long)]
        force: bool,
    },
    /// Have a disk's requests wait, from its guest or whoever uses it, until it is resumed
    Pause {
        /// The disk's name
        node: String,
    },
    /// Have a disk that is paused go on, and requests tried again that wait for space where its image lies
    Resume {
        /// The disk's name
        node: String,
    },
    /// Have disks go on in overlays, all at one moment, while their guests run
    Snapshot(SnapshotArgs),
    /// Bring what a disk's topmost images hold into one below, while its guest runs
    Commit(CommitArgs),
    /// Bring what lies below a disk's topmost image into it, while its guest runs: it needs nothing below then
    Stream(StreamArgs),
    /// Bring all that lies below a disk's topmost image into it, on a server or not, while its guest runs; and say what it was
    Detach(DetachArgs),
    /// Move a disk to another image, or copy it there, while its guest runs
    Mirror(MirrorArgs),
    /// Move a disk to a server of another host, over NBD, while its guest runs
    Migrate(MigrateArgs),
    /// Copy a disk as it is now, or what has changed since a checkpoint, while its guest runs
    Backup(BackupArgs),
    /// Say how much a disk may have served in a second, from now on; without an option what it may now
    Limit {
        /// The disk's name
        node: String,
        #[command(flatten)]
        limits: LimitArgs,
        /// The group whose limits hold for it, too
        #[arg(long, value_name = "NAME")]
        group: Option<String>,
        /// Take it out of its group
        #[arg(long, conflicts_with = "group")]
        no_group: bool,
        /// Take away all its other limits
        #[arg(long)]
        none: bool,
    },
    /// Say how much all disks of a group may have served in a second; the group is made where there is none
    Group {
        /// The group's name
        group: String,
        #[command(flatten)]
        limits: LimitArgs,
        /// Take away all its other limits
        #[arg(long)]
        none: bool,
        /// Take away the group, which no disk is in
        #[arg(long, conflicts_with = "none")]
        remove: bool,
    },
    /// Checkpoints of a disk: what has changed since, over kills and restarts of the server
    Checkpoint(CheckpointArgs),
    /// Make a disk larger while it is served: a raw, qcow2 or VHD image, or a device that has grown
    Resize {
        /// The disk's name
        node: String,
        /// The size it is to have, or by how much it is to grow: 20G, +1G
        size: String,
    },
}

/// What `ringtap disk add` is told.
#[derive(Debug, Args)]
struct AddArgs {
    /// The image; null:SIZE is a disk for tests, which keeps nothing and reads as zeros
    disk: PathBuf,
    /// What the disk is called from then on
    #[arg(long, value_name = "NAME")]
    node_name: String,
    /// Format of the image; it is never guessed
    #[arg(short, long, value_name = "FORMAT", value_parser = names::format())]
    format: Option<Format>,
    /// How host caching is used, as in QEMU
    #[arg(long, value_enum, value_name = "MODE", default_value = "none")]
    cache: CacheName,
    /// Refuse writes
    #[arg(long)]
    read_only: bool,
    /// Where the secret of an encrypted image is: file:PATH, which the server reads
    #[arg(long, value_name = "file:PATH", value_parser = secret::source)]
    secret: Option<SecretSource>,
    /// File that the image may name as its backing file, parent or extent, or folder with such; repeatable
    #[arg(long, value_name = "FILE|DIR")]
    backing: Vec<PathBuf>,
    /// Serve vhost-user-blk at a UNIX socket; repeatable
    #[arg(long, value_name = "PATH", value_parser = Address::vhost_user)]
    vhost_user: Vec<Address>,
    /// The most virtqueues that a guest may use
    #[arg(long, value_name = "N", default_value = "16")]
    queues: u16,
    #[command(flatten)]
    limits: LimitArgs,
    /// The group whose limits hold for it, too
    #[arg(long, value_name = "NAME")]
    group: Option<String>,
    /// Offer it to NBD clients under this name, at the server's NBD socket
    #[arg(long, value_name = "EXPORT")]
    nbd: Vec<String>,
    /// Begin the server's NBD socket, at unix:PATH or tcp:HOST:PORT, where there is none yet
    #[arg(long, value_name = "ADDRESS", value_parser = Address::nbd)]
    nbd_server: Option<Address>,
    /// Show the disk as a file, by FUSE; repeatable
    #[arg(long, value_name = "PATH")]
    fuse: Vec<PathBuf>,
    /// Make the disk a block device of this host, /dev/ublkbN
    #[arg(long)]
    ublk: bool,
}

/// Carry it out.
pub(crate) fn run(args: DiskArgs) -> anyhow::Result<ExitCode> {
    let (path, output) = (args.control, args.output);
    let qmp = || Qmp::open(&path);
    match args.verb {
        Verb::List => list(&mut qmp()?, output, None)?,
        Verb::Info { node } => info(&mut qmp()?, output, &node)?,
        Verb::Add(args) => {
            let node = args.node_name.clone();
            let (disk, exports) = wishes(&args)?;
            let mut qmp = qmp()?;
            let secret = args.secret.as_ref();
            with_secret(&mut qmp, &node, secret, |qmp| {
                add(qmp, &node, disk, exports, args.nbd_server.as_ref())
            })?;
            list(&mut qmp, output, Some(&node))?;
        }
        Verb::Check(args) => return online_check::run(&mut qmp()?, &args, output),
        Verb::Pause { node } => pause(&mut qmp()?, "__ringtap_pause", &node, output)?,
        Verb::Resume { node } => pause(&mut qmp()?, "__ringtap_resume", &node, output)?,
        Verb::Snapshot(args) => job::snapshot(&mut qmp()?, &args, output)?,
        Verb::Commit(args) => job::commit(&mut qmp()?, &args, output)?,
        Verb::Stream(args) => job::stream(&mut qmp()?, &args, output)?,
        Verb::Detach(args) => detach(&mut qmp()?, &args, output)?,
        Verb::Mirror(args) => copies::mirror(&mut qmp()?, &args, output, &mut || {})?,
        Verb::Migrate(args) => migrate::run(&mut qmp()?, args, output)?,
        Verb::Backup(args) => copies::backup(&mut qmp()?, &args, output)?,
        Verb::Checkpoint(args) => checkpoint::run(&mut qmp()?, &args, output)?,
        Verb::Remove { node, force } => remove(&mut qmp()?, &node, force)?,
        Verb::Limit { node, limits, group, no_group, none } => {
            let group = if no_group { Some(String::new()) } else { group };
            let limits = if none { limits.alone() } else { limits };
            limit(&mut qmp()?, &node, &limits, group, output)?;
        }
        Verb::Group { group, limits, none, remove } => {
            let limits = if none { limits.alone() } else { limits };
            group_limits(&mut qmp()?, &group, &limits, remove, output)?;
        }
        Verb::Resize { node, size } => resize(&mut qmp()?, &node, &size, output)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn info(qmp: &mut Qmp, output: Output, node: &str) -> anyhow::Result<()> {
    if output == Output::Json {
        return list(qmp, output, Some(node));
    }
    let disks = found(qmp, Some(node))?;
    let disk = disks.first().context("the disk has gone")?;
    let mut all = qmp.call("__ringtap_inspect", json!({}))?;
    let (inspected, jobs) = (all["disks"][node].take(), all["jobs"].take());
    let text = disk_info::lines(disk, &inspected, &jobs).join("\n");
    Ok(writeln!(std::io::stdout(), "{text}")?)
}

fn list(qmp: &mut Qmp, output: Output, node: Option<&str>) -> anyhow::Result<()> {
    let disks = found(qmp, node)?;
    let mut out = std::io::stdout().lock();
    if output == Output::Json {
        let whole = match (node, &disks[..]) {
            (Some(_), [disk]) => disk.to_string(),
            _ => Value::from(disks).to_string(),
        };
        return Ok(writeln!(out, "{whole}")?);
    }
    for disk in &disks {
        let [name, format, file] = ["node-name", "drv", "file"].map(|key| text(&disk[key]));
        let size = &disk["image"]["virtual-size"];
        let mode = if disk["ro"] == true { "read-only" } else { "writable" };
        let paused = if disk["__ringtap_paused"] == true { ", paused" } else { "" };
        let waiting = match disk["__ringtap_waiting-for-room"].as_u64() {
            Some(1) => ", 1 request waits for space".to_owned(),
            Some(waiting) => format!(", {waiting} requests wait for space"),
            None => String::new(),
        };
        writeln!(out, "{name}: {format}, {size} bytes, {mode}{paused}{waiting}, {file}")?;
        let mut image = &disk["image"]["backing-image"];
        while image.is_object() {
            writeln!(out, "  on {}: {}", text(&image["filename"]), text(&image["format"]))?;
            image = &image["backing-image"];
        }
        for export in elements(&disk["exports"]) {
            let places: Vec<&str> = elements(&export["__ringtap_places"]).map(text).collect();
            let closing = if export["shutting-down"] == true { ", closing" } else { "" };
            let (id, kind) = (text(&export["id"]), text(&export["type"]));
            writeln!(out, "  {id}: {kind} at {}{closing}", places.join(", "))?;
        }
    }
    Ok(())
}

/// The image that the server is asked for.
fn image(args: &AddArgs) -> anyhow::Result<Value> {
    let cache = match CacheMode::from(args.cache) {
        CacheMode::None => json!({ "direct": true }),
        CacheMode::Writeback => json!({ "direct": false }),
        CacheMode::Unsafe => json!({ "no-flush": true }),
        CacheMode::Writethrough | CacheMode::DirectSync => {
            return Err(Error::Usage("--cache takes none, writeback or unsafe here".into()).into());
        }
    };
    let mut disk = json!({ "node-name": args.node_name, "read-only": args.read_only });
    let null = args.disk.to_str().and_then(|disk| disk.strip_prefix("null:"));
    let (driver, format) = match (null, args.format) {
        (Some(size), None) if args.secret.is_none() && args.backing.is_empty() => {
            let wrong = |why: String| Error::Usage(format!("null:{size}: {why}"));
            disk["size"] = names::size(size).map_err(wrong)?.into();
            (disk["driver"], disk["cache"]) = ("null-co".into(), cache);
            return Ok(disk);
        }
        (Some(_), _) => {
            let why = "a null: disk has no format, no secret and nothing below it";
            return Err(Error::Usage(why.into()).into());
        }
        (None, None) => {
            let why =
                "name the format of the image with --format, as in -f qcow2: it is never guessed";
            return Err(Error::Usage(why.into()).into());
        }
        (None, Some(Format::Vhd)) => ("vpc", Format::Vhd),
        (None, Some(format)) => (format.name(), format),
    };
    disk["driver"] = driver.into();
    disk["file"] = json!({ "driver": "file", "filename": absolute(&args.disk)?, "cache": cache });
    opened_by(&mut disk, format, &args.node_name, args.secret.as_ref())?;
    Ok(disk)
}

/// What the server is asked for: the disk, and its exports.
fn wishes(args: &AddArgs) -> anyhow::Result<(Value, Vec<Value>)> {
    let mut disk = image(args)?;
    if let Some(limits) = args.limits.named() {
        disk["__ringtap_limits"] = limits;
    }
    if let Some(group) = &args.group {
        disk["__ringtap_throttle-group"] = group.as_str().into();
    }
    if !args.backing.is_empty() {
        let backing: Result<Vec<String>, _> = args.backing.iter().map(|it| absolute(it)).collect();
        disk["__ringtap_backing"] = backing?.into();
    }
    let mut exports = vec![];
    for address in &args.vhost_user {
        let Address::Unix(path) = address else {
            return Err(Error::Usage(format!("{address}: --vhost-user takes a path here")).into());
        };
        let addr = json!({ "type": "unix", "path": absolute(path)? });
        exports.push(json!({ "type": "vhost-user-blk", "addr": addr, "num-queues": args.queues }));
    }
    exports.extend(args.nbd.iter().map(|name| json!({ "type": "nbd", "name": name })));
    for path in &args.fuse {
        exports.push(json!({ "type": "fuse", "mountpoint": absolute(path)? }));
    }
    if args.ublk {
        exports.push(json!({ "type": "__ringtap_ublk" }));
    }
    let mut numbers = std::collections::HashMap::new();
    for export in &mut exports {
        let short = match text(&export["type"]) {
            "vhost-user-blk" => "vhost",
            "__ringtap_ublk" => "ublk",
            kind => kind,
        };
        let number = numbers.entry(short.to_owned()).or_insert(0);
        export["id"] = format!("{}-{short}{number}", args.node_name).into();
        *number += 1;
        export["node-name"] = args.node_name.clone().into();
        export["writable"] = (!args.read_only).into();
    }
    Ok((disk, exports))
}

/// All of it, or nothing.
fn add(
    qmp: &mut Qmp,
    node: &str,
    disk: Value,
    exports: Vec<Value>,
    nbd_server: Option<&Address>,
) -> anyhow::Result<()> {
    qmp.call("blockdev-add", disk)?;
    let exported = begin_nbd(qmp, nbd_server).and_then(|()| {
        exports.into_iter().try_for_each(|export| qmp.call("block-export-add", export).map(drop))
    });
    exported.inspect_err(|_| {
        if let Err(error) = remove(qmp, node, true) {
            tracing::warn!("the disk stays: {error}");
        }
    })
}

/// Begin the server's NBD socket there, unless there is one.
fn begin_nbd(qmp: &mut Qmp, address: Option<&Address>) -> anyhow::Result<()> {
    let addr = match address {
        None => return Ok(()),
        Some(Address::Unix(path)) => json!({ "type": "unix", "data": { "path": absolute(path)? } }),
        Some(Address::Tcp { host, port }) => {
            json!({ "type": "inet", "data": { "host": host, "port": port.to_string() } })
        }
        Some(other) => bail!("{other}: write unix:PATH or tcp:HOST:PORT"),
    };
    match qmp.call("nbd-server-start", json!({ "addr": addr })) {
        Err(error) if error.to_string().contains("already running") => Ok(()),
        other => other.map(drop),
    }
}

fn remove(qmp: &mut Qmp, node: &str, force: bool) -> anyhow::Result<()> {
    let disks = found(qmp, Some(node))?;
    let mode = if force { "hard" } else { "safe" };
    for export in disks.iter().flat_map(|disk| elements(&disk["exports"])) {
        let hint = "; --force ends it all the same";
        qmp.call("block-export-del", json!({ "id": export["id"], "mode": mode })).map_err(
            |error| match error.to_string() {
                text if text.contains("still in use") => anyhow::anyhow!("{text}{hint}"),
                _ => error,
            },
        )?;
    }
    qmp.call("blockdev-del", json!({ "node-name": node })).map(drop)
}

/// Print limits.
fn say_limits(told: &Value, group: Option<&str>, output: Output) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    match output {
        Output::Json => writeln!(out, "{}", json!({ "limits": told, "group": group }))?,
        Output::Text => {
            let group = group.map(|group| format!(", and those of group {group}"));
            writeln!(out, "{}{}", limits::line(told), group.unwrap_or_default())?;
        }
    }
    Ok(())
}

fn limit(
    qmp: &mut Qmp,
    node: &str,
    limits: &LimitArgs,
    group: Option<String>,
    output: Output,
) -> anyhow::Result<()> {
    let mut wanted = json!({ "node-name": node });
    if let Some(limits) = limits.named() {
        wanted["limits"] = limits;
    }
    if let Some(group) = group {
        wanted["throttle-group"] = group.into();
    }
    qmp.call("__ringtap_throttle", wanted)?;
    let disks = found(qmp, Some(node))?;
    let disk = disks.first().context("the disk has gone")?;
    say_limits(&disk["__ringtap_limits"], disk["group"].as_str(), output)
}

fn group_limits(
    qmp: &mut Qmp,
    group: &str,
    limits: &LimitArgs,
    remove: bool,
    output: Output,
) -> anyhow::Result<()> {
    if remove {
        return qmp.call("object-del", json!({ "id": group })).map(drop);
    }
    let (path, property) = (group, "limits");
    match qmp.call("object-add", json!({ "qom-type": "throttle-group", "id": group })) {
        Err(error) if error.to_string().contains("duplicate object") => {}
        other => _ = other?,
    }
    if let Some(value) = limits.named() {
        qmp.call("qom-set", json!({ "path": path, "property": property, "value": value }))?;
    }
    let told = qmp.call("qom-get", json!({ "path": path, "property": property }))?;
    say_limits(&told, None, output)
}

fn resize(qmp: &mut Qmp, node: &str, size: &str, output: Output) -> anyhow::Result<()> {
    let wrong = |why: String| anyhow::Error::from(Error::Usage(format!("{size}: {why}")));
    let size = match size.strip_prefix('+') {
        None => names::size(size).map_err(wrong)?,
        Some(more) => {
            let more = names::size(more).map_err(wrong)?;
            let now = found(qmp, Some(node))?;
            let now = now.first().and_then(|disk| disk["image"]["virtual-size"].as_u64());
            now.unwrap_or_default().saturating_add(more)
        }
    };
    qmp.call("block_resize", json!({ "node-name": node, "size": size }))?;
    say_state(qmp, node, output, |disk| json!({ "size": disk["image"]["virtual-size"] }))
}

/// Pause a disk, or have it go on.
fn pause(qmp: &mut Qmp, command: &str, node: &str, output: Output) -> anyhow::Result<()> {
    qmp.call(command, json!({ "node-name": node }))?;
    say_state(qmp, node, output, |disk| {
        let waiting = disk["__ringtap_waiting-for-room"].as_u64().unwrap_or_default();
        json!({ "paused": disk["__ringtap_paused"] == true, "waiting-for-space": waiting })
    })
}

/// Print as JSON what has become of a disk.
fn say_state(
    qmp: &mut Qmp,
    node: &str,
    output: Output,
    facts: impl FnOnce(&Value) -> Value,
) -> anyhow::Result<()> {
    if output == Output::Text {
        return Ok(());
    }
    let disks = found(qmp, Some(node))?;
    let mut told = facts(disks.first().context("the disk has gone")?);
    told["node-name"] = node.into();
    Ok(writeln!(std::io::stdout(), "{told}")?)
}
