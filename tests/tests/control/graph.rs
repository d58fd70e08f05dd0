//! Files and images that have names of their own, as those name them who drive QEMU.

use std::fs;

use ringtap_tests::{Control, ok};
use serde_json::{Value, json};

use crate::{Empty, nbd_size, node, qemu_io};

impl Empty {
    /// Make an image by a job for the file and one for what is in it, and have both opened.
    fn make(&mut self, name: &str, backing: Option<&str>) {
        let (path, file) = (self.text(name), format!("{name}-file"));
        self.create(json!({ "driver": "file", "filename": path, "size": 0 }));
        let open = json!({ "driver": "file", "node-name": file, "filename": path, "cache": { "direct": true } });
        self.control.ok("blockdev-add", open);
        let mut options = json!({ "driver": "qcow2", "file": file, "size": 16 << 20 });
        let mut open = json!({ "driver": "qcow2", "node-name": name, "file": file });
        if let Some(backing) = backing {
            options["backing-file"] = self.text(backing).into();
            options["backing-fmt"] = "qcow2".into();
            open["backing"] = Value::Null;
        }
        self.create(options);
        self.control.ok("blockdev-add", open);
    }

    fn create(&mut self, options: Value) {
        self.control.ok("blockdev-create", json!({ "job-id": "create", "options": options }));
        assert_eq!(self.ended("create"), Value::Null);
    }

    /// Wait until a job has ended, and forget it; why it failed.
    pub fn ended(&mut self, id: &str) -> Value {
        until(&mut self.control, "JOB_STATUS_CHANGE", |told| {
            told["id"] == id && told["status"] == "concluded"
        });
        let jobs = self.control.ok("query-jobs", json!({}));
        let job = jobs.as_array().and_then(|jobs| jobs.iter().find(|job| job["id"] == id));
        let error = job.map(|job| job["error"].clone());
        if error.is_some() {
            self.control.ok("job-dismiss", json!({ "id": id }));
        }
        error.unwrap_or_default()
    }

    /// The names there are, each with its driver and whether it is read-only.
    pub fn names(&mut self) -> Vec<String> {
        let all = self.control.ok("query-named-block-nodes", json!({}));
        let all = all.as_array().expect("a list").iter();
        let mut names: Vec<String> = all
            .map(|one| format!("{} {}", one["node-name"], one["drv"]).replace('"', ""))
            .collect();
        names.sort();
        names
    }

    pub fn says_no(&mut self, command: &str, arguments: Value, said: &str) {
        let error = self.control.call(command, arguments).expect_err("it cannot be");
        assert!(error.contains(said), "{error}");
    }
}

fn until(control: &mut Control, wanted: &str, is_it: impl Fn(&Value) -> bool) {
    loop {
        let (name, data) = control.event();
        if name == wanted && is_it(&data) {
            return;
        }
    }
}

fn del(node: &str) -> Value {
    json!({ "node-name": node })
}

