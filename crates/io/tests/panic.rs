//! A panic on a thread with operations in flight: none of them outlives its memory. A build with debug
//! assertions notices a buffer that is given back too soon.

use std::future::{Future, poll_fn};
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::task::Poll;

use ringtap_io::{File, Io, Op, OpenFile, Ring, Tasks};
use rustix::event::{EventfdFlags, eventfd};

fn tasks() -> Tasks {
    Tasks::new(Box::new(Ring::new().expect("io_uring")))
}

fn event() -> OpenFile {
    OpenFile::new(eventfd(0, EventfdFlags::NONBLOCK).expect("an eventfd"))
}

fn socket() -> (UnixStream, OpenFile) {
    let (theirs, ours) = UnixStream::pair().expect("sockets");
    (theirs, OpenFile::new(ours.into()))
}

/// Wait for bytes that never come.
async fn receive(io: &Io, file: File) -> i32 {
    let buffer = io.buffer(4096).expect("memory");
    io.run(Op::Recv { file, mem: buffer.mem() }).await
}

/// What is in flight and never ends by itself.
fn wait_in_all_ways(tasks: &mut Tasks, socket: &OpenFile, event: &OpenFile) {
    let (io, socket, event) = (tasks.io().clone(), socket.handle(), event.handle());
    let (one, two, three) = (io.clone(), io.clone(), io.clone());
    tasks.spawn(async move { _ = receive(&one, socket).await });
    tasks.spawn(async move { _ = two.run(Op::ReadEvent { file: event }).await });
    tasks.spawn(async move { three.sleep(u64::MAX / 2).await });
    tasks.spawn(async move { _ = io.run(Op::PollIn { file: event }).await });
}

#[test]
fn unwinding_cancels_what_is_in_flight_before_its_memory_goes() {
    let ((_theirs, socket), event) = (socket(), event());
    let unwound = catch_unwind(AssertUnwindSafe(|| {
        let mut tasks = tasks();
        wait_in_all_ways(&mut tasks, &socket, &event);
        let io = tasks.io().clone();
        tasks.spawn(async move {
            io.sleep(1_000_000).await;
            panic!("as the test has it");
        });
        tasks.run()
    }));
    assert!(unwound.is_err());
}

#[test]
fn what_was_not_handed_over_never_is() {
    let ((mut theirs, socket), event) = (socket(), event());
    let mut tasks = tasks();
    wait_in_all_ways(&mut tasks, &socket, &event);
    let (io, file) = (tasks.io().clone(), socket.handle());
    tasks.spawn(async move {
        let buffer = io.buffer(512).expect("memory");
        io.run(Op::Send { file, mem: buffer.mem() }).await;
    });
    tasks.run_ready();
    assert!(tasks.io().in_flight() == 5 && tasks.has_work());
    drop(tasks);
    drop(socket);
    let mut sent = vec![];
    theirs.read_to_end(&mut sent).expect("the end");
    assert!(sent.is_empty());
}

#[test]
fn the_other_tasks_may_go_on_after_a_panic() {
    let event = event();
    let mut tasks = tasks();
    let io = tasks.io().clone();
    for number in 0..10 {
        let (io, file) = (io.clone(), event.handle());
        tasks.spawn(async move {
            io.next_turn().await;
            assert!(number % 3 != 1, "as the test has it");
            io.run(Op::SignalEvent { file }).await;
        });
    }
    let mut panics = 0;
    while catch_unwind(AssertUnwindSafe(|| tasks.run())).is_err() {
        panics += 1;
    }
    assert_eq!((panics, tasks.count()), (3, 0));
    let mut count = [0; 8];
    rustix::io::read(&event, &mut count).expect("signals");
    assert_eq!(u64::from_ne_bytes(count), 7);
}

/// Poll all of them until one has ended, or panics.
async fn race<F: Future<Output = i32>>(futures: Vec<F>) -> i32 {
    let mut futures: Vec<Pin<Box<F>>> = futures.into_iter().map(Box::pin).collect();
    poll_fn(|context| {
        for future in &mut futures {
            if let Poll::Ready(end) = future.as_mut().poll(context) {
                return Poll::Ready(end);
            }
        }
        Poll::Pending
    })
    .await
}

#[test]
fn an_operation_that_is_dropped_is_ended_first() {
    let ((_theirs, socket), event) = (socket(), event());
    let (mut tasks, file) = (tasks(), socket.handle());
    let io = tasks.io().clone();
    rustix::io::write(&event, &1u64.to_ne_bytes()).expect("a signal");
    let first = event.handle();
    let end = tasks.block_on(async move {
        let one = async |number| match number {
            7 => io.run(Op::ReadEvent { file: first }).await,
            _ => receive(&io, file).await,
        };
        let first = race((0..10).map(one).collect()).await;
        // One that was not handed over never is.
        let mut asked = Box::pin(receive(&io, file));
        poll_fn(|context| {
            assert!(asked.as_mut().poll(context).is_pending());
            Poll::Ready(())
        })
        .await;
        drop(asked);
        (first, io.in_flight())
    });
    assert_eq!(end.expect("the ring"), (8, 0));
}

#[test]
fn a_task_that_panics_beside_its_own_operations_takes_them_along() {
    let (_theirs, socket) = socket();
    let unwound = catch_unwind(AssertUnwindSafe(|| {
        let (mut tasks, file) = (tasks(), socket.handle());
        let io = tasks.io().clone();
        tasks.block_on(async move {
            let mut waits = pin!(receive(&io, file));
            let mut sleeps = pin!(io.sleep(1_000_000));
            poll_fn(|context| {
                assert!(waits.as_mut().poll(context).is_pending());
                assert!(sleeps.as_mut().poll(context).is_pending(), "as the test has it");
                Poll::<()>::Pending
            })
            .await;
        })
    }));
    assert!(unwound.is_err());
}
