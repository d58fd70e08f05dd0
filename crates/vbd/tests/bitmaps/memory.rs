//! Memory that outlives a killed server, and no power cut.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard};

use ringtap_image::bitmap_store::BitMemory;
use ringtap_io::Words;

/// The memory of one image.
#[derive(Default)]
pub struct KilledMemory {
    all: Mutex<HashMap<u64, Arc<[AtomicU64]>>>,
    /// Its server is no more: what is dropped then changes nothing.
    killed: AtomicBool,
}

impl KilledMemory {
    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Arc<[AtomicU64]>>> {
        self.all.lock().expect("no panic before")
    }

    /// Whether nothing is there.
    pub fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    /// The power is gone.
    pub fn lose(&self) {
        self.lock().clear();
    }

    /// Whether there is no server.
    pub fn set_killed(&self, killed: bool) {
        self.killed.store(killed, SeqCst);
    }
}

impl BitMemory for KilledMemory {
    fn words(&self, number: u64, count: Option<usize>) -> io::Result<Words> {
        let mut all = self.lock();
        let there = all.get(&number).cloned();
        let Some(count) = count else {
            let there = there.ok_or(io::ErrorKind::NotFound)?;
            return Ok(Arc::new(there));
        };
        match there {
            Some(there) if there.len() >= count => Ok(Arc::new(there)),
            there => {
                assert!(there.is_none(), "the disks are smaller than a page of bits");
                let new: Arc<[AtomicU64]> = (0..count).map(|_| AtomicU64::new(0)).collect();
                all.insert(number, new.clone());
                Ok(Arc::new(new))
            }
        }
    }

    fn forget(&self, number: u64) {
        if !self.killed.load(SeqCst) {
            self.lock().remove(&number);
        }
    }

    fn forget_but(&self, numbers: &[u64]) {
        if !self.killed.load(SeqCst) {
            self.lock().retain(|number, _| numbers.contains(number));
        }
    }
}
