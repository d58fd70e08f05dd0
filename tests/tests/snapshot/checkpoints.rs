//! Bitmaps that outlive servers, and backups by them.

use std::fs;
use std::os::unix::fs::FileExt;
use std::thread;
use std::time::Duration;

use ringtap_tests::{Control, Server, SetUp, ok, ringtap};
use serde_json::{Value, json};

use crate::bench::{Bench, snapshot};
use crate::jobs::{hear, make};

/// The node of a backup's target.
pub fn add_copy(control: &mut Control, bench: &Bench, driver: &str) {
    let file = json!({ "driver": "file", "filename": bench.text("copy") });
    control.ok("blockdev-add", json!({ "driver": driver, "node-name": "copy", "file": file }));
}

pub fn action(of: &str, data: Value) -> Value {
    json!({ "type": of, "data": data })
}

/// A bitmap as clients see it.
fn bitmap(control: &mut Control, name: &str) -> Value {
    bitmap_of(control, "a", name)
}

pub fn bitmap_of(control: &mut Control, node: &str, name: &str) -> Value {
    let nodes = control.ok("query-named-block-nodes", json!({}));
    let of = nodes.as_array().and_then(|all| all.iter().find(|one| one["node-name"] == node));
    let all = of.and_then(|node| node["dirty-bitmaps"].as_array()).cloned().unwrap_or_default();
    all.into_iter().find(|one| one["name"] == name).unwrap_or_default()
}

fn count(control: &mut Control) -> u64 {
    count_of(control, "a")
}

pub fn count_of(control: &mut Control, node: &str) -> u64 {
    let bitmap = bitmap_of(control, node, "since");
    assert!(bitmap["inconsistent"].is_null(), "{bitmap}");
    assert_eq!((&bitmap["persistent"], &bitmap["recording"]), (&json!(true), &json!(true)));
    bitmap["count"].as_u64().expect("bytes")
}

fn ended_well(control: &mut Control) {
    let told = hear(control, "BLOCK_JOB_COMPLETED");
    assert!(told.get("error").is_none() && told["type"] == "backup", "{told}");
}

const KIB: u64 = 1 << 10;

#[test]
fn a_checkpoint_outlives_kills_stops_and_replacements() {
    for (format, data) in
        [("raw", ""), ("qcow2", ""), ("vpc", ""), ("qcow2", "off"), ("qcow2", "on")]
    {
        let bench = Bench::new();
        let external = format!("data_file={},data_file_raw={data}", bench.text("data"));
        let more = ["-o", &*external];
        make(&bench, "a.img", format, if data.is_empty() { &[] } else { &more });
        make(&bench, "copy", "qcow2", &[]);
        let copy = bench.text("copy");
        let serve = || bench.serve(&["a.img"], &["-f", format]);
        let server = serve();
        let mut control = bench.control();
        bench.io("a", &["write -P 1 0 16M"]);
        // A VHD's size is one of cylinders.
        let nodes = control.ok("query-named-block-nodes", json!({}));
        let size = nodes[0]["image"]["virtual-size"].to_string();
        ok(ringtap().to_str().expect("plain"), "ringtap", &["resize", "-q", &copy, &size]);
        add_copy(&mut control, &bench, "qcow2");
        let add = json!({ "node": "a", "name": "since", "persistent": true });
        let full = json!({ "device": "a", "target": "copy", "sync": "full", "job-id": "j" });
        let actions = [action("block-dirty-bitmap-add", add), action("blockdev-backup", full)];
        control.ok("transaction", json!({ "actions": actions }));
        ended_well(&mut control);
        control.ok("blockdev-del", json!({ "node-name": "copy" }));
        bench.io("a", &["write -P 2 1M 64k"]);
        assert_eq!(count(&mut control), 64 * KIB);
        server.kill();

        let server = serve();
        let mut control = bench.control();
        assert_eq!(count(&mut control), 64 * KIB, "{format}: killed");
        bench.io("a", &["write -P 3 40M 4k"]);
        assert_eq!(count(&mut control), 128 * KIB);
        server.stop();

        let server = serve();
        let mut control = bench.control();
        assert_eq!(count(&mut control), 128 * KIB, "{format}: stopped");
        snapshot(&mut control, "a", &bench.text("top.qcow2"));
        bench.io("a", &["write -P 4 50M 64k"]);
        assert_eq!(count(&mut control), 192 * KIB);
        server.kill();

        // By the old name it is found where it goes on, and so are its bitmaps.
        let server = serve();
        let mut control = bench.control();
        assert_eq!(count(&mut control), 192 * KIB, "{format}: replaced, and killed");
        add_copy(&mut control, &bench, "qcow2");
        let part =
            json!({ "device": "a", "target": "copy", "sync": "incremental", "bitmap": "since" });
        control.ok("blockdev-backup", part);
        ended_well(&mut control);
        assert_eq!(count(&mut control), 0);
        control.ok("blockdev-del", json!({ "node-name": "copy" }));
        let now = ["read -P 1 0 1M", "read -P 2 1M 64k", "read -P 3 40M 4k", "read -P 4 50M 64k"];
        bench.holds("copy", "qcow2", &now);
        control.ok("block-commit", json!({ "device": "a", "job-id": "c" }));
        hear(&mut control, "BLOCK_JOB_READY");
        control.ok("block-job-complete", json!({ "device": "c" }));
        hear(&mut control, "BLOCK_JOB_COMPLETED");
        bench.io("a", &["write -P 5 2M 64k"]);
        server.stop();

        let server = serve();
        let mut control = bench.control();
        assert_eq!(count(&mut control), 64 * KIB, "{format}: committed, and stopped");
        control.ok("block-dirty-bitmap-remove", json!({ "node": "a", "name": "since" }));
        server.stop();
        let server = serve();
        assert_eq!(bitmap(&mut bench.control(), "since"), Value::Null, "{format}: removed");
        server.stop();
    }
}

