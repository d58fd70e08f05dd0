//! Moments that clients read while guests write on.

use ringtap_tests::{Control, is_well, ok};
use serde_json::{Value, json};

use crate::bench::Bench;
use crate::checkpoints::action;
use crate::jobs::{hear, load};
use crate::moment::{is_pulled, is_read, now, served, uri};

/// A moment of the disk with what has changed since `old`, and a checkpoint of it.
fn begin(control: &mut Control, more: Value) {
    let mut backup = json!({ "device": "a", "target": "copy", "sync": "none", "job-id": "j" });
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
    control.ok("block-export-del", json!({ "id": "e", "mode": "hard" }));
    control.ok("blockdev-del", json!({ "node-name": "copy" }));
    server.stop();
    let size = std::fs::metadata(bench.text("copy")).expect("a file").len();
    assert!(size < 4 << 20, "{size}");
}
