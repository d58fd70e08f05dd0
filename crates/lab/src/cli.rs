//! The verbs `compare` and `report`, for the binary.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::remote::address::Host;
use crate::report::limit::Limit;

/// How a result is printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// A table for people.
    #[default]
    Table,
    /// One JSON object.
    Json,
    /// JUnit XML, for what shows tests.
    Junit,
    /// OpenMetrics text, for Prometheus.
    Openmetrics,
}

/// Measure ways of serving a disk side by side.
#[derive(Clone, Debug, Args)]
#[command(
    about = "Measure ways of serving a disk side by side",
    long_about = "Measure ways of serving a disk side by side: stages × backends × workloads × rounds.\n\n\
        Every backend runs once in every round, in a balanced order; the stage's reference runs twice (the A/A twin), \
        which shows the noise floor. Each sample is appended to RUN/samples.jsonl as it comes; the table, report.html \
        and the JSON are made from that folder and can be made again with `ringtap report`.",
    after_help = "Examples:\n  \
        ringtap compare                             for a guest on this host, which way should I serve its disk?\n  \
        ringtap compare published                   what others have published, run anew: guests, LVM, snapshots, two VMs\n  \
        ringtap compare published --within 40m      as much of that as fits; the rest is named\n  \
        ringtap compare nbd                         NBD servers side by side; vhost-user: servers of that; remote: disks elsewhere\n  \
        ringtap compare --rest-of RUN               what RUN left out, another night\n  \
        ringtap compare --self-test                 does the lab find what is known beforehand?\n  \
        ringtap compare --list                      what there is, and what can run here\n  \
        ringtap compare --stages host --backends native,ringtap-nbd,qemu-nbd --workloads fio\n  \
        ringtap compare --dir /dev/shm --size 512M  on tmpfs: the cost of the software\n  \
        ringtap compare --device /dev/vg/lv --job oltp.fio   a way and a load of yours beside the lab's\n  \
        ringtap compare --on ssh://root@store1 --stages host  on another machine; the run comes back\n  \
        ringtap compare --plan nightly.toml --out /srv/runs/tonight\n\n\
        Exit codes: 0 done; 1 it failed; 2 the plan makes no sense, nothing was started; \
        3 a part was done: interrupted, or some samples failed (the report says which)."
)]
pub struct CompareArgs {
    /// A plan that the lab knows: quick, published, nbd, vhost-user, remote. The binary takes it as its only word.
    #[arg(skip)]
    pub known: Option<String>,

    /// Measure what is known beforehand, and say whether the lab finds it.
    #[arg(long, conflicts_with_all = ["plan", "quick", "list"])]
    pub self_test: bool,

    /// The usual question, which is asked where nothing else is named; with names of your own, short samples of few loads.
    #[arg(long)]
    pub quick: bool,

    /// Print all tables, too, which the page has in any case.
    #[arg(short, long)]
    pub verbose: bool,

    /// Rounds [default: 12, the fewest for answers; under 6 there are points only].
    #[arg(long, value_name = "N")]
    pub rounds: Option<u32>,

    /// Stages: host, guest, vm, two, two-guests, two-vms, xen, remote [default: vm; with --list, --backends or
    /// --workloads host, guest].
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    pub stages: Option<Vec<String>>,

    /// Backends, as --list names them [default: the usual ones].
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    pub backends: Option<Vec<String>>,

    /// Workloads or groups of them (fio, dd), as --list names them [default: all].
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    pub workloads: Option<Vec<String>>,

    /// Run a fio job file of yours as a workload, on every backend; may be given several times.
    #[arg(long, visible_alias = "job", value_name = "FILE")]
    pub fio_job: Vec<PathBuf>,

    /// A raw image of yours as one more way; it is only read, unless --overwrite is given.
    #[arg(long, value_name = "FILE")]
    pub image: Vec<PathBuf>,

    /// A block device of yours as one more way; it is only read, unless --overwrite is given.
    #[arg(long, value_name = "DEVICE")]
    pub device: Vec<PathBuf>,

    /// An NBD export of yours as one more way.
    #[arg(long, value_name = "URI")]
    pub nbd_uri: Vec<String>,

    /// A vhost-user-blk server of yours as one more way.
    #[arg(long, value_name = "SOCKET")]
    pub vhost_user: Vec<PathBuf>,

    /// A disk of QEMU's as one more way (stage vm): options of -drive, or whole arguments that name {id}.
    #[arg(long, value_name = "ARGS", allow_hyphen_values = true)]
    pub qemu: Vec<String>,

    /// More ways in TOML: docs/lab.md has the keys; a server there is started on the lab's own disk.
    #[arg(long, value_name = "FILE")]
    pub catalogue: Vec<PathBuf>,

    /// Let loads write to the disks of --image, --device, --nbd-uri, --vhost-user and --qemu: what is on them is lost.
    #[arg(long)]
    pub overwrite: bool,

    /// A plan in TOML; keys are named as these flags. Flags win over it.
    #[arg(long, value_name = "FILE")]
    pub plan: Option<PathBuf>,

    /// Where the disks are made [default: $TMPDIR, else /var/tmp].
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,

