//! What tasks of an image wait for that other tasks do, of whatever queue thread.

use ringtap_io::Event;

use super::Shared;
use crate::Container;

/// Told after what it is about has changed in memory. Who waits begins to listen under the lock under which
/// it has seen that it must.
#[derive(Debug, Default)]
pub(super) struct Events {
    /// A write to a place allocated for it has ended.
    pub(super) settled: Event,
    /// A slice was brought to memory, or could not be.
    pub(super) loaded: Event,
    /// A table of its own was made for an L1 entry, or could not be.
    pub(super) made: Event,
    /// The file was made longer, or could not be; or it is known which clusters are free.
    pub(super) grown: Event,
    /// A write to the header has ended.
    pub(super) header: Event,
}

impl Shared {
    pub(super) fn abandon(&self) {
        let Events { settled, loaded, made, grown, header } = &self.events;
        self.flushes.abandon();
        for event in [settled, loaded, made, grown, header, self.tables.freed()] {
            event.close();
        }
        self.epochs.abandon();
        self.container.abandon();
        self.data.iter().for_each(Container::abandon);
        if let Some(base) = self.base.image() {
            base.abandon();
        }
    }
}
