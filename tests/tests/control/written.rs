//! Who may write to an image, and make it larger, while others read it or jobs are at work on it.

use serde_json::{Value, json};

use crate::{Empty, node, qemu_io};

fn show(id: &str, node: &str, writable: bool) -> Value {
    json!({ "id": id, "node-name": node, "type": "nbd", "name": id, "writable": writable })
}

impl Empty {
    /// A qcow2 node upon another.
    fn add_upon(&mut self, name: &str, below: &str) {
        let mut make = std::process::Command::new("qemu-img");
        make.args(["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b"]).arg(self.path(below));
        crate::ok(make.arg(self.path(name)));
        let mut open = node(name, "qcow2", &self.path(name));
        open["backing"] = below.into();
        self.control.ok("blockdev-add", open);
    }
}

#[test]
fn what_a_job_writes_to_is_shown_to_nobody() {
    let mut empty = Empty::new();
    empty.add("source", "raw", "16M");
    empty.add("target", "raw", "16M");
    let _uri = empty.nbd();
    let job = json!({ "job-id": "j", "device": "source", "target": "target", "sync": "full", "speed": 1 });
    for command in ["blockdev-mirror", "blockdev-backup"] {
        empty.control.ok(command, job.clone());
        for writable in [true, false] {
            empty.says_no("block-export-add", show("e", "target", writable), "a job writes to it");
        }
        empty.control.ok("block-job-cancel", json!({ "device": "j", "force": true }));
        while empty.control.event().0 != "BLOCK_JOB_CANCELLED" {}
        while empty.control.ok("query-jobs", json!({})) != json!([]) {}
    }
    empty.control.ok("block-export-add", show("e", "target", true));
}

#[test]
fn nobody_writes_far_below_what_others_read() {
    let mut empty = Empty::new();
    empty.add("a", "qcow2", "16M");
    empty.add_upon("b", "a");
    empty.add_upon("c", "b");
    let uri = empty.nbd();
    let refused = "Permission conflict on node 'a'";
    empty.control.ok("block-export-add", show("c", "c", true));
    empty.says_no("block-export-add", show("a", "a", true), refused);
    empty.control.ok("block-export-add", show("r", "a", false));
    for id in ["c", "r"] {
        empty.control.ok("block-export-del", json!({ "id": id }));
    }
    empty.control.ok("block-export-add", show("a", "a", true));
    qemu_io(&uri("a"), &["write -P 1 0 16M"]).expect("written");
    empty.says_no("block-export-add", show("c", "c", false), refused);
    empty.says_no("block-stream", json!({ "device": "c" }), refused);
    empty.control.ok("block-export-del", json!({ "id": "a" }));
    // While a job reads it nobody writes there, though nobody sees what lies upon it.
    empty.control.ok("block-stream", json!({ "job-id": "j", "device": "c", "speed": 1 }));
    empty.says_no("block-export-add", show("a", "a", true), refused);
}

#[test]
fn what_others_lie_upon_stays_as_large_as_it_is() {
    let mut empty = Empty::new();
    empty.add("a", "qcow2", "16M");
    empty.add_upon("b", "a");
    let larger = json!({ "node-name": "a", "size": 32 << 20 });
    empty.says_no("block_resize", larger.clone(), "'b' lies upon it");
    empty.control.ok("blockdev-del", json!({ "node-name": "b" }));
    empty.control.ok("block_resize", larger);
}

#[test]
fn a_mirror_keeps_whether_flushes_are_carried_out() {
    let mut empty = Empty::new();
    for (name, no_flush) in [("lax", true), ("strict", false)] {
        std::fs::File::create(empty.path(name))
            .and_then(|file| file.set_len(1 << 20))
            .expect("a file");
        let mut open = node(name, "raw", &empty.path(name));
        open["file"]["cache"] = json!({ "direct": false, "no-flush": no_flush });
        empty.control.ok("blockdev-add", open);
    }
    for (device, target) in [("lax", "strict"), ("strict", "lax")] {
        let job = json!({ "job-id": "j", "device": device, "target": target, "sync": "full" });
        empty.says_no("blockdev-mirror", job, "cache.no-flush");
    }
}
