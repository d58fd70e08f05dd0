//! A server that lets in fewer clients than there are threads.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use ringtap_io::{Op, Tasks, reactor};
use ringtap_stores::{Options, Store};

const THREADS: usize = 5;

fn server(socket: &Path, image: &Path) -> Child {
    server_of(2, socket, image)
}

/// One that lets in so many.
fn server_of(places: u32, socket: &Path, image: &Path) -> Child {
    let _ = std::fs::remove_file(socket);
    let mut server = Command::new("nbdkit");
    server.args(["-f", "--filter=limit", "-U"]).arg(socket).arg("file").arg(image);
    server.arg(format!("limit={places}")).stderr(Stdio::null()).spawn().expect("nbdkit")
}

fn opened(uri: &str) -> Store {
    let begun = Instant::now();
    loop {
        match Store::open(uri, &Options::default()) {
            Ok(store) => return store,
            Err(error) => assert!(begun.elapsed().as_secs() < 60, "{error}"),
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// A thread's read.
fn read(tasks: &mut Tasks, file: ringtap_io::File) -> i32 {
    let io = tasks.io().clone();
    let end = tasks.block_on(async move {
        let buffer = io.buffer(4096).expect("memory");
        io.run(Op::Read { file, offset: 0, mem: buffer.mem() }).await
    });
    end.expect("turns")
}

#[test]
fn threads_share_what_the_server_lets_in() {
    let folder = tempfile::tempdir_in("/var/tmp").expect("a folder");
    let (image, socket) = (folder.path().join("image"), folder.path().join("s"));
    std::fs::write(&image, vec![7; 1 << 20]).expect("written");
    let first = server(&socket, &image);
    let uri = format!("nbd+unix:///?socket={}&reconnect=8", socket.display());
    let store = opened(&uri);
    // Nobody leaves before all have been served; a queue's thread goes on turning meanwhile.
    let served = Arc::new(AtomicUsize::new(0));
    let threads: Vec<_> = (0..THREADS)
        .map(|_| {
            let (store, served) = (store.clone(), served.clone());
            thread::spawn(move || {
                let mut tasks = Tasks::new(reactor().expect("a reactor"));
                let end = read(&mut tasks, store.file());
                served.fetch_add(1, SeqCst);
                while served.load(SeqCst) < THREADS {
                    let io = tasks.io().clone();
                    tasks.block_on(async move { io.sleep(20_000_000).await }).expect("turns");
                }
                (end, read(&mut tasks, store.file()))
            })
        })
        .collect();
    let ends: Vec<_> = threads.into_iter().map(|one| one.join().expect("its end")).collect();
    assert_eq!(ends, [(4096, 4096); THREADS]);
    drop(store);
    end(first);
}

/// Who asked while it was away has the owner look for a connection as well, which pauses when the server returns.
#[test]
fn a_server_that_is_back_serves_who_comes_then() {
    let folder = tempfile::tempdir_in("/var/tmp").expect("a folder");
    let (image, socket) = (folder.path().join("image"), folder.path().join("s"));
    std::fs::write(&image, vec![7; 1 << 20]).expect("written");
    let first = server(&socket, &image);
    let store = opened(&format!("nbd+unix:///?socket={}&reconnect=1", socket.display()));
    let mut tasks = Tasks::new(reactor().expect("a reactor"));
    assert_eq!(read(&mut tasks, store.file()), 4096);
    drop(tasks);
    end(first);
    let mut tasks = Tasks::new(reactor().expect("a reactor"));
    assert_eq!(read(&mut tasks, store.file()), -libc::EIO);
    drop(tasks);
    let second = server(&socket, &image);
    thread::sleep(Duration::from_millis(300));
    let mut tasks = Tasks::new(reactor().expect("a reactor"));
    let ends: Vec<_> = (0..20).map(|_| read(&mut tasks, store.file())).collect();
    assert_eq!(ends, [4096; 20]);
    drop(tasks);
    drop(store);
    end(second);
}

/// Those whose connection does not come back go by one of those that do.
#[test]
fn a_server_that_is_back_with_fewer_places_serves_all_that_it_served() {
    for (away, patience) in [(0, 2), (3, 1)] {
        let folder = tempfile::tempdir_in("/var/tmp").expect("a folder");
        let (image, socket) = (folder.path().join("image"), folder.path().join("s"));
        std::fs::write(&image, vec![7; 1 << 20]).expect("written");
        let first = server_of(9, &socket, &image);
        let store =
            opened(&format!("nbd+unix:///?socket={}&reconnect={patience}", socket.display()));
        let (begun, back) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let threads: Vec<_> = (0..THREADS)
            .map(|_| {
                let (store, begun, back) = (store.clone(), begun.clone(), back.clone());
                thread::spawn(move || {
                    let mut tasks = Tasks::new(reactor().expect("a reactor"));
                    let end = read(&mut tasks, store.file());
                    begun.fetch_add(1, SeqCst);
                    let since = Instant::now();
                    let (mut last, mut is_back) = (0, false);
                    while back.load(SeqCst) < THREADS && since.elapsed().as_secs() < 40 {
                        let io = tasks.io().clone();
                        tasks.block_on(async move { io.sleep(20_000_000).await }).expect("turns");
                        if begun.load(SeqCst) > THREADS {
                            last = read(&mut tasks, store.file());
                            if last == 4096 && !std::mem::replace(&mut is_back, true) {
                                back.fetch_add(1, SeqCst);
                            }
                        }
                    }
                    (end, last)
                })
            })
            .collect();
        while begun.load(SeqCst) < THREADS {
            thread::sleep(Duration::from_millis(20));
        }
        end(first);
        thread::sleep(Duration::from_secs(away));
        let second = server_of(1, &socket, &image);
        begun.fetch_add(1, SeqCst);
        let ends: Vec<_> = threads.into_iter().map(|one| one.join().expect("its end")).collect();
        assert_eq!(ends, [(4096, 4096); THREADS], "{away} s away");
        drop(store);
        end(second);
    }
}

fn end(mut server: Child) {
    let _ = (server.kill(), server.wait());
}
