//! Which layer stood still while nothing came back: a look every 10 ms at who works, who waits for a processor, and
//! whether the device has requests.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::meter;
use crate::cost::{self, Schedule};
use crate::sample::{Stall, Still};

/// Between two looks.
const STEP: Duration = Duration::from_millis(10);
/// What takes so much of a gap is what it was about.
const MOST: f64 = 0.5;
/// Gaps of one sample that are told; the longest.
const TOLD: usize = 20;

/// Counters at one moment; seconds so far.
#[derive(Clone, Debug, Default)]
struct Look {
    /// Milliseconds since 1970.
    at_ms: f64,
    device: Option<f64>,
    server: Option<Schedule>,
    client: Option<Schedule>,
    steal: f64,
    memory: Option<f64>,
}

/// A watch that goes on until it is ended.
#[derive(Debug)]
pub struct Watch {
    over: Arc<AtomicBool>,
    looks: JoinHandle<Vec<Look>>,
}

impl Watch {
    /// Begins to watch: the server's and the client's process, where the lab knows them, and the device's statistics.
    pub fn start(server: Option<u32>, client: Option<u32>, device: Option<&Path>) -> Watch {
        let over = Arc::new(AtomicBool::new(false));
        let (until, device) = (over.clone(), device.map(Path::to_owned));
        let looks = std::thread::spawn(move || {
            let mut looks = Vec::new();
            while !until.load(Ordering::Relaxed) {
                looks.push(Look::now(server, client, device.as_ref()));
                std::thread::sleep(STEP);
            }
            looks.push(Look::now(server, client, device.as_ref()));
            looks
        });
        Watch { over, looks }
    }

    /// Ends it and says of each gap (from, to; milliseconds since 1970) which layer it was.
    pub fn explain(self, gaps: &[(f64, f64)]) -> Vec<Stall> {
        self.over.store(true, Ordering::Relaxed);
        // Only a panic in reading /proc could take the looks away; the gaps are told without them.
        let looks = self.looks.join().unwrap_or_default();
        let began = looks.first().map_or(0.0, |look| look.at_ms);
        let mut longest = gaps.to_vec();
        longest.sort_by(|a, b| (b.1 - b.0).total_cmp(&(a.1 - a.0)));
        longest.truncate(TOLD);
        longest.sort_by(|a, b| a.0.total_cmp(&b.0));
        longest.iter().map(|&gap| stall(&looks, began, gap)).collect()
    }
}

impl Look {
    fn now(server: Option<u32>, client: Option<u32>, device: Option<&PathBuf>) -> Look {
        Look {
            at_ms: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(0.0, |since| since.as_secs_f64() * 1e3),
            device: device.and_then(|file| meter::layer_of_file(file)).map(|(_, busy)| busy),
            server: server.map(cost::schedule),
            client: client.map(cost::schedule),
            steal: cost::steal_seconds(),
            memory: cost::memory_stall_seconds(),
        }
    }
}

fn stall(looks: &[Look], began: f64, (from, to): (f64, f64)) -> Stall {
    let mut stall =
        Stall { at: (from - began) / 1e3, seconds: (to - from) / 1e3, ..Stall::default() };
    let before = looks.iter().rev().find(|look| look.at_ms <= from);
    let after = looks.iter().find(|look| look.at_ms >= to);
    let (Some(a), Some(b)) = (before, after) else { return stall };
    let seconds = (b.at_ms - a.at_ms) / 1e3;
    let share = |now: f64, then: f64| ((now - then) / seconds).max(0.0);
    let pair = |get: fn(&Look) -> Option<f64>| Some(share(get(b)?, get(a)?));
    stall.device = pair(|look| look.device);
    stall.server = pair(|look| look.server.map(|s| s.ran));
    stall.server_waits = pair(|look| look.server.map(|s| s.waited));
    stall.client = pair(|look| look.client.map(|s| s.ran));
    stall.client_waits = pair(|look| look.client.map(|s| s.waited));
    let steal = share(b.steal, a.steal);
    let memory = pair(|look| look.memory);
    let most = |share: Option<f64>| share.is_some_and(|share| share >= MOST);
    // What holds up everything first, then from the disk up.
    let order = [
        (Still::Hypervisor, Some(steal)),
        (Still::Memory, memory),
        (Still::Device, stall.device),
        (Still::ServerWaits, stall.server_waits),
        (Still::Server, stall.server),
        (Still::ClientWaits, stall.client_waits),
        (Still::Client, stall.client),
    ];
    stall.layer =
        order.iter().find(|(_, share)| most(*share)).map_or(Still::Nobody, |(who, _)| *who);
    stall
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Looks every 10 ms for a second; `ran` and `busy` seconds a second of server and device.
    fn looks(ran: f64, waited: f64, busy: f64) -> Vec<Look> {
        (0..=100)
            .map(|n| {
                let seconds = f64::from(n) / 100.0;
                Look {
                    at_ms: 5000.0 + 1e3 * seconds,
                    device: Some(busy * seconds),
                    server: Some(Schedule { ran: ran * seconds, waited: waited * seconds }),
                    client: Some(Schedule::default()),
                    ..Look::default()
                }
            })
            .collect()
    }

    #[test]
    fn the_layer_that_takes_the_gap_is_named() {
        let of = |looks: &[Look]| stall(looks, 5000.0, (5200.0, 5500.0));
        let found = of(&looks(0.1, 0.0, 0.97));
        assert_eq!((found.layer, found.at, found.seconds), (Still::Device, 0.2, 0.3));
        assert!((found.device.unwrap() - 0.97).abs() < 1e-6);
        assert_eq!(of(&looks(0.9, 0.0, 0.1)).layer, Still::Server);
        assert_eq!(of(&looks(0.1, 0.8, 0.0)).layer, Still::ServerWaits);
        assert_eq!(of(&looks(0.1, 0.1, 0.1)).layer, Still::Nobody);
        let mut stolen = looks(0.9, 0.0, 0.9);
        stolen.iter_mut().for_each(|look| look.steal = (look.at_ms - 5000.0) / 1e3);
        assert_eq!(of(&stolen).layer, Still::Hypervisor);
    }

    #[test]
    fn a_gap_that_was_not_watched_has_no_layer() {
        let found = stall(&looks(1.0, 0.0, 0.0), 5000.0, (4000.0, 5500.0));
        assert_eq!((found.layer, found.server), (Still::Unseen, None));
        assert_eq!(found.seconds, 1.5);
    }

    #[test]
    fn a_real_server_at_work_is_seen() {
        let mut busy = std::process::Command::new("timeout")
            .args(["60", "sh", "-c", "while :; do :; done"])
            .spawn()
            .unwrap();
        let watch = Watch::start(Some(busy.id()), None, None);
        let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64() * 1e3;
        // It may not have its processor at once, nor all of it, on a busy machine.
        std::thread::sleep(Duration::from_millis(300));
        let from = now();
        std::thread::sleep(Duration::from_millis(500));
        let to = now();
        std::thread::sleep(Duration::from_millis(50));
        let stalls = watch.explain(&[(from, to)]);
        let group = rustix::process::Pid::from_child(&busy);
        rustix::process::kill_process_group(group, rustix::process::Signal::KILL).unwrap();
        busy.wait().unwrap();
        let (ran, waited) = (stalls[0].server.unwrap(), stalls[0].server_waits.unwrap());
        assert!(ran + waited > 0.8, "ran {ran}, waited {waited}");
        assert!(matches!(
            stalls[0].layer,
            Still::Server | Still::ServerWaits | Still::Memory | Still::Hypervisor
        ));
    }
}
