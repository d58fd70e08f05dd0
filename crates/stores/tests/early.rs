//! Servers that answer a write before they have read all of it, or that break what they take, wholly or in part.

use std::cell::Cell;
use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use ringtap_io::{Op, Tasks, reactor};
use ringtap_stores::nbd::wire::{
    IHAVEOPT, NBDMAGIC, OPTION_REPLY_MAGIC, SIMPLE_REPLY_MAGIC, can, handshake, info, opt, rep,
};
use ringtap_stores::{Options, Store};

/// More than any socket takes at once.
const LEN: usize = 8 << 20;

fn agree(client: &mut UnixStream) -> io::Result<()> {
    let mut hello = NBDMAGIC.to_be_bytes().to_vec();
    hello.extend(IHAVEOPT.to_be_bytes());
    hello.extend((handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES).to_be_bytes());
    client.write_all(&hello)?;
    client.read_exact(&mut [0; 4])?;
    loop {
        let mut head = [0; 16];
        client.read_exact(&mut head)?;
        let word = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().unwrap_or_default());
        let option = word(8);
        io::copy(&mut (&*client).take(word(12).into()), &mut io::sink())?;
        let mut answer = |kind: u32, data: &[u8]| {
            let mut bytes = OPTION_REPLY_MAGIC.to_be_bytes().to_vec();
            [option, kind, data.len() as u32].iter().for_each(|it| bytes.extend(it.to_be_bytes()));
            bytes.extend(data);
            client.write_all(&bytes)
        };
        if option != opt::GO {
            answer(rep::ERR_UNSUP, &[])?;
            continue;
        }
        let mut export = info::EXPORT.to_be_bytes().to_vec();
        export.extend((1u64 << 30).to_be_bytes());
        export.extend((can::HAS_FLAGS | can::FLUSH).to_be_bytes());
        answer(rep::INFO, &export)?;
        return answer(rep::ACK, &[]);
    }
}

/// What says that a request was carried out.
fn reply_to(head: &[u8; 28]) -> Vec<u8> {
    [&SIMPLE_REPLY_MAGIC.to_be_bytes()[..], &[0; 4], &head[8..16]].concat()
}

/// The next request, answered at once and well; the bytes behind it, if it is a write.
fn answer_next(client: &mut UnixStream, wait: impl FnOnce()) -> io::Result<Vec<u8>> {
    let mut head = [0; 28];
    client.read_exact(&mut head)?;
    client.write_all(&reply_to(&head))?;
    wait();
    let writes = head[7] == 1;
    let len = u32::from_be_bytes(head[24..].try_into().unwrap_or_default());
    let mut payload = vec![0; if writes { len as usize } else { 0 }];
    client.read_exact(&mut payload)?;
    Ok(payload)
}

/// A place for a server's socket, in a folder that goes away, and what listens there.
fn place() -> (tempfile::TempDir, PathBuf, UnixListener) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("s");
    let listener = UnixListener::bind(&path).expect("a socket");
    (folder, path, listener)
}

/// The store at a socket, with what carries its operations out.
fn opened(path: &Path, more: &str) -> (Store, Tasks) {
    let uri = format!("nbd+unix:///?socket={}{more}", path.display());
    let store = Store::open(&uri, &Options::default()).expect("opened");
    (store, Tasks::new(reactor().expect("a reactor")))
}

/// A server that takes one connection after the other and breaks each after `serve`.
struct Breaking {
    over: mpsc::Sender<()>,
    server: thread::JoinHandle<i32>,
}

impl Breaking {
    fn begin(listener: UnixListener, serve: impl Fn(&mut UnixStream) + Send + 'static) -> Breaking {
        let (over, ended) = mpsc::channel::<()>();
        let server = thread::spawn(move || {
            let mut times = 0;
            while ended.try_recv() == Err(mpsc::TryRecvError::Empty) {
                let mut client = listener.accept().expect("a client").0;
                times += i32::from(agree(&mut client).is_ok());
                serve(&mut client);
            }
            times
        });
        Breaking { over, server }
    }

    /// How often it was asked, once it has ended.
    fn asked(self, path: &Path) -> i32 {
        self.over.send(()).expect("the server");
        // One more, so that it sees that.
        drop(UnixStream::connect(path));
        self.server.join().expect("the server")
    }
}

