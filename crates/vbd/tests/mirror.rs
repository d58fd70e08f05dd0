//! Disks copied while guests use them, on the simulated disk: power cuts at any turn, targets that fail, jobs that are
//! cancelled. `RINGTAP_SEEDS` sets how many seeds are tried; a failure names its seed.

mod common;
#[path = "common/container.rs"]
mod container;
#[path = "common/faults.rs"]
mod faults;
#[path = "common/spec.rs"]
mod spec;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use ringtap_image::qcow2::CreateOptions;
use ringtap_image::{CacheMode, Image};
use ringtap_io::{File, Io};
use ringtap_sim::{
    Bench, Disk, End, Guest, Promise, Refuses, SECTOR, all_well, caught, hear_of_cut, queues,
    random_asks, read_all, seeds, turn_all,
};
use ringtap_vbd::{
    Ending, Error, Job, Mirror, MirrorError, Phase, Scope, Tracker, Unfinished, Vbd, Wrongs,
};

use common::Served;
use container::make;
use spec::Spec;

const SECTORS: u64 = 96;
const SIZE: u64 = SECTORS * SECTOR as u64;
const SECOND: u64 = 1_000_000_000;
/// Targets that each disk has.
const TARGETS: usize = 4;

/// What was seen to happen.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    copies: u32,
    pivots: u32,
    /// Jobs into what lies below.
    commits: u32,
    failed: u32,
    /// Jobs that failed for the disk could not be read.
    unread: u32,
    /// How often one that paused was resumed.
    resumed: u32,
    cancelled: u32,
    /// Jobs that others went on with.
    left: u32,
    cut: u32,
    killed: u32,
    /// Jobs in which requests changed both.
    both: u32,
}

/// What a completed copy holds.
type Moment = Rc<RefCell<Option<(Spec, Vec<u8>)>>>;

#[derive(Clone)]
struct World {
    seed: u64,
    disk: Disk,
    /// As the operator's register says.
    register: Rc<RefCell<Spec>>,
    /// The raw image below overlays.
    base: File,
    spare: Vec<File>,
    /// Files with a bad sector.
    broken: Vec<File>,
    wrongs: Wrongs,
    seen: Rc<RefCell<Seen>>,
    moment: Moment,
}

/// What a mirror of the run is to be.
#[derive(Clone)]
struct Plan {
    scope: Scope,
    ending: Ending,
    target: Spec,
    cancel_after: Option<u64>,
    /// It is cancelled for another to go on with, so often.
    nexts: u8,
    /// The target reads as zeros.
    fresh: bool,
}

impl World {
    fn new(seed: u64, wrongs: Wrongs, rng: &mut fastrand::Rng) -> World {
        let disk = Disk::new(SECTOR);
        // Where space is short, only targets' is.
        let base = disk.add_device(SIZE, 512);
        let spare = (0..=TARGETS).map(|_| disk.add_file(0, 512)).collect();
        let register = Rc::new(RefCell::new(Spec::Raw(base)));
        let (seen, moment, broken) = Default::default();
        let mut world = World { seed, disk, register, base, spare, broken, wrongs, seen, moment };
        if rng.bool() {
            let top = world.spare.pop().expect("a file");
            world.create(top, true);
            *world.register.borrow_mut() = Spec::Qcow2(top, Some(Box::new(Spec::Raw(base))));
        }
        world
    }

    fn create(&self, file: File, overlay: bool) {
        let options = CreateOptions {
            size: SIZE,
            cluster_size: 4096,
            backing_file: overlay.then(|| "below".into()),
            ..CreateOptions::default()
        };
        make(self, file, options);
    }

    /// A target that suits what is copied, and whether only what the topmost image holds is.
    fn target(&mut self, rng: &mut fastrand::Rng) -> (Spec, bool) {
        let is_overlay = matches!(&*self.register.borrow(), Spec::Qcow2(_, Some(_)));
        if is_overlay && rng.u8(0..3) == 0 {
            // A commit: what the topmost holds is brought into what lies below it.
            self.seen.borrow_mut().commits += 1;
            return (Spec::Raw(self.base), true);
        }
        let file = self.spare.pop().expect("a file");
        let top = matches!(&*self.register.borrow(), Spec::Qcow2(_, Some(_))) && rng.bool();
        if !top && rng.bool() {
            self.disk.poke(file, 0, &vec![0xee; SIZE as usize]);
            return (Spec::Raw(file), false);
        }
        self.create(file, top);
        (Spec::Qcow2(file, top.then(|| Box::new(Spec::Raw(self.base)))), top)
    }

