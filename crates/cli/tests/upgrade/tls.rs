//! NBD clients that speak TLS: their keys stay with the process, so they connect again.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::bench::{Bench, ends, image, said};

/// Writes, each read back, while the servers follow one another.
const ROUNDS: u64 = 600;
const PIECE: u64 = 64 << 10;

/// Certificates of a server and of a client, in folders of these names.
pub fn certificates(bench: &Bench) {
    let script = include_str!("../../../export/tests/nbd/certificates.py");
    let made = Command::new("/usr/bin/python3").args(["-c", script]).arg(bench.dir.path()).output();
    let made = made.expect("python3 and python3-cryptography");
    assert!(made.status.success(), "{}", said(&made));
}

/// A client that connects again by itself, and reads back what it writes.
pub struct TlsClient {
    child: Child,
    say: JoinHandle<()>,
    hear: JoinHandle<String>,
}

/// One of the export `a` at `nbd.sock`; it has written something when this returns.
pub fn tls_client(bench: &Bench) -> TlsClient {
    let socket = bench.path("nbd.sock");
    let at = format!("server.type=unix,server.path={}", socket.display());
    let nbd = format!("driver=nbd,{at},export=a,tls-creds=t,tls-hostname=localhost");
    let mut child = Command::new("qemu-io")
        .arg("--object")
        .arg(format!("tls-creds-x509,id=t,endpoint=client,dir={}", bench.path("client").display()))
        .args(["--image-opts", &format!("{nbd},reconnect-delay=120")])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("qemu-io");
    let mut commands = child.stdin.take().expect("its input");
    let say = std::thread::spawn(move || {
        for round in 0..ROUNDS {
            let (pattern, at) = (round % 255 + 1, round % 64 * PIECE);
            let both = format!("write -P {pattern} {at} 64k\nread -P {pattern} {at} 64k\n");
            commands.write_all(both.as_bytes()).expect("it listens");
            // Some are in flight whenever a server leaves.
            std::thread::sleep(Duration::from_millis(5));
        }
        commands.write_all(b"flush\nquit\n").expect("it listens");
    });
    let mut heard = BufReader::new(child.stdout.take().expect("its output"));
    let mut text = String::new();
    while !text.contains("wrote") {
        assert_ne!(heard.read_line(&mut text).expect("text"), 0, "{text}\n{}", bench.log());
    }
    let hear = std::thread::spawn(move || {
        heard.read_to_string(&mut text).expect("text");
        text
    });
    TlsClient { child, say, hear }
}

impl TlsClient {
    fn has_said_all(&self) -> bool {
        self.say.is_finished()
    }

    /// It ends, and no request of it has failed.
    pub fn verified(self, bench: &Bench) {
        self.say.join().expect("all is said");
        let output = self.child.wait_with_output().expect("its end");
        let text = self.hear.join().expect("its output") + &said(&output);
        assert!(output.status.success(), "{text}\n{}", bench.log());
        let done = |word: &str| text.matches(&format!("{word} {PIECE}/{PIECE} bytes")).count();
        assert_eq!((done("wrote"), done("read")), (ROUNDS as usize, ROUNDS as usize), "{text}");
        assert!(!text.contains("failed") && !text.contains("error"), "{text}");
    }
}

#[test]
fn a_tls_client_that_connects_again_sees_no_error() {
    let mut bench = Bench::new();
    certificates(&bench);
    let file = image(&bench, "qcow2");
    let line = format!(
        "serve --control unix:c.sock --tls require --tls-dir server {file} -f qcow2 --name a --nbd unix:nbd.sock"
    );
    let (_child, mut server) = bench.serve(&line);
    let client = tls_client(&bench);
    let refused = bench.ends_with("upgrade unix:c.sock", 1);
    assert!(refused.contains("speak TLS") && refused.contains("--close-tls"), "{refused}");
    let mut followed = 0;
    // Where all was said before: then it was not followed while it spoke, and goes on without an error.
    while !client.has_said_all() || followed < 2 {
        let next = bench.upgrade("unix:c.sock --close-tls");
        ends(server);
        (server, followed) = (next, followed + 1);
        std::thread::sleep(Duration::from_millis(300));
    }
    client.verified(&bench);
    assert!(followed >= 2, "{followed}\n{}", bench.log());
}
