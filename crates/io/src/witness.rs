//! When a file was last changed by this program, kept where a killed program leaves it.
//!
//! Every change of a watched file is counted before it is begun and after it has ended, with the wall
//! clock's time. The file system stamps the file's time of modification in between, by the same clock. So
//! whoever finds these words and the file after a kill knows whether somebody else has changed the file
//! since: then it says a later time; a copy put back with its own time says an earlier one.

use std::ops::Deref;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::time::{ClockId, clock_gettime};

/// Words that other processes may share.
pub type Words = Arc<dyn Deref<Target = [AtomicU64]> + Send + Sync>;

const BUSY_BEFORE: usize = 0;
const BEGUN: usize = 1;
const CEILING: usize = 2;
const FLOOR: usize = 3;
const ENDED: usize = 4;
const IN_FLIGHT: usize = 5;
const BYTES_BEGUN: usize = 6;
const BYTES_ENDED: usize = 7;
const BUSY_SINCE: usize = 8;

/// Nanoseconds of the wall clock since 1970.
pub type Wall = u64;

/// The words of one watched file, of whoever wants to know; until there are any nothing is noted.
#[derive(Default)]
pub struct Witness {
    noted: Mutex<Noted>,
    /// How often words came or went; 0: nothing is noted.
    turn: AtomicU64,
}

#[derive(Default)]
struct Noted {
    places: Arc<[Place]>,
    next: u64,
}

/// Words that are noted in as long as this is there.
pub struct Lent {
    witness: Arc<Witness>,
    number: u64,
}

/// Where changes are noted.
#[derive(Clone)]
struct Place {
    words: Words,
    at: usize,
    /// Whose it is; none: for good.
    lent: Option<u64>,
}

/// What a killed program's words say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Testimony {
    /// The file was written to no earlier than this.
    pub floor: Wall,
    /// And was changed no later than this, but for the changes in flight.
    pub ended: Wall,
    /// When the last change was begun.
    pub begun: Wall,
    /// Changes that were in flight.
    pub in_flight: u64,
    /// After the first and before the second nothing was changed, and of changes after it none is known to have put
    /// its stamp on the file.
    pub pause: Option<(Wall, Wall)>,
    /// Bytes whose writing was begun, and had ended.
    pub bytes: (u64, u64),
}

impl Witness {
    /// Words it takes.
    pub const WORDS: usize = 9;

    /// Note in these words from now on, from `at` on; nothing is in flight. They say what they said.
    pub fn start(&self, words: Words, at: usize) {
        self.change(|noted| {
            if noted.places.iter().all(|place| place.lent.is_some()) {
                noted.add(Place::new(words, at, None));
            }
        });
    }

    /// The same until what this gives is dropped: none where there are words for good, and nothing is changed. A reactor
    /// that has changes in flight goes on in the words there were until they have ended.
    pub fn lend(self: &Arc<Witness>, words: Words, at: usize) -> Option<Lent> {
        self.change(|noted| {
            if noted.places.iter().any(|place| place.lent.is_none()) {
                return None;
            }
            noted.next += 1;
            noted.add(Place::new(words, at, Some(noted.next)));
            Some(Lent { witness: self.clone(), number: noted.next })
        })
    }

    fn change<T>(&self, change: impl FnOnce(&mut Noted) -> T) -> T {
        let mut noted = self.lock();
        let end = change(&mut noted);
        self.turn.fetch_add(1, SeqCst);
        end
    }

    fn lock(&self) -> MutexGuard<'_, Noted> {
        self.noted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether changes are noted.
    #[inline]
    pub fn is_started(&self) -> bool {
        self.turn() > 0
    }

    #[inline]
    fn turn(&self) -> u64 {
        self.turn.load(Acquire)
    }

