//! The layer ledger: bytes and flushes at each layer by arm and workload, and what was used up first.

use serde::Serialize;

use crate::run::folder::Record;
use crate::sample::{Layer, Ledger, Metric, Moved, Sample, Stage};
use crate::stats::median;

/// A share above which a resource counts as used up.
const FULL: f64 = 0.85;
/// Where the device saw less than this share of what the program asked for, a cache was measured and not the disk.
pub const CACHE: f64 = 0.5;
/// Waiting for memory hurts long before it takes all the time.
const SCARCE: f64 = 0.1;

/// One arm's ledger of one workload: medians over the rounds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Where.
    pub stage: Stage,
    /// Which arm.
    pub arm: String,
    /// Which workload.
    pub workload: String,
    /// The layers.
    #[serde(flatten)]
    pub ledger: Ledger,
    /// CPU seconds of the client (in a guest: all of it) a second.
    pub client: Option<f64>,
    /// What was used up, in words.
    pub limiter: String,
}

/// The ledgers of a run.
pub fn rows(run: &Record, samples: &[Sample]) -> Vec<Row> {
    let mut list = Vec::new();
    for arm in &run.arms {
        for workload in &run.plan.workloads {
            let of: Vec<&Sample> = samples
                .iter()
                .filter(|s| s.stage == arm.stage && s.arm == arm.name && s.workload == *workload)
                .filter(|s| s.error.is_none())
                .collect();
            let ledgers: Vec<&Ledger> = of.iter().filter_map(|s| s.ledger.as_ref()).collect();
            if ledgers.is_empty() {
                continue;
            }
            let middle = |get: &dyn Fn(&Ledger) -> Option<f64>| {
                median(&ledgers.iter().filter_map(|l| get(l)).collect::<Vec<_>>())
            };
            let layer = |get: &dyn Fn(&Ledger) -> Option<Layer>| {
                Some(Layer {
                    read: middle(&|l| get(l).map(|layer| layer.read))?,
                    written: middle(&|l| get(l).map(|layer| layer.written))?,
                    flushes: middle(&|l| get(l).map(|layer| layer.flushes))?,
                })
            };
            let moved = || {
                Some(Moved {
                    read: middle(&|l| l.server.map(|moved| moved.read))?,
                    written: middle(&|l| l.server.map(|moved| moved.written))?,
                })
            };
            let ledger = Ledger {
                program: middle(&|l| l.program),
                disk: layer(&|l| l.disk),
                server: moved(),
                device: layer(&|l| l.device),
                device_busy: middle(&|l| l.device_busy),
                server_thread: middle(&|l| l.server_thread),
                client_cpu: middle(&|l| l.client_cpu),
                client_thread: middle(&|l| l.client_thread),
                machine: middle(&|l| l.machine),
                steal: middle(&|l| l.steal),
                memory: middle(&|l| l.memory),
            };
            let rates: Vec<f64> = of
                .iter()
                .filter_map(|s| {
                    Some(
                        s.metrics.get(&Metric::ClientCpu)?.value
                            * s.metrics
                                .get(&Metric::Iops)
                                .or(s.metrics.get(&Metric::SumIops))?
                                .value
                            / 1e6,
                    )
                })
                .collect();
            // What a tool says of itself where the client is no process of the lab's.
            let client = ledger.client_cpu.or(median(&rates));
            let limiter = limiter(arm.stage, &ledger, client);
            list.push(Row {
                stage: arm.stage,
                arm: arm.name.clone(),
                workload: workload.clone(),
                ledger,
                client,
                limiter,
            });
        }
    }
    list
}

/// What was used up, by the counters that there are.
fn limiter(stage: Stage, ledger: &Ledger, client: Option<f64>) -> String {
    let mut full = Vec::new();
    let percent = |share: f64| format!("{:.0} %", share * 100.0);
    if let Some(share) = ledger.server_thread.filter(|share| *share >= FULL) {
        full.push(format!("one thread of the server ({})", percent(share)));
    }
    let (who, share) = crate::stage::of(stage).client(ledger.client_thread, client);
    if let Some(share) = share.filter(|share| *share >= FULL) {
        full.push(format!("{who} ({} of one CPU)", percent(share)));
    }
    if let Some(share) = ledger.device_busy.filter(|share| *share >= FULL) {
        full.push(format!("the device has work all the time ({})", percent(share)));
    }
    if let Some(share) = ledger.machine.filter(|share| *share >= FULL) {
        full.push(format!("this machine's processors ({})", percent(share)));
    }
    if let Some(share) = ledger.memory.filter(|share| *share >= SCARCE) {
        full.push(format!(
            "this machine's memory (tasks waited for it {} of the time)",
            percent(share)
        ));
    }
    if full.is_empty() {
        "nothing is used up: waiting for each other".into()
    } else {
        full.join("; ")
    }
}

/// What the bytes say about caches: traffic of the device by what the program asked for. Far below 1 is a cache, far
/// above is amplification (or another program).
pub fn reaches_disk(ledger: &Ledger) -> Option<f64> {
    let (asked, device) = (ledger.program?, ledger.device?);
    (asked > 0.0).then(|| (device.read + device.written) / asked)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limiter_names_what_is_full() {
        let ledger =
            Ledger { server_thread: Some(0.97), device_busy: Some(0.2), ..Ledger::default() };
        assert!(limiter(Stage::Host, &ledger, Some(0.3)).contains("thread of the server (97 %)"));
        assert!(
            limiter(Stage::Guest, &Ledger::default(), Some(0.99)).contains("guest's processor")
        );
        let two = limiter(Stage::TwoGuests, &Ledger::default(), Some(1.9));
        assert!(two.contains("the guests' processors (95 % of one CPU)"), "{two}");
        assert!(limiter(Stage::Two, &Ledger::default(), Some(1.2)).contains("nothing"));
        let idle = Ledger { client_thread: Some(0.6), ..Ledger::default() };
        assert!(
            limiter(Stage::Vm, &idle, Some(1.1)).contains("nothing"),
            "two processors, none of them used up"
        );
        let full = Ledger { client_thread: Some(0.97), ..Ledger::default() };
        assert!(limiter(Stage::Vm, &full, Some(1.2)).contains("one processor of the guest (97 %"));
        assert!(limiter(Stage::Host, &Ledger::default(), None).contains("nothing"));
        let scarce = Ledger { memory: Some(0.3), ..Ledger::default() };
        assert!(limiter(Stage::Host, &scarce, None).contains("memory (tasks waited for it 30 %"));
    }

    #[test]
    fn a_cache_shows_in_the_bytes() {
        let layer = |read, written| Some(Layer { read, written, flushes: 0.0 });
        let ledger = |device| Ledger { program: Some(1000.0), device, ..Ledger::default() };
        assert_eq!(reaches_disk(&ledger(layer(20.0, 30.0))), Some(0.05));
        assert_eq!(reaches_disk(&ledger(None)), None);
    }
}
