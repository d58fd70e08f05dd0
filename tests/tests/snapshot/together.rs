//! Transactions over several disks, with the server killed at each step: all disks are as they are to be, or none is.

use std::collections::BTreeSet;
use std::fs;

use ringtap_tests::{Control, Server};
use serde_json::{Value, json};

use crate::bench::Bench;
use crate::checkpoints::{action, bitmap_of};
use crate::tampered::{Tampered, is_killed_by, successor};

const DISKS: [&str; 2] = ["a", "b"];

fn image(disk: &str) -> String {
    format!("{disk}.img")
}

/// One overlay for each of the disks.
fn overlays(bench: &Bench) -> Value {
    let one = |disk: &str| {
        let data =
            json!({ "node-name": disk, "snapshot-file": bench.text(&format!("{disk}.qcow2")) });
        action("blockdev-snapshot-sync", data)
    };
    json!({ "actions": DISKS.map(one) })
}

fn both(bench: &Bench, more: &[&str]) -> Server {
    let args = bench.args(&["a.img", "b.img"], &["-f", "raw"]);
    let args = args.iter().map(String::as_str).chain(more.iter().copied());
    Server::start_in(&bench.path("state"), args)
}

/// A server that knows of one disk alone.
fn alone(bench: &Bench, disk: &str) -> Server {
    let (image, nbd) = (bench.text(&image(disk)), format!("unix:{}.nbd", bench.text(disk)));
    let args = [&*image, "-f", "raw", "--name", disk, "--nbd", &nbd];
    Server::start_in(&bench.path("state"), args)
}

/// Changes of several disks that it is not known of whether a part of them is still written down.
fn left_behind(bench: &Bench) -> usize {
    let files = fs::read_dir(bench.path("state")).expect("what is kept of images");
    let names = files.flatten().map(|file| file.path());
    names.filter(|path| path.extension().is_some_and(|it| it == "transaction")).count()
}

/// Which disks go on in their overlays.
fn gone_on(control: &mut Control, bench: &Bench) -> Vec<bool> {
    let nodes = control.ok("query-named-block-nodes", json!({}));
    let all = nodes.as_array().expect("nodes");
    let file = |disk: &str| {
        let node = all.iter().find(|node| node["node-name"] == disk).expect("a disk");
        node["file"] == bench.text(&format!("{disk}.qcow2"))
    };
    DISKS.map(file).to_vec()
}

#[test]
fn disks_that_are_snapshotted_together_go_on_in_their_overlays_together() {
    let mut seen = BTreeSet::new();
    let steps = ["setxattr:1", "fsync:1", "fsync:2", "setxattr:2"];
    for (file, step) in DISKS.iter().flat_map(|disk| steps.map(|step| (image(disk), step))) {
        let bench = Bench::new();
        DISKS.iter().for_each(|disk| bench.raw(&image(disk), 16 << 20));
        let server = both(&bench, &["--sandbox", "off"]);
        for disk in DISKS {
            bench.io(disk, &["write -P 1 0 1M", "flush"]);
        }
        let mut control = bench.control();
        let (call, when) = step.split_once(':').expect("both");
        let what = format!("{call}:signal=KILL:when={when}");
        let tampered = Tampered::begin(&server, &bench.text(&file), &what);
        is_killed_by(&mut control, "transaction", overlays(&bench));
        drop((tampered, server));
        // One by one, by servers that know of one disk alone.
        for disk in DISKS {
            let server = alone(&bench, disk);
            bench.io(disk, &["read -P 1 0 1M"]);
            server.stop();
        }
        let server = both(&bench, &[]);
        let mut control = bench.control();
        let all = gone_on(&mut control, &bench);
        assert_eq!(all[0], all[1], "{file}: {step}");
        // As it was said that the part would be written, and it was not.
        let said = usize::from(step == "setxattr:1");
        assert_eq!(left_behind(&bench), said, "{file}: {step}");
        seen.insert(all[0]);
        for disk in DISKS {
            let (record, overlay) = (successor(&bench.text(&image(disk))), format!("{disk}.qcow2"));
            assert_eq!(record.is_empty(), !all[0], "{file}: {step}: {record}");
            if step == "setxattr:1" && file == image(disk) {
                // Made, and of no record yet: it holds nothing, and is the operator's to remove.
                fs::remove_file(bench.path(&overlay)).expect("it is there");
            }
            assert_eq!(bench.path(&overlay).exists(), all[0], "{file}: {step}: {disk}");
            bench.io(disk, &["write -P 2 512k 1M", "read -P 1 0 512k"]);
        }
        if !all[0] {
            control.ok("transaction", overlays(&bench));
            assert_eq!(gone_on(&mut control, &bench), [true, true]);
        }
        server.stop();
    }
    assert_eq!(seen.len(), 2, "always the same: {seen:?}");
}

