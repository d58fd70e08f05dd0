//! What becomes of a job that meets an error is the same in the next process: it pauses and says why, or fails, as it was told.

use std::fs;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use crate::bench::{Bench, ends, mounts, stop};
use crate::jobs::{is_at_work, is_paused, jobs, qmp, until};
use crate::mirrors::{EXPORT, ask, serve, there};

/// How the job is, as `query-block-jobs` says it.
fn block_jobs(bench: &Bench) -> String {
    qmp(bench, r#"{"execute":"query-block-jobs"}"#)
}

fn paused_for(bench: &Bench, why: &str) {
    until(bench, is_paused);
    let said = block_jobs(bench).replace(' ', "");
    assert!(said.contains(&format!("\"io-status\":\"{why}\"")), "{said}\n{}", bench.log());
}

/// An NBD server that refuses writes for as long as the file `fault` is there.
struct Faulty(Child);

impl Faulty {
    fn new(bench: &Bench) -> Faulty {
        let fault = format!("error-pwrite-file={}", bench.path("fault").display());
        let child = Command::new("nbdkit")
            .args(["-f", "--threads", "1", "-U"])
            .arg(bench.path("n.sock"))
            .args(["--filter=error", "memory", "64M", "error-pwrite=EIO", &fault])
            .arg("error-pwrite-rate=100%")
            .spawn()
            .expect("nbdkit");
        let until = Instant::now() + Duration::from_secs(30);
        while !bench.path("n.sock").exists() {
            assert!(Instant::now() < until, "nbdkit does not listen");
            std::thread::sleep(Duration::from_millis(10));
        }
        Faulty(child)
    }
}

impl Drop for Faulty {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_mirror_that_stopped_at_an_error_stays_so_and_meets_the_next_one_as_it_was_told() {
    let mut bench = Bench::new();
    let _target = Faulty::new(&bench);
    let mut server = serve(&mut bench, EXPORT);
    let load = bench.load("vu.sock", 8);
    let begin = r#""device":"vm","target":"there","job-id":"j","sync":"full","speed":4194304,"on-target-error":"stop","auto-dismiss":false"#;
    ask(&bench, "blockdev-mirror", begin);
    until(&bench, is_at_work);
    let fault = bench.path("fault");
    fs::write(&fault, "").expect("a file");
    paused_for(&bench, "failed");
    for round in 1..3 {
        let next = bench.upgrade("unix:c.sock");
        ends(server);
        server = next;
        paused_for(&bench, "failed");
        let log = bench.log();
        let told =
            log.matches("pauses until it is resumed, as it did: reading or writing has failed");
        assert_eq!(told.count(), round, "{log}");
    }
    // There still: it stops again, and does not fail.
    ask(&bench, "job-resume", r#""id":"j""#);
    paused_for(&bench, "failed");
    fs::remove_file(&fault).expect("removed");
    ask(&bench, "job-resume", r#""id":"j""#);
    until(&bench, is_at_work);
    ask(&bench, "block-job-set-speed", r#""device":"j","speed":0"#);
    bench.verified(load);
    until(&bench, |jobs| jobs.contains("ready"));
    ask(&bench, "block-job-cancel", r#""device":"j""#);
    until(&bench, |jobs| jobs.contains("concluded"));
    let end = jobs(&bench);
    assert!(!end.contains("error"), "{end}");
    ask(&bench, "job-dismiss", r#""id":"j""#);
    ask(&bench, "blockdev-del", r#""node-name":"there""#);
    there(&bench, EXPORT);
    stop(server);
    let copy = format!("nbd+unix:///?socket={}", bench.path("n.sock").display());
    bench.ends_with(&format!("compare -f raw -F raw a.raw {copy}"), 0);
}

/// A file system that is full but for 4 MiB, of which more is free once the file `ballast` is gone.
fn full_file_system(bench: &Bench) {
    let folder = bench.path("full");
    fs::create_dir(&folder).expect("a folder");
    let mount = ["-t", "tmpfs", "-o", "size=100m", "tmpfs"];
    let mounted = Command::new("mount").args(mount).arg(&folder).status().expect("mount");
    assert!(mounted.success());
    bench.ends_with("create -q -f raw full/a.raw 64M", 0);
    fs::write(folder.join("ballast"), vec![1; 96 << 20]).expect("the ballast");
}

#[test]
fn a_commit_that_finds_no_room_fails_or_waits_as_it_was_told() {
    if !mounts() {
        return;
    }
    let mut bench = Bench::new();
    full_file_system(&bench);
    let line = "serve --control unix:c.sock full/a.raw -f raw --cache writeback --node-name vm --vhost-user vu.sock";
    let (_child, mut server) = bench.serve(line);
    bench.ends_with("disk snapshot vm top.qcow2 --control unix:c.sock", 0);
    let load = bench.load("vu.sock", 3);
    bench.verified(load);
    let commit = |on_error: &str| {
        let rest = r#""device":"vm","job-id":"j","auto-dismiss":false"#;
        ask(&bench, "block-commit", &format!("{rest},\"on-error\":\"{on_error}\""));
    };
    // The default: it fails, and the disk stays where it is.
    commit("report");
    until(&bench, |jobs| jobs.contains("concluded"));
    let failed = jobs(&bench);
    assert!(failed.contains("\"error\""), "{failed}");
    ask(&bench, "job-dismiss", r#""id":"j""#);
    commit("enospc");
    paused_for(&bench, "nospace");
    let load = bench.load("vu.sock", 6);
    for round in 1..3 {
        let next = bench.upgrade("unix:c.sock");
        ends(server);
        server = next;
        paused_for(&bench, "nospace");
        let log = bench.log();
        let told = log.matches("pauses until it is resumed, as it did: there was no space left");
        assert_eq!(told.count(), round, "{log}");
    }
    // There is none yet: it waits again, and does not fail.
    ask(&bench, "job-resume", r#""id":"j""#);
    until(&bench, |jobs| is_paused(jobs) || jobs.contains("concluded"));
    paused_for(&bench, "nospace");
    fs::remove_file(bench.path("full/ballast")).expect("removed");
    ask(&bench, "job-resume", r#""id":"j""#);
    bench.verified(load);
    until(&bench, |jobs| jobs.contains("\"ready\""));
    ask(&bench, "job-complete", r#""id":"j""#);
    until(&bench, |jobs| jobs.contains("concluded"));
    let end = jobs(&bench);
    assert!(!end.contains("\"error\""), "{end}");
    ask(&bench, "job-dismiss", r#""id":"j""#);
    let load = bench.load("vu.sock", 1);
    bench.verified(load);
    let nodes = qmp(&bench, r#"{"execute":"query-named-block-nodes"}"#);
    assert!(!nodes.contains("top.qcow2"), "{nodes}");
    stop(server);
}
