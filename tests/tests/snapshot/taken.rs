//! Snapshots, and what is found of them afterwards.

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use ringtap_tests::{lab_of, ok, patience, ringtap};
use serde_json::{Value, json};

use crate::bench::{Bench, MIB, refusal, snapshot};

#[test]
fn a_disk_goes_on_in_its_overlay_whatever_happens_to_the_server() {
    for format in ["raw", "qcow2", "vpc"] {
        let bench = Bench::new();
        let image = bench.text("a.img");
        ok(
            ringtap().to_str().expect("plain"),
            "ringtap",
            &["create", "-q", "-f", format, &image, "64M"],
        );
        let server = bench.serve(&["a.img"], &["-f", format]);
        bench.io("a", &["write -P 1 0 1M", "write -P 2 8M 64k"]);
        let mut control = bench.control();
        let told = snapshot(&mut control, "a", &bench.text("one.qcow2"));
        assert_eq!(told["file"], bench.text("one.qcow2"), "{told}");
        assert!(told["pause-ns"].as_u64().is_some_and(|pause| pause > 0), "{told}");
        bench.io(
            "a",
            &["write -P 3 0 64k", "read -P 3 0 64k", "read -P 1 64k 960k", "read -P 2 8M 64k"],
        );
        // The moment of the snapshot, which others may read from now on.
        bench.holds("a.img", format, &["read -P 1 0 1M", "read -P 2 8M 64k"]);
        snapshot(&mut control, "a", &bench.text("two.qcow2"));
        bench.io("a", &["write -P 4 0 4k"]);
        server.kill();

        let found =
            ["read -P 4 0 4k", "read -P 3 4k 60k", "read -P 1 64k 960k", "read -P 2 8M 64k"];
        let server = bench.serve(&["a.img"], &["-f", format]);
        bench.io("a", &found);
        bench.io("a", &["write -P 5 4k 4k", "flush"]);
        let said = server.stop();
        assert!(said.contains("goes on in") && said.contains("two.qcow2"), "{said}");
        // Who wants the moment of the snapshot reads that.
        let server = bench.serve(&["a.img"], &["-f", format, "--read-only"]);
        bench.io("a", &["read -P 1 0 1M"]);
        server.stop();
        let said = refusal(&["resize", &image, "128M"]);
        assert!(said.contains("one.qcow2") && said.contains("--forget-successor"), "{said}");
        let told: Value = serde_json::from_str(&ok(
            ringtap().to_str().expect("plain"),
            "ringtap",
            &["info", "--output", "json", &image],
        ))
        .expect("JSON");
        assert_eq!(told["successor"], bench.text("one.qcow2"), "{told}");
        // All in one image again.
        for overlay in ["two.qcow2", "one.qcow2"] {
            let overlay = bench.text(overlay);
            ok(ringtap().to_str().expect("plain"), "ringtap", &["commit", "-q", &overlay]);
        }
        let server = bench.serve(&["a.img"], &["-f", format]);
        bench.io(
            "a",
            &["read -P 4 0 4k", "read -P 5 4k 4k", "read -P 3 8k 56k", "read -P 1 64k 960k"],
        );
        assert!(!server.stop().contains("goes on in"));
    }
}

#[test]
fn an_image_put_back_or_an_overlay_gone_is_not_served_in_its_place() {
    let bench = Bench::new();
    bench.raw("a.img", 16 * MIB);
    let server = bench.serve(&["a.img"], &["-f", "raw"]);
    bench.io("a", &["write -P 1 0 1M"]);
    fs::copy(bench.path("a.img"), bench.path("backup")).expect("copied");
    snapshot(&mut bench.control(), "a", &bench.text("one.qcow2"));
    bench.io("a", &["write -P 2 0 64k"]);
    server.stop();
    thread::sleep(Duration::from_millis(25));
    let image = bench.text("a.img");
    let serve = ["serve", &image, "-f", "raw", "--nbd", &format!("unix:{}", bench.text("x"))]
        .map(str::to_owned);
    let serve: Vec<&str> = serve.iter().map(String::as_str).collect();
    fs::rename(bench.path("one.qcow2"), bench.path("aside")).expect("moved");
    assert!(refusal(&serve).contains("not there any more"));
    fs::rename(bench.path("aside"), bench.path("one.qcow2")).expect("moved");
    fs::copy(bench.path("backup"), bench.path("a.img")).expect("put back");
    let said = refusal(&serve);
    assert!(said.contains("put back, since") && said.contains("--forget-successor"), "{said}");
    // As the operator says.
    ok(ringtap().to_str().expect("plain"), "ringtap", &["amend", "--forget-successor", &image]);
    let server = bench.serve(&["a.img"], &["-f", "raw"]);
    bench.io("a", &["read -P 1 0 1M", "write -P 3 0 4k"]);
    server.stop();
}

