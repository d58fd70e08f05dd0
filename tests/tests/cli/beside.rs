//! What the verbs print and leave, held beside qemu-img.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::program::{Output, Running, program};
use crate::served::Server;
use crate::{disk, folder, run};

fn qemu_img(folder: &Path, words: &str) -> Output {
    let mut command = program("qemu-img", "qemu-utils");
    command.current_dir(folder).args(words.split_whitespace());
    Running::start(command).wait()
}

fn qemu_io(folder: &Path, image: &str, orders: &[&str]) {
    let mut command = program("qemu-io", "qemu-utils");
    command.current_dir(folder).args(["-f", "qcow2"]);
    orders.iter().for_each(|order| {
        command.args(["-c", order]);
    });
    command.arg(image);
    Running::start(command).wait().ok();
}

#[test]
fn a_map_is_that_of_qemu_img_byte_for_byte() {
    let dir = folder();
    let dir = dir.path();
    qemu_img(dir, "create -q -f qcow2 base 4M").ok();
    qemu_io(dir, "base", &["write 0 192k", "write 1M 64k", "write -z 2M 128k"]);
    qemu_img(dir, "create -q -f qcow2 -b base -F qcow2 top 5M").ok();
    qemu_io(dir, "top", &["write 64k 64k", "write -c 3M 64k", "write -z 1M 64k"]);
    qemu_img(dir, "create -q -f qcow2 empty 1M").ok();
    for image in ["base", "top", "empty"] {
        for range in ["", "-s 100k -l 1M"] {
            let theirs = qemu_img(dir, &format!("map -f qcow2 --output json {range} {image}"));
            let ours = run(dir, &format!("map -f qcow2 --output json {range} {image}"));
            // Newer ones tell which are compressed; Debian 12's does not.
            let told = |text: String| {
                text.replace(", \"compressed\": false", "").replace(", \"compressed\": true", "")
            };
            assert_eq!(told(ours.ok()), told(theirs.ok()), "{image} {range}");
        }
    }
}

#[test]
fn bench_says_what_qemu_img_says() {
    let dir = folder();
    let dir = dir.path();
    disk(dir, "a.raw", 1 << 20);
    for words in [
        "-c 100",
        "-c 50 -d 3 -s 8k -S 64k -o 4k",
        "-c 40 -d 4 -w --pattern 90 --flush-interval 8",
        "-c 40 -d 4 -w --pattern 90 --flush-interval 8 --no-drain -t none -n",
        "-c 0",
        "-c 9 -U -i threads",
    ] {
        let line = format!("bench -f raw {words} a.raw");
        let (ours, theirs) = (run(dir, &line).ok(), qemu_img(dir, &line).ok());
        let before_time = |text: &str| text.split("completed in ").next().map(str::to_owned);
        assert_eq!(before_time(&ours), before_time(&theirs), "{words}");
        assert!(ours.ends_with(" seconds.\n"), "{ours}");
    }
    // Debian 12's says it all the same.
    assert_eq!(run(dir, "bench -q -c 9 -f raw a.raw").ok(), "");
    let described = "--image-opts driver=raw,read-only=on,file.filename=a.raw";
    run(dir, &format!("bench -c 9 {described}")).ok();
    let told = run(dir, &format!("bench -c 9 -qw {described}"));
    assert!(!told.status.success() && told.stderr.contains("read-only"), "{}", told.stderr);
    for (words, said) in [
        ("-c 9 --flush-interval 8", "add -w"),
        ("-c 9 -w -d 8 --flush-interval 7", "8 requests apart"),
        ("-c 9 -s 2M", "the disk has 1048576"),
        ("-c 9 -o 2M", "the disk has 1048576"),
        ("-c 9 -d 0", "0 is not in"),
        ("-c 9 -w --pattern 300", "write a byte"),
    ] {
        let told = run(dir, &format!("bench -f raw {words} a.raw"));
        assert_ne!(told.status.code(), Some(0), "{words}");
        assert!(told.stderr.contains(said), "{words}: {}", told.stderr);
    }
}

