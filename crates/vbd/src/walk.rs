//! A disk taken piece by piece by many tasks on many threads, in order, holes at a stroke.

use std::sync::{Mutex, PoisonError};

/// A part of the disk that one task works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece<T> {
    pub(crate) offset: u64,
    pub(crate) len: u64,
    /// What was found there.
    pub(crate) what: T,
}

/// What there is from `at` to `until`, as far as somebody has looked.
struct State<T> {
    at: u64,
    until: u64,
    what: Option<T>,
}

/// A disk from its beginning to `end`.
pub(crate) struct Walk<T> {
    end: u64,
    state: Mutex<State<T>>,
}

impl<T: Copy> Walk<T> {
    pub(crate) fn new(begin: u64, end: u64) -> Walk<T> {
        Walk { end, state: Mutex::new(State { at: begin, until: begin, what: None }) }
    }

    /// The next piece, none at the end. `look` tells what there is from an offset on and for how many
    /// bytes, at most those asked; `most` bounds a piece, which ends where a multiple of that ends.
    pub(crate) async fn next<E>(
        &self,
        most: impl Fn(&T) -> u64,
        look: impl AsyncFn(u64, u64) -> Result<(T, u64), E>,
    ) -> Result<Option<Piece<T>>, E> {
        let mut seen: Option<(u64, T, u64)> = None;
        loop {
            let from = {
                let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
                // Two may have looked at the same place; the second finds the walk gone on.
                if let Some((at, what, len)) = seen.take() {
                    if state.at == at && state.until <= at {
                        state.until = at.saturating_add(len).min(self.end);
                        state.what = Some(what);
                    }
                }
                if state.at >= self.end {
                    return Ok(None);
                }
                if let (Some(what), true) = (state.what, state.at < state.until) {
                    let (offset, most) = (state.at, most(&what).max(1));
                    let len = (state.until - offset).min(most - offset % most);
                    state.at += len;
                    return Ok(Some(Piece { offset, len, what }));
                }
                state.at
            };
            let (what, len) = look(from, self.end - from).await?;
            seen = Some((from, what, len.max(1)));
        }
    }
}
