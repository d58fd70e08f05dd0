//! Several queues of one simulated disk, on one thread.

use ringtap_io::Tasks;

use crate::{Disk, is_power_cut};

/// Turn all in turn until no task is left or the power is cut. A queue whose tasks wait for those of another
/// has its turn, and waits for nothing.
///
/// # Panics
/// Where a reactor fails other than by a cut, or tasks are left that nobody wakes.
pub fn turn_all(disk: &Disk, all: &mut [Tasks]) {
    while all.iter().any(|tasks| tasks.count() > 0) && !disk.is_cut() {
        let mut goes_on = false;
        for tasks in &mut *all {
            goes_on |= tasks.has_work();
            tasks.run_ready();
            // What nobody of its own waits for, somebody of another queue may.
            if tasks.count() > 0 || tasks.io().in_flight() > 0 {
                let waits = tasks.io().in_flight() > 0;
                goes_on |= waits || tasks.has_work();
                if let Err(error) = tasks.turn(waits) {
                    assert!(is_power_cut(&error), "{error}");
                }
            }
        }
        let left = all.iter().map(Tasks::count).sum::<usize>();
        assert!(goes_on || left == 0 || disk.is_cut(), "{left} tasks wait and nobody wakes them");
    }
}
