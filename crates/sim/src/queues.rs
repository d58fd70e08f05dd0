//! Queues of one simulated disk, on one thread.

use ringtap_io::{Io, Tasks};

use crate::{Ask, Device, Disk, SECTOR, Sim, is_power_cut};

/// Queues of a disk, each of whose orders follows from the seed in its own way.
pub fn queues(disk: &Disk, seed: u64, count: u64) -> Vec<Tasks> {
    (0..count).map(|queue| Tasks::new(Box::new(Sim::new(disk, seed ^ (queue << 32))))).collect()
}

/// All that a device of so many sectors shows.
pub async fn read_all<D: Device>(io: &Io, device: &D, sectors: u64) -> Result<Vec<u8>, D::Error> {
    let buffer = io.buffer(sectors as usize * SECTOR).expect("memory");
    device.serve(io, &Ask::Read(0..sectors), buffer.mem()).await?;
    Ok(buffer.bytes().to_vec())
}

/// Have each queue hear of a power cut, before its tasks are dropped.
pub fn hear_of_cut(disk: &Disk, all: &mut [Tasks]) {
    for tasks in all {
        if disk.is_cut() {
            let _told_before: std::io::Result<()> = tasks.turn(false);
        }
    }
}

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
