//! When to spin for the next event instead of sleeping.
//!
//! Sleeping and being woken costs some microseconds on both sides. A queue spins for as long as its
//! events have lately come sooner than that pays, and not at all once they come later: an idle
//! guest, or a disk that takes milliseconds, costs no CPU. Waiting for the guest and waiting for the
//! disk are told apart, for one may be quick and the other slow, and so, for ublk, are the disk's reads
//! from what else it does. Where others wait for this processor (the thread was put off it while it spun)
//! nobody spins for a while. What waking costs differs much between machines; queues of ublk and Xen,
//! which often run inside a virtual one, measure it ([`waking_takes`]).
//!
//! With many requests on the disk the question is another: how much to do at once. Everything that
//! is there in one go makes the whole depth move in step, and the disk idles while the software
//! works; one completion at a time wakes everybody for each of them. So few requests are handed to
//! the disk at a time ([`batch`]), and a part of those on it is waited for, but not long
//! ([`Batching`]).

use std::num::NonZeroU64;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use nix::sys::resource::{UsageWho, getrusage};
use ringtap_io::Time;

pub(crate) use crate::tuning::BATCH_WAIT;
use crate::tuning::{
    BATCH_OF_FEW, BATCH_OF_MANY, FEW, GIVEN_WAKES, GIVEN_WAY, LEAST, LONG_REST, MANY, MOST,
    MOST_FOR_DISK, MOST_FOR_GUEST, PART, Polling, REST, SPINNING_PART, UNNOTIFIED, WAKES,
};

/// Whether the guest may be told of `unnotified` answers a little later: where nothing waits for the disk
/// and more is to be done, that takes microseconds, and waking the guest costs as much as a request.
#[inline]
pub(crate) fn coalesce(unnotified: u16, on_disk: usize, more: bool) -> bool {
    unnotified < UNNOTIFIED && on_disk == 0 && more
}

/// How many requests to take from the guest and hand on in one go.
#[inline]
pub(crate) fn batch(in_flight: usize) -> usize {
    if in_flight > FEW { BATCH_OF_MANY } else { BATCH_OF_FEW }
}

/// Decides whether to sleep until several requests have ended rather than one.
#[derive(Default)]
pub(crate) struct Batching {
    rest_until: Time,
}

impl Batching {
    /// How many to sleep for, up to [`BATCH_WAIT`]; none to sleep for the next of any kind.
    #[inline]
    pub(crate) fn wait_for(&self, now: Time, in_flight: usize) -> Option<u32> {
        (in_flight >= MANY && now >= self.rest_until).then_some((in_flight / PART) as u32)
    }

    /// It slept; did anything end? A disk too slow for that is left alone for a while.
    #[inline]
    pub(crate) fn woken(&mut self, now: Time, any: bool) {
        if !any {
            self.rest_until = now + REST;
        }
    }
}

/// What a queue waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// Its guest: nothing is in flight.
    Guest,
    /// Its disk, with few requests on it, all of them reads.
    Read,
    /// Its disk, with few requests on it of any kind.
    Disk,
    /// Its disk, with many.
    BusyDisk,
}

impl Wait {
    /// What is waited for with so many requests in flight.
    pub(crate) fn of(in_flight: usize) -> Wait {
        match in_flight {
            0 => Wait::Guest,
            1..=FEW => Wait::Disk,
            _ => Wait::BusyDisk,
        }
    }

    /// The same where it is known how many of them are reads.
    pub(crate) fn of_reads(in_flight: usize, reads: usize) -> Wait {
        match Wait::of(in_flight) {
            Wait::Disk if reads == in_flight => Wait::Read,
            wait => wait,
        }
    }
}

/// How long a sleeping thread needs to run again on this machine: some microseconds on bare metal, a
/// hundred where waking a processor is an exit to a hypervisor. Measured once, in a few
/// milliseconds.
pub(crate) fn waking_takes() -> Time {
    static TAKES: OnceLock<Time> = OnceLock::new();
    *TAKES.get_or_init(|| {
        let nap = Duration::from_micros(50);
        // Timers of ordinary threads come late on purpose.
        let exact = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
        let mut late = [0; 9].map(|_: Time| {
            let began = Instant::now();
            std::thread::sleep(nap);
            began.elapsed().saturating_sub(nap).as_nanos() as Time
        });
        if exact.is_ok() {
            let _ = rustix::thread::set_current_timer_slack(None);
        }
        late.sort_unstable();
        // Others may have delayed most of them.
        late[late.len() / 4]
    })
}

