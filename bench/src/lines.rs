//! The workloads: one line of the report each.

use serde::Serialize;

/// One workload.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Line {
    /// For people and for `--only`: `randread-4k-d32`.
    pub name: String,
    /// fio's word: `randread`, `randwrite`, `read`, `write`.
    pub rw: &'static str,
    /// Bytes per request.
    pub bs: u64,
    /// Requests in flight.
    pub depth: usize,
}

impl Line {
    fn new(rw: &'static str, bs: u64, depth: usize) -> Line {
        let size = if bs < 1 << 20 { format!("{}k", bs >> 10) } else { format!("{}M", bs >> 20) };
        Line { name: format!("{rw}-{size}-d{depth}"), rw, bs, depth }
    }

    /// True if the load writes.
    pub fn writes(&self) -> bool {
        self.rw.ends_with("write")
    }

    /// True for requests of 4 KiB.
    pub fn small(&self) -> bool {
        self.bs == 4096
    }
}

/// 4 KiB at random at depth 32 and 1, and 1 MiB in sequence.
pub fn usual() -> Vec<Line> {
    let mut lines = Vec::new();
    for depth in [32, 1] {
        lines.extend(["randread", "randwrite"].map(|rw| Line::new(rw, 4096, depth)));
    }
    lines.extend(["read", "write"].map(|rw| Line::new(rw, 1 << 20, 8)));
    lines
}

/// 4 KiB at random at depth 32.
pub fn random() -> Vec<Line> {
    ["randread", "randwrite"].map(|rw| Line::new(rw, 4096, 32)).into()
}

/// The same, reads alone.
pub fn random_reads() -> Vec<Line> {
    vec![Line::new("randread", 4096, 32)]
}

/// What may be asked of an image whose every block is new: each is a first write, or nearly so.
pub fn first_writes() -> Vec<Line> {
    vec![Line::new("randwrite", 4096, 32), Line::new("write", 1 << 20, 8)]
}

/// What may be asked of a snapshot just taken.
pub fn overlay() -> Vec<Line> {
    let mut lines = vec![Line::new("randread", 4096, 32)];
    lines.extend(first_writes());
    lines
}

/// The same for a client that can only go in sequence.
pub fn sequential() -> Vec<Line> {
    let mut lines = Vec::new();
    for (bs, depth) in [(4096, 32), (4096, 1), (1 << 20, 8)] {
        lines.extend(["read", "write"].map(|rw| Line::new(rw, bs, depth)));
    }
    lines
}
