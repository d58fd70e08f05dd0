//! The page: OpenMetrics, with the suffixes that dashboards of disks know.
//!
//! Source: the OpenMetrics specification, "Text format".

use std::collections::BTreeMap;
use std::fmt::Write;

use ringtap_image::{CacheState, LayerState};
use ringtap_vbd::{Counts, DeviceState, Latencies, Stats};

use crate::running::Running;

/// The powers of two nanoseconds, from 8 µs to 8 s, by which latencies are told.
const BOUNDS: std::ops::RangeInclusive<u32> = 13..=33;

/// The name of a metric or a label, what it is, and where it comes from.
type Row<T> = (&'static str, &'static str, fn(&T) -> u64);

/// What is told of one disk.
struct Told {
    name: String,
    size: u64,
    stats: Stats,
    latencies: [Latencies; 5],
    state: DeviceState,
}

impl Told {
    /// The topmost image and those below it.
    fn images(&self) -> impl Iterator<Item = &LayerState> {
        std::iter::successors(Some(&self.state.layers), |image| image.below.as_deref())
    }
}

/// Families of samples, each told whole.
struct Page {
    text: String,
    disks: Vec<Told>,
}

/// What there is to tell now.
pub(super) fn page(running: &Running) -> String {
    let told = running.disks.values().map(|served| Told {
        name: escaped(served.node()),
        size: served.vbd.size(),
        stats: served.vbd.stats(),
        latencies: served.vbd.latencies(),
        state: served.vbd.inspect(),
    });
    let left: u64 = running
        .jobs
        .values()
        .map(|entry| {
            let progress = entry.job.progress();
            progress.total.saturating_sub(progress.offset)
        })
        .sum();
    let mut page = Page { text: String::new(), disks: told.collect() };
    page.disks();
    page.head("ringtap_job_remaining_bytes", "gauge", "What jobs have still to deal with.");
    let _ = writeln!(page.text, "ringtap_job_remaining_bytes {left}");
    if let Some(pause) = running.handover_pause {
        let name = "ringtap_handover_pause_seconds";
        page.head(name, "gauge", "For how long the disks stood still when this process took over.");
        let _ = writeln!(page.text, "{name} {}", pause.as_secs_f64());
    }
    page.text + "# EOF\n"
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

fn seconds(nanos: u64) -> f64 {
    nanos as f64 / 1e9
}

/// How long requests took together: each of a bucket as its middle, which is at most a sixteenth off.
fn sum(latencies: &Latencies) -> f64 {
    latencies.iter().map(|(top, count)| seconds(*top) * 15.0 / 16.0 * *count as f64).sum()
}

impl Page {
    fn head(&mut self, name: &str, kind: &str, about: &str) {
        let _ = writeln!(self.text, "# TYPE {name} {kind}\n# HELP {name} {about}");
    }

    fn counter(&mut self, name: &str, about: &str, of: impl Fn(&Told) -> f64) {
        let name = format!("ringtap_disk_{name}");
        self.head(&name, "counter", about);
        for told in &self.disks {
            let _ = writeln!(self.text, "{name}_total{{disk=\"{}\"}} {}", told.name, of(told));
        }
    }

    fn gauge(&mut self, name: &str, about: &str, of: impl Fn(&Told) -> f64) {
        let name = format!("ringtap_disk_{name}");
        self.head(&name, "gauge", about);
        for told in &self.disks {
            let _ = writeln!(self.text, "{name}{{disk=\"{}\"}} {}", told.name, of(told));
        }
    }

    fn histogram(&mut self, kind: usize, name: &str, about: &str) {
        let name = format!("ringtap_disk_{name}_duration_seconds");
        self.head(&name, "histogram", about);
        for Told { name: disk, latencies, .. } in &self.disks {
            let latencies = &latencies[kind];
            for bound in BOUNDS {
                let limit = 1u64 << bound;
                let within = latencies.iter().filter(|(top, _)| *top < limit);
                let count: u64 = within.map(|(_, count)| count).sum();
                let le = seconds(limit);
                let _ = writeln!(self.text, "{name}_bucket{{disk=\"{disk}\",le=\"{le}\"}} {count}");
            }
            let all: u64 = latencies.iter().map(|(_, count)| count).sum();
            let _ = writeln!(self.text, "{name}_bucket{{disk=\"{disk}\",le=\"+Inf\"}} {all}");
            let _ = writeln!(self.text, "{name}_count{{disk=\"{disk}\"}} {all}");
            let _ = writeln!(self.text, "{name}_sum{{disk=\"{disk}\"}} {}", sum(latencies));
        }
    }

    fn disks(&mut self) {
        type Of = fn(&Stats) -> &Counts;
        let kinds: [(&str, &str, Of); 5] = [
            ("reads", "read_bytes", |stats| &stats.read),
            ("writes", "written_bytes", |stats| &stats.write),
            ("flush_requests", "", |stats| &stats.flush),
            ("discards", "discarded_bytes", |stats| &stats.discard),
            ("write_zeroes", "zeroed_bytes", |stats| &stats.write_zeroes),
        ];
        for (name, bytes, of) in kinds {
            let requests = name.trim_end_matches("_requests");
            let done =
                if name == "flush_requests" { name.into() } else { format!("{name}_completed") };
            self.counter(&done, "Requests that ended well.", |told| of(&told.stats).ended as f64);
            let failed = format!("{requests}_failed");
            self.counter(&failed, "Requests that failed.", |told| of(&told.stats).failed as f64);
            if !bytes.is_empty() {
                self.counter(bytes, "Bytes of those that ended well.", |told| {
                    of(&told.stats).bytes as f64
                });
            }
        }
        let times = ["read", "write", "flush_requests", "discard", "write_zeroes"];
        for (kind, name) in times.into_iter().enumerate() {
            let about = "From arrival to answer, all requests together, within a sixteenth.";
            self.counter(&format!("{name}_time_seconds"), about, |told| sum(&told.latencies[kind]));
        }
        self.counter("io_time_seconds", "How long queues had requests, added up.", |told| {
            seconds(told.stats.busy_ns)
        });
        let about = "From arrival to answer, all requests of all kinds together.";
        self.counter("io_time_weighted_seconds", about, |told| {
            told.latencies.iter().map(sum).sum()
        });
        let names = ["read", "write", "flush", "discard"];
        for (kind, name) in names.into_iter().enumerate() {
            self.histogram(kind, name, "From arrival to answer.");
        }
        self.counter(
            "throttled_seconds",
            "For how long limits held requests that went on.",
            |told| seconds(told.state.limits.held_ns),
        );
        let ways: [Row<Stats>; 3] = [
            ("direct_bytes", "Bytes between files and the memory they were asked with.", |stats| {
                stats.direct_bytes
            }),
            ("bounced_bytes", "Bytes through a buffer.", |stats| {
                stats.bounced_bytes.saturating_sub(stats.ciphered_bytes)
            }),
            (
                "ciphered_bytes",
                "Bytes through a buffer, in which they were deciphered or enciphered.",
                |stats| stats.ciphered_bytes,
            ),
        ];
        for (name, about, of) in ways {
            self.counter(name, about, |told| of(&told.stats) as f64);
        }
        self.counter("map_misses", "How often a table had to be read to find bytes.", |told| {
            told.stats.map_misses as f64
        });
        self.counter("cpu_seconds", "CPU time of the threads of its queues.", |told| {
            seconds(told.stats.cpu_ns)
        });
        self.gauge("throttled_requests", "Requests that limits hold.", |told| {
            told.state.limits.waiting as f64
        });
        self.gauge(
            "share_weight",
            "Its weight, or its group's, where shares of its device hold.",
            |told| told.state.share.map_or(0.0, |share| share.tenant.weight.into()),
        );
        self.gauge(
            "share_part",
            "What part of what its device does it may have at present.",
            |told| told.state.share.map_or(1.0, |share| share.tenant.part),
        );
        self.gauge("io_now", "Requests that have not been answered.", |told| {
            told.state.queues.iter().map(|queue| queue.in_flight.len()).sum::<usize>() as f64
        });
        self.gauge("oldest_request_seconds", "How old the oldest of those is.", |told| {
            let oldest = told.state.queues.iter().filter_map(|queue| queue.in_flight.first());
            oldest.map(|request| request.age_us).max().unwrap_or(0) as f64 / 1e6
        });
        self.gauge("waiting_for_space", "Requests that wait for space.", |told| {
            told.state.waiting_for_room as f64
        });
        self.gauge("size_bytes", "Its size.", |told| told.size as f64);
        self.gauge("chain_depth", "Images on one another.", |told| told.images().count() as f64);
        let caches: [Row<CacheState>; 3] = [
            ("table_cache_bytes", "Tables in memory, of all its images.", |cache| cache.used),
            ("table_cache_limit_bytes", "Tables that there may be in memory.", |cache| cache.most),
            ("dirty_bytes", "Tables that the next flush has to write.", |cache| cache.dirty_bytes),
        ];
        for (name, about, of) in caches {
            self.gauge(name, about, |told| {
                told.images().filter_map(|image| image.cache.as_ref()).map(of).sum::<u64>() as f64
            });
        }
        let about = "1 where the local cache of one of its images is given up.";
        self.gauge("local_cache_given_up", about, |told| {
            let mut caches = told.images().filter_map(|image| image.local_cache.as_ref());
            f64::from(u8::from(caches.any(|cache| cache.given_up.is_some())))
        });
        self.gauge("stopped", "1 where a panic has stopped it.", |told| {
            f64::from(u8::from(told.state.stopped))
        });
        self.connections();
    }

    fn connections(&mut self) {
        let name = "ringtap_disk_queues";
        self.head(name, "gauge", "Queues that clients have running.");
        for told in &self.disks {
            let mut by: BTreeMap<&str, usize> = BTreeMap::new();
            for connection in &told.state.connections {
                *by.entry(connection.transport).or_default() += connection.queues;
            }
            for (transport, queues) in by {
                let disk = &told.name;
                let labels = format!("disk=\"{disk}\",transport=\"{transport}\"");
                let _ = writeln!(self.text, "{name}{{{labels}}} {queues}");
            }
        }
    }
}
