//! Images that disks lie upon which are served, opened otherwise than they were.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use ringtap_tests::ok;
use serde_json::{Value, json};

use crate::{Empty, node, qemu_io};

impl Empty {
    /// Three images, each upon the one before, each opened by its name upon that.
    fn three(&mut self) {
        let mut below: Option<&str> = None;
        for name in ["a", "b", "c"] {
            let path = self.text(name);
            let create = ["create", "-q", "-f", "qcow2"];
            let under = below.map(|it| self.text(it));
            let mut words = create.to_vec();
            match &under {
                Some(under) => words.extend(["-b", under, "-F", "qcow2", &path]),
                None => words.extend([&*path, "8M"]),
            }
            drop(ok("qemu-img", "qemu-utils", &words));
            let pattern =
                format!("write -q -P {} {}M 2M", name.as_bytes()[0], name.as_bytes()[0] - b'a');
            drop(ok("qemu-io", "qemu-utils", &["-f", "qcow2", "-c", &pattern, &path]));
            below = Some(name);
        }
        below = None;
        for name in ["a", "b", "c"] {
            let mut open = node(name, "qcow2", &self.path(name));
            open["backing"] = below.map_or(Value::Null, Value::from);
            self.control.ok("blockdev-add", open);
            below = Some(name);
        }
    }

    fn reopen(&mut self, name: &str, backing: Option<&str>, read_only: bool) {
        let mut open = node(name, "qcow2", &self.path(name));
        open["backing"] = backing.map_or(Value::Null, Value::from);
        open["read-only"] = read_only.into();
        self.control.ok("blockdev-reopen", json!({ "options": [open] }));
        assert_eq!(self.is_read_only(name), read_only, "{name}");
    }

    fn is_read_only(&mut self, name: &str) -> bool {
        let all = self.control.ok("query-named-block-nodes", json!({}));
        let mut all = all.as_array().expect("a list").iter();
        all.find(|one| one["node-name"] == name).expect(name)["ro"] == true
    }

    /// Whether another program may have the image, too, to read it.
    fn may_be_read(&self, name: &str) -> bool {
        let words = ["-r", "-f", "qcow2", "-c", "read 0 64k", &self.text(name)];
        ringtap_tests::program("qemu-io", "qemu-utils", words).status.success()
    }
}

const WHOLE: [&str; 4] =
    ["read -P 97 0 1M", "read -P 98 1M 1M", "read -P 99 2M 2M", "read -P 0 5M 3M"];

/// Has a guest end when this is dropped, however that comes.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

#[test]
fn an_image_that_served_ones_lie_upon_is_opened_otherwise_while_guests_go_on() {
    let mut empty = Empty::new();
    empty.three();
    let uri = empty.nbd()("c");
    empty.export("e", "c", "nbd", json!({}));
    assert!(!empty.may_be_read("a") && !empty.may_be_read("b"));
    let (stop, uri) = (AtomicBool::new(false), &*uri);
    std::thread::scope(|scope| {
        let guest = scope.spawn(|| {
            let mut rounds = 0;
            while !stop.load(SeqCst) {
                let write = format!("write -P {} 4M 1M", rounds % 250 + 1);
                let read = write.replace("write", "read");
                let mut all = vec![&*write, "flush", &read];
                all.extend(WHOLE);
                qemu_io(uri, &all).expect("what it wrote, and what lies below");
                rounds += 1;
            }
            rounds
        });
        let end = Stop(&stop);
        for _ in 0..5 {
            for read_only in [true, false] {
                empty.reopen("a", None, read_only);
                empty.reopen("b", Some("a"), read_only);
                assert_eq!(empty.may_be_read("b"), read_only);
                assert_eq!(empty.may_be_read("a"), read_only);
            }
        }
        drop(end);
        assert!(guest.join().expect("a guest") > 0);
    });
    // Who writes to it is not let in while guests read it.
    let show = json!({ "id": "b", "node-name": "b", "type": "nbd", "writable": true });
    empty.control.call("block-export-add", show).expect_err("it is read");
    // What is to be written to by a job is not open for writing by itself.
    empty.reopen("b", Some("a"), true);
    let commit = json!({ "device": "c", "base-node": "b", "job-id": "j" });
    empty.control.ok("block-commit", commit);
    loop {
        let (name, _) = empty.control.event();
        if name == "BLOCK_JOB_READY" {
            break;
        }
    }
    empty.control.ok("job-complete", json!({ "id": "j" }));
    assert_eq!(empty.ended("j"), Value::Null);
    qemu_io(uri, &WHOLE).expect("all of it");
    empty.reopen("a", None, true);
    empty.reopen("a", None, false);
    qemu_io(uri, &WHOLE).expect("all of it");
    let images = ["a", "b", "c"].map(|name| empty.text(name));
    empty.control.ok("quit", json!({}));
    empty.server.ends();
    images.iter().for_each(|image| drop(ok("qemu-img", "qemu-utils", &["check", "-q", image])));
}
