//! Commit and mirror, under load and with the server killed.

use std::thread;
use std::time::{Duration, Instant};

use ringtap_tests::{Control, SetUp, is_well, ok, ringtap};
use serde_json::{Value, json};

use crate::bench::{Bench, MIB, snapshot};

pub fn make(bench: &Bench, name: &str, format: &str, more: &[&str]) {
    let path = bench.text(name);
    let head = ["create", "-q", "-f", format];
    let args: Vec<&str> = head.iter().chain(more).copied().chain([&*path, "64M"]).collect();
    ok(ringtap().to_str().expect("plain"), "ringtap", &args);
}

/// Wait for an event; gives its data.
pub fn hear(control: &mut Control, wanted: &str) -> Value {
    loop {
        let (name, data) = control.event();
        if name == wanted {
            return data;
        }
    }
}

/// Have a job go to its end; gives what its last event says.
fn complete(control: &mut Control, id: &str) -> Value {
    hear(control, "BLOCK_JOB_READY");
    control.ok("block-job-complete", json!({ "device": id }));
    let told = hear(control, "BLOCK_JOB_COMPLETED");
    assert!(told.get("error").is_none(), "{told}");
    told
}

/// A job that a killed server has left goes on, as fast as it can from now on.
pub fn goes_on(control: &mut Control, kind: &str) {
    let jobs = control.ok("query-jobs", json!({}));
    assert_eq!((&jobs[0]["id"], &jobs[0]["type"]), (&json!("j"), &json!(kind)), "{jobs}");
    control.ok("block-job-set-speed", json!({ "device": "j", "speed": 0 }));
}

/// The one job that there is has begun.
pub fn runs(control: &mut Control) {
    let until = Instant::now() + ringtap_tests::patience();
    while control.ok("query-jobs", json!({}))[0]["status"] != "running" {
        assert!(Instant::now() < until, "the job does not begin");
        thread::sleep(Duration::from_millis(20));
    }
}

/// No job is left.
pub fn none_left(control: &mut Control) {
    let until = Instant::now() + ringtap_tests::patience();
    while control.ok("query-jobs", json!({})) != json!([]) {
        assert!(Instant::now() < until, "the job does not end");
        thread::sleep(Duration::from_millis(20));
    }
}

pub fn commit(control: &mut Control, arguments: Value) {
    control.ok("block-commit", arguments);
    complete(control, "j");
}

/// A guest on the disk `a`.
pub fn load(bench: &Bench, seconds: &'static str) -> thread::JoinHandle<Value> {
    ringtap_tests::load(bench.text("a"), seconds)
}

#[test]
fn a_disk_is_committed_into_what_lies_below_while_its_guest_writes() {
    for (format, more) in
        [("raw", &[][..]), ("qcow2", &[]), ("qcow2", &["-o", "cluster_size=4k"]), ("vpc", &[])]
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
        // Through both of them, to the deepest.
        commit(&mut control, json!({ "device": "a", "job-id": "j" }));
        let node = control.ok("query-named-block-nodes", json!({}));
        assert_eq!(node[0]["file"], bench.text("a.img"), "{node}");
        is_well(guest);
        assert_eq!(control.ok("query-jobs", json!({})), json!([]));
        bench.io("a", &["write -P 4 60M 4k", "read -P 4 60M 4k"]);
        server.stop();
        told_of_a_mixture(&bench);
        // By any of its names it is found where it is.
        for name in ["a.img", "two.qcow2", "one.qcow2"] {
            let served = bench.serve_as("a", name, &[]);
            bench.io("a", &["read -P 4 60M 4k"]);
            let said = served.stop();
            assert_eq!(said.contains("goes on in"), name != "a.img", "{name}: {said}");
        }
        if format == "qcow2" {
            ok("qemu-img", "qemu-utils", &["check", "-q", &bench.text("a.img")]);
        }
    }
}

