//! Streams, under load and with the server killed; and jobs whose end waits for a word.

use std::fs;
use std::thread;
use std::time::Duration;

use ringtap_tests::{Control, is_well, ok};
use serde_json::{Value, json};

use crate::bench::{Bench, MIB, snapshot};
use crate::jobs::{goes_on, hear, load, make, none_left};

fn stream(control: &mut Control, arguments: Value) {
    control.ok("block-stream", arguments);
    let told = hear(control, "BLOCK_JOB_COMPLETED");
    assert!(told.get("error").is_none(), "{told}");
}

/// What lies directly below an image, by its own word.
pub fn backing(bench: &Bench, image: &str) -> Value {
    let path = bench.text(image);
    let said = ok("qemu-img", "qemu-utils", &["info", "--output", "json", "-U", &path]);
    let said: Value = serde_json::from_str(&said).expect("JSON");
    said["backing-filename"].clone()
}

#[test]
fn a_disk_needs_nothing_below_once_that_was_brought_up_while_its_guest_writes() {
    for (format, more) in
        [("raw", &[][..]), ("qcow2", &["-o", "cluster_size=4k"]), ("qcow2", &[]), ("vpc", &[])]
    {
        let bench = Bench::new();
        make(&bench, "a.img", format, more);
        let server = bench.serve(&["a.img"], &["-f", format]);
        bench.io("a", &["write -P 1 0 1M", "write -P 2 8M 64k", "flush"]);
        let mut control = bench.control();
        for name in ["one.qcow2", "two.qcow2"] {
            snapshot(&mut control, "a", &bench.text(name));
            bench.io("a", &["write -P 3 64k 8k", "write -z 512k 64k"]);
        }
        let guest = load(&bench, "3");
        thread::sleep(Duration::from_millis(300));
        stream(&mut control, json!({ "device": "a", "job-id": "j" }));
        let node = control.ok("query-named-block-nodes", json!({}));
        assert_eq!(node[0]["file"], bench.text("two.qcow2"), "{node}");
        assert_eq!(node[0]["backing_file_depth"], 0, "{node}");
        is_well(guest);
        assert_eq!(control.ok("query-jobs", json!({})), json!([]));
        bench.io("a", &["write -P 4 60M 4k", "read -P 4 60M 4k"]);
        let (uri, copy) = (bench.uri("a"), bench.text("copy"));
        ok("qemu-img", "qemu-utils", &["convert", "-f", "raw", "-O", "raw", &uri, &copy]);
        server.stop();
        assert_eq!(backing(&bench, "two.qcow2"), Value::Null);
        // The image in the middle can go; by the name of the first the disk is found all the same.
        fs::remove_file(bench.path("one.qcow2")).expect("removed");
        let served = bench.serve_as("a", "a.img", &[]);
        bench.io("a", &["read -P 4 60M 4k"]);
        assert!(served.stop().contains("goes on in"));
        fs::remove_file(bench.path("a.img")).expect("removed");
        let two = bench.text("two.qcow2");
        ok("qemu-img", "qemu-utils", &["check", "-q", &two]);
        ok("qemu-img", "qemu-utils", &["compare", "-f", "raw", "-F", "qcow2", &copy, &two]);
    }
}

