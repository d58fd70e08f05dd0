//! What jobs, transactions and nodes refuse, beside QEMU's own storage daemon: in the same words.

use std::fs::File;
use std::path::Path;

use ringtap_tests::{Control, ok, plain};
use serde_json::{Value, json};

use crate::Empty;
use crate::judges::Daemon;

const MIB: u64 = 1 << 20;

/// What is asked, of files in FOLDER.
fn session() -> Vec<(&'static str, Value)> {
    let file = |name: &str| json!({"driver": "file", "filename": format!("FOLDER/{name}")});
    let raw = |name: &str| json!({"driver": "raw", "node-name": name, "file": file(name)});
    let copy = |target: &str, sync: &str| json!({"device": "a", "target": target, "sync": sync, "job-id": "j"});
    let mirror = |id: &str| json!({"device": "a", "target": "same", "sync": "full", "job-id": id});
    let bitmap = json!({"node": "a", "name": "b"});
    let add = json!({"type": "block-dirty-bitmap-add", "data": bitmap});
    let abort = json!({"type": "abort", "data": {}});
    let unknown = json!({"type": "block-dirty-bitmap-add", "data": {"node": "none", "name": "b"}});
    let qcow2 = |name: &str, more: &[(&str, Value)]| {
        let mut node =
            json!({"driver": "qcow2", "node-name": name, "file": format!("{name}-file")});
        more.iter().for_each(|(key, value)| node[*key] = value.clone());
        node
    };
    let named = |name: &str, more: &[(&str, Value)]| {
        let mut node = file(&format!("{name}.qcow2"));
        node["node-name"] = format!("{name}-file").into();
        more.iter().for_each(|(key, value)| node[*key] = value.clone());
        node
    };
    let reopen = |node: Value| ("blockdev-reopen", json!({"options": [node]}));
    let [yes, no] = [true, false].map(|is| [("read-only", json!(is))]);
    let mut all = vec![
        ("blockdev-add", raw("a")),
        ("blockdev-add", raw("same")),
        ("blockdev-add", raw("larger")),
        ("blockdev-add", raw("smaller")),
        ("blockdev-backup", copy("larger", "full")),
        ("blockdev-backup", copy("smaller", "full")),
        ("blockdev-backup", copy("larger", "none")),
        ("transaction", json!({"actions": [abort]})),
        ("transaction", json!({"actions": [add, abort]})),
        ("transaction", json!({"actions": [abort, unknown]})),
        ("transaction", json!({"actions": [unknown, abort]})),
        ("block-dirty-bitmap-remove", bitmap),
        (
            "blockdev-add",
            json!({"driver": "host_device", "node-name": "d", "filename": "FOLDER/a"}),
        ),
        (
            "blockdev-add",
            json!({"driver": "raw", "node-name": "d", "file": {"driver": "host_device", "filename": "FOLDER/x"}}),
        ),
        ("blockdev-add", named("n1", &[])),
        ("blockdev-add", qcow2("n1", &[])),
        ("blockdev-add", named("n2", &[])),
        ("blockdev-add", qcow2("n2", &[("backing", Value::Null)])),
        ("blockdev-snapshot", json!({"node": "n1", "overlay": "n2"})),
        reopen(named("n1", &no)),
        reopen(qcow2("n1", &no)),
        reopen(qcow2("n1", &yes)),
        reopen(named("n1", &yes)),
        reopen(json!({"driver": "raw", "node-name": "n1", "file": "n1-file"})),
        ("blockdev-add", named("u1", &[])),
        ("blockdev-add", qcow2("u1", &[])),
        ("blockdev-add", named("u2", &[])),
        ("blockdev-add", qcow2("u2", &[("backing", json!("u1"))])),
        reopen(qcow2("u1", &yes)),
        reopen(qcow2("u1", &yes)),
        reopen(qcow2("u1", &no)),
        reopen(qcow2("u1", &[("discard", json!("ignore")), ("detect-zeroes", json!("off"))])),
        reopen(qcow2("u1", &[("discard", json!("unmap")), ("detect-zeroes", json!("unmap"))])),
        reopen(qcow2("u1", &[("cache", json!({"direct": false, "no-flush": false}))])),
        reopen(json!({"driver": "raw", "node-name": "u1", "file": "u1-file"})),
        ("blockdev-del", json!({"node-name": "u1"})),
        ("blockdev-del", json!({"node-name": "u2"})),
        ("blockdev-del", json!({"node-name": "u1"})),
    ];
    all.extend(["1a", "a b", "é", "-a", "_a", "#a", ""].map(|id| ("blockdev-mirror", mirror(id))));
    for verb in ["cancel", "pause", "resume", "complete", "finalize", "dismiss"] {
        let both: [&'static str; 2] =
            [format!("job-{verb}"), format!("block-job-{verb}")].map(|command| &*command.leak());
        let own = if matches!(verb, "finalize" | "dismiss") { "id" } else { "device" };
        all.push((both[0], json!({"id": "none"})));
        all.push((both[1], json!({own: "none"})));
    }
    all.push(("block-job-set-speed", json!({"device": "none", "speed": 1})));
    all
}

fn told(control: &mut Control, folder: &Path) -> Vec<String> {
    for (name, size) in [("a", 8), ("same", 8), ("larger", 12), ("smaller", 4), ("x", 8)] {
        let image = File::create(folder.join(name)).expect("an image");
        image.set_len(size * MIB).expect("its size");
    }
    let create = ["create", "-q", "-f", "qcow2"];
    for names in [["n1.qcow2", "n2.qcow2"], ["u1.qcow2", "u2.qcow2"]] {
        let [below, above] = names.map(|name| folder.join(name));
        let [below, above] = [plain(&below), plain(&above)];
        ok("qemu-img", "qemu-utils", &[&create[..], &[below, "8M"]].concat());
        ok("qemu-img", "qemu-utils", &[&create[..], &["-b", below, "-F", "qcow2", above]].concat());
    }
    let folder = folder.display().to_string();
    let ask = |(command, arguments): (&str, Value)| {
        let text = arguments.to_string().replace("FOLDER", &folder);
        let arguments: Value = serde_json::from_str(&text).expect("JSON");
        let answer = control.call(command, arguments.clone());
        let answer = format!("{command} {arguments} {answer:?}");
        answer.replace(&folder, "FOLDER")
    };
    session().into_iter().map(ask).collect()
}

#[test]
fn what_qemu_refuses_is_refused_in_its_words() {
    let (daemon, mut theirs) = Daemon::start();
    let mut empty = Empty::new();
    let wanted = told(&mut theirs, daemon.dir.path());
    let folder = empty.dir.path().to_owned();
    let found = told(&mut empty.control, &folder);
    for (wanted, found) in wanted.iter().zip(&found) {
        assert_eq!(wanted, found);
    }
    theirs.ok("quit", json!({}));
    empty.control.ok("quit", json!({}));
    empty.server.ends();
}