    /// Copy while the guest asks, until all is done or the power goes.
    fn run(&mut self, guest: &Guest, rng: &mut fastrand::Rng) -> Result<(), String> {
        let (target, top) = self.target(rng);
        let began_as = self.register.borrow().file();
        let vbd = self.register.borrow().served_by(self);
        let onto = target.served_by(self);
        if rng.bool() {
            self.disk.cut_power_at_turn(self.disk.turns() + rng.u64(1..600));
        }
        let space_is_short = rng.u8(0..6) == 0 && self.register.borrow().file() == self.base;
        if space_is_short {
            self.disk.limit_space(rng.u64(0..SIZE));
        } else if rng.u8(0..6) == 0 {
            self.broken.push(target.file());
            let at = rng.u64(0..2 * SIZE);
            self.disk.break_range(target.file(), at..at + 512, Refuses::Writes);
        } else if rng.u8(0..4) == 0 && matches!(*self.register.borrow(), Spec::Raw(_)) {
            self.broken.push(began_as);
            let at = rng.u64(0..SECTORS) * SECTOR as u64;
            self.disk.break_range(began_as, at..at + 512, Refuses::Reads);
        }
        let mut plans = vec![Plan {
            scope: if top { Scope::Above(1) } else { Scope::All },
            ending: if rng.bool() { Ending::Pivot } else { Ending::Copy },
            target: target.clone(),
            cancel_after: (rng.u8(0..4) == 0).then(|| rng.u64(0..300)),
            nexts: 0,
            fresh: matches!(target, Spec::Qcow2(_, None)),
        }];
        if rng.bool() {
            plans[0].cancel_after = Some(rng.u64(0..300));
            plans[0].nexts = rng.u8(1..4);
        }
        if plans[0].ending == Ending::Copy {
            // Later copies are of what has changed since.
            for _ in 0..rng.u8(0..3) {
                let ending = if rng.u8(0..3) == 0 { Ending::Pivot } else { Ending::Copy };
                let cancel_after = (rng.u8(0..4) == 0).then(|| rng.u64(0..100));
                let nexts = if cancel_after.is_some() { rng.u8(0..3) } else { 0 };
                plans.push(Plan { ending, cancel_after, nexts, fresh: false, ..plans[0].clone() });
            }
        }
        let mut all = queues(&self.disk, self.seed, 2);
        let asks = random_asks(rng, SECTORS, 150);
        guest.spawn_on(&mut all, || Served::new(vbd.fork()), 3, asks);
        let closes = vbd.disk().clone();
        let jobs = Jobs {
            io: all[0].io().clone(),
            disk: self.disk.clone(),
            vbd,
            onto,
            guest: guest.clone(),
            register: self.register.clone(),
            moment: self.moment.clone(),
            seen: self.seen.clone(),
            wrongs: self.wrongs,
            rng: RefCell::new(rng.fork()),
        };
        all[0].spawn(async move { jobs.run(plans).await });
        turn_all(&self.disk, &mut all);
        if !self.disk.is_cut() {
            // A bad sector that the job has not met is the guest's own once the target is its disk.
            let is_bad = [began_as, self.register.borrow().file()]
                .iter()
                .any(|file| self.broken.contains(file));
            let failures = guest.failures();
            assert!(is_bad || failures.is_empty(), "seed {}: {failures:?}", self.seed);
            let io = all[1].io().clone();
            faults::mend(&self.disk);
            all[1].spawn(async move {
                let _the_power_may_go: Result<(), Error> = closes.close(&io).await;
            });
            turn_all(&self.disk, &mut all);
        }
        hear_of_cut(&self.disk, &mut all);
        self.seen.borrow_mut().cut += u32::from(self.disk.is_cut());
        guest.wrong().map_or(Ok(()), |wrong| Err(wrong.to_string()))
    }

    /// A copy is what the disk was at its moment, and stays so.
    fn check_moment(&self) -> Result<(), String> {
        let moment = self.moment.borrow();
        let Some((spec, bytes)) = &*moment else { return Ok(()) };
        let found = spec.shown_by(self);
        match (0..SECTORS as usize).find(|at| sector(&found, *at) != sector(bytes, *at)) {
            Some(at) => Err(format!("sector {at} of the copy is not as it was at its moment")),
            None => Ok(()),
        }
    }
}

impl Bench for World {
    fn disk(&self) -> &Disk {
        &self.disk
    }

    fn seed(&self) -> u64 {
        !self.seed
    }

    /// Nothing fails any more.
    fn on(&self, disk: Disk, _: End) -> World {
        faults::mend(&disk);
        World { disk, ..self.clone() }
    }

    /// The disk as the register says it is; the copy is as it was.
    fn look(&self, _: End) -> Result<Vec<u8>, String> {
        self.check_moment()?;
        Ok(self.register.borrow().shown_by(self))
    }
}

