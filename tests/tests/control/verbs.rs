//! The verbs of people, which speak to the control socket.

use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::process::{Command, Output, Stdio};
use std::thread;

use ringtap_tests::{program, ringtap};
use serde_json::{Value, json};

use crate::{Empty, nbd_size, ok};

impl Empty {
    fn disk(&self, args: &[&str]) -> Output {
        let control = format!("unix:{}", self.text("control"));
        let args = ["disk", "--control", &control].into_iter().chain(args.iter().copied());
        program(ringtap().to_str().expect("a path"), "ringtap", args)
    }

    pub(crate) fn said(&self, args: &[&str]) -> String {
        let output = self.disk(args);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        text
    }

    pub(crate) fn refused(&self, args: &[&str]) -> (Option<i32>, String) {
        let output = self.disk(args);
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    }
}

#[test]
fn people_add_look_at_resize_and_remove_disks() {
    let empty = Empty::new();
    let (image, base) = (empty.text("a"), empty.text("base"));
    let mut make = std::process::Command::new(ringtap());
    ok(make.args(["create", "-q", "-f", "qcow2", &base, "1M"]));
    let mut make = std::process::Command::new(ringtap());
    ok(make.args(["create", "-q", "-f", "qcow2", "-b", &base, "-F", "qcow2", &empty.text("over")]));
    let mut make = std::process::Command::new(ringtap());
    ok(make.args(["create", "-q", &image, "1M"]));
    assert_eq!(empty.said(&["list"]), "");
    let (nbd, vhost) = (format!("unix:{}", empty.text("nbd")), empty.text("v"));
    let added = empty.said(&[
        "add",
        &image,
        "-f",
        "raw",
        "--node-name",
        "a",
        "--vhost-user",
        &vhost,
        "--nbd",
        "x",
        "--nbd-server",
        &nbd,
    ]);
    assert!(added.starts_with(&format!("a: raw, 1048576 bytes, writable, {image}\n")), "{added}");
    assert!(added.contains(&format!("  a-vhost0: vhost-user-blk at {vhost}\n")), "{added}");
    let uri = format!("nbd+unix:///x?socket={}", empty.text("nbd"));
    assert!(added.contains(&format!("  a-nbd0: nbd at {uri}\n")), "{added}");
    assert_eq!(nbd_size(&uri), Ok(1 << 20));
    let over =
        empty.said(&["add", &empty.text("over"), "-f", "qcow2", "--node-name", "o", "--read-only"]);
    assert!(
        over.contains("read-only") && over.contains(&format!("  on {base}: qcow2\n")),
        "{over}"
    );
    empty.said(&["resize", "a", "2M"]);
    empty.said(&["resize", "a", "+1M"]);
    assert_eq!(nbd_size(&uri), Ok(3 << 20));
    let info: Value =
        serde_json::from_str(&empty.said(&["info", "a", "--output", "json"])).expect("JSON");
    assert_eq!(
        (&info["image"]["virtual-size"], info["exports"].as_array().map(Vec::len)),
        (&Value::from(3 << 20), Some(2))
    );
    let all: Value =
        serde_json::from_str(&empty.said(&["list", "--output", "json"])).expect("JSON");
    assert_eq!(all.as_array().map(Vec::len), Some(2));
    for (args, code, said) in [
        (&["info", "b"][..], 1, "no disk is called \"b\""),
        (&["resize", "a", "1M"], 1, "not made smaller"),
        (&["resize", "a", "much"], 2, "like 512, 64k, 10G"),
        (
            &["add", &image, "-f", "raw", "--node-name", "b"],
            1,
            "is the image of the node 'a' already",
        ),
        (&["add", &image, "-f", "luks", "--node-name", "b"], 2, "--secret file:PATH"),
        (&["add", &image, "--node-name", "b"], 2, "--format"),
        (&["remove", "b"], 1, "no disk is called \"b\""),
    ] {
        let (status, error) = empty.refused(args);
        assert!(status == Some(code) && error.contains(said), "{args:?}: {status:?} {error}");
    }
    let third = empty.text("third");
    let mut make = std::process::Command::new(ringtap());
    ok(make.args(["create", "-q", "-f", "qcow2", &third, "1M"]));
    // All of it, or nothing.
    let (status, error) =
        empty.refused(&["add", &third, "-f", "qcow2", "--node-name", "b", "--vhost-user", &vhost]);
    assert!(status == Some(1) && error.contains("in use"), "{status:?} {error}");
    assert!(!empty.said(&["list"]).contains("b: "), "it is taken back");
    empty.said(&["remove", "a"]);
    empty.said(&["remove", "o"]);
    assert_eq!(empty.said(&["list"]), "");
    empty.server.stop();
}

