//! Files that are no descriptors of this machine: who carries out the operations on them, and who is told of
//! their ends.

use std::fmt;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};

use crate::wake::Wakes;
use crate::{Elsewhere, File, Io, Key, Op, Session};

/// What carries out the operations on a file that is no descriptor.
pub trait Remote: Send + Sync {
    /// A session for the thread of `io`, made at the first operation there. It must not keep `io`.
    fn session(self: Arc<Self>, io: &Io) -> Rc<dyn Session>;

    /// No operation follows.
    fn close(&self);
}

/// A [`Remote`] of the process, listed so that every thread can find it by its [`File`].
pub struct OpenRemote {
    remote: Arc<dyn Remote>,
    handle: File,
}

struct Slot {
    generation: u32,
    remote: Option<Arc<dyn Remote>>,
}

static TABLE: Mutex<Vec<Slot>> = Mutex::new(Vec::new());

impl OpenRemote {
    /// List it.
    pub fn new(remote: Arc<dyn Remote>) -> OpenRemote {
        let mut table = TABLE.lock().unwrap_or_else(PoisonError::into_inner);
        let free = table.iter().position(|slot| slot.remote.is_none());
        let place = free.unwrap_or_else(|| {
            table.push(Slot { generation: 0, remote: None });
            table.len() - 1
        });
        table[place].remote = Some(remote.clone());
        let handle = File::elsewhere(place as u32, table[place].generation);
        OpenRemote { remote, handle }
    }

    /// The handle operations take.
    pub fn handle(&self) -> File {
        self.handle
    }
}

impl Drop for OpenRemote {
    fn drop(&mut self) {
        let mut table = TABLE.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(slot) = table.get_mut(self.handle.place_elsewhere() as usize) {
            slot.remote = None;
            slot.generation = slot.generation.wrapping_add(1);
        }
        drop(table);
        self.remote.close();
    }
}

impl fmt::Debug for OpenRemote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenRemote").field("handle", &self.handle).finish_non_exhaustive()
    }
}

fn find(file: File) -> Option<Arc<dyn Remote>> {
    let table = TABLE.lock().unwrap_or_else(PoisonError::into_inner);
    let slot = table.get(file.place_elsewhere() as usize)?;
    (slot.generation == file.generation()).then(|| slot.remote.clone()).flatten()
}

impl Io {
    /// Hand an operation to what carries it out.
    #[cold]
    pub(crate) fn begin_elsewhere(&self, file: File, key: Key, op: Op) {
        Elsewhere::begin();
        let known = self.shared.sessions.borrow().known(file);
        let session = known.or_else(|| {
            let session = find(file)?.session(self);
            self.shared.sessions.borrow_mut().keep(file, session.clone());
            Some(session)
        });
        match session {
            Some(session) => session.begin(self, key, op),
            None => self.complete(key, -libc::EBADF),
        }
    }

    /// An operation that a [`Session`] of this thread was just given is carried out on a file of this machine: `op` in
    /// its place.
    pub fn begin_here(&self, key: Key, op: Op) {
        if self.is_here(key) {
            self.shared.submit.borrow_mut().push((key, op));
        }
    }

    /// It has failed there.
    #[cold]
    pub(crate) fn failed_here(&self, file: File, key: Key, result: i32) {
        Elsewhere::begin();
        let session = self.shared.sessions.borrow().known(file);
        match session {
            Some(session) => session.failed_here(self, key, result),
            None => self.complete(key, result),
        }
    }

    /// An operation that a [`Session`] of this thread was given has ended.
    pub fn ended(&self, key: Key, result: i32) {
        self.complete(key, result);
    }

    /// Who says from any thread that an operation has ended that a [`Session`] of this thread was given.
    pub fn ender(&self, key: Key) -> Ender {
        Ender { wakes: self.shared.wakes.clone(), key }
    }
}

/// Says once that an operation has ended. Where its thread is gone by then, nobody hears it.
pub struct Ender {
    wakes: Arc<Wakes>,
    key: Key,
}

