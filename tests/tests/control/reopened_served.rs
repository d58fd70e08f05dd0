//! Nodes opened otherwise while clients have them.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread::{JoinHandle, sleep, spawn};
use std::time::{Duration, Instant};

use ringtap_tests::{is_well, listens, load, ok, patience, program};
use serde_json::{Value, json};

use crate::{Control, Empty, Server, node, qemu_io, vhost};

static STOP: [AtomicBool; 3] = [const { AtomicBool::new(false) }; 3];

/// Writes and reads what it has written, and `more`, until it is stopped: how often.
fn guest(of: usize, uri: &str, more: &'static [&'static str]) -> JoinHandle<u32> {
    let uri = uri.to_owned();
    spawn(move || {
        let mut rounds = 0;
        while !STOP[of].load(SeqCst) {
            let write = format!("write -P {} 4M 1M", rounds % 250 + 1);
            let read = write.replace("write", "read");
            let mut all = vec![&*write, "flush", &read, "discard 6M 1M", "write -z -u 5M 1M"];
            all.extend(["write -P 9 5M 128k", "read -P 9 5M 128k", "read -P 0 5376k 512k"]);
            all.extend(more);
            qemu_io(&uri, &all).expect("what it wrote, and what was there");
            rounds += 1;
        }
        rounds
    })
}

fn is_unharmed(of: usize, guest: JoinHandle<u32>) {
    STOP[of].store(true, SeqCst);
    assert!(guest.join().expect("a guest that was not harmed") > 0);
}

/// That a client who may only read finds that there.
fn reads(uri: &str, commands: &[&str]) -> Result<(), String> {
    let options = format!("driver=nbd,{},read-only=on", crate::options(uri));
    let commands = commands.iter().flat_map(|command| ["-c", command]);
    let args = ["-r", "--image-opts", &options].into_iter().chain(commands);
    let output = program("qemu-io", "qemu-utils", args);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() && !said.contains("failed") { Ok(()) } else { Err(said) }
}

impl Empty {
    fn otherwise(&mut self, name: &str, format: &str, more: Value) -> Result<Value, String> {
        let mut open = node(name, format, &self.path(name));
        open["file"].as_object_mut().expect("a file").remove("cache");
        for (key, value) in more.as_object().expect("options") {
            open[key] = value.clone();
        }
        self.control.call("blockdev-reopen", json!({ "options": [open] }))
    }

    fn told_of(&mut self, name: &str) -> Value {
        let all = self.control.ok("query-named-block-nodes", json!({}));
        let mut all = all.as_array().expect("a list").iter();
        all.find(|one| one["node-name"] == name).expect(name).clone()
    }

    /// The flags of each descriptor by which the server has the image open for reading or writing.
    fn flags(&self, name: &str) -> Vec<u32> {
        let (proc, path) = (format!("/proc/{}", self.server.pid()), self.path(name));
        let all = fs::read_dir(format!("{proc}/fd")).expect("descriptors").flatten();
        let is_it = |number: &String| {
            fs::read_link(format!("{proc}/fd/{number}")).is_ok_and(|to| to == path)
        };
        let flags = |number: String| {
            let text = fs::read_to_string(format!("{proc}/fdinfo/{number}")).ok()?;
            let line = text.lines().find_map(|line| line.strip_prefix("flags:"))?;
            u32::from_str_radix(line.trim(), 8).ok()
        };
        let numbers = all.map(|one| one.file_name().to_string_lossy().into_owned());
        let all = numbers.filter(is_it).filter_map(flags);
        all.filter(|flags| flags & libc::O_PATH as u32 == 0).collect()
    }

    fn is_direct(&self, name: &str) -> bool {
        self.flags(name).iter().any(|flags| flags & libc::O_DIRECT as u32 != 0)
    }

    fn is_open_for_writing(&self, name: &str) -> bool {
        self.flags(name).iter().any(|flags| flags & libc::O_ACCMODE as u32 == libc::O_RDWR as u32)
    }
}

