//! The orders of commands of programs that were written for QEMU's storage daemon, given to it and to this server.

use std::fs::File;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;

use ringtap_tests::{Control, ok as made};
use serde_json::{Value, json};

use crate::Empty;
use crate::judges::Daemon;

/// What Proxmox VE sends for a drive that it has shown by FUSE (a TPM's state): a group for its limits, a throttle node of all
/// three layers, each with its own name, the export at a file that is there, and all of it taken away again.
fn proxmox(control: &mut Control, folder: &Path) -> Vec<(&'static str, Result<Value, String>)> {
    let path = |name: &str| folder.join(name).display().to_string();
    let disk = File::create(folder.join("tpm.raw")).expect("an image");
    disk.set_len(4 << 20).expect("its size");
    let mount = folder.join("tpmstate0.fuse");
    File::create(&mount).expect("a file to mount over");
    let permissions = std::fs::Permissions::from_mode(0o600);
    std::fs::set_permissions(&mount, permissions).expect("its mode");
    let cache = json!({"direct": false, "no-flush": false});
    let file = json!({
        "driver": "file", "node-name": "e0123456789abcdef0123456789abcd", "filename": path("tpm.raw"),
        "cache": cache, "aio": "threads", "discard": "ignore", "detect-zeroes": "on", "read-only": false,
    });
    let raw = json!({
        "driver": "raw", "node-name": "f0123456789abcdef0123456789abcd", "file": file, "cache": cache,
        "read-only": false,
    });
    let drive = json!({
        "driver": "throttle", "node-name": "drive-tpmstate0", "throttle-group": "throttle-drive-tpmstate0",
        "file": raw,
    });
    let group =
        json!({"qom-type": "throttle-group", "id": "throttle-drive-tpmstate0", "limits": {}});
    let export = json!({
        "type": "fuse", "id": "tpmstate0", "mountpoint": path("tpmstate0.fuse"),
        "node-name": "drive-tpmstate0", "writable": true, "growable": false, "allow-other": "off",
    });
    let mut said = vec![];
    for (command, arguments) in
        [("object-add", group), ("blockdev-add", drive), ("block-export-add", export)]
    {
        said.push((command, control.call(command, arguments)));
    }
    let shown = File::options().read(true).write(true).open(&mount).expect("the disk as a file");
    assert_eq!(shown.metadata().expect("its facts").len(), 4 << 20);
    shown.write_all_at(b"state of a TPM", 4096).expect("written");
    shown.sync_all().expect("stable");
    drop(shown);
    said.push(("block-export-del", control.call("block-export-del", json!({"id": "tpmstate0"}))));
    assert_eq!(control.event(), ("BLOCK_EXPORT_DELETED".to_owned(), json!({"id": "tpmstate0"})));
    said.push(("quit", control.call("quit", json!({}))));
    let mut state = [0; 14];
    File::open(folder.join("tpm.raw"))
        .and_then(|disk| disk.read_exact_at(&mut state, 4096))
        .expect("read");
    assert_eq!(&state, b"state of a TPM");
    // It is an empty file again, with nothing mounted over it.
    assert_eq!(std::fs::metadata(&mount).expect("the file").len(), 0);
    said
}

#[test]
fn proxmox_takes_a_drive_and_gives_it_back_as_from_qemus_storage_daemon() {
    let mut empty = Empty::new();
    let folder = empty.dir.path().to_owned();
    let found = proxmox(&mut empty.control, &folder);
    empty.server.ends();
    let (daemon, mut control) = Daemon::start();
    let wanted = proxmox(&mut control, daemon.dir.path());
    assert_eq!(found, wanted);
    assert!(found.iter().all(|(_, end)| *end == Ok(json!({}))), "{found:?}");
}

/// How many bytes of a file take space.
fn space(path: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(path).expect("the image").blocks() * 512
}

#[test]
fn a_disk_whose_discards_are_ignored_keeps_its_space() {
    let mut empty = Empty::new();
    let uri = empty.nbd();
    for (name, discard) in [("kept", "ignore"), ("freed", "unmap")] {
        let path = empty.path(name);
        std::fs::write(&path, vec![7; 4 << 20]).expect("an image");
        File::open(&path).and_then(|file| file.sync_all()).expect("stable");
        let mut node = crate::node(name, "raw", &path);
        node["discard"] = discard.into();
        empty.control.ok("blockdev-add", node);
        empty.export(name, name, "nbd", json!({}));
        let before = space(&path);
        crate::qemu_io(
            &uri(name),
            &["discard 0 1M", "write -z -u 1M 1M", "read -P 0 1M 1M", "flush"],
        )
        .expect("carried out");
        let after = space(&path);
        match discard {
            "ignore" => assert_eq!((before, after), (4 << 20, 4 << 20)),
            _ => assert!(after <= before - (2 << 20), "{before} {after}"),
        }
    }
    let shown = crate::qemu_io(&uri("kept"), &["read -P 7 0 1M"]);
    shown.expect("what was discarded stays");
    empty.server.stop();
}

