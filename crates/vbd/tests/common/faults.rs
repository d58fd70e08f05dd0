//! Errors that jobs meet, what they are told to do about them, and who sees to them.

use ringtap_io::Io;
use ringtap_sim::Disk;
use ringtap_vbd::{Job, OnError, OnErrors, Phase};

/// What a job is told.
pub fn any(rng: &mut fastrand::Rng) -> OnError {
    let all = [OnError::Report, OnError::Ignore, OnError::Stop, OnError::StopWhereFull];
    all[rng.usize(0..all.len())]
}

/// Of a job that copies.
#[allow(dead_code)]
pub fn either(rng: &mut fastrand::Rng) -> OnErrors {
    OnErrors { source: any(rng), target: any(rng) }
}

/// All works again, and there is room.
pub fn mend(disk: &Disk) {
    disk.mend();
    disk.limit_space(u64::MAX);
}

/// Resume a job whenever it pauses, which is told; after so many turns all is mended.
pub fn see_to(io: &Io, disk: &Disk, job: &Job, turns: u64, resumed: impl Fn() + 'static) {
    let (own, disk, job) = (io.clone(), disk.clone(), job.clone());
    io.spawn(async move {
        let mut turn = 0;
        while !matches!(job.progress().phase, Phase::Done | Phase::Failed) && !disk.is_cut() {
            if turn == turns {
                mend(&disk);
            }
            turn += 1;
            if job.progress().paused {
                resumed();
                job.resume();
            }
            own.next_turn().await;
        }
    });
}
