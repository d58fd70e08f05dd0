//! Servers that let in fewer clients than there are queues.

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::thread;

use ringtap_tests::{Server, ok, ringtap_of};

use crate::bench::{Bench, Kind, MIB, said};

/// The server has room for two: both are this disk's, or one is another's. Guests stay for longer than requests wait.
#[test]
fn queues_share_the_connections_that_a_server_lets_in() {
    thread::scope(|scope| {
        scope.spawn(|| share_beside(0));
        scope.spawn(|| share_beside(1));
    });
}

fn begun(uri: &str, commands: &[&str]) -> Child {
    let mut io = Command::new("stdbuf");
    io.args(["-oL", "qemu-io", "-r", "-f", "raw"]);
    io.args(commands.iter().flat_map(|one| ["-c", one])).arg(uri);
    io.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("qemu-io by stdbuf")
}

fn share_beside(others: usize) {
    let bench = Bench::new();
    bench.raw("a.raw", 8 * MIB);
    let (image, listen) = (bench.text("a.raw"), format!("unix:{}", bench.text("source")));
    ok("qemu-io", "qemu-utils", &["-f", "raw", "-c", "write -P 5 0 8M", &image]);
    let export = ["--read-only", &image, "-f", "raw", "--name", "e", "--nbd", &listen];
    let source = Server::start(export.iter().chain(&["--nbd-connections", "2"]));
    let mut held: Vec<Child> =
        (0..others).map(|_| begun(&bench.uri(), &["read 0 4k", "sleep 600000"])).collect();
    // Each has its connection.
    for one in &mut held {
        let told = one.stdout.as_mut().map(|it| it.read(&mut [0]).expect("a word"));
        assert_eq!(told, Some(1));
    }
    let uri = format!("{}&reconnect=8", bench.uri());
    let server = bench.serve(&uri, &["-f", "raw", "--read-only"]);
    let own = format!("nbd+unix:///d?socket={}", bench.text("nbd"));
    let read = ["read -P 5 0 64k", "sleep 14000", "read -P 5 4M 1M"];
    let clients: Vec<Child> = (0..5).map(|_| begun(&own, &read)).collect();
    for client in clients {
        let output = client.wait_with_output().expect("its end");
        let told = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        let bad = ["error", "failed"].iter().any(|word| told.contains(word));
        assert!(!bad && told.contains("read 1048576"), "{others} others: {told}");
    }
    for one in &mut held {
        let _ = (one.kill(), one.wait());
    }
    let log = server.stop();
    assert!(!log.contains("ERROR"), "{others} others: {log}");
    source.stop();
}

/// Who was let in once is let in no more: what lies below is opened once.
#[test]
fn an_overlay_is_written_to_upon_a_server_of_one_client() {
    let bench = Bench::new();
    for format in ["raw", "qcow2"] {
        let (base, top) = (bench.text(format), bench.text(&format!("top.{format}")));
        ok("qemu-img", "qemu-utils", &["create", "-q", "-f", format, &base, "8M"]);
        ok("qemu-io", "qemu-utils", &["-f", format, "-c", "write -P 6 0 1M", &base]);
        let uri = bench.uri();
        // Its name is recorded while a server of any number of clients is there.
        let source = bench.source(Kind::Qemu, format);
        said(&["create", "-q", "-f", "qcow2", "-b", &uri, "-F", format, &top]);
        source.stop();
        let source = bench.source(Kind::QemuOnce, format);
        let server = bench.serve(&top, &["-f", "qcow2"]);
        bench.io_well(&["read -P 6 0 64k", "write -P 7 64k 64k", "read -P 7 64k 64k"]);
        server.stop();
        drop(source);
    }
}

/// The one client is another: what is said of that.
#[test]
fn a_server_that_lets_in_nobody_more_is_told_of() {
    let bench = Bench::new();
    bench.raw("a.raw", MIB);
    let _source = bench.source(Kind::QemuOne, "a.raw");
    let server = bench.serve(&bench.uri(), &["-f", "raw"]);
    bench.io_well(&["read 0 4k"]);
    let why = ringtap_of(&["info", "-f", "raw", &bench.uri()]);
    let why = String::from_utf8_lossy(&why.stderr).into_owned();
    assert!(why.contains("fewer clients") && !why.contains("os error 11"), "{why}");
    server.stop();
}
