//! Every number that decides about spinning, batching, gathering and telling, for all transports: how long to
//! wait awake, how much to do at once, how late to tell. What was measured of them is in docs/measured.md where it says so; `--poll` has the rest be tried.

use std::str::FromStr;
use std::sync::OnceLock;

use ringtap_io::Time;

/// Never spin longer than this for a disk: about what sleeping and being woken costs.
pub(crate) const MOST_FOR_DISK: Time = 30_000;
/// Nor than this for a guest, which may itself have slept: in a virtual machine, waking a halted
/// processor takes tens of microseconds, and whoever sleeps after that long makes the other sleep, too.
pub(crate) const MOST_FOR_GUEST: Time = 100_000;
/// Where waking is dearer than usual, so many times its cost is spun for who sends requests, for what the disk
/// reads, and for all it does where its interrupts come by way of a hypervisor that must wake us: who sleeps is
/// woken, and then wakes the other, so that each of several sleepers adds its own.
pub(crate) const WAKES: Time = 10;
/// And at most so long.
pub(crate) const MOST: Time = 2_000_000;
/// Where spinning begins again after an event came soon.
pub(crate) const LEAST: Time = 8_000;
/// How long not to spin on a processor that others want.
pub(crate) const REST: Time = 5_000_000;
/// How long to spin for a guest no longer than for a disk, once others were seen to want the processor:
/// among them may be the guest's own.
pub(crate) const LONG_REST: Time = 100_000_000;
/// Giving way takes less than this where nobody wants the processor.
pub(crate) const GIVEN_WAY: Time = 20_000;
/// And less than so many times what waking costs.
pub(crate) const GIVEN_WAKES: Time = 3;

/// So many requests on the disk are few.
pub(crate) const FEW: usize = 3;

/// From so many requests on the disk on, several of them are waited for.
pub(crate) const MANY: usize = 16;
/// What part of them.
pub(crate) const PART: usize = 4;
/// How long to wait for several, at most.
pub(crate) const BATCH_WAIT: Time = 60_000;

/// So many answers, and the guest is told at once.
pub(crate) const UNNOTIFIED: u16 = 16;

/// So many requests are taken from the guest and handed on in one go while few are on the disk,
pub(crate) const BATCH_OF_FEW: usize = 16;
/// and so many while more are: the disk is to begin with the first while others are prepared.
pub(crate) const BATCH_OF_MANY: usize = 8;

/// How many requests are begun before the disk is given them. With all that a client sends at once the
/// whole depth would move in step, and the disk idle while the software works.
pub(crate) const BEGUN_AT_ONCE: u32 = 4;

/// Threads that may spin at once, as a part of the processors; one always may.
pub(crate) const SPINNING_PART: usize = 2;

/// Whether threads with nothing to do wait awake, as the operator has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Polling {
    /// They sleep at once.
    Off,
    /// As long as events have lately come sooner than sleeping pays, no more of them than half the processors,
    /// and none where others want theirs.
    #[default]
    Adaptive,
    /// The same, but never longer than so many nanoseconds.
    Most(Time),
}

static POLLING: OnceLock<Polling> = OnceLock::new();

impl Polling {
    /// Have every queue of the process wait like this. Before the first is started; only the first time counts.
    pub fn choose(self) {
        POLLING.get_or_init(|| self);
    }

    /// The longest to spin.
    pub(crate) fn most() -> Time {
        match POLLING.get().copied().unwrap_or_default() {
            Polling::Off => 0,
            Polling::Adaptive => Time::MAX,
            Polling::Most(most) => most,
        }
    }
}

impl FromStr for Polling {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Polling, &'static str> {
        let units: [(&str, Time); 3] = [("us", 1000), ("ms", 1_000_000), ("ns", 1)];
        let number = |(unit, nanos): (&str, Time)| {
            let count: Time = text.strip_suffix(unit)?.parse().ok()?;
            count.checked_mul(nanos)
        };
        match text {
            "off" => Ok(Polling::Off),
            "adaptive" => Ok(Polling::Adaptive),
            _ => units
                .into_iter()
                .find_map(number)
                .map(Polling::Most)
                .ok_or("write off, adaptive, or the longest to wait awake, like 50us or 1ms"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn polling_is_told_in_words_or_as_a_time() {
        assert_eq!("off".parse(), Ok(Polling::Off));
        assert_eq!("adaptive".parse(), Ok(Polling::Adaptive));
        assert_eq!("50us".parse(), Ok(Polling::Most(50_000)));
        assert_eq!("1ms".parse(), Ok(Polling::Most(1_000_000)));
        for wrong in ["", "50", "us", "-1us", "99999999999999999999us", "on"] {
            assert!(wrong.parse::<Polling>().is_err(), "{wrong}");
        }
    }
}
