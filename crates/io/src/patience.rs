//! How long an operation waits for a device that is out of tags.

use crate::Time;

/// The kernel tells nobody when a device has tags again: pauses grow from this to that.
const SHORTEST: Time = 100_000;
const LONGEST: Time = 10_000_000;
/// All pauses of an operation together: as long as Linux leaves a disk to answer a command before it gives that up.
const MOST: Time = 30_000_000_000;

/// How long one operation has waited for its device to have room for it.
#[derive(Default)]
pub(crate) struct Patience(Time);

impl Patience {
    /// How long to wait before the next attempt; none where it has been long enough.
    pub(crate) fn pause(&mut self) -> Option<Time> {
        let pause = self.0.clamp(SHORTEST, LONGEST);
        (self.0 < MOST).then(|| {
            self.0 += pause;
            pause
        })
    }
}
