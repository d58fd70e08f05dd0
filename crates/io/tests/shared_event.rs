//! An event whose open file is another's, too: what that one does to it keeps no thread of ours asleep.

use std::sync::mpsc::channel;
use std::time::Duration;

use ringtap_io::{Op, OpenFile, Tasks, Threads};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{OFlags, fcntl_setfl};

#[test]
fn an_event_made_blocking_meanwhile_is_not_slept_in() {
    let (ended, end) = channel();
    std::thread::spawn(move || {
        let event = eventfd(0, EventfdFlags::NONBLOCK).expect("an eventfd");
        let theirs = event.try_clone().expect("a descriptor");
        let event = OpenFile::new(event);
        let handle = event.handle();
        let mut tasks = Tasks::new(Box::new(Threads::new().expect("epoll")));
        let (io, reader) = (tasks.io().clone(), tasks.io().clone());
        tasks.spawn(async move {
            assert_eq!(reader.run(Op::ReadEvent { file: handle }).await, 8);
            fcntl_setfl(&theirs, OFlags::empty()).expect("flags");
            assert_eq!(reader.run(Op::ReadEvent { file: handle }).await, -libc::ECANCELED);
        });
        let done = tasks.block_on(async move {
            assert_eq!(io.run(Op::SignalEvent { file: handle }).await, 8);
            io.sleep(5_000_000).await;
            assert_eq!(io.run(Op::Cancel { file: handle }).await, 1);
        });
        ended.send(done.is_ok()).expect("a listener");
    });
    assert_eq!(end.recv_timeout(Duration::from_secs(20)), Ok(true));
}
