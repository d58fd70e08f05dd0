//! Dirty bitmaps that are kept nowhere go on, and miss no write.

use std::time::Duration;

use serde_json::Value;

use crate::bench::{Bench, READY, ends, stop};
use crate::jobs::{qmp, until};
use crate::mirrors::{FILE, ask, serve, target_image};
use crate::said::members;

/// What is said of each bitmap: its name, bytes that have changed, whether it records.
fn bitmaps(bench: &Bench) -> Vec<(String, u64, bool)> {
    let all = qmp(bench, r#"{"execute":"query-named-block-nodes"}"#);
    let one = |bitmap: &Value| {
        let name = bitmap["name"].as_str().unwrap_or_default().to_owned();
        let count = bitmap["count"].as_u64().unwrap_or_else(|| panic!("{all}"));
        (name, count, bitmap["recording"] == true)
    };
    let list = members(&all, "dirty-bitmaps").into_iter().next();
    list.as_ref().and_then(Value::as_array).into_iter().flatten().map(one).collect()
}

fn backup(bench: &Bench, sync: &str) {
    let rest = r#""device":"vm","target":"there","job-id":"j","auto-dismiss":false"#;
    ask(bench, "blockdev-backup", &format!("{rest},{sync}"));
    until(bench, |jobs| jobs.contains("concluded"));
    ask(bench, "job-dismiss", r#""id":"j""#);
}

#[test]
fn bitmaps_that_are_kept_nowhere_go_on() {
    let mut bench = Bench::new();
    target_image(&mut bench, FILE);
    let mut server = serve(&mut bench, FILE);
    let add = |name: &str, more: &str| {
        ask(&bench, "block-dirty-bitmap-add", &format!(r#""node":"vm","name":"{name}"{more}"#));
    };
    // One that notes what is written now and no more.
    add("off", r#","granularity":4096"#);
    let load = bench.load("vu.sock", 1);
    bench.verified(load);
    ask(&bench, "block-dirty-bitmap-disable", r#""node":"vm","name":"off""#);
    // Two that begin at one moment, of which one is kept: they are to say the same.
    add("kept", r#","persistent":true"#);
    add("b", "");
    backup(&bench, r#""sync":"full","__ringtap_target-is-zero":true"#);
    let before = bitmaps(&bench);
    let names: Vec<&str> = before.iter().map(|(name, ..)| &**name).collect();
    assert_eq!(names, ["off", "kept", "b"], "{before:?}");
    assert!(before[0].1 > 0 && !before[0].2 && before[2].1 == 0, "{before:?}");
    // So slow that not every region is changed in the end.
    bench.ends_with("disk limit vm --iops 60 --control unix:c.sock", 0);
    let load = bench.load("vu.sock", 8);
    // Programs that cannot take over, at once or once the disks stand still.
    for text in ["exit 1".to_owned(), format!("{READY}; sleep 0.3; exit 4")] {
        std::thread::sleep(Duration::from_millis(300));
        bench.install(&text);
        bench.ends_with("upgrade unix:c.sock", 1);
        let mut same = bitmaps(&bench);
        same.sort();
        let names: Vec<&str> = same.iter().map(|(name, ..)| &**name).collect();
        assert_eq!(names, ["b", "kept", "off"], "{same:?}\n{}", bench.log());
    }
    bench.install_again();
    for _ in 0..3 {
        std::thread::sleep(Duration::from_millis(400));
        let next = bench.upgrade("unix:c.sock");
        ends(server);
        server = next;
    }
    bench.verified(load);
    let after = bitmaps(&bench);
    assert_eq!(after.len(), 3, "{after:?}");
    let of = |name: &str| after.iter().find(|(own, ..)| own == name).expect("it is there").clone();
    assert_eq!(of("off"), before[0]);
    assert_eq!((of("b").1, of("b").2), (of("kept").1, true), "{after:?}");
    let whole = 64 << 20;
    assert!((1..whole).contains(&of("b").1), "{after:?}");
    // What is saved by it is what the disk has become.
    backup(&bench, r#""sync":"incremental","bitmap":"b""#);
    stop(server);
    bench.ends_with("compare -f raw -F qcow2 a.raw b.qcow2", 0);
    let judged = std::process::Command::new("qemu-img")
        .args(["compare", "-f", "raw", "-F", "qcow2", "a.raw", "b.qcow2"])
        .current_dir(bench.dir.path())
        .output()
        .expect("qemu-img");
    assert!(judged.status.success(), "{}", crate::bench::said(&judged));
}

/// The image is in use by the server before, which records in it.
#[test]
fn a_bitmap_of_the_image_that_is_named_goes_on() {
    let mut bench = Bench::new();
    let tool = |bench: &Bench, program: &str, args: &[&str]| {
        let command = &mut std::process::Command::new(program);
        let output = command.args(args).current_dir(bench.dir.path()).output().expect("it runs");
        assert!(output.status.success(), "{args:?}: {}", crate::bench::said(&output));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let uri = format!("nbd+unix:///vm?socket={}", bench.path("n.sock").display());
    bench.ends_with("create -q -f qcow2 a.qcow2 64M", 0);
    tool(&bench, "qemu-img", &["bitmap", "--add", "a.qcow2", "since"]);
    let line =
        "serve --control unix:c.sock a.qcow2 -f qcow2 --name vm --bitmap since --nbd unix:n.sock";
    let (_child, server) = bench.serve(line);
    let write = |bench: &Bench, what: &str| {
        tool(bench, "qemu-io", &["-f", "raw", "-c", what, &uri]);
    };
    write(&bench, "write 0 64k");
    let next = bench.upgrade("unix:c.sock");
    ends(server);
    write(&bench, "write 1M 64k");
    let map = tool(&bench, "nbdinfo", &["--map=qemu:dirty-bitmap:since", &uri]);
    let dirty = map.lines().filter(|line| line.ends_with("dirty") && !line.ends_with("clean"));
    assert_eq!(dirty.count(), 2, "{map}");
    stop(next);
}
