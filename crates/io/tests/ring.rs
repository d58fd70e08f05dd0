//! The reactor against a real file, sockets and eventfds: the ring; and in a process of its own, threads.

use std::cell::RefCell;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::rc::Rc;

use ringtap_io::{Engine, Key, Mem, Nature, Op, OpenFile, Reactor, Signal, Tasks, Time};

fn tasks() -> Tasks {
    Tasks::new(ringtap_io::reactor().expect("a reactor"))
}

fn temp_file(len: u64) -> OpenFile {
    let file = tempfile::tempfile().expect("a temporary file");
    file.set_len(len).expect("its length");
    OpenFile::new(OwnedFd::from(file))
}

#[test]
fn writes_are_read_back_and_the_end_of_the_file_is_short() {
    let file = temp_file(10_000);
    let handle = file.handle();
    let mut tasks = tasks();
    let io = tasks.io().clone();
    tasks
        .block_on(async move {
            let mut buffer = io.buffer(8192).expect("memory");
            buffer.bytes_mut().fill(7);
            io.write(handle, 4096, buffer.mem(), true).await.expect("write");
            io.sync(handle).await.expect("sync");
            buffer.bytes_mut().fill(1);
            assert_eq!(io.read(handle, 8192, buffer.mem()).await, Ok(4096));
            assert!(buffer.bytes()[..4096].iter().all(|byte| *byte == 7));
            assert!(buffer.bytes()[4096..].iter().all(|byte| *byte == 1));
            io.to_the_end(Op::PunchHole { file: handle, offset: 4096, len: 4096 })
                .await
                .expect("punch");
            assert_eq!(io.read(handle, 4096, buffer.mem().window(0, 4096)).await, Ok(4096));
            assert!(buffer.bytes()[..4096].iter().all(|byte| *byte == 0));
        })
        .expect("the ring");
}

/// A reactor that notes how many operations each turn handed over.
struct Noting {
    reactor: Box<dyn Reactor>,
    turns: Rc<RefCell<Vec<usize>>>,
}

impl Reactor for Noting {
    fn turn(
        &mut self,
        submit: &mut Vec<(Key, Op)>,
        done: &mut Vec<(Key, i32)>,
        wait: bool,
    ) -> io::Result<()> {
        self.turns.borrow_mut().push(submit.len());
        self.reactor.turn(submit, done, wait)
    }

    fn now(&self) -> Time {
        self.reactor.now()
    }
}

#[test]
fn many_tasks_share_one_turn() {
    let file = temp_file(1 << 20);
    file.set_nature(Nature { page_cache: true, ..Nature::default() });
    let handle = file.handle();
    let turns = Rc::<RefCell<Vec<usize>>>::default();
    let reactor = ringtap_io::reactor().expect("a reactor");
    let mut tasks = Tasks::new(Box::new(Noting { reactor, turns: turns.clone() }));
    for task in 0..600u64 {
        let io = tasks.io().clone();
        tasks.spawn(async move {
            let mut buffer = io.buffer(512).expect("memory");
            buffer.bytes_mut().fill(task as u8);
            for round in 0..3 {
                let offset = (task * 3 + round) * 512;
                io.write(handle, offset, buffer.mem(), false).await.expect("write");
                assert_eq!(io.read(handle, offset, buffer.mem()).await, Ok(512));
                assert!(buffer.bytes().iter().all(|byte| *byte == task as u8));
            }
        });
    }
    tasks.run().expect("the ring");
    let turns = turns.borrow();
    // All writes, then all reads: page-cache writes this small are done when the turn ends.
    assert_eq!(turns[..2], [600, 600], "{turns:?}");
    assert_eq!(turns.iter().sum::<usize>(), 600 * 3 * 2);
}

#[test]
fn who_waits_for_the_next_turn_has_what_was_asked_for_handed_over_first() {
    let file = temp_file(1 << 20);
    let handle = file.handle();
    let turns = Rc::new(RefCell::new(vec![]));
    let reactor = ringtap_io::reactor().expect("a reactor");
    let mut tasks = Tasks::new(Box::new(Noting { reactor, turns: turns.clone() }));
    let io = tasks.io().clone();
    tasks.spawn(async move {
        for piece in 0..3 {
            for _ in 0..4 {
                let reader = io.clone();
                io.spawn(async move {
                    let buffer = reader.buffer(512).expect("memory");
                    assert_eq!(reader.read(handle, piece * 4096, buffer.mem()).await, Ok(512));
                });
            }
            io.next_turn().await;
        }
        // Nothing is in flight by then: a turn that waited for something would never end.
        while io.in_flight() > 0 {
            io.next_turn().await;
        }
        io.next_turn().await;
    });
    tasks.run().expect("the ring");
    assert_eq!(turns.borrow()[..3], [4, 4, 4]);
    assert!(turns.borrow()[3..].iter().all(|handed| *handed == 0));
}