#[test]
fn what_cannot_be_is_refused_and_changes_nothing() {
    let bench = Bench::new();
    bench.raw("a.img", 16 * MIB);
    bench.raw("b.img", 16 * MIB);
    let server = bench.serve(&["a.img", "b.img"], &["-f", "raw"]);
    let mut control = bench.control();
    fs::write(bench.path("there"), "something").expect("written");
    let folder = bench.text("no/such/folder");
    for (node, file, said) in [
        ("a", bench.text("there"), "exists"),
        ("a", folder, "cannot create"),
        ("nobody", bench.text("one"), "nobody"),
    ] {
        let wrong = json!({ "node-name": node, "snapshot-file": file });
        let error = control.call("blockdev-snapshot-sync", wrong).expect_err(said);
        assert!(error.contains(said), "{error}");
    }
    // Of two the second cannot be: neither is.
    let one = |node: &str, file: &str| {
        json!({ "type": "blockdev-snapshot-sync",
                "data": { "node-name": node, "snapshot-file": bench.text(file) } })
    };
    let both = json!({ "actions": [one("a", "one.qcow2"), one("b", "there")] });
    assert!(control.call("transaction", both).expect_err("refused").contains("exists"));
    assert!(!bench.path("one.qcow2").exists());
    let twice = json!({ "actions": [one("a", "one.qcow2"), one("a", "two.qcow2")] });
    assert!(control.call("transaction", twice).expect_err("refused").contains("twice"));
    // Two disks are not called the same.
    let named = |node: &str| {
        let mut one = one(node, &format!("{node}s.qcow2"));
        one["data"]["snapshot-node-name"] = "s".into();
        one
    };
    let same = json!({ "actions": [named("a"), named("b")] });
    let why = control.call("transaction", same).expect_err("refused");
    assert!(why.contains("Duplicate nodes with node-name='s'"), "{why}");
    assert!(!bench.path("as.qcow2").exists());
    bench.io("a", &["write -P 1 0 4k"]);
    server.stop();
    bench.holds("a.img", "raw", &["read -P 1 0 4k"]);
    let server = bench.serve(&["a.img", "b.img"], &["-f", "raw"]);
    assert!(!server.stop().contains("goes on in"));
}

#[test]
fn an_overlay_that_is_there_must_be_one_on_the_disks_image() {
    let bench = Bench::new();
    bench.raw("a.img", 16 * MIB);
    bench.raw("other", 16 * MIB);
    let name = ringtap();
    let create = |image: &str, base: &str| {
        let (image, base) = (bench.text(image), bench.text(base));
        let args = ["create", "-q", "-f", "qcow2", "-b", &base, "-F", "raw", &image];
        ok(name.to_str().expect("plain"), "ringtap", &args);
    };
    create("wrong.qcow2", "other");
    create("right.qcow2", "a.img");
    let server = bench.serve(&["a.img"], &["-f", "raw"]);
    bench.io("a", &["write -P 1 0 64k"]);
    let mut control = bench.control();
    let existing = |file: &str| json!({ "node-name": "a", "snapshot-file": bench.text(file), "mode": "existing" });
    let said = control.call("blockdev-snapshot-sync", existing("wrong.qcow2"));
    assert!(said.as_ref().is_err_and(|said| said.contains("ringtap rebase -u")), "{said:?}");
    control.ok("blockdev-snapshot-sync", existing("right.qcow2"));
    bench.io("a", &["write -P 2 64k 64k"]);
    server.kill();
    let server = bench.serve(&["a.img"], &["-f", "raw"]);
    bench.io("a", &["read -P 1 0 64k", "read -P 2 64k 64k"]);
    // One of which nothing is written down.
    let (above, base) = (bench.text("qemu.qcow2"), bench.text("right.qcow2"));
    let args = ["create", "-q", "-f", "qcow2", "-b", &base, "-F", "qcow2", &above];
    ok("qemu-img", "qemu-utils", &args);
    bench.control().ok("blockdev-snapshot-sync", existing("qemu.qcow2"));
    bench.io("a", &["write -P 3 128k 64k"]);
    server.stop();
    let server = bench.serve(&["a.img"], &["-f", "raw"]);
    bench.io("a", &["read -P 2 64k 64k", "read -P 3 128k 64k"]);
    server.stop();
}

