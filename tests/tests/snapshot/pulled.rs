//! Moments that clients read while guests write on.

use ringtap_tests::{Control, ok, program};
use serde_json::{Value, json};

use crate::bench::Bench;
use crate::checkpoints::{action, add_copy};
use crate::jobs::{hear, load, make};

/// A moment of the disk with what has changed since `old`, and a checkpoint of it.
fn begin(control: &mut Control, bench: &Bench, more: Value) {
    add_copy(control, bench, "qcow2");
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
    let data = json!({ "path": bench.text("pull") });
    control.ok("nbd-server-start", json!({ "addr": { "type": "unix", "data": data } }));
    let export = json!({ "id": "e", "type": "nbd", "node-name": "copy", "name": "pull", "bitmaps": ["part"] });
    control.ok("block-export-add", export);
}

fn served(bench: &Bench, format: &str) -> (ringtap_tests::Server, Control) {
    make(bench, "a.img", format, &[]);
    make(bench, "copy", "qcow2", &[]);
    let server = bench.serve(&["a.img"], &["-f", format]);
    let mut control = bench.control();
    bench.io("a", &["write -P 1 0 16M"]);
    let old = json!({ "node": "a", "name": "old", "persistent": true });
    control.ok("block-dirty-bitmap-add", old);
    bench.io("a", &["write -P 2 1M 64k", "write -P 3 32M 128k"]);
    (server, control)
}

#[test]
fn a_client_reads_a_moment_and_what_has_changed_before_it() {
    for format in ["raw", "qcow2"] {
        let bench = Bench::new();
        let (server, mut control) = served(&bench, format);
        let then = bench.text("then.raw");
        ok(
            "qemu-img",
            "qemu-utils",
            &["convert", "-f", "raw", "-O", "raw", &bench.uri("a"), &then],
        );
        begin(&mut control, &bench, json!({}));
        let uri = format!("nbd+unix:///pull?socket={}", bench.text("pull"));
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
        let copies = ["by-nbdcopy.raw", "by-qemu.raw"].map(|name| bench.text(name));
        ok("nbdcopy", "libnbd-bin", &[&uri, &copies[0]]);
        ok("qemu-img", "qemu-utils", &["convert", "-f", "raw", "-O", "raw", &uri, &copies[1]]);
        for copy in &copies {
            ok("qemu-img", "qemu-utils", &["compare", "-f", "raw", "-F", "raw", &then, copy]);
        }
        let told = guest.join().expect("the load");
        assert_eq!(
            (&told["verify"]["mismatches"], &told["errors"]),
            (&json!(0), &json!(0)),
            "{told}"
        );
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
    begin(&mut control, &bench, json!({ "__ringtap_scratch-limit": 1 << 20 }));
    let uri = format!("nbd+unix:///pull?socket={}", bench.text("pull"));
    let read = |uri: &str| {
        let args = ["-r", "-f", "raw", "-c", "read -P 1 8M 64k", uri];
        let output = program("qemu-io", "qemu-utils", args);
        output.status.success() && !String::from_utf8_lossy(&output.stdout).contains("failed")
    };
    assert!(read(&uri));
    bench.io("a", &["write -P 4 0 512k"]);
    assert!(read(&uri));
    bench.io("a", &["write -P 5 4M 4M", "read -P 5 4M 4M", "read -P 4 0 512k"]);
    let told = hear(&mut control, "BLOCK_JOB_COMPLETED");
    assert!(told["error"].as_str().is_some_and(|why| why.contains("was to be saved")), "{told}");
    assert!(!read(&uri), "it is not to be believed any more");
    control.ok("block-export-del", json!({ "id": "e", "mode": "hard" }));
    control.ok("blockdev-del", json!({ "node-name": "copy" }));
    server.stop();
    let size = std::fs::metadata(bench.text("copy")).expect("a file").len();
    assert!(size < 4 << 20, "{size}");
}
