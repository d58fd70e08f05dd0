//! No room for a restart log: what a guest was told is written is not left to luck.

use std::os::unix::fs::MetadataExt;

use ringtap_tests::{Control, Server, ok, plain};
use serde_json::json;

use crate::{Case, Client, Format, file_system_of, warnings};

fn is_not_served_without_a_log(format: Format) {
    let full = file_system_of(1, "tmpfs", &[], "");
    let within = tempfile::tempdir().expect("a folder");
    std::fs::set_permissions(full.folder(), std::os::unix::fs::PermissionsExt::from_mode(0o700))
        .expect("this user's alone");
    let filler = "head -c 2M /dev/zero > \"$0/filler\" || true";
    ok("sh", "dash", &["-c", filler, plain(full.folder())]);
    let here = ["--state-dir", plain(full.folder())];
    let mut case = Case::new(within.path(), format, "writeback");
    let (image, socket) = (case.image(), format!("unix:{}", plain(&case.socket())));
    let refused = case.ringtap(
        &[&["serve", plain(&image), "-f", format.name(), "--nbd", &socket], &here[..]].concat(),
    );
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(1), "{format:?}: {said}");
    for way in ["--restart-log optional", "--cache writethrough", "--state-dir", "No space left"] {
        assert!(said.contains(way), "{format:?}, {way}: {said}");
    }
    // Reading needs none.
    let (found, said) = case.read(case.serve(&[&here[..], &["--read-only"]].concat()));
    assert!(found == case.disk && warnings(&said).is_empty(), "{format:?}: {said}");
    // Nor do writes that are stable before they are acknowledged.
    case.cache = "writethrough";
    let server = case.serve(&here);
    let mut client = Client::start(&case.socket());
    case.write(&mut client, 0..4, 0xa1, false);
    drop(client);
    case.kill(server);
    assert!(case.by_qemu(&case.image()) == case.disk, "{format:?}: lost");
    // And whoever wants it so has it so.
    case.cache = "writeback";
    let server = case.serve(&[&here[..], &["--restart-log", "optional"]].concat());
    let mut client = Client::start(&case.socket());
    case.write(&mut client, 4..8, 0xa2, true);
    drop(client);
    let said = server.stop();
    assert!(said.contains("no restart log for"), "{format:?}: {said}");
    assert!(case.by_qemu(&case.image()) == case.disk, "{format:?}");
}

/// A log takes its memory as changes come: where there is none left, flushes come between them.
#[test]
fn what_a_log_has_no_memory_for_is_stable() {
    for full in [false, true] {
        let logs = file_system_of(2, "tmpfs", &[], "");
        std::fs::set_permissions(
            logs.folder(),
            std::os::unix::fs::PermissionsExt::from_mode(0o700),
        )
        .expect("this user's alone");
        let within = tempfile::tempdir().expect("a folder");
        let [image, socket] = ["image", "socket"].map(|name| within.path().join(name));
        let make = ["create", "-q", "-f", "qcow2", "-o", "cluster_size=512", plain(&image), "16M"];
        ok("qemu-img", "qemu-utils", &make);
        let at = format!("unix:{}", plain(&socket));
        let words = [plain(&image), "-f", "qcow2", "--cache", "writeback", "--nbd", &at];
        let serve = || Server::start([&words[..], &["--state-dir", plain(logs.folder())]].concat());
        let server = serve();
        let taken = || {
            let all = std::fs::read_dir(logs.folder()).expect("a folder");
            let paths = all.map(|one| one.expect("a file").path());
            let log = paths.filter(|path| path.extension().is_some_and(|end| end == "restart"));
            let blocks = |log: std::path::PathBuf| log.metadata().expect("a log").blocks();
            512 * log.map(blocks).sum::<u64>()
        };
        let at_first = taken();
        assert!(at_first < 256 << 10, "{at_first}");
        if full {
            let filler = "head -c 4M /dev/zero > \"$0/filler\" || true";
            ok("sh", "dash", &["-c", filler, plain(logs.folder())]);
        }
        let before = taken();
        let mut client = Client::start(&socket);
        for mib in 0..10 {
            client.run(&format!("write -q -P {} {mib}M 1M", mib + 1));
        }
        let more = taken() - before;
        assert_eq!(more == 0, full, "{more} bytes more");
        drop(client);
        server.kill();
        crate::tick();
        let server = serve();
        let mut client = Client::start(&socket);
        for mib in 0..10 {
            client.run(&format!("read -q -P {} {mib}M 1M", mib + 1));
        }
        drop(client);
        server.stop();
        ok("qemu-img", "qemu-utils", &["check", "-q", plain(&image)]);
    }
}

/// By a client's word, too, and again after a restart.
#[test]
fn a_disk_that_does_without_a_log_is_kept_as_that() {
    let full = file_system_of(1, "tmpfs", &[], "");
    std::fs::set_permissions(full.folder(), std::os::unix::fs::PermissionsExt::from_mode(0o700))
        .expect("this user's alone");
    ok("sh", "dash", &["-c", "head -c 2M /dev/zero > \"$0/filler\" || true", plain(full.folder())]);
    let within = tempfile::tempdir().expect("a folder");
    let case = Case::new(within.path(), Format::Version2, "writeback");
    let (control, disks) = (case.path("control"), case.path("disks"));
    std::fs::create_dir(&disks).expect("a folder");
    let address = format!("unix:{}", plain(&control));
    let words = ["--persist", "--disks", plain(&disks), "--control", &address];
    let begin = || {
        let here = ["--state-dir", plain(full.folder())];
        (Server::daemon([&words[..], &here].concat()), Control::open(&control))
    };
    let (server, mut client) = begin();
    let mut node = json!({
        "node-name": "a", "driver": "qcow2",
        "file": { "driver": "file", "filename": case.image(), "cache": { "direct": false } },
    });
    let why = client.call("blockdev-add", node.clone()).expect_err("refused");
    assert!(why.contains("restart log"), "{why}");
    node["__ringtap_restart-log"] = "optional".into();
    client.ok("blockdev-add", node);
    server.stop();
    let (server, mut client) = begin();
    let nodes = client.ok("query-named-block-nodes", json!({}));
    assert_eq!(nodes[0]["node-name"], "a", "{nodes}");
    server.stop();
}

#[test]
fn qcow2_is_not_served_without_a_log() {
    is_not_served_without_a_log(Format::Overlay);
    is_not_served_without_a_log(Format::Version2);
}

#[test]
fn a_dynamic_vhd_is_not_served_without_a_log() {
    is_not_served_without_a_log(Format::Vpc);
}
