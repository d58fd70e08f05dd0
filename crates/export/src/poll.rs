//! When to spin for the next event instead of sleeping.
//!
//! Sleeping and being woken costs some microseconds on both sides. A queue spins for as long as its
//! events have lately come sooner than that pays, and not at all once they come later: an idle
//! guest, or a disk that takes milliseconds, costs no CPU.

use ringtap_io::Time;

/// Never spin longer than this.
const MOST: Time = 50_000;
/// Where spinning begins again after an event came soon.
const LEAST: Time = 10_000;

/// Decides between spinning and sleeping, from how long the last waits took.
#[derive(Default)]
pub(crate) struct Poller {
    window: Time,
    idle_since: Option<Time>,
}

impl Poller {
    /// There is nothing to do: whether to look again at once rather than sleep.
    pub(crate) fn spin(&mut self, now: Time) -> bool {
        let since = *self.idle_since.get_or_insert(now);
        now.saturating_sub(since) < self.window
    }

    /// There is something to do again.
    #[inline]
    pub(crate) fn event(&mut self, now: Time) {
        let Some(since) = self.idle_since.take() else { return };
        let waited = now.saturating_sub(since);
        if waited > MOST {
            self.window = 0;
        } else if waited > self.window {
            self.window = (waited * 2).clamp(LEAST, MOST);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spins_while_events_come_soon_and_sleeps_when_they_do_not() {
        let mut poller = Poller::default();
        assert!(!poller.spin(0), "nothing is known yet: sleep");
        poller.event(8_000);
        assert!(poller.spin(10_000));
        assert!(poller.spin(25_000));
        assert!(!poller.spin(26_001), "the window is over");
        poller.event(10_000 + 3_000_000);
        assert!(!poller.spin(4_000_000), "a slow event: no more spinning");
    }
}