/// The files of checkpoints in a folder of records.
fn sidecars(folder: &std::path::Path) -> Vec<std::path::PathBuf> {
    let all = fs::read_dir(folder).expect("the folder").flatten().map(|entry| entry.path());
    all.filter(|path| path.extension().is_some_and(|ending| ending == "bitmaps")).collect()
}

/// Also where the server is killed as the last has gone, or the file comes back, as it may by a power cut.
#[test]
fn the_file_of_checkpoints_goes_with_the_last_of_them() {
    for format in ["raw", "luks", "qcow2"] {
        let bench = Bench::new();
        let (state, image) = (bench.path("state"), bench.text("a.img"));
        fs::create_dir(&state).expect("a folder");
        fs::write(bench.path("key"), "secret").expect("a key");
        let secret = format!("file:{}", bench.text("key"));
        let sealed = ["--target-secret", &secret, "-o", "iter-time=10"];
        let open = ["--secret", &*secret];
        let (sealed, open) =
            if format == "luks" { (&sealed[..], &open[..]) } else { (&[][..], &[][..]) };
        let make = [&["create", "-q", "-f", format], sealed, &[&image, "64M"]].concat();
        ok(ringtap().to_str().expect("plain"), "ringtap", &make);
        let args = bench.args(&["a.img"], &[&["-f", format], open].concat());
        let serve = || Server::start_in(&state, &args);
        let add = json!({ "node": "a", "name": "since", "persistent": true });
        let gone = json!({ "node": "a", "name": "since" });

        let server = serve();
        let mut control = bench.control();
        control.ok("block-dirty-bitmap-add", add.clone());
        bench.io("a", &["write -P 1 0 64k"]);
        server.stop();
        let [sidecar] = &sidecars(&state)[..] else { panic!("{format}: one file") };
        let server = serve();
        let mut control = bench.control();
        assert_eq!(count(&mut control), 64 * KIB, "{format}");
        control.ok("block-dirty-bitmap-remove", gone.clone());
        let empty = fs::read(sidecar).expect("it is there until the image is closed");
        server.stop();
        assert!(sidecars(&state).is_empty(), "{format}: it stays");

        // What a power cut may bring back says that there is none.
        fs::write(sidecar, &empty).expect("written");
        let server = serve();
        let mut control = bench.control();
        assert_eq!(bitmap(&mut control, "since"), Value::Null, "{format}");
        bench.io("a", &["write -P 2 1M 64k"]);
        control.ok("block-dirty-bitmap-add", add.clone());
        bench.io("a", &["write -P 3 2M 64k"]);
        server.kill();
        let server = serve();
        let mut control = bench.control();
        assert_eq!(count(&mut control), 64 * KIB, "{format}: killed");
        control.ok("block-dirty-bitmap-remove", gone.clone());
        server.kill();
        assert_eq!(sidecars(&state), std::slice::from_ref(sidecar), "{format}");
        let server = serve();
        assert_eq!(bitmap(&mut bench.control(), "since"), Value::Null, "{format}");
        server.stop();
        assert!(sidecars(&state).is_empty(), "{format}: it stays after a kill");

        // A new one has a file of its own.
        let server = serve();
        bench.control().ok("block-dirty-bitmap-add", add);
        server.stop();
        assert_eq!(sidecars(&state), std::slice::from_ref(sidecar), "{format}");
    }
}

