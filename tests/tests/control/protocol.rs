//! The protocol itself: what it is to friends, and to others.

use std::io::Write;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::PathBuf;
use std::process::Command;

use ringtap_tests::{Control, Server, ringtap};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{Empty, ok};

/// A server of one disk of 1 MiB that holds nothing.
fn server() -> (TempDir, PathBuf, Server) {
    let dir = TempDir::new().expect("a folder");
    let path = dir.path().join("control");
    let (control, nbd) = (format!("unix:{}", path.display()), dir.path().join("nbd"));
    let nbd = format!("unix:{}", nbd.display());
    let server = Server::start(["null:1M", "--nbd", &nbd, "--control", &control]);
    (dir, path, server)
}

fn error(value: Option<Value>) -> (String, String) {
    let value = value.expect("a reply");
    let text = |key: &str| value["error"][key].as_str().unwrap_or_default().to_owned();
    (text("class"), text("desc"))
}

/// Nothing more is said but which exports go with the server.
fn closes(control: &mut Control) {
    while let Some(said) = control.hear() {
        assert_eq!(said["event"], "BLOCK_EXPORT_DELETED", "{said}");
    }
}

#[test]
fn a_client_negotiates_before_anything_else() {
    let (_dir, path, server) = server();
    let found = std::fs::metadata(&path).expect("the socket");
    assert!(found.file_type().is_socket());
    assert_eq!(found.permissions().mode() & 0o777, 0o600);
    let mut control = Control::connect(&path);
    let greeting = control.hear().expect("a greeting");
    let package = greeting["QMP"]["version"]["package"].as_str().expect("its name");
    assert!(package.starts_with("ringtap "), "{greeting}");
    assert_eq!(greeting["QMP"]["capabilities"], json!([]));
    let said = control.call("query-version", json!({})).expect_err("too early");
    assert!(said.starts_with("CommandNotFound") && said.contains("qmp_capabilities"), "{said}");
    assert!(control.call("qmp_capabilities", json!({"enable": ["oob"]})).is_err());
    control.ok("qmp_capabilities", json!({"enable": []}));
    assert!(
        control
            .call("qmp_capabilities", json!({}))
            .expect_err("twice")
            .starts_with("CommandNotFound")
    );
    assert_eq!(control.ok("query-version", json!({})), greeting["QMP"]["version"]);
    control.ok("quit", json!({}));
    closes(&mut control);
    server.ends();
    assert!(!path.exists(), "the socket is removed");
}

#[test]
fn what_it_says_of_its_commands_is_so() {
    let (_dir, path, _server) = server();
    let mut control = Control::open(&path);
    let names = control.ok("query-commands", json!({}));
    let names: Vec<&str> =
        names.as_array().expect("a list").iter().filter_map(|it| it["name"].as_str()).collect();
    let schema = control.ok("query-qmp-schema", json!({}));
    let schema = schema.as_array().expect("a list");
    let of = |name: &str| schema.iter().find(|one| one["name"] == name).expect(name);
    for name in &names {
        let arguments = of(of(name)["arg-type"].as_str().expect("a type"));
        let members = arguments["members"].as_array().expect("members");
        // None takes what is not there.
        let mut wrong = json!({"no-such-thing": 1});
        let required = members.iter().filter(|member| member.get("default").is_none());
        let required: Vec<&str> = required.filter_map(|member| member["name"].as_str()).collect();
        let said = control.call(name, wrong.clone()).expect_err(name);
        match required.first() {
            _ if *name == "qmp_capabilities" => {
                assert!(said.starts_with("CommandNotFound"), "{said}")
            }
            Some(_) => assert!(
                required.iter().any(|one| said.contains(&format!("Parameter '{one}' is missing"))),
                "{name}: {said}"
            ),
            None => assert!(said.contains("Parameter 'no-such-thing' is unexpected"), "{said}"),
        }
        // Each member is one that it looks at.
        for member in members {
            let member = member["name"].as_str().expect("a name");
            wrong = json!({ member: {"no": "value"} });
            let said = control.call(name, wrong).expect_err(name);
            assert!(!said.contains(&format!("'{member}' is unexpected")), "{name}: {said}");
        }
    }
    assert!(names.contains(&"blockdev-add") && names.contains(&"query-block-exports"));
    let event = of("BLOCK_EXPORT_DELETED");
    assert_eq!(event["meta-type"], "event");
}

#[test]
fn replies_come_in_order_with_their_ids_and_others_are_told_apart() {
    let (_dir, path, _server) = server();
    let (mut one, mut other) = (Control::open(&path), Control::open(&path));
    // Three commands in one piece, without a line between them, the last in 'single' quotes and cut in two.
    one.send("{\"execute\":\"query-version\",\"id\":1}{\"execute\":\"nope\",\"id\":{\"a\":[null]}}{'execute'");
    assert_eq!(one.reply().expect("a reply")["id"], 1);
    let reply = one.reply().expect("a reply");
    assert_eq!(reply["id"], json!({"a": [null]}));
    assert_eq!(
        error(Some(reply)),
        ("CommandNotFound".into(), "The command nope has not been found".into())
    );
    other.ok("query-commands", json!({}));
    one.send(": 'query-version'}");
    let reply = one.reply().expect("a reply");
    assert!(reply.get("id").is_none() && reply["return"].is_object(), "{reply}");
    // Who says no more still has its replies.
    other.send("{\"execute\":\"query-version\"}{\"execute\":\"query-block\",\"id\":2}");
    other.end();
    assert!(other.reply().expect("a reply")["return"].is_object());
    assert_eq!(other.reply().expect("a reply")["id"], 2);
    assert!(other.hear().is_none());
    one.ok("query-version", json!({}));
}