/// What qmpbackup (0.67) sends to a machine for one backup, but for what only a machine knows: its state, its name, its TPM, and
/// the node that its device is switched to. `uuid` names the bitmap.
fn qmpbackup(control: &mut Control, target: &Path, fleece: &Path, incremental: bool) {
    let node = |name: &str, path: &Path| {
        let file = json!({"driver": "file", "filename": path, "aio": "threads"});
        json!({"driver": "qcow2", "node-name": name, "file": file})
    };
    for path in [target, fleece] {
        let path = path.to_str().expect("a path");
        made(
            "qemu-img",
            "qemu-utils",
            &["create", "-q", "-f", "qcow2", "-o", "cluster_size=65536", path, "16M"],
        );
    }
    control.ok("blockdev-add", node("qmpbackup-vm", target));
    control.ok("blockdev-add", node("qmpbackup-vm-fleece", fleece));
    let mut keeps = json!({
        "driver": "copy-before-write", "node-name": "qmpbackup-vm-cbw", "file": "vm",
        "target": "qmpbackup-vm-fleece", "on-cbw-error": "break-snapshot", "cbw-timeout": 45,
    });
    if incremental {
        keeps["bitmap"] = json!({"node": "vm", "name": "qmpbackup-uuid"});
    }
    control.ok("blockdev-add", keeps);
    control.ok(
        "blockdev-add",
        json!({"driver": "snapshot-access", "file": "qmpbackup-vm-cbw", "node-name": "qmpbackup-vm-snap"}),
    );
    let mut backup = json!({
        "device": "qmpbackup-vm-snap", "target": "qmpbackup-vm", "sync": "full",
        "job-id": "qmpbackup.vm.vm", "speed": 0, "compress": false,
    });
    let of = |node: &str| json!({"node": node, "name": "qmpbackup-uuid"});
    let action = |kind: &str, data: Value| json!({"type": kind, "data": data});
    let actions = match incremental {
        false => {
            let mut own = of("vm");
            own["persistent"] = true.into();
            vec![action("block-dirty-bitmap-add", own), action("blockdev-backup", backup)]
        }
        true => {
            (backup["sync"], backup["bitmap"]) = ("incremental".into(), "qmpbackup-uuid".into());
            let merge = json!({
                "node": "qmpbackup-vm-snap", "target": "qmpbackup-uuid", "bitmaps": [of("vm")],
            });
            vec![
                action("block-dirty-bitmap-add", of("qmpbackup-vm-snap")),
                action("block-dirty-bitmap-merge", merge),
                action("blockdev-backup", backup),
                action("block-dirty-bitmap-clear", of("vm")),
            ]
        }
    };
    control.ok("transaction", json!({"actions": actions}));
    loop {
        let (event, data) = control.event();
        assert_ne!(event, "BLOCK_JOB_ERROR", "{data}");
        if event == "BLOCK_JOB_COMPLETED" {
            assert_eq!((&data["device"], data.get("error")), (&json!("qmpbackup.vm.vm"), None));
            break;
        }
    }
    // At once: what it has read is let go of by then.
    for name in ["snap", "cbw"] {
        control.ok("blockdev-del", json!({"node-name": format!("qmpbackup-vm-{name}")}));
    }
    for name in ["qmpbackup-vm", "qmpbackup-vm-fleece"] {
        control.ok("blockdev-del", json!({"node-name": name}));
    }
}

#[test]
fn qmpbackup_makes_its_full_and_incremental_backups() {
    let mut empty = Empty::new();
    empty.add("vm", "qcow2", "16M");
    let uri = empty.nbd();
    empty.export("n", "vm", "nbd", json!({}));
    let write = |commands: &[&str]| crate::qemu_io(&uri("vm"), commands).expect("written");
    write(&["write -P 1 0 2M", "flush"]);
    let path = |name: &str| empty.dir.path().join(name);
    let [full, first, second, fleece] = ["full", "inc1", "inc2", "fleece"].map(path);
    qmpbackup(&mut empty.control, &full, &fleece, false);
    write(&["write -P 2 1M 2M", "write -P 3 8M 64k", "flush"]);
    qmpbackup(&mut empty.control, &first, &fleece, true);
    write(&["discard 0 512k", "write -P 4 9M 64k", "flush"]);
    qmpbackup(&mut empty.control, &second, &fleece, true);
    empty.control.ok("quit", json!({}));
    empty.server.ends();
    let text = |path: &Path| path.display().to_string();
    // As its tool for that does: each upon the one before.
    for (above, below) in [(&first, &full), (&second, &first)] {
        let below = text(below);
        made(
            "qemu-img",
            "qemu-utils",
            &["rebase", "-u", "-f", "qcow2", "-F", "qcow2", "-b", &below, &text(above)],
        );
    }
    let vm = text(&empty.dir.path().join("vm"));
    made("qemu-img", "qemu-utils", &["compare", "-f", "qcow2", "-F", "qcow2", &text(&second), &vm]);
    // What was not written since is not in it.
    let taken = std::fs::metadata(&second).expect("the last").len();
    assert!(taken < 2 << 20, "{taken}");
}
