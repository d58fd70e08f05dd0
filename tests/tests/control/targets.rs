//! Disks that are copied to encrypted images and to exports of NBD servers.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use ringtap_tests::targets::{Source, Target, image_for};
use ringtap_tests::{file_system_of, listens, patience};
use serde_json::{Value, json};
use tempfile::TempDir;

fn folder() -> TempDir {
    tempfile::tempdir_in("/var/tmp").expect("a folder")
}

/// All that is tried of a target that stays there.
fn takes_copies(folder: &Path, target: &Target) {
    let mut source = Source::new(folder, &[]);
    source.is_copied_by_all(target);
    source.may_be_cancelled(target);
    source.is_killed(target, &[]);
}

fn encrypted(folder: &Path, format: &str, own: &str, node: impl FnOnce(Value) -> Value) -> Target {
    let key = folder.join("key");
    fs::write(&key, "a secret, not hunter2").expect("a key");
    let secret = format!("secret,id=s,file={}", key.display());
    let options = format!("{own}key-secret=s,{own}iter-time=10");
    let options = match format {
        "qcow2" => format!("encrypt.format=luks,{options}"),
        _ => options,
    };
    let path = image_for(folder, "target", format, &["--object", &secret, "-o", &options]);
    let opened = format!("driver={format},file.driver=file,file.filename={path},{own}key-secret=s");
    let file = json!({ "driver": "file", "filename": path, "cache": { "direct": true } });
    Target { node: node(file), opened, secret: Some(key) }
}

#[test]
fn a_luks_container_takes_copies() {
    let dir = folder();
    let node = |file: Value| json!({ "driver": "luks", "file": file, "key-secret": "s" });
    takes_copies(dir.path(), &encrypted(dir.path(), "luks", "", node));
}

#[test]
fn an_encrypted_qcow2_image_takes_copies() {
    let dir = folder();
    let encrypt = json!({ "format": "luks", "key-secret": "s" });
    let node = |file: Value| json!({ "driver": "qcow2", "file": file, "encrypt": encrypt });
    takes_copies(dir.path(), &encrypted(dir.path(), "qcow2", "encrypt.", node));
}

/// What runs full is a file system of 24 MiB with what takes its room: the target needs 18 of them.
fn runs_full(make: impl Fn(&Path) -> Target) {
    let (dir, set_up) = (folder(), file_system_of(24, "tmpfs", &[], ""));
    let mut source = Source::new(dir.path(), &[]);
    let room = set_up.folder();
    source.runs_full(|| make(room), &room.join("ballast"));
}

#[test]
fn copies_to_a_luks_container_wait_for_room() {
    let node = |file: Value| json!({ "driver": "luks", "file": file, "key-secret": "s" });
    runs_full(|folder| encrypted(folder, "luks", "", node));
}

#[test]
fn copies_to_an_encrypted_qcow2_image_wait_for_room() {
    let encrypt = json!({ "format": "luks", "key-secret": "s" });
    let node = |file: Value| json!({ "driver": "qcow2", "file": file, "encrypt": encrypt });
    runs_full(|folder| encrypted(folder, "qcow2", "encrypt.", node));
}

/// QEMU's server of a raw file; killed when dropped.
struct Server {
    child: Mutex<Child>,
    words: Vec<String>,
    is_up: Box<dyn Fn() -> bool>,
}

impl Server {
    fn start(folder: &Path, at: &[&str], is_up: Box<dyn Fn() -> bool>) -> Server {
        let path = image_for(folder, "target", "raw", &[]);
        let words = ["-t", "-e", "20", "-f", "raw", "-x", "t", "--discard=unmap"];
        let words = words.iter().chain(at).map(|word| (*word).to_owned());
        let words: Vec<String> = words.chain([path.to_string()]).collect();
        let child = Mutex::new(Server::run(&words, &*is_up));
        Server { child, words, is_up }
    }

    fn run(words: &[String], is_up: &dyn Fn() -> bool) -> Child {
        let child = Command::new("qemu-nbd").args(words).stderr(Stdio::inherit()).spawn();
        let child = child.expect("qemu-nbd of qemu-utils");
        let end = Instant::now() + patience();
        while !is_up() {
            assert!(Instant::now() < end, "it does not come up");
            std::thread::sleep(Duration::from_millis(10));
        }
        child
    }

    fn kill(&self) {
        let mut child = self.child.lock().expect("nobody panics");
        child.kill().expect("killed");
        child.wait().expect("gone");
    }

    fn again(&self) {
        *self.child.lock().expect("nobody panics") = Server::run(&self.words, &*self.is_up);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

fn nbd(address: &Value, opened: &str) -> Target {
    let file = json!({ "driver": "nbd", "server": address, "export": "t", "reconnect-delay": 1 });
    let node = json!({ "driver": "raw", "file": file });
    Target { node, opened: format!("driver=nbd,{opened},export=t"), secret: None }
}

#[test]
fn an_export_at_a_unix_socket_takes_copies_and_may_go() {
    let dir = folder();
    let socket = dir.path().join("target.nbd");
    let path = socket.display().to_string();
    let is_up = Box::new(move || listens(&socket));
    let server = Server::start(dir.path(), &["-k", &path], is_up);
    let opened = format!("server.type=unix,server.path={path}");
    let target = nbd(&json!({ "type": "unix", "path": path }), &opened);
    let mut source = Source::new(dir.path(), &[]);
    source.outlives_it(&target, || server.kill(), || server.again());
    source.may_be_cancelled(&target);
    source.is_killed(&target, &[]);
}

#[test]
fn an_export_at_a_port_takes_copies_and_may_go() {
    let dir = folder();
    let port = std::net::TcpListener::bind("127.0.0.1:0").and_then(|it| it.local_addr());
    let port = port.expect("a port").port();
    let is_up = Box::new(move || std::net::TcpStream::connect(("127.0.0.1", port)).is_ok());
    let server = Server::start(dir.path(), &["-b", "127.0.0.1", "-p", &port.to_string()], is_up);
    let opened = format!("server.type=inet,server.host=127.0.0.1,server.port={port}");
    let address = json!({ "type": "inet", "host": "127.0.0.1", "port": port.to_string() });
    let target = nbd(&address, &opened);
    let mut source = Source::new(dir.path(), &[]);
    source.outlives_it(&target, || server.kill(), || server.again());
    source.may_be_cancelled(&target);
    source.is_killed(&target, &[]);
}