    /// What the words at `at` say.
    pub fn read(words: &[AtomicU64], at: usize) -> Testimony {
        let word = |index: usize| words.get(at + index).map_or(0, |word| word.load(SeqCst));
        let (floor, begun) = (word(FLOOR), word(BEGUN).max(word(CEILING)));
        let (before, since) = (word(BUSY_BEFORE), word(BUSY_SINCE));
        Testimony {
            floor,
            ended: word(ENDED),
            begun,
            in_flight: word(IN_FLIGHT),
            // Programs of before do not note it, and leave what others noted.
            pause: (floor <= before && before < since && since <= begun).then_some((before, since)),
            bytes: (word(BYTES_BEGUN), word(BYTES_ENDED)),
        }
    }

    /// Forget what was noted: the file is as it is, and its time of modification is `modified`.
    pub fn reset(words: &[AtomicU64], at: usize, modified: Wall) {
        for (index, value) in [
            (IN_FLIGHT, 0),
            (CEILING, 0),
            (BEGUN, modified),
            (FLOOR, modified),
            (ENDED, modified),
            (BYTES_BEGUN, 0),
            (BYTES_ENDED, 0),
            (BUSY_SINCE, 0),
            (BUSY_BEFORE, 0),
        ] {
            if let Some(word) = words.get(at + index) {
                word.store(value, SeqCst);
            }
        }
    }
}

impl Noted {
    fn add(&mut self, place: Place) {
        self.places = self.places.iter().cloned().chain([place]).collect();
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.witness.change(|noted| {
            let rest = noted.places.iter().filter(|place| place.lent != Some(self.number));
            noted.places = rest.cloned().collect();
        });
    }
}

impl Place {
    fn new(words: Words, at: usize, lent: Option<u64>) -> Place {
        let place = Place { words, at, lent };
        // Of a program that was killed.
        place.set(IN_FLIGHT, 0);
        let (begun, ended) =
            place.word(BYTES_BEGUN).zip(place.word(BYTES_ENDED)).unwrap_or_default();
        place.set(BYTES_ENDED, ended.max(begun));
        place
    }

    fn at(&self, index: usize) -> Option<&AtomicU64> {
        self.words.get(self.at + index)
    }

    fn word(&self, index: usize) -> Option<u64> {
        self.at(index).map(|word| word.load(Relaxed))
    }

    fn set(&self, index: usize, value: u64) {
        if let Some(word) = self.at(index) {
            word.store(value, SeqCst);
        }
    }

    /// Changes are about to begin, at `now` by the coarse clock, which time stamps of files follow.
    fn begin(&self, changes: u64, bytes: u64, now: Wall) {
        let Some(words) = self.words.get(self.at..self.at + Witness::WORDS) else { return };
        // Unless it is as before those that have ended, for none of them is known to have put its stamp on the file.
        if words[IN_FLIGHT].fetch_add(changes, SeqCst) == 0
            && words[FLOOR].load(Relaxed) >= words[BUSY_SINCE].load(Relaxed)
        {
            words[BUSY_BEFORE].store(words[ENDED].load(Relaxed), Release);
            words[BUSY_SINCE].store(now, Release);
        }
        if bytes > 0 {
            words[BYTES_BEGUN].fetch_add(bytes, Relaxed);
        }
        let before = words[BEGUN].load(Relaxed);
        if now < before {
            self.step_back(before, now);
        }
        if now != before {
            words[BEGUN].store(now, SeqCst);
        }
    }

    /// The clock was set back: time stamps begin again below those that are there.
    #[cold]
    fn step_back(&self, before: Wall, now: Wall) {
        self.set(CEILING, before);
        self.set(BUSY_SINCE, 0);
        // The file may be older yet: nothing has been written to it for some time.
        if let Some(floor) = self.at(FLOOR) {
            floor.fetch_min(now, SeqCst);
        }
    }

