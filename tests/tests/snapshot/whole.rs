//! Checkpoints of several disks, changed together or not at all.

use std::fs;
use std::io::Write;

use ringtap_tests::{Server, file_system_of};
use serde_json::json;

use crate::bench::{Bench, MIB};
use crate::checkpoints::{action, bitmap_of, count_of};

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
