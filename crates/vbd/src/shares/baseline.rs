//! How long requests take on the device when it is at rest, and by how much that is exceeded.

use ringtap_io::Time;

use super::tally::{CLASSES, Latencies};

/// So many requests outweigh what was known before.
const ENOUGH: f64 = 16.0;
/// The most by which anything is taken to be exceeded: what takes longer has waited for something else than the device's queue.
const MOST: f64 = 16.0;

/// Means at rest by class; 0 where nothing is known.
#[derive(Debug, Default)]
pub(super) struct Baseline {
    means: [f64; CLASSES],
}

impl Baseline {
    /// The device was at rest, or nearly, when these ended.
    pub(super) fn learn(&mut self, seen: &Latencies) {
        for (mean, (count, nanos)) in self.means.iter_mut().zip(seen.all()) {
            if count > 0 {
                let (now, count) = (nanos as f64 / count as f64, count as f64);
                let part = match *mean {
                    0.0 => 1.0,
                    // It was not at rest then as it is now.
                    mean if now < mean => 0.3,
                    _ => count / (count + ENOUGH),
                };
                *mean += (now - *mean) * part;
            }
        }
    }

    /// How many times as long as at rest these took; none where that is not known.
    pub(super) fn stretch(&self, seen: &Latencies) -> Option<f64> {
        let known = || self.means.iter().zip(seen.all()).filter(|(mean, _)| **mean > 0.0);
        let at_rest: f64 = known().map(|(mean, (count, _))| mean * count as f64).sum();
        let took: f64 = known().map(|(_, (_, nanos))| nanos as f64).sum();
        (at_rest > 0.0).then(|| (took / at_rest).min(MOST))
    }

    /// How long these would have taken at rest, one by another; none where that is not known.
    pub(super) fn at_rest(&self, seen: &Latencies) -> Option<Time> {
        let (mut count, mut nanos) = (0, 0.0);
        for (mean, (of, _)) in self.means.iter().zip(seen.all()).filter(|(mean, _)| **mean > 0.0) {
            (count, nanos) = (count + of, nanos + mean * of as f64);
        }
        (count > 0).then(|| (nanos / count as f64) as Time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(len: u64, nanos: Time) -> Latencies {
        let mut seen = Latencies::default();
        (0..64).for_each(|_| seen.add(false, len, nanos));
        seen
    }

    #[test]
    fn what_takes_longer_than_at_rest_is_told_by_class() {
        let mut baseline = Baseline::default();
        assert_eq!(baseline.stretch(&seen(4096, 100)), None);
        baseline.learn(&seen(4096, 100));
        assert_eq!(baseline.stretch(&seen(4096, 300)), Some(3.0));
        // Larger ones have their own.
        assert_eq!(baseline.stretch(&seen(1 << 20, 300)), None);
        baseline.learn(&seen(1 << 20, 1000));
        assert_eq!(baseline.stretch(&seen(1 << 20, 2000)), Some(2.0));
        assert_eq!(baseline.stretch(&seen(4096, 1 << 40)), Some(MOST));
        assert_eq!(baseline.at_rest(&seen(1 << 20, 1)), Some(1000));
        // A device that has become slower is found out.
        (0..8).for_each(|_| baseline.learn(&seen(4096, 300)));
        assert!(baseline.stretch(&seen(4096, 300)).expect("known") < 1.1);
    }
}
