//! Servers that are not who they are said to be.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::process::{Child, Command, Output, Stdio};
use std::thread;

use ringtap_tests::{ok, ringtap};

use crate::bench::{Bench, MIB, pattern};
use crate::origin::Origin;

/// What speaks TLS for an origin; killed when dropped.
struct Tls {
    child: Child,
    port: u16,
}

impl Drop for Tls {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Tls {
    fn start(bench: &Bench, origin: &Origin) -> Tls {
        let (port, log) = (origin.port.to_string(), bench.text("log"));
        let [cert, key] =
            ["cert", "key"].map(|what| bench.text(&format!("server/server-{what}.pem")));
        let mut python = Command::new("python3");
        python.args(["-c", include_str!("tls.py"), &port, &cert, &key, &log]);
        let mut child = python.stdout(Stdio::piped()).spawn().expect("python3");
        let mut line = String::new();
        let mut said = BufReader::new(child.stdout.take().expect("its output"));
        said.read_line(&mut line).expect("its port");
        let port = line.trim().parse().expect("a number");
        Tls { child, port }
    }

    fn uri(&self, host: &str) -> String {
        format!("https://{host}:{}/a/disk.img", self.port)
    }
}

/// Ringtap, with that authority.
fn run(authority: Option<&str>, args: &[&str]) -> Output {
    let mut command = Command::new("timeout");
    command.arg("60").arg(ringtap()).args(args).stdin(Stdio::null());
    command.env_remove("SSL_CERT_DIR").env_remove("SSL_CERT_FILE");
    command.envs(authority.map(|file| ("SSL_CERT_FILE", file)));
    command.output().expect("timeout of coreutils")
}

fn refusal(authority: Option<&str>, uri: &str) -> String {
    let output = run(authority, &["info", "-f", "raw", uri]);
    assert_eq!(output.status.code(), Some(1), "{uri} should have been refused");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_server_whose_certificate_is_not_trusted_is_asked_for_nothing() {
    let bench = Bench::new();
    let certificates = include_str!("../../../crates/export/tests/nbd/certificates.py");
    let place = bench.dir.path().display().to_string();
    ok("python3", "python3", &["-c", certificates, &place]);
    let object = pattern(2 * MIB);
    fs::write(bench.path("a.raw"), &object).expect("written");
    let origin = Origin::new(object);
    let tls = Tls::start(&bench, &origin);
    let (ours, other) = (bench.text("server/ca-cert.pem"), bench.text("deceived/ca-cert.pem"));
    let (uri, local) = (tls.uri("localhost"), bench.text("a.raw"));
    for authority in [None, Some(&*other)] {
        let why = refusal(authority, &uri);
        let says = ["is by no authority that this host trusts", "SSL_CERT_FILE"];
        assert!(says.iter().all(|words| why.contains(words)), "{why}");
    }
    let why = refusal(Some(&ours), &tls.uri("127.0.0.1"));
    assert!(why.contains("is for another name") && why.contains("localhost"), "{why}");
    assert!(origin.with(|state| state.asked.is_empty() && state.headers.is_empty()));
    // Each of the three asked for the image and for its index, once, and never without TLS.
    let first = fs::read_to_string(bench.path("log")).expect("the log");
    assert!(first.lines().all(|byte| byte == "16"), "{first}");
    assert!(first.lines().count() <= 6, "it was tried again: {first}");
    let same = run(Some(&ours), &["compare", "-f", "raw", "-F", "raw", &uri, &local]);
    assert!(same.status.success(), "{}", String::from_utf8_lossy(&same.stderr));
    assert!(!origin.with(|state| state.asked.is_empty()));
}

#[test]
fn a_server_without_tls_is_not_asked_in_the_clear() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("its address").port();
    let (tell, told) = std::sync::mpsc::channel();
    thread::spawn(move || {
        for mut client in listener.incoming().flatten() {
            let mut first = [0];
            let _ = client.read_exact(&mut first);
            let _ = tell.send(first[0]);
            let _ = client.write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n");
        }
    });
    let why = refusal(None, &format!("https://localhost:{port}/a/disk.img"));
    assert!(why.contains("no TLS is spoken there"), "{why}");
    let first: Vec<u8> = told.try_iter().collect();
    assert!(!first.is_empty() && first.iter().all(|byte| *byte == 0x16), "{first:?}");
}
