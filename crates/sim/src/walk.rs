//! Two images whose servers end in every way, and that are copied, put back, rolled back, swapped and written to
//! by others in between: what a killed server left is taken up where its image is as it was left, and nowhere
//! else.

use std::cell::RefCell;
use std::ops::{AddAssign, Range};
use std::rc::Rc;

use ringtap_io::File;

use crate::{Ask, Bench, Disk, End, Guest, Promise, Saved, random_asks};

/// A file system's clock goes on so much at a time: two states of a file nearer to each other are not told apart.
const TICK: u64 = 25_000_000;
/// So long after its server was killed somebody else's write is told from its own, and longer.
const LATER: Range<u64> = 1_100_000_000..10_000_000_000;
const STEPS: usize = 30;

/// Whoever looks at a disk at every turn of a run.
pub type Look = Box<dyn FnMut(&Disk)>;

/// A bench whose image has a restart log.
pub trait Logged: Bench + 'static {
    /// The image, which is all that is copied and put back.
    fn file(&self) -> File;

    /// Sectors of the guest's disk.
    fn sectors(&self) -> u64;

    /// By which orders the next server works.
    fn set_seed(&mut self, seed: u64);

    /// Serve the image until the guest has no more to ask, or for so many turns.
    fn serve(
        &self,
        guest: &Guest,
        asks: Vec<Ask>,
        turns: Option<u64>,
        look: Look,
    ) -> Result<(), String>;

    /// Open it, and close it in good order.
    fn close(&self);

    /// What whoever opens it finds.
    fn found(&self, read_only: bool) -> Result<Vec<u8>, String>;

    /// What is in the image itself, which must be without contradictions. Nothing is changed.
    fn holds(&self) -> Result<Vec<u8>, String>;

    /// Make stable what is in the image.
    fn make_stable(&self);

    /// The same image before somebody who does not know of the log.
    fn before_others(&self) -> Self;

    /// The image goes on as it lies there, with nothing in its log.
    fn drop_log(&mut self);
}

/// What a file holds, and since when.
#[derive(Clone, PartialEq, Eq)]
struct State {
    bytes: Vec<u8>,
    time: u64,
}

/// One image, and what is known of it.
struct One<B> {
    bench: B,
    /// Who knows what it held when nobody had put anything else there.
    guest: Guest,
    /// How its server left it when it was last served.
    left: State,
    /// How servers found it since its log was last empty, with whoever knows what was in it then. Who finds it so again
    /// cannot tell that from a server that was killed before anything was written.
    before: Vec<(State, Guest)>,
    /// Its server was killed.
    killed: bool,
    /// And left what can be seen.
    waits: bool,
}

/// How an image stands to what was left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Now {
    Same,
    Other,
    /// Other bytes within one tick of the same time.
    Either,
}

fn state_of<B: Logged>(bench: &B) -> State {
    let (disk, file) = (bench.disk(), bench.file());
    let mut bytes = vec![0; disk.size(file) as usize];
    disk.peek(file, 0, &mut bytes);
    State { bytes, time: disk.modified(file) }
}

impl<B: Logged> One<B> {
    fn new(bench: B) -> One<B> {
        let guest = Guest::new(bench.sectors(), Promise::Flush);
        let left = state_of(&bench);
        One { bench, guest, left, before: vec![], killed: false, waits: false }
    }

    fn now(&self) -> Now {
        let state = state_of(&self.bench);
        match () {
            () if state == self.left => Now::Same,
            () if self.killed && state.time.abs_diff(self.left.time) < TICK => Now::Either,
            () => Now::Other,
        }
    }

    /// Whether it is as a server found it, and this is what that one's guest, or the last, may find.
    fn is_as_before(&self, found: &[u8]) -> bool {
        let state = state_of(&self.bench);
        let mut before = self.before.iter().filter(|(before, _)| *before == state).peekable();
        before.peek().is_some() && self.guest.may_find(found).is_ok()
            || before.any(|(_, guest)| guest.may_find(found).is_ok())
    }

    /// What whoever opens it finds, on a copy of it all.
    fn found(&self, read_only: bool) -> Result<Vec<u8>, String> {
        let bench = self.bench.after(End::Kill, 0);
        let found = bench.found(read_only)?;
        if !read_only {
            bench.holds().map_err(|wrong| format!("once it was opened: {wrong}"))?;
        }
        Ok(found)
    }
}

/// What became of images that were opened.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seen {
    /// Their server had been killed, and they were as it left them.
    pub taken_up: u32,
    /// They were not.
    pub passed_by: u32,
    /// They were not, and whoever opened them was asked.
    pub refused: u32,
    /// They were not, which nobody can tell.
    pub either: u32,
}