#[test]
fn caching_changes_under_guests_that_write() {
    let mut empty = Empty::new();
    empty.add("q", "qcow2", "32M");
    empty.add("r", "raw", "8M");
    let uri = empty.nbd();
    let socket = empty.path("vhost");
    empty.export("q", "q", "vhost-user-blk", vhost(&socket));
    empty.export("r", "r", "nbd", json!({}));
    let mounted = empty.path("mounted");
    fs::write(&mounted, "").expect("a file");
    empty.export("f", "r", "fuse", json!({ "mountpoint": mounted, "writable": false }));
    let (load, guest) = (load(socket.display().to_string(), "8"), guest(0, &uri("r"), &[]));
    let before = empty.exports();
    for _ in 0..6 {
        for (direct, no_flush, discard) in
            [(true, false, "unmap"), (false, false, "ignore"), (false, true, "unmap")]
        {
            for (name, format) in [("q", "qcow2"), ("r", "raw")] {
                let more = json!({ "discard": discard, "cache": { "direct": direct, "no-flush": no_flush } });
                assert_eq!(empty.otherwise(name, format, more), Ok(json!({})));
                let cache = &empty.told_of(name)["cache"];
                assert_eq!(cache["direct"], direct);
                assert_eq!(cache["no-flush"], no_flush);
            }
            assert_eq!(fs::metadata(&mounted).expect("a file").len(), 8 << 20);
        }
    }
    for (direct, flags) in [(true, true), (false, false)] {
        let more = json!({ "cache": { "direct": direct } });
        assert_eq!(empty.otherwise("r", "raw", more), Ok(json!({})));
        // Threads that rest let go of the former descriptor at their next request.
        while empty.is_direct("r") != flags {
            fs::read(&mounted).expect("read");
        }
    }
    assert_eq!(empty.exports(), before);
    let why = "GenericError: Read-only block node 'r' cannot support read-write users";
    assert_eq!(empty.otherwise("r", "raw", json!({ "read-only": true })), Err(why.to_owned()));
    is_unharmed(0, guest);
    is_well(load);
    let [q, r] = ["q", "r"].map(|name| empty.text(name));
    let written = fs::read(&mounted).expect("read");
    empty.control.ok("quit", json!({}));
    empty.server.ends();
    assert!(fs::read(r).expect("read") == written);
    ok("qemu-img", "qemu-utils", &["check", "-q", &q]);
}

#[test]
fn a_node_that_is_only_read_is_closed_to_writers_and_opened_again() {
    let mut empty = Empty::new();
    empty.add("q", "qcow2", "8M");
    let uri = empty.nbd();
    empty.export("w", "q", "nbd", json!({ "name": "w" }));
    qemu_io(&uri("w"), &["write -P 5 0 8M", "flush"]).expect("written");
    empty.control.ok("block-export-del", json!({ "id": "w" }));
    empty.export("r", "q", "nbd", json!({ "name": "r", "writable": false }));
    let bitmap = json!({ "node": "q", "name": "b", "persistent": true });
    empty.control.ok("block-dirty-bitmap-add", bitmap);
    let (stop, uri_r) = (&STOP[1], uri("r"));
    let reader = spawn(move || {
        let mut rounds = 0;
        while !stop.load(SeqCst) {
            reads(&uri_r, &["read -P 5 0 8M"]).expect("what was there");
            rounds += 1;
        }
        rounds
    });
    let may_read = |empty: &Empty| {
        let mut words = Command::new("qemu-io");
        words.args(["-r", "-f", "qcow2", "-c", "read 0 64k"]).arg(empty.path("q"));
        words.output().expect("qemu-io").status.success()
    };
    for _ in 0..5 {
        for read_only in [true, false] {
            let more = json!({ "read-only": read_only });
            assert_eq!(empty.otherwise("q", "qcow2", more), Ok(json!({})));
            assert_eq!(empty.told_of("q")["ro"], read_only);
            assert_eq!(may_read(&empty), read_only);
        }
        // It is no more to who was to read than it was.
        qemu_io(&uri("r"), &["write 0 1M"]).expect_err("only read");
    }
    assert_eq!(empty.otherwise("q", "qcow2", json!({ "read-only": true })), Ok(json!({})));
    // Where another program has it, it stays as it was.
    let mut other = Command::new("qemu-io");
    other.args(["-r", "-f", "qcow2"]).arg(empty.path("q"));
    let other = other.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let mut other = other.expect("qemu-io");
    let mut says = BufReader::new(other.stdout.take().expect("a pipe"));
    writeln!(other.stdin.as_mut().expect("a pipe"), "read 0 64k").expect("told");
    says.read_line(&mut String::new()).expect("it has it");
    let locked = empty.otherwise("q", "qcow2", json!({})).expect_err("another has it");
    assert!(locked.contains("has it open for reading"), "{locked}");
    assert_eq!(empty.told_of("q")["ro"], true);
    reads(&uri("r"), &["read -P 5 0 8M"]).expect("what was there");
    drop(other.stdin.take());
    other.wait().expect("it ends");
    while empty.is_open_for_writing("q") {
        reads(&uri("r"), &["read -P 5 0 8M"]).expect("what was there");
    }
    let writes =
        json!({ "type": "nbd", "id": "w", "node-name": "q", "name": "w", "writable": true });
    empty.control.call("block-export-add", writes.clone()).expect_err("read-only");
    assert_eq!(empty.otherwise("q", "qcow2", json!({})), Ok(json!({})));
    stop.store(true, SeqCst);
    assert!(reader.join().expect("a reader that was not harmed") > 0);
    empty.control.ok("block-export-add", writes);
    qemu_io(&uri("w"), &["write -P 6 1M 1M", "read -P 6 1M 1M"]).expect("written");
    qemu_io(&uri("r"), &["write 0 1M"]).expect_err("only read");
    // What is written is noted again.
    let told = empty.told_of("q");
    let bitmaps = told["dirty-bitmaps"].as_array().expect("bitmaps");
    assert_eq!(
        (&bitmaps[0]["name"], &bitmaps[0]["count"]),
        (&json!("b"), &json!(1 << 20)),
        "{told}"
    );
    let q = empty.text("q");
    empty.control.ok("quit", json!({}));
    empty.server.ends();
    ok("qemu-img", "qemu-utils", &["check", "-q", &q]);
}

