//! Disks and exports that come and go while a server runs.

use std::fs::File;
use std::os::unix::fs::FileExt;

use ringtap_guest::{Appliance, Machine, Uml};
use ringtap_tests::{Control, Server, patience, program, ringtap};
use serde_json::{Value, json};

use crate::{Empty, nbd_size, node, qemu_io, vhost};

#[test]
fn a_disk_is_added_used_and_taken_away_by_nbd() {
    let mut empty = Empty::new();
    empty.add("a", "qcow2", "16M");
    empty.add("b", "raw", "1M");
    let uri = empty.nbd();
    empty.export("x", "a", "nbd", json!({"name": "disk"}));
    // Under the node's own name, and read-only as where nothing is said.
    empty.export("y", "a", "nbd", json!({"writable": false}));
    empty.export("z", "b", "nbd", json!({}));
    assert_eq!(nbd_size(&uri("disk")), Ok(16 << 20));
    qemu_io(&uri("disk"), &["write -P 7 1M 1M", "flush"]).expect("written");
    let info =
        String::from_utf8(program("nbdinfo", "libnbd-bin", [uri("a")]).stdout).expect("text");
    assert!(info.contains("is_read_only: true"), "{info}");
    let info = program("nbdinfo", "libnbd-bin", [uri("disk")]).stdout;
    assert!(String::from_utf8(info).expect("text").contains("is_read_only: false"));
    let copy = empty.path("copy");
    let args = [uri("a").into(), copy.clone().into_os_string()];
    assert!(program("nbdcopy", "libnbd-bin", args).status.success());
    let bytes = std::fs::read(&copy).expect("the copy");
    assert!(bytes.len() == 16 << 20 && bytes[1 << 20..2 << 20].iter().all(|byte| *byte == 7));

    let control = &mut empty.control;
    let said = control.call("blockdev-del", json!({"node-name": "a"})).expect_err("it is shown");
    assert!(said.contains("Node 'a' is in use: the export 'x' shows it"), "{said}");
    let held = File::open(empty.dir.path().join("a")).expect("the image");
    for id in ["x", "y"] {
        control.ok("block-export-del", json!({"id": id}));
        assert_eq!(control.event(), ("BLOCK_EXPORT_DELETED".into(), json!({"id": id})));
    }
    assert!(nbd_size(&uri("disk")).is_err() && nbd_size(&uri("b")) == Ok(1 << 20));
    control.ok("blockdev-del", json!({"node-name": "a"}));
    drop(held);
    // Whole, unlocked, and with nothing left to be taken up.
    let image = empty.text("a");
    let check = program("qemu-img", "qemu-utils", ["check", "-f", "qcow2", &image]);
    assert!(check.status.success(), "{check:?}");
    let written =
        program("qemu-io", "qemu-utils", ["-f", "qcow2", "-c", "read -P 7 1M 1M", &image]);
    let said = String::from_utf8_lossy(&written.stdout).into_owned();
    assert!(written.status.success() && !said.contains("failed"), "{said}");
    // And it can come again.
    let again = node("a", "qcow2", &empty.path("a"));
    empty.control.ok("blockdev-add", again);
    empty.control.ok("nbd-server-stop", json!({}));
    assert_eq!(empty.control.event(), ("BLOCK_EXPORT_DELETED".into(), json!({"id": "z"})));
    assert!(!empty.path("nbd").exists(), "its socket is removed");
    assert!(empty.exports().is_empty());
    empty.control.ok("quit", json!({}));
    empty.server.ends();
}

