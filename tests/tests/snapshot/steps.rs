//! The server killed at a step of writing down where disks go on, or such a step failing: whichever name the disk is served
//! by next, it is the same disk.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::thread;

use ringtap_tests::{Control, Server, ok};
use serde_json::{Value, json};

use crate::bench::{Bench, snapshot};
use crate::jobs::{hear, make, none_left};
use crate::stream::backing;

/// A server whose system calls on a file are tampered with.
struct Tampered(Child);

impl Tampered {
    /// Begin; `what` is of strace's `--inject`.
    fn begin(server: &Server, file: &str, what: &str) -> Tampered {
        let pid = server.pid().to_string();
        let inject = format!("inject={what}");
        let args = ["-f", "-e", "trace=fsync,setxattr", "-e", &inject, "-P", file, "-p", &pid];
        let mut child = Command::new("strace")
            .args(args)
            .args(["-o", "/dev/null"])
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("strace is missing: apt-get install strace");
        let mut said = BufReader::new(child.stderr.take().expect("its words")).lines();
        let attached = said.find(|line| line.as_ref().is_ok_and(|line| line.contains("attached")));
        assert!(attached.is_some(), "strace does not attach");
        thread::spawn(move || said.for_each(drop));
        Tampered(child)
    }

    /// As before, from now on.
    fn end(mut self) {
        let pid = rustix::process::Pid::from_child(&self.0);
        rustix::process::kill_process(pid, rustix::process::Signal::INT).expect("it is there");
        self.0.wait().expect("it ends");
    }
}

