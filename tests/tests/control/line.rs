//! Images that have names and lie upon one another, as libvirt has them opened: those between are committed and streamed by
//! their names, and never under somebody else who reads them.

use ringtap_tests::ok;
use serde_json::{Value, json};

use crate::{Empty, node, qemu_io};

const NAMES: [&str; 4] = ["base", "low", "mid", "top"];

impl Empty {
    /// Four images, each with something of its own and opened upon the one before; the uppermost is written to.
    fn line(&mut self) {
        for (at, name) in NAMES.iter().enumerate() {
            let path = self.text(name);
            let make = ["create", "-q", "-f", "qcow2"];
            let below = at.checked_sub(1).map(|at| self.text(NAMES[at]));
            let backing = below.iter().flat_map(|below| ["-F", "qcow2", "-b", below]);
            let args = make.into_iter().chain(backing).chain([&*path, "16M"]);
            ok("qemu-img", "qemu-utils", &args.collect::<Vec<_>>());
            let write = format!("write -P {} {at}M 2M", at + 1);
            ok("qemu-io", "qemu-utils", &["-f", "qcow2", "-c", &write, &path]);
        }
        for (at, name) in NAMES.iter().enumerate() {
            self.open_upon(name, name, at.checked_sub(1).map(|at| NAMES[at]), *name != "top");
        }
    }

    fn open_upon(&mut self, name: &str, file: &str, backing: Option<&str>, read_only: bool) {
        let mut open = node(name, "qcow2", &self.path(file));
        open["read-only"] = read_only.into();
        open["backing"] = backing.map_or(Value::Null, Value::from);
        self.control.ok("blockdev-add", open);
    }

    fn does(&mut self, command: &str, arguments: Value) {
        self.control.ok(command, arguments);
        self.job_ends();
    }

    fn job_ends(&mut self) {
        loop {
            let (name, told) = self.control.event();
            if name == "BLOCK_JOB_COMPLETED" {
                assert!(told.get("error").is_none(), "{told}");
                return;
            }
        }
    }

    /// The images of a node, the topmost first.
    fn chain(&mut self, name: &str) -> Vec<String> {
        let all = self.control.ok("query-named-block-nodes", json!({}));
        let all = all.as_array().expect("a list");
        let own = all.iter().find(|one| one["node-name"] == name).expect("the node");
        let (mut names, mut image) = (vec![], &own["image"]);
        while let Some(path) = image["filename"].as_str() {
            names.extend(path.rsplit('/').next().map(str::to_owned));
            image = &image["backing-image"];
        }
        names
    }
}

/// What all of them show.
const ALL: [&str; 4] = ["read -P 1 0 1M", "read -P 2 1M 1M", "read -P 3 2M 1M", "read -P 4 3M 2M"];

fn commit(top: &str, base: &str) -> Value {
    json!({ "device": "top", "job-id": "j", "top-node": top, "base-node": base })
}

fn del(name: &str) -> Value {
    json!({ "node-name": name })
}

#[test]
fn images_that_have_names_are_committed_between() {
    let mut empty = Empty::new();
    empty.line();
    let uri = empty.nbd();
    empty.export("e", "top", "nbd", json!({ "name": "top" }));
    empty.does("block-commit", commit("mid", "low"));
    assert_eq!(empty.chain("top"), ["top", "low", "base"]);
    qemu_io(&uri("top"), &ALL).expect("the same");
    empty.says_no("blockdev-del", del("low"), "used as backing hd of");
    // What went has what stays open as it was: it goes first.
    empty.says_no("block-commit", commit("low", "base"), "Node 'mid' is busy");
    empty.control.ok("blockdev-del", del("mid"));
    empty.does("block-commit", commit("low", "base"));
    assert_eq!(empty.chain("top"), ["top", "base"]);
    empty.control.ok("blockdev-del", del("low"));
    qemu_io(&uri("top"), &ALL).expect("the same");
    // The node of what stays shows what it holds now.
    empty.export("b", "base", "nbd", json!({ "name": "base", "writable": false }));
    let base = ["read -P 1 0 1M", "read -P 2 1M 1M", "read -P 3 2M 2M"];
    let open = |commands: &[&str]| {
        let mut args = vec!["-r", "-f", "raw"];
        args.extend(commands.iter().flat_map(|one| ["-c", one]));
        let uri = uri("base");
        args.push(&uri);
        ok("qemu-io", "qemu-utils", &args)
    };
    let said = open(&base);
    assert!(!said.contains("failed"), "{said}");
    empty.says_no("block-commit", commit("top", "base"), "Node 'base' is busy: what its exports");
    for id in ["e", "b"] {
        empty.control.ok("block-export-del", json!({ "id": id }));
    }
    for name in ["top", "base"] {
        empty.control.ok("blockdev-del", del(name));
    }
    for name in ["top", "base"] {
        ok("qemu-img", "qemu-utils", &["check", "-q", &empty.text(name)]);
    }
}

