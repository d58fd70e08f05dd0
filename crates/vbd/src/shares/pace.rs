//! How much a device is given to do in a second.
//!
//! Where all who use it have to wait anyway, its queue is kept so long that it is never without work. Where somebody would have
//! more by his weight than he asks for, and so feels how long each request takes, it is kept short. Now and then it is left
//! to run nearly empty for a moment, so that it is known how long requests take then.

use ringtap_io::Time;

/// How many times as long as at rest requests are to take: where all have to wait anyway.
const FULL: f64 = 3.0;
/// And where somebody feels it.
const SHORT: f64 = 1.15;
/// From here on the device has as much to do as it can.
const BUSY: f64 = 1.6;
/// Up to here it could do more.
const CALM: f64 = 1.08;
/// By how much more it is given then from one plan to the next, and by how much at most than it has served.
const GROWTH: f64 = 1.15;
const MOST_GROWTH: f64 = 2.0;
/// A device that does so little of what it could is perhaps slower than it was: it is looked at rest sooner, and not given
/// less than so much of that.
const DOUBTFUL: f64 = 0.7;
const LEAST: f64 = 0.9;
/// Where its queue is not deeper than so many times what it is at rest, it is given a little more than it has been seen to serve.
const DEEP: f64 = 2.6;
const MORE: f64 = 1.03;
const TOO_DEEP: f64 = 4.5;
const LEAST_TOO_DEEP: f64 = 0.5;
/// Who serves less than this of what he is given cannot serve it.
const GIVEN: f64 = 0.93;
/// How much of what is wrong (by its logarithm) is mended at once.
const GAIN: f64 = 0.3;
/// The most by which a rate exceeds what was served, and falls short of it.
const STEPS: (f64, f64) = (0.75, 1.35);
/// What was served, and how long that took, are means of about so long.
const MEAN_SERVED: f64 = 40e6;
const MEAN_STRETCH: f64 = 15e6;
const MEAN_CAPACITY: f64 = 500e6;
/// How long there is to be work that waits until the queue is left to run empty, at first and later, for how long, and how far.
const FIRST_LULL: Time = 12_000_000;
const EARLY_LULL: Time = 100_000_000;
const NEXT_LULL: Time = 2_000_000_000;
/// So many are early.
const EARLY: u32 = 5;
const LULL: Time = 20_000_000;
const DEPTH_OF_LULL: f64 = 0.2;

/// A mean of what was lately.
fn blend(mean: f64, new: f64, took: Time, over: f64) -> f64 {
    if mean <= 0.0 {
        return new;
    }
    let part = 1.0 - (-(took as f64) / over).exp();
    mean + (new - mean) * part
}

/// What was seen of a device since the last plan.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen {
    pub(super) took: Time,
    /// What was served, by cost.
    pub(super) served: u64,
    /// How many times as long as at rest requests took.
    pub(super) stretch: Option<f64>,
    /// Somebody has had less than he wants.
    pub(super) short: bool,
    /// Somebody who wants less than his part feels how long requests take.
    pub(super) felt: bool,
    /// How many times as slow as one that answers within a millisecond the device is.
    pub(super) slow: f64,
}

/// The rate of a device, by cost in a second.
#[derive(Debug, Default)]
pub(super) struct Pace {
    served: f64,
    stretch: f64,
    /// What it has served when it was busy.
    capacity: f64,
    /// It was busy with more than it could do: what it was seen to serve is what it can.
    proven: bool,
    /// How long there has been work that waits since the queue last ran empty, and for how long it is to do so still.
    wanted: Time,
    lull: Time,
    length: Time,
    lulls: u32,
}

impl Pace {
    /// What it can serve in a second, as far as it is known; 0 where it is not.
    pub(super) fn capacity(&self) -> f64 {
        self.capacity
    }

    /// What it can serve at most, where that is known: a little load shows nothing.
    pub(super) fn most(&self) -> Option<f64> {
        self.proven.then_some(self.capacity)
    }

    /// How many times as long as at rest requests take at present.
    pub(super) fn stretch(&self) -> f64 {
        self.stretch.max(1.0)
    }

    /// Whether it has as much to do as it can, as far as is known.
    pub(super) fn is_busy(&self) -> bool {
        self.stretch == 0.0 || self.stretch >= BUSY
    }

    /// Whether its queue is to run empty.
    pub(super) fn is_in_lull(&self) -> bool {
        self.lull > 0
    }

    /// Whether it has run empty, or nearly.
    pub(super) fn is_at_rest(&self) -> bool {
        self.lull > 0 && self.lull <= self.length * 2 / 5
    }

    /// For those who have to wait while the queue runs empty.
    pub(super) fn in_lull(rate: f64) -> f64 {
        rate * DEPTH_OF_LULL
    }

    /// The rate until the next plan, which it was `before`. `least` is what there is to be whatever somebody feels.
    pub(super) fn steer(&mut self, seen: Seen, before: f64, least: impl Fn(f64) -> f64) -> f64 {
        let Seen { took, served, stretch, short, felt, slow } = seen;
        let now = served as f64 * 1e9 / took.max(1) as f64;
        if self.lull > 0 {
            self.lull = self.lull.saturating_sub(took);
            return self.rate(before, short, felt, least);
        }
        self.served = blend(self.served, now, took, MEAN_SERVED * slow);
        if let Some(stretch) = stretch {
            self.stretch = blend(self.stretch, stretch, took, MEAN_STRETCH * slow);
        }
        // What was served says what it can do where it was given more, or has far more in its queue than it is to have.
        let proves = self.served < before * GIVEN || self.stretch >= TOO_DEEP;
        if self.stretch >= BUSY && short && proves {
            self.capacity = blend(self.capacity, self.served, took, MEAN_CAPACITY * slow);
            self.proven = true;
        }
        self.capacity = self.capacity.max(self.served);
        if short {
            self.wanted += took;
            let due = match self.lulls {
                0 => FIRST_LULL,
                1..EARLY => EARLY_LULL,
                _ if before < self.capacity * DOUBTFUL => EARLY_LULL,
                _ => NEXT_LULL,
            };
            if self.wanted >= due {
                self.length = (LULL as f64 * slow) as Time;
                (self.wanted, self.lull) = (0, self.length);
                self.lulls = self.lulls.saturating_add(1);
            }
        }
        self.rate(before, short, felt, least)
    }

    fn rate(&self, before: f64, short: bool, felt: bool, least: impl Fn(f64) -> f64) -> f64 {
        if !short {
            // Nobody waits: there is nothing to be learned of how much more there could be.
            return (self.served * 1.5).max(self.capacity);
        }
        let aim = if felt { SHORT } else { FULL };
        let (low, high) = STEPS;
        let step = (1.0 + GAIN * (aim / self.stretch()).ln()).clamp(low, high);
        let mut rate = self.served * step;
        if self.stretch() < CALM && self.lull == 0 {
            // It has not much to do: what it can do is far from known.
            rate = rate.max((before * GROWTH).min(self.served * MOST_GROWTH));
        }
        let known = match self.stretch() {
            ..DEEP => self.capacity * MORE,
            ..TOO_DEEP => self.capacity * LEAST,
            _ => self.capacity * LEAST_TOO_DEEP,
        };
        rate.max(if felt { least(self.capacity) } else { known })
    }
}
