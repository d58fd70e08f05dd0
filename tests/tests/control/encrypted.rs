//! Encrypted qcow2 images that come while the server runs. QEMU's own programs make them and judge what was written.

use std::fs;
use std::path::Path;

use ringtap_tests::program;
use serde_json::{Value, json};

use crate::{Empty, node};

const SECRET: &str = "a secret, not hunter2";

/// What one of QEMU's programs says that knows the secret.
fn qemu(dir: &Path, tool: &str, args: &[&str]) -> Result<String, String> {
    let key = format!("secret,id=s,file={}", dir.join("key").display());
    let (verb, rest) = match tool {
        "qemu-img" => args.split_at(1),
        _ => args.split_at(0),
    };
    let own = [verb, &["--object", &key], rest].concat();
    let output = program(tool, "qemu-utils", own);
    let said = [&output.stdout[..], &output.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    match output.status.success() && !said.contains("failed") {
        true => Ok(said),
        false => Err(said),
    }
}

/// An image as QEMU opens it.
fn described(dir: &Path, name: &str) -> String {
    let path = dir.join(name).display().to_string();
    format!("driver=qcow2,file.driver=file,file.filename={path},encrypt.key-secret=s")
}

/// QEMU finds these bytes in an image, and no fault in the image.
fn holds(dir: &Path, name: &str, commands: &[&str]) {
    let image = described(dir, name);
    let commands = commands.iter().flat_map(|command| ["-c", command]);
    let args: Vec<&str> = ["-r", "--image-opts", &image].into_iter().chain(commands).collect();
    qemu(dir, "qemu-io", &args).expect("it holds that");
    qemu(dir, "qemu-img", &["check", "--image-opts", &image]).expect("it is whole");
    let told = qemu(dir, "qemu-img", &["info", "--output", "json", "--image-opts", &image]);
    let told: Value = serde_json::from_str(&told.expect("told")).expect("JSON");
    assert_eq!(told["encrypted"], json!(true), "{told}");
    let bytes = fs::read(dir.join(name)).expect("the image");
    for clear in [[0x5a; 16], [0x33; 16]] {
        assert!(!bytes.windows(16).any(|window| window == clear), "it lies there in the clear");
    }
}

/// A server, and a secret that it knows.
fn place() -> Empty {
    let mut empty = Empty::new();
    fs::write(empty.path("key"), SECRET).expect("a key");
    let secret = json!({"qom-type": "secret", "id": "s", "file": empty.text("key")});
    empty.control.ok("object-add", secret);
    empty
}

fn make(empty: &Empty, name: &str, more: &[&str]) {
    let path = empty.text(name);
    let luks = "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10";
    let args = [&["create", "-q", "-f", "qcow2", "-o", luks], more, &[&path, "4M"]].concat();
    // It measures how fast it is, and on a busy machine may not be able to.
    let busy = |end: &Result<String, String>| {
        end.as_ref().is_err_and(|said| said.contains("accurate CPU usage"))
    };
    let mut end = qemu(empty.dir.path(), "qemu-img", &args);
    for _ in 0..20 {
        if !busy(&end) {
            break;
        }
        end = qemu(empty.dir.path(), "qemu-img", &args);
    }
    end.expect("an image");
}

fn sealed(empty: &Empty, name: &str) -> Value {
    let mut node = node(name, "qcow2", &empty.path(name));
    node["encrypt"] = json!({"format": "luks", "key-secret": "s"});
    node
}

#[test]
fn an_encrypted_qcow2_image_is_added_and_qemu_reads_what_was_written() {
    let mut empty = place();
    make(&empty, "e", &[]);
    empty.control.ok("blockdev-add", sealed(&empty, "e"));
    let nodes = empty.control.ok("query-named-block-nodes", json!({}));
    assert_eq!(nodes[0]["encrypted"], json!(true));
    let uri = empty.nbd();
    empty.export("x", "e", "nbd", json!({"name": "x"}));
    crate::qemu_io(&uri("x"), &["write -P 0x5a 64k 128k", "write -P 0x33 3M 1M", "flush"])
        .expect("written");
    empty.control.ok("block-export-del", json!({"id": "x"}));
    // The secret opens: it is not needed afterwards.
    empty.control.ok("object-del", json!({"id": "s"}));
    empty.control.ok("blockdev-del", json!({"node-name": "e"}));
    holds(
        empty.dir.path(),
        "e",
        &["read -P 0x5a 64k 128k", "read -P 0x33 3M 1M", "read -P 0 0 64k"],
    );
    empty.server.stop();
}

#[test]
fn what_does_not_open_an_encrypted_image_is_told() {
    let mut empty = place();
    make(&empty, "e", &[]);
    fs::write(empty.path("wrong"), "hunter3").expect("a key");
    let wrong = json!({"qom-type": "secret", "id": "w", "file": empty.text("wrong")});
    empty.control.ok("object-add", wrong);
    let mut make = std::process::Command::new("qemu-img");
    crate::ok(make.args(["create", "-q", "-f", "qcow2"]).arg(empty.path("p")).arg("4M"));
    let with = |encrypt: Value| {
        let mut node = node("e", "qcow2", &empty.path("e"));
        node["encrypt"] = encrypt;
        node
    };
    let image = empty.text("e");
    for (asked, said) in [
        (node("e", "qcow2", &empty.path("e")), &*image),
        (with(json!({"format": "luks", "key-secret": "w"})), &image),
        (with(json!({"format": "luks", "key-secret": "x"})), "No secret with id 'x'"),
        (with(json!({"format": "luks"})), "'encrypt.key-secret' is missing"),
        (with(json!({"key-secret": "s"})), "'encrypt.format' is missing"),
        (
            with(json!({"format": "aes", "key-secret": "s"})),
            "'encrypt.format' does not accept value 'aes'",
        ),
        (with(json!({"format": "luks", "key-secret": "s", "x": 1})), "'encrypt.x' is unexpected"),
        (sealed(&empty, "p"), "No encryption in image header"),
    ] {
        let error = empty.control.call("blockdev-add", asked.clone()).expect_err("it cannot be");
        assert!(error.contains(said), "{asked}: {error}");
    }
    assert_eq!(empty.control.ok("query-named-block-nodes", json!({})), json!([]));
    // The schema says the same.
    let schema = empty.control.ok("query-qmp-schema", json!({}));
    let of = |name: &str| {
        let all = schema.as_array().expect("types").iter();
        all.clone().find(|one| one["name"] == name).expect(name).clone()
    };
    let member = |of: &Value, name: &str| {
        let all = of["members"].as_array().expect("members").iter();
        all.clone().find(|one| one["name"] == name).expect(name)["type"].clone()
    };
    let encrypt = member(&of("Qcow2Options"), "encrypt");
    let encrypt = of(encrypt.as_str().expect("a type"));
    assert_eq!(encrypt["variants"][0]["case"], "luks");
    let luks = of(encrypt["variants"][0]["type"].as_str().expect("a type"));
    assert_eq!(member(&luks, "key-secret"), "str");
    empty.server.stop();
}

/// An overlay and the encrypted image that it names: one secret for both, or each its own, by nodes.
#[test]
fn an_encrypted_image_below_is_opened_too() {
    let mut empty = place();
    make(&empty, "base", &[]);
    let image = described(empty.dir.path(), "base");
    let write = ["--image-opts", &image, "-c", "write -P 0x5a 0 1M"];
    qemu(empty.dir.path(), "qemu-io", &write).expect("written");
    make(&empty, "over", &["-b", &empty.text("base"), "-F", "qcow2"]);
    let mut over = sealed(&empty, "over");
    over["__ringtap_backing"] = json!([empty.text("base")]);
    let uri = empty.nbd();
    empty.control.ok("blockdev-add", over);
    empty.export("x", "over", "nbd", json!({"name": "x"}));
    crate::qemu_io(&uri("x"), &["read -P 0x5a 0 1M", "write -P 0x33 1M 1M"]).expect("it is there");
    empty.control.ok("block-export-del", json!({"id": "x"}));
    empty.control.ok("blockdev-del", json!({"node-name": "over"}));

    let mut base = sealed(&empty, "base");
    base["read-only"] = true.into();
    empty.control.ok("blockdev-add", base);
    let mut over = sealed(&empty, "over");
    over["backing"] = "base".into();
    empty.control.ok("blockdev-add", over);
    empty.export("x", "over", "nbd", json!({"name": "x"}));
    crate::qemu_io(&uri("x"), &["read -P 0x5a 0 1M", "read -P 0x33 1M 1M"]).expect("it is there");
    empty.server.stop();
}

#[test]
fn an_encrypted_image_is_made_and_is_the_target_of_a_mirror_and_a_backup() {
    let mut empty = place();
    empty.add("a", "raw", "4M");
    let uri = empty.nbd();
    empty.export("x", "a", "nbd", json!({"name": "x"}));
    crate::qemu_io(&uri("x"), &["write -P 0x5a 1M 1M", "write -P 0x33 2M 64k"]).expect("written");
    for name in ["copy", "moved"] {
        let path = empty.text(name);
        let file = json!({"driver": "file", "filename": path});
        let made = json!({"driver": "file", "filename": path, "size": 0});
        let encrypt = json!({"format": "luks", "key-secret": "s", "iter-time": 10});
        let image = json!({"driver": "qcow2", "file": file, "size": 4 << 20, "encrypt": encrypt});
        for options in [made, image] {
            empty.control.ok("blockdev-create", json!({"job-id": "make", "options": options}));
            assert_eq!(empty.over("make"), Value::Null);
        }
        empty.control.ok("blockdev-add", sealed(&empty, name));
    }
    let backup = json!({"job-id": "b", "device": "a", "target": "copy", "sync": "full", "auto-dismiss": false});
    empty.control.ok("blockdev-backup", backup);
    assert_eq!(empty.over("b"), Value::Null);
    empty.control.ok("blockdev-del", json!({"node-name": "copy"}));
    let same = ["read -P 0 0 1M", "read -P 0x5a 1M 1M", "read -P 0x33 2M 64k", "read -P 0 3M 1M"];
    holds(empty.dir.path(), "copy", &same);

    let mirror = json!({"job-id": "m", "device": "a", "target": "moved", "sync": "full", "auto-dismiss": false});
    empty.control.ok("blockdev-mirror", mirror);
    while empty.control.event().0 != "BLOCK_JOB_READY" {}
    empty.control.ok("job-complete", json!({"id": "m"}));
    assert_eq!(empty.over("m"), Value::Null);
    crate::qemu_io(&uri("x"), &["read -P 0x5a 1M 1M", "write -P 0x33 3M 64k", "flush"])
        .expect("it goes on there");
    let Empty { dir, server, .. } = empty;
    server.stop();
    holds(
        dir.path(),
        "moved",
        &["read -P 0x5a 1M 1M", "read -P 0x33 2M 64k", "read -P 0x33 3M 64k"],
    );
}

impl Empty {
    /// Wait until a job has ended, and forget it; why it failed.
    fn over(&mut self, id: &str) -> Value {
        loop {
            let (name, told) = self.control.event();
            if name == "JOB_STATUS_CHANGE" && told["id"] == id && told["status"] == "concluded" {
                break;
            }
        }
        let jobs = self.control.ok("query-jobs", json!({}));
        let job = jobs.as_array().and_then(|jobs| jobs.iter().find(|job| job["id"] == id));
        let error = job.expect("the job")["error"].clone();
        self.control.ok("job-dismiss", json!({"id": id}));
        error
    }
}

#[test]
fn people_add_encrypted_images_and_copy_disks_into_them() {
    let empty = place();
    for name in ["e", "copy", "moved"] {
        make(&empty, name, &[]);
    }
    let secret = format!("file:{}", empty.text("key"));
    let [image, copy, moved] = ["e", "copy", "moved"].map(|name| empty.text(name));
    let nbd = format!("unix:{}", empty.text("nbd"));
    let add = ["add", &image, "-f", "qcow2", "--node-name", "e", "--secret", &secret];
    let added = empty.said(&[&add[..], &["--nbd", "e", "--nbd-server", &nbd]].concat());
    assert!(added.starts_with("e: qcow2, 4194304 bytes, writable"), "{added}");
    let uri = format!("nbd+unix:///e?socket={}", empty.text("nbd"));
    crate::qemu_io(&uri, &["write -P 0x5a 0 1M"]).expect("written");
    let (status, error) = empty.refused(&["mirror", "e", &moved, "-f", "luks"]);
    assert!(status == Some(2) && error.contains("--target-secret"), "{status:?} {error}");
    let raw = ["mirror", "e", &moved, "-f", "raw", "--target-secret", &secret];
    let (status, error) = empty.refused(&raw);
    assert!(status == Some(2) && error.contains("luks and qcow2"), "{status:?} {error}");
    empty.said(&["backup", "e", &copy, "-f", "qcow2", "--target-secret", &secret]);
    empty.said(&["mirror", "e", &moved, "-f", "qcow2", "--target-secret", &secret]);
    crate::qemu_io(&uri, &["write -P 0x33 1M 1M", "flush"]).expect("written");
    let Empty { dir, server, .. } = empty;
    server.stop();
    holds(dir.path(), "e", &["read -P 0x5a 0 1M", "read -P 0 1M 1M"]);
    holds(dir.path(), "copy", &["read -P 0x5a 0 1M", "read -P 0 1M 1M"]);
    holds(dir.path(), "moved", &["read -P 0x5a 0 1M", "read -P 0x33 1M 1M"]);
}
