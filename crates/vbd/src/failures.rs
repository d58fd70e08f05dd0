//! Requests that failed, in the log: what, where and why; only so many in a time.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use ringtap_image::Error;
use tracing::Span;

use crate::{Kind, Request};

/// So many failures of a disk are told of within [`WINDOW`]; of the rest, how many there were.
const BURST: u32 = 10;
const WINDOW: Duration = Duration::from_secs(10);

/// A request that never came to a device: what it asked for, as far as that could be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The operation.
    pub operation: &'static str,
    /// Where it would have begun, in bytes.
    pub offset: Option<u64>,
    /// How many bytes it would have been about.
    pub length: Option<u64>,
    /// Why it is refused.
    pub why: &'static str,
}

/// Tells the log of one disk's failures. Where the disk has no name whoever asks is told, and nobody else:
/// verbs say themselves what could not be read.
pub(crate) struct Failures {
    span: Span,
    state: Mutex<Seldom>,
}

/// Lets ten in ten seconds through.
#[derive(Debug, Default)]
pub struct Seldom {
    /// When the window began.
    began: Option<Instant>,
    told: u32,
    suppressed: u64,
}

impl Seldom {
    /// Whether something is to be told of, and how many were not before it.
    pub fn admit(&mut self, now: Instant) -> (bool, u64) {
        let over = self.began.is_none_or(|began| now.saturating_duration_since(began) >= WINDOW);
        let before = if over { std::mem::take(self).suppressed } else { 0 };
        self.began.get_or_insert(now);
        if self.told < BURST {
            self.told += 1;
            return (true, before);
        }
        self.suppressed += 1;
        (false, before)
    }
}

fn operation(kind: Kind) -> &'static str {
    match kind {
        Kind::Read => "read",
        Kind::Write => "write",
        Kind::Flush => "flush",
        Kind::Discard => "discard",
        Kind::WriteZeroes { .. } => "write-zeroes",
    }
}

/// Whether it is no failure but an answer that drivers go on from: a discard where the file system has
/// none, zeros that would have to be written, pages of the kernel's that must be looked at. Nor is it one where nobody waits
/// for the request any more, which was cancelled for that.
fn is_answer(request: &Request, error: Error) -> bool {
    let moves = matches!(request.kind, Kind::Read | Kind::Write);
    error == Error::Os(libc::ECANCELED)
        || error == Error::Unsupported && (!moves || request.mem.is_kernels())
}

impl Failures {
    pub(crate) fn new(span: Span) -> Failures {
        Failures { span, state: Mutex::default() }
    }

    /// Tell of a request that was answered with an error.
    #[cold]
    pub(crate) fn tell(&self, request: &Request, error: Error) {
        if !is_answer(request, error) {
            self.tell_of(operation(request.kind), request.offset, request.len, error);
        }
    }

    pub(crate) fn tell_of(&self, operation: &'static str, offset: u64, length: u64, error: Error) {
        self.admitted(|| match error {
            // The guest's own mistakes.
            Error::Range | Error::ReadOnly => {
                tracing::warn!(operation, offset, length, "request refused: {error}");
            }
            _ => tracing::error!(operation, offset, length, "request failed: {error}"),
        });
    }

    /// Tell of a request that was refused before it came here.
    #[cold]
    pub(crate) fn tell_of_refusal(&self, refusal: &Refusal) {
        let Refusal { operation, offset, length, why } = *refusal;
        self.admitted(|| tracing::warn!(operation, offset, length, "request refused: {why}"));
    }

    fn admitted(&self, tell: impl FnOnce()) {
        if self.span.is_none() {
            return;
        }
        let (admitted, before) = {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            state.admit(Instant::now())
        };
        let _disk = self.span.enter();
        tell_of_suppressed(before);
        if admitted {
            tell();
        }
    }
}

fn tell_of_suppressed(count: u64) {
    if count > 0 {
        tracing::warn!(count, "more requests failed and were not logged one by one");
    }
}

impl Drop for Failures {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let _disk = self.span.enter();
        tell_of_suppressed(state.suppressed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringtap_io::Mem;

    #[test]
    fn what_is_not_told_is_counted_and_told_with_the_next_window() {
        let (mut state, now) = (Seldom::default(), Instant::now());
        for _ in 0..BURST {
            assert_eq!(state.admit(now), (true, 0));
        }
        for _ in 0..1000 {
            assert_eq!(state.admit(now + WINDOW / 2), (false, 0));
        }
        assert_eq!(state.admit(now + WINDOW), (true, 1000));
        assert_eq!(state.admit(now + WINDOW), (true, 0));
        assert_eq!(state.suppressed, 0);
    }

    #[test]
    fn answers_that_drivers_go_on_from_are_no_failures() {
        let request = |kind, mem| Request { kind, offset: 0, len: 512, mem, fua: false };
        let fast = Kind::WriteZeroes { unmap: true, fast: true };
        for (kind, mem, error, answer) in [
            (fast, Mem::EMPTY, Error::Unsupported, true),
            (Kind::Discard, Mem::EMPTY, Error::Unsupported, true),
            (Kind::Discard, Mem::EMPTY, Error::Full, false),
            (Kind::Read, Mem::of_kernel(0, 512), Error::Unsupported, true),
            (Kind::Read, Mem::of_kernel(0, 512), Error::Os(libc::EIO), false),
            (Kind::Read, Mem::EMPTY, Error::Unsupported, false),
        ] {
            assert_eq!(is_answer(&request(kind, mem), error), answer, "{kind:?} {error:?}");
        }
    }
}
