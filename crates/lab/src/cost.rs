//! CPU time of servers, load generators and the whole machine, in seconds.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

/// The CPU time of every process of this machine at one moment, by one clock: what is a part of it is never more than all.
/// In nanoseconds where the kernel lets, not in /proc's ticks of 10 ms.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    processes: HashMap<u32, Process>,
}

#[derive(Clone, Copy, Debug)]
struct Process {
    parent: u32,
    own: f64,
    reaped: f64,
}

impl Snapshot {
    /// Reads it.
    pub fn read() -> Snapshot {
        let Ok(entries) = fs::read_dir("/proc") else { return Snapshot::default() };
        let per_tick = 1.0 / rustix::param::clock_ticks_per_second() as f64;
        let me = std::process::id();
        let read = |pid: u32, path: &Path| {
            let stat = Stat::parse(&fs::read_to_string(path.join("stat")).ok()?)?;
            let own = clock_seconds(pid).unwrap_or(stat.own as f64 * per_tick);
            let (parent, reaped) = (stat.parent, stat.reaped as f64 * per_tick);
            // Of this process's own children the kernel says it more finely.
            let reaped = if pid == me { reaped_seconds() } else { reaped };
            Some((pid, Process { parent, own, reaped }))
        };
        let processes = entries
            .flatten()
            .filter_map(|entry| read(entry.file_name().to_str()?.parse().ok()?, &entry.path()));
        Snapshot { processes: processes.collect() }
    }

    /// CPU seconds so far of process `pid` and all its children, living and reaped. 0 when it is gone.
    ///
    /// io_uring's worker threads are in it: they belong to the process. What the kernel does for a loop device is done by
    /// kernel threads of their own and is **not**.
    pub fn tree(&self, pid: u32) -> f64 {
        let (mut total, mut todo) = (0.0, vec![pid]);
        while let Some(pid) = todo.pop() {
            total += self.processes.get(&pid).map_or(0.0, |of| of.own + of.reaped);
            let children = self.processes.iter().filter(|(_, of)| of.parent == pid);
            todo.extend(children.map(|(child, _)| *child));
        }
        total
    }

    /// CPU seconds of all processes since `before`: of those that ended, as far as somebody waited for them.
    pub fn machine_since(&self, before: &Snapshot) -> f64 {
        let total = |of: &Process| of.own + of.reaped;
        // What had been spent by one that has ended since is its parent's now, and was spent before.
        let mut inherited: HashMap<u32, f64> = HashMap::new();
        for (_, gone) in before.processes.iter().filter(|(pid, _)| !self.has(**pid)) {
            *inherited.entry(gone.parent).or_default() += total(gone);
        }
        let since = |(pid, now): (&u32, &Process)| {
            let then = before.processes.get(pid).map_or(0.0, total);
            (total(now) - then - inherited.get(pid).copied().unwrap_or(0.0)).max(0.0)
        };
        self.processes.iter().map(since).sum()
    }

    /// The same of kernel threads alone: what loop devices, file systems and block layers do for others.
    pub fn kernel_since(&self, before: &Snapshot) -> f64 {
        let then = |pid: &u32| before.processes.get(pid).map_or(0.0, |of| of.own);
        // All are children of kthreadd, which is process 2 (in a PID namespace of one's own there are none).
        let of = self.processes.iter().filter(|(_, of)| of.parent == 2);
        of.map(|(pid, of)| (of.own - then(pid)).max(0.0)).sum()
    }

    fn has(&self, pid: u32) -> bool {
        self.processes.contains_key(&pid)
    }
}

/// CPU seconds so far by process `pid` and all its children, living and reaped.
pub fn tree_cpu_seconds(pid: u32) -> f64 {
    Snapshot::read().tree(pid)
}

/// CPU seconds of the children of this process that have ended and were waited for.
#[allow(unsafe_code)]
pub fn reaped_seconds() -> f64 {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the call writes to the local that it is given a pointer to, of which all bytes zero is a value.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_CHILDREN, usage.as_mut_ptr());
        usage.assume_init()
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 * 1e-6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

/// Seconds that a hypervisor below has taken from this machine's processors, since it started.
pub fn steal_seconds() -> f64 {
    let text = fs::read_to_string("/proc/stat").unwrap_or_default();
    let steal = text
        .lines()
        .next()
        .and_then(|line| line.split_whitespace().nth(8))
        .and_then(|field| field.parse::<u64>().ok());
    steal.unwrap_or(0) as f64 / rustix::param::clock_ticks_per_second() as f64
}

