//! One look at a server, and what happened between two.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Instant;

use serde::Serialize;
use serde_json::{Value, json};

use crate::qmp::Qmp;

/// What a server says of all its disks and jobs at a moment.
pub(crate) struct Look {
    at: Instant,
    disks: Vec<Value>,
    pub(crate) jobs: Vec<Job>,
}

/// A job that is there.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Job {
    id: String,
    #[serde(rename = "type")]
    kind: String,
    status: String,
    done: u64,
    total: u64,
}

impl fmt::Display for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let part = 100.0 * self.done as f64 / self.total.max(1) as f64;
        write!(f, "job {}: {}, {}, {part:.0} %", self.id, self.kind, self.status)
    }
}

/// What a disk did between two looks.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct Row {
    pub(crate) node: String,
    /// Requests a second.
    #[serde(rename = "reads_per_second")]
    pub(crate) reads: f64,
    #[serde(rename = "writes_per_second")]
    pub(crate) writes: f64,
    #[serde(rename = "read_bytes_per_second")]
    pub(crate) read_bytes: f64,
    #[serde(rename = "written_bytes_per_second")]
    pub(crate) written_bytes: f64,
    /// From arrival to reply, of reads and writes that ended; none where none did.
    #[serde(rename = "p50_ns")]
    pub(crate) p50: Option<u64>,
    #[serde(rename = "p99_ns")]
    pub(crate) p99: Option<u64>,
    #[serde(rename = "p999_ns")]
    pub(crate) p999: Option<u64>,
    /// Requests that have not been answered, and how old the oldest is.
    pub(crate) in_flight: usize,
    pub(crate) oldest_us: u64,
    /// Those of them that limits hold.
    pub(crate) held: u64,
    /// For how long limits have held requests that went on, of a second.
    pub(crate) held_seconds_per_second: f64,
    /// Images on one another.
    pub(crate) chain: usize,
    stopped: bool,
    waiting_for_room: u64,
}

impl Row {
    /// What is wrong with it, in a word.
    pub(crate) fn state(&self) -> &'static str {
        match (self.stopped, self.waiting_for_room, self.held) {
            (true, ..) => "stopped",
            (_, 1.., _) => "no space",
            (_, _, 1..) => "limited",
            _ => "",
        }
    }
}

impl Look {
    /// Take one.
    pub(crate) fn take(qmp: &mut Qmp) -> anyhow::Result<Look> {
        let disks = qmp.call("query-blockstats", json!({}))?;
        let at = Instant::now();
        let jobs = qmp.call("query-jobs", json!({}))?;
        let list = |all: Value| match all {
            Value::Array(all) => all,
            _ => vec![],
        };
        Ok(Look { at, disks: list(disks), jobs: list(jobs).iter().map(job).collect() })
    }

    pub(crate) fn seconds_since(&self, before: &Look) -> f64 {
        self.at.duration_since(before.at).as_secs_f64()
    }

    /// What the disks did since, the busiest first. One that was not there then has come with nothing done.
    pub(crate) fn since(&self, before: &Look) -> Vec<Row> {
        let name = |disk: &Value| disk["node-name"].as_str().unwrap_or_default().to_owned();
        let then: BTreeMap<String, &Value> =
            before.disks.iter().map(|disk| (name(disk), disk)).collect();
        let seconds = self.seconds_since(before).max(1e-9);
        let row = |disk: &Value| row(name(disk), disk, then.get(&name(disk)).copied(), seconds);
        let mut rows: Vec<Row> = self.disks.iter().map(row).collect();
        rows.sort_by(|one, other| {
            let all = |row: &Row| row.reads + row.writes;
            all(other).total_cmp(&all(one)).then_with(|| one.node.cmp(&other.node))
        });
        rows
    }
}

fn job(of: &Value) -> Job {
    let text = |key: &str| of[key].as_str().unwrap_or_default().to_owned();
    let number = |key: &str| of[key].as_u64().unwrap_or_default();
    let (done, total) = (number("current-progress"), number("total-progress"));
    Job { id: text("id"), kind: text("type"), status: text("status"), done, total }
}