impl Ender {
    /// It has, with this result.
    pub fn end(self, result: i32) {
        self.wakes.end(self.key, result);
    }
}

/// An operation on its way to another thread, with who is to be told of its end. It must be told: until
/// then the memory that the operation names is kept.
pub struct Errand {
    /// What is to be done.
    pub op: Op,
    /// Who is told.
    pub ender: Ender,
}

// SAFETY: the memory that an operation names may be used by whoever carries it out, until its end is told (the promise of
// `Mem` and of `Io`), and it is handed on whole.
unsafe impl Send for Errand {}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::sync::mpsc;
    use std::thread;

    use super::*;
    use crate::{Mem, Tasks, reactor};

    /// Ends reads with their offset: on the thread itself where it is even, else on another. What is at or past
    /// `NEVER` is ended by being cancelled.
    struct Echo {
        far: Mutex<mpsc::Sender<(Ender, i32)>>,
        closed: mpsc::Sender<()>,
    }

    const NEVER: u64 = 1000;

    struct Near {
        echo: Arc<Echo>,
        held: RefCell<Vec<Key>>,
    }

    impl Remote for Echo {
        fn session(self: Arc<Self>, _: &Io) -> Rc<dyn Session> {
            Rc::new(Near { echo: self, held: RefCell::default() })
        }

        fn close(&self) {
            _ = self.closed.send(());
        }
    }

    impl Session for Near {
        fn begin(&self, io: &Io, key: Key, op: Op) {
            let Op::Read { offset, .. } = op else { panic!("only reads") };
            match offset {
                NEVER.. => self.held.borrow_mut().push(key),
                near if near % 2 == 0 => io.ended(key, near as i32),
                far => {
                    let errand = (io.ender(key), far as i32);
                    self.echo.far.lock().expect("the lock").send(errand).expect("the thread");
                }
            }
        }

        fn cancel(&self, io: &Io, key: Key) {
            let mut held = self.held.borrow_mut();
            let place = held.iter().position(|other| *other == key).expect("it is held");
            held.swap_remove(place);
            io.ended(key, -libc::ECANCELED);
        }
    }

    fn echo() -> (OpenRemote, mpsc::Receiver<()>) {
        let (far, errands) = mpsc::channel::<(Ender, i32)>();
        let (closed, hear) = mpsc::channel();
        thread::spawn(move || errands.into_iter().for_each(|(ender, result)| ender.end(result)));
        (OpenRemote::new(Arc::new(Echo { far: Mutex::new(far), closed })), hear)
    }

    fn read(file: File, offset: u64) -> Op {
        Op::Read { file, offset, mem: Mem::EMPTY }
    }

    #[test]
    fn operations_end_here_and_from_another_thread() {
        let (remote, _hear) = echo();
        let file = remote.handle();
        let mut tasks = Tasks::new(reactor().expect("a reactor"));
        for offset in 0..200 {
            let io = tasks.io().clone();
            tasks.spawn(async move {
                for more in 0..5 {
                    assert_eq!(io.run(read(file, offset + more)).await as u64, offset + more);
                }
            });
        }
        tasks.run().expect("turns");
    }

    #[test]
    fn what_is_expendable_does_not_keep_its_thread() {
        let (remote, _hear) = echo();
        let file = remote.handle();
        let mut tasks = Tasks::new(reactor().expect("a reactor"));
        let (io, ends) = (tasks.io().clone(), Rc::new(RefCell::new(vec![])));
        let seen = ends.clone();
        tasks.spawn(async move {
            let (reads, sleeps, waits) = (io.clone(), io.clone(), io.clone());
            io.spawn_expendable(async move {
                // One after the other: each is to be cancelled.
                for offset in [NEVER, NEVER + 1] {
                    let end = reads.run(read(file, offset)).await;
                    seen.borrow_mut().push(end);
                }
            });
            io.spawn_expendable(async move { sleeps.sleep(1 << 50).await });
            // Nothing that is in flight: it goes with the thread.
            io.spawn_expendable(async move {
                let never = crate::Event::default();
                never.listen().await;
                waits.next_turn().await;
            });
            assert_eq!(io.run(read(file, 3)).await, 3);
        });
        tasks.run().expect("turns");
        assert_eq!(*ends.borrow(), [-libc::ECANCELED; 2]);
        assert_eq!(tasks.io().in_flight(), 0);
    }

    /// Has every read carried out on a file; one that fails there ends with its offset.
    struct Lent(File);

    impl Remote for Lent {
        fn session(self: Arc<Self>, _: &Io) -> Rc<dyn Session> {
            Rc::new(Lent(self.0))
        }

        fn close(&self) {}
    }

    impl Session for Lent {
        fn begin(&self, io: &Io, key: Key, op: Op) {
            let Op::Read { offset, mem, .. } = op else { panic!("only reads") };
            io.begin_here(key, Op::Read { file: self.0, offset, mem });
        }

        fn cancel(&self, _: &Io, _: Key) {
            panic!("the reactor's operations are cancelled there");
        }

        fn failed_here(&self, io: &Io, key: Key, result: i32) {
            assert_eq!(result, -libc::EISDIR);
            io.ended(key, 77);
        }
    }

    #[test]
    fn what_fails_on_the_file_that_was_lent_may_end_well() {
        let folder = std::fs::File::open("/").expect("a folder");
        let open = crate::OpenFile::new(folder.into());
        let remote = OpenRemote::new(Arc::new(Lent(open.handle())));
        let file = remote.handle();
        let mut tasks = Tasks::new(reactor().expect("a reactor"));
        let io = tasks.io().clone();
        let read = tasks.block_on(async move {
            let buffer = io.buffer(4096).expect("memory");
            io.run(Op::Read { file, offset: 0, mem: buffer.mem() }).await
        });
        assert_eq!(read.expect("turns"), 77);
        assert_eq!(tasks.io().in_flight(), 0);
    }

    #[test]
    fn what_is_lent_a_file_is_read_from_there() {
        let mut own = tempfile::tempfile().expect("a file");
        std::io::Write::write_all(&mut own, &[7; 8192]).expect("written");
        let open = crate::OpenFile::new(own.into());
        let remote = OpenRemote::new(Arc::new(Lent(open.handle())));
        let file = remote.handle();
        let mut tasks = Tasks::new(reactor().expect("a reactor"));
        let io = tasks.io().clone();
        let read = tasks.block_on(async move {
            let mut buffer = io.buffer(4096).expect("memory");
            let read = io.read(file, 6000, buffer.mem()).await;
            // One that nobody waits for any more is the reactor's to cancel.
            let dropped = io.run(Op::Read { file, offset: 0, mem: Mem::EMPTY });
            drop(dropped);
            (read, buffer.bytes_mut()[..2192].iter().all(|byte| *byte == 7))
        });
        assert_eq!(read.expect("turns"), (Ok(2192), true));
    }

    #[test]
    fn what_is_dropped_is_cancelled_and_what_is_gone_is_no_file() {
        let (remote, hear) = echo();
        let file = remote.handle();
        let mut tasks = Tasks::new(reactor().expect("a reactor"));
        let io = tasks.io().clone();
        tasks.spawn(async move { _ = io.run(read(file, NEVER)).await });
        tasks.run_ready();
        assert_eq!(tasks.io().in_flight(), 1);
        drop(tasks);
        drop(remote);
        hear.recv().expect("it was closed");
        let mut tasks = Tasks::new(reactor().expect("a reactor"));
        let io = tasks.io().clone();
        let end = tasks.block_on(async move { io.run(read(file, 2)).await }).expect("turns");
        assert_eq!(end, -libc::EBADF);
        let (again, _hear) = echo();
        assert_ne!(again.handle(), file);
    }
}
