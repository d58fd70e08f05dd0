//! CPU time of a server: all threads it has and had, io_uring's workers among them, and its
//! children.
//!
//! Read from the process's CPU clock, which counts nanoseconds (`/proc/PID/stat` counts ticks of
//! 10 ms) and keeps what threads used that are gone. Work that the kernel does elsewhere for the
//! server, in its own threads or in interrupts, is in neither.

use anyhow::{Context, Result};
use std::fs;
use std::time::Duration;

/// CPU time, user and system, of `pid`, its living descendants, and their reaped children.
pub fn of_tree(pid: u32) -> Result<Duration> {
    let mut sum = of_process(pid)? + of_reaped_children(pid)?;
    for child in children(pid) {
        // A child may be gone by now; then its parent's account has it.
        sum += of_tree(child).unwrap_or_default();
    }
    Ok(sum)
}

/// CPU time of one process, of all its threads, living or gone.
pub fn of_process(pid: u32) -> Result<Duration> {
    let mut clock = 0;
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes one clock id to `clock`.
    let found = unsafe { libc::clock_getcpuclockid(pid as libc::pid_t, &mut clock) };
    if found != 0 {
        let error = std::io::Error::from_raw_os_error(found);
        return Err(error).with_context(|| format!("cannot find the CPU clock of process {pid}"));
    }
    // SAFETY: writes one timespec to `time`.
    if unsafe { libc::clock_gettime(clock, &mut time) } != 0 {
        let error = std::io::Error::last_os_error();
        return Err(error).with_context(|| format!("cannot read the CPU clock of process {pid}"));
    }
    Ok(Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
}

fn children(pid: u32) -> Vec<u32> {
    let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else {
        return Vec::new();
    };
    tasks
        .flatten()
        .filter_map(|task| fs::read_to_string(task.path().join("children")).ok())
        .flat_map(|list| list.split_whitespace().flat_map(str::parse).collect::<Vec<u32>>())
        .collect()
}

/// CPU time of the children of `pid` that have ended and been waited for, to a tick of 10 ms.
pub fn of_reaped_children(pid: u32) -> Result<Duration> {
    let path = format!("/proc/{pid}/stat");
    let stat = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    // Fields 16 and 17. The name in field 2 may hold spaces and brackets.
    let fields = stat.rsplit(") ").next().unwrap_or_default();
    let ticks: u64 = fields.split(' ').skip(13).take(2).flat_map(str::parse::<u64>).sum();
    Ok(Duration::from_secs_f64(ticks as f64 / rustix::param::clock_ticks_per_second() as f64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn counts_threads_that_are_gone() {
        let before = of_process(std::process::id()).unwrap();
        std::thread::spawn(|| {
            // By its own clock, not the wall's: a busy machine may hardly let it run.
            let clock = rustix::time::ClockId::ThreadCPUTime;
            while rustix::time::clock_gettime(clock).tv_nsec < 60_000_000 {
                std::hint::spin_loop();
            }
        })
        .join()
        .unwrap();
        let used = of_process(std::process::id()).unwrap() - before;
        assert!(used >= Duration::from_millis(60), "{used:?}");
    }

    #[test]
    fn counts_a_server_that_ended_by_itself() {
        let script = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; echo done";
        let mut child = Command::new("sh")
            .args(["-c", script])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut text = String::new();
        std::io::Read::read_to_string(child.stdout.as_mut().unwrap(), &mut text).unwrap();
        // Ended, not waited for.
        std::thread::sleep(Duration::from_millis(50));
        let used = of_tree(child.id()).unwrap();
        child.wait().unwrap();
        assert!(used > Duration::from_millis(20), "{used:?}");
    }

    #[test]
    fn counts_children_alive_and_reaped() {
        let script = "sh -c 'i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done'; echo done; read x";
        let mut child = Command::new("sh")
            .args(["-c", script])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = [0; 4];
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut line).unwrap();
        let tree = of_tree(child.id()).unwrap();
        let own = of_process(child.id()).unwrap();
        drop(child.stdin.take());
        child.wait().unwrap();
        assert!(tree > own + Duration::from_millis(20), "{tree:?} against {own:?}");
    }
}
