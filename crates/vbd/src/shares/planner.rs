//! The planner: from what was seen of a device's tenants, what each may have until the next plan. It knows no clock and no
//! thread, and does the same whenever it sees the same.

use ringtap_io::Time;

use super::baseline::Baseline;
use super::divide::{Wish, divide};
use super::pace::{Pace, Seen};
use super::tally::Latencies;

/// From one plan to the next, of a device that answers within a millisecond; of slower ones longer, up to so many times.
const PERIOD: Time = 4_000_000;
const MOST_SLOW: f64 = 12.0;
/// How much more than it has had a tenant is left that has had all it wanted, beside what its weight gives it.
const ROOM: f64 = 1.1;
/// Who has had so much of what his weight gives him feels its end, not how long requests take.
const FILLED: f64 = 0.85;
/// So few in the device, and it is at rest.
const ALONE: f64 = 1.1;
/// So few requests of one in the device leave it at rest.
const FEW: f64 = 1.5;
/// Who has so much of the part of the device's queue that his weight gives him makes it himself.
const QUEUED: f64 = 0.75;
/// How long somebody is remembered who has had all he wanted.
const REMEMBERED: Time = 100_000_000;
/// What a tenant has had is a mean of about so long.
const MEAN_USED: f64 = 20e6;
/// After so long without a plan there has been nothing to plan for.
const REST: Time = 200_000_000;

/// What was seen of a tenant since the last plan.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Had {
    pub(super) weight: u32,
    /// By cost, in a second.
    pub(super) floor: f64,
    /// What it was served, by cost.
    pub(super) served: u64,
    /// How long its requests took, all together.
    pub(super) queued: Time,
    /// It has wanted more than it had.
    pub(super) short: bool,
    /// A job, that nobody waits for.
    pub(super) is_job: bool,
}

/// What is remembered of a tenant from one plan to the next.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Memory {
    used: f64,
    queued: f64,
    /// How long ago it last had something and all that it wanted.
    content: Option<Time>,
}

impl Memory {
    fn note(&mut self, took: Time, had: &Had) {
        let used = had.served as f64 * 1e9 / took.max(1) as f64;
        let part = 1.0 - (-(took as f64) / MEAN_USED).exp();
        self.used += (used - self.used) * part;
        let queued = had.queued as f64 / took.max(1) as f64;
        self.queued += (queued - self.queued) * part;
        self.content = match (had.short, had.served > 0) {
            (true, _) => None,
            (false, true) => Some(0),
            (false, false) => self.content.map(|ago| ago + took).filter(|ago| *ago <= REMEMBERED),
        };
    }
}

/// Plans for one device.
#[derive(Debug, Default)]
pub(super) struct Planner {
    baseline: Baseline,
    pace: Pace,
    rate: f64,
    /// How many times as slow as one that answers within a millisecond the device is.
    slow: f64,
}

impl Planner {
    /// How long until the next plan.
    pub(super) fn period(&self) -> Time {
        (PERIOD as f64 * self.slow.max(1.0)) as Time
    }

    /// What the device is given to do in a second, by cost; 0 before the first plan.
    pub(super) fn rate(&self) -> f64 {
        self.rate
    }

    /// What it can do in a second, by cost, as far as it is known; 0 where it is not.
    pub(super) fn capacity(&self) -> f64 {
        self.pace.capacity()
    }

    /// As [`Pace::most`].
    pub(super) fn most(&self) -> Option<f64> {
        self.pace.most()
    }

    /// How many times as long as at rest requests take at present.
    pub(super) fn stretch(&self) -> f64 {
        self.pace.stretch()
    }

