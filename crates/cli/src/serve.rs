//! `ringtap serve`: the command line turned into a configuration, each option bound to its disk.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Arg, ArgMatches, Args, ValueEnum};
use ringtap_daemon::{
    Address, Announce, Config, ControlAt, Disk, Error, Keeping, OnError, Placed, Polling,
    Processors, QUEUES, ReadFile,
};
use ringtap_image::{CacheMode, Format, OpenOptions, Secret, SecretSource};

use crate::bound::Bound;
use crate::container::warn_of_lost_logs;
use crate::limits::{DiskLimitArgs, NamedGroup};
use crate::log::{self, LogArgs};
use crate::names::{self, CacheName, RestartLogName};
use crate::nbd::NbdArgs;
use crate::objects::BootArgs;
use crate::output::Output;
use crate::sandbox::SandboxArgs;
use crate::secret;
use crate::sockets::{control_at, metrics, octal};

/// The heading of what belongs to one disk.
pub(crate) const OF_DISK: &str = "Options of the DISK before them";

/// What `ringtap serve` is told.
#[derive(Debug, Args)]
#[command(
    override_usage = "ringtap serve [OPTIONS] <DISK> [ITS OPTIONS] [<DISK> [ITS OPTIONS]]..."
)]
pub(crate) struct ServeArgs {
    /// An image (a file or a block device), or null:SIZE for a disk that holds nothing
    #[arg(required = true, value_name = "DISK", num_args = 1..)]
    disk: Vec<PathBuf>,

    /// Serve nothing where one of the disks cannot be opened [default: serve the others, say which is
    /// out, and end with status 1]
    #[arg(long)]
    strict: bool,

    /// Whether queues with nothing to do wait awake: off; adaptive, for as long as it has lately paid, on no more than
    /// half the processors and on none that others want; or adaptive for so long at most, like 50us
    #[arg(long, value_name = "off|adaptive|MAX", default_value = "adaptive")]
    poll: Polling,

    /// Permissions of the UNIX sockets, and of files by --fuse, in octal
    #[arg(long, value_name = "MODE", value_parser = octal, default_value = "600")]
    socket_mode: u32,

    /// Keep the process id in this file while serving
    #[arg(long, value_name = "FILE")]
    pid_file: Option<PathBuf>,

    /// Have the server controlled by QMP, as QEMU's storage daemon is, at the UNIX socket unix:PATH, which only its owner
    /// may use, or by the client that listens at connect:PATH, which is connected to, again where it has gone;
    /// repeatable; disks that are served nowhere are allowed then
    #[arg(long, value_name = "unix:PATH|connect:PATH", value_parser = control_at)]
    control: Vec<ControlAt>,

    /// A group whose limits hold for all its disks together, which name it by --group; repeatable
    #[arg(long, value_name = "NAME,iops=N,bps=SIZE...")]
    throttle_group: Vec<NamedGroup>,

    /// Tell Prometheus what the disks do, by HTTP at /metrics: there, or at unix:PATH
    #[arg(long, value_name = "HOST:PORT", value_parser = metrics)]
    metrics: Option<Address>,

    #[command(flatten)]
    log: LogArgs,

    /// What to print on stdout once every socket listens: the word ready, or one line of JSON
    #[arg(long, value_enum, value_name = "FORM", default_value = "text")]
    output: Output,

    #[command(flatten)]
    boot: BootArgs,

    #[command(flatten)]
    sandbox: SandboxArgs,

    #[command(flatten, next_help_heading = "TLS and limits for NBD clients")]
    nbd_clients: NbdArgs,

    // Last: the heading goes on to whatever follows.
    #[command(flatten, next_help_heading = OF_DISK)]
    of_disk: DiskArgs,
}

impl ServeArgs {
    /// What it is told of a guest's start.
    pub(crate) fn boot(&self) -> &BootArgs {
        &self.boot
    }
}

/// What a disk is told: each value belongs to the DISK before it.
#[derive(Debug, Args)]
#[command(mut_args = flag)]
struct DiskArgs {
    /// Format of the image [default, and for '': as Ringtap wrote it down when it made the image, or first
    /// served it]; never guessed, for a guest can write any header into a raw disk
    #[arg(short, long, value_parser = named_format, value_name = "FORMAT")]
    format: Vec<NamedFormat>,

    /// Write to the image as the format named by -f though it is recorded as another, or bears another's
    /// signature: what it held is lost
    #[arg(long)]
    force_format: Vec<bool>,

    /// File that the image may name as its backing file, parent or extent, or folder with such; needed
    /// where Ringtap has not recorded it, and image and folder are not your own; repeatable
    #[arg(long = "backing", alias = "allow-backing", value_name = "FILE|DIR")]
    allow_backing: Vec<PathBuf>,