fn row(node: String, now: &Value, then: Option<&Value>, seconds: f64) -> Row {
    let more = |path: &str| {
        let of = |look: &Value| look.pointer(path).and_then(Value::as_u64).unwrap_or_default();
        of(now).saturating_sub(then.map_or(0, of)) as f64
    };
    let state = &now["__ringtap_state"];
    let queues = state["queues"].as_array().into_iter().flatten();
    let ages = queues.flat_map(|queue| queue["in_flight"].as_array().into_iter().flatten());
    let ages: Vec<u64> = ages.filter_map(|request| request["age_us"].as_u64()).collect();
    let ended = ended(now, then);
    let quantile = |share: f64| {
        let all: u64 = ended.values().sum();
        let rank = ((all as f64 * share).ceil() as u64).max(1);
        let mut seen = 0;
        let found = ended.iter().find(|(_, count)| {
            seen += **count;
            seen >= rank
        });
        found.map(|(top, _)| *top)
    };
    let mut chain = 1;
    let mut image = &state["layers"]["below"];
    while image.is_object() {
        chain += 1;
        image = &image["below"];
    }
    let per_second = |path: &str| more(path) / seconds;
    Row {
        node,
        reads: per_second("/stats/rd_operations"),
        writes: per_second("/stats/wr_operations"),
        read_bytes: per_second("/stats/rd_bytes"),
        written_bytes: per_second("/stats/wr_bytes"),
        p50: quantile(0.5),
        p99: quantile(0.99),
        p999: quantile(0.999),
        in_flight: ages.len(),
        oldest_us: ages.into_iter().max().unwrap_or(0),
        held: state["limits"]["waiting"].as_u64().unwrap_or(0),
        held_seconds_per_second: per_second("/__ringtap_state/limits/held_ns") / 1e9,
        chain,
        stopped: state["stopped"] == true,
        waiting_for_room: state["waiting_for_room"].as_u64().unwrap_or(0),
    }
}

/// Reads and writes that ended meanwhile, by how long they took at most.
fn ended(now: &Value, then: Option<&Value>) -> BTreeMap<u64, u64> {
    let mut ended: BTreeMap<u64, u64> = BTreeMap::new();
    let mut add = |look: &Value, sign: bool| {
        for kind in ["read", "write"] {
            for pair in look["__ringtap_latency"][kind].as_array().into_iter().flatten() {
                let (Some(top), Some(count)) = (pair[0].as_u64(), pair[1].as_u64()) else {
                    continue;
                };
                let known = ended.entry(top).or_default();
                *known = if sign { *known + count } else { known.saturating_sub(count) };
            }
        }
    };
    add(now, true);
    then.into_iter().for_each(|then| add(then, false));
    ended
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn look(at: Instant, reads: u64, latency: &Value) -> Look {
        let below = json!({ "below": null });
        let in_flight = json!([{ "age_us": 1500 }, { "age_us": 20 }]);
        let disk = json!({
            "node-name": "a",
            "stats": { "rd_operations": reads, "wr_operations": 7, "rd_bytes": reads * 4096, "wr_bytes": 0 },
            "__ringtap_latency": { "read": latency, "write": [[100, 5]] },
            "__ringtap_state": {
                "layers": { "below": { "below": below } },
                "limits": { "waiting": 1, "held_ns": reads * 1_000_000 },
                "queues": [{ "in_flight": in_flight }],
                "stopped": false,
                "waiting_for_room": 0,
            },
        });
        Look { at, disks: vec![disk], jobs: vec![] }
    }

    #[test]
    fn what_happened_is_what_two_looks_differ_by() {
        let began = Instant::now();
        let first = look(began, 1000, &json!([[50, 900], [200, 100]]));
        let then = look(
            began + Duration::from_secs(2),
            3000,
            &json!([[50, 1900], [200, 1080], [9000, 18], [70_000, 2]]),
        );
        let rows = then.since(&first);
        let row = &rows[0];
        assert_eq!((row.reads, row.writes, row.read_bytes), (1000.0, 0.0, 4_096_000.0));
        assert_eq!((row.p50, row.p99, row.p999), (Some(50), Some(200), Some(9000)));
        assert_eq!((row.in_flight, row.oldest_us, row.held, row.chain), (2, 1500, 1, 3));
        assert_eq!((row.held_seconds_per_second, row.state()), (1.0, "limited"));
        let rows = then.since(&Look { at: began, disks: vec![], jobs: vec![] });
        assert_eq!(rows[0].reads, 1500.0);
        assert_eq!(
            then.since(&look(began, 3000, &then.disks[0]["__ringtap_latency"]["read"]))[0].p50,
            None
        );
    }
}