#[test]
fn a_guest_reads_by_another_backing_node() {
    let mut empty = Empty::new();
    let make = |empty: &Empty, name: &str, below: Option<&str>, write: &str| {
        let path = empty.text(name);
        let mut words = vec!["create", "-q", "-f", "qcow2"];
        let below = below.map(|below| empty.text(below));
        if let Some(below) = &below {
            words.extend(["-b", below, "-F", "qcow2"]);
        }
        words.extend([&*path, "8M"]);
        ok("qemu-img", "qemu-utils", &words);
        ok("qemu-io", "qemu-utils", &["-f", "qcow2", "-c", write, &path]);
    };
    make(&empty, "a", None, "write -q -P 1 0 4M");
    make(&empty, "b", None, "write -q -P 2 0 4M");
    make(&empty, "m", Some("a"), "write -q -P 3 1M 1M");
    make(&empty, "t", Some("m"), "write -q -P 4 2M 1M");
    for (name, below) in [("a", None), ("b", None), ("m", Some("a")), ("t", Some("m"))] {
        let mut open = node(name, "qcow2", &empty.path(name));
        open["backing"] = below.map_or(Value::Null, Value::from);
        empty.control.ok("blockdev-add", open);
    }
    let uri = empty.nbd();
    empty.export("t", "t", "nbd", json!({}));
    // What lies above stays, whatever lies below.
    let guest = guest(2, &uri("t"), &["read -P 4 2M 1M"]);
    let reads = |pieces: [u8; 2]| {
        let all = [(pieces[0], "0 1M"), (pieces[1], "1M 1M")];
        let all = all.map(|(byte, at)| format!("read -P {byte} {at}"));
        qemu_io(&uri("t"), &[&all[0], &all[1], "read -P 4 2M 1M"]).expect("as it lies now");
    };
    for _ in 0..4 {
        reads([1, 3]);
        for (name, below, pieces) in [
            ("t", json!("b"), [2, 2]),
            ("t", Value::Null, [0, 0]),
            ("t", json!("a"), [1, 1]),
            ("t", json!("m"), [1, 3]),
            ("m", json!("b"), [2, 3]),
            ("m", Value::Null, [0, 3]),
            ("m", json!("a"), [1, 3]),
        ] {
            assert_eq!(empty.otherwise(name, "qcow2", json!({ "backing": below })), Ok(json!({})));
            reads(pieces);
        }
    }
    // Below a guest nobody writes.
    empty.export("b", "b", "nbd", json!({}));
    let why = "GenericError: Permission conflict on node 'b': it would be written to, and 't' lies upon it";
    assert_eq!(empty.otherwise("t", "qcow2", json!({ "backing": "b" })), Err(why.to_owned()));
    empty.control.ok("block-export-del", json!({ "id": "b" }));
    assert_eq!(empty.otherwise("t", "qcow2", json!({ "backing": "b" })), Ok(json!({})));
    let write = json!({ "id": "b", "node-name": "b", "type": "nbd", "writable": true });
    empty.control.call("block-export-add", write).expect_err("it is read");
    empty.control.call("blockdev-del", json!({ "node-name": "b" })).expect_err("it is read");
    empty.control.ok("blockdev-del", json!({ "node-name": "m" }));
    is_unharmed(2, guest);
    reads([2, 2]);
    let [t, m] = ["t", "m"].map(|name| empty.text(name));
    empty.control.ok("quit", json!({}));
    empty.server.ends();
    // It names what it did.
    let info = ok("qemu-img", "qemu-utils", &["info", "--output", "json", &t]);
    let info: Value = serde_json::from_str(&info).expect("JSON");
    assert_eq!(info["backing-filename"], m);
    ok("qemu-img", "qemu-utils", &["check", "-q", &t]);
}