    /// What each may have in a second from now on, by cost; nothing where each may have what it wants.
    pub(super) fn plan(
        &mut self,
        took: Time,
        latencies: &Latencies,
        tenants: &mut [(Had, Memory)],
    ) -> Vec<f64> {
        let long = took >= REST;
        let in_device: Time = latencies.all().map(|(_, nanos)| nanos).sum();
        let alone = in_device as f64 <= ALONE * took as f64;
        if (self.pace.is_at_rest() || alone) && !long {
            self.baseline.learn(latencies);
        }
        let stretch = self.baseline.stretch(latencies);
        if let Some(at_rest) = self.baseline.at_rest(latencies) {
            self.slow = (at_rest as f64 / 1e6).clamp(1.0, MOST_SLOW);
        }
        for (had, memory) in tenants.iter_mut() {
            if long {
                *memory = Memory::default();
            }
            memory.note(took, had);
        }
        let wish =
            |had: &Had, most| Wish { weight: had.weight.max(1).into(), floor: had.floor, most };
        let present = |of: &(Had, Memory)| of.0.short || of.1.used > 1.0;
        // What each had if it and all the others that are there wanted all that they could get.
        let part = |all: f64| {
            let most = |of: &(Had, Memory)| if present(of) { f64::INFINITY } else { 0.0 };
            let wishes: Vec<Wish> = tenants.iter().map(|of| wish(&of.0, most(of))).collect();
            divide(all, &wishes)
        };
        let weights = tenants.iter().filter(|of| present(of)).map(|of| f64::from(of.0.weight));
        let weights = weights.sum::<f64>().max(1.0);
        let several = tenants.iter().filter(|of| present(of)).count() > 1;
        let queued: f64 = tenants.iter().map(|(_, memory)| memory.queued).sum();
        // By what part of the device's queue is its own, by that which its weight gives it.
        let queues = |(had, memory): &(Had, Memory)| {
            memory.queued * weights / (queued * f64::from(had.weight)).max(f64::MIN_POSITIVE)
        };
        let parts = part(self.pace.capacity());
        let (mut felt, mut deprived) = (false, false);
        for (of, part) in tenants.iter().zip(&parts) {
            let (had, memory) = of;
            if !had.is_job && memory.content.is_some() && memory.used < part * FILLED {
                // It has less than its part: because it asks for little, and waits for the queue of others, or because its own
                // queue does not get on for theirs.
                let own = queues(of) >= QUEUED;
                felt |= !own;
                deprived |= own && self.pace.is_busy() && several;
            }
        }
        // What waits in the device itself, where others feel it or wait before it, could as well wait before it; and who has
        // more than his part there has it at their cost.
        let contended = felt || deprived || tenants.iter().any(|(had, _)| had.short);
        let wants_more = |(of, part): (&(Had, Memory), &f64)| {
            let most = queues(of) > 1.0 || of.1.used > *part;
            of.0.short || contended && present(of) && most
        };
        let wanting: Vec<bool> = tenants.iter().zip(&parts).map(wants_more).collect();
        let short = wanting.contains(&true);
        // Those who are short have their part of what the device can do, whatever others feel.
        let least = |capacity: f64| {
            let least = |((wants, (_, memory)), part): ((&bool, &(Had, Memory)), f64)| match wants {
                true => part,
                false => memory.used.min(part),
            };
            wanting.iter().zip(&*tenants).zip(part(capacity)).map(least).sum()
        };
        let served = tenants.iter().map(|(had, _)| had.served).sum();
        if long {
            self.rate = self.rate.max(self.pace.capacity());
        } else {
            let slow = self.slow.max(1.0);
            let seen = Seen { took, served, stretch, short, felt, slow };
            self.rate = self.pace.steer(seen, self.rate, least);
        }
        if self.rate <= 0.0 {
            // Nothing is known of it yet.
            return vec![];
        }
        let wants = |(wants, (had, memory)): (&bool, &(Had, Memory))| {
            wish(had, if *wants { f64::INFINITY } else { memory.used * ROOM })
        };
        let wishes: Vec<Wish> = wanting.iter().zip(&*tenants).map(wants).collect();
        let rates = divide(self.rate, &wishes);
        // It may have its part at once when it wants it, and not only after the next plan.
        let parts = part(self.rate);
        let entitled = |index: usize| match &tenants[index] {
            of if present(of) => parts[index],
            (had, _) => {
                let weight = f64::from(had.weight);
                (self.rate * weight / (weights + weight)).max(had.floor)
            }
        };
        let lull = self.pace.is_in_lull();
        let rate = |(index, (had, memory)): (usize, &(Had, Memory))| match wanting[index] {
            // Only who has hardly anything in the device lets it run empty.
            wants if lull && (wants || memory.queued > FEW) => {
                Pace::in_lull(rates[index]).max(had.floor.min(rates[index]))
            }
            true => rates[index],
            false => rates[index].max(entitled(index)),
        };
        tenants.iter().enumerate().map(rate).collect()
    }
}
