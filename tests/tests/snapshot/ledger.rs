//! Jobs that a killed server has left; those that go on are in `jobs.rs` and `stream.rs`.

use std::thread;
use std::time::Duration;

use serde_json::json;

use crate::bench::{Bench, MIB, said};
use crate::jobs::make;

/// What a server says as it goes on with an image, and then has of jobs.
fn next(bench: &Bench, more: &[&str]) -> (String, serde_json::Value) {
    let server = bench.serve(&["a.img"], &[&["-f", "raw"], more].concat());
    let jobs = bench.control().ok("query-jobs", json!({}));
    (server.stop(), jobs)
}

#[test]
fn a_copy_that_a_killed_server_has_left_is_said_to_be_none() {
    for verb in ["mirror", "backup"] {
        let bench = Bench::new();
        bench.raw("a.img", 64 * MIB);
        make(&bench, "copy.qcow2", "qcow2", &[]);
        let server = bench.serve(&["a.img"], &["-f", "raw"]);
        bench.io("a", &["write -P 1 0 32M", "flush"]);
        let (at, copy) = (format!("unix:{}", bench.text("control")), bench.text("copy.qcow2"));
        let head = ["disk", verb, "--control", &at, "a", &copy, "-f", "qcow2"];
        said(&[&head[..], &["--rate", "2M", "--no-wait"]].concat());
        thread::sleep(Duration::from_millis(300));
        server.kill();
        let (said, jobs) = next(&bench, &[]);
        assert!(said.contains("copy.qcow2 is no copy of the disk"), "{verb}: {said}");
        assert_eq!(jobs, json!([]), "{verb}");
        let (said, _) = next(&bench, &[]);
        assert!(!said.contains("is no copy"), "it is said once: {said}");
        bench.holds("a.img", "raw", &["read -P 1 0 32M"]);
    }
}

#[test]
fn a_server_that_ends_in_good_order_leaves_no_job() {
    let bench = Bench::new();
    make(&bench, "a.img", "raw", &[]);
    let server = bench.serve(&["a.img"], &["-f", "raw"]);
    bench.io("a", &["write -P 1 0 16M"]);
    let mut control = bench.control();
    crate::bench::snapshot(&mut control, "a", &bench.text("one.qcow2"));
    let slowly = json!({ "device": "a", "job-id": "j", "speed": 1 << 20 });
    control.ok("block-stream", slowly);
    drop(control);
    server.stop();
    let (said, jobs) = next(&bench, &[]);
    assert_eq!(jobs, json!([]), "{said}");
    assert!(!said.contains("the job"), "{said}");
}

/// The rate that was set last is the next server's.
#[test]
fn a_rate_that_has_changed_outlives_the_server() {
    let bench = Bench::new();
    make(&bench, "a.img", "raw", &[]);
    let mut server = bench.serve(&["a.img"], &["-f", "raw"]);
    bench.io("a", &["write -P 1 0 32M"]);
    let mut control = bench.control();
    crate::bench::snapshot(&mut control, "a", &bench.text("one.qcow2"));
    control.ok("block-stream", json!({ "device": "a", "job-id": "j", "speed": 2 << 20 }));
    for speed in [(1 << 20) + 512, 1 << 19] {
        crate::jobs::runs(&mut control);
        let set = json!({ "device": "j", "speed": speed });
        control.ok("block-job-set-speed", set);
        server.kill();
        server = bench.serve(&["a.img"], &["-f", "raw"]);
        control = bench.control();
        let jobs = control.ok("query-block-jobs", json!({}));
        assert_eq!((&jobs[0]["device"], &jobs[0]["speed"]), (&json!("j"), &json!(speed)), "{jobs}");
    }
    control.ok("block-job-set-speed", json!({ "device": "j", "speed": 0 }));
    crate::jobs::none_left(&mut control);
    server.stop();
    bench.holds("one.qcow2", "qcow2", &["read -P 1 0 32M"]);
}

/// The image upon those that were to go names the one that stays by then.
#[test]
fn a_commit_that_a_killed_server_had_done_but_for_its_end_is_done() {
    let bench = Bench::new();
    make(&bench, "a.img", "raw", &[]);
    let server = bench.serve(&["a.img"], &["-f", "raw"]);
    let mut control = bench.control();
    let images = ["one.qcow2", "two.qcow2"].map(|name| bench.text(name));
    for image in &images {
        crate::bench::snapshot(&mut control, "a", image);
        bench.io("a", &["write -P 1 0 8M"]);
    }
    let (top, base) = (&images[0], bench.text("a.img"));
    let slowly =
        json!({ "device": "a", "job-id": "j", "speed": 256 << 10, "top": top, "base": base });
    control.ok("block-commit", slowly);
    crate::jobs::runs(&mut control);
    server.kill();
    said(&["rebase", "-q", "-F", "raw", "-b", &base, &images[1]]);
    let (said, jobs) = next(&bench, &[]);
    assert!(said.contains("has done its work") && !said.contains("begin it again"), "{said}");
    assert_eq!(jobs, json!([]));
    bench.holds("two.qcow2", "qcow2", &["read -P 1 0 8M"]);
}
