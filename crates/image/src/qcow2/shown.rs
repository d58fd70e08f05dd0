//! What an image has in memory, as it is told to people.

use std::sync::atomic::Ordering::SeqCst;

use super::Shared;
use crate::state::{CacheState, LayerState, LogState};

impl Shared {
    pub(super) fn layer_state(&self) -> LayerState {
        let state = self.state();
        let bytes = self.tables.geometry.bytes_of_slice();
        let (used, most) = state.cache.frames_used(&self.tables);
        let dirty = state.cache.dirty_slices();
        let cache = CacheState {
            used: used * bytes,
            most: most * bytes,
            dirty,
            dirty_bytes: dirty * bytes,
        };
        LayerState {
            encrypted: self.key.is_some(),
            dirty: self.dirty.load(SeqCst),
            flushing: self.flushes.is_running(),
            cache: Some(cache),
            allocating: state.allocations.reserved(),
            resting: (state.released.len() + state.retired.len()) as u64,
            restart_log: self.restart.get().map(LogState::of),
            below: self.base.image().map(|base| Box::new(base.state())),
            ..LayerState::of(&self.info, Some(&self.container))
        }
    }
}