    /// Changes have ended, at `now`, by the exact clock. `written`: a write has put a stamp on the file,
    /// no earlier than that.
    fn end(&self, changes: u64, bytes: u64, written: Option<Wall>, now: Wall) {
        let Some(words) = self.words.get(self.at..self.at + Witness::WORDS) else { return };
        // One that began before the clock was set back says nothing about stamps after that.
        if let Some(floor) = written.filter(|floor| *floor <= now) {
            // What began later and has ended has put a later stamp on it: only the clock lowers the bound.
            if words[FLOOR].load(Relaxed) < floor {
                words[FLOOR].fetch_max(floor, SeqCst);
            }
        }
        if bytes > 0 {
            words[BYTES_ENDED].fetch_add(bytes, Relaxed);
        }
        // Before the count says that none is left.
        words[ENDED].fetch_max(now, SeqCst);
        if words[IN_FLIGHT].fetch_sub(changes, SeqCst) == changes {
            let ceiling = words[CEILING].load(Relaxed);
            if ceiling != 0 {
                words[CEILING].store(0, SeqCst);
                words[ENDED].store(now, SeqCst);
            }
        }
    }
}

impl std::fmt::Debug for Lent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lent").field("number", &self.number).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Watch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watch").field("noted", &self.noted).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Witness {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Witness").field("started", &self.is_started()).finish_non_exhaustive()
    }
}

/// The wall clock as of the kernel's last tick, which time stamps of files are taken from.
pub fn coarse_wall() -> Wall {
    nanos(clock_gettime(ClockId::RealtimeCoarse))
}

/// The wall clock.
pub fn wall() -> Wall {
    nanos(clock_gettime(ClockId::Realtime))
}

