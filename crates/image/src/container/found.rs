//! What was found of an image as it was locked, and holds for as long as it is.

use ringtap_io::sync::atomic::Ordering::SeqCst;

use super::Container;

impl Container {
    /// Whether it was seen when it was locked for writing that nothing is written down of where its disk goes on: nobody else
    /// has written anything since, and there is nothing to be taken back.
    pub fn goes_on_nowhere(&self) -> bool {
        self.state.nothing_begun.load(SeqCst)
    }
}
