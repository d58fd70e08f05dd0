//! `ringtap xen`: the command line turned into a configuration.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use ringtap_daemon::{Address, Announce, Config, ControlAt, NbdLimits, Sandbox, XenConfig, serve};
use ringtap_image::OpenOptions;

use crate::container::warn_of_lost_logs;
use crate::log::{self, LogArgs};
use crate::names::{CacheName, RestartLogName};
use crate::output::Output;
use crate::sockets::{control_at, make_folder, metrics, octal};

/// What `ringtap xen` is told.
#[derive(Debug, Args)]
pub(crate) struct XenArgs {
    /// How host caching is used, where a disk's target does not say it
    #[arg(long, value_enum, value_name = "MODE", default_value = "none")]
    cache: CacheName,

    /// File that an image may name as its backing file, parent or extent, or folder with such; needed
    /// where Ringtap has not recorded it, and image and folder are not root's own; repeatable
    #[arg(long = "backing", alias = "allow-backing", value_name = "FILE|DIR")]
    allow_backing: Vec<PathBuf>,

    /// File that an image may name as its external data file; needed where Ringtap has not recorded it,
    /// and image and folder are not root's own; repeatable
    #[arg(long, value_name = "FILE")]
    data_file: Vec<PathBuf>,

    /// What becomes of changes that a killed server left, where it cannot be told whether they belong to
    /// the image as it is now, of every disk whose target does not say it [default: it is not opened];
    /// optional: serve it also where no log can be kept of it
    #[arg(long, value_enum, value_name = "WHAT")]
    restart_log: Option<RestartLogName>,

    /// The most rings of a disk, each a thread once used; never more than there are processors
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..))]
    queues: u16,

    /// Keep pages mapped that a guest uses again and again, and copy from and to them without the
    /// hypervisor; the guest copies as well
    #[arg(long, value_name = "BOOL", default_value_t = true, action = clap::ArgAction::Set)]
    persistent_grants: bool,

    /// Hold each answer back for so many percent of the time that it took: the lab's arm that is known to be slower
    #[arg(long, value_name = "PERCENT", default_value_t = 0, hide = true)]
    hold: u32,

    /// Have the disks controlled by QMP at the UNIX socket unix:PATH, which only its owner may use: snapshots, jobs, limits and
    /// other exports of them while guests run (`ringtap disk`); or at connect:PATH, where a client listens; repeatable. A
    /// disk is known by the name of its device, as xen3-51712
    #[arg(long, value_name = "unix:PATH|connect:PATH", value_parser = control_at)]
    control: Vec<ControlAt>,

    /// Tell Prometheus what the disks do, by HTTP at /metrics: there, or at unix:PATH
    #[arg(long, value_name = "HOST:PORT", value_parser = metrics)]
    metrics: Option<Address>,

    /// Permissions of the UNIX sockets it makes
    #[arg(long, value_name = "MODE", value_parser = octal, default_value = "600")]
    socket_mode: u32,

    /// Keep the process id in this file while serving
    #[arg(long, value_name = "FILE")]
    pid_file: Option<PathBuf>,

    #[command(flatten)]
    log: LogArgs,

    /// What to print on stdout once disks are waited for: the word ready, or one line of JSON
    #[arg(long, value_enum, value_name = "FORM", default_value = "text")]
    output: Output,
}

/// Serve until a signal ends it.
pub(crate) fn run(args: XenArgs) -> anyhow::Result<ExitCode> {
    log::start(&args.log)?;
    warn_of_lost_logs();
    let options = OpenOptions {
        cache: args.cache.into(),
        allow_backing: args.allow_backing,
        data_files: args.data_file,
        restart_log: args.restart_log.map(Into::into),
        ..OpenOptions::default()
    };
    args.control.iter().try_for_each(make_folder)?;
    let xen = XenConfig {
        options,
        queues: args.queues,
        persistent: args.persistent_grants,
        hold: args.hold,
    };
    serve(Config {
        disks: vec![],
        groups: vec![],
        folder: None,
        strict: false,
        nbd_limits: NbdLimits::default(),
        nbd_tls: None,
        socket_mode: args.socket_mode,
        pid_file: args.pid_file,
        metrics: args.metrics,
        control: args.control,
        announce: match args.output {
            Output::Text => Announce::Text,
            Output::Json => Announce::Json,
        },
        sandbox: Sandbox::Off,
        xen: Some(xen),
    })?;
    Ok(ExitCode::SUCCESS)
}
