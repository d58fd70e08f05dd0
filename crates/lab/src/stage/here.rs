//! This machine as a workload sees it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use super::start;
use crate::backend::Access;
use crate::backend::ceph::IMAGE;
use crate::env::Env;
use crate::error::{Error, Result};
use crate::process;
use crate::run::mark::Mark;
use crate::stop::Stop;
use crate::workload::job::{Job, Target};
use crate::workload::machine::{Files, Logged, Machine, Tool};
use crate::workload::{Measured, Settings, fio, load, rated};

/// How long what works on files, and what writes to a snapshot, may take.
const LONG: Duration = Duration::from_secs(900);
/// How long a job file may take.
const LONGEST: Duration = Duration::from_secs(3600);

/// The disk of a sample, and what may be used for it.
pub struct Disk<'a> {
    /// How it is reached.
    pub access: &'a Access,
    /// The machine.
    pub env: &'a Env,
    /// A folder on the disks' file system.
    pub scratch: &'a Path,
    /// From where costs count.
    pub mark: &'a Mark<'a>,
    /// The wish to end.
    pub stop: &'a Stop,
}

/// This machine.
pub struct Here<'a> {
    disk: &'a Disk<'a>,
    settings: &'a Settings,
    path: String,
    target: Target,
    limit: Duration,
}

impl<'a> Here<'a> {
    /// With that disk, which must be one of this machine's.
    pub fn new(disk: &'a Disk<'a>, settings: &'a Settings) -> Result<Here<'a>> {
        let path = match disk.access {
            Access::Ubd(_) | Access::Qemu { .. } | Access::QemuOwn(_) => {
                return Err(Error::Plan("a disk of a guest's is not one of the host's".into()));
            }
            Access::File(path) | Access::Block(path) => path.display().to_string(),
            _ => String::new(),
        };
        let target = match disk.access {
            Access::Nbd { uri, .. } => Target::Nbd(uri.clone()),
            Access::Rbd { conf } => Target::Rbd { conf: conf.clone(), image: IMAGE },
            _ => Target::Path(path.clone()),
        };
        let limit = Duration::from_secs(60) + 2 * (settings.run + settings.ramp);
        Ok(Here { disk, settings, path, target, limit })
    }

    fn load(&self, args: Vec<String>) -> Result<Measured> {
        let mut command = Command::new(&self.disk.env.lab);
        command.args(args);
        load::parse(&process::run(command, self.limit, self.disk.stop)?.stdout)
    }
}

impl Machine for Here<'_> {
    fn settings(&self) -> &Settings {
        self.settings
    }

    fn memory(&self) -> u64 {
        crate::host::memory()
    }

    fn disk(&self) -> &str {
        &self.path
    }

    fn target(&self) -> Target {
        self.target.clone()
    }

    fn job(&self, job: Job) -> Result<Measured> {
        match self.disk.access {
            Access::VhostUser { socket } => self.load(load::args(job, socket, self.settings)),
            Access::Native(file) => self.load(load::native_args(job, file, self.settings)),
            _ => run_fio(job, &self.target, self.settings, self.limit, self.disk.stop),
        }
    }

    fn job_file(&self, text: &str) -> Result<String> {
        let file = self.disk.scratch.join("job.fio");
        std::fs::write(&file, text).map_err(Error::file("write", &file))?;
        let mut command = Command::new("fio");
        command.arg("--output-format=json").arg(&file);
        Ok(process::run(command, LONGEST, self.disk.stop)?.stdout)
    }

    fn logged(&self, words: &dyn Fn(&str) -> Vec<String>) -> Result<Logged> {
        let log = self.disk.scratch.join("rated").display().to_string();
        let mut command = Command::new("fio");
        command.args(words(&log));
        let json = process::run(command, self.limit, self.disk.stop)?.stdout;
        let file = PathBuf::from(rated::log_file(&log));
        let log = std::fs::read_to_string(&file).map_err(Error::file("read", &file))?;
        Ok(Logged { json, log, ahead_ms: 0.0 })
    }

    fn dd(&self, words: &[String], _: Option<u64>) -> Result<String> {
        let mut command = Command::new("dd");
        command.args(words);
        Ok(process::run(command, self.limit, self.disk.stop)?.stderr)
    }

    fn script(&self, script: &str) -> Result<String> {
        Ok(process::run(shell(script), LONG, self.disk.stop)?.stdout)
    }

    fn files(&self, work: &mut dyn FnMut(&dyn Files) -> Result<Measured>) -> Result<Measured> {
        let (scratch, stop) = (self.disk.scratch, self.disk.stop);
        if let Access::Block(device) = self.disk.access {
            let mounted = Mounted::make(device, scratch, stop)?;
            self.disk.mark.begin();
            let dir = mounted.path().display().to_string();
            let measured = work(&Folder { here: self, dir, mounted: Some(&mounted) })?;
            mounted.unmount()?;
            return Ok(measured);
        }
        let dir = tempfile::Builder::new()
            .prefix("files-")
            .tempdir_in(scratch)
            .map_err(Error::file("make a folder in", scratch))?;
        work(&Folder { here: self, dir: dir.path().display().to_string(), mounted: None })
    }

