//! Programs of this machine, each in a process group of its own that does not outlive who started it: the guests' monitors and
//! tools here, and all that the lab runs.

use std::fs;
use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{
    Pid, Signal, WaitOptions, kill_process_group, test_kill_process_group, waitpgid,
};

use crate::error::{Error, Result, io as failed, tail};

/// How often who waits looks again.
const TICK: Duration = Duration::from_millis(5);
/// How long what was killed may take to be gone: a busy machine delays it, and who waits for a disk whose server is dead ends
/// when that disk does.
const GONE: Duration = Duration::from_secs(20);

/// A child that leads a process group of its own; the whole group is killed when this is dropped.
#[derive(Debug)]
pub struct Group {
    child: Child,
    ended: Option<ExitStatus>,
    killed: bool,
}

impl Group {
    /// Starts the command as the leader of a new group.
    ///
    /// # Errors
    /// What the system says of a program that does not start.
    pub fn spawn(command: &mut Command) -> io::Result<Group> {
        let child = command.process_group(0).spawn()?;
        Ok(Group { child, ended: None, killed: false })
    }

    /// The leader's process id, which is the group's.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The leader's stdin, where that is a pipe and was not taken yet.
    pub fn stdin(&mut self) -> Option<ChildStdin> {
        self.child.stdin.take()
    }

    /// The leader's stdout, likewise.
    pub fn stdout(&mut self) -> Option<ChildStdout> {
        self.child.stdout.take()
    }

    /// How the leader ended, if it has. What it left of its group is killed then.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        if self.ended.is_none() {
            self.ended = self.child.try_wait().ok().flatten();
            if self.ended.is_some() {
                // The group's id stays taken while a member lives, and is a stranger's some time after the last one.
                self.signal(Signal::KILL);
            }
        }
        self.ended
    }

    /// Waits for the leader to end by itself.
    pub fn wait(&mut self, limit: Duration) -> Option<ExitStatus> {
        let until = Instant::now() + limit;
        loop {
            if self.ended().is_some() || Instant::now() >= until {
                return self.ended;
            }
            thread::sleep(TICK);
        }
    }

    /// Asks every process of the group to end (SIGTERM).
    pub fn terminate(&mut self) {
        if self.ended().is_none() {
            self.signal(Signal::TERM);
        }
    }

    /// Kills every process of the group and waits until none is left, though not for ever; says whether the leader is gone.
    pub fn kill(&mut self) -> bool {
        if !self.killed {
            self.killed = true;
            if self.ended().is_none() {
                self.signal(Signal::KILL);
            }
            let until = Instant::now() + GONE;
            self.wait(GONE);
            // Orphans are gone when init has reaped them, or this process, where they are its own.
            while let Some(group) = self.group().filter(|_| Instant::now() < until) {
                let _ = waitpgid(group, WaitOptions::NOHANG);
                if test_kill_process_group(group).is_err() {
                    break;
                }
                thread::sleep(TICK);
            }
        }
        self.ended().is_some()
    }

    /// User and system time of all live processes of the group and of the children they waited for.
    pub fn cpu_time(&self) -> Duration {
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

    fn group(&self) -> Option<Pid> {
        i32::try_from(self.child.id()).ok().and_then(Pid::from_raw)
    }

    fn signal(&self, signal: Signal) {
        if let Some(group) = self.group() {
            // Fails where nobody is left.
            let _ = kill_process_group(group, signal);
        }
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

/// Why a program that was run is at its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It ended by itself.
    Itself(ExitStatus),
    /// It was killed when its time was over.
    Late,
    /// It was killed because that was wished.
    Stopped,
}

/// A program that was run to its end.
#[derive(Debug)]
pub struct Ran {
    /// How it came to it.
    pub end: End,
    /// What it printed to stdout; nothing where it could not be killed.
    pub stdout: Vec<u8>,
    /// The same of stderr.
    pub stderr: Vec<u8>,
}

/// Runs a program to its end, without input. It is killed when `limit` is over, or when `stop` says so.
///
/// # Errors
/// What the system says of a program that does not start.
pub fn run(command: &mut Command, limit: Duration, stop: impl Fn() -> bool) -> io::Result<Ran> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut group = Group::spawn(command)?;
    let stdout = read_all(group.child.stdout.take());
    let stderr = read_all(group.child.stderr.take());
    let until = Instant::now() + limit;
    let end = loop {
        if let Some(status) = group.ended() {
            break End::Itself(status);
        }
        if stop() {
            break End::Stopped;
        }
        if Instant::now() >= until {
            break End::Late;
        }
        thread::sleep(TICK);
    };
    // What cannot be killed keeps its pipes open.
    Ok(match group.kill() {
        true => Ran {
            end,
            stdout: stdout.join().unwrap_or_default(),
            stderr: stderr.join().unwrap_or_default(),
        },
        false => Ran { end, stdout: Vec::new(), stderr: Vec::new() },
    })
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

/// Runs a program of the host to its end; its stdout, or an error with its stderr.
pub(crate) fn run_tool(command: &mut Command, limit: Duration) -> Result<Vec<u8>> {
    let line = format!("{command:?}").replace('"', "");
    let program = PathBuf::from(command.get_program());
    let ran = run(command, limit, || false).map_err(failed("start", program))?;
    let outcome = match ran.end {
        End::Itself(status) if status.success() => return Ok(ran.stdout),
        End::Itself(status) => format!("ended with {status}"),
        End::Late | End::Stopped => format!("did not end within {} s", limit.as_secs_f32()),
    };
    let stderr = tail(&String::from_utf8_lossy(&ran.stderr), 5);
    Err(Error::Tool { command: line, outcome, stderr })
}

/// The file of a program, as the shell of root finds it by PATH.
pub fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let named = std::env::split_paths(&path).filter(|dir| !dir.as_os_str().is_empty());
    in_one_of(named.chain(["/usr/sbin", "/sbin", "/usr/local/sbin"].map(PathBuf::from)), program)
}

fn in_one_of(folders: impl IntoIterator<Item = PathBuf>, program: &str) -> Option<PathBuf> {
    folders.into_iter().map(|folder| folder.join(program)).find(|file| file.is_file())
}

/// Finds a program of the host, whatever PATH says.
///
/// # Errors
/// [`Error::Missing`] that names the Debian package.
pub(crate) fn find_program(name: &str, package: &str) -> Result<PathBuf> {
    let usual = ["/usr/local/bin", "/usr/bin", "/bin"].map(PathBuf::from);
    find(name).or_else(|| in_one_of(usual, name)).ok_or_else(|| Error::Missing {
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
    fn what_a_leader_leaves_of_its_group_goes_with_it() {
        let mut group = Group::spawn(Command::new("sh").args(["-c", "sleep 77 & exit 3"])).unwrap();
        let pid = Pid::from_raw(group.id() as i32).unwrap();
        let status = group.wait(Duration::from_secs(60)).expect("it ends at once");
        assert_eq!(status.code(), Some(3));
        assert!(group.kill() && test_kill_process_group(pid).is_err());
    }

    #[test]
    fn a_program_that_is_to_stop_is_killed_and_heard() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo began; echo why >&2; sleep 77"]);
        let begun = Instant::now();
        let after = || begun.elapsed() > Duration::from_secs(1);
        let ran = run(&mut command, Duration::from_secs(60), after).unwrap();
        assert_eq!(ran.end, End::Stopped);
        assert_eq!((&*ran.stdout, &*ran.stderr), (&b"began\n"[..], &b"why\n"[..]));
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