#[test]
fn an_image_in_another_file_takes_the_place_of_one() {
    let mut empty = Empty::new();
    let uri = empty.nbd();
    for (name, byte, size) in [("r", 1, 8), ("s", 2, 8), ("small", 3, 4)] {
        fs::write(empty.path(name), vec![byte; size << 20]).expect("an image");
        let file = json!({ "driver": "file", "node-name": format!("{name}-file"), "filename": empty.path(name) });
        empty.control.ok("blockdev-add", file);
    }
    let image = |file: &str| json!({ "driver": "raw", "node-name": "r", "file": file });
    empty.control.ok("blockdev-add", image("r-file"));
    empty.export("e", "r", "nbd", json!({}));
    let into = |empty: &mut Empty, file: &str| {
        empty.control.call("blockdev-reopen", json!({ "options": [image(file)] }))
    };
    qemu_io(&uri("r"), &["read -P 1 0 8M", "write -P 9 0 1M"]).expect("the first");
    assert_eq!(into(&mut empty, "s-file"), Ok(json!({})));
    qemu_io(&uri("r"), &["read -P 2 0 8M", "write -P 8 7M 1M"]).expect("the other");
    let why = into(&mut empty, "small-file").expect_err("of another size");
    assert!(why.contains("4194304") && why.contains("8388608"), "{why}");
    qemu_io(&uri("r"), &["read -P 2 0 7M", "read -P 8 7M 1M"]).expect("it stays");
    assert_eq!(empty.told_of("r")["file"], empty.text("s"));
    empty.control.ok("blockdev-del", json!({ "node-name": "r-file" }));
    assert_eq!(fs::read(empty.path("r")).expect("read")[..1 << 20], vec![9; 1 << 20]);
    empty.control.ok("quit", json!({}));
    empty.server.ends();
}