    fn start(&self) -> Result<Measured> {
        let Access::Origin { url, start, sockets } = self.disk.access else {
            return Err(Error::Plan("only an image behind HTTP is started from".into()));
        };
        let source = start::Source { url, start: *start, sockets, scratch: self.disk.scratch };
        start::run(&source, self.settings, self.disk.env, self.disk.stop)
    }
}

/// A folder for files, on a device of its own or on this machine's own file system.
struct Folder<'a> {
    here: &'a Here<'a>,
    dir: String,
    mounted: Option<&'a Mounted>,
}

impl Files for Folder<'_> {
    fn dir(&self) -> &str {
        &self.dir
    }

    fn run(&self, tool: Tool, words: &[String]) -> Result<String> {
        let disk = self.here.disk;
        let program = match tool {
            Tool::Bonnie => process::find("bonnie++").unwrap_or_else(|| "bonnie++".into()),
            Tool::Own => disk.env.lab.clone(),
        };
        let mut command = Command::new(program);
        command.args(words);
        Ok(process::run(command, LONG, disk.stop)?.stdout)
    }

    fn settle(&self) -> Result<()> {
        Ok(())
    }

    fn cold(&self) -> Result<()> {
        // What is on a device of its own leaves the cache with its file system; the rest by the kernel's switch.
        self.mounted.map_or(Ok(()), |mounted| mounted.again(self.here.disk.stop))?;
        rustix::fs::sync();
        let caches = Path::new("/proc/sys/vm/drop_caches");
        std::fs::write(caches, "3").map_err(Error::file("write 3 to", caches))?;
        self.here.disk.mark.begin();
        Ok(())
    }

    fn timed(&self, command: &str) -> Result<(String, f64)> {
        let clock = Instant::now();
        let said = process::run(shell(command), LONG, self.here.disk.stop)?.stderr;
        Ok((said, clock.elapsed().as_secs_f64()))
    }
}

fn shell(script: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", script]);
    command
}

/// Runs one of fio's jobs.
pub fn run_fio(
    job: Job,
    target: &Target,
    settings: &Settings,
    limit: Duration,
    stop: &Stop,
) -> Result<Measured> {
    let mut command = Command::new("fio");
    command.args(fio::args(job, target, settings)).args(fio::clock());
    if let Target::Rbd { conf, .. } = target {
        command.env("CEPH_CONF", conf);
    }
    fio::parse(&process::run(command, limit, stop)?.stdout, job, settings)
}

/// An ext4 on a block device, mounted; unmounted when it is dropped.
#[derive(Debug)]
pub struct Mounted {
    device: PathBuf,
    at: Option<tempfile::TempDir>,
}

impl Mounted {
    /// Makes the file system without discarding (the disk stays written) and without work left for later.
    pub fn make(device: &Path, scratch: &Path, stop: &Stop) -> Result<Mounted> {
        let mut command =
            Command::new(process::find("mkfs.ext4").unwrap_or_else(|| "mkfs.ext4".into()));
        command
            .args(["-q", "-F", "-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=0"])
            .arg(device);
        process::run(command, Duration::from_secs(120), stop)?;
        let at = tempfile::Builder::new()
            .prefix("mount-")
            .tempdir_in(scratch)
            .map_err(Error::file("make a folder in", scratch))?;
        process::run_short(
            "mount",
            ["-t".as_ref(), "ext4".as_ref(), device.as_os_str(), at.path().as_os_str()],
            stop,
        )?;
        Ok(Mounted { device: device.to_owned(), at: Some(at) })
    }

    /// Unmounts and mounts again: nothing of it is in the page cache any more.
    fn again(&self, stop: &Stop) -> Result<()> {
        if let Some(at) = &self.at {
            unmount(at)?;
            let device = self.device.as_os_str();
            process::run_short(
                "mount",
                ["-t".as_ref(), "ext4".as_ref(), device, at.path().as_os_str()],
                stop,
            )?;
        }
        Ok(())
    }

    /// Where.
    pub fn path(&self) -> &Path {
        self.at.as_ref().map_or(Path::new("/nonexistent"), tempfile::TempDir::path)
    }

    /// Unmounts it and says when that fails.
    pub fn unmount(mut self) -> Result<()> {
        self.at.take().map_or(Ok(()), |at| unmount(&at))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if let Some(at) = self.at.take() {
            if unmount(&at).is_err() {
                // Removing the folder now would remove what is mounted there.
                let _ = at.keep();
            }
        }
    }
}

/// Unmounts, with a few tries: a program that was just killed may hold a file for a moment.
fn unmount(at: &tempfile::TempDir) -> Result<()> {
    let mut last = Ok(());
    for _ in 0..20 {
        match process::run_short("umount", [at.path()], &Stop::default()) {
            Ok(_) => return Ok(()),
            Err(error) => last = Err(error),
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    last
}
