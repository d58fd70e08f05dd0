//! Limits for NBD clients, and TLS.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use ringtap_tests::patience;
use rustix::process::Signal;

use crate::program::{Running, program, python};
use crate::served::{Server, command};
use crate::{disk, folder, nbdinfo, qemu_io, run};

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

#[test]
fn sockets_speak_tls_as_they_are_told() {
    let dir = folder();
    disk(dir.path(), "a.raw", 1 << 20);
    let certificates = include_str!("../../../crates/export/tests/nbd/certificates.py");
    let place = dir.path().display().to_string();
    Running::start(python(certificates, &[&place])).wait().ok();
    let words = "a.raw -f raw --nbd tcp:127.0.0.1:0 --nbd unix:a.sock --tls off --tls-dir server";
    let server = Server::start(dir.path(), words);
    let uri = server.uri(0);
    assert!(uri.starts_with("nbds://127.0.0.1:"), "{uri}");
    let local = uri.replace("127.0.0.1", "localhost");
    let size = |uri: &str| nbdinfo(&["--size", uri]);
    assert_eq!(size(&format!("{local}?tls-certificates={place}/client")).ok(), "1048576\n");
    assert_ne!(size(&format!("{local}?tls-certificates={place}/nobody")).status.code(), Some(0));
    assert_ne!(size(&uri.replace("nbds:", "nbd:")).status.code(), Some(0));
    assert_eq!(size(&format!("nbd+unix:///?socket={place}/a.sock")).ok(), "1048576\n");
    // Certificates are read again on SIGHUP: one that was revoked since is not let in any more, and what
    // cannot be used leaves things as they are.
    let revoked = format!("{local}?tls-certificates={place}/revoked");
    assert_eq!(size(&revoked).ok(), "1048576\n");
    let list = dir.path().join("server/ca-crl.pem");
    std::fs::copy(dir.path().join("server-crl/ca-crl.pem"), &list).expect("copied");
    let mut server = server;
    let mut hang_up = |words: &str| {
        server.process().signal(Signal::HUP);
        server.process().until(words, |it| it.stderr().contains(words).then_some(()));
    };
    hang_up("certificates that are there now");
    assert_ne!(size(&revoked).status.code(), Some(0));
    std::fs::write(&list, "no list").expect("written");
    hang_up("stay in use");
    assert_ne!(size(&revoked).status.code(), Some(0));
    assert_eq!(size(&format!("{local}?tls-certificates={place}/client")).ok(), "1048576\n");
    let said = server.stop().stderr;
    assert!(said.contains("TLS with an NBD client (127.0.0.1) failed"), "{said}");
    let wrong = run(dir.path(), "serve a.raw -f raw --nbd unix:b.sock --tls-dir client");
    assert!(wrong.failed(1).contains("client/server-cert.pem"));
}

/// Zeros that are written as bytes, and in pieces: each piece is stable before the answer.
#[test]
fn zeroes_with_fua_are_stable_on_both_sides_of_a_gibibyte() {
    let dir = folder();
    let path = dir.path();
    std::fs::write(path.join("key"), "secret").expect("a file");
    let make = "create -q -f luks -o iter-time=10 a.luks 1025M --target-secret file:key";
    run(path, make).ok();
    let serve = "a.luks -f luks --secret file:key --cache none --nbd unix:s --sandbox off";
    let server = command(path, serve);
    let mut traced = program("strace", "strace");
    let calls = "trace=pwrite64,pwritev,pwritev2,fdatasync,fsync";
    traced
        .current_dir(path)
        .args(["-D", "-f", "-o", "calls", "-e", calls])
        .arg(server.get_program());
    traced.args(server.get_args()).env("RINGTAP_IO", "threads");
    let server = Server::started(traced);
    // Neither the client nor the server makes anything stable at its end: both are just gone.
    let zeroes = "import nbd, os, sys; h = nbd.NBD(); h.connect_uri(sys.argv[1]); \
                  h.zero(16384, (1 << 30) - 8192, nbd.CMD_FLAG_FUA); os._exit(0)";
    Running::start(python(zeroes, &[&server.uri(0)])).wait().ok();
    server.kill();
    let end = Instant::now() + patience();
    let calls = loop {
        let calls = std::fs::read_to_string(path.join("calls")).expect("its calls");
        if calls.contains("+++ killed") {
            break calls;
        }
        assert!(Instant::now() < end, "strace does not end: {calls}");
        std::thread::sleep(Duration::from_millis(20));
    };
    let all: Vec<&str> = calls.lines().collect();
    let last = all.iter().rposition(|line| line.contains("pwrite") && !line.contains("RWF_DSYNC"));
    let synced = all.iter().rposition(|line| line.contains("sync("));
    assert!(calls.contains("pwrite") && (last.is_none() || synced > last), "{calls}");
}