/// How many threads spin, and how many may at once.
struct Spinners {
    now: AtomicUsize,
    most: usize,
}

impl Spinners {
    const fn at_most(most: usize) -> Spinners {
        Spinners { now: AtomicUsize::new(0), most }
    }

    fn on(processors: usize) -> Spinners {
        Spinners::at_most(if processors < SPINNING_PART { 1 } else { processors / SPINNING_PART })
    }

    /// Those of the process.
    fn all() -> &'static Spinners {
        static ALL: OnceLock<Spinners> = OnceLock::new();
        ALL.get_or_init(|| {
            // Tests run side by side, and are not to wait for one another.
            if cfg!(test) {
                return Spinners::at_most(usize::MAX);
            }
            Spinners::on(std::thread::available_parallelism().map_or(1, |count| count.get()))
        })
    }

    fn permit(&'static self) -> Option<Permit> {
        let free = self.now.fetch_add(1, Relaxed) < self.most;
        // Dropped at once where it is one too many.
        Some(Permit(self)).filter(|_| free)
    }
}

/// Held by a thread that spins: there are only so many.
struct Permit(&'static Spinners);

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.now.fetch_sub(1, Relaxed);
    }
}

/// Decides between spinning and sleeping, from how long the last waits took.
pub(crate) struct Poller {
    /// What the operator allows.
    most: Time,
    spinners: &'static Spinners,
    permit: Option<Permit>,
    most_for_guest: Time,
    most_for_read: Time,
    most_for_disk: Time,
    given_way: Time,
    least_brief: Time,
    windows: [Time; 4],
    idle: Option<(Wait, Time)>,
    rest_until: Time,
    brief_for: Time,
    brief_until: Time,
    gave_way: bool,
    preempted: i64,
}

impl Default for Poller {
    fn default() -> Poller {
        Poller {
            most: Polling::most(),
            spinners: Spinners::all(),
            permit: None,
            most_for_guest: MOST_FOR_GUEST,
            most_for_read: MOST_FOR_DISK,
            most_for_disk: MOST_FOR_DISK,
            given_way: GIVEN_WAY,
            least_brief: LONG_REST,
            windows: [0; 4],
            idle: None,
            rest_until: 0,
            brief_for: LONG_REST,
            brief_until: 0,
            gave_way: false,
            preempted: 0,
        }
    }
}

impl Poller {
    /// For requests of programs of this host, on a machine where waking takes so long. Reads alone are worth
    /// it: what is written to a file is ended by a worker of the kernel, which may want this very processor.
    /// Where processors are virtual, giving way is slow now and then though nobody is there: only who is seen
    /// again and again is given way to for long.
    pub(crate) fn for_programs(waking: Time) -> Poller {
        Poller {
            most_for_guest: (waking * WAKES).clamp(MOST_FOR_GUEST, MOST),
            most_for_read: (waking * WAKES).clamp(MOST_FOR_DISK, MOST),
            given_way: (waking * GIVEN_WAKES).clamp(GIVEN_WAY, MOST),
            least_brief: REST,
            brief_for: REST,
            ..Poller::default()
        }
    }

    /// For requests of Xen's domains, as one of which we run: the hypervisor passes on the disk's
    /// interrupts, too.
    pub(crate) fn for_domains(waking: Time) -> Poller {
        Poller {
            most_for_disk: (waking * WAKES).clamp(MOST_FOR_DISK, MOST),
            least_brief: LONG_REST,
            brief_for: LONG_REST,
            ..Poller::for_programs(waking)
        }
    }

    /// The longest to spin for it.
    fn most(&self, wait: Wait) -> Time {
        let most = match wait {
            Wait::Guest => self.most_for_guest,
            Wait::Read => self.most_for_read,
            Wait::Disk | Wait::BusyDisk => self.most_for_disk,
        };
        most.min(self.most)
    }

    /// There is nothing to do: whether to look again at once rather than sleep.
    pub(crate) fn spin(&mut self, now: Time, wait: Wait) -> bool {
        let (wait, since) = *self.idle.get_or_insert((wait, now));
        if wait == Wait::BusyDisk || now < self.rest_until || self.windows[wait as usize] == 0 {
            return false;
        }
        if self.permit.is_none() {
            // Others spin already: with this one they might keep those off that they wait for.
            let Some(permit) = self.spinners.permit() else { return false };
            self.permit = Some(permit);
        }
        let spun = now.saturating_sub(since);
        if spun < self.windows[wait as usize] && (spun < MOST_FOR_DISK || self.is_alone(now)) {
            return true;
        }
        self.permit = None;
        self.look_around(now);
        false
    }