/// An image that was committed and is read all the same shows what was written below it since.
fn told_of_a_mixture(bench: &Bench) {
    let (top, base, raw) = (bench.text("two.qcow2"), bench.text("a.img"), bench.text("raw"));
    let above = bench.text("above.qcow2");
    let create = ["create", "-q", "-f", "qcow2", "-b", &top, "-F", "qcow2", &above];
    ok(ringtap().to_str().expect("plain"), "ringtap", &create);
    for (words, told) in [
        (["convert", "-O", "raw", &above, &raw].as_slice(), true),
        (&["info", &above], true),
        (&["info", "--backing-chain", &above], true),
        (&["check", &above], true),
        (&["convert", "-O", "raw", &top, &raw], true),
        (&["map", &top], true),
        (&["info", &top], true),
        (&["info", "--backing-chain", &top], true),
        (&["check", &top], true),
        (&["convert", "-O", "raw", &base, &raw], false),
        (&["info", &base], false),
    ] {
        let end = ringtap_tests::program(ringtap().to_str().expect("plain"), "ringtap", words);
        let said = String::from_utf8_lossy(&end.stderr);
        assert!(end.status.success() || words[0] == "check", "{words:?}: {end:?}");
        let way = format!("read {base} instead");
        assert_eq!(said.matches(&way).count(), usize::from(told), "{words:?}: {said}");
        assert_eq!(said.lines().count(), usize::from(told), "{words:?}: {said}");
    }
}

/// What is not written above is read below, while that is rewritten around it.
#[test]
fn compressed_clusters_below_are_read_until_the_end() {
    let bench = Bench::new();
    let (plain, packed) = (bench.text("plain"), bench.text("a.img"));
    bench.raw("plain", 64 * MIB);
    let mut bytes = vec![0u8; 64 << 20];
    // Clusters that become half as large: few of them share one of the file's.
    let mut word = 1u64;
    for piece in bytes.chunks_mut(16) {
        word = word.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        piece[..8].copy_from_slice(&word.to_le_bytes());
    }
    std::fs::write(&plain, &bytes).expect("written");
    let name = ringtap();
    let name = name.to_str().expect("plain");
    ok(name, "ringtap", &["convert", "-c", "-O", "qcow2", &plain, &packed]);
    let server = bench.serve(&["a.img"], &["-f", "qcow2"]);
    let mut control = bench.control();
    snapshot(&mut control, "a", &bench.text("one.qcow2"));
    // Part of each of many clusters.
    for cluster in 0..64u64 {
        bytes[(cluster << 16) as usize..][..4096].fill(0xee);
    }
    let writes: Vec<String> =
        (0..64).map(|at| format!("write -q -P 0xee {}k 4k", at * 64)).collect();
    for some in writes.chunks(64) {
        let some: Vec<&str> = some.iter().map(String::as_str).collect();
        bench.io("a", &some);
    }
    control.ok("block-commit", json!({ "device": "a", "job-id": "j" }));
    hear(&mut control, "BLOCK_JOB_READY");
    std::fs::write(&plain, &bytes).expect("written");
    let same = || {
        let uri = bench.uri("a");
        ok("qemu-img", "qemu-utils", &["compare", "-f", "raw", "-F", "raw", &plain, &uri])
    };
    // Flushes let room that was freed be used again.
    for _ in 0..4 {
        bench.io("a", &["flush"]);
        same();
    }
    control.ok("block-job-complete", json!({ "device": "j" }));
    hear(&mut control, "BLOCK_JOB_COMPLETED");
    same();
    server.stop();
    ok("qemu-img", "qemu-utils", &["check", "-q", &packed]);
    ok("qemu-img", "qemu-utils", &["compare", "-f", "raw", "-F", "qcow2", &plain, &packed]);
}

