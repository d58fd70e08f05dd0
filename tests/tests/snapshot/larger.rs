//! Disks that are made larger while they are served.

use std::thread;
use std::time::Duration;

use ringtap_tests::{is_well, lab_of, ok, program, ringtap};
use serde_json::{Value, json};

use crate::bench::{Bench, MIB, snapshot};
use crate::jobs::{commit, make};

fn size(bench: &Bench) -> u64 {
    let uri = bench.uri("a");
    let output = program("qemu-img", "qemu-utils", ["info", "--output", "json", &uri]);
    let told: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    told["virtual-size"].as_u64().expect("a size")
}

/// One that writes to the first 32 MiB.
fn guest(bench: &Bench) -> thread::JoinHandle<Value> {
    let socket = bench.text("a");
    thread::spawn(move || {
        let head = ["load", "--socket", &socket, "--rw", "randrw", "--size", "32M"];
        let tail = ["--seconds", "3", "--verify", "--output", "json"];
        let output = lab_of(&[&head[..], &tail].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).expect("JSON")
    })
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
        let guest = guest(&bench);
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
        is_well(guest);
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

/// The table of the first level moves, and the guest reads by the old one until the end.
#[test]
fn a_disk_that_has_grown_is_committed_into_the_smaller_image_below() {
    for more in [&[][..], &["-o", "cluster_size=4k"]] {
        let bench = Bench::new();
        make(&bench, "a.img", "qcow2", more);
        let server = bench.serve(&["a.img"], &["-f", "qcow2"]);
        bench.io("a", &["write -P 1 0 1M", "write -P 2 40M 4M", "flush"]);
        let mut control = bench.control();
        snapshot(&mut control, "a", &bench.text("one.qcow2"));
        let wanted = 4096 * MIB;
        control.ok("block_resize", json!({ "node-name": "a", "size": wanted }));
        bench.io("a", &["write -P 3 63M 2M", "write -P 4 4095M 1M"]);
        let guest = guest(&bench);
        thread::sleep(Duration::from_millis(300));
        commit(&mut control, json!({ "device": "a", "job-id": "j" }));
        is_well(guest);
        let held = ["read -P 3 63M 2M", "read -P 4 4095M 1M", "read -P 0 100M 1M"];
        bench.io("a", &held);
        server.stop();
        assert_eq!(std::fs::remove_file(bench.path("one.qcow2")).ok(), Some(()));
        bench.holds("a.img", "qcow2", &held);
        ok("qemu-img", "qemu-utils", &["check", "-q", &bench.text("a.img")]);
    }
}

/// The data file has no tables: what it is made longer by, and what it held there before, is the disk's only where the image
/// says so.
#[test]
fn images_with_an_external_data_file_grow_while_their_guests_write() {
    for raw in [false, true] {
        let bench = Bench::new();
        let image = bench.text("a.img");
        let options = format!(
            "data_file={},data_file_raw={}",
            bench.text("data"),
            if raw { "on" } else { "off" }
        );
        // It ends within a cluster.
        ok(
            "qemu-img",
            "qemu-utils",
            &["create", "-q", "-f", "qcow2", "-o", &options, &image, "65568k"],
        );
        let server = bench.serve(&["a.img"], &["-f", "qcow2"]);
        let mut control = bench.control();
        bench.io("a", &["write -P 1 63M 1M", "write -P 2 65540k 28k"]);
        let before = size(&bench);
        let guest = guest(&bench);
        thread::sleep(Duration::from_millis(400));
        for more in 1..=3 {
            let wanted = before + more * 600 * MIB;
            control.ok("block_resize", json!({ "node-name": "a", "size": wanted }));
            assert_eq!(size(&bench), wanted, "raw {raw}");
            let write = format!("write -P {} {} 64k", more + 10, wanted - 65536);
            let zeros = format!("read -P 0 {} 1M", wanted - 2 * MIB);
            bench.io("a", &["read -P 2 65540k 28k", "read -P 0 65568k 4M", &zeros, &write]);
        }
        is_well(guest);
        let said = control.call("block_resize", json!({ "node-name": "a", "size": before }));
        assert!(said.expect_err("smaller").contains("not made smaller"));
        server.kill();
        let server = bench.serve(&["a.img"], &["-f", "qcow2"]);
        assert_eq!(size(&bench), before + 1800 * MIB);
        server.stop();
        ok("qemu-img", "qemu-utils", &["check", "-q", &image]);
        let end =
            |more: u64| format!("read -P {} {} 64k", more + 10, before + more * 600 * MIB - 65536);
        let held = [
            "read -P 1 63M 1M",
            "read -P 2 65540k 28k",
            "read -P 0 65568k 4M",
            &end(1),
            &end(2),
            &end(3),
        ];
        bench.holds("a.img", "qcow2", &held);
        if raw {
            bench.holds("data", "raw", &held);
        }
    }
}

/// What lies below may have one, too.
#[test]
fn a_disk_that_has_grown_is_committed_into_an_external_data_file() {
    let bench = Bench::new();
    let options = format!("data_file={}", bench.text("data"));
    make(&bench, "a.img", "qcow2", &["-o", &options]);
    let server = bench.serve(&["a.img"], &["-f", "qcow2"]);
    bench.io("a", &["write -P 1 0 1M", "flush"]);
    let mut control = bench.control();
    snapshot(&mut control, "a", &bench.text("one.qcow2"));
    control.ok("block_resize", json!({ "node-name": "a", "size": 4096 * MIB }));
    bench.io("a", &["write -P 3 63M 2M", "write -P 4 4095M 1M"]);
    commit(&mut control, json!({ "device": "a", "job-id": "j" }));
    let held = ["read -P 1 0 1M", "read -P 3 63M 2M", "read -P 4 4095M 1M", "read -P 0 100M 1M"];
    bench.io("a", &held);
    server.stop();
    assert_eq!(std::fs::remove_file(bench.path("one.qcow2")).ok(), Some(()));
    bench.holds("a.img", "qcow2", &held);
    ok("qemu-img", "qemu-utils", &["check", "-q", &bench.text("a.img")]);
}

/// QEMU, which knows the secret, reads zeros where the file alone would hold noise.
#[test]
fn luks_containers_grow_while_their_guests_write() {
    for cache in ["none", "writeback"] {
        let bench = Bench::new();
        let (image, key) = (bench.text("a.img"), bench.text("key"));
        std::fs::write(&key, "a secret").expect("a key");
        let object = format!("secret,id=s,file={key}");
        let create = ["--object", &object, "-o", "key-secret=s,iter-time=10", &image, "65569k"];
        let create = [&["create", "-q", "-f", "luks"][..], &create].concat();
        ok("qemu-img", "qemu-utils", &create);
        let secret = format!("file:{key}");
        let options = ["-f", "luks", "--secret", &secret, "--cache", cache];
        let server = bench.serve(&["a.img"], &options);
        let mut control = bench.control();
        bench.io("a", &["write -P 1 63M 1M", "write -P 2 65540k 29k"]);
        let before = size(&bench);
        let guest = guest(&bench);
        thread::sleep(Duration::from_millis(400));
        for more in 1..=3 {
            let wanted = before + more * (16 * MIB + 512);
            control.ok("block_resize", json!({ "node-name": "a", "size": wanted }));
            assert_eq!(size(&bench), wanted, "{cache}");
            let zeros = format!("read -P 0 {} 16M", wanted - 16 * MIB - 512);
            let write = format!("write -P {} {} 512", more + 10, wanted - 512);
            bench.io("a", &["read -P 2 65540k 29k", &zeros, &write]);
        }
        is_well(guest);
        let said = control.call("block_resize", json!({ "node-name": "a", "size": before }));
        assert!(said.expect_err("smaller").contains("not made smaller"));
        server.kill();
        let server = bench.serve(&["a.img"], &options);
        let after = size(&bench);
        assert!(
            (before + 3 * (16 * MIB + 512)..=before + 3 * (16 * MIB + 512) + 4096).contains(&after),
            "{after}"
        );
        server.stop();
        let described = format!("driver=luks,file.driver=file,file.filename={image},key-secret=s");
        let end = |more: u64| {
            format!("read -P {} {} 512", more + 10, before + more * (16 * MIB + 512) - 512)
        };
        let gap = |more: u64| format!("read -P 0 {} 16M", before + (more - 1) * (16 * MIB + 512));
        let (ends, gaps) = ([end(1), end(2), end(3)], [gap(1), gap(2), gap(3)]);
        let fixed = ["read -P 1 63M 1M", "read -P 2 65540k 29k"];
        let reads = ends.iter().chain(&gaps).map(String::as_str).chain(fixed);
        let reads = reads.flat_map(|read| ["-c", read]);
        let args = ["-r", "--object", &object, "--image-opts", &described];
        let said = ok("qemu-io", "qemu-utils", &args.into_iter().chain(reads).collect::<Vec<_>>());
        assert!(!said.contains("failed"), "{said}");
    }
}

/// What was written behind the end that an image had at first is read through an image upon it.
#[test]
fn a_disk_that_has_grown_goes_on_in_an_overlay() {
    for sealed in [false, true] {
        let bench = Bench::new();
        let (key, top) = (bench.text("key"), bench.text("one.qcow2"));
        std::fs::write(&key, "a secret").expect("a key");
        let secret = format!("file:{key}");
        let own = ["-f", "luks", "--secret", &secret];
        let quick = ["-o", "iter-time=10"];
        let (options, more) =
            if sealed { (&own[..], &quick[..]) } else { (&["-f", "raw"][..], &[][..]) };
        let image = bench.text("a.img");
        let name = ringtap();
        let name = name.to_str().expect("plain");
        ok(name, "ringtap", &[&["create", "-q"], options, more, &[&image, "64M"]].concat());
        if sealed {
            let below =
                ["-b", &image, "-F", "luks", "--secret", &secret, "--target-secret", &secret];
            let inside = ["-o", "encrypt.format=luks,encrypt.iter-time=10", &top, "128M"];
            ok(name, "ringtap", &[&["create", "-q", "-f", "qcow2"], &below[..], &inside].concat());
        }
        let server = bench.serve(&["a.img"], options);
        let mut control = bench.control();
        bench.io("a", &["write -P 1 63M 1M"]);
        control.ok("block_resize", json!({ "node-name": "a", "size": 128 * MIB }));
        bench.io("a", &["write -P 2 64M 1M", "write -P 3 100M 1M", "flush"]);
        if sealed {
            let there = json!({ "device": "a", "snapshot-file": top, "mode": "existing" });
            control.ok("blockdev-snapshot-sync", there);
        } else {
            snapshot(&mut control, "a", &top);
        }
        let held =
            ["read -P 1 63M 1M", "read -P 2 64M 1M", "read -P 3 100M 1M", "read -P 0 101M 27M"];
        bench.io("a", &held);
        // A part of what is written at a time below comes up with it.
        bench.io(
            "a",
            &["write -P 4 102400k 512", "read -P 4 102400k 512", "read -P 3 102401k 1023k"],
        );
        server.stop();
    }
}

/// It would show what lies behind its disk.
#[test]
fn a_raw_data_file_that_is_longer_takes_no_larger_disk_and_stays_as_long() {
    let bench = Bench::new();
    let data = bench.text("data");
    let options = format!("data_file={data},data_file_raw=on");
    make(&bench, "a.img", "qcow2", &["-o", &options]);
    let file = std::fs::OpenOptions::new().write(true).open(&data).expect("a file");
    file.set_len(256 * MIB).expect("longer");
    let server = bench.serve(&["a.img"], &["-f", "qcow2"]);
    let mut control = bench.control();
    snapshot(&mut control, "a", &bench.text("one.qcow2"));
    control.ok("block_resize", json!({ "node-name": "a", "size": 128 * MIB }));
    bench.io("a", &["write -P 3 100M 1M"]);
    let begun = json!({ "device": "a", "job-id": "j" });
    control.ok("block-commit", begun);
    let said = loop {
        let (name, data) = control.event();
        if name == "BLOCK_JOB_COMPLETED" {
            break data;
        }
    };
    assert!(
        said["error"].as_str().is_some_and(|why| why.contains("raw data file is longer")),
        "{said}"
    );
    bench.io("a", &["read -P 3 100M 1M", "read -P 0 101M 27M"]);
    server.stop();
    // By itself one grows as with QEMU, and nothing of the file goes.
    let (name, data) = (ringtap(), bench.text("other"));
    make(&bench, "b.img", "qcow2", &["-o", &format!("data_file={data},data_file_raw=on")]);
    let file = std::fs::OpenOptions::new().write(true).open(&data).expect("a file");
    file.set_len(256 * MIB).expect("longer");
    ok(name.to_str().expect("plain"), "ringtap", &["resize", "-q", &bench.text("b.img"), "128M"]);
    assert_eq!(std::fs::metadata(&data).expect("a file").len(), 256 * MIB);
}

/// The rest of the cluster would show noise.
#[test]
fn an_encrypted_disk_that_ends_within_a_cluster_goes_on_as_large_as_it_is() {
    let bench = Bench::new();
    let (image, key) = (bench.text("a.img"), bench.text("key"));
    std::fs::write(&key, "a secret").expect("a key");
    let secret = format!("file:{key}");
    let sealed = ["-f", "qcow2", "--secret", &secret];
    let inside = ["-o", "encrypt.format=luks,encrypt.iter-time=10", &image, "65568k"];
    let name = ringtap();
    let name = name.to_str().expect("plain");
    ok(name, "ringtap", &[&["create", "-q"], &sealed[..], &inside].concat());
    let server = bench.serve(&["a.img"], &sealed);
    let mut control = bench.control();
    bench.io("a", &["write -P 1 63M 1M", "write -P 2 65540k 28k"]);
    let wanted = json!({ "node-name": "a", "size": 128 * MIB });
    let said = control.call("block_resize", wanted);
    let said = said.expect_err("it would show");
    assert!(said.contains("encrypted") && said.contains("convert -n"), "{said}");
    assert_eq!(size(&bench), 65568 << 10);
    let held = ["read -P 1 63M 1M", "write -P 3 65544k 24k", "read -P 2 65540k 4k"];
    bench.io("a", &held);
    server.stop();
}

/// What the parent has behind the end would show.
#[test]
fn a_vhd_over_a_longer_one_goes_on_as_large_as_it_is() {
    let bench = Bench::new();
    let (parent, image) = (bench.text("p.vhd"), bench.text("a.img"));
    let name = ringtap();
    let name = name.to_str().expect("plain");
    let create = ["create", "-q", "-f", "vpc"];
    ok(name, "ringtap", &[&create[..], &[&parent, "128M"]].concat());
    ok(name, "ringtap", &[&create[..], &["-b", &parent, "-F", "vpc", &image, "64M"]].concat());
    let server = bench.serve(&["a.img"], &["-f", "vpc"]);
    let mut control = bench.control();
    bench.io("a", &["write -P 1 63M 512k"]);
    let before = size(&bench);
    let said = control.call("block_resize", json!({ "node-name": "a", "size": 96 * MIB }));
    let said = said.expect_err("it would show");
    assert!(said.contains("its parent"), "{said}");
    assert_eq!(size(&bench), before);
    bench.io("a", &["read -P 1 63M 512k"]);
    server.stop();
}
