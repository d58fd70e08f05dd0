//! `ringtap daemon`: a server that begins with the disks of a folder, and is told of others by its control socket.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{ArgMatches, Args};
use ringtap_daemon::{Address, Announce, Config, ControlAt, Polling};

use crate::container::warn_of_lost_logs;
use crate::folder::{folder, reader};
use crate::log::{self, LogArgs};
use crate::nbd::NbdArgs;
use crate::output::Output;
use crate::sandbox::SandboxArgs;
use crate::sockets::{CONTROL, control_at, make_folder, metrics, octal};

/// Where the files of disks are where nothing is said.
const DISKS: &str = "/etc/ringtap/disks.d";

/// What `ringtap daemon` is told.
#[derive(Debug, Args)]
pub(crate) struct DaemonArgs {
    /// Where clients control it by QMP: a UNIX socket, which only its owner may use; or connect:PATH, where a client
    /// listens that is connected to, again where it has gone; repeatable
    #[arg(long, value_name = "unix:PATH|connect:PATH", value_parser = control_at, default_value = CONTROL)]
    control: Vec<ControlAt>,

    /// Whether queues with nothing to do wait awake: off; adaptive, for as long as it has lately paid, on no more than
    /// half the processors and on none that others want; or adaptive for so long at most, like 50us
    #[arg(long, value_name = "off|adaptive|MAX", default_value = "adaptive")]
    poll: Polling,

    /// Permissions of the UNIX sockets of exports, and of files by FUSE, in octal
    #[arg(long, value_name = "MODE", value_parser = octal, default_value = "600")]
    socket_mode: u32,

    /// Keep the process id in this file while serving
    #[arg(long, value_name = "FILE")]
    pid_file: Option<PathBuf>,

    /// The folder of the disks that are there from the start: FILE.toml, one a file, with image = "PATH" and the
    /// options of a disk of `ringtap serve` as keys; SIGHUP serves those that have come
    #[arg(long, value_name = "DIR", default_value = DISKS)]
    disks: PathBuf,

    /// Write what changes while it runs into that folder, before it is answered: disks, exports, images that they go on
    /// in, limits; so the next server begins with the same
    #[arg(long)]
    persist: bool,

    /// Serve nothing where one of the disks cannot be served [default: serve the others, say which is out, and end with
    /// status 1]
    #[arg(long)]
    strict: bool,

    /// Tell Prometheus what the disks do, by HTTP at /metrics: there, or at unix:PATH
    #[arg(long, value_name = "HOST:PORT", value_parser = metrics)]
    metrics: Option<Address>,

    #[command(flatten)]
    log: LogArgs,

    /// What to print on stdout once the control socket listens: the word ready, or one line of JSON
    #[arg(long, value_enum, value_name = "FORM", default_value = "text")]
    output: Output,

    #[command(flatten)]
    sandbox: SandboxArgs,

    #[command(flatten, next_help_heading = "TLS and limits for NBD clients")]
    nbd_clients: NbdArgs,
}

/// Serve until a signal, or a client, ends it.
pub(crate) fn run(args: DaemonArgs, matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let _broker = args.sandbox.start()?;
    args.poll.choose();
    log::start(&args.log)?;
    warn_of_lost_logs();
    args.control.iter().try_for_each(make_folder)?;
    let config = Config {
        disks: vec![],
        groups: vec![],
        folder: Some(folder(args.disks, args.persist)),
        strict: args.strict,
        nbd_limits: args.nbd_clients.limits(),
        nbd_tls: args.nbd_clients.tls(matches, &[])?,
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
    };
    ringtap_daemon::serve_upgradable(config, reader())?;
    Ok(ExitCode::SUCCESS)
}