#[test]
fn a_commit_that_is_cancelled_or_killed_leaves_the_disk_as_it_was() {
    for format in ["raw", "qcow2", "vpc"] {
        let bench = Bench::new();
        make(&bench, "a.img", format, &[]);
        let server = bench.serve(&["a.img"], &["-f", format]);
        bench.io("a", &["write -P 1 0 16M"]);
        let mut control = bench.control();
        snapshot(&mut control, "a", &bench.text("one.qcow2"));
        bench.io("a", &["write -P 2 4M 8M", "write -P 3 32M 8M"]);
        let found = ["read -P 1 0 4M", "read -P 2 4M 8M", "read -P 1 12M 4M", "read -P 3 32M 8M"];
        let slowly = json!({ "device": "a", "job-id": "j", "speed": 4 << 20 });
        control.ok("block-commit", slowly.clone());
        thread::sleep(Duration::from_millis(600));
        control.ok("block-job-pause", json!({ "device": "j" }));
        assert_eq!(control.ok("query-jobs", json!({}))[0]["status"], "paused");
        let again = control.call("block-commit", json!({ "device": "a", "job-id": "k" }));
        assert!(again.expect_err("busy").contains("busy"));
        let node = json!({ "node-name": "a", "snapshot-file": bench.text("x") });
        assert!(
            control
                .call("blockdev-snapshot-sync", node)
                .expect_err("busy")
                .contains("being changed")
        );
        control.ok("block-job-resume", json!({ "device": "j" }));
        control.ok("block-job-cancel", json!({ "device": "j" }));
        hear(&mut control, "BLOCK_JOB_CANCELLED");
        bench.io("a", &found);
        control.ok("block-commit", slowly);
        thread::sleep(Duration::from_millis(800));
        bench.io("a", &["write -P 5 63M 64k"]);
        server.kill();
        let server = bench.serve(&["a.img"], &["-f", format]);
        bench.io("a", &found);
        bench.io("a", &["read -P 5 63M 64k"]);
        let mut control = bench.control();
        goes_on(&mut control, "commit");
        let until = Instant::now() + ringtap_tests::patience();
        while control.ok("query-jobs", json!({}))[0]["status"] != "ready" {
            assert!(Instant::now() < until, "the commit does not get ready");
            thread::sleep(Duration::from_millis(20));
        }
        control.ok("job-complete", json!({ "id": "j" }));
        none_left(&mut control);
        bench.io("a", &found);
        server.stop();
        bench.holds("a.img", format, &found);
    }
}

#[test]
fn a_disk_moves_to_another_image_while_its_guest_writes() {
    let bench = Bench::new();
    bench.raw("a.img", 64 * MIB);
    make(&bench, "new.qcow2", "qcow2", &[]);
    let server = bench.serve(&["a.img"], &["-f", "raw"]);
    bench.io("a", &["write -P 1 0 1M"]);
    let mut control = bench.control();
    let add = json!({ "driver": "qcow2", "node-name": "new",
                      "file": { "driver": "file", "filename": bench.text("new.qcow2") } });
    control.ok("blockdev-add", add);
    let guest = load(&bench, "3");
    let mirror = json!({ "device": "a", "job-id": "j", "target": "new", "sync": "full", "target-is-zero": true });
    control.ok("blockdev-mirror", mirror);
    complete(&mut control, "j");
    is_well(guest);
    let nodes = control.ok("query-named-block-nodes", json!({}));
    assert_eq!(nodes.as_array().map(Vec::len), Some(1), "{nodes}");
    assert_eq!(nodes[0]["file"], bench.text("new.qcow2"), "{nodes}");
    bench.io("a", &["write -P 7 32M 4k"]);
    server.kill();
    let server = bench.serve(&["a.img"], &["-f", "raw"]);
    bench.io("a", &["read -P 7 32M 4k"]);
    assert!(server.stop().contains("new.qcow2"));
    ok("qemu-img", "qemu-utils", &["check", "-q", &bench.text("new.qcow2")]);
}

