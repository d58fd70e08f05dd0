//! How long the container's file is, and noted where a killed server leaves it.

use std::sync::Mutex;
use std::sync::PoisonError;

use ringtap_io::sync::atomic::Ordering::SeqCst;
use ringtap_io::{Io, Op, Words};

use super::Container;
use crate::Error;

/// Two words from that place on: how long it is, and is about to be.
#[derive(Default)]
pub(super) struct NotedLength {
    words: Mutex<Option<(Words, usize)>>,
}

impl NotedLength {
    fn note(&self, which: usize, len: u64) {
        let words = self.words.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((words, at)) = &*words
            && let Some(word) = words.get(at + which)
        {
            word.store(len, SeqCst);
        }
    }
}

impl Container {
    /// Change its length; what is new reads as zeros. Blocks of a device cannot be changed so.
    pub async fn set_len(&self, io: &Io, len: u64) -> Result<(), Error> {
        self.state.noted_length.note(1, len);
        io.to_the_end(Op::SetLen { file: self.file, len }).await.map_err(Error::from_errno)?;
        self.state.len.store(len, SeqCst);
        self.state.noted_length.note(0, len);
        Ok(())
    }

    /// A write has gone so far.
    pub(super) fn reaches(&self, end: u64) {
        if self.state.len.fetch_max(end, SeqCst) < end {
            [0, 1].iter().for_each(|which| self.state.noted_length.note(*which, end));
        }
    }

    /// Note its length in these two words from now on, from `at` on.
    pub(crate) fn note_length(&self, words: Words, at: usize) {
        let noted = &self.state.noted_length;
        *noted.words.lock().unwrap_or_else(PoisonError::into_inner) = Some((words, at));
        [0, 1].iter().for_each(|which| noted.note(*which, self.len()));
    }
}