#[test]
fn a_disk_for_tests_needs_no_image() {
    let empty = Empty::new();
    let nbd = format!("unix:{}", empty.text("nbd"));
    let added =
        empty.said(&["add", "null:16M", "--node-name", "n", "--nbd", "n", "--nbd-server", &nbd]);
    assert!(added.starts_with("n: null-co, 16777216 bytes, writable"), "{added}");
    let uri = format!("nbd+unix:///n?socket={}", empty.text("nbd"));
    crate::qemu_io(&uri, &["write -P 1 0 1M", "read -P 0 0 1M"]).expect("it keeps nothing");
    for (args, said) in [
        (&["null:16M", "-f", "raw"][..], "no format"),
        (&["null:many"], "null:many"),
        (&["/nowhere/x"], "-f"),
    ] {
        let (status, error) = empty.refused(&[&["add", "--node-name", "m"], args].concat());
        assert!(status == Some(2) && error.contains(said), "{status:?} {error}");
    }
    empty.said(&["remove", "n", "--force"]);
    empty.server.stop();
}

#[test]
fn a_server_that_is_not_there_is_told_of() {
    let args = ["disk", "list", "--control", "unix:/nowhere/control"];
    let output = program(ringtap().to_str().expect("a path"), "ringtap", args);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1));
    assert!(said.contains("/nowhere/control") && said.contains("ringtap daemon"), "{said}");
}

#[test]
fn an_encrypted_disk_is_opened_by_a_secret_of_a_file() {
    let empty = Empty::new();
    let (image, key, wrong) = (empty.text("a"), empty.text("key"), empty.text("wrong"));
    for (path, secret) in [(&key, "hunter2"), (&wrong, "hunter3")] {
        std::fs::write(path, secret).expect("a key file");
    }
    let mut make = std::process::Command::new(ringtap());
    let secret = format!("file:{key}");
    ok(make
        .args(["create", "-q", "-f", "luks", "--target-secret", &secret, "-o", "iter-time=10"])
        .args([&image, "1M"]));
    let add = ["add", &image, "-f", "luks", "--node-name", "a", "--secret"];
    let (status, error) = empty.refused(&[&add[..], &[&format!("file:{wrong}")]].concat());
    assert!(status == Some(1) && error.contains(&image), "{status:?} {error}");
    let (status, error) = empty.refused(&[&add[..], &["credential:x"]].concat());
    assert!(status == Some(2) && error.contains("file:PATH"), "{status:?} {error}");
    let added = empty.said(&[&add[..], &[&secret]].concat());
    assert!(added.starts_with("a: luks, 1048576 bytes"), "{added}");
    let mut control = ringtap_tests::Control::open(&empty.path("control"));
    let said = control.call("object-del", serde_json::json!({"id": "ringtap-disk-a"}));
    assert!(said.expect_err("it is forgotten").contains("not found"));
    empty.server.stop();
}