#[test]
fn a_mirror_may_end_as_a_copy() {
    let bench = Bench::new();
    bench.raw("a.img", 64 * MIB);
    bench.raw("copy.raw", 64 * MIB);
    let server = bench.serve(&["a.img"], &["-f", "raw"]);
    bench.io("a", &["write -P 1 0 8M"]);
    let mut control = bench.control();
    let file = json!({ "driver": "file", "filename": bench.text("copy.raw") });
    control.ok("blockdev-add", json!({ "driver": "raw", "node-name": "copy", "file": file }));
    let mirror = json!({ "device": "a", "job-id": "j", "target": "copy", "sync": "full" });
    control.ok("blockdev-mirror", mirror);
    hear(&mut control, "BLOCK_JOB_READY");
    bench.io("a", &["write -P 2 1M 1M"]);
    control.ok("block-job-cancel", json!({ "device": "j" }));
    hear(&mut control, "BLOCK_JOB_COMPLETED");
    control.ok("blockdev-del", json!({ "node-name": "copy" }));
    bench.holds("copy.raw", "raw", &["read -P 1 0 1M", "read -P 2 1M 1M", "read -P 1 2M 6M"]);
    server.stop();
    assert!(!bench.serve(&["a.img"], &["-f", "raw"]).stop().contains("goes on in"));
}

/// It has been ready, and its target is slower than who writes.
#[test]
fn a_mirror_that_catches_up_may_end_as_a_copy() {
    let bench = Bench::new();
    bench.raw("a.img", 64 * MIB);
    bench.raw("copy.raw", 64 * MIB);
    let server = bench.serve(&["a.img"], &["-f", "raw"]);
    let mut control = bench.control();
    let file = json!({ "driver": "file", "filename": bench.text("copy.raw") });
    control.ok("blockdev-add", json!({ "driver": "raw", "node-name": "copy", "file": file }));
    let mirror = json!({ "device": "a", "job-id": "j", "target": "copy", "sync": "full" });
    control.ok("blockdev-mirror", mirror);
    hear(&mut control, "BLOCK_JOB_READY");
    let slow = json!({ "node-name": "copy", "limits": { "bps-total": 8 << 20 } });
    control.ok("__ringtap_throttle", slow);
    bench.io("a", &["write -P 2 0 16M", "write -P 3 16M 16M", "write -P 4 8M 1M"]);
    let jobs = control.ok("query-jobs", json!({}));
    assert_eq!(jobs[0]["status"], "ready", "{jobs}");
    control.ok("block-job-cancel", json!({ "device": "j" }));
    let told = hear(&mut control, "BLOCK_JOB_COMPLETED");
    assert!(told.get("error").is_none(), "{told}");
    control.ok("blockdev-del", json!({ "node-name": "copy" }));
    server.stop();
    let (disk, copy) = (bench.text("a.img"), bench.text("copy.raw"));
    ok("qemu-img", "qemu-utils", &["compare", "-f", "raw", "-F", "raw", &disk, &copy]);
}

