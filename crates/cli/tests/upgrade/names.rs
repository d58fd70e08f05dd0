//! What clients of the control socket have named goes on in the next process.

use std::fs;

use rustix::process::{Signal, kill_process};

use crate::bench::{Bench, ends, pid};
use crate::jobs::qmp;
use crate::said::members;

pub fn ok(bench: &Bench, command: &str, arguments: &str) -> String {
    let answer = qmp(bench, &format!(r#"{{"execute":"{command}","arguments":{arguments}}}"#));
    assert!(answer.contains("\"return\""), "{command}: {answer}\n{}", bench.log());
    answer
}

const NAMES: [&str; 6] = ["\"f\"", "\"g\"", "\"alone\"", "\"sealed\"", "\"vm\"", "\"now\""];

/// Names, and what they are of.
fn nodes(bench: &Bench) -> String {
    ok(bench, "query-named-block-nodes", "{}")
}

/// As libvirt adds a disk: the secret, the file, the image in it, the export.
#[test]
fn secrets_files_and_images_keep_their_names() {
    let mut bench = Bench::new();
    fs::write(bench.path("key"), "secret").expect("a file");
    bench.ends_with(
        "create -q -f qcow2 --target-secret file:key -o encrypt.format=luks,encrypt.iter-time=10 a.qcow2 64M",
        0,
    );
    bench.ends_with("create -q -f qcow2 c.qcow2 64M", 0);
    let folder = bench.path("");
    let at = |name: &str| folder.join(name).display().to_string();
    let (key, image, plain, top) = (at("key"), at("a.qcow2"), at("c.qcow2"), at("top.qcow2"));
    let other = at("b.raw");
    fs::File::create(&other).and_then(|file| file.set_len(1 << 20)).expect("a file");
    let (_child, mut server) = bench.serve("daemon --control unix:c.sock");
    ok(&bench, "object-add", &format!(r#"{{"qom-type":"secret","id":"s","file":"{key}"}}"#));
    let file = |name: &str, path: &str| {
        format!(
            r#"{{"driver":"file","node-name":"{name}","filename":"{path}","cache":{{"direct":true}}}}"#
        )
    };
    ok(&bench, "blockdev-add", &file("f", &image));
    ok(&bench, "blockdev-add", &file("g", &plain));
    ok(&bench, "blockdev-add", &file("alone", &other));
    let encrypt = r#","encrypt":{"format":"luks","key-secret":"s"}"#;
    for (node, file, more) in [("sealed", "f", encrypt), ("vm", "g", "")] {
        let disk = format!(r#"{{"driver":"qcow2","node-name":"{node}","file":"{file}"{more}}}"#);
        ok(&bench, "blockdev-add", &disk);
        let socket = at(&format!("{node}.sock"));
        let export = format!(
            r#"{{"type":"vhost-user-blk","id":"{node}","node-name":"{node}","writable":true,"num-queues":2,"addr":{{"type":"unix","path":"{socket}"}}}}"#
        );
        ok(&bench, "block-export-add", &export);
    }
    let overlay = |of: &str, to: &str, path: &str| {
        format!(r#"{{"node-name":"{of}","snapshot-node-name":"{to}","snapshot-file":"{path}"}}"#)
    };
    ok(&bench, "blockdev-snapshot-sync", &overlay("vm", "now", &top));
    let before = nodes(&bench);
    for name in NAMES {
        assert!(before.contains(name), "{name}: {before}");
    }
    let loads = [bench.load("sealed.sock", 5), bench.load("vm.sock", 5)];
    for turn in 0..3 {
        std::thread::sleep(std::time::Duration::from_millis(500));
        let next = bench.upgrade("unix:c.sock");
        ends(server);
        server = next;
        let after = nodes(&bench);
        let same = |text: &str| members(text, "wr_highest_offset").len();
        assert_eq!(same(&after), same(&before), "{turn}: {after}");
        for name in NAMES {
            assert!(after.contains(name), "{turn}, {name}: {after}");
        }
    }
    for load in loads {
        bench.verified(load);
    }
    // Each is still what it was: in use, or free.
    let busy = qmp(&bench, r#"{"execute":"blockdev-del","arguments":{"node-name":"f"}}"#);
    assert!(busy.contains("error"), "{busy}");
    ok(&bench, "blockdev-add", r#"{"driver":"raw","node-name":"second","file":"alone"}"#);
    ok(&bench, "blockdev-del", r#"{"node-name":"second"}"#);
    ok(&bench, "blockdev-del", r#"{"node-name":"alone"}"#);
    let commit =
        r#"{"job-id":"j","device":"now","base-node":"vm","top-node":"now","auto-dismiss":false}"#;
    ok(&bench, "block-commit", commit);
    crate::jobs::until(&bench, |jobs| jobs.contains("\"ready\""));
    ok(&bench, "job-complete", r#"{"id":"j"}"#);
    crate::jobs::until(&bench, |jobs| jobs.contains("\"concluded\""));
    ok(&bench, "job-dismiss", r#"{"id":"j"}"#);
    let load = bench.load("vm.sock", 1);
    bench.verified(load);
    ok(&bench, "object-del", r#"{"id":"s"}"#);
    let _ = kill_process(pid(server), Signal::TERM);
    ends(server);
    bench.ends_with("check -f qcow2 --secret file:key a.qcow2", 0);
    bench.ends_with("check -f qcow2 c.qcow2", 0);
}

/// A name whose file is another one now would lead the next process there.
#[test]
fn a_named_file_that_was_replaced_is_told_and_the_server_goes_on() {
    let mut bench = Bench::new();
    let path = bench.path("a.raw");
    let make = || fs::File::create(&path).and_then(|file| file.set_len(1 << 20)).expect("a file");
    make();
    let (_child, server) = bench.serve("daemon --control unix:c.sock");
    let of = path.display();
    ok(
        &bench,
        "blockdev-add",
        &format!(r#"{{"driver":"file","node-name":"f","filename":"{of}"}}"#),
    );
    fs::rename(&path, bench.path("former")).expect("it moves");
    make();
    let said = bench.ends_with("upgrade unix:c.sock", 1);
    assert!(said.contains("another file now") && said.contains("named f"), "{said}");
    assert!(nodes(&bench).contains("\"f\""));
    fs::rename(bench.path("former"), &path).expect("it moves back");
    let next = bench.upgrade("unix:c.sock");
    ends(server);
    assert!(nodes(&bench).contains("\"f\""), "{next}");
    // A secret that is not there any more is told by the next, and this one goes on.
    let key = bench.path("key");
    fs::write(&key, "secret").expect("a file");
    let secret = format!(r#"{{"qom-type":"secret","id":"s","file":"{}"}}"#, key.display());
    ok(&bench, "object-add", &secret);
    fs::remove_file(&key).expect("it goes");
    let said = bench.ends_with("upgrade unix:c.sock", 1);
    assert!(said.contains("the secret s"), "{said}");
    ok(&bench, "object-del", r#"{"id":"s"}"#);
}