#[test]
fn an_image_that_others_wrote_to_has_lost_its_checkpoints() {
    let bench = Bench::new();
    make(&bench, "a.img", "raw", &[]);
    make(&bench, "copy", "raw", &[]);
    let serve = || bench.serve(&["a.img"], &["-f", "raw"]);
    let server = serve();
    let mut control = bench.control();
    let add = json!({ "node": "a", "name": "since", "persistent": true });
    control.ok("block-dirty-bitmap-add", add.clone());
    assert_eq!(count(&mut control), 0);
    server.stop();
    let image = bench.text("a.img");
    ok("qemu-io", "qemu-utils", &["-f", "raw", "-c", "write -P 9 30M 64k", &image]);

    let server = serve();
    let mut control = bench.control();
    let found = bitmap(&mut control, "since");
    assert_eq!((&found["inconsistent"], &found["recording"]), (&json!(true), &json!(false)));
    add_copy(&mut control, &bench, "raw");
    let part = json!({ "device": "a", "target": "copy", "sync": "incremental", "bitmap": "since" });
    let named = json!({ "node": "a", "name": "since" });
    for (command, arguments) in [
        ("blockdev-backup", part),
        ("block-dirty-bitmap-clear", named.clone()),
        ("block-dirty-bitmap-disable", named.clone()),
    ] {
        let error = control.call(command, arguments).expect_err("it is lost");
        assert!(error.contains("Bitmap 'since' is inconsistent and cannot be used"), "{error}");
    }
    control.ok("block-dirty-bitmap-remove", named);
    control.ok("block-dirty-bitmap-add", add);
    assert_eq!(count(&mut control), 0);
    server.stop();
}

#[test]
fn bitmaps_are_cleared_merged_disabled_and_refused_as_in_qemu() {
    let bench = Bench::new();
    make(&bench, "a.img", "raw", &[]);
    let serve = || bench.serve(&["a.img"], &["-f", "raw"]);
    let server = serve();
    let mut control = bench.control();
    let of = |name: &str| json!({ "node": "a", "name": name });
    for name in ["one", "two"] {
        let add =
            json!({ "node": "a", "name": name, "persistent": name == "one", "granularity": 4096 });
        control.ok("block-dirty-bitmap-add", add);
    }
    bench.io("a", &["write 1M 8k"]);
    control.ok("block-dirty-bitmap-disable", of("two"));
    bench.io("a", &["write 2M 4k"]);
    let counts = |control: &mut Control| {
        ["one", "two", "all"].map(|name| bitmap(control, name)["count"].as_u64().map(|it| it / KIB))
    };
    assert_eq!(counts(&mut control), [Some(12), Some(8), None]);
    assert_eq!(bitmap(&mut control, "two")["recording"], json!(false));
    // At one moment: the old one ends, a new one begins, and a third is both.
    let actions = [
        action(
            "block-dirty-bitmap-add",
            json!({ "node": "a", "name": "all", "disabled": true, "persistent": true, "granularity": 4096 }),
        ),
        action(
            "block-dirty-bitmap-merge",
            json!({ "node": "a", "target": "all", "bitmaps": ["one", { "node": "a", "name": "two" }] }),
        ),
        action("block-dirty-bitmap-clear", of("one")),
        action("block-dirty-bitmap-enable", of("two")),
    ];
    control.ok("transaction", json!({ "actions": actions }));
    assert_eq!(counts(&mut control), [Some(0), Some(8), Some(12)]);
    bench.io("a", &["write 3M 4k"]);
    assert_eq!(counts(&mut control), [Some(4), Some(12), Some(12)]);
    // It is so already: no change, and no error.
    control.ok("block-dirty-bitmap-enable", of("two"));
    for (command, arguments, wanted) in [
        ("block-dirty-bitmap-add", of("one"), "Bitmap already exists: one"),
        ("block-dirty-bitmap-clear", of("none"), "Dirty bitmap 'none' not found"),
        (
            "transaction",
            json!({ "actions": [action("block-dirty-bitmap-clear", of("two")), action("block-dirty-bitmap-clear", of("x"))] }),
            "Dirty bitmap 'x' not found",
        ),
        (
            "transaction",
            json!({ "actions": [], "properties": { "completion-mode": "grouped" } }),
            "does not accept value 'grouped'",
        ),
    ] {
        let error = control.call(command, arguments).expect_err(wanted);
        assert!(error.contains(wanted), "{error}");
    }
    assert_eq!(counts(&mut control), [Some(4), Some(12), Some(12)], "nothing of it is done");
    server.kill();
    let server = serve();
    let mut control = bench.control();
    assert_eq!(counts(&mut control), [Some(4), None, Some(12)]);
    assert_eq!(bitmap(&mut control, "all")["recording"], json!(false));
    server.stop();
}