    /// How long it would spin for what it waits for.
    pub(crate) fn window(&self) -> Time {
        self.idle.map_or(0, |(wait, _)| self.windows[wait as usize])
    }

    /// Whether nobody else wants this processor, so that it may be spun on for long. Seen once a wait.
    fn is_alone(&mut self, now: Time) -> bool {
        if now < self.brief_until {
            return false;
        }
        if !std::mem::replace(&mut self.gave_way, true) {
            let began = Instant::now();
            rustix::thread::sched_yield();
            return self.gave_way_for(began.elapsed().as_nanos() as Time, now);
        }
        true
    }

    /// It gave way, for so long.
    fn gave_way_for(&mut self, nanos: Time, now: Time) -> bool {
        let alone = nanos <= self.given_way;
        if alone {
            self.brief_for = (self.brief_for / 2).max(self.least_brief);
        } else {
            self.brief_until = now + self.brief_for;
            self.brief_for = (self.brief_for * 2).min(LONG_REST);
        }
        alone
    }

    /// There is something to do again.
    #[inline]
    pub(crate) fn event(&mut self, now: Time) {
        let Some((wait, since)) = self.idle.take() else { return };
        self.permit = None;
        self.gave_way = false;
        let waited = now.saturating_sub(since);
        let most = self.most(wait);
        let window = &mut self.windows[wait as usize];
        if waited > most {
            *window = 0;
        } else if waited > *window {
            *window = (waited * 2).max(LEAST).min(most);
        }
    }