#[test]
fn names_stay_with_images_where_each_has_its_own() {
    let mut empty = Empty::new();
    empty.make("one", None);
    empty.says_no("blockdev-del", del("one-file"), "Node 'one-file' is in use");
    let again = json!({ "driver": "qcow2", "node-name": "x", "file": "one-file" });
    empty.says_no("blockdev-add", again, "'one-file' is in use");
    let uri = empty.nbd()("disk");
    empty.export("e", "one", "nbd", json!({ "name": "disk" }));
    qemu_io(&uri, &["write -P 1 0 1M"]).expect("written");

    // An overlay that is there, and named, takes the disk's place.
    empty.make("two", Some("one"));
    let snapshot = |node: &str, overlay: &str| json!({ "node": node, "overlay": overlay });
    empty.says_no("blockdev-snapshot", snapshot("one", "one"), "already in use");
    empty.says_no("blockdev-snapshot", snapshot("one", "x"), "node-name='x'");
    let actions = json!([{ "type": "blockdev-snapshot", "data": snapshot("one", "two") }]);
    empty.control.ok("transaction", json!({ "actions": actions }));
    assert_eq!(empty.names(), ["one qcow2", "one-file file", "two qcow2", "two-file file"]);
    let exports = empty.control.ok("query-block-exports", json!({}));
    assert_eq!(exports[0]["node-name"], "two", "{exports}");
    empty.says_no("blockdev-del", del("one"), "used as backing hd of 'two'");
    empty.says_no("blockdev-del", del("one-file"), "is in use");
    empty.says_no("blockdev-snapshot", snapshot("two", "one"), "lies below a disk");
    let show = json!({ "id": "x", "type": "nbd", "node-name": "two-file" });
    empty.says_no("block-export-add", show, "Node 'two-file' is a file");
    qemu_io(&uri, &["write -P 2 1M 1M", "read -P 1 0 1M"]).expect("written");

    // Committed, it is called as the image in which it goes on.
    let commit = json!({ "device": "two", "base-node": "one", "top-node": "two", "job-id": "j" });
    empty.control.ok("block-commit", commit);
    until(&mut empty.control, "BLOCK_JOB_READY", |_| true);
    empty.control.ok("job-complete", json!({ "id": "j" }));
    assert_eq!(empty.ended("j"), Value::Null);
    let exports = empty.control.ok("query-block-exports", json!({}));
    assert_eq!(exports[0]["node-name"], "one", "{exports}");
    for name in ["two", "two-file"] {
        empty.control.ok("blockdev-del", del(name));
    }
    assert_eq!(empty.names(), ["one qcow2", "one-file file"]);

    // What lies below goes by a stream: its names can go then.
    empty.make("three", Some("one"));
    empty.control.ok("blockdev-snapshot", snapshot("one", "three"));
    qemu_io(&uri, &["write -P 3 2M 1M"]).expect("written");
    let stream = |base: &str| json!({ "device": "three", "base-node": base, "job-id": "j" });
    empty.says_no(
        "block-stream",
        stream("one-file"),
        "Cannot find device='' nor node-name='one-file'",
    );
    empty.control.ok("block-stream", json!({ "device": "three", "job-id": "j" }));
    assert_eq!(empty.ended("j"), Value::Null);
    for name in ["one", "one-file"] {
        empty.control.ok("blockdev-del", del(name));
    }
    fs::remove_file(empty.path("one")).expect("removed");

    // A mirror's target keeps its name, and the source's can go.
    empty.make("four", None);
    let mirror = json!({ "device": "three", "target": "four", "sync": "full", "job-id": "j" });
    empty.control.ok("blockdev-mirror", mirror);
    until(&mut empty.control, "BLOCK_JOB_READY", |_| true);
    empty.control.ok("job-complete", json!({ "id": "j" }));
    assert_eq!(empty.ended("j"), Value::Null);
    for name in ["three", "three-file"] {
        empty.control.ok("blockdev-del", del(name));
    }
    assert_eq!(empty.names(), ["four qcow2", "four-file file"]);
    let found = ["read -P 1 0 1M", "read -P 2 1M 1M", "read -P 3 2M 1M", "read -P 0 3M 13M"];
    qemu_io(&uri, &found).expect("as it was written");
    empty.control.ok("block-export-del", json!({ "id": "e" }));
    empty.control.ok("blockdev-del", del("four"));
    empty.control.ok("blockdev-del", del("four-file"));
    assert_eq!(empty.names(), [""; 0]);
    let image = empty.text("four");
    ok("qemu-img", "qemu-utils", &["check", "-q", &image]);
}