#[test]
fn what_cannot_be_is_refused_and_leaves_nothing_behind() {
    let mut empty = Empty::new();
    empty.add("a", "raw", "1M");
    let (image, missing) = (empty.path("a"), empty.path("missing"));
    let text = image.display().to_string();
    let socket = empty.path("socket");
    let unix = |data: &str| json!({"addr": {"type": "unix", "data": {"path": data}}});
    let export = |id: &str, kind: &str| json!({"id": id, "node-name": "a", "type": kind});
    let mut foreign = export("v", "vhost-user-blk");
    foreign["addr"] = json!({"type": "unix", "path": "/nowhere/socket"});
    let mut queues = export("v", "vhost-user-blk");
    queues["addr"] = json!({"type": "unix", "path": socket});
    queues["num-queues"] = json!(0);
    let mut sectors = queues.clone();
    (sectors["num-queues"], sectors["logical-block-size"]) = (json!(1), json!(768));
    let mut twice = node("b", "raw", &image);
    twice["file"]["cache"] = json!({"direct": true, "no-flush": true});
    let mut unknown = node("b", "raw", &image);
    unknown["file"]["offset"] = json!(1);
    let cases = [
        ("blockdev-add", node("a", "raw", &missing), "Duplicate nodes with node-name='a'"),
        ("blockdev-add", node("b", "raw", &image), "is the image of the node 'a' already"),
        ("blockdev-add", node("b", "raw", &missing), "No such file"),
        ("blockdev-add", node("b", "qcow2", &empty.path(".")), "is a directory"),
        ("blockdev-add", node("1b", "raw", &missing), "Invalid node-name"),
        ("blockdev-add", node("b", "qed", &missing), "'driver' does not accept value 'qed'"),
        ("blockdev-add", twice, "exclude each other"),
        ("blockdev-add", unknown, "Parameter 'file.offset' is unexpected"),
        ("blockdev-del", json!({"node-name": "b"}), "Failed to find node with node-name='b'"),
        ("block-export-add", export("n", "nbd"), "NBD server not running"),
        ("block-export-add", foreign, "create its folder"),
        ("block-export-add", queues, "num-queues must be greater than 0"),
        ("block-export-add", sectors, "logical-block-size"),
        (
            "block-export-add",
            json!({"id": "f", "node-name": "b", "type": "fuse", "mountpoint": text}),
            "node-name='b'",
        ),
        (
            "block-export-add",
            json!({"id": "f", "node-name": "a", "type": "fuse", "mountpoint": text}),
            "is the image itself",
        ),
        ("block-export-del", json!({"id": "n"}), "Export 'n' is not found"),
        ("nbd-server-stop", json!({}), "NBD server not running"),
        ("nbd-server-start", unix("/nowhere/nbd"), "create its folder"),
        ("nbd-server-start", unix(&text), "not a socket"),
        ("block_resize", json!({"node-name": "a", "size": 0}), "expects a >0 size"),
        ("block_resize", json!({"node-name": "a", "size": 512}), "not made smaller"),
        ("block_resize", json!({"node-name": "a", "size": (2 << 20) + 1}), "whole sectors of 512"),
        ("block_resize", json!({"device": "b", "size": 512}), "DeviceNotFound"),
    ];
    for (command, arguments, said) in cases {
        let error = empty.control.call(command, arguments.clone()).expect_err(command);
        assert!(error.contains(said), "{command} {arguments}: {error}");
    }
    // What failed took no name, no id and no path.
    let uri = empty.nbd();
    empty.export("n", "a", "nbd", json!({}));
    empty.export("v", "a", "vhost-user-blk", vhost(&socket));
    empty.add("b", "raw", "1M");
    assert_eq!(nbd_size(&uri("a")), Ok(1 << 20));
    let nodes = empty.control.ok("query-named-block-nodes", json!({}));
    assert_eq!(nodes.as_array().map(Vec::len), Some(2));
    // Others do not get the image meanwhile.
    let said = program(
        ringtap().to_str().expect("a path"),
        "ringtap",
        ["resize", "-f", "raw", &text, "2M"],
    );
    assert!(!said.status.success());
    empty.server.stop();
}

