//! Loads that check themselves: fio with checksums on a whole disk, and file systems whose files
//! must read back after they were mounted again.

use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::fio;
use crate::guest::{Guest, Job, Output};

/// A `fio --verify=crc32c` load: random writes that cover `size` once, then everything read and
/// checked, and that `loops` times.
#[derive(Debug, Clone)]
pub struct FioVerify {
    device: String,
    size: u64,
    block: u32,
    depth: u32,
    loops: u32,
    seed: u64,
    engine: String,
    fsync: u32,
    jobs: u32,
}

/// What a load that found no fault has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verified {
    /// Write requests acknowledged.
    pub writes: u64,
    /// Read requests whose checksums were right.
    pub reads: u64,
    /// How long it took by the host's clock.
    pub elapsed: Duration,
}

/// A [`FioVerify`] that runs in the background.
pub struct Verifying<'a> {
    job: Job<'a>,
}

impl FioVerify {
    /// 64 MiB in blocks of 4 KiB at depth 32 with libaio and O_DIRECT on a device of the guest.
    pub fn new(device: impl Into<String>) -> Self {
        Self {
            device: device.into(),
            size: 64 << 20,
            block: 4096,
            depth: 32,
            loops: 1,
            seed: 1,
            engine: "libaio".into(),
            fsync: 0,
            jobs: 1,
        }
    }

    /// How much of the device, from its beginning, in bytes.
    #[must_use]
    pub fn size(mut self, bytes: u64) -> Self {
        self.size = bytes;
        self
    }

    /// Bytes per request.
    #[must_use]
    pub fn block(mut self, bytes: u32) -> Self {
        self.block = bytes;
        self
    }

    /// Requests in flight.
    #[must_use]
    pub fn depth(mut self, depth: u32) -> Self {
        self.depth = depth;
        self
    }

    /// How often everything is written and checked.
    #[must_use]
    pub fn loops(mut self, loops: u32) -> Self {
        self.loops = loops;
        self
    }

    /// Another order and other data.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Another of fio's engines, such as `io_uring` or `psync`.
    #[must_use]
    pub fn engine(mut self, engine: impl Into<String>) -> Self {
        self.engine = engine.into();
        self
    }

    /// A flush after every so many writes; none unless told.
    #[must_use]
    pub fn flush_every(mut self, writes: u32) -> Self {
        self.fsync = writes;
        self
    }

    /// So many processes, each with a processor and an equal part of `size` of its own. The guest must
    /// have as many processors.
    #[must_use]
    pub fn jobs(mut self, jobs: u32) -> Self {
        self.jobs = jobs.max(1);
        self
    }

    fn command(&self, more: &str) -> String {
        let Self { device, size, block, depth, loops, seed, engine, fsync, jobs } = self;
        let part = size / u64::from(*jobs);
        let spread = match jobs - 1 {
            0 => String::new(),
            last => format!(
                "--numjobs={jobs} --group_reporting --offset_increment={part} \
                 --cpus_allowed=0-{last} --cpus_allowed_policy=split"
            ),
        };
        // No state file: the guest's directory is a tmpfs that dies with it.
        format!(
            "cd /tmp && fio --name=verify --filename={device} --rw=randwrite --direct=1 \
             --size={part} {spread} --bs={block} --iodepth={depth} --ioengine={engine} --loops={loops} \
             --randseed={seed} --fsync={fsync} --verify=crc32c --verify_fatal=1 --do_verify=1 \
             --verify_state_save=0 --output-format=json {more}"
        )
    }

    /// Starts it in the background, so that a test can do harm meanwhile.
    ///
    /// # Errors
    /// When the guest is gone.
    pub fn start<'a>(&self, guest: &'a Guest) -> Result<Verifying<'a>> {
        Ok(Verifying { job: guest.start(&self.command(""))? })
    }

    /// Runs it to its end.
    ///
    /// # Errors
    /// [`Error::Failed`] when a checksum is wrong or a request failed, with fio's words.
    pub fn run(&self, guest: &Guest, timeout: Duration) -> Result<Verified> {
        self.start(guest)?.wait(timeout)
    }

    /// Reads and checks what an earlier run with the same settings wrote, writing nothing: after
    /// a reboot, or after the server was started again.
    ///
    /// # Errors
    /// As [`FioVerify::run`].
    pub fn check(&self, guest: &Guest, timeout: Duration) -> Result<Verified> {
        read_report(guest.exec(&self.command("--verify_only=1"), timeout)?)
    }
}