#[test]
fn what_lies_below_an_image_may_stay_there() {
    let bench = Bench::new();
    bench.raw("a.img", 16 * MIB);
    let server = bench.serve(&["a.img"], &["-f", "raw"]);
    let mut control = bench.control();
    bench.io("a", &["write -P 1 0 4M"]);
    for (at, name) in ["one.qcow2", "two.qcow2", "three.qcow2"].iter().enumerate() {
        snapshot(&mut control, "a", &bench.text(name));
        let writes = [format!("write -P {} {at}M 512k", at + 2), format!("write -z {at}600k 64k")];
        bench.io("a", &writes.each_ref().map(String::as_str));
    }
    let call = |control: &mut Control, arguments| {
        control.call("block-stream", arguments).expect_err("it cannot be")
    };
    for (more, said) in [
        (json!({ "base": "/nowhere" }), "Can't find '/nowhere' in the backing chain"),
        (json!({ "base": "x", "base-node": "y" }), "at the same time"),
        (json!({ "base-node": "y" }), "Cannot find device='' nor node-name='y'"),
        (json!({ "base-node": "a" }), "Node 'a' is not a backing image of 'a'"),
        (json!({ "backing-file": "one.qcow2" }), "streaming the entire chain"),
        (
            json!({ "base": bench.text("one.qcow2"), "backing-file": "two.qcow2" }),
            "does not lead to",
        ),
    ] {
        let mut arguments = json!({ "device": "a" });
        for (key, value) in more.as_object().expect("an object") {
            arguments[key] = value.clone();
        }
        let refused = call(&mut control, arguments);
        assert!(refused.contains(said), "{refused}");
    }
    let found = [
        "read -P 2 0 512k",
        "read -P 1 512k 88k",
        "read -P 0 600k 64k",
        "read -P 3 1M 512k",
        "read -P 1 1536k 64k",
        "read -P 0 1600k 64k",
        "read -P 4 2M 512k",
        "read -P 0 2600k 64k",
        "read -P 1 3M 1M",
        "read -P 0 4M 12M",
    ];
    bench.io("a", &found);
    let base = bench.text("one.qcow2");
    stream(
        &mut control,
        json!({ "device": "a", "base": base, "backing-file": "one.qcow2", "job-id": "j" }),
    );
    bench.io("a", &found);
    let node = control.ok("query-named-block-nodes", json!({}));
    assert_eq!(node[0]["image"]["backing-image"]["filename"], base, "{node}");
    assert_eq!(node[0]["backing_file_depth"], 2, "{node}");
    server.kill();
    assert_eq!(backing(&bench, "three.qcow2"), "one.qcow2");
    fs::remove_file(bench.path("two.qcow2")).expect("removed");
    let server = bench.serve(&["a.img"], &["-f", "raw"]);
    bench.io("a", &found);
    server.stop();
    ok("qemu-img", "qemu-utils", &["check", "-q", &bench.text("three.qcow2")]);
    bench.holds("three.qcow2", "qcow2", &found);
}

/// A disk is brought here from elsewhere while its guest uses it.
#[test]
fn what_lies_below_may_be_on_another_server() {
    let bench = Bench::new();
    bench.raw("b.raw", 64 * MIB);
    let elsewhere = bench.serve_as("b", "b.raw", &["-f", "raw"]);
    bench.io("b", &["write -P 1 0 8M"]);
    let (uri, top) = (bench.uri("b"), bench.text("a.qcow2"));
    let make = ["create", "-q", "-u", "-f", "qcow2", "-F", "raw", "-b", &uri, &top, "64M"];
    ok("qemu-img", "qemu-utils", &make);
    let server = bench.serve(&["a.qcow2"], &["-f", "qcow2", "--backing", &uri]);
    let guest = load(&bench, "2");
    stream(&mut bench.control(), json!({ "device": "a", "job-id": "j" }));
    is_well(guest);
    elsewhere.stop();
    let copy = bench.text("copy");
    let from = bench.uri("a");
    ok("qemu-img", "qemu-utils", &["convert", "-f", "raw", "-O", "raw", &from, &copy]);
    server.stop();
    assert_eq!(backing(&bench, "a.qcow2"), Value::Null);
    ok("qemu-img", "qemu-utils", &["compare", "-f", "raw", "-F", "qcow2", &copy, &top]);
}

