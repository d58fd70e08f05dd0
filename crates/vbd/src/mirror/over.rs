//! The end of a write, told to the thread that it is on.

use std::cell::Cell;
use std::rc::Rc;

use ringtap_io::Event;

/// Tells the thread of a write that it has ended.
#[derive(Default)]
pub(super) struct Over {
    is: Cell<bool>,
    told: Event,
}

impl Over {
    pub(super) async fn wait(&self) {
        loop {
            let told = self.told.listen();
            if self.is.get() {
                return;
            }
            told.await;
        }
    }
}

/// Tells that when it goes.
pub(super) struct Ends(pub(super) Rc<Over>);

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.is.set(true);
        self.0.told.notify();
    }
}
