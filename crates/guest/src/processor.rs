//! A processor of this machine for a guest that has one.
//!
//! User-Mode Linux runs its kernel and each of its processes as processes of the host that take turns, several times for
//! each system call in the guest. Where the host spreads them over its processors, each turn waits until an idle one has
//! woken, and a guest is several times slower, for as long as the host's scheduler leaves it so.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Guests that were given one.
static GIVEN: AtomicUsize = AtomicUsize::new(0);

/// Starts processes that stay on one of the processors that this thread may use: the next guest's on the next one. Where
/// the system does not let itself be told, they go where it puts them.
pub(crate) fn on_one<T>(start: impl FnOnce() -> T) -> T {
    let Ok(usual) = sched_getaffinity(None) else { return start() };
    let usable: Vec<usize> = (0..CpuSet::MAX_CPU).rev().filter(|cpu| usual.is_set(*cpu)).collect();
    let mut one = CpuSet::new();
    one.set(usable[GIVEN.fetch_add(1, Relaxed) % usable.len()]);
    // A process begins where the thread that starts it may run.
    let told = sched_setaffinity(None, &one);
    let started = start();
    if told.is_ok() {
        let _ = sched_setaffinity(None, &usual);
    }
    started
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn allowed() -> String {
        let output = Command::new("grep").args(["Cpus_allowed_list", "/proc/self/status"]).output();
        String::from_utf8(output.unwrap().stdout).unwrap()
    }

    #[test]
    fn guests_take_processors_in_turn_and_leave_the_caller_its_own() {
        let usual = allowed();
        let guests: Vec<String> = (0..3).map(|_| on_one(allowed)).collect();
        assert!(guests.iter().all(|list| !list.contains([',', '-'].as_slice())), "{guests:?}");
        assert_eq!(guests[0] != guests[1], usual.contains([',', '-'].as_slice()), "{guests:?}");
        assert_eq!(allowed(), usual);
    }
}
