//! Operations that are begun again: at once where they were interrupted, after a pause where the device was out of tags.

use crate::patience::Patience;
use crate::{Io, Op};

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