impl Verifying<'_> {
    /// Whether it has ended, well or badly.
    pub fn is_done(&self) -> bool {
        self.job.is_done()
    }

    /// Waits for its end and reads its verdict.
    ///
    /// # Errors
    /// As [`FioVerify::run`].
    pub fn wait(self, timeout: Duration) -> Result<Verified> {
        read_report(self.job.wait(timeout)?)
    }
}

fn read_report(output: Output) -> Result<Verified> {
    let elapsed = output.elapsed;
    let output = output.success()?;
    let bad = |why: fio::Unreadable| Error::Output {
        program: "fio",
        found: why.to_string(),
        output: output.stdout.chars().take(400).collect(),
    };
    let report = fio::Report::parse(&output.stdout).map_err(bad)?;
    let job = report.first().map_err(bad)?;
    job.succeeded().map_err(bad)?;
    let count = |write| job.side(write).total_ios as u64;
    Ok(Verified { writes: count(true), reads: count(false), elapsed })
}

/// A file system that [`check_filesystem`] knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Filesystem {
    /// ext4; needs mke2fs and e2fsck in the guest.
    Ext4,
    /// XFS (300 MiB at least); needs mkfs.xfs and xfs_repair.
    Xfs,
    /// Btrfs; needs mkfs.btrfs and btrfs.
    Btrfs,
}

impl Filesystem {
    /// The programs a packed appliance must hold, beside `mount`.
    pub fn programs(self) -> &'static [&'static str] {
        match self {
            Self::Ext4 => &["mke2fs", "e2fsck"],
            Self::Xfs => &["mkfs.xfs", "xfs_repair"],
            Self::Btrfs => &["mkfs.btrfs", "btrfs"],
        }
    }

    fn words(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Self::Ext4 => ("ext4", "mke2fs -q -F -t ext4", "e2fsck -fn"),
            Self::Xfs => ("xfs", "mkfs.xfs -q -f", "xfs_repair -n"),
            Self::Btrfs => ("btrfs", "mkfs.btrfs -q -f", "btrfs check --readonly"),
        }
    }
}

/// Makes a file system on a device of the guest, writes `files` files of 1 MiB, mounts it anew,
/// compares their checksums, removes every other one, trims, mounts anew and compares again, and
/// has the file system's own checker look at it. Returns how long that took.
///
/// # Errors
/// [`Error::Failed`] with the words of the program that found a fault.
pub fn check_filesystem(
    guest: &Guest,
    device: &str,
    kind: Filesystem,
    files: u32,
    timeout: Duration,
) -> Result<Duration> {
    let started = Instant::now();
    let (name, make, check) = kind.words();
    let script = format!(
        "set -e
dir=/mnt/check.$$
mkdir -p $dir
{make} {device} >&2
mount -t {name} {device} $dir
n=0
while [ $n -lt {files} ]; do
    dd if=/dev/urandom of=$dir/$n bs=64k count=16 2>/dev/null
    n=$((n + 1))
done
sha256sum $dir/[0-9]* >/tmp/sums
again() {{
    umount $dir
    mount -t {name} {device} $dir
    sha256sum -c /tmp/sums >/tmp/checked || {{ grep -v OK$ /tmp/checked >&2; exit 1; }}
}}
again
n=0
while [ $n -lt {files} ]; do
    rm $dir/$n
    sed -i \"\\\\,$dir/$n\\$,d\" /tmp/sums
    n=$((n + 2))
done
fstrim $dir || [ $? -ne 0 ] # not every disk can discard
again
umount $dir
{check} {device} >&2
"
    );
    guest.exec(&script, timeout)?.success()?;
    Ok(started.elapsed())
}