    /// File that the image may name as its external data file; needed where Ringtap has not recorded it,
    /// and image and folder are not your own; repeatable
    #[arg(long, value_name = "FILE")]
    data_file: Vec<PathBuf>,

    /// How host caching is used, as in QEMU [default: none]
    #[arg(long, value_enum, value_name = "MODE")]
    cache: Vec<CacheName>,

    /// Refuse writes
    #[arg(long)]
    read_only: Vec<bool>,

    /// Where the secret of an encrypted image is: file:PATH, fd:N (a descriptor inherited), or
    /// credential:NAME (of systemd); all its bytes count, a newline at the end, too
    #[arg(long, value_name = "SOURCE", value_parser = secret::source)]
    secret: Vec<SecretSource>,

    /// The most memory that the L2 tables of a qcow2 image take, and of each image below it
    /// [default: 64M, enough for 512G of clusters of 64k]
    #[arg(long, value_name = "SIZE", value_parser = names::size)]
    l2_cache_size: Vec<u64>,

    /// What becomes of changes that a killed server left, where it cannot be told whether they belong to
    /// the image as it is now [default: it is not opened]; optional: serve it also where no log can be kept of it
    #[arg(long, value_enum, value_name = "WHAT")]
    restart_log: Vec<RestartLogName>,

    /// Pass discards on through encryption, which shows others which parts of the disk are in use
    #[arg(long)]
    allow_discards: Vec<bool>,

    /// Serve NBD at unix:PATH, tcp:HOST:PORT, or sockets handed over: systemd, systemd:NAME; repeatable
    #[arg(long, value_name = "ADDRESS", value_parser = Address::nbd)]
    nbd: Vec<Address>,

    /// Name of the NBD export [default: the empty name, the default export]
    #[arg(long, value_name = "EXPORT")]
    name: Vec<String>,

    /// Show this dirty bitmap of a qcow2 image to NBD clients, as qemu:dirty-bitmap:NAME; repeatable
    #[arg(long, value_name = "NAME")]
    bitmap: Vec<String>,

    /// Serve vhost-user-blk at a UNIX socket, or one handed over: systemd, systemd:NAME; repeatable
    #[arg(long, value_name = "PATH", value_parser = Address::vhost_user)]
    vhost_user: Vec<Address>,

    /// Show the disk as a file, by FUSE: mounted over a regular file, which is made if need be;
    /// repeatable
    #[arg(long, value_name = "PATH")]
    fuse: Vec<PathBuf>,

    /// Let writes past the end of the file make it, and the raw image, larger
    #[arg(long)]
    growable: Vec<bool>,

    /// Another server has the image, whose guest comes here by live migration: open it, and lock it, only once a guest
    /// begins here
    #[arg(long)]
    incoming: Vec<bool>,

    /// Make the disk a block device of this host, /dev/ublkbN, by ublk (Linux 6.5 or later); one
    /// that a killed server of the same disk left is taken over
    #[arg(
        long,
        value_name = "N",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "any",
        value_parser = DeviceNumber::parse
    )]
    ublk: Vec<DeviceNumber>,

    /// The most virtqueues a guest may use, each a thread once used; with --fuse and --ublk the most
    /// threads that serve the file or device [default: 16]
    #[arg(long, value_name = "N")]
    queues: Vec<u16>,

    /// Sector size that vhost-user guests and --ublk see, as logical-block-size of QEMU's storage
    /// daemon: 512, 1024, 2048 or 4096 [default: 512, or what the image's device or format asks for]
    #[arg(long, value_name = "BYTES")]
    logical_block_size: Vec<u32>,

    /// What becomes of requests that find no space where the image lies: they fail, or wait until `ringtap disk resume` or
    /// SIGHUP [default: hold with --control, else report]
    #[arg(long, value_enum, value_name = "WHAT")]
    on_error: Vec<OnErrorName>,

    /// What becomes of discards: they free space of the image, or nothing, as zeros do then [default: unmap]
    #[arg(long, value_enum, value_name = "WHAT")]
    discard: Vec<DiscardName>,

    /// Have the threads that serve it run on these processors, as in 0-3,8 [default: any]
    #[arg(long, value_name = "LIST")]
    cpus: Vec<Processors>,

    /// Have the threads that serve it be in this threaded control group (cgroup v2), so that their time is charged to its VM
    #[arg(long, value_name = "DIR")]
    cgroup: Vec<PathBuf>,

    #[command(flatten)]
    limits: DiskLimitArgs,

    /// The group whose limits hold for it, too
    #[arg(long, value_name = "NAME")]
    group: Vec<String>,

    /// Hold each answer back for so many percent of the time that it took: the lab's arm that is known to be slower
    #[arg(long, value_name = "PERCENT", hide = true)]
    hold: Vec<u32>,

    /// Serial number that vhost-user guests see, at most 20 characters [default: the export's name]
    #[arg(long, value_name = "TEXT")]
    serial: Vec<String>,

    /// What --control knows the disk by [default: the export's name where it will do, else disk0 and so on]
    #[arg(long, value_name = "NAME")]
    node_name: Vec<String>,
}