#[test]
fn an_image_that_has_a_name_takes_what_lies_below_it() {
    let mut empty = Empty::new();
    empty.line();
    let uri = empty.nbd();
    empty.export("e", "top", "nbd", json!({ "name": "top" }));
    let stream = |more: Value| {
        let mut all = json!({ "device": "mid", "job-id": "j" });
        more.as_object().into_iter().flatten().for_each(|(key, value)| all[key] = value.clone());
        all
    };
    let none = json!({ "base-node": "top" });
    empty.says_no("block-stream", stream(none), "Node 'top' is not a backing image of 'mid'");
    let above = json!({ "bottom": "top" });
    empty.says_no(
        "block-stream",
        stream(above),
        "Node 'top' is not in a chain starting from 'mid'",
    );
    let mut slowly = stream(json!({ "base-node": "base" }));
    slowly["speed"] = json!(64 << 10);
    empty.control.ok("block-stream", slowly);
    let show = json!({ "id": "m", "type": "nbd", "node-name": "mid", "name": "mid" });
    empty.says_no("block-export-add", show, "Node 'mid' is busy");
    empty.says_no("blockdev-del", del("mid"), "in use");
    empty.control.ok("block-job-set-speed", json!({ "device": "j", "speed": 0 }));
    empty.job_ends();
    assert_eq!(empty.chain("top"), ["top", "mid", "base"]);
    assert_eq!(empty.chain("mid"), ["mid", "base"]);
    empty.control.ok("blockdev-del", del("low"));
    qemu_io(&uri("top"), &ALL).expect("the same");
    empty.does("block-stream", stream(json!({ "bottom": "base" })));
    assert_eq!(empty.chain("top"), ["top", "mid"]);
    qemu_io(&uri("top"), &ALL).expect("the same");
    qemu_io(&uri("top"), &["write -P 9 0 64k", "read -P 9 0 64k"]).expect("written");
    empty.control.ok("blockdev-del", del("base"));
    empty.control.ok("block-export-del", json!({ "id": "e" }));
    for name in ["top", "mid"] {
        empty.control.ok("blockdev-del", del(name));
        ok("qemu-img", "qemu-utils", &["check", "-q", &empty.text(name)]);
    }
}

/// Of an image that its overlay has taken the place of.
#[test]
fn an_image_that_was_left_takes_what_lies_below_it() {
    let mut empty = Empty::new();
    empty.line();
    let over = empty.text("over");
    let top = empty.text("top");
    let make = ["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", &top, &over, "16M"];
    ok("qemu-img", "qemu-utils", &make);
    empty.open_upon("over", "over", None, false);
    let uri = empty.nbd();
    empty.export("e", "top", "nbd", json!({ "name": "top" }));
    empty.control.ok("blockdev-snapshot", json!({ "node": "top", "overlay": "over" }));
    qemu_io(&uri("top"), &["write -P 5 4M 1M"]).expect("written");
    empty.does("block-stream", json!({ "device": "top", "job-id": "j", "base-node": "low" }));
    assert_eq!(empty.chain("over"), ["over", "top", "low", "base"]);
    qemu_io(&uri("top"), &ALL[..3]).expect("the same");
    qemu_io(&uri("top"), &["read -P 4 3M 1M", "read -P 5 4M 1M"]).expect("the same");
}

#[test]
fn what_another_reads_is_not_committed_into() {
    let mut empty = Empty::new();
    empty.line();
    let other = empty.text("other");
    let low = empty.text("low");
    let make = ["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", &low, &other, "16M"];
    ok("qemu-img", "qemu-utils", &make);
    empty.open_upon("other", "other", Some("low"), false);
    let uri = empty.nbd();
    for name in ["top", "other"] {
        empty.export(name, name, "nbd", json!({ "name": name }));
    }
    let others = ["read -P 1 0 1M", "read -P 2 1M 2M", "read -P 0 3M 1M"];
    qemu_io(&uri("other"), &others).expect("its own");
    // Into what both have, whichever of its images goes, and the whole disk.
    for (top, base) in [("mid", "low"), ("mid", "base"), ("low", "base"), ("top", "low")] {
        empty.says_no("block-commit", commit(top, base), "Node 'other' is busy");
    }
    let stream = json!({ "device": "low", "job-id": "j" });
    empty.says_no("block-stream", stream, "Node 'low' is busy: several nodes lie upon it");
    // What it does not have takes what both have: nobody else sees that.
    empty.does("block-stream", json!({ "device": "mid", "job-id": "j", "base-node": "base" }));
    assert_eq!(empty.chain("top"), ["top", "mid", "base"]);
    qemu_io(&uri("top"), &ALL).expect("the same");
    qemu_io(&uri("other"), &others).expect("its own");
    empty.control.ok("block-export-del", json!({ "id": "other" }));
    empty.control.ok("blockdev-del", del("other"));
    empty.control.ok("blockdev-del", del("low"));
    empty.does("block-commit", commit("mid", "base"));
    qemu_io(&uri("top"), &ALL).expect("the same");
}
