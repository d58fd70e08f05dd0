//! A device that has no room for what is asked of it, for long or for ever.

use std::cell::RefCell;
use std::io;
use std::rc::Rc;

use ringtap_io::{File, Io, Key, Mem, Op, Reactor, Tasks, Time};

const FILE: fn() -> File = || File::from_parts(0, 0);

/// It refuses so many operations with EAGAIN; pauses end at once, on its clock.
#[derive(Default)]
struct Busy {
    refuses: usize,
    /// From this one on it ends pauses before their time.
    cancels_after: Option<usize>,
    now: Time,
    told: Rc<RefCell<Told>>,
}

#[derive(Default)]
struct Told {
    tries: usize,
    pauses: Vec<Time>,
}

impl Reactor for Busy {
    fn turn(
        &mut self,
        submit: &mut Vec<(Key, Op)>,
        done: &mut Vec<(Key, i32)>,
        _: bool,
    ) -> io::Result<()> {
        let mut told = self.told.borrow_mut();
        for (key, op) in submit.drain(..) {
            let result = match op {
                Op::Timeout { nanos } => {
                    self.now += nanos;
                    told.pauses.push(nanos);
                    let cancelled = self.cancels_after.is_some_and(|most| told.pauses.len() > most);
                    if cancelled { -libc::ECANCELED } else { -libc::ETIME }
                }
                _ => {
                    told.tries += 1;
                    match told.tries {
                        // It was begun again and again.
                        100_000.. => -libc::EIO,
                        tries if tries <= self.refuses => -libc::EAGAIN,
                        _ => 0,
                    }
                }
            };
            done.push((key, result));
        }
        Ok(())
    }

    fn now(&self) -> Time {
        self.now
    }
}

type End = (Result<(), i32>, Rc<RefCell<Told>>);

/// What becomes of an operation of each kind, on devices that are busy for so long.
fn all(refuses: usize, cancels_after: Option<usize>) -> Vec<End> {
    let ask = |which: usize| {
        let told = Rc::<RefCell<Told>>::default();
        let busy = Busy { refuses, cancels_after, told: told.clone(), ..Busy::default() };
        let mut tasks = Tasks::new(Box::new(busy));
        let io: Io = tasks.io().clone();
        let end = tasks.block_on(async move {
            let buffer = io.buffer(4096).expect("memory");
            let mem: Mem = buffer.mem();
            match which {
                0 => io.read(FILE(), 0, mem).await.map(drop),
                1 => io.write(FILE(), 0, mem, false).await,
                _ => io.sync(FILE()).await,
            }
        });
        (end.expect("the reactor turns"), told)
    };
    (0..3).map(ask).collect()
}

#[test]
fn what_a_device_never_has_room_for_fails_in_the_end() {
    for (end, told) in all(usize::MAX, None) {
        assert_eq!(end, Err(libc::EAGAIN));
        let told = told.borrow();
        let waited: Time = told.pauses.iter().sum();
        assert!((30_000_000_000..30_100_000_000).contains(&waited), "{waited}");
        // It wakes a thread a hundred times a second, and no oftener.
        assert!(told.tries < 3100, "{}", told.tries);
        assert_eq!(told.pauses[..3], [100_000, 100_000, 200_000]);
    }
}

#[test]
fn what_a_device_has_room_for_later_goes_well() {
    for (which, (end, told)) in all(500, None).into_iter().enumerate() {
        // It writes nothing, which is no room in the end.
        assert_eq!(end, if which == 1 { Err(libc::ENOSPC) } else { Ok(()) });
        assert_eq!(told.borrow().tries, 501);
    }
}

#[test]
fn what_pauses_ends_where_all_is_to_end() {
    for (end, told) in all(usize::MAX, Some(4)) {
        assert_eq!(end, Err(libc::ECANCELED));
        assert_eq!(told.borrow().tries, 5);
    }
}
