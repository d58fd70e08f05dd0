//! From where on a sample costs something.

use std::cell::RefCell;
use std::path::Path;
use std::time::Instant;

use super::meter::{Meter, Spent, Who};

/// Where costs and bytes of a sample are counted from: its beginning, or where a workload says that what it needs is made;
/// and where only a part of it counts, what was spent in that.
pub struct Mark<'a> {
    who: &'a Who,
    device: Option<&'a Path>,
    begun: RefCell<(Meter, Instant)>,
    spent: RefCell<Option<Spent>>,
}

impl<'a> Mark<'a> {
    /// Of these processes, from now on.
    pub fn new(who: &'a Who, device: Option<&'a Path>) -> Mark<'a> {
        let begun = RefCell::new((Meter::read(who, device), Instant::now()));
        Mark { who, device, begun, spent: RefCell::new(None) }
    }

    /// What was made so far is no part of the workload.
    pub fn begin(&self) {
        self.begun.replace((Meter::read(self.who, self.device), Instant::now()));
    }

    /// Statistics of the device that holds the disks.
    pub fn device(&self) -> Option<&Path> {
        self.device
    }

    /// Only this counts.
    pub fn account(&self, spent: Spent) {
        self.spent.replace(Some(spent));
    }

    /// What was spent until now.
    pub fn end(self) -> Spent {
        let (before, begun) = self.begun.into_inner();
        self.spent.into_inner().unwrap_or_else(|| {
            Meter::read(self.who, self.device).since(&before, begun.elapsed().as_secs_f64())
        })
    }
}