fn sector(bytes: &[u8], at: usize) -> &[u8] {
    &bytes[at * SECTOR..(at + 1) * SECTOR]
}

async fn read(io: &Io, vbd: &Vbd) -> Result<Vec<u8>, Error> {
    read_all(io, &Served::new(vbd.fork()), SECTORS).await
}

/// The mirrors of one run.
struct Jobs {
    io: Io,
    disk: Disk,
    vbd: Vbd,
    onto: Vbd,
    guest: Guest,
    register: Rc<RefCell<Spec>>,
    moment: Moment,
    seen: Rc<RefCell<Seen>>,
    wrongs: Wrongs,
    rng: RefCell<fastrand::Rng>,
}

impl Jobs {
    async fn run(&self, plans: Vec<Plan>) {
        let mut tracker: Option<Arc<Tracker>> = None;
        for mut plan in plans {
            if let Some(tracker) = &tracker {
                plan.scope = Scope::Changed(tracker.clone());
            }
            let next = Cell::new(None);
            let moment = RefCell::new(None);
            self.moment.take();
            let end = self.mirrors(&plan, &next, &moment).await;
            if self.disk.is_cut() {
                return;
            }
            let mut seen = self.seen.borrow_mut();
            match end {
                Ok(None) => {
                    seen.copies += 1;
                    let bytes = moment.take().expect("the disk stood still");
                    *self.moment.borrow_mut() = Some((plan.target.clone(), bytes));
                    if let Some(next) = next.take() {
                        tracker.get_or_insert(Arc::new(next));
                    }
                }
                Ok(Some(_former)) => {
                    seen.pivots += 1;
                    self.disk.limit_space(u64::MAX);
                    return;
                }
                Err(MirrorError::Cancelled) => seen.cancelled += 1,
                Err(MirrorError::Write { .. } | MirrorError::Flush { .. }) => seen.failed += 1,
                Err(MirrorError::Read { .. } | MirrorError::Status { .. }) => seen.unread += 1,
                Err(why) => panic!("{why}"),
            }
        }
    }

    /// A mirror, and those that go on where it was left.
    async fn mirrors(
        &self,
        plan: &Plan,
        tracker: &Cell<Option<Tracker>>,
        moment: &RefCell<Option<Vec<u8>>>,
    ) -> Result<Option<Box<dyn Image>>, MirrorError> {
        let (mut job, mut nexts, mut plan) = (Job::new(), plan.nexts, plan.clone());
        plan.fresh &= self.rng.borrow_mut().bool();
        loop {
            let end = self.mirror(&plan, &job, nexts > 0, tracker, moment).await;
            let is_left = matches!(end, Err(MirrorError::Cancelled)) && nexts > 0;
            if !is_left || self.disk.is_cut() {
                return end;
            }
            let mut left = job.take_unfinished().expect("the target is left alone");
            self.seen.borrow_mut().left += 1;
            let (turns, words) = {
                let mut rng = self.rng.borrow_mut();
                (rng.u64(0..60), rng.bool())
            };
            for _ in 0..turns {
                self.io.next_turn().await;
            }
            if words {
                // As another process would have it, from when the disk stands still.
                let own = self.vbd.disk().fork();
                if let Ok(_still) = own.quiesce(&self.io, SECOND).await {
                    let said = left.left();
                    drop(left);
                    left = Unfinished::of(self.vbd.disk(), &said);
                }
            }
            nexts -= 1;
            job = Job::new();
            job.go_on_from(left);
            plan.cancel_after = (nexts > 0).then(|| self.rng.borrow_mut().u64(0..200));
        }
    }

