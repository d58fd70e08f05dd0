//! The witness of an external data file, beside that of its image.
//!
//! The image says that the log is its own; a data file that was put back or written to by others since says
//! nothing of what its image holds. Which of the two the operator wants cannot be told: so it is asked.
//!
//! Behind the records of the second half: the data file's device and inode, when it came to be, bytes
//! written to the device it is, the image's generations, and at [`WITNESS`] the witness. An older server, which
//! knows nothing of these words, begins with a generation of its own and leaves them as they were: by that they
//! are known for another's.

use ringtap_io::Witness;

use super::{GENERATION, RestartLog, files};
use crate::Standing;
use crate::{Container, OpenError};

/// Words that it takes.
pub(super) const WORDS: usize = 16;

const BORN: usize = 2;
const WRITTEN: usize = 3;
/// Two, as in the log's beginning; each is written here first.
const GENERATIONS: usize = 4;
const WITNESS: usize = 7;

/// Where the file is that this container has open; none in a simulation.
fn place_of(data: &Container) -> Option<(u64, u64)> {
    Some(files::place_of(&rustix::fs::fstat(data.open_file()?).ok()?))
}

impl RestartLog {
    /// The log of an image whose guest data lies in this file, which nobody has written to since it was
    /// opened.
    pub fn with_data(mut self, data: &Container) -> RestartLog {
        self.compare_data(data);
        self.data = Some(data.clone());
        self
    }

    /// Whether its data file is as the log's writer left it, where the image is.
    pub(super) fn compare_data(&mut self, data: &Container) {
        if self.standing == Standing::Same && self.left().is_some() {
            if let Some(why) = self.differs(data) {
                let why = format!("of its data file {}: {why}", data.path().display());
                self.standing = Standing::Unknown(why);
            }
            data.stands(&self.standing);
        }
    }

    /// The same, of one that cannot be looked at.
    pub(crate) fn without_data(mut self, why: &OpenError) -> RestartLog {
        if self.standing == Standing::Same {
            self.standing = Standing::Unknown(format!("its data file cannot be looked at: {why}"));
        }
        self
    }

    /// Why this is not the data file that the log's writer left, or not in that state.
    fn differs(&self, data: &Container) -> Option<String> {
        let (facts, at) = (data.file_facts(), self.data_at());
        let (device, inode) = place_of(data)?;
        let generations = [0, 1].map(|which| self.word(at + GENERATIONS + which));
        let is_void = (self.word(at), self.word(at + 1)) == (0, 0);
        if is_void || !generations.contains(&self.word(GENERATION[1])) {
            return Some("the server did not note when it wrote to it".into());
        }
        let born = self.word(at + BORN);
        let reborn = born != 0 && facts.born != 0 && born != facts.born;
        if (self.word(at), self.word(at + 1)) != (device, inode) || reborn {
            return Some("the file that the server wrote to is gone, and this is another".into());
        }
        let said = Witness::read(&self.words, at + WITNESS);
        match Standing::of(said, &facts, self.word(at + WRITTEN)) {
            Standing::Same => None,
            Standing::Other(why) | Standing::Unknown(why) => Some(why),
        }
    }

    /// It is as it is, and from now on every change of it is noted. Nothing is in flight.
    pub(super) fn watch_data(&self) {
        let at = self.data_at();
        let Some((data, (device, inode))) =
            self.data.as_ref().and_then(|data| Some((data, place_of(data)?)))
        else {
            // What another data file left there must not be taken for this one's.
            return (at..at + WORDS).for_each(|at| self.set(at, 0));
        };
        // See `watch`.
        data.settle_device();
        let facts = data.file_facts();
        Witness::reset(&self.words, at + WITNESS, facts.modified.unwrap_or_default());
        let words = [device, inode, facts.born, facts.written.unwrap_or_default()];
        (at..).zip(words).for_each(|(at, word)| self.set(at, word));
        (0..2).for_each(|which| self.copy_generation(which, self.word(GENERATION[which])));
        data.witness().start(self.words.clone(), at + WITNESS);
    }

    /// Note a generation here, before it is noted where older servers do.
    pub(super) fn copy_generation(&self, which: usize, generation: u64) {
        if self.data.is_some() {
            self.set(self.data_at() + GENERATIONS + which, generation);
        }
    }

    pub(super) fn data_at(&self) -> usize {
        RestartLog::words_for(self.capacity)
    }
}