/// CPU seconds so far of each thread of a process, by thread id. Empty when it is gone.
pub fn thread_seconds(pid: u32) -> HashMap<u32, f64> {
    let Ok(entries) = fs::read_dir(format!("/proc/{pid}/task")) else { return HashMap::new() };
    entries
        .flatten()
        .filter_map(|entry| {
            let id = entry.file_name().to_str()?.parse().ok()?;
            // Nanoseconds on a processor are the first field.
            let text = fs::read_to_string(entry.path().join("schedstat")).ok()?;
            let nanoseconds: u64 = text.split_whitespace().next()?.parse().ok()?;
            Some((id, nanoseconds as f64 * 1e-9))
        })
        .collect()
}

/// What the scheduler has given to and kept from a process and its children, in seconds so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Schedule {
    /// On a processor.
    pub ran: f64,
    /// Ready to run, without a processor.
    pub waited: f64,
}

/// The schedule of all threads of a process and of its children.
pub fn schedule(pid: u32) -> Schedule {
    let mut sum = Schedule::default();
    for pid in family(pid) {
        let Ok(entries) = fs::read_dir(format!("/proc/{pid}/task")) else { continue };
        for entry in entries.flatten() {
            let text = fs::read_to_string(entry.path().join("schedstat")).unwrap_or_default();
            let mut fields = text.split_whitespace().map(|field| field.parse().unwrap_or(0u64));
            sum.ran += fields.next().unwrap_or(0) as f64 * 1e-9;
            sum.waited += fields.next().unwrap_or(0) as f64 * 1e-9;
        }
    }
    sum
}

/// Bytes that a process and its children have had fetched from and sent to storage so far: page caches that answered
/// are not in it. `None` where it may not be read.
pub fn storage_bytes(pid: u32) -> Option<(f64, f64)> {
    family(pid)
        .into_iter()
        .filter_map(|pid| storage(&fs::read_to_string(format!("/proc/{pid}/io")).ok()?))
        .reduce(|a, b| (a.0 + b.0, a.1 + b.1))
}

/// Of /proc/PID/io: read_bytes and write_bytes.
fn storage(text: &str) -> Option<(f64, f64)> {
    let field = |name: &str| -> Option<f64> {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().parse().ok()
    };
    Some((field("read_bytes:")?, field("write_bytes:")?))
}

/// A process and its children, one generation.
fn family(pid: u32) -> Vec<u32> {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    let children = text.split_whitespace().filter_map(|pid| pid.parse().ok());
    std::iter::once(pid).chain(children).collect()
}

/// Seconds so far in which some task of this machine waited for memory (pressure stall information); `None` where the
/// kernel does not count it.
pub fn memory_stall_seconds() -> Option<f64> {
    memory_stall(&fs::read_to_string("/proc/pressure/memory").ok()?)
}

/// Of `some avg10=0.00 avg60=0.00 avg300=0.00 total=MICROSECONDS`.
fn memory_stall(text: &str) -> Option<f64> {
    let some = text.lines().find(|line| line.starts_with("some "))?;
    let total: u64 = some.split("total=").nth(1)?.trim().parse().ok()?;
    Some(total as f64 * 1e-6)
}

struct Stat {
    parent: u32,
    own: u64,
    reaped: u64,
}

impl Stat {
    /// Of /proc/PID/stat: field 4 (parent), 14+15 (own time), 16+17 (time of reaped children), in clock ticks.
    fn parse(text: &str) -> Option<Stat> {
        // The command's name may hold spaces and brackets: count from the last closing one.
        let rest = &text[text.rfind(')')? + 1..];
        let fields: Vec<&str> = rest.split_whitespace().collect();
        let number = |index: usize| fields.get(index - 3)?.parse::<u64>().ok();
        Some(Stat {
            parent: u32::try_from(number(4)?).ok()?,
            own: number(14)? + number(15)?,
            reaped: number(16)? + number(17)?,
        })
    }
}

