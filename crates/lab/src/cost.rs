//! CPU time of servers, load generators and the whole machine, in seconds.

use std::collections::HashMap;
use std::fs;

/// CPU seconds used so far by process `pid` and all its children, living and reaped. 0 when it is gone.
///
/// User and system time are counted, and io_uring's worker threads with them: they belong to the process. What the
/// kernel does for a loop device is done by kernel threads of their own and is **not** in here; [`machine_cpu_seconds`]
/// has it.
pub fn tree_cpu_seconds(pid: u32) -> f64 {
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    let mut stats: HashMap<u32, Stat> = HashMap::new();
    let Ok(entries) = fs::read_dir("/proc") else { return 0.0 };
    for entry in entries.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let Ok(text) = fs::read_to_string(entry.path().join("stat")) else { continue };
        if let Some(stat) = Stat::parse(&text) {
            children.entry(stat.parent).or_default().push(pid);
            stats.insert(pid, stat);
        }
    }
    let per_tick = 1.0 / rustix::param::clock_ticks_per_second() as f64;
    let mut total = 0.0;
    let mut todo = vec![pid];
    while let Some(pid) = todo.pop() {
        if let Some(stat) = stats.get(&pid) {
            total += clock_seconds(pid).unwrap_or(stat.own as f64 * per_tick)
                + stat.reaped as f64 * per_tick;
        }
        todo.extend(children.remove(&pid).unwrap_or_default());
    }
    total
}

/// CPU seconds of the children of this process that have ended and were waited for, in steps of 10 ms.
pub fn reaped_seconds() -> f64 {
    let text = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    Stat::parse(&text)
        .map_or(0.0, |stat| stat.reaped as f64 / rustix::param::clock_ticks_per_second() as f64)
}

/// CPU seconds that the whole machine has spent on anything but idling, since it started: every process, kernel
/// threads, interrupts. Other programs that run beside the lab are in it too.
pub fn machine_cpu_seconds() -> f64 {
    let text = fs::read_to_string("/proc/stat").unwrap_or_default();
    busy_ticks(&text).unwrap_or(0) as f64 / rustix::param::clock_ticks_per_second() as f64
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

/// CPU seconds so far of each kernel thread, by process id: what loop devices, file systems and block layers do for
/// others. (io_uring's workers belong to their process.)
pub fn kernel_thread_seconds() -> HashMap<u32, f64> {
    let Ok(entries) = fs::read_dir("/proc") else { return HashMap::new() };
    entries
        .flatten()
        .filter_map(|entry| {
            let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
            let stat = Stat::parse(&fs::read_to_string(entry.path().join("stat")).ok()?)?;
            // All are children of kthreadd, which is process 2 (in a PID namespace of one's own there are none).
            if stat.parent != 2 {
                return None;
            }
            let text = fs::read_to_string(entry.path().join("schedstat")).ok()?;
            let nanoseconds: u64 = text.split_whitespace().next()?.parse().ok()?;
            Some((pid, nanoseconds as f64 * 1e-9))
        })
        .collect()
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

/// user, nice, system, irq and softirq of the first line of /proc/stat. (Guest time is within user; steal is not ours.)
fn busy_ticks(text: &str) -> Option<u64> {
    let fields: Vec<u64> = text
        .lines()
        .next()?
        .strip_prefix("cpu ")?
        .split_whitespace()
        .filter_map(|f| f.parse().ok())
        .collect();
    [0, 1, 2, 5, 6].iter().map(|&i| fields.get(i).copied()).sum()
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
    fn idle_iowait_and_steal_are_not_busy() {
        assert_eq!(
            busy_ticks("cpu  1 10 100 5000 700 1000 10000 9 0 0\ncpu0 1 1 1 1"),
            Some(11111)
        );
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

    #[test]
    fn kernel_threads_are_no_process_of_ours() {
        let threads = kernel_thread_seconds();
        assert!(!threads.contains_key(&std::process::id()));
        let kernel =
            |pid: u32| fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|c| c.is_empty());
        assert!(
            threads
                .keys()
                .filter(|pid| std::path::Path::new(&format!("/proc/{pid}")).exists())
                .all(|pid| kernel(*pid))
        );
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
