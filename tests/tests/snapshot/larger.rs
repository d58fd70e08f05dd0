//! Disks that are made larger while they are served.

use std::thread;
use std::time::Duration;

use ringtap_tests::{ok, program, ringtap, ringtap_of};
use serde_json::{Value, json};

use crate::bench::{Bench, MIB, snapshot};

fn size(bench: &Bench) -> u64 {
    let uri = bench.uri("a");
    let output = program("qemu-img", "qemu-utils", ["info", "--output", "json", &uri]);
    let told: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    told["virtual-size"].as_u64().expect("a size")
}

#[test]
fn images_of_every_format_grow_while_their_guests_write() {
    for (format, overlay) in
        [("raw", false), ("qcow2", false), ("vpc", false), ("raw", true), ("qcow2", true)]
    {
        let bench = Bench::new();
        let image = bench.text("a.img");
        let name = ringtap();
        let name = name.to_str().expect("plain");
        ok(name, "ringtap", &["create", "-q", "-f", format, &image, "64M"]);
        let server = bench.serve(&["a.img"], &["-f", format]);
        let mut control = bench.control();
        bench.io("a", &["write -P 1 63M 1M"]);
        if overlay {
            snapshot(&mut control, "a", &bench.text("one.qcow2"));
            bench.io("a", &["write -P 2 62M 512k"]);
        }
        let before = size(&bench);
        let socket = bench.text("a");
        let guest = thread::spawn(move || {
            let head = ["load", "--socket", &socket, "--rw", "randrw", "--size", "32M"];
            let tail = ["--seconds", "3", "--verify", "--output", "json"];
            let output = ringtap_of(&[&head[..], &tail].concat());
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            serde_json::from_slice::<Value>(&output.stdout).expect("JSON")
        });
        thread::sleep(Duration::from_millis(400));
        for more in 1..=4 {
            let wanted = before + more * 16 * MIB;
            control.ok("block_resize", json!({ "node-name": "a", "size": wanted }));
            let now = size(&bench);
            // A VHD's size is one of cylinders.
            assert!(now == wanted || format == "vpc" && now >= wanted, "{format}: {now}, {wanted}");
            let write = format!("write -P {} {} 64k", more + 10, wanted - MIB);
            bench.io("a", &["read -P 1 63M 1M", &write]);
        }
        let told = guest.join().expect("the load");
        assert_eq!(
            (&told["verify"]["mismatches"], &told["errors"]),
            (&json!(0), &json!(0)),
            "{told}"
        );
        let said = control.call("block_resize", json!({ "node-name": "a", "size": before }));
        assert!(said.expect_err("smaller").contains("not made smaller"));
        server.kill();
        let server = bench.serve(&["a.img"], &["-f", format]);
        assert!(size(&bench) >= before + 64 * MIB);
        for more in 1..=4 {
            let read = format!("read -P {} {} 64k", more + 10, before + (more * 16 - 1) * MIB);
            bench.io("a", &["read -P 1 63M 1M", &read]);
        }
        server.stop();
        let top = bench.text(if overlay { "one.qcow2" } else { "a.img" });
        if overlay || format == "qcow2" {
            ok("qemu-img", "qemu-utils", &["check", "-q", &top]);
        }
    }
}