impl AddAssign for Seen {
    fn add_assign(&mut self, more: Seen) {
        self.taken_up += more.taken_up;
        self.passed_by += more.passed_by;
        self.refused += more.refused;
        self.either += more.either;
    }
}

struct Walk<B> {
    images: [One<B>; 2],
    saved: Vec<Saved>,
    /// Both images at one time.
    snapshots: Vec<[Saved; 2]>,
    rng: fastrand::Rng,
    next_value: u64,
    seen: Seen,
}

/// Steps at random with two images on one disk, which hold the same.
pub fn walk<B: Logged>(images: [B; 2], seed: u64) -> Result<Seen, String> {
    let mut walk = Walk::new(images, seed)?;
    for number in 0..STEPS {
        walk.step().map_err(|wrong| format!("step {number}: {wrong}"))?;
    }
    for which in 0..2 {
        walk.disk().pass(LATER.start);
        walk.settle(which).map_err(|wrong| format!("at the end: {wrong}"))?;
    }
    Ok(walk.seen)
}

impl<B: Logged> Walk<B> {
    fn new(images: [B; 2], seed: u64) -> Result<Walk<B>, String> {
        let first = images[0].disk().save(images[0].file(), 0).expect("a file");
        let mut walk = Walk {
            images: images.map(One::new),
            saved: vec![first],
            snapshots: vec![],
            rng: fastrand::Rng::with_seed(seed ^ 0x3a3a),
            next_value: 1 << 20,
            seen: Seen::default(),
        };
        for which in 0..2 {
            let holds = walk.images[which].bench.holds()?;
            walk.images[which].guest = walk.new_guest(&holds);
        }
        Ok(walk)
    }

    /// No two guests write the same values.
    fn new_guest(&mut self, holds: &[u8]) -> Guest {
        self.next_value += 1 << 20;
        Guest::holding(holds, Promise::Flush, self.next_value).expect("what guests wrote")
    }

    fn disk(&self) -> Disk {
        self.images[0].bench.disk().clone()
    }

    /// Such an end of what runs leaves this disk.
    fn set_disk(&mut self, disk: &Disk, end: End) {
        self.images.iter_mut().for_each(|one| one.bench = one.bench.on(disk.clone(), end));
    }

    /// See what whoever opens an image finds. Then it is known what it holds, and nothing is in doubt.
    fn settle(&mut self, which: usize) -> Result<(), String> {
        let read_only = self.rng.bool();
        let one = &mut self.images[which];
        let (now, found, holds) = (one.now(), one.found(read_only), one.bench.holds()?);
        match (now, found) {
            (Now::Same, Ok(found)) => {
                self.seen.taken_up += u32::from(one.waits && found != holds);
                return one.guest.may_find(&found).map_err(|wrong| wrong.to_string());
            }
            (Now::Same, Err(refused)) => return Err(format!("as it was left: {refused}")),
            (Now::Other, Ok(found)) if found == holds => {
                self.seen.passed_by += u32::from(one.waits)
            }
            (Now::Other, Ok(found)) if one.is_as_before(&found) => self.seen.either += 1,
            (Now::Other, Err(why)) if why.contains("--restart-log use") => self.seen.refused += 1,
            (Now::Other, Err(wrong)) => return Err(wrong),
            (Now::Other, Ok(found)) => {
                let differs = found.iter().zip(&holds).position(|(one, other)| one != other);
                let (left, now) = (one.left.time, state_of(&one.bench).time);
                return Err(format!(
                    "byte {differs:?} does not read as what was put there; left at {left}, now of {now}"
                ));
            }
            (Now::Either, _) => self.seen.either += 1,
        }
        one.bench.drop_log();
        (one.killed, one.waits, one.before) = (false, false, vec![]);
        one.bench.make_stable();
        one.left = state_of(&one.bench);
        let guest = self.new_guest(&holds);
        self.images[which].guest = guest;
        Ok(())
    }

