//! bonnie++ in two guests at once, on a file system of each one's disk.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::inside::{PLACE, Shell, mount};
use super::pair::Pair;
use crate::error::{Error, Result};
use crate::stop::Stop;
use crate::workload::two::{self, LEAST_OVERLAP};
use crate::workload::two_bonnie::{self, LIMIT, Run};
use crate::workload::{Measured, Settings};

/// Each alone, and both at once, the other way round in every other round.
pub fn measure(round: u32, pair: &Pair<'_>, settings: &Settings, stop: &Stop) -> Result<Measured> {
    let (alone, both) = two::in_turn(round, |which| run(which, pair, settings, stop))?;
    let ([[a], [b]], [first, second]) = ([&alone[0][..], &alone[1]], &both[..]) else {
        return Err(Error::Output { what: "bonnie++ in two guests", found: "not two".into() });
    };
    two_bonnie::measured([a, b], [first, second], settings.size, LEAST_OVERLAP)
}

/// Runs bonnie++ in one guest or in both at one moment, each time on a new file system.
fn run(which: &[usize], pair: &Pair<'_>, settings: &Settings, stop: &Stop) -> Result<Vec<Run>> {
    (pair.ready)()?;
    let shells = pair.machines.map(|machine| Shell::new(machine, stop));
    for &at in which {
        shells[at].run(&format!("set -e\n{}sync", mount(pair.devices[at])), LIMIT)?;
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let moment = (now + pair.notice).as_secs_f64() * 1e3;
    let until = Instant::now() + LIMIT;
    let mut jobs = Vec::new();
    for &at in which {
        let alone = which.len() == 1;
        let at_moment = if alone { 0 } else { (moment + pair.ahead[at]).max(0.0) as u64 };
        let script = two_bonnie::script(PLACE, settings.size, at_moment);
        jobs.push(pair.machines[at].start(&script)?);
    }
    let mut runs = Vec::new();
    for (job, &at) in jobs.into_iter().zip(which) {
        while !job.is_done() && Instant::now() < until {
            stop.check()?;
            std::thread::sleep(Duration::from_millis(5));
        }
        let left = until.saturating_duration_since(Instant::now()) + Duration::from_secs(5);
        let output = job.wait(left).and_then(ringtap_guest::Output::success);
        runs.push(
            output.map_err(Error::from).and_then(|o| two_bonnie::run(&o.stdout, pair.ahead[at])),
        );
    }
    for &at in which {
        shells[at].run(&format!("umount {PLACE}"), LIMIT)?;
    }
    runs.into_iter().collect()
}