#[test]
fn the_memory_of_a_write_is_its_owners_again_when_it_was_answered() {
    let (_folder, path, listener) = place();
    let (changed, hear) = mpsc::channel();
    let server = thread::spawn(move || {
        let mut client = listener.accept().expect("a client").0;
        agree(&mut client).expect("agreed");
        let written =
            answer_next(&mut client, || hear.recv().expect("it has ended")).expect("read");
        answer_next(&mut client, || {}).expect("a flush");
        written
    });
    let (store, mut tasks) = opened(&path, "");
    let io = tasks.io().clone();
    let keep = store.clone();
    let ends = tasks.block_on(async move {
        let file = keep.file();
        let mut buffer = io.buffer(LEN).expect("memory");
        buffer.bytes_mut().fill(0x55);
        let mem = buffer.mem();
        let wrote = io.run(Op::Write { file, offset: 0, mem, durable: false }).await;
        buffer.bytes_mut().fill(0xaa);
        changed.send(()).expect("the server listens");
        (wrote, io.run(Op::Sync { file }).await)
    });
    assert_eq!(ends.expect("turns"), (LEN as i32, 0));
    let written = server.join().expect("the server");
    assert!(written.iter().all(|byte| *byte == 0x55), "it sent what was not there any more");
}

#[test]
fn a_server_that_takes_connections_and_breaks_them_is_not_back() {
    let (_folder, path, listener) = place();
    let server = Breaking::begin(listener, |_| ());
    let (store, mut tasks) = opened(&path, "&reconnect=1");
    let (io, file) = (tasks.io().clone(), store.file());
    let sync = async move { io.run(Op::Sync { file }).await };
    assert_eq!(tasks.block_on(sync).expect("turns"), -libc::EIO);
    drop(tasks);
    drop(store);
    let times = server.asked(&path);
    assert!((3..40).contains(&times), "it was asked {times} times in a second");
}

/// A read that the server breaks its connection on, beside others that it answers, fails in the time that requests wait for a
/// connection, and the server is not asked without a pause.
#[test]
fn a_request_that_breaks_each_connection_fails_alone() {
    const POISON: u64 = 1 << 20;
    let (_folder, path, listener) = place();
    let server = Breaking::begin(listener, |client| {
        let mut head = [0; 28];
        while client.read_exact(&mut head).is_ok() && head[16..24] != POISON.to_be_bytes() {
            let len = u32::from_be_bytes(head[24..].try_into().unwrap_or_default());
            let mut reply = reply_to(&head);
            reply.resize(reply.len() + len as usize, 7);
            if client.write_all(&reply).is_err() {
                break;
            }
        }
    });
    let (store, mut tasks) = opened(&path, "&reconnect=1");
    let (io, file) = (tasks.io().clone(), store.file());
    let failed = Rc::new(Cell::new(0));
    let (told, door) = (failed.clone(), io.clone());
    tasks.spawn(async move {
        let buffer = door.buffer(4096).expect("memory");
        told.set(door.run(Op::Read { file, offset: POISON, mem: buffer.mem() }).await);
    });
    let other = async move {
        let buffer = io.buffer(4096).expect("memory");
        while failed.get() == 0 {
            let end = io.run(Op::Read { file, offset: 0, mem: buffer.mem() }).await;
            assert_eq!(end, 4096, "others are answered");
        }
        failed.get()
    };
    assert_eq!(tasks.block_on(other).expect("turns"), -libc::EIO);
    drop(tasks);
    drop(store);
    let times = server.asked(&path);
    assert!((3..60).contains(&times), "it was asked {times} times");
}

/// A connection that nobody used is lost after longer than requests wait, and again: patience begins anew each time.
#[test]
fn a_server_that_goes_twice_while_nothing_is_asked_is_waited_for() {
    let (_folder, path, listener) = place();
    let (go, going) = mpsc::channel::<()>();
    let (went, gone) = mpsc::channel::<()>();
    let (copy, answered) = (path.clone(), Duration::from_millis(500));
    let server = thread::spawn(move || {
        let mut listener = listener;
        // What connects for itself, and the one that requests go by.
        for _ in 0..2 {
            let mut client = listener.accept().expect("a client").0;
            agree(&mut client).expect("agreed");
            going.recv().expect("the test");
            drop(client);
            went.send(()).expect("the test");
        }
        // Away for a while.
        drop(listener);
        std::fs::remove_file(&copy).expect("the socket");
        thread::sleep(answered);
        listener = UnixListener::bind(&copy).expect("a socket");
        let mut client = listener.accept().expect("a client").0;
        agree(&mut client).expect("agreed");
        answer_next(&mut client, || {}).expect("a flush");
    });
    let (store, mut tasks) = opened(&path, "&reconnect=2");
    let (io, file) = (tasks.io().clone(), store.file());
    let door = io.clone();
    // So that the thread has its connection.
    tasks.spawn(async move { _ = door.run(Op::Forget { file, offset: 0, len: 4096 }).await });
    let over = async move {
        io.sleep(100_000_000).await;
        go.send(()).expect("the server");
        gone.recv().expect("the server");
        // It connects again, and longer than requests wait nothing is asked.
        io.sleep(3_000_000_000).await;
        go.send(()).expect("the server");
        gone.recv().expect("the server");
        io.sleep(50_000_000).await;
        io.run(Op::Sync { file }).await
    };
    assert_eq!(tasks.block_on(over).expect("turns"), 0, "it was away for half a second");
    server.join().expect("the server");
}
