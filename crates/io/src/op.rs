//! Operations as data, and the trait of what carries them out.

use std::io;
use std::sync::Arc;

use crate::alarm::Silent;
use crate::{Alarm, File, Mem};

/// Names an operation in flight; the reactor gives it back with the result.
pub type Key = u32;

/// Nanoseconds on a monotonic clock, the same for all reactors of a process but simulated ones, which have their own.
pub type Time = u64;

/// One operation. Offsets and lengths are bytes; `File` and `Mem` stay valid until it completes.
///
/// The result is as io_uring gives it: bytes moved or 0, or a negative errno.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)] // the fields are told in the enum's own doc
pub enum Op {
    /// Read at `offset` into `mem`.
    Read { file: File, offset: u64, mem: Mem },
    /// Write `mem` at `offset`; `durable` asks that the data is stable when it completes (RWF_DSYNC).
    Write { file: File, offset: u64, mem: Mem, durable: bool },
    /// Make all completed writes of the file stable (fdatasync).
    Sync { file: File },
    /// Free the range; it reads as zeros afterwards (FALLOC_FL_PUNCH_HOLE).
    PunchHole { file: File, offset: u64, len: u64 },
    /// Make the range read as zeros and keep its space (FALLOC_FL_ZERO_RANGE).
    ZeroRange { file: File, offset: u64, len: u64 },
    /// Reserve space for the range without changing what it reads as (fallocate mode 0, size kept).
    Allocate { file: File, offset: u64, len: u64 },
    /// Make the file this long; what is new reads as zeros (ftruncate).
    SetLen { file: File, len: u64 },
    /// Complete after so many nanoseconds, with -ETIME.
    Timeout { nanos: u64 },
    /// Wait for an eventfd (or pipe) to be signalled and take the signal.
    ReadEvent { file: File },
    /// Signal an eventfd (or pipe): write the 8-byte integer 1.
    SignalEvent { file: File },
    /// End every operation in flight on a file; those waiting for an event end with -ECANCELED.
    Cancel { file: File },
    /// Receive from a socket into `mem`; 0 is end of stream.
    Recv { file: File, mem: Mem },
    /// Send `mem` on a socket.
    Send { file: File, mem: Mem },
    /// Wait until the file can be read from, or is broken (POLLIN, POLLERR); poll's events.
    PollIn { file: File },
    /// Wait until the file can be written to, or is broken (POLLOUT, POLLERR); poll's events.
    PollOut { file: File },
    /// The content of the range is needed no more; it reads as anything afterwards. Only where the file is
    /// elsewhere ([`File::is_elsewhere`]).
    Forget { file: File, offset: u64, len: u64 },
    /// What the range holds, by [`Holds`]. Only where the file is elsewhere.
    Status { file: File, offset: u64, len: u64 },
    /// A command of the file's own driver (IORING_OP_URING_CMD); the result is the driver's. `buffer`
    /// tells the driver in its own terms where to register memory with the ring.
    Command { file: File, command: u32, payload: [u8; 16], buffer: Option<u32> },
}

impl Op {
    /// Whether a disk carries it out.
    pub(crate) fn is_disks(&self) -> bool {
        matches!(
            self,
            Op::Read { .. }
                | Op::Write { .. }
                | Op::Sync { .. }
                | Op::PunchHole { .. }
                | Op::ZeroRange { .. }
                | Op::Allocate { .. }
        )
    }

    /// The file that it is about, where that is elsewhere.
    #[inline]
    pub(crate) fn elsewhere(&self) -> Option<File> {
        let file = match *self {
            Op::Read { file, .. }
            | Op::Write { file, .. }
            | Op::Sync { file }
            | Op::PunchHole { file, .. }
            | Op::ZeroRange { file, .. }
            | Op::Allocate { file, .. }
            | Op::SetLen { file, .. }
            | Op::Forget { file, .. }
            | Op::Status { file, .. } => file,
            _ => return None,
        };
        file.is_elsewhere().then_some(file)
    }
}

/// What a range holds, in the result of [`Op::Status`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holds {
    /// Bytes this holds for, never 0, in steps of [`Holds::STEP`].
    pub len: u64,
    /// Whether no space is allocated.
    pub hole: bool,
    /// Whether it reads as zeros.
    pub zero: bool,
}

impl Holds {
    /// What lengths are multiples of.
    pub const STEP: u64 = 512;
    const MOST: u64 = (i32::MAX as u64 >> 2) * Holds::STEP;

    /// As the result of an operation, of not more bytes than that can tell.
    pub fn to_result(self) -> i32 {
        let steps = (self.len.min(Holds::MOST) / Holds::STEP) as i32;
        steps << 2 | i32::from(self.zero) << 1 | i32::from(self.hole)
    }

    /// Of a result that is no error.
    pub fn of_result(result: i32) -> Holds {
        let len = (result >> 2).max(1) as u64 * Holds::STEP;
        Holds { len, hole: result & 1 != 0, zero: result & 2 != 0 }
    }
}

/// What carries operations out: io_uring, or a simulation.
pub trait Reactor {
    /// Take every operation of `submit` (it is left empty), append what has completed to `done`.
    ///
    /// With `wait` it returns only once `done` has something, or its [`Reactor::alarm`] was rung. An error means the reactor itself is
    /// broken, never that an operation failed.
    fn turn(
        &mut self,
        submit: &mut Vec<(Key, Op)>,
        done: &mut Vec<(Key, i32)>,
        wait: bool,
    ) -> io::Result<()>;

    /// As [`Reactor::turn`], but sleep until `events` operations have completed or `nanos` have
    /// passed, so that the next turn has more to do at once. It may return sooner, and with nothing
    /// done.
    fn turn_for(
        &mut self,
        submit: &mut Vec<(Key, Op)>,
        done: &mut Vec<(Key, i32)>,
        events: u32,
        nanos: Time,
    ) -> io::Result<()> {
        let _ = (events, nanos);
        self.turn(submit, done, false)
    }

    /// Have an operation that was taken end as soon as may be, at the latest with the next turn that waits;
    /// it completes as any other, perhaps here.
    fn cancel(&mut self, key: Key, done: &mut Vec<(Key, i32)>) -> io::Result<()> {
        let _ = (key, done);
        Ok(())
    }

    /// Take every operation of `submit`, and let none complete: who has this reactor closes it next, and its commands to
    /// drivers end with it. An error where it cannot keep them from completing.
    fn take_last(&mut self, submit: &mut Vec<(Key, Op)>) -> io::Result<()> {
        let _ = submit;
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Keep no image's file open ([`Nature::image`](crate::Nature)) that operations have named; where some are in flight, once
    /// they have ended.
    fn forget_images(&mut self) {}

    /// What ends its sleep. Asked for before the first turn of whoever has it; one that does nothing will do where no
    /// other thread wakes its tasks.
    fn alarm(&mut self) -> Arc<dyn Alarm> {
        Arc::new(Silent)
    }

    /// The present time on this reactor's clock.
    fn now(&self) -> Time;
}
