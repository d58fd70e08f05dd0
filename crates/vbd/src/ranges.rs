//! Ranges of a disk that one at a time works on.

use std::ops::Range;
use std::sync::{Arc, PoisonError};

use ringtap_io::Event;
use ringtap_io::sync::{Mutex, MutexGuard, broken};

/// Ranges held and waited for, in the order in which they were asked for: nobody waits for who came later, so
/// nobody waits for ever.
#[derive(Default)]
pub(crate) struct Ranges {
    all: Mutex<All>,
    freed: Event,
}

#[derive(Default)]
struct All {
    last: u64,
    asked: Vec<(u64, Range<u64>)>,
}

/// A range asked for; nobody else has it once [`Held::ours`] has ended.
pub(crate) struct Held {
    ranges: Arc<Ranges>,
    number: u64,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.ranges.lock().asked.retain(|(number, _)| *number != self.number);
        if !broken("range left in silence") {
            self.ranges.freed.notify();
        }
    }
}

impl Ranges {
    fn lock(&self) -> MutexGuard<'_, All> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn ask(self: &Arc<Ranges>, range: Range<u64>) -> Held {
        let mut all = self.lock();
        all.last += 1;
        let number = all.last;
        all.asked.push((number, range));
        Held { ranges: self.clone(), number }
    }

    fn is_first(&self, number: u64) -> bool {
        let all = self.lock();
        let own = all.asked.iter().position(|(other, _)| *other == number);
        let Some((own, (_, range))) = own.map(|own| (own, &all.asked[own])) else { return true };
        let overlaps = |other: &Range<u64>| other.start < range.end && range.start < other.end;
        !all.asked[..own].iter().any(|(_, other)| overlaps(other))
    }

    /// Have who waits look again whether it still wants to.
    pub(crate) fn look_again(&self) {
        self.freed.notify();
    }
}

impl Held {
    /// Wait until nobody who asked earlier has a part of it; false where `no_more` says so before.
    pub(crate) async fn ours(&self, no_more: impl Fn() -> bool) -> bool {
        loop {
            let freed = self.ranges.freed.listen();
            if no_more() {
                return false;
            }
            if self.ranges.is_first(self.number) || broken("range not waited for") {
                return true;
            }
            freed.await;
        }
    }
}
