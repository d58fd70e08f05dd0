//! What a sample cost, and what went through the machine's device meanwhile.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use crate::cost::{self, Snapshot};
use crate::sample::{Layer, Ledger, Metric, Moved, Sample};
use crate::workload::Measured;

/// Below this the machine's clock of 10 ms is too coarse for a cost.
const SHORTEST_FOR_COST: f64 = 0.25;
/// Bytes of a sector in the kernel's statistics, whatever the device's own are.
const SECTOR: f64 = 512.0;

/// Whose CPU time is counted: processes that serve, and those that load (of a guest: all of it).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Who {
    /// Servers.
    pub servers: Vec<u32>,
    /// Clients.
    pub clients: Vec<u32>,
}

/// Counters so far.
#[derive(Clone, Debug)]
pub struct Meter {
    server: Option<f64>,
    threads: HashMap<u32, f64>,
    client: Option<f64>,
    client_threads: HashMap<u32, f64>,
    moved: Option<(f64, f64)>,
    reaped: f64,
    all: Snapshot,
    steal: f64,
    memory: Option<f64>,
    device: Option<(Layer, f64)>,
}

/// What lies between two readings.
#[derive(Clone, Debug)]
pub struct Spent {
    server: Option<f64>,
    thread: Option<f64>,
    client: Option<f64>,
    client_thread: Option<f64>,
    moved: Option<Moved>,
    reaped: f64,
    machine: f64,
    steal: f64,
    kernel: f64,
    memory: Option<f64>,
    device: Option<(Layer, f64)>,
    seconds: f64,
}

impl Meter {
    /// Reads all counters. `device` is the statistics file of the device below the disks, see [`device_below`].
    pub fn read(who: &Who, device: Option<&Path>) -> Meter {
        let all = Snapshot::read();
        let cpu =
            |pids: &[u32]| (!pids.is_empty()).then(|| pids.iter().map(|pid| all.tree(*pid)).sum());
        let threads =
            |pids: &[u32]| pids.iter().flat_map(|pid| cost::thread_seconds(*pid)).collect();
        // Where no server is, the guest's own process serves its disk.
        let serving = if who.servers.is_empty() { &who.clients } else { &who.servers };
        let moved = serving.iter().filter_map(|pid| cost::storage_bytes(*pid));
        Meter {
            server: cpu(&who.servers),
            threads: threads(&who.servers),
            client: cpu(&who.clients),
            client_threads: threads(&who.clients),
            moved: moved.reduce(|a, b| (a.0 + b.0, a.1 + b.1)),
            reaped: cost::reaped_seconds(),
            steal: cost::steal_seconds(),
            memory: cost::memory_stall_seconds(),
            device: device.and_then(layer_of_file),
            all,
        }
    }

    /// What happened since `before`, `seconds` ago.
    pub fn since(self, before: &Meter, seconds: f64) -> Spent {
        let less = |now: Option<f64>, then: Option<f64>| {
            now.zip(then).map(|(now, then)| (now - then).max(0.0))
        };
        let busiest = |now: &HashMap<u32, f64>, then: &HashMap<u32, f64>| {
            now.iter()
                .map(|(id, now)| now - then.get(id).copied().unwrap_or(0.0))
                .fold(0.0, f64::max)
        };
        Spent {
            server: less(self.server, before.server),
            thread: self.server.map(|_| busiest(&self.threads, &before.threads)),
            client: less(self.client, before.client),
            client_thread: self
                .client
                .map(|_| busiest(&self.client_threads, &before.client_threads)),
            moved: self.moved.zip(before.moved).map(|(now, then)| Moved {
                read: (now.0 - then.0).max(0.0),
                written: (now.1 - then.1).max(0.0),
            }),
            reaped: self.reaped - before.reaped,
            machine: self.all.machine_since(&before.all),
            steal: self.steal - before.steal,
            kernel: self.all.kernel_since(&before.all),
            memory: less(self.memory, before.memory),
            device: self
                .device
                .zip(before.device)
                .map(|(now, then)| (minus(now.0, then.0), now.1 - then.1)),
            seconds,
        }
    }
}

