//! How mirrors are told to go about it, and how many clients an NBD server takes.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::process::Command;

use ringtap_tests::{Control, Server, ringtap};
use serde_json::{Value, json};

use crate::{Empty, nbd_size, ok, qemu_io};

/// Begin a mirror of `a` to an image of its own, and have it end where the disk stays in its image.
fn copied(empty: &mut Empty, to: &str, how: Value) {
    empty.add(to, "raw", "16M");
    let mut mirror = json!({"job-id": "m", "device": "a", "target": to, "sync": "full"});
    for (key, value) in how.as_object().expect("members") {
        mirror[key] = value.clone();
    }
    empty.control.ok("blockdev-mirror", mirror);
    while empty.control.event().0 != "BLOCK_JOB_READY" {}
}

fn cancelled(empty: &mut Empty, to: &str) {
    empty.control.ok("block-job-cancel", json!({"device": "m"}));
    while empty.control.event().0 != "BLOCK_JOB_COMPLETED" {}
    empty.control.ok("blockdev-del", json!({"node-name": to}));
    let [a, copy] = ["a", to].map(|name| empty.text(name));
    ok(Command::new("qemu-img").args(["compare", "-U", "-f", "raw", "-F", "raw", &a, &copy]));
}

#[test]
fn mirrors_take_granularity_and_buffers_of_any_size() {
    let mut empty = Empty::new();
    empty.add("a", "raw", "16M");
    let uri = empty.nbd();
    empty.export("x", "a", "nbd", json!({"name": "x"}));
    for (number, how) in [
        json!({"granularity": 512}),
        json!({"granularity": 64 << 20, "buf-size": 1}),
        json!({"granularity": 4096, "buf-size": 3 << 20}),
        json!({"buf-size": 0}),
        json!({"buf-size": 1u64 << 40, "copy-mode": "background"}),
    ]
    .into_iter()
    .enumerate()
    {
        let to = format!("copy{number}");
        qemu_io(&uri("x"), &["write -P 1 0 16M"]).expect("written");
        copied(&mut empty, &to, how);
        let pattern = number + 2;
        let writes = [format!("write -P {pattern} 512 512"), format!("write -P {pattern} 9M 70k")];
        qemu_io(&uri("x"), &writes.each_ref().map(|one| &**one)).expect("written");
        cancelled(&mut empty, &to);
    }
    empty.add("b", "raw", "16M");
    let mirror = json!({"job-id": "m", "device": "a", "target": "b", "sync": "full"});
    for (key, value, said) in [
        ("granularity", json!(256), "[512B, 64MB]"),
        ("granularity", json!(128 << 20), "[512B, 64MB]"),
        ("granularity", json!(513), "a power of 2"),
        ("buf-size", json!(-1), "'buf-size'"),
        ("copy-mode", json!("else"), "does not accept value 'else'"),
        ("filter-node-name", json!("f"), "is unexpected"),
        ("on-target-error", json!("else"), "does not accept value 'else'"),
    ] {
        let mut mirror = mirror.clone();
        mirror[key] = value;
        let error = empty.control.call("blockdev-mirror", mirror).expect_err("it cannot be");
        assert!(error.contains(said), "{key}: {error}");
    }
    empty.server.stop();
}

/// From when it is ready each write is in the target before it is answered.
#[test]
fn a_mirror_that_has_writes_wait_holds_them_when_they_are_answered() {
    let mut empty = Empty::new();
    empty.add("a", "raw", "16M");
    let uri = empty.nbd();
    empty.export("x", "a", "nbd", json!({"name": "x"}));
    let both = json!({"copy-mode": "write-blocking", "__ringtap_max-slowdown": 5});
    empty.add("b", "raw", "16M");
    let mut mirror = json!({"job-id": "m", "device": "a", "target": "b", "sync": "full"});
    mirror.as_object_mut().expect("members").extend(both.as_object().expect("members").clone());
    let error = empty.control.call("blockdev-mirror", mirror).expect_err("they exclude each other");
    assert!(error.contains("__ringtap_max-slowdown"), "{error}");
    empty.control.ok("blockdev-del", json!({"node-name": "b"}));

    qemu_io(&uri("x"), &["write -P 1 0 16M"]).expect("written");
    copied(&mut empty, "copy", json!({"copy-mode": "write-blocking"}));
    let copy = empty.text("copy");
    for pattern in 2..12 {
        let (write, read) =
            (format!("write -P {pattern} 3M 64k"), format!("read -P {pattern} 3M 64k"));
        qemu_io(&uri("x"), &[&write]).expect("written");
        // At once, while the job goes on.
        let mut look = Command::new("qemu-io");
        let said = look.args(["-r", "-U", "-f", "raw", "-c", &read, &copy]).output().expect("read");
        let said = String::from_utf8_lossy(&said.stdout).into_owned();
        assert!(said.contains("read 65536/65536") && !said.contains("failed"), "{said}");
    }
    cancelled(&mut empty, "copy");
    empty.server.stop();
}

#[test]
fn an_nbd_server_takes_as_many_clients_as_is_said_and_so_does_the_next_one() {
    let empty = Empty::new();
    let (disks, control_at) = (empty.text("disks"), format!("unix:{}", empty.text("other")));
    let args = ["--control", &control_at, "--disks", &disks, "--persist"];
    let mut make = Command::new(ringtap());
    ok(make.args(["create", "-q", &empty.text("a"), "1M"]));
    let server = Server::daemon(args);
    let mut control = Control::open(&empty.path("other"));
    let socket = empty.text("nbd");
    let addr = json!({"type": "unix", "data": {"path": socket}});
    let too_many = json!({"addr": addr, "max-connections": -1});
    let error = control.call("nbd-server-start", too_many).expect_err("it is no number");
    assert!(error.contains("'max-connections'"), "{error}");
    control.ok("nbd-server-start", json!({"addr": addr, "max-connections": 1}));
    control.ok("blockdev-add", crate::node("a", "raw", &empty.path("a")));
    let export = json!({"id": "x", "node-name": "a", "type": "nbd", "writable": true});
    control.ok("block-export-add", export);
    let uri = format!("nbd+unix:///a?socket={socket}");
    let one_alone = || {
        let mut holds = UnixStream::connect(&socket).expect("connected");
        // What the server says first: it has a place.
        holds.read_exact(&mut [0; 18]).expect("greeted");
        nbd_size(&uri).expect_err("there is one place");
        drop(holds);
        let again = std::time::Instant::now();
        while nbd_size(&uri).is_err() {
            assert!(again.elapsed().as_secs() < 10, "the place is free again");
        }
    };
    one_alone();
    server.stop();
    let server = Server::daemon(args);
    one_alone();
    server.stop();
    empty.server.stop();
}
