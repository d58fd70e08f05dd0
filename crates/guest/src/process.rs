//! Processes of the host that never outlive who started them.

use std::fs;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group, test_kill_process_group};

use crate::error::{Error, Result, io, tail};

/// A child in a process group of its own; the whole group is killed when this is dropped.
#[derive(Debug)]
pub(crate) struct Group {
    child: Child,
    ended: Option<ExitStatus>,
}

impl Group {
    /// Starts the command as the leader of a new group.
    pub(crate) fn spawn(command: &mut Command) -> Result<Self> {
        let program = PathBuf::from(command.get_program());
        let child = command.process_group(0).spawn().map_err(io("start", program))?;
        Ok(Self { child, ended: None })
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// How the leader ended, if it has.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        if self.ended.is_none() {
            self.ended = self.child.try_wait().ok().flatten();
        }
        self.ended
    }

    /// Waits for the leader to end by itself.
    pub(crate) fn wait(&mut self, timeout: Duration) -> Option<ExitStatus> {
        let end = Instant::now() + timeout;
        loop {
            if let Some(status) = self.ended() {
                return Some(status);
            }
            if Instant::now() >= end {
                return None;
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Kills every process of the group and waits until none is left.
    pub(crate) fn kill(&mut self) {
        let Some(group) = Pid::from_raw(self.child.id() as i32) else { return };
        // The group's id stays taken while a member lives, so this cannot hit a stranger as long
        // as the leader has not been reaped; after that only while members are left.
        let _ = kill_process_group(group, Signal::KILL);
        if self.ended.is_none() {
            self.ended = self.child.wait().ok();
        }
        // Orphans are gone when init has reaped them, which a busy machine delays.
        let end = Instant::now() + Duration::from_secs(20);
        while test_kill_process_group(group).is_ok() && Instant::now() < end {
            let _ = kill_process_group(group, Signal::KILL);
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// User and system time of all live processes of the group and of the children they waited for.
    pub(crate) fn cpu_time(&self) -> Duration {
        let group = self.child.id().to_string();
        let ticks: u64 = fs::read_dir("/proc")
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| fs::read_to_string(entry.path().join("stat")).ok())
            .filter_map(|stat| group_ticks(&stat, &group))
            .sum();
        Duration::from_secs_f64(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The four CPU times of a `/proc/PID/stat` line when its process group is `group`.
fn group_ticks(stat: &str, group: &str) -> Option<u64> {
    // The name in parentheses may hold anything, so fields count from the last one: state is 3.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(2);
    if fields.next()? != group {
        return None;
    }
    let times = fields.skip(14 - 6).take(4);
    times.map(|f| f.parse::<u64>().ok()).sum()
}

/// Runs a program of the host to its end; its stdout, or an error with its stderr.
pub(crate) fn run_tool(command: &mut Command, timeout: Duration) -> Result<Vec<u8>> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let line = format!("{command:?}").replace('"', "");
    let mut group = Group::spawn(command)?;
    let out = read_all(group.child.stdout.take());
    let err = read_all(group.child.stderr.take());
    let status = group.wait(timeout);
    if status.is_none() {
        group.kill();
    }
    let stdout = out.join().unwrap_or_default();
    let stderr = String::from_utf8_lossy(&err.join().unwrap_or_default()).into_owned();
    let outcome = match status {
        Some(status) if status.success() => return Ok(stdout),
        Some(status) => format!("ended with {status}"),
        None => format!("did not end within {} s", timeout.as_secs_f32()),
    };
    Err(Error::Tool { command: line, outcome, stderr: tail(&stderr, 5) })
}

fn read_all<R: Read + Send + 'static>(from: Option<R>) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut data = Vec::new();
        if let Some(mut from) = from {
            // A pipe that breaks has said all it will say.
            let _ = from.read_to_end(&mut data);
        }
        data
    })
}

/// Finds a program of the host as the shell of root would.
///
/// # Errors
/// [`Error::Missing`] that names the Debian package.
pub(crate) fn find_program(name: &str, package: &str) -> Result<PathBuf> {
    let named = Path::new(name);
    if named.is_absolute() && named.is_file() {
        return Ok(named.to_path_buf());
    }
    let path = std::env::var("PATH").unwrap_or_default();
    let looked = format!("{path}:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
    looked
        .split(':')
        .filter(|dir| !dir.is_empty())
        .map(|dir| Path::new(dir).join(name))
        .find(|path| path.is_file())
        .ok_or_else(|| Error::Missing {
            what: format!("the program {name}"),
            looked: "PATH".into(),
            remedy: format!("`apt-get install {package}` brings it"),
        })
}

/// The Debian package that brings a program a guest commonly runs.
pub(crate) fn package_of(program: &str) -> &str {
    match program {
        "mke2fs" | "mkfs.ext4" | "e2fsck" | "resize2fs" => "e2fsprogs",
        "mkfs.xfs" | "xfs_repair" | "xfs_io" => "xfsprogs",
        "mkfs.btrfs" | "btrfs" => "btrfs-progs",
        "flock" | "losetup" | "blkdiscard" | "blockdev" | "lsblk" | "mount" | "umount" => {
            "util-linux"
        }
        "dd" | "sha256sum" | "sync" | "cp" | "stat" | "truncate" => "coreutils",
        "nbd-client" => "nbd-client",
        "dmsetup" => "dmsetup",
        "lvm" => "lvm2",
        "/bin/bash" => "bash",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn killing_a_group_takes_its_grandchildren() {
        let mut group =
            Group::spawn(Command::new("sh").args(["-c", "sleep 77 & sleep 77 & wait"])).unwrap();
        thread::sleep(Duration::from_millis(100));
        let pid = Pid::from_raw(group.id() as i32).unwrap();
        assert!(test_kill_process_group(pid).is_ok());
        group.kill();
        assert!(test_kill_process_group(pid).is_err());
    }

    #[test]
    fn cpu_time_of_a_busy_group_grows() {
        let group = Group::spawn(Command::new("sh").args(["-c", "while :; do :; done"])).unwrap();
        let end = Instant::now() + Duration::from_secs(20);
        while group.cpu_time() < Duration::from_millis(100) {
            assert!(Instant::now() < end, "{:?}", group.cpu_time());
            thread::sleep(Duration::from_millis(20));
        }
    }

    #[test]
    fn a_tool_that_hangs_is_killed() {
        let error =
            run_tool(Command::new("sleep").arg("77"), Duration::from_millis(50)).unwrap_err();
        assert!(error.to_string().contains("did not end within"), "{error}");
        let error = run_tool(Command::new("ls").arg("/no/such"), Duration::from_secs(20));
        assert!(error.unwrap_err().to_string().contains("/no/such"));
    }

    #[test]
    fn stat_lines_are_read_past_odd_names() {
        let stat = "7 (a) b) S 1 42 42 0 -1 4194560 1 0 0 0 10 20 30 40 20 0 1 0";
        assert_eq!(group_ticks(stat, "42"), Some(100));
        assert_eq!(group_ticks(stat, "43"), None);
    }
}
