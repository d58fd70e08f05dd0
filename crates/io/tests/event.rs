//! Tasks of one thread that wake those of another.

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::process::Command;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::mpsc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::Duration;

use ringtap_io::{Engine, Event, Listener, Tasks};

const ROUNDS: u64 = 20_000;

fn tasks() -> Tasks {
    Tasks::new(ringtap_io::reactor().expect("a reactor"))
}

/// Wait until the number is what `is` says, which somebody else makes it.
async fn until(event: &Event, number: &AtomicU64, is: impl Fn(u64) -> bool) {
    loop {
        let told = event.listen();
        if is(number.load(SeqCst)) {
            return;
        }
        told.await;
    }
}

/// Run it on a thread of its own, which must end in time.
fn in_time(work: impl FnOnce() + Send + 'static) {
    let (ended, end) = mpsc::channel();
    let thread = thread::spawn(move || {
        work();
        let _ = ended.send(());
    });
    let in_time = end.recv_timeout(Duration::from_secs(60));
    assert!(in_time != Err(mpsc::RecvTimeoutError::Timeout), "nobody was woken");
    thread.join().expect("ended well");
}

#[test]
fn two_threads_wake_each_other_without_a_timer() {
    in_time(|| {
        let shared = Arc::new((Event::default(), AtomicU64::new(0)));
        let theirs = shared.clone();
        let other = thread::spawn(move || {
            let mut tasks = tasks();
            let ended = tasks.block_on(async move {
                let (event, number) = &*theirs;
                for round in 0..ROUNDS {
                    until(event, number, |number| number == 2 * round + 1).await;
                    number.fetch_add(1, SeqCst);
                    event.notify();
                }
            });
            ended.expect("the ring turns");
        });
        let mut tasks = tasks();
        let ended = tasks.block_on(async move {
            let (event, number) = &*shared;
            for round in 0..ROUNDS {
                number.fetch_add(1, SeqCst);
                event.notify();
                until(event, number, |number| number == 2 * round + 2).await;
            }
        });
        ended.expect("the ring turns");
        other.join().expect("ended well");
    });
}

#[test]
fn every_task_that_listens_is_woken_on_its_own_thread_too() {
    in_time(|| {
        let mut tasks = tasks();
        let shared = Rc::new((Event::default(), AtomicU64::new(0), Cell::new(0)));
        for _ in 0..50 {
            let shared = shared.clone();
            tasks.spawn(async move {
                until(&shared.0, &shared.1, |number| number > 0).await;
                shared.2.set(shared.2.get() + 1);
            });
        }
        tasks.run_ready();
        assert!(!tasks.has_work());
        shared.1.store(1, SeqCst);
        shared.0.notify();
        assert!(tasks.has_ready());
        tasks.run().expect("the ring turns");
        assert_eq!(shared.2.get(), 50);
    });
}

#[test]
fn who_listens_to_what_is_closed_looks_again_and_does_not_wait() {
    in_time(|| {
        let mut tasks = tasks();
        let ended = tasks.block_on(async {
            let event = Event::default();
            event.close();
            let (mut told, mut looks) = (pin!(event.listen()), 0);
            poll_fn(|context| {
                looks += 1;
                assert!(told.as_mut().poll(context).is_pending());
                if looks == 10 { Poll::Ready(()) } else { Poll::Pending }
            })
            .await;
        });
        ended.expect("the ring turns");
    });
}

/// A waker keeps its thread's ring, and with it descriptors.
#[test]
fn who_listens_no_more_leaves_no_waker() {
    struct Woken(AtomicU64);
    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, SeqCst);
        }
    }
    let [one, other] = [(); 2].map(|()| Arc::new(Woken(AtomicU64::new(0))));
    let wakers = [&one, &other].map(|woken| Waker::from(woken.clone()));
    let poll = |told: &mut Pin<Box<Listener<'_>>>, waker: &Waker| {
        told.as_mut().poll(&mut Context::from_waker(waker)).is_ready()
    };
    let kept = || [&one, &other].map(|woken| Arc::strong_count(woken) - 2);
    let event = Event::default();
    for _ in 0..3 {
        let [mut first, mut second, mut third] = [(); 3].map(|()| Box::pin(event.listen()));
        assert!(!poll(&mut first, &wakers[0]) && !poll(&mut second, &wakers[0]));
        assert!(!poll(&mut third, &wakers[0]));
        drop(second);
        // Another task has taken it over.
        assert!(!poll(&mut first, &wakers[1]));
        drop(first);
        assert_eq!(kept()[1], 0, "who listens no more is on the list");
        event.notify();
        assert!(poll(&mut third, &wakers[0]));
        drop(third);
        assert_eq!(kept(), [0; 2], "who listens no more is on the list");
    }
    assert_eq!([&one, &other].map(|woken| woken.0.load(SeqCst)), [3, 0], "only the third waits");
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