#[test]
fn a_pipe_takes_pages_of_a_file_to_a_socket() {
    let len = 300 << 10;
    let content: Vec<u8> = (0..len).map(|at| (at / 4096 + at % 251) as u8).collect();
    let mut file = tempfile::tempfile().expect("a temporary file");
    file.write_all(&content).expect("written");
    let file = OpenFile::new(OwnedFd::from(file));
    let (out, into) = rustix::pipe::pipe().expect("a pipe");
    rustix::pipe::fcntl_setpipe_size(&into, 1 << 20).expect("room");
    let (out, into) = (OpenFile::new(out), OpenFile::new(into));
    let (ours, mut theirs) = UnixStream::pair().expect("sockets");
    let ours = OpenFile::new(OwnedFd::from(ours));
    let (skip, rest) = (4097, len - 4097);
    let reader = std::thread::spawn(move || {
        let mut all = vec![0; rest];
        theirs.read_exact(&mut all).expect("received");
        all
    });
    let mut tasks = tasks();
    let io = tasks.io().clone();
    let from = file.handle();
    let end = tasks.block_on(async move {
        // The file ends before what was asked for does.
        let mem = Mem::of_pipe(into.handle(), rest + 5000);
        assert_eq!(io.read(from, skip as u64, mem).await, Ok(rest));
        let mut sent = 0;
        while sent < rest {
            let mem = Mem::of_pipe(out.handle(), rest).window(sent, rest);
            let moved = io.run(Op::Send { file: ours.handle(), mem }).await;
            assert!(moved > 0, "{moved}");
            sent += moved as usize;
        }
    });
    end.expect("the ring");
    assert!(reader.join().expect("the reader") == content[skip..]);
}

#[test]
fn a_pipe_that_is_full_is_an_error_and_holds_nobody_up() {
    let file = temp_file(1 << 20);
    let (_out, into) = rustix::pipe::pipe().expect("a pipe");
    let holds = rustix::pipe::fcntl_getpipe_size(&into).expect("its size");
    let into = OpenFile::new(into);
    let mut tasks = tasks();
    let io = tasks.io().clone();
    tasks
        .block_on(async move {
            let mem = Mem::of_pipe(into.handle(), holds + 4096);
            assert_eq!(io.read(file.handle(), 0, mem).await, Err(libc::EAGAIN));
        })
        .expect("the ring");
}

#[test]
fn a_closed_file_is_an_error_and_its_slot_serves_the_next() {
    let mut tasks = tasks();
    let io = tasks.io().clone();
    tasks
        .block_on(async move {
            let buffer = io.buffer(512).expect("memory");
            let first = temp_file(512);
            let stale = first.handle();
            assert_eq!(io.read(stale, 0, buffer.mem()).await, Ok(512));
            drop(first);
            let second = temp_file(100);
            assert_eq!(io.read(second.handle(), 0, buffer.mem()).await, Ok(100));
            if second.handle().slot() == stale.slot() {
                assert_eq!(io.read(stale, 0, buffer.mem()).await, Err(libc::EBADF));
            }
        })
        .expect("the ring");
}

#[test]
fn sockets_timeouts_and_signals() {
    let (left, right) = UnixStream::pair().expect("a socket pair");
    let (left, right) = (OpenFile::new(left.into()), OpenFile::new(right.into()));
    let mut tasks = tasks();
    let io = tasks.io().clone();
    let signal = std::rc::Rc::new(Signal::default());
    let heard = std::rc::Rc::new(std::cell::Cell::new(false));
    let (their_io, their_signal, their_heard) = (io.clone(), signal.clone(), heard.clone());
    let reader = right.handle();
    io.spawn(async move {
        let buffer = their_io.buffer(64).expect("memory");
        assert_eq!(their_io.run(Op::Recv { file: reader, mem: buffer.mem() }).await, 5);
        assert_eq!(&buffer.bytes()[..5], b"hello");
        their_heard.set(true);
        their_signal.notify(&their_io);
    });
    tasks
        .block_on(async move {
            io.sleep(1_000_000).await;
            let mut buffer = io.buffer(5).expect("memory");
            buffer.bytes_mut().copy_from_slice(b"hello");
            assert_eq!(io.run(Op::Send { file: left.handle(), mem: buffer.mem() }).await, 5);
            while !heard.get() {
                signal.wait(&io).await;
            }
        })
        .expect("the ring");
}

#[test]
fn what_waits_for_an_event_can_be_cancelled() {
    let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).expect("eventfd");
    let event = OpenFile::new(event);
    let handle = event.handle();
    let mut tasks = tasks();
    let io = tasks.io().clone();
    let other = io.clone();
    io.spawn(async move {
        assert_eq!(other.run(Op::ReadEvent { file: handle }).await, 8);
        assert_eq!(other.run(Op::ReadEvent { file: handle }).await, -libc::ECANCELED);
    });
    tasks
        .block_on(async move {
            assert_eq!(io.run(Op::SignalEvent { file: handle }).await, 8);
            io.sleep(1_000_000).await;
            assert!(io.run(Op::Cancel { file: handle }).await >= 0);
        })
        .expect("the ring");
    tasks.run().expect("the ring");
}

