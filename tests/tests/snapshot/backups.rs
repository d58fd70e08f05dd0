//! Copies of a moment, taken while the disk is served.

use std::fs;
use std::thread;
use std::time::Duration;

use ringtap_tests::{file_system_of, ok, plain, ringtap, ringtap_of};
use serde_json::{Value, json};

use crate::bench::{Bench, MIB};
use crate::jobs::{hear, load, make};

#[test]
fn a_backup_is_the_disk_as_it_was_when_it_began() {
    for (format, target) in [("raw", "raw"), ("qcow2", "qcow2"), ("vpc", "qcow2")] {
        let bench = Bench::new();
        make(&bench, "a.img", format, &[]);
        make(&bench, "copy", target, &[]);
        let server = bench.serve(&["a.img"], &["-f", format]);
        let mut control = bench.control();
        bench.io("a", &["write -P 1 0 16M", "write -P 2 32M 64k"]);
        if format == "vpc" {
            // Its size is one of cylinders.
            let (copy, nodes) =
                (bench.text("copy"), control.ok("query-named-block-nodes", json!({})));
            let size = nodes[0]["image"]["virtual-size"].to_string();
            ok(ringtap().to_str().expect("plain"), "ringtap", &["resize", "-q", &copy, &size]);
        }
        let file = json!({ "driver": "file", "filename": bench.text("copy") });
        let add = json!({ "driver": target, "node-name": "copy", "file": file });
        control.ok("blockdev-add", add.clone());
        control.ok("block-dirty-bitmap-add", json!({ "node": "a", "name": "since" }));
        let whole = json!({ "device": "a", "target": "copy", "sync": "full", "job-id": "j", "speed": 8 << 20 });
        control.ok("blockdev-backup", whole);
        thread::sleep(Duration::from_millis(300));
        // What it has not come to yet, and what it has.
        bench.io(
            "a",
            &["write -P 3 12M 1M", "write -P 3 0 64k", "write -z 32M 64k", "write -P 3 40M 64k"],
        );
        control.ok("block-job-set-speed", json!({ "device": "j", "speed": 0 }));
        let told = hear(&mut control, "BLOCK_JOB_COMPLETED");
        assert!(told.get("error").is_none() && told["type"] == "backup", "{told}");
        let node = control.ok("query-named-block-nodes", json!({}));
        let bitmap = &node[0]["dirty-bitmaps"][0];
        assert_eq!(bitmap["name"], "since", "{node}");
        let count = bitmap["count"].as_u64().expect("bytes");
        assert!((MIB..4 * MIB).contains(&count), "{bitmap}");
        control.ok("blockdev-del", json!({ "node-name": "copy" }));
        let then = ["read -P 1 0 16M", "read -P 2 32M 64k", "read -P 0 40M 64k"];
        bench.holds("copy", target, &then);
        // What has changed since, into the same.
        control.ok("blockdev-add", add);
        let more = json!({ "device": "a", "target": "copy", "sync": "incremental", "bitmap": "since", "job-id": "k" });
        control.ok("blockdev-backup", more);
        hear(&mut control, "BLOCK_JOB_COMPLETED");
        control.ok("blockdev-del", json!({ "node-name": "copy" }));
        let now = [
            "read -P 3 0 64k",
            "read -P 1 64k 12224k",
            "read -P 3 12M 1M",
            "read -P 0 32M 64k",
            "read -P 3 40M 64k",
        ];
        bench.holds("copy", target, &now);
        let node = control.ok("query-named-block-nodes", json!({}));
        assert_eq!(node[0]["dirty-bitmaps"][0]["count"], 0, "{node}");
        control.ok("block-dirty-bitmap-remove", json!({ "node": "a", "name": "since" }));
        server.stop();
    }
}

#[test]
fn a_target_that_is_full_breaks_the_backup_and_not_the_guest() {
    let bench = Bench::new();
    make(&bench, "a.img", "raw", &[]);
    let server = bench.serve(&["a.img"], &["-f", "raw"]);
    bench.io("a", &["write -P 1 0 48M"]);
    let set_up = file_system_of(16, "tmpfs", &[], "");
    let copy = set_up.folder().join("copy");
    fs::File::create(&copy).and_then(|file| file.set_len(64 * MIB)).expect("a file");
    let guest = load(&bench, "3");
    let control = format!("unix:{}", bench.text("control"));
    let head = ["disk", "backup", "a", plain(&copy), "-f", "raw", "--zeroed"];
    let output = ringtap_of(&[&head[..], &["--control", &control]].concat());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("no space"), "{said}");
    let told: Value = guest.join().expect("the load");
    assert_eq!((&told["verify"]["mismatches"], &told["errors"]), (&json!(0), &json!(0)), "{told}");
    // Into one with room it is taken, by hand.
    make(&bench, "copy.qcow2", "qcow2", &[]);
    let image = bench.text("copy.qcow2");
    let head = ["disk", "backup", "a", &image, "-f", "qcow2", "--zeroed"];
    let output = ringtap_of(&[&head[..], &["--control", &control]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let nodes = bench.control().ok("query-named-block-nodes", json!({}));
    assert_eq!(nodes.as_array().map(Vec::len), Some(1), "{nodes}");
    server.stop();
    let compared = ["compare", "-f", "raw", "-F", "qcow2", &bench.text("a.img"), &image];
    ok("qemu-img", "qemu-utils", &compared);
}