#[test]
fn a_stream_that_is_cancelled_or_killed_leaves_the_disk_as_it_was() {
    for format in ["raw", "qcow2", "vpc"] {
        let bench = Bench::new();
        make(&bench, "a.img", format, &[]);
        let server = bench.serve(&["a.img"], &["-f", format]);
        bench.io("a", &["write -P 1 0 24M"]);
        let mut control = bench.control();
        snapshot(&mut control, "a", &bench.text("one.qcow2"));
        bench.io("a", &["write -P 2 4M 8M", "write -P 3 32M 8M"]);
        let found = ["read -P 1 0 4M", "read -P 2 4M 8M", "read -P 1 12M 12M", "read -P 3 32M 8M"];
        let slowly = json!({ "device": "a", "job-id": "j", "speed": 1 << 20 });
        control.ok("block-stream", slowly.clone());
        thread::sleep(Duration::from_millis(600));
        control.ok("block-job-pause", json!({ "device": "j" }));
        assert_eq!(control.ok("query-jobs", json!({}))[0]["status"], "paused");
        let again = control.call("block-commit", json!({ "device": "a", "job-id": "k" }));
        assert!(again.expect_err("busy").contains("busy"));
        control.ok("block-job-resume", json!({ "device": "j" }));
        control.ok("block-job-cancel", json!({ "device": "j" }));
        hear(&mut control, "BLOCK_JOB_CANCELLED");
        bench.io("a", &found);
        let mut server = server;
        let mut written = vec![];
        for at in 0..5u64 {
            let mut control = bench.control();
            // One that had hardly begun was not written down yet.
            if control.ok("query-jobs", json!({})) == json!([]) {
                control.ok("block-stream", slowly.clone());
            }
            // What is written where the job is at work, or has been, or will be.
            let (value, place) = (10 + at, 62 + at % 2);
            let place = [format!("{place}M 64k"), format!("{}M 4k", 1 + at)];
            let write: Vec<String> =
                place.iter().map(|place| format!("write -P {value} {place}")).collect();
            bench.io("a", &write.iter().map(String::as_str).collect::<Vec<_>>());
            written.retain(|(old, _): &(String, u64)| !place.contains(old));
            written.extend(place.map(|place| (place, value)));
            thread::sleep(Duration::from_millis(137 * at % 800));
            server.kill();
            server = bench.serve(&["a.img"], &["-f", format]);
            let read: Vec<String> =
                written.iter().map(|(place, value)| format!("read -P {value} {place}")).collect();
            bench.io("a", &read.iter().map(String::as_str).collect::<Vec<_>>());
            bench.io("a", &["read -P 1 0 1M", "read -P 2 7M 5M", "read -P 1 12M 12M"]);
        }
        // Killed right after its end, the disk is found.
        let mut control = bench.control();
        goes_on(&mut control, "stream");
        none_left(&mut control);
        bench.io("a", &["write -P 5 63M 64k"]);
        server.kill();
        assert_eq!(backing(&bench, "one.qcow2"), Value::Null);
        let server = bench.serve(&["a.img"], &["-f", format]);
        let found = ["read -P 5 63M 64k", "read -P 2 7M 5M", "read -P 1 12M 12M"];
        bench.io("a", &found);
        server.stop();
        ok("qemu-img", "qemu-utils", &["check", "-q", &bench.text("one.qcow2")]);
        bench.holds("one.qcow2", "qcow2", &found);
    }
}