#[test]
fn bench_writes_where_and_what_it_is_told() {
    let dir = folder();
    let dir = dir.path();
    run(dir, "create -q -f qcow2 a.qcow2 1M").ok();
    run(dir, "bench -q -w --pattern 0x5a -c 4 -d 2 -s 64k -S 256k -o 64k a.qcow2").ok();
    qemu_img(dir, "check -q -f qcow2 a.qcow2").ok();
    qemu_img(dir, "convert -f qcow2 -O raw a.qcow2 a.raw").ok();
    let bytes = fs::read(dir.join("a.raw")).expect("the disk");
    for (at, piece) in bytes.chunks(64 << 10).enumerate() {
        let wanted = if at % 4 == 1 { 0x5a } else { 0 };
        assert!(piece.iter().all(|byte| *byte == wanted), "piece {at}");
    }
    // Nobody else may have it.
    let server = Server::start(dir, "a.qcow2 -f qcow2 --nbd unix:a.sock");
    let told = run(dir, "bench -w -c 1 a.qcow2").failed(1);
    assert!(told.contains("has it open for writing"), "{told}");
    server.stop().ok();
}

#[test]
fn a_wrong_secret_leaves_nothing_of_an_amendment() {
    let dir = folder();
    let dir = dir.path();
    for (name, secret) in [("key", "right"), ("wrong", "wrong"), ("new", "another")] {
        fs::write(dir.join(name), secret).expect("a secret");
    }
    run(dir, "create -q -f qcow2 -o encrypt.format=luks,encrypt.iter-time=10 a 8M --target-secret file:key").ok();
    let before = fs::read(dir.join("a")).expect("the image");
    let amend = |secret: &str, more: &str| {
        run(
            dir,
            &format!(
                "amend -o size=16M,lazy_refcounts=on,encrypt.iter-time=10,{more} --secret file:{secret} a"
            ),
        )
    };
    let fill = "encrypt.state=active,encrypt.new-secret=file:new";
    let told = amend("wrong", fill).failed(1);
    assert!(told.contains("opens none of"), "{told}");
    amend("key", &format!("{fill},encrypt.keyslot=9")).failed(1);
    amend("key", "encrypt.state=inactive,encrypt.old-secret=file:wrong").failed(1);
    assert!(fs::read(dir.join("a")).expect("the image") == before);
    amend("key", fill).ok();
    for secret in ["key", "new"] {
        let facts = run(dir, &format!("map -f qcow2 --output json --secret file:{secret} a")).ok();
        assert!(facts.contains("\"length\": 16777216"), "{facts}");
    }
}

#[test]
fn dots_are_part_of_an_exports_name() {
    let dir = folder();
    disk(dir.path(), "a.raw", 1 << 20);
    let server = Server::start(dir.path(), "a.raw -f raw --name a/../b --nbd unix:a.sock");
    let place = dir.path().join("a.sock").display().to_string();
    for name in ["a/../b", "a/%2e%2e/b"] {
        run(dir.path(), &format!("info -f raw nbd+unix:///{name}?socket={place}")).ok();
    }
    run(dir.path(), &format!("info -f raw nbd+unix:///b?socket={place}")).failed(1);
    server.stop().ok();
}

#[test]
fn keyslots_are_told_as_qemu_img_tells_them() {
    let dir = folder();
    let dir = dir.path();
    fs::write(dir.join("key"), "secret").expect("a secret");
    run(dir, "create -q -f luks -o version=1,iter-time=10 a 8M --target-secret file:key").ok();
    let slots = |text: String| {
        let facts: Value = serde_json::from_str(&text).expect("JSON");
        facts["format-specific"]["data"]["slots"].as_array().expect("slots").clone()
    };
    let ours = slots(run(dir, "info -f luks --output json a").ok());
    let theirs = slots(qemu_img(dir, "info -f luks --output json a").ok());
    assert_eq!(ours.len(), theirs.len());
    for (ours, theirs) in ours.iter().zip(&theirs) {
        for (key, value) in theirs.as_object().expect("a slot") {
            assert_eq!(&ours[key], value, "{key} of {theirs}");
        }
    }
}

#[test]
fn dd_copies_nothing_where_all_is_skipped() {
    let dir = folder();
    let dir = dir.path();
    disk(dir, "a.raw", 1 << 20);
    for format in ["raw", "qcow2"] {
        let line = |to: &str| format!("dd -f raw -O {format} bs=1k skip=1025 if=a.raw of={to}");
        let (ours, theirs) = (run(dir, &line("ours")), qemu_img(dir, &line("theirs")));
        assert_eq!(ours.status.code(), theirs.status.code());
        assert!(ours.stderr.contains("to be skipped"), "{}", ours.stderr);
        qemu_img(dir, &format!("compare -q -f {format} -F {format} ours theirs")).ok();
    }
}