#[test]
fn an_image_is_opened_upon_a_node() {
    let mut empty = Empty::new();
    empty.add("base", "qcow2", "4M");
    let uri = empty.nbd();
    empty.export("e", "base", "nbd", json!({}));
    qemu_io(&uri("base"), &["write -P 1 0 1M"]).expect("written");
    let top = empty.text("top");
    // It names nothing that is there.
    let make = ["create", "-q", "-f", "qcow2", "-u", "-F", "qcow2", "-b", "/nowhere", &top, "4M"];
    ok("qemu-img", "qemu-utils", &make);
    let mut open = node("top", "qcow2", &empty.path("top"));
    open["backing"] = "base".into();
    open["file"]["node-name"] = "file".into();
    empty.control.ok("blockdev-add", open.clone());
    assert_eq!(empty.names(), ["base qcow2", "file file", "top qcow2"]);
    // Nobody writes to what lies below while what lies upon it is used.
    let show = |id: &str, node: &str, writable: bool| json!({ "id": id, "node-name": node, "type": "nbd", "name": id, "writable": writable });
    empty.says_no("block-export-add", show("t", "top", true), "Permission conflict on node 'base'");
    empty.says_no(
        "blockdev-snapshot-sync",
        json!({ "node-name": "base", "snapshot-file": "x" }),
        "busy",
    );
    empty.says_no("block-stream", json!({ "device": "base" }), "busy");
    empty.control.ok("block-export-del", json!({ "id": "e" }));
    empty.control.ok("block-export-add", show("t", "top", true));
    empty.says_no(
        "block-export-add",
        show("b", "base", true),
        "Permission conflict on node 'base'",
    );
    empty.control.ok("block-export-add", show("r", "base", false));
    qemu_io(&uri("t"), &["read -P 1 0 1M", "write -P 2 1M 64k"]).expect("both");
    assert_eq!(nbd_size(&uri("r")), Ok(4 << 20));
    empty.says_no("blockdev-del", del("base"), "is in use");
    for id in ["t", "r"] {
        empty.control.ok("block-export-del", json!({ "id": id }));
    }
    empty.says_no("blockdev-del", del("base"), "used as backing hd of 'top'");
    // The file's name came with the image, and goes with it.
    empty.control.ok("blockdev-del", del("top"));
    empty.control.ok("blockdev-del", del("base"));
    assert_eq!(empty.names(), [""; 0]);
    open["backing"] = "base".into();
    empty.says_no("blockdev-add", open, "node-name='base'");
}

#[test]
fn a_commit_that_is_cancelled_says_nothing_of_the_image_below() {
    let mut empty = Empty::new();
    let [base, top] = ["base", "top"].map(|name| empty.text(name));
    ok("qemu-img", "qemu-utils", &["create", "-q", "-f", "qcow2", &base, "16M"]);
    ok(
        "qemu-img",
        "qemu-utils",
        &["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", &base, &top],
    );
    ok("qemu-io", "qemu-utils", &["-f", "qcow2", "-c", "write -P 1 0 8M", &top]);
    let mut open = node("top", "qcow2", &empty.path("top"));
    open["__ringtap_backing"] = json!([base]);
    empty.control.ok("blockdev-add", open.clone());
    let slowly = json!({ "device": "top", "job-id": "j", "speed": 1 << 20 });
    empty.control.ok("block-commit", slowly.clone());
    empty.control.ok("block-job-cancel", json!({ "device": "j" }));
    until(&mut empty.control, "BLOCK_JOB_CANCELLED", |_| true);
    empty.control.ok("blockdev-del", del("top"));
    // It can be written to, as before: who lies upon it is for the operator to know.
    empty.control.ok("blockdev-add", node("base", "qcow2", &empty.path("base")));
    empty.control.ok("blockdev-del", del("base"));
    // So is one whose server ends; and its clients are told that it was cancelled.
    empty.control.ok("blockdev-add", open);
    empty.control.ok("block-commit", slowly);
    empty.control.ok("quit", json!({}));
    until(&mut empty.control, "BLOCK_JOB_CANCELLED", |_| true);
    empty.server.ends();
}