/// The file that holds what is kept of a disk's bitmaps.
fn sidecars(server: &Server) -> BTreeSet<String> {
    let open = fs::read_dir(format!("/proc/{}/fd", server.pid())).expect("its files");
    let open = open.flatten().filter_map(|entry| fs::read_link(entry.path()).ok());
    let kept = open.filter(|path| path.extension().is_some_and(|it| it == "bitmaps"));
    kept.map(|path| path.display().to_string()).collect()
}

fn counts(control: &mut Control) -> [Option<u64>; 2] {
    DISKS.map(|disk| {
        let bitmap = bitmap_of(control, disk, "since");
        assert!(bitmap["inconsistent"].is_null(), "{bitmap}");
        bitmap["count"].as_u64()
    })
}

#[test]
fn bitmaps_that_are_cleared_together_are_cleared_together() {
    let mut seen = BTreeSet::new();
    let named = |disk: &str| json!({ "node": disk, "name": "since" });
    for which in 0..2 {
        for step in ["pwritev2:1", "pwritev2:2", "pwritev2:3", "fdatasync:1", "fdatasync:2"] {
            let bench = Bench::new();
            DISKS.iter().for_each(|disk| bench.raw(&image(disk), 16 << 20));
            // By threads, whose writes strace sees.
            let server = both(&bench, &["--sandbox", "off", "--io", "threads"]);
            let mut control = bench.control();
            for disk in DISKS {
                let add = json!({ "node": disk, "name": "since", "persistent": true });
                control.ok("block-dirty-bitmap-add", add);
                bench.io(disk, &["write -P 1 0 1M", "flush"]);
            }
            assert_eq!(counts(&mut control), [Some(1 << 20); 2]);
            let file = sidecars(&server).into_iter().nth(which).expect("two sidecars");
            let (call, when) = step.split_once(':').expect("both");
            let what = format!("{call}:signal=KILL:when={when}");
            let tampered = Tampered::begin(&server, &file, &what);
            let clear = DISKS.map(|disk| action("block-dirty-bitmap-clear", named(disk)));
            let clear = json!({ "execute": "transaction", "arguments": { "actions": clear } });
            control.send(clear.to_string());
            // Calls are counted by thread: it may go well.
            let went_well = control.hear().is_some();
            drop((tampered, server));
            let server = both(&bench, &[]);
            let mut control = bench.control();
            let all = counts(&mut control);
            assert_eq!(all[0], all[1], "sidecar {which}, {step}, well: {went_well}");
            seen.insert(all[0]);
            for disk in DISKS {
                bench.io(disk, &["write -P 2 8M 64k"]);
            }
            server.kill();
            let server = both(&bench, &[]);
            let more = all.map(|count| count.map(|count| count + (64 << 10)));
            assert_eq!(counts(&mut bench.control()), more, "sidecar {which}, {step}: later");
            for disk in DISKS {
                bench.control().ok("block-dirty-bitmap-remove", named(disk));
            }
            server.stop();
        }
    }
    assert!(seen.contains(&Some(1 << 20)), "never killed before it was decided: {seen:?}");
}
