//! `blockdev-reopen` of nodes that have exports, of backing nodes and of files, beside QEMU's own storage daemon: the same
//! answers.

use std::fs::File;
use std::path::Path;

use ringtap_tests::{Control, ok, plain};
use serde_json::{Value, json};

use crate::Empty;
use crate::judges::Daemon;

fn make(folder: &Path) {
    let path = |name: &str| folder.join(name);
    for name in ["base", "other", "small", "target"] {
        let size = if name == "small" { "4M" } else { "8M" };
        ok("qemu-img", "qemu-utils", &["create", "-q", "-f", "qcow2", plain(&path(name)), size]);
    }
    for (name, below) in [("middle", "base"), ("top", "middle"), ("over", "target")] {
        let [name, below] = [name, below].map(path);
        let words =
            ["create", "-q", "-f", "qcow2", "-b", plain(&below), "-F", "qcow2", plain(&name)];
        ok("qemu-img", "qemu-utils", &words);
    }
    for name in ["base", "middle"] {
        let image = path(name);
        let words = ["-f", "qcow2", "-c", "write -q -P 7 0 8M", plain(&image)];
        ok("qemu-io", "qemu-utils", &words);
    }
    for name in ["r", "s"] {
        File::create(path(name)).and_then(|file| file.set_len(8 << 20)).expect("an image");
    }
}

fn with(mut node: Value, more: Value) -> Value {
    for (key, value) in more.as_object().expect("an object") {
        node[key] = value.clone();
    }
    node
}