    /// Size of each disk [default: 1G, with --quick 128M; 64M for the usual question].
    #[arg(long, value_name = "SIZE")]
    pub size: Option<String>,

    /// Seconds that fio measures [default: 3, with --quick 0.25; 0.4 for the usual question].
    #[arg(long, value_name = "S")]
    pub seconds: Option<f64>,

    /// Seconds that fio runs before it measures [default: 0.5, with --quick 0].
    #[arg(long, value_name = "S")]
    pub ramp: Option<f64>,

    /// Seconds that a guest may take to boot [default: 60 in User-Mode Linux, 180 in QEMU; 400 for a nested Xen, 300 for
    /// each of its guests].
    #[arg(long, value_name = "S")]
    pub boot_limit: Option<f64>,

    /// Memory of each guest [default: 512M in User-Mode Linux, 1G in QEMU, under Xen what its initramfs needs]; small, caches hold
    /// less of the disk.
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<String>,

    /// Leave out the loads that take longest, until the rest is expected to take no longer than this: 40m, 2h. What is left
    /// out is named.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub within: Option<f64>,

    /// Measure what this complete run left out, by its plan; `ringtap report RUN REST --out WHOLE` puts both together.
    #[arg(long, value_name = "RUN", conflicts_with_all = [
        "self_test", "list", "quick", "plan", "rounds", "stages", "backends", "workloads", "fio_job", "image", "device",
        "nbd_uri", "vhost_user", "qemu", "catalogue", "overwrite", "size", "seconds", "ramp", "memory", "seed", "on",
    ])]
    pub rest_of: Option<PathBuf>,

    /// Seed of the order, the blocks and the bootstrap [default: the clock].
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,

    /// Run on another machine, `ssh://USER@HOST:PORT`: the binaries are copied there, the run comes back.
    #[arg(long, value_name = "URI")]
    pub on: Option<Host>,

    /// Folder of the run [default: ringtap-runs/DATE].
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,

    /// How the result is printed.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,

    /// Print stages, backends and workloads, and whether each can run here; measure nothing.
    #[arg(long)]
    pub list: bool,
}

/// Seconds of a time like `40m`, `1h30m`, `90s`.
fn duration(text: &str) -> Result<f64, String> {
    let time = text.parse::<jiff::SignedDuration>().ok().filter(jiff::SignedDuration::is_positive);
    time.map(|time| time.as_secs_f64()).ok_or_else(|| "write a time, such as 40m or 2h".to_owned())
}

impl CompareArgs {
    /// Whether nothing says what is to be measured: then the usual question is asked.
    pub fn names_nothing(&self) -> bool {
        let named = self.stages.is_some() || self.backends.is_some() || self.workloads.is_some();
        let lists = [&self.fio_job, &self.image, &self.device, &self.vhost_user, &self.catalogue];
        let texts = [&self.nbd_uri, &self.qemu];
        let added = lists.iter().any(|l| !l.is_empty()) || texts.iter().any(|l| !l.is_empty());
        !(named
            || added
            || self.plan.is_some()
            || self.rest_of.is_some()
            || self.list
            || self.self_test)
    }
}

/// Make a run's tables and report again.
#[derive(Clone, Debug, Args)]
#[command(
    about = "Make the report of a run again, merge runs, or compare two",
    after_help = "Examples:\n  \
        ringtap report ringtap-runs/2026-11-21T21-30-00\n  \
        ringtap report MONDAY TUESDAY --out BOTH     merge two runs of one plan: their rounds together\n  \
        ringtap report RUN REST --out WHOLE          what was left out of RUN, and measured since, beside the rest\n  \
        ringtap report --before OLD NEW              what changed from OLD to NEW\n  \
        ringtap report --before OLD NEW --fail-if-worse 5% --output junit > lab.xml   for CI\n  \
        ringtap report RUN --with theirs.csv --with their-fio.json   rows of others beside it\n  \
        ringtap report --output openmetrics RUN > /var/lib/prometheus/node-exporter/ringtap.prom\n  \
        ringtap report --output json RUN | jq '.rows[] | select(.decision == \"faster\")'\n\n\
        Exit codes: 0 done; 1 it failed; 2 the arguments make no sense; with --fail-if-worse: 3 something of OLD is missing in \
        RUN, or nothing can be said; 4 something is worse by more than that."
)]
pub struct ReportArgs {
    /// Folders of runs, as `ringtap compare` printed them; several are merged.
    #[arg(value_name = "RUN", required = true)]
    pub runs: Vec<PathBuf>,

    /// Say what changed from this run to RUN.
    #[arg(long, value_name = "OLD")]
    pub before: Option<PathBuf>,

    /// Set rows of others beside the run: bonnie++ CSV lines or fio's JSON; may be given several times.
    #[arg(long, value_name = "FILE", conflicts_with = "before")]
    pub with: Vec<PathBuf>,

    /// With --before: exit with 4 where something is worse by more than this share, beyond chance (5%).
    #[arg(long, value_name = "SHARE", requires = "before")]
    pub fail_if_worse: Option<Limit>,

    /// Folder of the merged run [default: ringtap-runs/merged-DATE], or with --before of changes.html [default: RUN].
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,

    /// How the result is printed. report.html, or with --before changes.html, is written in any case.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}