/// What a bitmap does not mark is left as the target has it: so it is seen that nothing else is copied.
#[test]
fn a_mirror_may_copy_what_has_changed_since_a_bitmap_and_nothing_else() {
    let bench = Bench::new();
    bench.raw("a.img", 64 * MIB);
    std::fs::write(bench.text("copy.raw"), vec![9; 64 << 20]).expect("a file");
    let server = bench.serve(&["a.img"], &["-f", "raw"]);
    let mut control = bench.control();
    bench.io("a", &["write -P 1 0 4M"]);
    let bitmap = |name: &str| json!({ "node": "a", "name": name, "granularity": 4096 });
    control.ok("block-dirty-bitmap-add", bitmap("since"));
    bench.io("a", &["write -P 2 1M 64k", "write -P 2 32M 4k"]);
    let file = json!({ "driver": "file", "filename": bench.text("copy.raw") });
    control.ok("blockdev-add", json!({ "driver": "raw", "node-name": "copy", "file": file }));
    let mirror = |sync: &str, more: Value| {
        let mut all = json!({ "device": "a", "job-id": "j", "target": "copy", "sync": sync });
        more.as_object().into_iter().flatten().for_each(|(key, of)| all[key] = of.clone());
        all
    };
    control.ok("block-dirty-bitmap-add", json!({ "node": "a", "name": "off", "disabled": true }));
    for (sync, more, said) in [
        ("bitmap", json!({ "bitmap": "since" }), "Sync mode 'bitmap' not supported"),
        ("incremental", json!({}), "must provide a valid bitmap name"),
        ("incremental", json!({ "bitmap": "nope" }), "Dirty bitmap 'nope' not found"),
        ("incremental", json!({ "bitmap": "off" }), "does not record"),
        ("full", json!({ "bitmap": "since" }), "'bitmap' is for"),
        ("nope", json!({}), "does not accept value 'nope'"),
    ] {
        let refused = control.call("blockdev-mirror", mirror(sync, more)).expect_err(said);
        assert!(refused.contains(said), "{refused}");
    }
    control.ok("blockdev-mirror", mirror("incremental", json!({ "bitmap": "since" })));
    // What becomes of the bitmap now is nothing to the job.
    control.ok("block-dirty-bitmap-clear", json!({ "node": "a", "name": "since" }));
    hear(&mut control, "BLOCK_JOB_READY");
    bench.io("a", &["write -P 3 48M 4k"]);
    control.ok("block-job-cancel", json!({ "device": "j" }));
    hear(&mut control, "BLOCK_JOB_COMPLETED");
    // And nothing but what changes from then on.
    control.ok("blockdev-mirror", mirror("none", json!({})));
    hear(&mut control, "BLOCK_JOB_READY");
    bench.io("a", &["write -P 4 56M 4k"]);
    control.ok("block-job-cancel", json!({ "device": "j" }));
    hear(&mut control, "BLOCK_JOB_COMPLETED");
    control.ok("blockdev-del", json!({ "node-name": "copy" }));
    let found = [
        "read -P 9 0 1M",
        "read -P 2 1M 64k",
        "read -P 9 2M 30M",
        "read -P 2 32M 4k",
        "read -P 3 48M 4k",
        "read -P 4 56M 4k",
        "read -P 9 57M 7M",
    ];
    bench.holds("copy.raw", "raw", &found);
    server.stop();
}

/// The disk goes on there, and what was written before and since is on the device.
#[test]
fn a_disk_moves_to_a_block_device() {
    let bench = Bench::new();
    make(&bench, "a.qcow2", "qcow2", &[]);
    bench.raw("device", 64 * MIB);
    let device = ok("losetup", "mount", &["-f", "--show", &bench.text("device")]);
    let device = device.trim().to_owned();
    let _set_up = SetUp::attached(tempfile::tempdir().expect("a folder"), device.clone());
    let server = bench.serve(&["a.qcow2"], &["-f", "qcow2"]);
    let mut control = bench.control();
    bench.io("a", &["write -P 1 0 1M"]);
    control.ok("block-dirty-bitmap-add", json!({ "node": "a", "name": "since" }));
    bench.io("a", &["write -P 2 8M 1M"]);
    let file = json!({ "driver": "host_device", "filename": device, "cache": { "direct": true } });
    control.ok("blockdev-add", json!({ "driver": "raw", "node-name": "new", "file": file }));
    let guest = load(&bench, "2");
    let mirror = json!({ "device": "a", "job-id": "j", "target": "new", "sync": "full" });
    control.ok("blockdev-mirror", mirror);
    complete(&mut control, "j");
    is_well(guest);
    let nodes = control.ok("query-named-block-nodes", json!({}));
    assert_eq!(nodes[0]["file"], *device, "{nodes}");
    bench.io("a", &["write -P 7 32M 4k"]);
    server.kill();
    // By its former name it is found there.
    let server = bench.serve(&["a.qcow2"], &["-f", "qcow2"]);
    bench.io("a", &["read -P 7 32M 4k"]);
    assert!(server.stop().contains(&device));
    let there = ok("qemu-io", "qemu-utils", &["-f", "raw", "-c", "read -P 7 32M 4k", &device]);
    assert!(!there.contains("failed"), "{there}");
}
