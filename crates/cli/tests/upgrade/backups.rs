//! Backups at work when a server is followed by another: the copy becomes what the disk was as it was begun.

use std::fs;
use std::process::Command;
use std::time::Duration;

use crate::bench::{Bench, READY, ends, said, stop};
use crate::jobs::{is_at_work, is_paused, jobs, qmp, until};
use crate::mirrors::{EXPORT, FILE, ask, serve, target_image, there, went_on};
use crate::said::members;

/// A machine that is busy with other tests is no reason to give a moment up.
const PATIENT: &str = r#""__ringtap_guest-timeout":60000"#;

/// Programs that cannot take over, at once or once the disks stand still: the job goes on here.
fn upgrades_that_fail(bench: &mut Bench) {
    for text in ["exit 1".to_owned(), format!("{READY}; sleep 0.3; exit 4")] {
        std::thread::sleep(Duration::from_millis(300));
        bench.install(&text);
        bench.ends_with("upgrade unix:c.sock", 1);
        until(bench, is_at_work);
    }
    bench.install_again();
}

#[test]
fn backups_go_on_with_their_moment() {
    for target in [FILE, EXPORT] {
        let mut bench = Bench::new();
        let other = target_image(&mut bench, target);
        let mut server = serve(&mut bench, target);
        // Nobody writes now: this is what the disk is at the moment.
        fs::copy(bench.path("a.raw"), bench.path("moment.raw")).expect("a copy");
        let begin = r#""device":"vm","target":"there","job-id":"j","sync":"full","speed":1048576,"__ringtap_target-is-zero":true,"auto-dismiss":false"#;
        ask(&bench, "blockdev-backup", &format!("{begin},{PATIENT}"));
        until(&bench, is_at_work);
        // So slow that it does not change every region of the disk before the first upgrade: the backup would be done.
        bench.ends_with("disk limit vm --iops 120 --control unix:c.sock", 0);
        let load = bench.load("vu.sock", 6);
        upgrades_that_fail(&mut bench);
        for paused in [false, true] {
            if paused {
                ask(&bench, "job-pause", r#""id":"j""#);
            }
            let next = bench.upgrade("unix:c.sock");
            ends(server);
            server = next;
            until(&bench, if paused { is_paused } else { is_at_work });
            std::thread::sleep(Duration::from_millis(500));
        }
        bench.verified(load);
        let is_left = jobs(&bench);
        assert!(is_paused(&is_left), "{is_left}");
        ask(&bench, "job-resume", r#""id":"j""#);
        ask(&bench, "block-job-set-speed", r#""device":"j","speed":0"#);
        until(&bench, |jobs| jobs.contains("concluded"));
        stop(server);
        other.into_iter().for_each(stop);
        assert_eq!(went_on(&bench), 4, "{}", bench.log());
        let log = bench.log();
        assert!(!log.contains("begin it again") && !log.contains("has failed"), "{log}");
        bench.ends_with("compare -f raw -F qcow2 moment.raw b.qcow2", 0);
        // The load was there.
        bench.ends_with("compare -f raw -F raw moment.raw a.raw", 1);
    }
}

/// What is marked while the backup is at work is what the next one saves, and no more.
#[test]
fn backups_by_a_bitmap_go_on_and_so_does_the_bitmap() {
    let (incremental, always) =
        (r#""sync":"incremental""#, r#""sync":"bitmap","bitmap-mode":"always""#);
    for (sync, persistent) in [(incremental, true), (incremental, false), (always, true)] {
        let mut bench = Bench::new();
        target_image(&mut bench, FILE);
        let mut server = serve(&mut bench, FILE);
        let ended = |bench: &Bench| {
            until(bench, |jobs| jobs.contains("concluded"));
            ask(bench, "job-dismiss", r#""id":"j""#);
        };
        let begin = |bench: &Bench, sync: &str| {
            let rest = r#""device":"vm","target":"there","job-id":"j","auto-dismiss":false"#;
            ask(bench, "blockdev-backup", &format!("{rest},{sync},{PATIENT}"));
        };
        let add = format!(r#""node":"vm","name":"b","persistent":{persistent}"#);
        ask(&bench, "block-dirty-bitmap-add", &add);
        begin(&bench, r#""sync":"full""#);
        ended(&bench);
        let load = bench.load("vu.sock", 1);
        bench.verified(load);
        fs::copy(bench.path("a.raw"), bench.path("moment.raw")).expect("a copy");
        let marked = dirty(&bench);
        begin(&bench, &format!(r#"{sync},"bitmap":"b","speed":1048576"#));
        until(&bench, is_at_work);
        bench.ends_with("disk limit vm --iops 60 --control unix:c.sock", 0);
        let load = bench.load("vu.sock", 5);
        upgrades_that_fail(&mut bench);
        for _ in 0..2 {
            let next = bench.upgrade("unix:c.sock");
            ends(server);
            server = next;
            until(&bench, is_at_work);
            let clear =
                r#"{"execute":"block-dirty-bitmap-clear","arguments":{"node":"vm","name":"b"}}"#;
            let refused = qmp(&bench, clear);
            assert!(refused.contains("in use by another operation"), "{refused}");
            std::thread::sleep(Duration::from_millis(300));
        }
        bench.verified(load);
        ask(&bench, "block-job-set-speed", r#""device":"j","speed":0"#);
        ended(&bench);
        let log = bench.log();
        assert!(!log.contains("begin it again") && !log.contains("has failed"), "{log}");
        assert!(!log.contains("keeps what was marked before"), "{log}");
        ask(&bench, "blockdev-del", r#""node-name":"there""#);
        bench.ends_with("compare -f raw -F qcow2 moment.raw b.qcow2", 0);
        there(&bench, FILE);
        let since = dirty(&bench);
        assert!(since < marked, "{since} bytes are marked, {marked} were");
        begin(&bench, r#""sync":"incremental","bitmap":"b""#);
        ended(&bench);
        assert_eq!(dirty(&bench), 0);
        stop(server);
        bench.ends_with("compare -f raw -F qcow2 a.raw b.qcow2", 0);
        bench.ends_with("compare -f raw -F raw moment.raw a.raw", 1);
    }
}

/// How many bytes the bitmap says have changed.
fn dirty(bench: &Bench) -> u64 {
    let all = qmp(bench, r#"{"execute":"query-named-block-nodes"}"#);
    let first = members(&all, "dirty-bitmaps").first().map(|it| it[0]["count"].clone());
    first.and_then(|count| count.as_u64()).unwrap_or_else(|| panic!("{all}"))
}

/// One that only keeps its moment goes on with that, and with those who read it.
#[test]
fn a_moment_that_is_read_goes_on() {
    let mut bench = Bench::new();
    target_image(&mut bench, FILE);
    let mut server = serve(&mut bench, FILE);
    ask(&bench, "block-dirty-bitmap-add", r#""node":"vm","name":"b","persistent":false"#);
    let load = bench.load("vu.sock", 1);
    bench.verified(load);
    // Nobody writes now: this is what the disk is at the moment.
    fs::copy(bench.path("a.raw"), bench.path("moment.raw")).expect("a copy");
    let begin = r#""device":"vm","target":"there","job-id":"j","sync":"none","auto-dismiss":false"#;
    let begin = format!("{begin},\"__ringtap_scratch-limit\":67108864,{PATIENT}");
    ask(&bench, "blockdev-backup", &begin);
    until(&bench, is_at_work);
    let at = bench.path("p.sock").display().to_string();
    let at = format!(r#""addr":{{"type":"unix","data":{{"path":"{at}"}}}}"#);
    ask(&bench, "nbd-server-start", &at);
    let export = r#""id":"e","type":"nbd","node-name":"there","name":"moment","bitmaps":["b"]"#;
    ask(&bench, "block-export-add", export);
    let marked = shown_bitmap(&bench);
    assert!(marked.contains("dirty"), "{marked}");
    // So slow that there are regions of which the disk still has what they held.
    bench.ends_with("disk limit vm --iops 120 --control unix:c.sock", 0);
    let load = bench.load("vu.sock", 6);
    let reads = bench.nbd_reads("p.sock", "moment", 8);
    upgrades_that_fail(&mut bench);
    for _ in 0..2 {
        let next = bench.upgrade("unix:c.sock");
        ends(server);
        server = next;
        until(&bench, is_at_work);
        assert_eq!(shown_bitmap(&bench), marked);
        is_the_moment(&bench);
    }
    bench.verified(load);
    let output = reads.wait_with_output().expect("it ends");
    assert!(output.status.success(), "{}\n{}", said(&output), bench.log());
    is_the_moment(&bench);
    assert_eq!(went_on(&bench), 4, "{}", bench.log());
    ask(&bench, "block-export-del", r#""id":"e""#);
    ask(&bench, "block-job-cancel", r#""device":"j""#);
    until(&bench, |jobs| jobs.contains("concluded"));
    ask(&bench, "job-dismiss", r#""id":"j""#);
    // Then it is a node as any other, for which nothing is left.
    ask(&bench, "blockdev-del", r#""node-name":"there""#);
    stop(server);
    // The load was there.
    bench.ends_with("compare -f raw -F raw moment.raw a.raw", 1);
    let left = fs::read_dir(bench.path("state/jobs")).into_iter().flatten().count();
    assert_eq!(left, 0, "{}", bench.log());
}

/// What a client sees of the moment.
fn is_the_moment(bench: &Bench) {
    let uri = format!("nbd+unix:///moment?socket={}", bench.path("p.sock").display());
    bench.ends_with(&format!("compare -f raw -F raw moment.raw {uri}"), 0);
}

/// What a client is told of the bitmap that is shown with the moment.
fn shown_bitmap(bench: &Bench) -> String {
    let uri = format!("nbd+unix:///moment?socket={}", bench.path("p.sock").display());
    let output = Command::new("nbdinfo").args(["--map=qemu:dirty-bitmap:b", &uri]).output();
    let output = output.expect("nbdinfo (libnbd-bin) is there");
    assert!(output.status.success(), "{}\n{}", said(&output), bench.log());
    String::from_utf8_lossy(&output.stdout).into_owned()
}
