//! Servers that let in fewer clients than there are queues.

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::thread;

use ringtap_tests::{Server, ok};

use crate::bench::{Bench, MIB};

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
