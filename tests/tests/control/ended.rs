//! What the verbs that begin jobs say where those are cancelled or not waited for, and where a signal comes.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ringtap_tests::{patience, ringtap};
use serde_json::json;

use crate::{Empty, ok, qemu_io};

fn verb(empty: &Empty, words: &str) -> Command {
    let mut command = Command::new(ringtap());
    command.args(words.split(' ')).current_dir(empty.path("."));
    command.args(["--control", &format!("unix:{}", empty.text("control"))]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn image(empty: &Empty, name: &str) {
    ok(Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2"])
        .arg(empty.path(name))
        .arg("16M"));
}

/// Until that job is at work.
fn runs(empty: &mut Empty, id: &str) {
    let end = Instant::now() + patience();
    loop {
        let jobs = empty.control.ok("query-jobs", json!({}));
        if jobs.as_array().is_some_and(|jobs| jobs.iter().any(|job| job["id"] == id)) {
            return;
        }
        assert!(Instant::now() < end, "{id} does not begin");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn names(empty: &mut Empty) -> Vec<String> {
    let nodes = empty.control.ok("query-named-block-nodes", json!({}));
    let nodes = nodes.as_array().expect("a list").iter();
    nodes.map(|node| node["node-name"].as_str().expect("a name").to_owned()).collect()
}

fn ended(child: Child) -> (Option<i32>, String) {
    let output = child.wait_with_output().expect("it ends");
    (
        output.status.code(),
        [output.stdout, output.stderr]
            .map(|said| String::from_utf8_lossy(&said).into_owned())
            .concat(),
    )
}

#[test]
fn a_job_that_is_cancelled_is_a_failure_of_who_waits_and_leaves_nothing_open() {
    let mut empty = Empty::new();
    empty.add("a", "raw", "16M");
    let uri = empty.nbd()("a");
    empty.export("x", "a", "nbd", json!({}));
    qemu_io(&uri, &["write -P 1 0 16M"]).expect("written");
    for (name, words) in [
        ("mirror", "disk mirror a m.qcow2 -f qcow2 -r 1M"),
        ("backup", "disk backup a b.qcow2 -f qcow2 --zeroed --rate 1M --checkpoint nightly"),
    ] {
        ["m.qcow2", "b.qcow2"].iter().for_each(|name| image(&empty, name));
        // Twice: what the first left would be in the second one's way.
        for _ in 0..2 {
            let waits = verb(&empty, words).spawn().expect("ringtap");
            let id = format!("{name}-a");
            runs(&mut empty, &id);
            ok(verb(&empty, &format!("job cancel {id}"))
                .stdout(Stdio::null())
                .stderr(Stdio::null()));
            let (status, said) = ended(waits);
            assert_eq!(status, Some(1), "{said}");
            assert!(said.contains("Operation canceled") && !said.contains("goes on in"), "{said}");
            assert_eq!(names(&mut empty), ["a"]);
        }
    }
    // There is no copy that it would go on from.
    let since =
        verb(&empty, "disk backup a b.qcow2 -f qcow2 --since nightly").spawn().expect("ringtap");
    let (status, said) = ended(since);
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains("nightly"), "{said}");
    assert_eq!(names(&mut empty), ["a"]);
}

#[test]
fn what_nobody_waited_for_is_closed_by_who_asks_next() {
    let mut empty = Empty::new();
    empty.add("a", "raw", "16M");
    ["b.qcow2", "c.qcow2"].iter().for_each(|name| image(&empty, name));
    ok(&mut verb(&empty, "disk backup a b.qcow2 -f qcow2 --no-wait"));
    ok(&mut verb(&empty, "job wait backup-a"));
    assert_eq!(names(&mut empty), ["a"]);
    ok(&mut verb(&empty, "disk backup a b.qcow2 -f qcow2 --no-wait"));
    let end = Instant::now() + patience();
    while empty.control.ok("query-jobs", json!({}))[0]["status"] != "concluded" {
        assert!(Instant::now() < end, "it does not end");
        std::thread::sleep(Duration::from_millis(20));
    }
    ok(&mut verb(&empty, "disk backup a c.qcow2 -f qcow2 --no-wait"));
    ok(&mut verb(&empty, "job wait backup-a"));
    assert_eq!(names(&mut empty), ["a"]);
}

/// Nobody waits: the server takes away what says nothing of any copy.
#[test]
fn a_backup_that_fails_leaves_no_checkpoint_though_nobody_waits() {
    let mut empty = Empty::new();
    empty.add("a", "raw", "16M");
    let uri = empty.nbd()("a");
    empty.export("x", "a", "nbd", json!({}));
    qemu_io(&uri, &["write -P 1 0 16M"]).expect("written");
    image(&empty, "b.qcow2");
    let checkpoints = |empty: &mut Empty| {
        let nodes = empty.control.ok("query-named-block-nodes", json!({}));
        let all = nodes.as_array().expect("nodes").iter();
        all.filter_map(|node| node["dirty-bitmaps"].as_array()).map(Vec::len).sum::<usize>()
    };
    let words = "disk backup a b.qcow2 -f qcow2 --checkpoint nightly --no-wait";
    ok(&mut verb(&empty, &format!("{words} --rate 1M")));
    assert_eq!(checkpoints(&mut empty), 1);
    ok(&mut verb(&empty, "job cancel backup-a"));
    let waited = verb(&empty, "job wait backup-a").spawn().expect("ringtap");
    assert_eq!(ended(waited).0, Some(1));
    assert_eq!(checkpoints(&mut empty), 0);
    ok(&mut verb(&empty, words));
    ok(&mut verb(&empty, "job wait backup-a"));
    assert_eq!(checkpoints(&mut empty), 1);
    ok(&mut verb(&empty, "disk backup a b.qcow2 -f qcow2 --since nightly"));
}

/// Who waits is gone: the server takes the checkpoint away all the same.
#[test]
fn a_backup_that_is_cancelled_leaves_no_checkpoint_though_who_waited_is_gone() {
    let mut empty = Empty::new();
    empty.add("a", "raw", "16M");
    let uri = empty.nbd()("a");
    empty.export("x", "a", "nbd", json!({}));
    qemu_io(&uri, &["write -P 1 0 16M"]).expect("written");
    for signal in ["-INT", "-KILL"] {
        image(&empty, "b.qcow2");
        let words = "disk backup a b.qcow2 -f qcow2 --zeroed --rate 1M --checkpoint nightly";
        let waits = verb(&empty, words).spawn().expect("ringtap");
        runs(&mut empty, "backup-a");
        ok(Command::new("kill").args([signal, &waits.id().to_string()]));
        ended(waits);
        ok(&mut verb(&empty, "job cancel backup-a"));
        let waited = verb(&empty, "job wait backup-a").spawn().expect("ringtap");
        assert_eq!(ended(waited).0, Some(1));
        let since = "disk backup a b.qcow2 -f qcow2 --since nightly";
        let (status, said) = ended(verb(&empty, since).spawn().expect("ringtap"));
        assert_eq!(status, Some(1), "{signal}: {said}");
        assert!(said.contains("nightly"), "{said}");
        assert_eq!(names(&mut empty), ["a"]);
    }
}

#[test]
fn a_signal_ends_the_waiting_and_says_what_goes_on() {
    let mut empty = Empty::new();
    empty.add("a", "raw", "16M");
    let uri = empty.nbd()("a");
    empty.export("x", "a", "nbd", json!({}));
    qemu_io(&uri, &["write -P 1 0 16M"]).expect("written");
    image(&empty, "b.qcow2");
    let waits = verb(&empty, "disk backup a b.qcow2 -f qcow2 --rate 1M").spawn().expect("ringtap");
    runs(&mut empty, "backup-a");
    ok(Command::new("kill").args(["-INT", &waits.id().to_string()]));
    let (_, said) = ended(waits);
    assert!(said.contains("ringtap job wait backup-a"), "{said}");
    runs(&mut empty, "backup-a");
    ok(&mut verb(&empty, "job cancel backup-a"));
    let waited = verb(&empty, "job wait backup-a").spawn().expect("ringtap");
    assert_eq!(ended(waited).0, Some(1));
    assert_eq!(names(&mut empty), ["a"]);
}

#[test]
fn what_is_run_after_a_snapshot_is_run_whatever_comes() {
    let mut empty = Empty::new();
    empty.add("a", "raw", "1M");
    // A signal while the guest stands still.
    let mut stopped = verb(&empty, "disk snapshot a s.qcow2 --output json");
    stopped.args([
        "--before",
        "touch frozen; until [ -e told ]; do sleep 0.1; done",
        "--after",
        "touch thawed",
    ]);
    let stopped = stopped.spawn().expect("ringtap");
    let end = Instant::now() + patience();
    while !empty.path("frozen").exists() {
        assert!(Instant::now() < end, "it does not begin");
        std::thread::sleep(Duration::from_millis(10));
    }
    ok(Command::new("kill").args(["-TERM", &stopped.id().to_string()]));
    std::fs::write(empty.path("told"), "").expect("a file");
    let (_, said) = ended(stopped);
    assert!(empty.path("thawed").exists() && !empty.path("s.qcow2").exists(), "{said}");
    // What they print is no result; what fails after the snapshot does not undo it.
    let mut taken = verb(&empty, "disk snapshot a s.qcow2 --output json");
    let taken = taken
        .args(["--before", "echo Froze", "--after", "echo Thawed; false"])
        .output()
        .expect("ringtap");
    let said = String::from_utf8_lossy(&taken.stderr);
    assert_eq!(taken.status.code(), Some(1), "{said}");
    assert!(said.contains("the snapshot is taken"), "{said}");
    let told: serde_json::Value = serde_json::from_slice(&taken.stdout).expect("JSON alone");
    assert!(told["file"].as_str().is_some_and(|file| file.ends_with("s.qcow2")), "{told}");
}