#[test]
fn the_end_of_a_job_waits_for_a_word_where_it_is_to() {
    let bench = Bench::new();
    bench.raw("a.img", 16 * MIB);
    bench.raw("copy.raw", 16 * MIB);
    let server = bench.serve(&["a.img"], &["-f", "raw"]);
    bench.io("a", &["write -P 1 0 4M"]);
    let mut control = bench.control();
    let file = json!({ "driver": "file", "filename": bench.text("copy.raw") });
    control.ok("blockdev-add", json!({ "driver": "raw", "node-name": "copy", "file": file }));
    let how = |more: Value| {
        let mut all =
            json!({ "device": "a", "job-id": "j", "auto-finalize": false, "auto-dismiss": false });
        for (key, value) in more.as_object().expect("an object") {
            all[key] = value.clone();
        }
        all
    };
    let begin = |control: &mut Control, command: &str, more: Value, ready: bool| {
        control.ok(command, how(more));
        if ready {
            hear(control, "BLOCK_JOB_READY");
            let early = control.call("job-finalize", json!({ "id": "j" }));
            let said = "Job 'j' in state 'ready' cannot accept command verb 'finalize'";
            assert!(early.expect_err("too early").contains(said));
            control.ok("job-complete", json!({ "id": "j" }));
        }
        assert_eq!(hear(control, "BLOCK_JOB_PENDING")["id"], "j");
        let jobs = control.ok("query-block-jobs", json!({}));
        assert_eq!(
            (&jobs[0]["status"], &jobs[0]["auto-finalize"]),
            (&json!("pending"), &json!(false))
        );
        let paused = control.call("job-pause", json!({ "id": "j" }));
        assert!(paused.expect_err("it has ended but for the end").contains("'pause'"));
    };
    let end = |control: &mut Control| {
        control.ok("job-finalize", json!({ "id": "j" }));
        let told = hear(control, "BLOCK_JOB_COMPLETED");
        assert!(told.get("error").is_none(), "{told}");
        assert_eq!(control.ok("query-jobs", json!({}))[0]["status"], "concluded");
        control.ok("job-dismiss", json!({ "id": "j" }));
        assert_eq!(control.ok("query-jobs", json!({})), json!([]));
    };
    let overlay = |control: &mut Control, name: &str| {
        let node = json!({ "node-name": "a", "snapshot-file": bench.text(name) });
        control.ok("blockdev-snapshot-sync", node);
        hear(control, "__ringtap_SNAPSHOT");
    };
    // A backup: the copy is of the beginning.
    begin(&mut control, "blockdev-backup", json!({ "target": "copy", "sync": "full" }), false);
    bench.io("a", &["write -P 2 0 1M"]);
    end(&mut control);
    // A stream: nothing is named otherwise before, and one that is cancelled then names what it did.
    overlay(&mut control, "one.qcow2");
    begin(&mut control, "block-stream", json!({}), false);
    assert_eq!(backing(&bench, "one.qcow2"), bench.text("a.img"));
    control.ok("job-cancel", json!({ "id": "j" }));
    hear(&mut control, "BLOCK_JOB_CANCELLED");
    control.ok("job-dismiss", json!({ "id": "j" }));
    assert_eq!(backing(&bench, "one.qcow2"), bench.text("a.img"));
    begin(&mut control, "block-stream", json!({}), false);
    bench.io("a", &["write -P 3 1M 1M"]);
    end(&mut control);
    assert_eq!(backing(&bench, "one.qcow2"), Value::Null);
    // A commit follows until then what the guest writes.
    overlay(&mut control, "two.qcow2");
    begin(&mut control, "block-commit", json!({}), true);
    bench.io("a", &["write -P 4 2M 1M"]);
    let node = control.ok("query-named-block-nodes", json!({ "flat": true }));
    assert!(node.to_string().contains(&bench.text("two.qcow2")), "{node}");
    end(&mut control);
    let found = ["read -P 2 0 1M", "read -P 3 1M 1M", "read -P 4 2M 1M", "read -P 1 3M 1M"];
    bench.io("a", &found);
    // So does a mirror.
    begin(&mut control, "blockdev-mirror", json!({ "target": "copy", "sync": "full" }), true);
    bench.io("a", &["write -P 5 5M 1M"]);
    end(&mut control);
    bench.io("a", &found);
    bench.io("a", &["read -P 5 5M 1M"]);
    server.stop();
    bench.holds("copy.raw", "raw", &found);
    bench.holds("copy.raw", "raw", &["read -P 5 5M 1M"]);
}
