//! Limits for NBD clients.

use std::io::Read;
use std::os::unix::net::UnixStream;

use crate::served::Server;
use crate::{disk, folder, qemu_io};

#[test]
fn a_full_socket_tells_its_clients_and_says_so_once() {
    let dir = folder();
    disk(dir.path(), "a.raw", 1 << 20);
    let words = "a.raw -f raw --nbd unix:a.sock --nbd-connections 3 --nbd-peer-connections 2";
    let server = Server::start(dir.path(), words);
    let connect = || UnixStream::connect(dir.path().join("a.sock")).expect("a connection");
    let _there = [connect(), connect()];
    let refused = qemu_io(dir.path(), &server.uri(0), "read 0 512").wait();
    assert!(refused.stderr.contains("too many connections of yours"), "{}", refused.stderr);
    // Told, or closed at once where many are being told.
    let many: Vec<_> = (0..200).map(|_| connect()).collect();
    let ends = many.iter().map(|mut one| one.read_to_end(&mut vec![]));
    assert_eq!(ends.count(), 200);
    let said = server.stop().stderr;
    let about = |words: &str| said.lines().filter(|line| line.contains(words)).count();
    assert_eq!(about("turned away"), 1, "{said}");
    assert!(about("too many") == 0, "{said}");
}