/// `--read-only` is `--read-only=true`, and takes no other word after it: that would be the next DISK.
fn flag(arg: Arg) -> Arg {
    if !["read_only", "allow_discards", "growable", "incoming", "force_format"]
        .contains(&arg.get_id().as_str())
    {
        return arg;
    }
    arg.value_name("BOOL")
        .num_args(0..=1)
        .require_equals(true)
        .default_missing_value("true")
        .hide_possible_values(true)
}

/// What `--on-error` takes.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum OnErrorName {
    /// They fail
    Report,
    /// They wait
    Hold,
}

/// What becomes of discards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum DiscardName {
    /// They free space
    Unmap,
    /// They free nothing
    Ignore,
}

impl From<OnErrorName> for OnError {
    fn from(name: OnErrorName) -> OnError {
        match name {
            OnErrorName::Report => OnError::Report,
            OnErrorName::Hold => OnError::Hold,
        }
    }
}

/// The N of /dev/ublkbN; none: the next that is free.
#[derive(Clone, Copy, Debug)]
struct DeviceNumber(Option<u32>);

impl DeviceNumber {
    fn parse(text: &str) -> Result<DeviceNumber, String> {
        match text {
            "any" => Ok(DeviceNumber(None)),
            _ => text
                .parse()
                .map(|id| DeviceNumber(Some(id)))
                .map_err(|_| "write a number, such as --ublk=3, or --ublk alone".to_owned()),
        }
    }
}

/// A format that a unit's FORMAT= names, or leaves out.
#[derive(Clone, Copy, Debug)]
struct NamedFormat(Option<Format>);

fn named_format(text: &str) -> Result<NamedFormat, String> {
    match text {
        "" => Ok(NamedFormat(None)),
        name => {
            name.parse().map(|format| NamedFormat(Some(format))).map_err(|error| format!("{error}"))
        }
    }
}

/// Serve until a signal ends it.
pub(crate) fn run(
    args: ServeArgs,
    matches: &ArgMatches,
    described: ReadFile,
) -> anyhow::Result<ExitCode> {
    let _broker = args.sandbox.start()?;
    args.poll.choose();
    log::start(&args.log)?;
    warn_of_lost_logs();
    ringtap_daemon::serve_upgradable(config(args, matches)?, described)?;
    Ok(ExitCode::SUCCESS)
}