#[test]
fn a_turn_may_wait_for_several_but_not_for_ever() {
    use std::time::{Duration, Instant};
    let event = || {
        let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK);
        OpenFile::new(event.expect("an eventfd"))
    };
    let (left, right) = (event(), event());
    let signal = |event: &OpenFile| {
        rustix::io::write(event, &1u64.to_ne_bytes()).expect("it takes a signal");
    };
    let mut tasks = tasks();
    let io = tasks.io().clone();
    let wait_for = |tasks: &mut Tasks, event: &OpenFile| {
        let (io, file) = (io.clone(), event.handle());
        tasks.spawn(async move { assert_eq!(io.run(Op::ReadEvent { file }).await, 8) });
        tasks.run_ready();
    };
    wait_for(&mut tasks, &left);
    wait_for(&mut tasks, &right);
    // Nothing happens, then one of the two: the limit ends the sleep.
    let began = Instant::now();
    tasks.turn_for(2, 20_000_000).expect("the ring");
    let nothing = (began.elapsed(), tasks.has_ready());
    signal(&left);
    tasks.turn_for(2, 20_000_000).expect("the ring");
    let one = (began.elapsed(), tasks.has_ready());
    tasks.run_ready();
    wait_for(&mut tasks, &left);
    // Both: nobody waits for the limit.
    let began = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(5));
            signal(&left);
            signal(&right);
        });
        tasks.turn_for(2, 600_000_000_000).expect("the ring");
    });
    tasks.run_ready();
    let (left_over, took) = (tasks.count(), began.elapsed());
    // What was asked for is over, so that a failure from here on waits for nothing.
    tasks.run().expect("the ring");
    assert!(nothing.0 >= Duration::from_millis(20) && !nothing.1, "{nothing:?}");
    assert!(one.0 >= Duration::from_millis(40) && one.1, "{one:?}");
    assert!(left_over == 0 && took < Duration::from_secs(300), "{left_over} {took:?}");
}

/// Changes of a watched file are noted before they begin and after they have ended, and the file system's
/// stamp lies between.
#[test]
fn a_witness_knows_between_which_times_a_file_was_written() {
    use std::os::unix::fs::MetadataExt;
    use std::sync::Arc;
    use std::sync::atomic::AtomicU64;

    use ringtap_io::{Witness, coarse_wall};

    let file = tempfile::tempfile().expect("a temporary file");
    let looked_at = file.try_clone().expect("the same");
    let stamp = move || {
        let facts = looked_at.metadata().expect("its facts");
        facts.mtime() as u64 * 1_000_000_000 + facts.mtime_nsec() as u64
    };
    let file = OpenFile::new(OwnedFd::from(file));
    let witness = Arc::new(Witness::default());
    file.set_witness(witness.clone());
    let words: Arc<[AtomicU64]> = (0..Witness::WORDS).map(|_| AtomicU64::new(0)).collect();
    let words: ringtap_io::Words = Arc::new(words);
    let mut tasks = Tasks::new(ringtap_io::reactor().expect("a reactor"));
    let io = tasks.io().clone();
    let handle = file.handle();
    tasks
        .block_on(async move {
            let buffer = io.buffer(4096).expect("memory");
            io.write(handle, 0, buffer.mem(), false).await.expect("written");
            Witness::reset(&words, 0, stamp());
            witness.start(words.clone(), 0);
            for round in 0..200 {
                let before = coarse_wall();
                match round % 4 {
                    0 => io.to_the_end(Op::SetLen { file: handle, len: 4096 + round }).await,
                    1 => io.to_the_end(Op::PunchHole { file: handle, offset: 0, len: 512 }).await,
                    _ => io.write(handle, 4096 * round, buffer.mem(), false).await,
                }
                .expect("changed");
                let said = Witness::read(&words, 0);
                assert_eq!(said.in_flight, 0, "round {round}");
                let stamp = stamp();
                assert!(said.floor <= stamp && stamp <= said.ended, "{round}: {said:?} {stamp}");
                assert!(round % 4 < 2 || said.floor >= before, "{round}: {said:?} {before}");
            }
            // Several at a time.
            let writes: Vec<_> =
                (0..20).map(|at| io.write(handle, 4096 * at, buffer.mem(), false)).collect();
            let mut writes: Vec<_> = writes.into_iter().map(Box::pin).collect();
            std::future::poll_fn(|context| {
                writes.retain_mut(|write| write.as_mut().poll(context).is_pending());
                match writes.is_empty() {
                    true => std::task::Poll::Ready(()),
                    false => std::task::Poll::Pending,
                }
            })
            .await;
            let (said, stamp) = (Witness::read(&words, 0), stamp());
            assert_eq!(said.in_flight, 0);
            assert!(said.floor <= stamp && stamp <= said.ended, "{said:?} {stamp}");
        })
        .expect("the ring");
}

/// Every other test of this file once more.
#[test]
fn threads_do_the_same() {
    if ringtap_io::engine().0 == Engine::Threads {
        return;
    }
    let mut again = Command::new(std::env::current_exe().expect("this test"));
    let end = again.env("RINGTAP_IO", "threads").status().expect("it runs");
    assert!(end.success());
}
