//! How small writes into one file's page cache go: whether the kernel can be asked not to wait, and who was held up.

use crate::Time;

/// A write that takes longer is doubted.
pub(super) const SLOW: Time = 200_000;
/// So many that follow are looked at more closely.
pub(super) const DOUBTED: u16 = 1000;
/// After one that was held up the ring has them for so many times what it took,
pub(super) const RESTS: Time = 32;
/// at most for so long.
pub(super) const LONGEST_REST: Time = 2_000_000_000;
/// Where the first so many would all have had to wait it is no use to ask.
pub(super) const ASKED: u8 = 8;

/// Whether writes to a file can be told not to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Nowait {
    /// So many would have had to, and none was made yet.
    Asked(u8),
    Can,
    Cannot,
}

impl Default for Nowait {
    fn default() -> Nowait {
        Nowait::Asked(0)
    }
}

impl Nowait {
    /// After one that would have had to wait.
    pub(super) fn refused(self) -> Nowait {
        match self {
            Nowait::Asked(times) if times + 1 < ASKED => Nowait::Asked(times + 1),
            Nowait::Asked(_) => Nowait::Cannot,
            known => known,
        }
    }
}

/// How small writes into one file's page cache go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Pace {
    pub(super) nowait: Nowait,
    /// Whether the thread slept is asked for so many more.
    pub(super) doubted: u16,
    /// The ring has them until then.
    pub(super) rests_until: Time,
}

impl Pace {
    /// After a write that began then and took so long; whether the thread slept in it, where that was asked.
    pub(super) fn after(self, began: Time, took: Time, slept: Option<bool>) -> Pace {
        let (doubted, rests_until) = match (took > SLOW, slept) {
            (false, _) => (self.doubted.saturating_sub(1), 0),
            (true, Some(true)) => {
                let rest = took.saturating_mul(RESTS).min(LONGEST_REST);
                (DOUBTED, began + took + rest)
            }
            (true, _) => (DOUBTED, 0),
        };
        Pace { doubted, rests_until, ..self }
    }
}