/// What the command line asks for.
pub(crate) fn config(args: ServeArgs, matches: &ArgMatches) -> Result<Config, Error> {
    let places: Vec<usize> = matches.indices_of("disk").into_iter().flatten().collect();
    let bound = Bound { matches, disks: &args.disk, places: &places };
    let of_disk = args.of_disk;
    let nbd_tls = args.nbd_clients.tls(matches, &of_disk.nbd)?;
    let mut format = bound.single("format", of_disk.format)?;
    let mut cache = bound.single("cache", of_disk.cache)?;
    let mut read_only = bound.single("read_only", of_disk.read_only)?;
    let mut force_format = bound.single("force_format", of_disk.force_format)?;
    let mut secret = bound.single("secret", of_disk.secret)?;
    let mut l2_cache_size = bound.single("l2_cache_size", of_disk.l2_cache_size)?;
    let mut restart_log = bound.single("restart_log", of_disk.restart_log)?;
    let mut allow_discards = bound.single("allow_discards", of_disk.allow_discards)?;
    let mut name = bound.single("name", of_disk.name)?;
    let mut queues = bound.single("queues", of_disk.queues)?;
    let mut logical_block_size = bound.single("logical_block_size", of_disk.logical_block_size)?;
    let mut serial = bound.single("serial", of_disk.serial)?;
    let mut hold = bound.single("hold", of_disk.hold)?;
    let mut on_error = bound.single("on_error", of_disk.on_error)?;
    let discard = bound.single("discard", of_disk.discard)?;
    let mut cpus = bound.single("cpus", of_disk.cpus)?;
    let mut cgroup = bound.single("cgroup", of_disk.cgroup)?;
    let mut node_name = bound.single("node_name", of_disk.node_name)?;
    let limits = of_disk.limits.bind(&bound)?;
    let mut group = bound.single("group", of_disk.group)?;
    let mut nbd = bound.all("nbd", of_disk.nbd);
    let mut vhost_user = bound.all("vhost_user", of_disk.vhost_user);
    let mut allow_backing = bound.all("allow_backing", of_disk.allow_backing);
    let mut data_files = bound.all("data_file", of_disk.data_file);
    let mut fuse = bound.all("fuse", of_disk.fuse);
    let mut bitmaps = bound.all("bitmap", of_disk.bitmap);
    let mut growable = bound.single("growable", of_disk.growable)?;
    let mut incoming = bound.single("incoming", of_disk.incoming)?;
    let mut ublk = bound.single("ublk", of_disk.ublk)?;

    let mut disks = vec![];
    for (i, path) in args.disk.iter().enumerate() {
        let source = secret[i].take();
        let keeping =
            Keeping { secret: source.as_ref().map(ToString::to_string), ..Keeping::default() };
        let vhost_user = std::mem::take(&mut vhost_user[i]);
        let fuse = std::mem::take(&mut fuse[i]);
        let ublk = ublk[i].take().map(|DeviceNumber(id)| id);
        let queues_used = !vhost_user.is_empty() || !fuse.is_empty() || ublk.is_some();
        if (queues[i].is_some() && !queues_used) || (serial[i].is_some() && vhost_user.is_empty()) {
            return Err(Error::Usage(format!(
                "{}: --queues and --serial are for vhost-user: add --vhost-user PATH",
                path.display()
            )));
        }
        let logical_block_size = logical_block_size[i].take();
        if logical_block_size.is_some() && vhost_user.is_empty() && ublk.is_none() {
            return Err(Error::Usage(format!(
                "{}: --logical-block-size is for --vhost-user and --ublk",
                path.display()
            )));
        }
        let name = name[i].take().unwrap_or_default();
        let short = Some(name.clone()).filter(|name| name.len() <= 20 && name.is_ascii());
        disks.push(Disk {
            path: path.clone(),
            options: OpenOptions {
                format: format[i].take().and_then(|NamedFormat(format)| format),
                force_format: force_format[i].take().unwrap_or(false),
                cache: cache[i].take().map(CacheMode::from).unwrap_or_default(),
                read_only: read_only[i].take().unwrap_or(false),
                allow_backing: std::mem::take(&mut allow_backing[i]),
                data_files: std::mem::take(&mut data_files[i]),
                bitmaps: std::mem::take(&mut bitmaps[i]),
                table_memory: l2_cache_size[i].take(),
                secret: source.map(|source| read_secret(path, &source)).transpose()?,
                needs_log: true,
                restart_log: restart_log[i].take().map(Into::into),
                allow_discards: allow_discards[i].take().unwrap_or(false),
                ..OpenOptions::default()
            },
            nbd: std::mem::take(&mut nbd[i]),
            vhost_user,
            fuse,
            growable: growable[i].take().unwrap_or(false),
            incoming: incoming[i].take().unwrap_or(false),
            ublk,
            queues: queues[i].take().unwrap_or(QUEUES),
            logical_block_size,
            hold: hold[i].take().unwrap_or(0),
            placement: Placed { processors: cpus[i].take(), cgroup: cgroup[i].take() },
            on_error: on_error[i].take().map(Into::into),
            keeps_space: discard[i] == Some(DiscardName::Ignore),
            limits: limits[i].limits,
            share: limits[i].share,
            group: group[i].take(),
            keeping,
            serial: serial[i].take().or(short).unwrap_or_default(),
            node_name: node_name[i].take(),
            name,
        });
    }
    Ok(Config {
        disks,
        folder: None,
        groups: args.throttle_group.into_iter().map(|NamedGroup(name, of)| (name, of)).collect(),
        strict: args.strict,
        nbd_limits: args.nbd_clients.limits(),
        nbd_tls,
        socket_mode: args.socket_mode,
        pid_file: args.pid_file,
        metrics: args.metrics,
        control: args.control,
        announce: match args.output {
            Output::Text => Announce::Text,
            Output::Json => Announce::Json,
        },
        sandbox: args.sandbox.sandbox(),
        xen: None,
    })
}

fn read_secret(disk: &Path, source: &SecretSource) -> Result<Secret, Error> {
    let warn = |text: String| tracing::warn!("{}: {text}", disk.display());
    secret::read(source, warn).map_err(|error| Error::Usage(format!("{}: {error}", disk.display())))
}

#[cfg(test)]
mod tests;
