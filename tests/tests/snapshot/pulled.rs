//! Moments that clients read while guests write on.

use std::thread;
use std::time::Duration;

use ringtap_tests::{Control, is_well, ok};
use serde_json::{Value, json};

use crate::bench::Bench;
use crate::checkpoints::{action, bitmap_of};
use crate::jobs::{hear, load};
use crate::moment::{is_pulled, is_read, now, served, uri};

/// A moment of the disk with what has changed since `old`, and a checkpoint of it.
fn begin(control: &mut Control, more: Value) {
    let mut backup = json!({ "device": "a", "target": "copy", "sync": "none", "job-id": "j" });
    // A machine that is busy with other tests is no reason to give the moment up.
    backup["__ringtap_guest-timeout"] = 60_000.into();
    if let (Some(backup), Value::Object(more)) = (backup.as_object_mut(), more) {
        backup.extend(more);
    }
    let actions = [
        action("block-dirty-bitmap-add", json!({ "node": "a", "name": "part", "disabled": true })),
        action(
            "block-dirty-bitmap-merge",
            json!({ "node": "a", "target": "part", "bitmaps": ["old"] }),
        ),
        action("block-dirty-bitmap-add", json!({ "node": "a", "name": "new", "persistent": true })),
        action("blockdev-backup", backup),
    ];
    control.ok("transaction", json!({ "actions": actions }));
    let export = json!({ "id": "e", "type": "nbd", "node-name": "copy", "name": "pull", "bitmaps": ["part"] });
    control.ok("block-export-add", export);
}

#[test]
fn a_client_reads_a_moment_and_what_has_changed_before_it() {
    for format in ["raw", "qcow2"] {
        let bench = Bench::new();
        let (server, mut control) = served(&bench, format);
        let then = now(&bench);
        begin(&mut control, json!({}));
        let uri = uri(&bench, "pull");
        // The guest goes on, over what is read and before it.
        bench.io("a", &["write -P 7 0 2M", "write -z 32M 64k", "write -P 8 60M 1M"]);
        let guest = load(&bench, "3");
        let map = ok("nbdinfo", "libnbd-bin", &["--json", "--map=qemu:dirty-bitmap:part", &uri]);
        let map: Value = serde_json::from_str(&map).expect("JSON");
        let all = map.as_array().expect("extents");
        let dirty = all.iter().filter(|one| one["type"] == 1);
        let dirty: Vec<_> =
            dirty.map(|one| (one["offset"].as_u64(), one["length"].as_u64())).collect();
        let wanted = [(1 << 20, 64 << 10), (32 << 20, 128 << 10)];
        assert_eq!(dirty, wanted.map(|(offset, len)| (Some(offset), Some(len))), "{map}");
        is_pulled(&bench, &uri, &then);
        is_well(guest);
        let refused = control.call(
            "block-export-add",
            json!({ "id": "w", "type": "nbd", "node-name": "copy", "name": "w", "writable": true }),
        );
        assert!(
            refused.is_err_and(|error| error.contains("read-only")),
            "nobody writes to a moment"
        );
        control.ok("block-export-del", json!({ "id": "e" }));
        control.ok("block-job-cancel", json!({ "device": "j" }));
        hear(&mut control, "BLOCK_JOB_CANCELLED");
        control.ok("blockdev-del", json!({ "node-name": "copy" }));
        server.stop();
    }
}

#[test]
fn a_scratch_that_is_used_up_breaks_the_moment_and_not_the_guest() {
    let bench = Bench::new();
    let (server, mut control) = served(&bench, "raw");
    begin(&mut control, json!({ "__ringtap_scratch-limit": 1 << 20 }));
    let uri = uri(&bench, "pull");
    assert!(is_read(&uri));
    bench.io("a", &["write -P 4 0 512k"]);
    assert!(is_read(&uri));
    bench.io("a", &["write -P 5 4M 4M", "read -P 5 4M 4M", "read -P 4 0 512k"]);
    let told = hear(&mut control, "BLOCK_JOB_COMPLETED");
    assert!(told["error"].as_str().is_some_and(|why| why.contains("was to be saved")), "{told}");
    assert!(!is_read(&uri), "it is not to be believed any more");
    let late = json!({ "id": "late", "type": "nbd", "node-name": "copy", "name": "late" });
    let why = control.call("block-export-add", late).expect_err("it lacks a part of the moment");
    assert!(why.contains("has broken"), "{why}");
    control.ok("block-export-del", json!({ "id": "e", "mode": "hard" }));
    control.ok("blockdev-del", json!({ "node-name": "copy" }));
    server.stop();
    let size = std::fs::metadata(bench.text("copy")).expect("a file").len();
    assert!(size < 4 << 20, "{size}");
}

/// `bitmap-mode: always` takes from the bitmap what was saved, and no more.
#[test]
fn a_backup_that_is_cancelled_leaves_marked_what_it_has_not_saved() {
    let bench = Bench::new();
    let (server, mut control) = served(&bench, "raw");
    bench.io("a", &["write -P 5 0 16M"]);
    let backup = |control: &mut Control, speed: u64| {
        let arguments = json!({
            "device": "a", "target": "copy", "sync": "bitmap", "bitmap": "old", "bitmap-mode": "always",
            "job-id": "j", "speed": speed,
        });
        control.ok("blockdev-backup", arguments);
    };
    let marked = |control: &mut Control| bitmap_of(control, "a", "old")["count"].as_u64();
    let all = marked(&mut control);
    assert_eq!(all, Some((16 << 20) + (128 << 10)));
    backup(&mut control, 2 << 20);
    loop {
        let jobs = control.ok("query-jobs", json!({}));
        if jobs[0]["current-progress"].as_u64() >= Some(2 << 20) {
            break;
        }
        thread::sleep(Duration::from_millis(10));
    }
    control.ok("block-job-cancel", json!({ "device": "j" }));
    hear(&mut control, "BLOCK_JOB_CANCELLED");
    let left = marked(&mut control);
    assert!(left > Some(0) && left < all, "{left:?} of {all:?}");
    backup(&mut control, 0);
    let told = hear(&mut control, "BLOCK_JOB_COMPLETED");
    assert!(told.get("error").is_none(), "{told}");
    assert_eq!(marked(&mut control), Some(0));
    control.ok("blockdev-del", json!({ "node-name": "copy" }));
    bench.holds("copy", "qcow2", &["read -P 5 0 16M", "read -P 3 32M 128k"]);
    server.stop();
}
