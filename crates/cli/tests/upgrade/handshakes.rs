//! NBD clients that connect while a server is followed by another: each has its export, from the one or from the other.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::thread;
use std::time::Duration;

use crate::bench::{Bench, ends, stop};

/// A client that takes its time to choose its export.
fn connect(socket: &Path) -> io::Result<()> {
    let mut stream = UnixStream::connect(socket)?;
    stream.read_exact(&mut [0; 18])?;
    thread::sleep(Duration::from_millis(150));
    // Fixed newstyle, no zeroes; NBD_OPT_EXPORT_NAME.
    let option =
        [&3_u32.to_be_bytes()[..], b"IHAVEOPT", &1_u32.to_be_bytes(), &1_u32.to_be_bytes()];
    stream.write_all(&[&option.concat()[..], b"a"].concat())?;
    stream.read_exact(&mut [0; 10])?;
    // NBD_CMD_DISC
    let bye = [&0x2560_9513_u32.to_be_bytes()[..], &[0, 0, 0, 2], &[0; 20]].concat();
    stream.write_all(&bye)
}

#[test]
fn clients_that_are_about_to_choose_are_not_lost_however_many_come() {
    let mut bench = Bench::new();
    bench.ends_with("create -q -f raw a.raw 16M", 0);
    let line = "serve --control unix:c.sock a.raw -f raw --name a --nbd unix:n.sock";
    let (_child, mut server) = bench.serve(line);
    let (over, connected) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU32::new(0)));
    let clients = (0..8).map(|at| {
        let (over, connected) = (over.clone(), connected.clone());
        let socket = bench.path("n.sock");
        thread::spawn(move || {
            thread::sleep(Duration::from_millis(at * 20));
            while !over.load(SeqCst) {
                connect(&socket).unwrap_or_else(|why| panic!("a client is lost: {why}"));
                connected.fetch_add(1, SeqCst);
            }
        })
    });
    let clients: Vec<_> = clients.collect();
    for refused in [true, false, false] {
        thread::sleep(Duration::from_millis(300));
        if refused {
            // It goes on here, and takes those that have waited.
            bench.install("exit 1");
            bench.ends_with("upgrade unix:c.sock", 1);
            bench.install_again();
        } else {
            let next = bench.upgrade("unix:c.sock");
            ends(server);
            server = next;
        }
        let before = connected.load(SeqCst);
        while connected.load(SeqCst) < before + 16 {
            assert!(!clients.iter().all(|one| one.is_finished()), "nobody is left");
            thread::sleep(Duration::from_millis(10));
        }
    }
    over.store(true, SeqCst);
    let lost = clients.into_iter().filter_map(|client| client.join().err()).count();
    assert_eq!(lost, 0, "{}", bench.log());
    stop(server);
}