#[test]
fn an_encrypted_disk_goes_on_in_an_encrypted_overlay_alone() {
    let bench = Bench::new();
    fs::write(bench.path("secret"), "a secret").expect("written");
    let secret = format!("file:{}", bench.text("secret"));
    let name = ringtap();
    let run = |args: &[&str]| ok(name.to_str().expect("plain"), "ringtap", args);
    let (image, safe, plain) =
        (bench.text("a.img"), bench.text("safe.qcow2"), bench.text("plain.qcow2"));
    let quick = "iter-time=10";
    run(&["create", "-q", "-f", "luks", "-o", quick, "--target-secret", &secret, &image, "16M"]);
    let over = ["-b", &image, "-F", "luks", "--secret", &secret];
    run(&[&["create", "-q", "-f", "qcow2"], &over[..], &[&plain]].concat());
    let sealed = ["-o", "encrypt.format=luks,encrypt.iter-time=10", "--target-secret", &secret];
    run(&[&["create", "-q", "-f", "qcow2"], &over[..], &sealed, &[&safe]].concat());
    let server = bench.serve(&["a.img"], &["-f", "luks", "--secret", &secret]);
    let mut control = bench.control();
    for (file, mode) in [(bench.text("new.qcow2"), "absolute-paths"), (plain, "existing")] {
        let wanted = json!({ "node-name": "a", "snapshot-file": file, "mode": mode });
        let said = control.call("blockdev-snapshot-sync", wanted).expect_err("in plain");
        assert!(said.contains("is encrypted"), "{said}");
    }
    let wanted = json!({ "node-name": "a", "snapshot-file": safe, "mode": "existing" });
    control.ok("blockdev-snapshot-sync", wanted);
    bench.io("a", &["write -P 0x5a 0 64k", "flush", "read -P 0x5a 0 64k"]);
    server.stop();
    let bytes = fs::read(bench.path("safe.qcow2")).expect("the overlay");
    assert!(!bytes.windows(64).any(|some| some == [0x5a; 64]), "it is there in plain");
}

#[test]
fn no_more_images_are_stacked_than_can_be_opened_again() {
    let bench = Bench::in_memory();
    bench.raw("a.img", MIB);
    let server = bench.serve(&["a.img"], &["-f", "raw"]);
    let mut control = bench.control();
    let mut taken = 0;
    let said = loop {
        let file = bench.text(&format!("{taken}.qcow2"));
        let wanted = json!({ "node-name": "a", "snapshot-file": file });
        match control.call("blockdev-snapshot-sync", wanted) {
            Ok(_) => taken += 1,
            Err(said) => break said,
        }
        assert!(taken < 300);
    };
    assert!(said.contains("commit some first") && taken == 199, "{taken}: {said}");
    bench.io("a", &["write -P 1 0 4k"]);
    server.kill();
    let server = bench.serve(&["a.img"], &["-f", "raw"]);
    bench.io("a", &["read -P 1 0 4k"]);
    server.stop();
}

/// Numbers that are written, and begun with again.
const NUMBERS: u8 = 250;