#[test]
fn an_image_is_opened_otherwise() {
    let mut empty = Empty::new();
    empty.make("a", None);
    let uri = empty.nbd();
    let options = |more: Value| {
        let mut one = json!({ "driver": "qcow2", "node-name": "a", "file": "a-file" });
        for (key, value) in more.as_object().expect("an object") {
            one[key] = value.clone();
        }
        json!({ "options": [one] })
    };
    let show = json!({ "id": "e", "node-name": "a", "type": "nbd", "writable": true });
    empty.control.ok("blockdev-reopen", options(json!({ "read-only": true })));
    empty.says_no("block-export-add", show.clone(), "read-only");
    empty.control.ok("blockdev-reopen", options(json!({ "read-only": false })));
    empty.control.ok("blockdev-reopen", options(json!({})));
    empty.control.ok("block-export-add", show);
    qemu_io(&uri("a"), &["write -P 1 0 1M"]).expect("written");
    let writers = "Read-only block node 'a' cannot support read-write users";
    empty.says_no("blockdev-reopen", options(json!({ "read-only": true })), writers);
    for (more, said) in [
        (json!({ "driver": "raw" }), "Cannot change the option 'driver'"),
        (json!({ "backing": "a" }), "Making 'a' a backing child of 'a' would create a cycle"),
        (json!({ "node-name": "b" }), "Failed to find node with node-name='b'"),
        (json!({ "node-name": "a-file" }), "Cannot change the option 'driver'"),
    ] {
        empty.says_no("blockdev-reopen", options(more), said);
    }
    empty.says_no("blockdev-reopen", json!({ "options": [] }), "one node at a time");
    // A file with a name is what is said of it for the next that is opened in it.
    let of_file = |more: Value| {
        let mut one =
            json!({ "driver": "file", "node-name": "a-file", "filename": empty.text("a") });
        for (key, value) in more.as_object().expect("an object") {
            one[key] = value.clone();
        }
        json!({ "options": [one] })
    };
    let [is_read, is_other] =
        [json!({ "read-only": true }), json!({ "filename": "/x" })].map(of_file);
    let is_written = of_file(json!({}));
    let why = "Read-only block node 'a-file' cannot support read-write users: 'a' lies in it";
    empty.says_no("blockdev-reopen", is_read.clone(), why);
    empty.says_no("blockdev-reopen", is_other, "Cannot change the option 'filename'");
    empty.control.ok("blockdev-reopen", is_written);
    empty.control.ok("block-export-del", json!({ "id": "e" }));
    let only_read = json!({ "id": "r", "node-name": "a", "type": "nbd", "name": "r" });
    empty.control.ok("block-export-add", only_read);
    empty.control.ok("blockdev-reopen", options(json!({ "backing": null })));
    empty.control.ok("blockdev-reopen", options(json!({ "read-only": true })));
    empty.control.ok("block-export-del", json!({ "id": "r" }));
    empty.control.ok("blockdev-reopen", is_read);
    let image = empty.text("a");
    let said = ok("qemu-io", "qemu-utils", &["-r", "-f", "qcow2", "-c", "read -P 1 0 1M", &image]);
    assert!(!said.contains("failed"), "{said}");
}