#[test]
fn a_disk_grows_while_clients_have_it() {
    let mut empty = Empty::new();
    empty.add("a", "raw", "64M");
    empty.add("q", "qcow2", "1M");
    let uri = empty.nbd();
    let socket = empty.path("vhost");
    empty.export("n", "a", "nbd", json!({}));
    empty.export("v", "a", "vhost-user-blk", vhost(&socket));
    let appliance = Appliance::builder(Machine::Uml).programs(["blockdev", "dd"]);
    let appliance =
        appliance.build(&Appliance::default_cache()).unwrap_or_else(|error| panic!("{error}"));
    let guest =
        Uml::new(&appliance).vhost_user(&socket).boot().unwrap_or_else(|error| panic!("{error}"));
    let run = |script: &str| {
        let output = guest.exec(script, patience()).expect("the guest answers");
        output.success().unwrap_or_else(|error| panic!("{error}")).stdout
    };
    assert_eq!(run("blockdev --getsize64 /dev/vda").trim(), (64u64 << 20).to_string());
    empty.control.ok("block_resize", json!({"node-name": "a", "size": 80 << 20}));
    run(
        "for i in $(seq 600); do [ $(blockdev --getsize64 /dev/vda) = 83886080 ] && exit 0; sleep 0.1; done; exit 1",
    );
    run("dd if=/dev/zero of=/dev/vda bs=1M seek=79 count=1 oflag=direct");
    assert_eq!(nbd_size(&uri("a")), Ok(80 << 20));
    assert_eq!(std::fs::metadata(empty.path("a")).expect("the image").len(), 80 << 20);
    empty.control.ok("block_resize", json!({"device": "q", "size": 2 << 20}));
    // The guest's disk goes away from under it; the server goes on.
    empty.control.ok("block-export-del", json!({"id": "v"}));
    assert!(!socket.exists());
    assert_eq!(nbd_size(&uri("a")), Ok(80 << 20));
    drop(guest);
    empty.server.stop();
}

#[test]
fn disks_of_the_command_line_are_nodes_with_exports() {
    let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
    let at = |name: &str| format!("{}/{name}", dir.path().display());
    let (nbd, control) = (format!("unix:{}", at("nbd")), format!("unix:{}", at("control")));
    let server = Server::start([
        "null:1M",
        "--name",
        "root",
        "--nbd",
        &nbd,
        "--vhost-user",
        &at("v"),
        "--control",
        &control,
        "null:2M",
        "--node-name",
        "other",
        "--name",
        "x",
        "--nbd",
        &nbd,
        "null:3M",
    ]);
    let mut control = Control::open(at("control").as_ref());
    let exports = control.ok("query-block-exports", json!({}));
    let found: Vec<_> = exports
        .as_array()
        .expect("a list")
        .iter()
        .map(|one| {
            (
                one["id"].as_str().expect("an id"),
                one["node-name"].as_str().expect("a node"),
                one["type"].as_str().expect("a type"),
            )
        })
        .collect();
    assert_eq!(
        found,
        [
            ("root-nbd0", "root", "nbd"),
            ("other-nbd0", "other", "nbd"),
            ("root-vhost0", "root", "vhost-user-blk")
        ]
    );
    let stats = control.ok("query-blockstats", json!({}));
    let names: Vec<_> =
        stats.as_array().expect("a list").iter().map(|one| one["node-name"].clone()).collect();
    assert_eq!(names, ["root", "other", "disk2"]);
    let uri = |name: &str| format!("nbd+unix:///{name}?socket={}", at("nbd"));
    qemu_io(&uri("x"), &["read 0 64k", "write 0 4k", "flush"]).expect("done");
    let stats = control.ok("query-blockstats", json!({}));
    let counted = &stats[1]["stats"];
    assert!(
        counted["rd_bytes"].as_u64() >= Some(64 << 10) && counted["wr_bytes"] == 4096,
        "{counted}"
    );
    // One goes, and its server with the last.
    control.ok("block-export-del", json!({"id": "root-nbd0"}));
    assert!(nbd_size(&uri("root")).is_err() && nbd_size(&uri("x")) == Ok(2 << 20));
    control.ok("block-export-del", json!({"id": "other-nbd0"}));
    assert!(!dir.path().join("nbd").exists());
    control.ok("block-export-del", json!({"id": "root-vhost0"}));
    for node in ["root", "other", "disk2"] {
        control.ok("blockdev-del", json!({"node-name": node}));
    }
    assert_eq!(control.ok("query-block", json!({})), json!([]));
    server.signal(libc::SIGUSR1);
    server.signal(libc::SIGHUP);
    control.ok("query-version", json!({}));
    server.stop();
}

