//! A model of the restart log under a kill at any step: what was acknowledged is on the disk or in the log.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use ringtap_io::sync::{Mutex, broken, step};
use ringtap_sim::threads::{must_notice, spawn, try_orders};

use crate::{Identity, RestartLog};

const IDENTITY: Identity = Identity { boot: 1, file: (2, 3) };
const CAPACITY: u64 = 4;
const PLACES: u64 = 2;

/// What a kill leaves: the log's memory, and what flushes have made stable. Plain memory: looking is no step.
struct World {
    log: RestartLog,
    words: Arc<[AtomicU64]>,
    stable: [AtomicU64; PLACES as usize],
    /// What was acknowledged of each place.
    acknowledged: [AtomicU64; PLACES as usize],
    /// What is in memory only, under the lock under which it changes.
    tables: Mutex<[u64; PLACES as usize]>,
    flushing: Mutex<()>,
}

impl World {
    fn new() -> World {
        let words: Arc<[AtomicU64]> =
            (0..RestartLog::words_for(CAPACITY)).map(|_| AtomicU64::new(0)).collect();
        let log = RestartLog::with(Arc::new(words.clone()), IDENTITY, CAPACITY);
        log.start(7);
        World {
            log,
            words,
            stable: Default::default(),
            acknowledged: Default::default(),
            tables: Mutex::new([0; PLACES as usize]),
            flushing: Mutex::new(()),
        }
    }

    /// As a commit does: note, change, then acknowledge.
    fn change(&self, place: u64, value: u64) {
        loop {
            {
                let mut tables = self.tables.lock().expect("no panic");
                if self.log.append([place, value, !value]) {
                    tables[place as usize] = value;
                    break;
                }
            }
            self.flush(false);
        }
        step();
        self.acknowledged[place as usize].store(value, SeqCst);
    }

    /// As a flush does, with `fails` up to where it writes.
    fn flush(&self, fails: bool) {
        let _one_by_one = self.flushing.lock().expect("no panic");
        let copy = {
            let tables = self.tables.lock().expect("no panic");
            self.log.begin_flush();
            *tables
        };
        if broken("log: dropped early") {
            self.log.end_flush();
        }
        step();
        if fails {
            return;
        }
        for (stable, value) in self.stable.iter().zip(copy) {
            stable.store(value, SeqCst);
            step();
        }
        let _tables = self.tables.lock().expect("no panic");
        self.log.end_flush();
    }

    /// The server is killed here, between two steps of whoever is at it: what would the next one read?
    fn kill(&self) {
        let words: Vec<AtomicU64> =
            self.words.iter().map(|word| AtomicU64::new(word.load(SeqCst))).collect();
        let acknowledged = [0, 1].map(|at| self.acknowledged[at].load(SeqCst));
        let mut found = [0, 1].map(|at| self.stable[at].load(SeqCst));
        let left = RestartLog::with(Arc::new(words), IDENTITY, CAPACITY).left().expect("a log");
        for [place, value, check] in left.records {
            assert_eq!(check, !value, "a torn record of place {place}");
            found[place as usize] = value;
        }
        for (found, acknowledged) in found.iter().zip(acknowledged) {
            // A change that was not acknowledged may be there too; an older one may not.
            assert!(
                *found >= acknowledged,
                "{found} is left where {acknowledged} was acknowledged"
            );
        }
    }
}

fn a_kill_loses_nothing() {
    let world = Arc::new(World::new());
    let mut threads = Vec::new();
    for place in 0..PLACES {
        let world = world.clone();
        threads.push(spawn(move || {
            for value in 1..=4 {
                world.change(place, value);
            }
        }));
    }
    let flusher = world.clone();
    threads.push(spawn(move || {
        flusher.flush(false);
        flusher.flush(true);
        flusher.flush(false);
    }));
    let killer = world.clone();
    threads.push(spawn(move || {
        for _ in 0..12 {
            step();
            killer.kill();
        }
    }));
    for thread in threads {
        thread.join().expect("ended well");
    }
    world.kill();
}

#[test]
fn what_was_acknowledged_outlives_a_kill_at_any_step() {
    try_orders("restart log", 16_000, a_kill_loses_nothing);
    must_notice("log: told first", 4000, a_kill_loses_nothing);
    must_notice("log: dropped early", 4000, a_kill_loses_nothing);
}