/// The CPU clock of a living process, all threads, in nanoseconds where /proc counts in ticks of 10 ms.
#[allow(unsafe_code)]
fn clock_seconds(pid: u32) -> Option<f64> {
    let pid = libc::pid_t::try_from(pid).ok()?;
    let mut clock: libc::clockid_t = 0;
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: both calls only write to the two locals that they are given a pointer to.
    let answered = unsafe {
        libc::clock_getcpuclockid(pid, &raw mut clock) == 0
            && libc::clock_gettime(clock, &raw mut time) == 0
    };
    answered.then_some(time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_brackets_does_not_shift_the_fields() {
        let text = "42 (a) b (c)) S 7 42 42 0 -1 4194560 1 2 3 4 11 22 33 44 20 0 1 0 9 9 9";
        let stat = Stat::parse(text).unwrap();
        assert_eq!((stat.parent, stat.own, stat.reaped), (7, 33, 77));
    }

    #[test]
    fn what_went_to_storage_is_not_what_was_written_to_the_cache() {
        let text = "rchar: 323934931\nwchar: 323929600\nsyscr: 632687\nsyscw: 632675\nread_bytes: 4096\nwrite_bytes: 323932160\ncancelled_write_bytes: 0\n";
        assert_eq!(storage(text), Some((4096.0, 323_932_160.0)));
        assert_eq!(storage("rchar: 1\n"), None);
        assert!(storage_bytes(std::process::id()).is_some());
        assert!(schedule(std::process::id()).ran > 0.0);
        assert_eq!(schedule(u32::MAX), Schedule::default());
    }

    #[test]
    fn memory_pressure_as_the_kernel_prints_it() {
        let text = "some avg10=0.00 avg60=0.00 avg300=0.00 total=1500000\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=7\n";
        assert_eq!(memory_stall(text), Some(1.5));
        assert_eq!(memory_stall(""), None);
    }

    fn of(list: &[(u32, u32, f64, f64)]) -> Snapshot {
        let process = |&(pid, parent, own, reaped)| (pid, Process { parent, own, reaped });
        Snapshot { processes: list.iter().map(process).collect() }
    }

    #[test]
    fn all_that_ran_is_counted_once() {
        // A shell that waited for one child and has another; a server; a kernel thread.
        let before = of(&[(7, 1, 1.0, 0.0), (8, 7, 3.0, 0.0), (5, 1, 9.0, 0.0), (40, 2, 2.0, 0.0)]);
        let after =
            of(&[(7, 1, 1.5, 3.25), (9, 7, 0.5, 0.0), (5, 1, 10.0, 0.0), (40, 2, 2.5, 0.0)]);
        assert_eq!(after.machine_since(&before), 0.5 + 0.25 + 0.5 + 1.0 + 0.5);
        assert_eq!(after.kernel_since(&before), 0.5);
        assert_eq!((after.tree(7), before.tree(7)), (5.25, 4.0));
        // One that nobody waited for takes what it spent with it, and nothing of the others'.
        assert_eq!(of(&[(5, 1, 9.5, 0.0)]).machine_since(&before), 0.5);
    }

    #[test]
    fn the_machine_is_no_less_than_its_part() {
        let before = Snapshot::read();
        let reaped = reaped_seconds();
        let script = "n=0; while [ $n -lt 100000 ]; do n=$((n + 1)); done";
        let shell = std::process::Command::new("sh").args(["-c", script]).status();
        assert!(shell.unwrap().success());
        let (part, after) = (reaped_seconds() - reaped, Snapshot::read());
        let all = after.machine_since(&before);
        assert!(part > 0.0 && all >= part, "{all} of the machine, {part} of it for a shell");
    }

    #[test]
    fn a_busy_child_is_counted_with_its_parent() {
        let mut child = std::process::Command::new("timeout")
            .args(["60", "sh", "-c", "sh -c 'while :; do :; done'; sleep 5"])
            .spawn()
            .unwrap();
        let until = std::time::Instant::now() + std::time::Duration::from_secs(50);
        let mut seen = 0.0;
        while std::time::Instant::now() < until && seen < 0.05 {
            std::thread::sleep(std::time::Duration::from_millis(20));
            seen = tree_cpu_seconds(child.id());
        }
        // `timeout` leads a process group of its own.
        let group = rustix::process::Pid::from_child(&child);
        rustix::process::kill_process_group(group, rustix::process::Signal::KILL).unwrap();
        child.wait().unwrap();
        assert!(seen >= 0.05, "the loop of the grandchild took {seen} s");
    }
}