/// Of a disk `a`, or why not.
fn added(empty: &mut Empty, id: &str, kind: &str, more: &Value) -> Result<(), String> {
    let mut all = json!({"id": id, "node-name": "a", "type": kind, "writable": true});
    for (key, value) in more.as_object().expect("options") {
        all[key] = value.clone();
    }
    empty.control.call("block-export-add", all).map(drop)
}

/// Their clients would not hear of its new size.
#[test]
fn a_file_that_grows_its_disk_has_no_other_export_beside_it() {
    let mut empty = Empty::new();
    empty.add("a", "raw", "4M");
    let (one, other, vhost) = (empty.text("one"), empty.text("other"), empty.text("vhost"));
    let grows = json!({"mountpoint": one, "growable": true});
    let beside = json!({"addr": {"type": "unix", "path": vhost}});
    added(&mut empty, "v", "vhost-user-blk", &beside).expect("it comes");
    let why = added(&mut empty, "one", "fuse", &grows).expect_err("its size would change");
    assert!(why.contains("no other export"), "{why}");
    added(&mut empty, "other", "fuse", &json!({"mountpoint": other})).expect("it keeps its size");
    for id in ["v", "other"] {
        empty.control.ok("block-export-del", json!({"id": id}));
        empty.control.event();
    }
    added(&mut empty, "one", "fuse", &grows).expect("it is alone");
    let why = added(&mut empty, "v", "vhost-user-blk", &beside).expect_err("its size would change");
    assert!(why.contains("no other export"), "{why}");
    File::options()
        .write(true)
        .open(&one)
        .and_then(|file| file.set_len(5 << 20))
        .expect("it grows");
    empty.server.stop();
}

#[test]
fn a_file_comes_and_goes_and_one_that_is_unmounted_ends_alone() {
    let mut empty = Empty::new();
    empty.add("a", "qcow2", "4M");
    let (one, other) = (empty.text("one"), empty.text("other"));
    let said = empty.control.call(
        "block-export-add",
        json!({"id": "g", "node-name": "a", "type": "fuse", "mountpoint": empty.text("g"), "growable": true, "writable": true}),
    );
    assert!(said.expect_err("it cannot grow").contains("raw image"));
    empty.export("one", "a", "fuse", json!({"mountpoint": one}));
    empty.export("other", "a", "fuse", json!({"mountpoint": other, "writable": false}));
    let file = File::options().write(true).open(&one).expect("the disk as a file");
    file.write_all_at(&vec![5; 1 << 20], 0).expect("written");
    drop(file);
    let read = std::fs::read(&other).expect("the disk as a file");
    assert!(read.len() == 4 << 20 && read[..1 << 20].iter().all(|byte| *byte == 5));
    assert!(File::options().write(true).open(&other).is_err(), "it is read-only");
    let mut second = Control::open(&empty.path("control"));
    // Whoever unmounts it ends that export, which all clients hear, and nothing else.
    assert!(program("umount", "mount", [&other]).status.success());
    for control in [&mut empty.control, &mut second] {
        assert_eq!(control.event(), ("BLOCK_EXPORT_DELETED".into(), json!({"id": "other"})));
    }
    assert_eq!(empty.exports(), ["one"]);
    assert_eq!(std::fs::metadata(&one).expect("it stays").len(), 4 << 20);
    empty.control.ok("block-export-del", json!({"id": "one"}));
    assert_eq!(second.event().1, json!({"id": "one"}));
    assert_eq!(std::fs::metadata(&one).map(|found| found.len()).unwrap_or(0), 0, "it is unmounted");
    empty.control.ok("blockdev-del", json!({"node-name": "a"}));
    empty.server.stop();
}
