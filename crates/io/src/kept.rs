//! One reactor for many short loops of tasks that a thread has one after another: to make a ring takes longer than what many
//! of them do on it, above all where another process makes it.

use std::cell::RefCell;
use std::io;
use std::sync::Arc;

use crate::alarm::Silent;
use crate::{Alarm, Key, Op, Reactor, Time, reactor};

thread_local! {
    /// Whether the thread keeps one; and that, while no loop has it.
    static KEPT: RefCell<Option<Option<Box<dyn Reactor>>>> = const { RefCell::new(None) };
}

/// Have the loops of tasks that this begins on this thread share one reactor, as far as they come one after another.
pub fn keeping_a_reactor<T>(work: impl FnOnce() -> T) -> T {
    struct Keeps(Option<Option<Box<dyn Reactor>>>);
    impl Drop for Keeps {
        fn drop(&mut self) {
            let last = KEPT.with(|kept| kept.replace(self.0.take()));
            drop(last);
        }
    }
    let _keeps = Keeps(KEPT.with(|kept| kept.replace(Some(None))));
    work()
}

/// A reactor for a loop of tasks that ends soon.
pub fn passing_reactor() -> io::Result<Box<dyn Reactor>> {
    let lent = KEPT.with(|kept| kept.borrow_mut().as_mut().map(Option::take));
    match lent {
        None => reactor(),
        Some(kept) => Ok(Box::new(Lent(Some(kept.map_or_else(reactor, Ok)?)))),
    }
}

/// It goes back when it drops: by then nothing is in flight, for a loop of tasks ends first.
struct Lent(Option<Box<dyn Reactor>>);

impl Lent {
    fn inner(&mut self) -> io::Result<&mut Box<dyn Reactor>> {
        self.0.as_mut().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let Some(mut inner) = self.0.take().filter(|_| !std::thread::panicking()) else { return };
        // Files that others wait for are closed now.
        inner.forget_images();
        // Where two loops had one each, the other's is there; a thread that ends keeps none.
        let _ = KEPT.try_with(|kept| match &mut *kept.borrow_mut() {
            Some(place @ None) => *place = Some(inner),
            _ => drop(inner),
        });
    }
}

impl Reactor for Lent {
    fn turn(
        &mut self,
        submit: &mut Vec<(Key, Op)>,
        done: &mut Vec<(Key, i32)>,
        wait: bool,
    ) -> io::Result<()> {
        self.inner()?.turn(submit, done, wait)
    }

    fn turn_for(
        &mut self,
        submit: &mut Vec<(Key, Op)>,
        done: &mut Vec<(Key, i32)>,
        events: u32,
        nanos: Time,
    ) -> io::Result<()> {
        self.inner()?.turn_for(submit, done, events, nanos)
    }

    fn cancel(&mut self, key: Key, done: &mut Vec<(Key, i32)>) -> io::Result<()> {
        self.inner()?.cancel(key, done)
    }

    fn forget_images(&mut self) {
        if let Ok(inner) = self.inner() {
            inner.forget_images();
        }
    }

    fn alarm(&mut self) -> Arc<dyn Alarm> {
        match &mut self.0 {
            Some(inner) => inner.alarm(),
            None => Arc::new(Silent),
        }
    }

    fn now(&self) -> Time {
        self.0.as_ref().map_or(0, |inner| inner.now())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Ring, Tasks};
    use rustix::fs::{FlockOperation, MemfdFlags, flock, memfd_create};
    use std::os::fd::AsRawFd;
    use std::time::{Duration, Instant};

    /// Rings of this process's own.
    fn rings() -> usize {
        let files = std::fs::read_dir("/proc/self/fd").expect("them").flatten();
        let names = files.filter_map(|file| std::fs::read_link(file.path()).ok());
        names.filter(|name| name.to_string_lossy().contains("io_uring")).count()
    }

    /// Other tests make rings of theirs meanwhile, so that it is this program again that counts.
    #[test]
    fn loops_one_after_another_have_one_ring_that_holds_no_file() {
        const AGAIN: &str = "RINGTAP_TEST_KEPT";
        if std::env::var_os(AGAIN).is_none() {
            let name = "kept::tests::loops_one_after_another_have_one_ring_that_holds_no_file";
            let mut again = std::process::Command::new(std::env::current_exe().expect("it"));
            let again = again.args([name, "--exact", "--nocapture"]).env(AGAIN, "1").status();
            assert!(again.expect("it runs").success());
            return;
        }
        if Ring::new().is_err() {
            println!("skipped: io_uring cannot be had here");
            return;
        }
        assert_eq!(rings(), 0);
        keeping_a_reactor(|| {
            for _ in 0..100 {
                let memory = memfd_create("kept", MemfdFlags::CLOEXEC).expect("memory");
                let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
                let other = std::fs::File::open(path).expect("the same by another descriptor");
                flock(&memory, FlockOperation::LockExclusive).expect("a lock");
                let file = crate::OpenFile::new(memory);
                file.set_nature(crate::Nature { image: true, ..Default::default() });
                let mut tasks = Tasks::new(passing_reactor().expect("a reactor"));
                let (io, own) = (tasks.io().clone(), file.handle());
                let synced = tasks.block_on(async move { io.run(Op::Sync { file: own }).await });
                assert_eq!((synced.expect("a turn"), rings()), (0, 1));
                drop((tasks, file));
                // The lock goes with the last who has it. The kernel may take a moment for that.
                let until = Instant::now() + Duration::from_secs(60);
                while flock(&other, FlockOperation::NonBlockingLockExclusive).is_err() {
                    assert!(Instant::now() < until, "the ring holds it");
                    std::thread::sleep(Duration::from_millis(1));
                }
                assert_eq!(rings(), 1);
            }
        });
        assert_eq!(rings(), 0);
    }
}