/// What is asked, of images in FOLDER.
fn session() -> Vec<(&'static str, Value)> {
    let file = |name: &str| json!({"driver": "file", "node-name": format!("{name}-file"), "filename": format!("FOLDER/{name}")});
    let image = |name: &str, more: Value| {
        with(json!({"driver": "qcow2", "node-name": name, "file": format!("{name}-file")}), more)
    };
    let raw = |file: &str, more: Value| {
        with(json!({"driver": "raw", "node-name": "r", "file": file}), more)
    };
    let reopen = |node: Value| ("blockdev-reopen", json!({"options": [node]}));
    let upon = |name: &str, below: Value| reopen(image(name, json!({"backing": below})));
    let show = |id: &str, node: &str, writable: bool| {
        let all =
            json!({"type": "nbd", "id": id, "node-name": node, "name": id, "writable": writable});
        ("block-export-add", all)
    };
    let hide = |id: &str| ("block-export-del", json!({"id": id}));
    let mut all = vec![];
    for (name, more) in [
        ("base", json!({})),
        ("other", json!({"read-only": true})),
        ("small", json!({})),
        ("target", json!({})),
        ("middle", json!({"backing": "base"})),
        ("top", json!({"backing": "middle"})),
        ("over", json!({"backing": null})),
    ] {
        all.extend([("blockdev-add", file(name)), ("blockdev-add", image(name, more))]);
    }
    let top = |more: Value| reopen(image("top", with(json!({"backing": "middle"}), more)));
    let direct = |is: bool| json!({"cache": {"direct": is}});
    let stream = json!({"device": "top", "job-id": "j", "speed": 1, "auto-finalize": false});
    let commit = json!({"device": "top", "base-node": "base", "job-id": "j", "speed": 1});
    let cancel = ("block-job-cancel", json!({"device": "j", "force": true}));
    all.extend([
        // Of a node that guests write to, and of one that they read.
        ("nbd-server-start", json!({"addr": {"type": "unix", "data": {"path": "FOLDER/nbd"}}})),
        show("e", "top", true),
        top(json!({})),
        top(direct(true)),
        top(direct(false)),
        top(json!({"cache": {"no-flush": true}})),
        top(json!({"discard": "unmap"})),
        top(json!({"discard": "ignore"})),
        top(json!({"read-only": true})),
        reopen(image("top", json!({}))),
        hide("e"),
        show("e", "top", false),
        top(json!({"read-only": true})),
        top(direct(true)),
        top(json!({"read-only": false})),
        // Backing nodes.
        upon("top", Value::Null),
        upon("top", Value::Null),
        upon("top", json!("other")),
        upon("top", json!("small")),
        upon("top", json!("base")),
        upon("top", json!("none")),
        upon("top", json!("top")),
        upon("other", json!("top")),
        upon("other", json!("base")),
        upon("other", Value::Null),
        upon("base", Value::Null),
        upon("base", json!("top")),
        upon("top", json!("middle")),
        upon("base", json!("top")),
        upon("base", json!("middle")),
        upon("base", json!("base")),
        upon("middle", json!("other")),
        upon("middle", json!("base")),
        upon("top", json!({"driver": "qcow2", "file": "other-file"})),
        reopen(image("middle", json!({}))),
        reopen(image("base", json!({}))),
        hide("e"),
        // Links that a job freezes.
        ("block-stream", stream),
        upon("top", json!("other")),
        upon("top", Value::Null),
        upon("middle", json!("other")),
        top(json!({})),
        top(json!({"discard": "unmap"})),
        top(json!({"read-only": true})),
        cancel.clone(),
        upon("top", json!("other")),
        upon("top", json!("middle")),
        reopen(image("base", json!({"read-only": true}))),
        reopen(image("middle", json!({"backing": "base", "read-only": true}))),
        ("block-commit", commit),
        upon("top", json!("other")),
        upon("top", json!("base")),
        upon("middle", Value::Null),
        top(json!({})),
        cancel,
        // Of an overlay that has taken a node's place.
        ("blockdev-snapshot", json!({"node": "target", "overlay": "over"})),
        upon("over", json!("target")),
        reopen(image("over", json!({"backing": "target", "cache": {"direct": true}}))),
        upon("over", json!("target")),
        upon("target", json!("over")),
        upon("over", Value::Null),
        // Files.
        ("blockdev-add", file("r")),
        ("blockdev-add", file("s")),
        ("blockdev-add", raw("r-file", json!({}))),
        show("r", "r", true),
        reopen(raw("s-file", json!({}))),
        reopen(raw("s-file", json!({"read-only": true}))),
        reopen(raw("r-file", json!({"cache": {"direct": true}}))),
        reopen(raw("r-file", json!({"discard": "unmap"}))),
        reopen(raw("none", json!({}))),
        reopen(raw("r-file", json!({"backing": "base"}))),
        reopen(with(
            raw("", json!({})),
            json!({"file": {"driver": "file", "filename": "FOLDER/s"}}),
        )),
        reopen(with(
            raw("", json!({})),
            json!({"file": {"driver": "file", "filename": "FOLDER/r"}}),
        )),
        ("blockdev-del", json!({"node-name": "s-file"})),
        ("blockdev-add", file("s")),
        reopen(raw("s-file", json!({}))),
        ("blockdev-del", json!({"node-name": "r-file"})),
    ]);
    all
}

/// The answer to each.
fn told(control: &mut Control, folder: &Path) -> Vec<String> {
    make(folder);
    let folder = folder.display().to_string();
    let ask = |(command, arguments): (&str, Value)| {
        let text = arguments.to_string().replace("FOLDER", &folder);
        let answer = control.call(command, serde_json::from_str(&text).expect("JSON"));
        if command == "block-job-cancel" {
            until_gone(control);
        }
        format!("{command} {arguments} {answer:?}").replace(&folder, "FOLDER")
    };
    session().into_iter().map(ask).collect()
}

/// Wait for the end of the job, whose events come between.
fn until_gone(control: &mut Control) {
    while control.ok("query-jobs", json!({})) != json!([]) {
        control.event();
    }
}

#[test]
fn what_is_opened_otherwise_is_answered_as_by_qemu() {
    let (daemon, mut theirs) = Daemon::start();
    let mut empty = Empty::new();
    let wanted = told(&mut theirs, daemon.dir.path());
    let folder = empty.dir.path().to_owned();
    let found = told(&mut empty.control, &folder);
    let differ: Vec<_> = wanted.iter().zip(&found).filter(|(one, other)| one != other).collect();
    assert!(differ.is_empty(), "QEMU, and Ringtap: {differ:#?}");
    theirs.ok("quit", json!({}));
    empty.control.ok("quit", json!({}));
    empty.server.ends();
}