fn nanos(time: rustix::time::Timespec) -> Wall {
    (time.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(time.tv_nsec as u64)
}

/// What one reactor has in flight on a watched file.
///
/// Changes begun in the same era share the time at which the era began: a lower bound of the stamp that
/// each of them puts on the file. An era ends when none of the one before is left.
pub struct Watch {
    witness: Arc<Witness>,
    /// Where what is in flight is noted, to its end.
    places: Arc<[Place]>,
    turn: u64,
    /// Changes that are noted there as in flight.
    noted: u64,
    eras: [Era; 2],
    current: usize,
    new_era: bool,
    begun: (u64, u64),
    ended: (u64, u64),
    /// When the last of the writes among them began, 0: there is none.
    written: Wall,
}

#[derive(Clone, Copy, Debug, Default)]
struct Era {
    in_flight: u64,
    began: Wall,
}

impl Watch {
    /// Nothing is in flight.
    pub fn new(witness: Arc<Witness>) -> Watch {
        let eras = [Era::default(); 2];
        Watch {
            witness,
            places: Arc::default(),
            turn: 0,
            noted: 0,
            eras,
            current: 0,
            new_era: false,
            begun: (0, 0),
            ended: (0, 0),
            written: 0,
        }
    }

    /// Whether changes are to be noted.
    #[inline]
    pub fn is_started(&self) -> bool {
        self.witness.is_started()
    }

    /// One change more, of so many bytes, is handed over after the next [`Watch::settle_begun`]; gives its
    /// era.
    #[inline]
    pub fn begin(&mut self, bytes: u64) -> usize {
        if self.begun.0 == 0 {
            let other = 1 - self.current;
            if self.eras[other].in_flight == 0 {
                (self.current, self.new_era) = (other, true);
            } else if self.eras[self.current].in_flight == 0 {
                // Beside one that takes long, which has the other for itself.
                self.new_era = true;
            }
        }
        self.begun.0 += 1;
        self.begun.1 += bytes;
        self.eras[self.current].in_flight += 1;
        self.current
    }

    /// Note those begun, by the coarse clock. The next moment they may put their stamps on the file.
    #[inline]
    pub fn settle_begun(&mut self, now: Wall) {
        let (changes, bytes) = std::mem::take(&mut self.begun);
        if changes > 0 {
            if std::mem::take(&mut self.new_era) {
                self.eras[self.current].began = now;
            }
            if self.turn != self.witness.turn() && self.noted == 0 {
                self.look_again();
            }
            self.noted += changes;
            self.places.iter().for_each(|place| place.begin(changes, bytes, now));
        }
    }

    /// Note in the words that there are now. Nothing that is in flight is noted in others.
    #[cold]
    fn look_again(&mut self) {
        let noted = self.witness.lock();
        (self.places, self.turn) = (noted.places.clone(), self.witness.turn());
    }

    /// One of that era has ended; `written` are the bytes of a write that put a stamp on the file.
    #[inline]
    pub fn end(&mut self, era: usize, written: Option<u64>) {
        let era = &mut self.eras[era & 1];
        era.in_flight = era.in_flight.saturating_sub(1);
        self.ended.0 += 1;
        if let Some(bytes) = written {
            self.ended.1 += bytes;
            self.written = self.written.max(era.began);
        }
    }

    /// Note those that have ended, by the exact clock.
    #[inline]
    pub fn settle_ended(&mut self, now: Wall) {
        let (changes, bytes) = std::mem::take(&mut self.ended);
        if changes > 0 {
            self.noted = self.noted.saturating_sub(changes);
            let written = Some(std::mem::take(&mut self.written)).filter(|written| *written > 0);
            self.places.iter().for_each(|place| place.end(changes, bytes, written, now));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn started() -> (Arc<Witness>, Words) {
        let words: Arc<[AtomicU64]> = (0..Witness::WORDS).map(|_| AtomicU64::new(0)).collect();
        let words: Words = Arc::new(words);
        let witness = Arc::new(Witness::default());
        Witness::reset(&words, 0, 100);
        witness.start(words.clone(), 0);
        (witness, words)
    }

    #[test]
    fn bounds_of_the_stamp() {
        let (witness, words) = started();
        let mut watch = Watch::new(witness);
        let read = || Witness::read(&words, 0);
        assert_eq!((read().floor, read().ended, read().in_flight), (100, 100, 0));
        let first = watch.begin(10);
        watch.settle_begun(200);
        assert_eq!((read().floor, read().begun, read().in_flight), (100, 200, 1));
        let second = watch.begin(20);
        watch.settle_begun(300);
        assert_ne!(
            first, second,
            "an era of its own, for none was left of the one before the first"
        );
        watch.end(second, Some(20));
        watch.settle_ended(310);
        assert_eq!((read().floor, read().in_flight, read().bytes), (300, 1, (30, 20)));
        // What began earlier has put no later stamp on the file, or one that is later yet.
        watch.end(first, Some(10));
        watch.settle_ended(400);
        assert_eq!((read().floor, read().ended, read().in_flight), (300, 400, 0));
        // What puts no stamp on the file says nothing of it.
        let third = watch.begin(0);
        watch.settle_begun(500);
        watch.end(third, None);
        watch.settle_ended(510);
        assert_eq!((read().floor, read().ended), (300, 510));
    }

    #[test]
    fn a_change_that_takes_long_lowers_no_bound() {
        let (witness, words) = started();
        let mut watch = Watch::new(witness);
        let long = watch.begin(10);
        watch.settle_begun(200);
        for time in [300, 400, 500] {
            let other = watch.begin(20);
            watch.settle_begun(time);
            watch.end(other, Some(20));
            watch.settle_ended(time + 10);
            assert_eq!(Witness::read(&words, 0).floor, time, "a copy of before is known for one");
        }
        watch.end(long, Some(10));
        watch.settle_ended(600);
        assert_eq!(Witness::read(&words, 0).floor, 500);
    }

    #[test]
    fn between_which_times_nothing_was_changed() {
        let (witness, words) = started();
        let (mut one, mut other) = (Watch::new(witness.clone()), Watch::new(witness));
        let pause = || Witness::read(&words, 0).pause;
        assert_eq!(pause(), None);
        for time in [200, 300] {
            let (before, long) = (Witness::read(&words, 0).ended, one.begin(1));
            one.settle_begun(time);
            let short = other.begin(1);
            other.settle_begun(time + 10);
            assert_eq!(pause(), Some((before, time)));
            // None of these has put its stamp on the file for certain.
            other.end(short, None);
            other.settle_ended(time + 20);
            one.end(long, None);
            one.settle_ended(time + 30);
            assert_eq!(pause(), Some((before, time)));
            let next = other.begin(1);
            other.settle_begun(time + 40);
            assert_eq!(pause(), Some((before, time)));
            other.end(next, Some(1));
            other.settle_ended(time + 50);
            assert_eq!(pause(), None, "it is later than that");
        }
        let late = one.begin(1);
        one.settle_begun(400);
        assert_eq!(pause(), Some((350, 400)));
        other.begin(1);
        other.settle_begun(390);
        assert_eq!(pause(), None, "the clock was set back");
        one.end(late, Some(1));
        one.settle_ended(410);
        // Left by another program, of which those of before know nothing.
        for (before, since) in [(50, 420), (450, 420), (410, 9000)] {
            words[BUSY_BEFORE].store(before, SeqCst);
            words[BUSY_SINCE].store(since, SeqCst);
            assert_eq!(pause(), None, "{before} {since}");
        }
        Witness::reset(&words, 0, 500);
        assert_eq!((pause(), words[BUSY_SINCE].load(SeqCst)), (None, 0));
    }

    #[test]
    fn words_that_are_lent_are_noted_in_as_long_as_they_are_wanted() {
        let words: Vec<Words> = (0..3)
            .map(|_| {
                let words = (0..Witness::WORDS).map(|_| AtomicU64::new(0));
                Arc::new(words.collect::<Arc<[AtomicU64]>>()) as Words
            })
            .collect();
        let read = |which: usize| {
            let said = Witness::read(&words[which], 0);
            (said.bytes, said.in_flight)
        };
        let witness = Arc::new(Witness::default());
        let mut watch = Watch::new(witness.clone());
        let write = |watch: &mut Watch| {
            let era = watch.begin(10);
            watch.settle_begun(100);
            watch.end(era, Some(10));
            watch.settle_ended(110);
        };
        let first = witness.lend(words[0].clone(), 0).expect("lent");
        write(&mut watch);
        // What is in flight is noted to its end where it was.
        let era = watch.begin(10);
        watch.settle_begun(120);
        let second = witness.lend(words[1].clone(), 0).expect("lent");
        watch.end(era, Some(10));
        watch.settle_ended(130);
        assert_eq!((read(0), read(1)), (((20, 20), 0), ((0, 0), 0)));
        write(&mut watch);
        assert_eq!((read(0), read(1)), (((30, 30), 0), ((10, 10), 0)), "in both");
        drop(first);
        write(&mut watch);
        assert_eq!((read(0), read(1)), (((30, 30), 0), ((20, 20), 0)));
        // Those of a restart log stay.
        witness.start(words[2].clone(), 0);
        assert!(witness.lend(words[0].clone(), 0).is_none());
        drop(second);
        write(&mut watch);
        assert_eq!((read(1), read(2)), (((20, 20), 0), ((10, 10), 0)));
    }

    #[test]
    fn a_clock_set_back_makes_no_bound_too_high() {
        let (witness, words) = started();
        let (mut one, mut other) = (Watch::new(witness.clone()), Watch::new(witness));
        let read = || Witness::read(&words, 0);
        let old = one.begin(1);
        one.settle_begun(9000);
        let new = other.begin(1);
        other.settle_begun(5000);
        assert_eq!((read().floor, read().begun), (100, 9000), "any of the three may be the stamp");
        one.end(old, Some(1));
        one.settle_ended(5010);
        assert_eq!(read().floor, 100);
        other.end(new, Some(1));
        other.settle_ended(5020);
        assert_eq!((read().floor, read().begun, read().ended), (5000, 5000, 5020));
        let new = other.begin(1);
        other.settle_begun(4000);
        assert_eq!((read().floor, read().begun), (4000, 5000), "the file's is above");
        other.end(new, Some(1));
    }
}
