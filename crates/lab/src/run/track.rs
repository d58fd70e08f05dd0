//! Counters read in steps while a load runs, so that what was spent in a part of that time can be told once it is known
//! which part: of two loads the time that both ran.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::meter::{Meter, Spent, Who};

/// Between two readings: each walks through /proc, which costs a few milliseconds.
const STEP: Duration = Duration::from_millis(150);

/// Readings under way.
#[derive(Debug)]
pub struct Track {
    over: Sender<()>,
    thread: JoinHandle<Vec<(f64, Meter)>>,
}

impl Track {
    /// Begins to read.
    pub fn start(who: Who, device: Option<&Path>) -> Track {
        let (over, wait) = mpsc::channel();
        let device: Option<PathBuf> = device.map(Path::to_owned);
        let thread = std::thread::spawn(move || {
            let mut readings = Vec::new();
            loop {
                // What a reading counts belongs to its end, but for what the reading itself takes.
                let meter = Meter::read(&who, device.as_deref());
                readings.push((now_ms(), meter));
                match wait.recv_timeout(STEP) {
                    Err(RecvTimeoutError::Timeout) => {}
                    Ok(()) | Err(RecvTimeoutError::Disconnected) => return readings,
                }
            }
        });
        Track { over, thread }
    }

    /// Ends it; all readings by their time, in milliseconds since 1970.
    pub fn end(self) -> Readings {
        drop(self.over);
        Readings(self.thread.join().unwrap_or_default())
    }
}

/// What was read.
#[derive(Debug, Default)]
pub struct Readings(Vec<(f64, Meter)>);

impl Readings {
    /// What was spent within a time, from the first reading in it to the last, and when these were.
    pub fn within(&self, from: f64, to: f64) -> Option<(Spent, f64, f64)> {
        let mut inside = self.0.iter().filter(|(at, _)| (from..=to).contains(at));
        let (first, before) = inside.next()?;
        let (last, after) = inside.next_back()?;
        let spent = after.clone().since(before, (last - first) / 1e3);
        Some((spent, *first, *last))
    }
}

fn now_ms() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::cost;
    use crate::sample::{Metric, Sample};
    use crate::workload::Measured;

    #[test]
    fn only_what_was_spent_within_the_time_counts() {
        // Sleeps first and works then.
        let mut child = std::process::Command::new("timeout")
            .args(["60", "sh", "-c", "sleep 1; while :; do :; done"])
            .spawn()
            .unwrap();
        let track = Track::start(Who { clients: vec![child.id()], ..Who::default() }, None);
        let began = now_ms();
        let (until, quiet) = (Instant::now() + Duration::from_secs(40), began + 900.0);
        while cost::tree_cpu_seconds(child.id()) < 0.4 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(20));
        }
        let end = now_ms();
        let readings = track.end();
        // `timeout` leads a process group of its own.
        let group = rustix::process::Pid::from_child(&child);
        rustix::process::kill_process_group(group, rustix::process::Signal::KILL).unwrap();
        child.wait().unwrap();
        let spent = |from: f64, to: f64| {
            let (spent, first, last) = readings.within(from, to).unwrap();
            assert!(from <= first && first < last && last <= to);
            let mut sample: Sample = serde_json::from_str(
                r#"{"stage": "two", "arm": "a", "workload": "w", "round": 0, "position": 0, "began_ms": 0, "seconds": 0}"#,
            )
            .unwrap();
            spent.put(&mut sample, &Measured { ios: Some(1e6), ..Measured::default() });
            sample.metrics[&Metric::ClientCpu].value
        };
        let (asleep, at_work) = (spent(began, quiet), spent(quiet, end));
        assert!(asleep < 0.05 && at_work > 0.2, "{asleep} s, {at_work} s");
        assert!(readings.within(0.0, 1.0).is_none(), "before it began");
        let one = readings.0[0].0;
        assert!(readings.within(one, one).is_none(), "one reading spans no time");
    }
}
