//! Chunks that were read lately, where no local cache keeps them.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;

/// 32 MiB, of all disks that have the object.
const MOST: usize = 128;

/// The last chunks that came.
#[derive(Default)]
pub(crate) struct Memory(Mutex<VecDeque<(u32, Bytes)>>);

impl Memory {
    fn list(&self) -> MutexGuard<'_, VecDeque<(u32, Bytes)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn get(&self, number: u32) -> Option<Bytes> {
        let mut list = self.list();
        let place = list.iter().rposition(|(other, _)| *other == number)?;
        let found = list.remove(place)?;
        let bytes = found.1.clone();
        list.push_back(found);
        Some(bytes)
    }

    pub(crate) fn put(&self, number: u32, bytes: Bytes) {
        let mut list = self.list();
        list.retain(|(other, _)| *other != number);
        if list.len() >= MOST {
            list.pop_front();
        }
        list.push_back((number, bytes));
    }

    pub(crate) fn forget(&self, number: u32) {
        self.list().retain(|(other, _)| *other != number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_used_last_stays() {
        let memory = Memory::default();
        for number in 0..MOST as u32 {
            memory.put(number, Bytes::new());
        }
        assert!(memory.get(0).is_some());
        memory.put(500, Bytes::new());
        assert!(memory.get(0).is_some() && memory.get(1).is_none() && memory.get(500).is_some());
        memory.forget(500);
        assert!(memory.get(500).is_none());
    }
}