#[test]
fn images_are_made_by_jobs() {
    let mut empty = Empty::new();
    let path = empty.text("image");
    let file = json!({ "driver": "file", "filename": path });
    empty.create(json!({ "driver": "file", "filename": path, "size": 0 }));
    for (options, format, said) in [
        (
            json!({ "driver": "qcow2", "version": "v2", "cluster-size": 4096 }),
            "qcow2",
            "\"compat\": \"0.10\"",
        ),
        (
            json!({ "driver": "qcow2", "extended-l2": true, "preallocation": "metadata" }),
            "qcow2",
            "\"extended-l2\": true",
        ),
        (
            json!({ "driver": "vpc", "subformat": "dynamic", "force-size": true }),
            "vpc",
            "\"virtual-size\": 8388608",
        ),
    ] {
        let mut options = options;
        (options["file"], options["size"]) = (file.clone(), json!(8 << 20));
        empty.create(options);
        let info = ok("qemu-img", "qemu-utils", &["info", "-f", format, "--output", "json", &path]);
        assert!(info.contains(said), "{info}");
    }
    let secret = empty.path("secret");
    fs::write(&secret, "abc").expect("written");
    let object = json!({ "qom-type": "secret", "id": "s", "file": secret });
    empty.control.ok("object-add", object);
    let luks = json!({ "driver": "luks", "file": file, "size": 8 << 20, "key-secret": "s" });
    empty.create(luks);
    let open = json!({ "driver": "luks", "node-name": "l", "file": file, "key-secret": "s" });
    empty.control.ok("blockdev-add", open);
    // What is used is not made anew.
    let again = json!({ "driver": "qcow2", "file": file, "size": 8 << 20 });
    let again = json!({ "job-id": "x", "options": again });
    empty.says_no("blockdev-create", again, "it is the image of the node 'l'");
    let missing = json!({ "driver": "file", "filename": "/nowhere/x", "size": 1 });
    empty.control.ok("blockdev-create", json!({ "job-id": "x", "options": missing }));
    let error = empty.ended("x").to_string();
    assert!(error.contains("Could not create '/nowhere/x'"), "{error}");
    for (options, said) in [
        (json!({ "driver": "raw", "size": 1 }), "does not accept value 'raw'"),
        (json!({ "driver": "qcow2", "file": "x", "size": 1 }), "node-name='x'"),
        (
            json!({ "driver": "qcow2", "file": file, "size": 1, "backing-fmt": "raw" }),
            "without backing file",
        ),
        (
            json!({ "driver": "luks", "file": file, "size": 1, "key-secret": "x" }),
            "No secret with id 'x'",
        ),
    ] {
        empty.says_no("blockdev-create", json!({ "job-id": "x", "options": options }), said);
    }
    empty.says_no(
        "blockdev-create",
        json!({ "job-id": "", "options": { "driver": "file", "filename": "/x", "size": 1 } }),
        "Invalid job ID",
    );
}

/// However many images a disk was opened with.
#[test]
fn a_commit_leaves_what_lies_below_its_base() {
    let mut empty = Empty::new();
    let uri = empty.nbd();
    let path = empty.path("a");
    ok("qemu-img", "qemu-utils", &["create", "-q", "-f", "qcow2", &empty.text("a"), "4M"]);
    let mut open = node("a", "qcow2", &path);
    open["backing"] = Value::Null;
    empty.control.ok("blockdev-add", open);
    empty.export("e", "a", "nbd", json!({}));
    qemu_io(&uri("a"), &["write -P 1 0 4M"]).expect("written");
    for overlay in ["c", "e"] {
        let taken =
            json!({ "node-name": "a", "snapshot-file": empty.text(overlay), "format": "qcow2" });
        empty.control.ok("blockdev-snapshot-sync", taken);
        qemu_io(&uri("a"), &["write -P 2 1M 4k"]).expect("written");
    }
    let job =
        json!({ "job-id": "j", "device": "a", "base": empty.text("c"), "auto-dismiss": false });
    empty.control.ok("block-commit", job);
    until(&mut empty.control, "BLOCK_JOB_READY", |_| true);
    qemu_io(&uri("a"), &["write -P 3 2M 4k"]).expect("written");
    empty.control.ok("job-complete", json!({ "id": "j" }));
    assert_eq!(empty.ended("j"), Value::Null);
    let reads = [
        "read -P 1 0 1M",
        "read -P 2 1M 4k",
        "read -P 1 1028k 1020k",
        "read -P 3 2M 4k",
        "read -P 1 2052k 2044k",
    ];
    qemu_io(&uri("a"), &reads).expect("all of it");
}