    async fn mirror(
        &self,
        plan: &Plan,
        job: &Job,
        for_next: bool,
        tracker: &Cell<Option<Tracker>>,
        moment: &RefCell<Option<Vec<u8>>>,
    ) -> Result<Option<Box<dyn Image>>, MirrorError> {
        let (io, disk) = (&self.io, self.vbd.disk());
        let mut mirror = Mirror::new(disk.clone(), self.onto.disk().clone());
        {
            let mut rng = self.rng.borrow_mut();
            mirror.scope = plan.scope.clone();
            mirror.zeroed = plan.fresh;
            mirror.granularity = 512 << rng.u8(0..5);
            mirror.piece = 4096 << rng.u8(0..3);
            mirror.requests = rng.usize(1..5);
            mirror.still_bytes = SECTOR as u64 * rng.u64(0..10);
            mirror.still_for = SECOND;
            // Clocks of the simulation jump where nothing else is in flight.
            mirror.limit = None;
            mirror.patience = (rng.u8(0..4) > 0).then(|| rng.u32(0..3));
            mirror.max_slowdown = rng.bool().then(|| rng.u32(0..100));
            mirror.behind = [rng.u64(0..4), rng.u64(0..8)].map(|few| few * SECTOR as u64);
            mirror.on_errors = faults::either(&mut rng);
            mirror.wrongs = self.wrongs;
            let seen = self.seen.clone();
            let resumed = move || seen.borrow_mut().resumed += 1;
            faults::see_to(io, &self.disk, job, rng.u64(0..300), resumed);
        }
        if let Some(turns) = plan.cancel_after {
            let (io, job) = (io.clone(), job.clone());
            self.io.spawn(async move {
                for _ in 0..turns {
                    io.next_turn().await;
                }
                match for_next {
                    true => job.cancel_for_next(),
                    false => job.cancel(),
                }
            });
        }
        let watches = (job.clone(), io.clone(), self.seen.clone());
        self.io.spawn(async move {
            let (job, io, seen) = watches;
            while !matches!(job.progress().phase, Phase::Done | Phase::Failed) {
                if job.progress().phase == Phase::Both {
                    seen.borrow_mut().both += 1;
                    return;
                }
                io.next_turn().await;
            }
        });
        let still = async || {
            faults::mend(&self.disk);
            let now = Vbd::new(disk.image()?, CacheMode::None);
            let bytes = read(io, &now).await?;
            self.guest.may_find(&bytes).expect("what the guest wrote");
            *moment.borrow_mut() = Some(bytes);
            tracker.set(Some(disk.track(4096)));
            if plan.ending == Ending::Pivot {
                io.next_turn().await;
                *self.register.borrow_mut() = plan.target.clone();
                io.next_turn().await;
            }
            Ok::<_, Error>(())
        };
        mirror.run(io, job, plan.ending, still).await
    }
}

/// Copy with power cuts in between, and look at what is left.
fn trial(seed: u64, wrongs: Wrongs, seen: &mut Seen) -> Result<(), String> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut world = World::new(seed, wrongs, &mut rng);
    world.seen = Rc::new(RefCell::new(*seen));
    let mut guest = Guest::new(SECTORS, Promise::Flush);
    for _ in 0..2 {
        let run = world.run(&guest, &mut rng);
        *seen = *world.seen.borrow();
        run?;
        if !world.disk.is_cut() {
            world.disk.cut_power_at_turn(u64::MAX);
            // Nobody ended it: it is there as after a kill.
            world.finds(&guest, End::Kill).map_err(|wrong| format!("at the end: {wrong}"))?;
        }
        // Tables of qcow2 in memory are gone with the server, here.
        let end = match End::any(&mut rng) {
            End::Kill if matches!(*world.register.borrow(), Spec::Raw(_)) => End::Kill,
            _ => End::PowerCut,
        };
        seen.killed += u32::from(end == End::Kill);
        world = world.after(end, rng.u64(..));
        guest = world.finds(&guest, end)?;
    }
    Ok(())
}

#[test]
fn disks_are_copied_and_replaced_by_copies_under_load() {
    let mut seen = Seen::default();
    all_well(seeds(400), (), |seed| trial(seed, Wrongs::default(), &mut seen));
    println!("{seen:?}");
    let Seen {
        copies,
        pivots,
        commits,
        failed,
        unread,
        resumed,
        cancelled,
        left,
        cut,
        killed,
        both,
    } = seen;
    let all =
        [copies, pivots, commits, failed, unread, resumed, cancelled, left, cut, killed, both];
    assert!(all.iter().all(|count| *count > 10), "{seen:?}");
}

/// That mirrors are wrong in one way is seen.
fn is_caught(wrongs: Wrongs) {
    let mut seen = Seen::default();
    caught(wrongs, 6, 200, |seed| trial(seed, wrongs, &mut seen).is_err());
    println!("{seen:?}");
}

#[test]
fn a_tracker_that_misses_requests_is_caught() {
    is_caught(Wrongs { misses: 4, ..Wrongs::default() });
}

#[test]
fn marks_that_are_cleared_late_are_caught() {
    is_caught(Wrongs { clears_late: true, ..Wrongs::default() });
}

#[test]
fn what_was_being_copied_when_a_job_was_left_and_is_forgotten_is_caught() {
    is_caught(Wrongs { forgets: true, ..Wrongs::default() });
}

#[test]
fn a_target_that_is_not_flushed_is_caught() {
    is_caught(Wrongs { unflushed: true, ..Wrongs::default() });
}

#[test]
fn ranges_that_several_write_to_at_once_are_caught() {
    is_caught(Wrongs { unlocked: true, ..Wrongs::default() });
}
