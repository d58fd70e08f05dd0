//! Checkpoints of several disks: changed together or not at all, and taken along wherever the server is killed.

use std::fs;
use std::io::Write;
use std::thread;
use std::time::Instant;

use ringtap_tests::{Server, file_system_of};
use serde_json::{Value, json};

use crate::bench::{Bench, MIB};
use crate::checkpoints::{action, bitmap_of, count_of};
use crate::jobs::{hear, make};

const KIB: u64 = 1 << 10;

/// Where the bitmaps of one disk find no room, those of the other are as they were: in memory, and for the next server.
#[test]
fn a_transaction_that_fails_for_one_disk_changes_no_other() {
    let bench = Bench::new();
    bench.raw("a.img", 64 * MIB);
    bench.raw("b.img", 1024 * MIB);
    let small = file_system_of(4, "tmpfs", &[], "mount");
    let state = small.folder().join("state");
    let serve = || Server::start_in(&state, bench.args(&["a.img", "b.img"], &["-f", "raw"]));
    let server = serve();
    let mut control = bench.control();
    for (node, granularity) in [("a", 65536), ("b", 512)] {
        let add = json!({ "node": node, "name": "since", "persistent": true, "granularity": granularity });
        control.ok("block-dirty-bitmap-add", add);
    }
    bench.io("a", &["write -P 1 1M 64k"]);
    // Its bits take 256 KiB.
    bench.io("b", &["discard 0 1G"]);
    let filler = small.folder().join("filler");
    let mut file = fs::File::create(&filler).expect("a file");
    while file.write_all(&[1; 4096]).is_ok() {}
    let len = file.metadata().expect("its length").len();
    file.set_len(len - 64 * KIB).expect("shorter");
    let of = |node: &str| json!({ "node": node, "name": "since" });
    let actions = [
        action("block-dirty-bitmap-clear", of("a")),
        action("block-dirty-bitmap-disable", of("b")),
    ];
    let why = control.call("transaction", json!({ "actions": actions })).expect_err("no room");
    assert!(why.contains("cannot be made stable"), "{why}");
    assert_eq!(count_of(&mut control, "a"), 64 * KIB);
    assert_eq!(count_of(&mut control, "b"), 1024 * MIB);
    drop(file);
    fs::remove_file(&filler).expect("removed");
    server.kill();
    let server = serve();
    let mut control = bench.control();
    assert_eq!(count_of(&mut control, "a"), 64 * KIB, "after a kill");
    assert_eq!(count_of(&mut control, "b"), 1024 * MIB, "after a kill");
    // With room both are.
    control.ok("transaction", json!({ "actions": actions }));
    assert_eq!(count_of(&mut control, "a"), 0);
    assert_eq!(bitmap_of(&mut control, "b", "since")["recording"], json!(false));
    server.stop();
}

/// Killed at many points from before the first overlay is made until the last image below is closed.
#[test]
fn disks_keep_their_checkpoints_wherever_a_snapshot_of_all_is_killed() {
    let bench = Bench::new();
    let disks = ["a", "b", "c"];
    let images = disks.map(|disk| format!("{disk}.img"));
    images.iter().for_each(|image| make(&bench, image, "raw", &[]));
    let serve = || bench.serve(&images.each_ref().map(|image| &**image), &["-f", "raw"]);
    let mut server = serve();
    let mut control = bench.control();
    for disk in disks {
        let add = json!({ "node": disk, "name": "since", "persistent": true });
        control.ok("block-dirty-bitmap-add", add);
    }
    let actions = |round: u32| {
        let one = |disk: &str| {
            let file = bench.text(&format!("{disk}{round}.qcow2"));
            action("blockdev-snapshot-sync", json!({ "node-name": disk, "snapshot-file": file }))
        };
        json!({ "actions": disks.map(one) })
    };
    let began = Instant::now();
    control.ok("transaction", actions(0));
    let takes = began.elapsed();
    const ROUNDS: u32 = 24;
    for round in 1..=ROUNDS {
        let write = format!("write -P {round} {round}M 64k");
        disks.iter().for_each(|disk| bench.io(disk, &[&write]));
        let take = json!({ "execute": "transaction", "arguments": actions(round) });
        control.send(take.to_string());
        thread::sleep(takes * round / (ROUNDS - 4));
        server.kill();
        server = serve();
        control = bench.control();
        for disk in disks {
            let found = bitmap_of(&mut control, disk, "since");
            assert_eq!(
                found["count"],
                json!(u64::from(round) * 64 * KIB),
                "{round}: {disk}: {found}"
            );
        }
    }
    server.stop();
}

/// The sidecar of an image that has been written to from above is of no state that there is.
#[test]
fn a_commit_leaves_no_checkpoint_of_the_image_below_as_it_was() {
    let bench = Bench::new();
    make(&bench, "a.img", "raw", &[]);
    let server = bench.serve(&["a.img"], &["-f", "raw"]);
    let add = json!({ "node": "a", "name": "since", "persistent": true });
    bench.control().ok("block-dirty-bitmap-add", add);
    let open = fs::read_dir(format!("/proc/{}/fd", server.pid())).expect("its files");
    let mut open = open.flatten().filter_map(|entry| fs::read_link(entry.path()).ok());
    let sidecar = open.find(|path| path.extension().is_some_and(|it| it == "bitmaps"));
    let sidecar = sidecar.expect("a sidecar");
    server.stop();
    let below = bench.text("a.img");
    make(&bench, "b.qcow2", "qcow2", &["-b", &below, "-F", "raw"]);
    let server = bench.serve(&["b.qcow2"], &["-f", "qcow2"]);
    let mut control = bench.control();
    assert_eq!(bitmap_of(&mut control, "b", "since"), Value::Null, "it is not that image");
    assert!(sidecar.exists(), "nor is it another's to remove");
    bench.io("b", &["write -P 1 1M 64k"]);
    control.ok("block-commit", json!({ "device": "b", "job-id": "j" }));
    hear(&mut control, "BLOCK_JOB_READY");
    assert!(!sidecar.exists(), "the image is written to");
    control.ok("block-job-complete", json!({ "device": "j" }));
    hear(&mut control, "BLOCK_JOB_COMPLETED");
    server.stop();
    // The same where images between are committed.
    let server = bench.serve(&["a.img"], &["-f", "raw"]);
    let mut control = bench.control();
    let add = json!({ "node": "a", "name": "since", "persistent": true });
    control.ok("block-dirty-bitmap-add", add);
    server.stop();
    assert!(sidecar.exists());
    for (name, upon, format) in [("c.qcow2", "a.img", "raw"), ("d.qcow2", "c.qcow2", "qcow2")] {
        make(&bench, name, "qcow2", &["-b", &bench.text(upon), "-F", format]);
        let server = bench.serve(&[name], &["-f", "qcow2"]);
        bench.io(&name[..1], &["write -P 1 2M 64k"]);
        server.stop();
    }
    let server = bench.serve(&["d.qcow2"], &["-f", "qcow2"]);
    let mut control = bench.control();
    let inner = json!({ "device": "d", "job-id": "j", "top": bench.text("c.qcow2") });
    control.ok("block-commit", inner);
    hear(&mut control, "BLOCK_JOB_COMPLETED");
    assert!(!sidecar.exists(), "the image is written to");
    server.stop();
}