#[test]
fn a_block_device_has_checkpoints_too() {
    let bench = Bench::new();
    bench.raw("device", 64 << 20);
    let device = ok("losetup", "mount", &["-f", "--show", &bench.text("device")]);
    let device = device.trim().to_owned();
    let _set_up = SetUp::attached(tempfile::tempdir().expect("a folder"), device.clone());
    let (nbd, at) =
        (format!("unix:{}.nbd", bench.text("a")), format!("unix:{}", bench.text("control")));
    let args = [&*device, "-f", "raw", "--name", "a", "--nbd", &nbd, "--control", &at];
    let serve = || Server::start(args);
    let server = serve();
    let mut control = bench.control();
    let add = json!({ "node": "a", "name": "since", "persistent": true });
    control.ok("block-dirty-bitmap-add", add);
    bench.io("a", &["write -P 2 1M 64k", "flush"]);
    server.kill();
    let server = serve();
    let mut control = bench.control();
    assert_eq!(count(&mut control), 64 * KIB, "killed");
    bench.io("a", &["write -P 3 8M 64k"]);
    server.stop();
    let server = serve();
    let mut control = bench.control();
    assert_eq!(count(&mut control), 128 * KIB, "stopped");
    server.stop();
    // Somebody else writes to it.
    ok(
        "dd",
        "coreutils",
        &["if=/dev/zero", &format!("of={device}"), "bs=4k", "count=1", "oflag=direct"],
    );
    let server = serve();
    let found = bitmap(&mut bench.control(), "since");
    assert_eq!(found["inconsistent"], json!(true), "{found}");
    server.stop();
}

/// The image itself is as it was.
#[test]
fn a_data_file_that_others_wrote_to_loses_the_checkpoints() {
    for (killed, swapped) in [(false, false), (false, true), (true, false), (true, true)] {
        let bench = Bench::new();
        let data = bench.text("data");
        make(&bench, "a.img", "qcow2", &["-o", &format!("data_file={data}")]);
        let server = bench.serve(&["a.img"], &["-f", "qcow2"]);
        let mut control = bench.control();
        let add = json!({ "node": "a", "name": "since", "persistent": true });
        control.ok("block-dirty-bitmap-add", add);
        bench.io("a", &["write -P 1 1M 64k"]);
        match killed {
            true => server.kill(),
            false => drop(server.stop()),
        }
        // Later than what may have been in flight.
        thread::sleep(Duration::from_millis(1200));
        match swapped {
            // Another file, of the same content and time.
            true => {
                ok("cp", "", &["-p", &data, &bench.text("kept")]);
                fs::rename(bench.path("kept"), bench.path("data")).expect("swapped");
            }
            false => {
                let file = fs::File::options().write(true).open(&data).expect("the data file");
                file.write_all_at(&[9; 4096], 1 << 20).expect("written");
            }
        }
        // What is left of the killed server is in doubt by now, which the operator decides.
        let more = ["-f", "qcow2", "--data-file", &data, "--restart-log", "use"];
        let server = bench.serve(&["a.img"], &more[..if killed { 6 } else { 4 }]);
        let found = bitmap(&mut bench.control(), "since");
        assert_eq!(
            found["inconsistent"],
            json!(true),
            "killed {killed}, swapped {swapped}: {found}"
        );
        server.stop();
    }
}

/// A sidecar that cannot be used is of no state that comes later.
#[test]
fn a_checkpoint_that_is_not_found_once_is_not_believed_later() {
    let bench = Bench::new();
    make(&bench, "a.img", "raw", &[]);
    let serve = || bench.serve(&["a.img"], &["-f", "raw"]);
    let server = serve();
    let mut control = bench.control();
    let add = json!({ "node": "a", "name": "since", "persistent": true });
    control.ok("block-dirty-bitmap-add", add);
    let open = fs::read_dir(format!("/proc/{}/fd", server.pid())).expect("its files");
    let mut open = open.flatten().filter_map(|entry| fs::read_link(entry.path()).ok());
    let sidecar = open.find(|path| path.extension().is_some_and(|it| it == "bitmaps"));
    let sidecar = sidecar.expect("a sidecar");
    server.stop();
    // Somebody else has it.
    let (path, nbd) = (sidecar.to_str().expect("plain"), format!("unix:{}", bench.text("other")));
    let other = Server::start([path, "-f", "raw", "--nbd", &nbd]);
    let said = serve().stop();
    assert!(said.contains("has lost its persistent bitmaps"), "{said}");
    assert!(!sidecar.exists(), "it would lack what was written since");
    other.stop();
}