    /// After spinning in vain: was this thread put off its processor meanwhile?
    fn look_around(&mut self, now: Time) {
        let Ok(usage) = getrusage(UsageWho::RUSAGE_THREAD) else { return };
        let preempted = usage.involuntary_context_switches();
        if preempted > self.preempted {
            self.preempted = preempted;
            self.rest_until = now + REST;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

    use rustix::thread::CpuSet;

    use super::*;

    #[test]
    fn spins_while_events_come_soon_and_sleeps_when_they_do_not() {
        let mut poller = Poller { preempted: i64::MAX, ..Poller::default() };
        assert!(!poller.spin(0, Wait::Guest), "nothing is known yet: sleep");
        poller.event(8_000);
        assert!(poller.spin(10_000, Wait::Guest));
        assert!(poller.spin(25_000, Wait::Guest));
        assert!(!poller.spin(26_001, Wait::Guest), "the window is over");
        poller.event(3_000_000);
        assert!(!poller.spin(4_000_000, Wait::Guest), "a slow event: no more spinning");
    }

    #[test]
    fn half_the_processors_may_be_spun_on_and_one_always() {
        let most = [1, 2, 3, 4, 64].map(|processors| Spinners::on(processors).most);
        assert_eq!(most, [1, 1, 1, 2, 32]);
    }

    /// Threads whose events always come soon, so that each would spin, and that end in the middle of it.
    #[test]
    fn no_more_threads_spin_than_may() {
        const MANY: usize = 8;
        for most in [1, 3] {
            let spinners: &'static Spinners = Box::leak(Box::new(Spinners::at_most(most)));
            let (spinning, highest) = (AtomicUsize::new(0), AtomicUsize::new(0));
            let spun = std::thread::scope(|scope| {
                let all: Vec<_> = (0..MANY)
                    .map(|_| {
                        scope.spawn(|| {
                            let mut poller =
                                Poller { preempted: i64::MAX, spinners, ..Poller::default() };
                            let (mut now, mut spun) = (0, 0);
                            for _ in 0..2000 {
                                poller.event(now);
                                for _ in 0..3 {
                                    now += 2_000;
                                    if poller.spin(now, Wait::Guest) {
                                        spun += 1;
                                        let others = spinning.fetch_add(1, SeqCst);
                                        highest.fetch_max(others + 1, SeqCst);
                                        std::thread::yield_now();
                                        spinning.fetch_sub(1, SeqCst);
                                    }
                                }
                            }
                            spun
                        })
                    })
                    .collect();
                all.into_iter().map(|one| one.join().expect("no panic")).sum::<usize>()
            });
            assert!(spun > 0 && highest.load(SeqCst) <= most, "{highest:?} of {most}");
            assert_eq!(spinners.now.load(SeqCst), 0, "who has ended does not spin");
        }
    }

    /// Of a processor that another thread keeps busy the kernel takes this one off again and again.
    #[test]
    fn who_is_put_off_its_processor_by_others_spins_no_more() {
        let spinners: &'static Spinners = Box::leak(Box::new(Spinners::at_most(1)));
        let over = AtomicBool::new(false);
        let here = rustix::thread::sched_getaffinity(None).expect("the processors");
        let first = (0..CpuSet::MAX_CPU).find(|cpu| here.is_set(*cpu)).expect("a processor");
        let mut one = CpuSet::new();
        one.set(first);
        let alone = || rustix::thread::sched_setaffinity(None, &one).expect("one processor");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                alone();
                while !over.load(Relaxed) {
                    std::hint::spin_loop();
                }
            });
            let rests = scope.spawn(|| {
                alone();
                let mut poller = Poller { spinners, ..Poller::default() };
                let began = Instant::now();
                let now = || began.elapsed().as_nanos() as Time;
                // What came before does not count.
                poller.look_around(0);
                poller.rest_until = 0;
                while poller.rest_until == 0 && began.elapsed() < Duration::from_secs(60) {
                    poller.spin(now(), Wait::Guest);
                    // Soon: it spins for the next.
                    let soon = poller.idle.map_or(0, |(_, since)| since + LEAST);
                    poller.event(soon);
                    while poller.spin(now(), Wait::Guest) {}
                }
                let until = poller.rest_until;
                poller.event(until - REST / 2);
                let again = poller.spin(until - 1, Wait::Guest);
                (until, again, spinners.now.load(SeqCst))
            });
            let (until, again, spin) = rests.join().expect("no panic");
            over.store(true, Relaxed);
            assert!(until > 0, "it was put off its processor, and spins on");
            assert_eq!((again, spin), (false, 0));
        });
    }

    #[test]
    fn who_may_not_spin_sleeps() {
        for (most, spins) in [(0, false), (5_000, true), (Time::MAX, true)] {
            let mut poller = Poller { preempted: i64::MAX, most, ..Poller::default() };
            poller.spin(0, Wait::Guest);
            poller.event(4_000);
            assert_eq!(poller.spin(10_000, Wait::Guest), spins, "{most}");
            assert_eq!(poller.spin(15_000, Wait::Guest), most == Time::MAX, "{most}");
        }
    }

    #[test]
    fn a_guest_that_must_wake_first_is_waited_for_longer_than_a_disk() {
        for (wait, spins) in [(Wait::Guest, true), (Wait::Disk, false)] {
            let mut poller = Poller { preempted: i64::MAX, ..Poller::default() };
            poller.spin(0, wait);
            poller.event(MOST_FOR_DISK + 20_000);
            // As on a processor that nobody else wants: the one of this test may be wanted.
            poller.gave_way = true;
            assert_eq!(poller.spin(100_000, wait), spins, "{wait:?}");
            assert_eq!(poller.spin(100_000 + MOST_FOR_GUEST - 1, wait), spins, "{wait:?}");
            assert!(!poller.spin(100_000 + MOST_FOR_GUEST, wait), "{wait:?}");
        }
    }

    #[test]
    fn where_waking_is_dear_it_is_spared_for_longer() {
        let spins_for = |mut poller: Poller, wait, most| {
            poller.preempted = i64::MAX;
            poller.spin(0, wait);
            poller.event(most);
            poller.gave_way = true;
            assert!(
                poller.spin(3_000_000, wait) && poller.spin(3_000_000 + most - 1, wait),
                "{most}"
            );
            assert!(!poller.spin(3_000_000 + most, wait), "{most}");
            poller.event(3_000_001 + 2 * most);
            assert!(!poller.spin(9_000_000, wait), "it came later than that pays");
        };
        for (waking, guest, disk) in
            [(3_000, MOST_FOR_GUEST, MOST_FOR_DISK), (80_000, 800_000, 800_000), (MOST, MOST, MOST)]
        {
            spins_for(Poller::for_programs(waking), Wait::Guest, guest);
            spins_for(Poller::for_programs(waking), Wait::Read, disk);
            spins_for(Poller::for_programs(waking), Wait::Disk, MOST_FOR_DISK);
            spins_for(Poller::for_domains(waking), Wait::Guest, guest);
            spins_for(Poller::for_domains(waking), Wait::Disk, disk);
        }
    }

    #[test]
    fn a_few_reads_alone_are_told_from_what_else_the_disk_does() {
        for (in_flight, reads, wait) in [
            (0, 0, Wait::Guest),
            (1, 1, Wait::Read),
            (FEW, FEW, Wait::Read),
            (FEW, FEW - 1, Wait::Disk),
            (1, 0, Wait::Disk),
            (FEW + 1, FEW + 1, Wait::BusyDisk),
        ] {
            assert_eq!(Wait::of_reads(in_flight, reads), wait, "{reads} of {in_flight}");
        }
    }

    #[test]
    fn a_guest_that_wants_this_processor_is_not_spun_for_long() {
        let mut poller = Poller { preempted: i64::MAX, ..Poller::default() };
        poller.spin(0, Wait::Guest);
        poller.event(MOST_FOR_DISK + 20_000);
        poller.brief_until = 400_000;
        assert!(poller.spin(100_000, Wait::Guest));
        assert!(!poller.spin(100_000 + MOST_FOR_DISK, Wait::Guest), "others were seen lately");
        poller.event(150_000);
        assert!(poller.spin(400_000, Wait::Guest));
        // Nobody is asked again in the same wait.
        poller.gave_way = true;
        assert!(poller.spin(400_000 + MOST_FOR_DISK, Wait::Guest));
        poller.event(440_000);
        assert!(!poller.gave_way);
    }

    #[test]
    fn programs_are_given_way_to_for_longer_when_they_are_seen_again_and_again() {
        let rest = |poller: &mut Poller, nanos| {
            let alone = poller.gave_way_for(nanos, 0);
            assert_eq!(alone, nanos <= GIVEN_WAY);
            std::mem::take(&mut poller.brief_until)
        };
        let mut poller = Poller::for_programs(0);
        let late = GIVEN_WAY + 1;
        assert_eq!(
            [GIVEN_WAY, late, MOST, MOST].map(|nanos| rest(&mut poller, nanos)),
            [0, REST, 2 * REST, 4 * REST]
        );
        assert_eq!([late; 8].map(|nanos| rest(&mut poller, nanos))[7], LONG_REST);
        // And it takes as many good turns to forget.
        assert_eq!([0, 0, late].map(|nanos| rest(&mut poller, nanos)), [0, 0, LONG_REST / 4]);
        assert_eq!([0, 0, 0, 0, 0, late].map(|nanos| rest(&mut poller, nanos))[5], REST);
        for mut poller in [Poller::default(), Poller::for_domains(0)] {
            assert_eq!(
                [0, late, 0, late].map(|nanos| rest(&mut poller, nanos)),
                [0, LONG_REST, 0, LONG_REST]
            );
        }
    }

    #[test]
    fn several_are_waited_for_where_many_are_under_way_and_the_disk_is_quick() {
        let mut batching = Batching::default();
        assert_eq!(batching.wait_for(0, MANY - 1), None);
        assert_eq!(batching.wait_for(0, 32), Some(8));
        batching.woken(BATCH_WAIT, true);
        assert_eq!(batching.wait_for(BATCH_WAIT, MANY), Some(4));
        batching.woken(2 * BATCH_WAIT, false);
        assert_eq!(batching.wait_for(2 * BATCH_WAIT + 1, 32), None, "it is slow");
        assert_eq!(batching.wait_for(2 * BATCH_WAIT + REST, 32), Some(8), "it may be quick again");
    }

    #[test]
    fn a_guest_waits_for_no_disk_to_be_told() {
        assert!(coalesce(UNNOTIFIED - 1, 0, true));
        assert!(!coalesce(UNNOTIFIED, 0, true), "enough to wake it for");
        assert!(!coalesce(1, 1, true), "who knows when that ends");
        assert!(!coalesce(1, 0, false), "nothing else would remind us");
    }

    #[test]
    fn a_slow_disk_does_not_stop_spinning_for_a_quick_guest_or_quick_reads() {
        for quick in [Wait::Guest, Wait::Read] {
            let mut poller = Poller { preempted: i64::MAX, ..Poller::default() };
            poller.spin(0, quick);
            poller.event(5_000);
            poller.spin(10_000, Wait::Disk);
            poller.event(2_000_000);
            assert!(!poller.spin(2_000_001, Wait::Disk));
            poller.event(4_000_000);
            assert!(poller.spin(4_000_001, quick), "{quick:?}");
        }
    }

    #[test]
    fn nobody_spins_on_a_processor_that_others_want() {
        let mut poller = Poller { preempted: -1, ..Poller::default() };
        poller.spin(0, Wait::Guest);
        poller.event(5_000);
        assert!(poller.spin(10_000, Wait::Guest));
        assert!(!poller.spin(30_000, Wait::Guest), "in vain, and there were others");
        poller.event(31_000);
        assert!(!poller.spin(40_000, Wait::Guest));
        poller.event(41_000);
        poller.preempted = i64::MAX;
        assert!(poller.spin(30_000 + REST, Wait::Guest));
    }
}