#[test]
fn nonsense_harms_nobody() {
    let (_dir, path, server) = server();
    let mut friend = Control::open(&path);
    let mut control = Control::open(&path);
    for (wrong, said) in [
        (&b"[1]"[..], "must be a JSON object"),
        (b"3 ", "must be a JSON object"),
        (b"}", "expecting value"),
        (b"{]", "invalid value"),
        (b"{\"execute\": \"\xc3\x28\"}", "invalid value"),
        (b"{\"execute\": \"cut off \x01", "stray byte 0x01"),
        (b"\xff", "stray byte 0xff"),
        (b"{\"execute\": 1}", "'execute' must be a string"),
        (b"{\"execute\": \"quit\", \"arguments\": []}", "'arguments' must be an object"),
        (b"{\"exec-oob\": \"quit\"}", "'exec-oob' is unexpected"),
        (b"{\"execute\": \"quit\", \"arguments\": {\"a\": 1}}", "Parameter 'a' is unexpected"),
    ] {
        control.send(wrong);
        let (class, text) = error(control.reply());
        assert!(class == "GenericError" && text.contains(said), "{said}: {text}");
    }
    let deep = ["{\"a\":".repeat(100_000), "1".into(), "}".repeat(100_000)].concat();
    control.send(deep);
    assert!(error(control.reply()).1.contains("nesting depth"));
    control.send(["{\"id\":\"", &"x".repeat(8 << 20), "\"}"].concat());
    assert!(error(control.reply()).1.contains("longer than"));
    control.ok("query-version", json!({}));
    // One that goes in the middle of a command, and one with a value that never ends.
    let mut cut = Control::open(&path);
    cut.send("{\"execute\": \"query-");
    drop(cut);
    let mut endless = Control::open(&path);
    endless.send(vec![b'['; 4 << 20]);
    friend.ok("query-block", json!({}));
    drop(endless);
    // More clients than it takes: the others are closed at once.
    let many: Vec<Control> = (0..80).map(|_| Control::connect(&path)).collect();
    friend.ok("query-block", json!({}));
    drop(many);
    server.stop();
}

/// The memory that the server has, in KiB.
fn memory(server: &Server) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.pid()));
    let status = status.expect("it is there");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("VmRSS");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

#[test]
fn who_does_not_read_is_waited_for_by_nobody() {
    let (_dir, path, server) = server();
    let mut deaf = Control::open(&path);
    let mut friend = Control::open(&path);
    friend.ok("query-qmp-schema", json!({}));
    let before = memory(&server);
    // Its replies fill what the kernel holds for it, and then it is asked for no more commands.
    let command = "{\"execute\":\"query-qmp-schema\"}".repeat(200);
    let stream = deaf.stream();
    stream.set_nonblocking(true).expect("a socket");
    let mut full = || (0..1000).any(|_| stream.write(command.as_bytes()).is_err());
    assert!(full(), "the server takes commands of one that takes no replies");
    for _ in 0..500 {
        friend.ok("query-qmp-schema", json!({}));
    }
    assert!(full() && stream.write(command.as_bytes()).is_err(), "it goes on taking them");
    let more = memory(&server).saturating_sub(before);
    assert!(more < 6 << 10, "{more} KiB more for one that does not read");
    friend.ok("quit", json!({}));
    closes(&mut friend);
    server.ends();
}

/// What is told of disks, jobs and wishes is so.
#[test]
fn what_is_told_is_true() {
    let mut empty = Empty::new();
    let key = empty.path("key");
    std::fs::write(&key, "secret").expect("a file");
    let (secret, image) = (format!("file:{}", key.display()), empty.path("safe"));
    let sealed = ["-o", "encrypt.format=luks,encrypt.iter-time=10", "--target-secret", &secret];
    let make = ["create", "-q", "-f", "qcow2"];
    ok(Command::new(ringtap()).args(make).args(sealed).arg(&image).arg("1M"));
    let (at, disks) = (format!("unix:{}", empty.text("other")), empty.text("disks"));
    std::fs::create_dir(empty.path("disks")).expect("a folder");
    let text = format!(
        "image = '{}'\nformat = 'qcow2'\nsecret = '{secret}'\nnode-name = 'safe'\n",
        image.display()
    );
    std::fs::write(empty.path("disks/safe.toml"), text).expect("a file");
    let other = Server::daemon(["--control", &at, "--disks", &disks]);
    let mut control = Control::open(&empty.path("other"));
    let nodes = control.ok("query-named-block-nodes", json!({}));
    assert_eq!((&nodes[0]["encrypted"], &nodes[0]["active"]), (&json!(true), &json!(true)));
    other.stop();
    empty.add("a", "raw", "1M");
    empty.add("b", "raw", "1M");
    let nodes = empty.control.ok("query-named-block-nodes", json!({}));
    assert_eq!(nodes[0]["encrypted"], json!(false));
    let mirror =
        json!({"job-id": "j", "device": "a", "target": "b", "sync": "full", "speed": 7 << 20});
    empty.control.ok("blockdev-mirror", mirror);
    let ready = loop {
        let (name, data) = empty.control.event();
        if name == "BLOCK_JOB_READY" {
            break data;
        }
    };
    assert_eq!(ready["speed"], json!(7 << 20), "{ready}");
    empty.control.ok("block-job-cancel", json!({"device": "j", "force": true}));
    let wait = json!({"timeout": u64::MAX});
    let why = empty.control.call("__ringtap_upgrade", wait).expect_err("never");
    assert!(why.contains("at most 86400"), "{why}");
}