impl Spent {
    /// Puts the costs into a sample, per million I/Os or per GiB where the work is counted in bytes, and the ledger.
    pub fn put(&self, sample: &mut Sample, measured: &Measured) {
        let mut put = |metric, cpu: Option<f64>, per: f64| {
            if let Some(cpu) = cpu {
                sample.metrics.insert(metric, (cpu / per).into());
            }
        };
        let long = self.seconds >= SHORTEST_FOR_COST;
        let machine = long.then_some(self.machine);
        if let Some(ios) = measured.ios.filter(|ios| *ios > 0.0) {
            put(Metric::ServerCpu, self.server, ios / 1e6);
            put(Metric::ClientCpu, self.client, ios / 1e6);
            put(Metric::MachineCpu, machine, ios / 1e6);
            put(Metric::KernelCpu, long.then_some(self.kernel), ios / 1e6);
            put(Metric::StealCpu, long.then_some(self.steal), ios / 1e6);
            // The tool's own account where the client is no process that the lab sees.
            let own = measured.metrics.get(&Metric::ClientCpu).map(|cpu| cpu.value * ios / 1e6);
            let path = |client: f64| client + self.server.unwrap_or(0.0) + self.kernel;
            let client = self.client.or(own).filter(|_| long);
            put(Metric::PathCpu, client.map(path), ios / 1e6);
        }
        if let Some(bytes) = measured.bytes.filter(|bytes| *bytes > 0.0) {
            let gib = bytes / (1u64 << 30) as f64;
            put(Metric::ServerCpuGib, self.server, gib);
            // dd does not say what it used; the lab waits for nothing else meanwhile.
            let client = self.client.or(long.then_some(self.reaped));
            put(Metric::ClientCpuGib, client, gib);
            put(Metric::MachineCpuGib, machine, gib);
            put(Metric::KernelCpuGib, long.then_some(self.kernel), gib);
            put(Metric::StealCpuGib, long.then_some(self.steal), gib);
            let path = |client: f64| client + self.server.unwrap_or(0.0) + self.kernel;
            put(Metric::PathCpuGib, client.filter(|_| long).map(path), gib);
        }
        let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let all = self.seconds * processors as f64;
        sample.ledger = Some(Ledger {
            program: measured.asked,
            disk: measured.disk,
            server: self.moved,
            device: self.device.map(|device| device.0),
            device_busy: self.device.filter(|_| long).map(|d| (d.1 / self.seconds).clamp(0.0, 1.0)),
            server_thread: self.thread.filter(|_| long).map(|cpu| cpu / self.seconds),
            client_cpu: self.client.filter(|_| long).map(|cpu| cpu / self.seconds),
            client_thread: self.client_thread.filter(|_| long).map(|cpu| cpu / self.seconds),
            machine: long.then_some((self.machine / all).clamp(0.0, 1.0)),
            steal: long.then_some((self.steal / all).clamp(0.0, 1.0)),
            memory: self.memory.filter(|_| long).map(|s| (s / self.seconds).clamp(0.0, 1.0)),
        });
    }
}

fn minus(now: Layer, then: Layer) -> Layer {
    Layer {
        read: (now.read - then.read).max(0.0),
        written: (now.written - then.written).max(0.0),
        flushes: (now.flushes - then.flushes).max(0.0),
    }
}

/// The statistics of the block device that holds `path`; none for a file system without one, such as tmpfs.
pub fn device_below(path: &Path) -> Option<PathBuf> {
    use std::os::unix::fs::MetadataExt;
    let device = std::fs::metadata(path).ok()?.dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let file = PathBuf::from(format!("/sys/dev/block/{major}:{minor}/stat"));
    file.is_file().then_some(file)
}

/// A block device's traffic so far, and its busy time in seconds.
pub fn layer_of_file(file: &Path) -> Option<(Layer, f64)> {
    layer(&std::fs::read_to_string(file).ok()?)
}

/// Of /sys/block/X/stat: sectors read (3rd) and written (7th), milliseconds busy (10th), flushes (16th).
pub fn layer(text: &str) -> Option<(Layer, f64)> {
    let fields: Vec<f64> =
        text.split_whitespace().map(|field| field.parse().ok()).collect::<Option<_>>()?;
    let layer = Layer {
        read: fields.get(2)? * SECTOR,
        written: fields.get(6)? * SECTOR,
        flushes: fields.get(15).copied().unwrap_or(0.0),
    };
    Some((layer, fields.get(9)? / 1e3))
}

/// What passed between two texts of a device's statistics.
pub fn between(before: &str, after: &str) -> Option<Layer> {
    Some(minus(layer(after)?.0, layer(before)?.0))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_clients_busiest_thread_is_less_than_all_of_them() {
        let over = Arc::new(AtomicBool::new(false));
        let busy = || {
            let over = over.clone();
            std::thread::spawn(move || while !over.load(Ordering::Relaxed) {})
        };
        let threads = [busy(), busy()];
        let who = Who { clients: vec![std::process::id()], ..Who::default() };
        let read = || Meter::read(&who, None);
        let (before, until) = (read(), Instant::now() + Duration::from_secs(60));
        let spent = loop {
            std::thread::sleep(Duration::from_millis(20));
            let spent = read().since(&before, 1.0);
            let (thread, all) = (spent.client_thread.unwrap(), spent.client.unwrap());
            if thread > 0.05 && all > 1.2 * thread {
                break spent;
            }
            assert!(Instant::now() < until, "{spent:?}");
        };
        over.store(true, Ordering::Relaxed);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!((spent.server, spent.thread), (None, None));
        let mut sample = empty();
        spent.put(&mut sample, &Measured::default());
        let ledger = sample.ledger.unwrap();
        assert!(ledger.client_thread.unwrap() < ledger.client_cpu.unwrap(), "{ledger:?}");
    }

    fn empty() -> Sample {
        serde_json::from_str(
            r#"{"stage": "vm", "arm": "a", "workload": "w", "round": 0, "position": 0, "began_ms": 0, "seconds": 0}"#,
        )
        .unwrap()
    }

    #[test]
    fn a_real_line_of_sysfs() {
        // Linux 6.18, a loop device, before and after 50 writes of 4 KiB with an fdatasync each.
        let before = " 2060272    11101 22370507   705325  3198218    72092 50072276   891089        0    89472  1618215        0        0        0        0    42866    21800\n";
        let after = " 2060272    11101 22370507   705325  3198317    72092 50072676   891319        0    89704  1618666        0        0        0        0    42915    22021\n";
        let layer = between(before, after).unwrap();
        assert_eq!((layer.read, layer.written, layer.flushes), (0.0, 400.0 * 512.0, 49.0));
        assert!((super::layer(after).unwrap().1 - 89.704).abs() < 1e-9);
        assert_eq!(between("", after), None);
        assert_eq!(super::layer("1 2 x"), None);
    }
}