/// What verbs that change something print for programs: one object, and nothing else on stdout.
#[test]
fn verbs_that_change_a_disk_say_in_json_what_has_become_of_it() {
    let mut empty = Empty::new();
    empty.add("a", "raw", "1M");
    let over = empty.text("over");
    empty.said(&["snapshot", "a", &over]);
    let [copy, moved, back] = ["copy", "moved", "back"].map(|name| empty.text(name));
    for file in [&copy, &moved, &back] {
        let mut make = Command::new("qemu-img");
        ok(make.args(["create", "-q", "-f", "qcow2", file, "2M"]));
    }
    let told = |args: &[&str]| -> Value {
        let said = empty.said(&[args, &["--output", "json"]].concat());
        assert_eq!(said.lines().count(), 1, "{args:?}: {said}");
        serde_json::from_str(&said).unwrap_or_else(|error| panic!("{args:?}: {said}: {error}"))
    };
    let members = |told: &Value, wanted: Value| {
        for (key, value) in wanted.as_object().expect("members") {
            assert_eq!(&told[key], value, "{key} of {told}");
        }
    };
    let size = |mib: u64| Value::from(mib << 20);
    let stopped = told(&["pause", "a"]);
    members(&stopped, json!({"node-name": "a", "paused": true, "waiting-for-space": 0}));
    members(&told(&["resume", "a"]), json!({"node-name": "a", "paused": false}));
    let committed = told(&["commit", "a"]);
    let ended = json!({"node-name": "a", "job-id": "commit-a", "status": "concluded"});
    members(&committed, ended);
    members(&committed, json!({"file": empty.text("a"), "size": size(1)}));
    assert!(committed["bytes"].is_u64() && committed["pause-ns"].is_u64(), "{committed}");
    members(&told(&["resize", "a", "+1M"]), json!({"node-name": "a", "size": size(2)}));

    let saved = told(&["backup", "a", &copy, "-f", "qcow2", "--checkpoint", "c"]);
    let ended = json!({"node-name": "a", "job-id": "backup-a", "status": "concluded"});
    members(&saved, ended);
    members(&saved, json!({"file": copy, "checkpoint": "c", "bytes": size(2)}));
    let copied = told(&["mirror", "a", &back, "-f", "qcow2", "--copy"]);
    members(&copied, json!({"job-id": "mirror-a", "file": back, "goes-on-there": false}));
    let begun = told(&["mirror", "a", &moved, "-f", "qcow2", "--no-wait"]);
    members(&begun, json!({"job-id": "mirror-a", "status": "running", "file": moved}));
    assert_eq!(begun["bytes"], Value::Null, "nobody has waited");
    let control = format!("unix:{}", empty.text("control"));
    ok(Command::new(ringtap()).args(["job", "--control", &control, "wait", "mirror-a"]));
    let gone = told(&["mirror", "a", &back, "-f", "qcow2"]);
    let ended = json!({"status": "concluded", "file": back, "goes-on-there": true});
    members(&gone, ended);
    // A stream of a disk with nothing below is refused, and says so on stderr alone.
    let (status, error) = empty.refused(&["stream", "x", "--output", "json"]);
    assert!(status == Some(1) && error.contains('x'), "{status:?} {error}");
    empty.said(&["snapshot", "a", &empty.text("top")]);
    let brought = told(&["stream", "a"]);
    members(&brought, json!({"job-id": "stream-a", "file": empty.text("top"), "size": size(2)}));
    empty.server.stop();
}

/// A server that goes away between two questions is a failure, and a reader of ours that does is none.
#[test]
fn who_waits_for_a_job_of_a_server_that_ends_fails() {
    let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
    let path = dir.path().join("control");
    let listener = UnixListener::bind(&path).expect("a socket");
    let ends = thread::spawn(move || {
        let mut client = listener.accept().expect("a client").0;
        let job = "{\"id\":\"j\",\"type\":\"backup\",\"status\":\"running\",\"current-progress\":1,\"total-progress\":9}";
        for said in ["{\"QMP\":{}}", "{\"return\":{}}", &format!("{{\"return\":[{job}]}}")] {
            client.write_all(said.as_bytes()).expect("said");
            if !said.contains("QMP") {
                continue;
            }
            // What it asks for is known: its capabilities, and its jobs.
            let mut asked = String::new();
            while !asked.contains("qmp_capabilities") {
                let mut some = [0; 512];
                let len = client.read(&mut some).expect("asked");
                asked.push_str(&String::from_utf8_lossy(&some[..len]));
            }
        }
        // Its next question finds nobody.
        let mut asked = [0; 512];
        let _ = client.read(&mut asked);
    });
    let control = format!("unix:{}", path.display());
    let mut wait = Command::new(ringtap());
    let wait = wait.args(["job", "--control", &control, "wait", "j"]).stdin(Stdio::null());
    let end = wait.output().expect("it runs");
    let said = String::from_utf8_lossy(&end.stderr);
    assert_eq!(end.status.code(), Some(1), "{said}");
    assert!(said.contains(&path.display().to_string()), "{said}");
    ends.join().expect("the server");

    let mut reads = Command::new("sh");
    let line =
        "trap '' PIPE; for try in 1 2 3 4 5; do \"$0\" serve --help; echo $? >&2; done | true";
    let end = reads.args(["-c", line]).arg(ringtap()).output().expect("it runs");
    let said = String::from_utf8_lossy(&end.stderr);
    assert_eq!(said.trim(), "0\n0\n0\n0\n0", "{said}");
}
