//! Syncs of a file in the page cache, whose results come when the test says.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use ringtap_image::{Container, Error, Traits};
use ringtap_io::{File, Io, Key, Op, Reactor, Tasks, Time};

const LOST: Result<(), Error> = Err(Error::Lost);

/// What the kernel makes of each sync, in the order in which they are begun; well, where nothing is said.
#[derive(Clone, Default)]
struct Kernel {
    results: Arc<Mutex<VecDeque<i32>>>,
    begun: Arc<Mutex<usize>>,
}

/// One thread's ring: what has ended is held back as long as it is told so.
struct Thread {
    kernel: Kernel,
    holds: Arc<AtomicBool>,
    ended: Vec<(Key, i32)>,
}

impl Reactor for Thread {
    fn turn(
        &mut self,
        submit: &mut Vec<(Key, Op)>,
        done: &mut Vec<(Key, i32)>,
        _: bool,
    ) -> io::Result<()> {
        for (key, _) in submit.drain(..) {
            *self.kernel.begun.lock().expect("no panic") += 1;
            let result = self.kernel.results.lock().expect("no panic").pop_front();
            self.ended.push((key, result.unwrap_or(0)));
        }
        if !self.holds.load(SeqCst) {
            done.append(&mut self.ended);
        }
        Ok(())
    }

    /// Nothing is held back from who gives up.
    fn cancel(&mut self, _: Key, _: &mut Vec<(Key, i32)>) -> io::Result<()> {
        self.holds.store(false, SeqCst);
        Ok(())
    }

    fn now(&self) -> Time {
        0
    }
}

impl Kernel {
    fn saying(results: impl IntoIterator<Item = i32>) -> Kernel {
        Kernel { results: Arc::new(Mutex::new(results.into_iter().collect())), ..Kernel::default() }
    }

    fn thread(&self) -> (Tasks, Arc<AtomicBool>) {
        let (kernel, holds) = (self.clone(), Arc::new(AtomicBool::new(false)));
        let thread = Thread { kernel, holds: holds.clone(), ended: Vec::new() };
        (Tasks::new(Box::new(thread)), holds)
    }

    fn begun(&self) -> usize {
        *self.begun.lock().expect("no panic")
    }
}

fn file(request_alignment: u64) -> Container {
    let traits = Traits { request_alignment, ..Traits::FILE };
    Container::simulated(File::from_parts(0, 0), 4096, traits)
}

type Ends = Rc<RefCell<Vec<Result<(), Error>>>>;

fn ask(tasks: &mut Tasks, of: &Container, ends: &Ends) {
    let (io, of, ends): (Io, _, _) = (tasks.io().clone(), of.clone(), ends.clone());
    tasks.spawn(async move {
        let end = of.sync(&io).await;
        ends.borrow_mut().push(end);
    });
}

fn step(tasks: &mut Tasks) {
    tasks.run_ready();
    tasks.turn(false).expect("turns");
    tasks.run_ready();
}

fn sync(kernel: &Kernel, of: &Container) -> Result<(), Error> {
    let (mut tasks, _) = kernel.thread();
    let (io, of) = (tasks.io().clone(), of.clone());
    tasks.block_on(async move { of.sync(&io).await }).expect("turns")
}

/// The kernel has told another thread already that pages were lost, and that thread has not heard of it yet.
#[test]
fn no_sync_succeeds_beside_one_whose_failure_is_not_known_yet() {
    let (kernel, file, ends) = (Kernel::saying([-libc::EIO]), file(1), Ends::default());
    let (mut first, holds) = kernel.thread();
    let (mut second, _) = kernel.thread();
    holds.store(true, SeqCst);
    ask(&mut first, &file, &ends);
    step(&mut first);
    ask(&mut second, &file, &ends);
    step(&mut second);
    assert_eq!(*ends.borrow(), [], "nobody can know");
    holds.store(false, SeqCst);
    step(&mut first);
    step(&mut second);
    assert_eq!(*ends.borrow(), [LOST, LOST]);
    assert_eq!(sync(&kernel, &file), LOST);
}

#[test]
fn one_sync_serves_all_who_asked_before_it_began() {
    let (kernel, file, ends) = (Kernel::default(), file(1), Ends::default());
    let (mut first, holds) = kernel.thread();
    holds.store(true, SeqCst);
    ask(&mut first, &file, &ends);
    step(&mut first);
    let mut others: Vec<Tasks> = (0..3).map(|_| kernel.thread().0).collect();
    for other in &mut others {
        ask(other, &file, &ends);
        step(other);
    }
    holds.store(false, SeqCst);
    step(&mut first);
    // Whoever is served by another hears of it once that has ended.
    for _ in 0..2 {
        others.iter_mut().for_each(step);
    }
    assert_eq!(*ends.borrow(), [Ok(()); 4]);
    assert_eq!(kernel.begun(), 2);
}

#[test]
fn a_failure_that_nobody_waits_for_any_more_is_heard() {
    let (kernel, file, ends) = (Kernel::saying([-libc::EIO]), file(1), Ends::default());
    let (mut gone, holds) = kernel.thread();
    holds.store(true, SeqCst);
    ask(&mut gone, &file, &ends);
    step(&mut gone);
    holds.store(false, SeqCst);
    drop(gone);
    assert_eq!(*ends.borrow(), []);
    assert_eq!(sync(&kernel, &file), LOST);
}

/// Who waits for room would be let go on, and hear of the loss then.
#[test]
fn what_the_page_cache_has_lost_for_want_of_room_is_no_want_of_room() {
    for errno in [libc::ENOSPC, libc::EDQUOT, libc::EIO] {
        let (kernel, file) = (Kernel::saying([-errno]), file(1));
        assert_eq!([sync(&kernel, &file), sync(&kernel, &file)], [LOST, LOST], "errno {errno}");
        assert_eq!(kernel.begun(), 1, "errno {errno}");
    }
}

#[test]
fn a_sync_that_was_interrupted_or_cancelled_has_lost_nothing() {
    let (kernel, interrupted) = (Kernel::saying([-libc::EINTR]), file(1));
    assert_eq!(sync(&kernel, &interrupted), Ok(()));
    let (kernel, cancelled) = (Kernel::saying([-libc::ECANCELED]), file(1));
    assert_eq!(sync(&kernel, &cancelled), Err(Error::Os(libc::ECANCELED)));
    assert_eq!(sync(&kernel, &cancelled), Ok(()));
}

/// With O_DIRECT the device has had what was acknowledged, and is asked for it once more.
#[test]
fn past_the_page_cache_a_sync_may_be_tried_again() {
    let (kernel, file) = (Kernel::saying([-libc::ENOSPC]), file(512));
    assert_eq!(sync(&kernel, &file), Err(Error::Full));
    assert_eq!(sync(&kernel, &file), Ok(()));
}