/// Writes a number to one disk and then to the other, over and over, until it is enough.
fn count(bench: &Bench, enough: &AtomicBool) {
    let began = Instant::now();
    let goes_on = |_: &u8| !enough.load(SeqCst) && began.elapsed() < patience();
    for number in (1..=NUMBERS).cycle().take_while(goes_on) {
        let write = format!("write -P {number} 0 4k");
        bench.io("a", &[&write]);
        bench.io("b", &[&write]);
    }
}

/// The number that an image holds, with what lies below it.
fn number(bench: &Bench, image: &str) -> u8 {
    let out = bench.text("out");
    let name = ringtap();
    ok(
        name.to_str().expect("plain"),
        "ringtap",
        &["convert", "-O", "raw", &bench.text(image), &out],
    );
    fs::read(out).expect("the image")[0]
}

/// For how long moments are taken, once there are a few.
const ENOUGH: Duration = Duration::from_secs(20);

#[test]
fn several_disks_are_snapshotted_at_one_moment() {
    let bench = Bench::new();
    bench.raw("a.img", MIB);
    bench.raw("b.img", MIB);
    let server = bench.serve(&["a.img", "b.img"], &["-f", "raw"]);
    let mut moments = vec![["a.img".to_owned(), "b.img".to_owned()]];
    let enough = AtomicBool::new(false);
    thread::scope(|scope| {
        let writer = scope.spawn(|| count(&bench, &enough));
        let mut control = bench.control();
        let began = Instant::now();
        while moments.len() < 6 || moments.len() < 20 && began.elapsed() < ENOUGH {
            let above = ["a", "b"].map(|node| format!("{node}{}.qcow2", moments.len()));
            let action = |node: usize| {
                let (name, file) = (["a", "b"][node], bench.text(&above[node]));
                let data = json!({ "node-name": name, "snapshot-file": file });
                json!({ "type": "blockdev-snapshot-sync", "data": data })
            };
            control.ok("transaction", json!({ "actions": [action(0), action(1)] }));
            moments.push(above);
        }
        enough.store(true, SeqCst);
        writer.join().expect("all was written");
    });
    server.stop();
    let mut different = 0;
    for [a, b] in &moments {
        let [a, b] = [a, b].map(|image| number(&bench, image));
        let next = b % NUMBERS + 1;
        assert!(a == b || a == next, "{a} and {b} are of two moments");
        different += u32::from(a != b);
    }
    println!("{} moments, {different} of them between two writes", moments.len());
}

#[test]
fn a_guest_that_writes_all_the_time_loses_nothing_to_fifty_snapshots() {
    let bench = Bench::new();
    bench.raw("a.img", 64 * MIB);
    let server = bench.serve(&["a.img"], &["-f", "raw"]);
    let socket = bench.text("a");
    let load = thread::spawn(move || {
        let args = [
            "load",
            "--socket",
            &socket,
            "--rw",
            "randrw",
            "--seconds",
            "8",
            "--verify",
            "--output",
            "json",
        ];
        let output = lab_of(&args);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice::<Value>(&output.stdout).expect("JSON")
    });
    let mut control = bench.control();
    let mut pauses = vec![];
    for turn in 0..50 {
        let told = snapshot(&mut control, "a", &bench.text(&format!("{turn}.qcow2")));
        pauses.push(told["pause-ns"].as_u64().expect("nanoseconds"));
        thread::sleep(Duration::from_millis(50));
    }
    let told = load.join().expect("the load");
    assert_eq!(told["verify"]["mismatches"], 0, "{told}");
    assert_eq!(told["errors"], 0, "{told}");
    assert!(told["verify"]["blocks"].as_u64().is_some_and(|blocks| blocks > 100), "{told}");
    pauses.sort_unstable();
    println!("pauses: half {} ns, longest {} ns", pauses[25], pauses[49]);
    server.stop();
    for turn in 0..50 {
        let image = bench.text(&format!("{turn}.qcow2"));
        ok("qemu-img", "qemu-utils", &["check", "-q", &image]);
    }
}
