//! Which host clusters may be used next. Memory only; kept under the image's lock.

use std::collections::BTreeMap;
use std::ops::Range;

/// The most runs of free clusters that are remembered; more than that are leaked until the next opening.
const MOST_RUNS: usize = 1 << 16;
/// How many runs are looked at for one long enough.
const LOOK: usize = 8;

/// Free clusters, in runs.
#[derive(Default, Debug)]
pub(super) struct Runs {
    /// By the first cluster: the end.
    runs: BTreeMap<u64, u64>,
    total: u64,
}

impl Runs {
    pub(super) fn add(&mut self, run: Range<u64>) {
        let (mut start, mut end) = (run.start, run.end);
        let before = self.runs.range(..=start).next_back().map(|(start, end)| (*start, *end));
        if let Some((first, last)) = before.filter(|(_, last)| *last == start) {
            self.runs.remove(&first);
            (start, self.total) = (first, self.total - (last - first));
        }
        if let Some(last) = self.runs.remove(&end) {
            self.total -= last - end;
            end = last;
        }
        if self.runs.len() < MOST_RUNS && start < end {
            self.runs.insert(start, end);
            self.total += end - start;
        }
    }

    /// Up to `count` clusters, one after the other: all of them where that is soon found.
    fn take(&mut self, count: u64) -> Option<Range<u64>> {
        let mut first = self.runs.iter().take(LOOK).map(|(start, end)| *start..*end);
        let all = first.find(|run| run.end - run.start >= count);
        let run = all.or_else(|| self.runs.iter().next().map(|(start, end)| *start..*end))?;
        self.runs.remove(&run.start);
        self.total -= run.end - run.start;
        let end = run.end.min(run.start + count);
        if end < run.end {
            self.runs.insert(end, run.end);
            self.total += run.end - end;
        }
        Some(run.start..end)
    }

    fn take_whole(&mut self, count: u64) -> Option<Range<u64>> {
        let mut first = self.runs.iter().take(LOOK);
        first.find(|(start, end)| *end - **start >= count)?;
        self.take(count)
    }

    /// Remove the run that ends there; gives where it began.
    fn take_ending_at(&mut self, end: u64) -> Option<u64> {
        let (start, last) = self.runs.iter().next_back().map(|(start, end)| (*start, *end))?;
        if last != end {
            return None;
        }
        self.runs.remove(&start);
        self.total -= last - start;
        Some(start)
    }
}

/// Room for clusters.
#[derive(Debug)]
pub(super) struct Space {
    /// Freed clusters that read as zeros, and those that may hold anything.
    fresh: Runs,
    stale: Runs,
    /// Clusters never used, behind all that are.
    tail: Range<u64>,
    /// Whether they read as zeros.
    pub(super) tail_is_fresh: bool,
    /// Whether the tail and the free runs are known yet.
    pub(super) known: bool,
    /// Whether a task makes the tail longer.
    pub(super) growing: bool,
    /// Bytes that the tail grew by last.
    pub(super) step: u64,
}

/// Clusters one after the other, to be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Taken {
    pub(super) clusters: Range<u64>,
    /// Whether they read as zeros.
    pub(super) fresh: bool,
}

impl Space {
    pub(super) fn new() -> Space {
        Space {
            fresh: Runs::default(),
            stale: Runs::default(),
            tail: 0..0,
            tail_is_fresh: false,
            known: false,
            growing: false,
            step: 0,
        }
    }

    /// What was found at opening: where the last used cluster ends, and the gaps before.
    pub(super) fn found(&mut self, end: u64, gaps: Runs) {
        self.tail = end..end;
        self.stale = gaps;
        self.known = true;
    }

    pub(super) fn tail(&self) -> Range<u64> {
        self.tail.clone()
    }

    /// The tail reaches to `end` now, and what is before `start` is used.
    pub(super) fn grown(&mut self, start: u64, end: u64) {
        self.tail = start.max(self.tail.start)..end.max(self.tail.end);
    }

    /// Take 1 to `count` clusters one after the other. `None` where the tail has to grow first.
    pub(super) fn take(&mut self, count: u64) -> Option<Taken> {
        if let Some(clusters) = self.fresh.take_whole(count) {
            return Some(Taken { clusters, fresh: true });
        }
        // Little that is stale is left alone: a write to it costs more.
        if self.stale.total * 4 > self.tail.start {
            if let Some(clusters) = self.stale.take_whole(count) {
                return Some(Taken { clusters, fresh: false });
            }
        }
        let end = self.tail.end.min(self.tail.start + count);
        if self.tail.start < end {
            let clusters = self.tail.start..end;
            self.tail.start = end;
            return Some(Taken { clusters, fresh: self.tail_is_fresh });
        }
        let clusters = self.fresh.take(count)?;
        Some(Taken { clusters, fresh: true })
    }

    /// Take any, where the tail cannot grow.
    pub(super) fn take_any(&mut self, count: u64) -> Option<Taken> {
        if let Some(taken) = self.take(count) {
            return Some(taken);
        }
        Some(Taken { clusters: self.stale.take(count)?, fresh: false })
    }

    /// Clusters that nobody refers to any more.
    pub(super) fn give_back(&mut self, clusters: Range<u64>, fresh: bool) {
        if fresh { self.fresh.add(clusters) } else { self.stale.add(clusters) }
    }

    /// Where the last used cluster ends: the tail takes back what is free before it, whatever that
    /// holds. For closing; nothing may be taken afterwards.
    pub(super) fn trim(&mut self) -> u64 {
        while let Some(start) = self
            .fresh
            .take_ending_at(self.tail.start)
            .or_else(|| self.stale.take_ending_at(self.tail.start))
        {
            self.tail.start = start;
        }
        self.tail.start
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_join_and_are_taken_in_pieces() {
        let mut runs = Runs::default();
        for cluster in [5, 7, 6, 20, 10, 11] {
            runs.add(cluster..cluster + 1);
        }
        assert_eq!(runs.total, 6);
        assert_eq!(runs.take(3), Some(5..8));
        assert_eq!(runs.take_whole(3), None);
        assert_eq!(runs.take(3), Some(10..12));
        assert_eq!(runs.take(1), Some(20..21));
        assert_eq!((runs.take(1), runs.total), (None, 0));
    }

    #[test]
    fn free_clusters_before_the_tail_join_it() {
        let mut space = Space::new();
        space.found(10, Runs::default());
        space.grown(10, 20);
        space.tail_is_fresh = true;
        assert_eq!(space.take(4), Some(Taken { clusters: 10..14, fresh: true }));
        space.give_back(12..14, false);
        space.give_back(11..12, true);
        assert_eq!(space.trim(), 11);
        assert_eq!(space.take(1), Some(Taken { clusters: 11..12, fresh: true }));
    }
}
