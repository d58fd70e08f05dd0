//! Operations that are begun again: at once where they were interrupted, after a pause where the device was out of tags.

use crate::{Io, Op, Time};

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
    fn pause(&mut self) -> Option<Time> {
        let pause = self.0.clamp(SHORTEST, LONGEST);
        (self.0 < MOST).then(|| {
            self.0 += pause;
            pause
        })
    }
}

impl Io {
    /// Whether a failed operation is to be begun again. Whoever has all operations end has those end that pause.
    #[cold]
    pub(crate) async fn again(&self, result: i32, patience: &mut Patience) -> Result<(), i32> {
        match -result {
            libc::EINTR => Ok(()),
            libc::EAGAIN => {
                let nanos = patience.pause().ok_or(libc::EAGAIN)?;
                match self.run(Op::Timeout { nanos }).await {
                    cancelled if cancelled == -libc::ECANCELED => Err(libc::ECANCELED),
                    _ => Ok(()),
                }
            }
            errno => Err(errno),
        }
    }
}
