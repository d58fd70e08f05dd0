//! Images that are described within those upon them.

use std::process::Command;
use std::time::{Duration, Instant};

use ringtap_tests::{ok, patience};
use serde_json::{Value, json};

use crate::{Empty, qemu_io};

/// Its names are QEMU's own, but for those of nodes.
fn for_qemu(options: &Value) -> Value {
    let mut options = options.clone();
    let members = options.as_object_mut().expect("an object");
    members.remove("node-name");
    for inner in ["file", "backing"] {
        if let Some(inner) = members.get_mut(inner).filter(|inner| inner.is_object()) {
            *inner = for_qemu(inner);
        }
    }
    options
}

impl Empty {
    /// A file, an image that names another upon it, and one upon that.
    fn described(&self) -> Value {
        let at = |name: &str| self.text(name);
        let run = |program: &str, words: &[&str]| drop(ok(program, "qemu-utils", words));
        for (name, pattern) in [("base", 1), ("other", 9)] {
            run("qemu-img", &["create", "-q", "-f", "raw", &at(name), "4M"]);
            let write = format!("write -q -P {pattern} 0 4M");
            run("qemu-io", &["-f", "raw", "-c", &write, &at(name)]);
        }
        for (name, below, format) in [("mid", "other", "raw"), ("top", "mid", "qcow2")] {
            let words = ["create", "-q", "-f", "qcow2", "-F", format, "-b", &at(below), &at(name)];
            run("qemu-img", &words);
        }
        run("qemu-io", &["-f", "qcow2", "-c", "write -q -P 2 1M 1M", &at("mid")]);
        let file = |name: &str| json!({ "driver": "file", "filename": at(name) });
        let base = json!({ "driver": "raw", "file": file("base") });
        let mid = json!({
            "driver": "qcow2", "node-name": "mid", "file": file("mid"), "backing": base,
        });
        let mut top = json!({
            "driver": "qcow2", "node-name": "top", "file": file("top"), "backing": mid,
        });
        top["file"]["node-name"] = "top-file".into();
        top
    }

    /// Nobody has the lowest image, which may be written to.
    fn base_is_free(&self) {
        let base = self.text("base");
        drop(ok("qemu-io", "qemu-utils", &["-f", "raw", "-c", "write -q -P 1 0 64k", &base]));
    }

    fn ro(&mut self, name: &str) -> Value {
        let all = self.control.ok("query-named-block-nodes", json!({}));
        let mut all = all.as_array().expect("a list").iter();
        all.find(|one| one["node-name"] == name).expect(name)["ro"].clone()
    }
}

#[test]
fn what_is_described_within_is_opened_and_goes_with_what_lies_upon_it() {
    let mut empty = Empty::new();
    let chain = empty.described();
    // As QEMU has it.
    let held = ["read -P 1 0 1M", "read -P 2 1M 1M", "read -P 1 2M 2M"];
    let reads = held.iter().flat_map(|read| ["-c", read]);
    let json = format!("json:{}", for_qemu(&chain));
    let said = Command::new("qemu-io").arg("-r").args(reads).arg(&json).output().expect("it runs");
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    assert!(said.contains("read 2097152") && !said.contains("failed"), "{said}");
    let uri = empty.nbd();
    empty.control.ok("blockdev-add", chain.clone());
    let all = ["below0 raw", "mid qcow2", "top qcow2", "top-file file"];
    assert_eq!(empty.names(), all);
    assert_eq!(
        ["below0", "mid", "top"].map(|name| empty.ro(name)),
        [true, true, false].map(Value::from)
    );
    empty.export("e", "top", "nbd", json!({}));
    qemu_io(&uri("top"), &[&held[..], &["write -P 3 3M 64k"]].concat()).expect("it is the chain");
    empty.says_no("blockdev-del", json!({ "node-name": "mid" }), "used as backing hd of 'top'");
    let mut again = chain.clone();
    again["node-name"] = "again".into();
    empty.says_no("blockdev-add", again, "Duplicate nodes with node-name='mid'");
    let same = json!({ "driver": "null-co", "node-name": "x" });
    let mut twice = chain.clone();
    (twice["node-name"], twice["backing"]) = ("x".into(), same);
    empty.says_no("blockdev-add", twice, "Duplicate nodes with node-name='x'");
    assert_eq!(empty.names(), all);
    empty.control.ok("block-export-del", json!({ "id": "e" }));
    empty.control.ok("blockdev-del", json!({ "node-name": "top" }));
    assert_eq!(empty.names(), [""; 0]);
    empty.base_is_free();

    // One that another lies upon, too, stays until both have gone.
    empty.control.ok("blockdev-add", chain.clone());
    let second = empty.text("second");
    drop(ok("qemu-img", "qemu-utils", &["create", "-q", "-f", "qcow2", &second, "4M"]));
    let file = json!({ "driver": "file", "filename": second });
    let second =
        json!({ "driver": "qcow2", "node-name": "second", "file": file, "backing": "mid" });
    empty.control.ok("blockdev-add", second);
    empty.control.ok("blockdev-del", json!({ "node-name": "top" }));
    assert_eq!(empty.names(), ["below0 raw", "mid qcow2", "second qcow2"]);
    empty.control.ok("blockdev-del", json!({ "node-name": "second" }));
    assert_eq!(empty.names(), [""; 0]);

    // Where the topmost cannot be opened none of them stays.
    let mut wrong = chain.clone();
    wrong["file"]["filename"] = empty.text("nowhere").into();
    empty.says_no("blockdev-add", wrong, "No such file");
    assert_eq!(empty.names(), [""; 0]);
    empty.base_is_free();

    // What a stream leaves unused goes, too. A file is an image by itself.
    let mut bare = chain;
    let base = bare["backing"]["backing"]["file"].take();
    bare["backing"]["backing"] = base;
    empty.control.ok("blockdev-add", bare);
    assert_eq!(empty.names(), all);
    empty.control.ok("block-stream", json!({ "device": "top", "job-id": "j" }));
    assert_eq!(empty.ended("j"), Value::Null);
    let until = Instant::now() + patience();
    while empty.names() != ["top qcow2", "top-file file"] {
        assert!(Instant::now() < until, "{:?}", empty.names());
        std::thread::sleep(Duration::from_millis(10));
    }
    empty.base_is_free();
}