    /// Serve an image, and end its server in one way or another.
    fn serve(&mut self, which: usize) -> Result<(), String> {
        self.settle(which)?;
        let count = self.rng.usize(1..16);
        let sectors = self.images[which].bench.sectors();
        let asks = random_asks(&mut self.rng, sectors, count);
        let end = self.rng.u8(0..6);
        let one = &mut self.images[which];
        one.before.push((state_of(&one.bench), one.guest.after_kill()));
        if self.rng.bool() {
            self.copy_during(which, asks)?;
        } else {
            let turns = self.rng.u64(1..60);
            let turns = (end > 1).then_some(turns);
            let one = &mut self.images[which];
            one.bench.set_seed(self.rng.u64(..));
            one.bench.serve(&one.guest, asks, turns, Box::new(|_| ()))?;
        }
        let seed = self.rng.u64(..);
        if end == 5 {
            return self.cut_power(which, seed);
        }
        let disk = self.disk().after_kill(seed);
        self.set_disk(&disk, End::Kill);
        let one = &mut self.images[which];
        one.guest = one.guest.after_kill();
        one.killed = end > 0;
        if !one.killed {
            one.before.clear();
            one.bench.close();
            let holds = one.bench.holds()?;
            one.guest.may_find(&holds).map_err(|wrong| format!("closed: {wrong}"))?;
        }
        one.left = state_of(&one.bench);
        one.waits = one.killed && one.found(true)? != one.bench.holds()?;
        Ok(())
    }

    /// Serve it to the end, with a copy taken of it at some turn.
    fn copy_during(&mut self, which: usize, asks: Vec<Ask>) -> Result<(), String> {
        let kept: Rc<RefCell<Option<Saved>>> = Rc::default();
        let (keep, odds) = (kept.clone(), self.rng.u64(1..20));
        let mut own = fastrand::Rng::with_seed(self.rng.u64(..));
        let one = &mut self.images[which];
        one.bench.set_seed(self.rng.u64(..));
        let file = one.bench.file();
        let look = move |disk: &Disk| {
            if own.u64(0..odds) == 0 {
                *keep.borrow_mut() = disk.save(file, own.u64(..));
                disk.pass(2 * TICK);
            }
        };
        let end = one.bench.serve(&one.guest, asks, None, Box::new(look));
        self.saved.extend(kept.borrow_mut().take());
        end
    }

    /// The power goes, for both.
    fn cut_power(&mut self, served: usize, seed: u64) -> Result<(), String> {
        let untouched =
            [0, 1].map(|which| which == served || self.images[which].now() == Now::Same);
        let disk = self.disk().after_power_cut(seed);
        self.set_disk(&disk, End::PowerCut);
        for (which, untouched) in (0..).zip(untouched) {
            let one = &mut self.images[which];
            (one.killed, one.waits, one.before) = (false, false, vec![]);
            let holds = one.bench.holds()?;
            if untouched {
                one.guest.after_power_cut(&holds).map_err(|wrong| format!("a cut: {wrong}"))?;
            }
            one.left = state_of(&one.bench);
            let guest = self.new_guest(&holds);
            self.images[which].guest = guest;
        }
        Ok(())
    }

    /// Somebody who does not know of the log writes to the image.
    fn write_without_log(&mut self, which: usize) -> Result<(), String> {
        let mut other = self.images[which].bench.before_others();
        other.set_seed(self.rng.u64(..));
        let guest = self.new_guest(&other.holds()?);
        let asks = random_asks(&mut self.rng, other.sectors(), 20);
        other.serve(&guest, asks, None, Box::new(|_| ()))?;
        if self.rng.bool() {
            other.close();
        }
        let disk = self.disk().after_kill(self.rng.u64(..));
        self.set_disk(&disk, End::Kill);
        Ok(())
    }

    fn step(&mut self) -> Result<(), String> {
        let (which, keep_time) = (self.rng.usize(0..2), self.rng.bool());
        let disk = self.disk();
        disk.pass(self.rng.u64(LATER));
        let files = [0, 1].map(|which| self.images[which].bench.file());
        let save = |file| disk.save(file, 0).expect("a file");
        match self.rng.u8(0..10) {
            0..=3 => return self.serve(which),
            4 => self.saved.push(save(files[which])),
            5 => {
                // Often the oldest: in an image that is full there is nothing left to note.
                let of = if self.rng.bool() { 1 } else { self.saved.len() };
                let saved = &self.saved[self.rng.usize(0..of)];
                disk.restore(files[which], saved, keep_time);
            }
            6 => {
                let [one, other] = files.map(save);
                disk.restore(files[0], &other, keep_time);
                disk.restore(files[1], &one, keep_time);
            }
            7 => self.snapshots.push(files.map(save)),
            8 => {
                let Some(back) = self.rng.choice(&self.snapshots) else { return Ok(()) };
                for (file, saved) in files.iter().zip(back) {
                    disk.restore(*file, saved, true);
                }
            }
            _ => return self.write_without_log(which),
        }
        // What was flushed is not to be undone by a copy that was not.
        self.images.iter().for_each(|one| one.bench.make_stable());
        if self.rng.bool() { self.settle(which) } else { Ok(()) }
    }
}