#[test]
fn what_is_acknowledged_after_that_survives_a_kill() {
    let mut empty = Empty::new();
    empty.add("q", "qcow2", "8M");
    let uri = empty.nbd();
    empty.export("q", "q", "nbd", json!({}));
    qemu_io(&uri("q"), &["write -P 1 0 1M", "flush"]).expect("written");
    for direct in [true, false, true] {
        let more = json!({ "cache": { "direct": direct } });
        assert_eq!(empty.otherwise("q", "qcow2", more), Ok(json!({})));
        qemu_io(&uri("q"), &["write -P 2 1M 1M"]).expect("written");
    }
    // It is killed while a client waits, and nothing was flushed.
    let socket = empty.text("nbd");
    let options = format!("driver=nbd,server.type=unix,server.path={socket},export=q");
    let mut client = Command::new("qemu-io");
    client.args(["--image-opts", &options]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut client = client.spawn().expect("qemu-io");
    let mut says = BufReader::new(client.stdout.take().expect("a pipe"));
    writeln!(client.stdin.as_mut().expect("a pipe"), "write -P 3 2M 1M").expect("told");
    says.read_line(&mut String::new()).expect("it is acknowledged");
    let Empty { dir, server, .. } = empty;
    server.kill();
    client.kill().and_then(|()| client.wait()).expect("killed");
    let path = dir.path().join("control");
    let server = Server::daemon(["--control", &format!("unix:{}", path.display())]);
    let mut empty = Empty { dir, server, control: Control::open(&path) };
    let open = node("q", "qcow2", &empty.path("q"));
    empty.control.ok("blockdev-add", open);
    let uri = empty.nbd();
    empty.export("q", "q", "nbd", json!({}));
    let all = ["read -P 1 0 1M", "read -P 2 1M 1M", "read -P 3 2M 1M", "read -P 0 3M 5M"];
    qemu_io(&uri("q"), &all).expect("all that was acknowledged");
    empty.control.ok("quit", json!({}));
    empty.server.ends();
}

#[test]
fn what_was_described_within_goes_when_nothing_lies_upon_it() {
    let mut empty = Empty::new();
    let [below, top] = ["below", "top"].map(|name| empty.text(name));
    ok("qemu-img", "qemu-utils", &["create", "-q", "-f", "qcow2", &below, "8M"]);
    ok("qemu-img", "qemu-utils", &["create", "-q", "-f", "qcow2", &top, "8M"]);
    ok("qemu-io", "qemu-utils", &["-f", "qcow2", "-c", "write -q -P 1 0 1M", &below]);
    let mut open = node("top", "qcow2", &empty.path("top"));
    open["backing"] = json!({ "driver": "qcow2", "file": { "driver": "file", "filename": below } });
    empty.control.ok("blockdev-add", open);
    let uri = empty.nbd();
    empty.export("t", "top", "nbd", json!({}));
    qemu_io(&uri("top"), &["read -P 1 0 1M"]).expect("what lies below");
    assert_eq!(empty.otherwise("top", "qcow2", json!({ "backing": null })), Ok(json!({})));
    qemu_io(&uri("top"), &["read -P 0 0 1M"]).expect("nothing lies below");
    let all = empty.control.ok("query-named-block-nodes", json!({}));
    assert_eq!(all.as_array().expect("a list").len(), 1, "{all}");
    // Nor does anybody have it open.
    ok("qemu-io", "qemu-utils", &["-f", "qcow2", "-c", "write -q -P 2 0 1M", &below]);
    empty.control.ok("quit", json!({}));
    empty.server.ends();
}

/// Killed when dropped.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// It lets in one client, and has no room for an image that is opened anew beside the one that is open.
#[test]
fn a_server_with_one_connection_serves_on() {
    let mut empty = Empty::new();
    let [image, at] = ["image", "at"].map(|name| empty.text(name));
    fs::write(&image, vec![1; 8 << 20]).expect("an image");
    let args = ["-t", "-e", "1", "-f", "raw", "-x", "s", "-k", &at, &image];
    let server = Command::new("qemu-nbd").args(args).spawn();
    let _server = Killed(server.expect("apt-get install qemu-utils"));
    let end = Instant::now() + patience();
    while !listens(at.as_ref()) {
        assert!(Instant::now() < end, "qemu-nbd does not come");
        sleep(Duration::from_millis(10));
    }
    let file = json!({ "driver": "nbd", "export": "s", "server": { "type": "unix", "path": at } });
    let open = json!({ "driver": "raw", "node-name": "s", "file": file });
    empty.control.ok("blockdev-add", open.clone());
    let reopen = |empty: &mut Empty, key: &str, value: Value| {
        let mut open = open.clone();
        open[key] = value;
        empty.control.call("blockdev-reopen", json!({ "options": [open] }))
    };
    for read_only in [true, false] {
        assert_eq!(reopen(&mut empty, "read-only", read_only.into()), Ok(json!({})));
    }
    let uri = empty.nbd();
    empty.export("s", "s", "nbd", json!({ "writable": false }));
    for direct in [false, true] {
        let cache = json!({ "direct": direct });
        assert_eq!(reopen(&mut empty, "cache", cache), Ok(json!({})));
        reads(&uri("s"), &["read -P 1 0 8M"]).expect("what is there");
    }
    let why = reopen(&mut empty, "read-only", true.into()).expect_err("it is in use");
    assert!(why.contains("one connection"), "{why}");
    reads(&uri("s"), &["read -P 1 0 8M"]).expect("what is there");
    empty.control.ok("quit", json!({}));
    empty.server.ends();
}