impl Drop for Tampered {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn copy(bench: &Bench, name: &str) -> String {
    let (uri, copy) = (bench.uri("a"), bench.text(name));
    ok("qemu-img", "qemu-utils", &["convert", "-f", "raw", "-O", "raw", &uri, &copy]);
    copy
}

fn same(one: &str, other: &str) {
    ok("qemu-img", "qemu-utils", &["compare", "-f", "raw", "-F", "raw", one, other]);
}

/// What is written down with an image of where its disk goes on; nothing where nothing is.
fn successor(image: &str) -> String {
    let mut text = [0; 4096];
    let len = rustix::fs::getxattr(image, "trusted.ringtap.successor", &mut text);
    String::from_utf8_lossy(&text[..len.unwrap_or(0)]).into_owned()
}

/// Say it to a server that does not outlive it.
fn is_killed_by(control: &mut Control, command: &str, arguments: Value) {
    control.send(json!({ "execute": command, "arguments": arguments }).to_string());
    while control.hear().is_some() {}
}

#[test]
fn a_pivot_that_cannot_be_written_down_leaves_the_disk_where_it_was() {
    for job in ["block-commit", "blockdev-mirror"] {
        let bench = Bench::new();
        make(&bench, "a.img", "raw", &[]);
        make(&bench, "copy", "raw", &[]);
        let server = bench.serve(&["a.img"], &["-f", "raw"]);
        let mut control = bench.control();
        bench.io("a", &["write -P 1 0 1M"]);
        snapshot(&mut control, "a", &bench.text("one.qcow2"));
        bench.io("a", &["write -P 2 0 512k"]);
        match job {
            "block-commit" => control.ok(job, json!({ "device": "a", "job-id": "j" })),
            _ => {
                let file = json!({ "driver": "file", "filename": bench.text("copy") });
                let add = json!({ "driver": "raw", "node-name": "copy", "file": file });
                control.ok("blockdev-add", add);
                let to = json!({ "device": "a", "job-id": "j", "target": "copy", "sync": "full" });
                control.ok(job, to)
            }
        };
        hear(&mut control, "BLOCK_JOB_READY");
        let top = bench.text("one.qcow2");
        let tampered = Tampered::begin(&server, &top, "fsync:error=EIO:when=1");
        control.ok("block-job-complete", json!({ "device": "j" }));
        let told = hear(&mut control, "BLOCK_JOB_COMPLETED");
        let error = told["error"].as_str().unwrap_or_default();
        assert!(error.contains("cannot write down where it goes on"), "{job}: {told}");
        tampered.end();
        bench.io("a", &["write -P 3 256k 512k", "flush"]);
        let held = copy(&bench, "held");
        server.kill();
        for name in ["a.img", "one.qcow2"] {
            let server = bench.serve_as("a", name, &[]);
            same(&held, &copy(&bench, "found"));
            server.stop();
        }
        assert_eq!(successor(&top), "", "{job}");
        assert!(successor(&bench.text("a.img")).contains("written"), "{job}: it is sealed");
    }
}

/// Between them lie the header that names another image, and what is sealed.
const STEPS: [&str; 4] = ["setxattr:1", "fsync:1", "setxattr:2", "fsync:2"];

#[test]
fn a_commit_of_images_between_that_is_killed_at_a_record_goes_on() {
    for step in STEPS {
        let bench = Bench::new();
        make(&bench, "a.img", "raw", &[]);
        // Attributes are set by this very process then.
        let server = bench.serve(&["a.img"], &["-f", "raw", "--sandbox", "off"]);
        let mut control = bench.control();
        let names = ["one.qcow2", "two.qcow2", "three.qcow2"].map(|name| bench.text(name));
        for (name, own) in names.iter().zip(1..) {
            bench.io("a", &[&format!("write -P {own} {own}M 2M")]);
            snapshot(&mut control, "a", name);
        }
        bench.io("a", &["write -P 4 4M 512k", "flush"]);
        let held = copy(&bench, "held");
        let (call, when) = step.split_once(':').expect("both");
        let what = format!("{call}:signal=KILL:when={when}");
        let tampered = Tampered::begin(&server, &names[1], &what);
        let commit =
            json!({ "device": "a", "job-id": "j", "top": names[0], "base": bench.text("a.img") });
        is_killed_by(&mut control, "block-commit", commit);
        drop((tampered, server));
        let server = bench.serve(&["a.img"], &["-f", "raw"]);
        same(&held, &copy(&bench, "found"));
        let mut control = bench.control();
        none_left(&mut control);
        same(&held, &copy(&bench, "found"));
        assert_eq!(backing(&bench, "two.qcow2"), bench.text("a.img"), "{step}");
        server.stop();
        for image in &names[..2] {
            let record = successor(image);
            assert!(record.is_empty() || record.contains("written"), "{step}: {image}: {record}");
        }
        std::fs::remove_file(&names[0]).expect("removed");
        let server = bench.serve_as("a", "a.img", &[]);
        same(&held, &copy(&bench, "found"));
        server.stop();
    }
}

#[test]
fn a_stream_that_is_killed_at_a_record_leads_past_what_goes() {
    for step in ["setxattr:1", "fsync:1"] {
        let bench = Bench::new();
        make(&bench, "a.img", "raw", &[]);
        let server = bench.serve(&["a.img"], &["-f", "raw", "--sandbox", "off"]);
        let mut control = bench.control();
        let names = ["one.qcow2", "two.qcow2"].map(|name| bench.text(name));
        for (name, own) in names.iter().zip(1..) {
            bench.io("a", &[&format!("write -P {own} {own}M 2M")]);
            snapshot(&mut control, "a", name);
        }
        let held = copy(&bench, "held");
        let (call, when) = step.split_once(':').expect("both");
        let what = format!("{call}:signal=KILL:when={when}");
        let base = bench.text("a.img");
        let tampered = Tampered::begin(&server, &base, &what);
        let stream = json!({ "device": "a", "job-id": "j", "base": base });
        is_killed_by(&mut control, "block-stream", stream);
        drop((tampered, server));
        let server = bench.serve(&["a.img"], &["-f", "raw"]);
        none_left(&mut bench.control());
        same(&held, &copy(&bench, "found"));
        server.stop();
        std::fs::remove_file(&names[0]).expect("removed");
        let server = bench.serve_as("a", "a.img", &[]);
        same(&held, &copy(&bench, "found"));
        server.stop();
    }
}
