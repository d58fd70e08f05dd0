//! Jobs at work when a server is followed by another.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};

use crate::bench::{Bench, ends, image, pid};

/// What the server answers to a command.
pub fn qmp(bench: &Bench, command: &str) -> String {
    let mut socket = UnixStream::connect(bench.path("c.sock")).expect("it listens");
    let both = format!("{{\"execute\":\"qmp_capabilities\"}}\n{command}\n");
    socket.write_all(both.as_bytes()).expect("it hears");
    let lines = BufReader::new(socket).lines().map(|line| line.expect("a line"));
    let mut answers =
        lines.filter(|line| line.contains("\"return\"") || line.contains("\"error\""));
    answers.nth(1).expect("an answer")
}

/// Whether it is at work, or has copied all that there was and follows what guests write.
pub fn is_at_work(jobs: &str) -> bool {
    jobs.contains("\"j\"") && (jobs.contains("running") || jobs.contains("ready"))
}

pub fn is_paused(jobs: &str) -> bool {
    jobs.contains("paused") || jobs.contains("standby")
}

pub fn jobs(bench: &Bench) -> String {
    qmp(bench, r#"{"execute":"query-jobs"}"#)
}

/// Wait until what there is of jobs is so.
pub fn until(bench: &Bench, is_so: impl Fn(&str) -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !is_so(&jobs(bench)) {
        assert!(Instant::now() < end, "{}\n{}", jobs(bench), bench.log());
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn commits_and_streams_go_on_in_the_next_process() {
    for command in ["block-stream", "block-commit"] {
        let mut bench = Bench::new();
        let file = image(&bench, "raw");
        let line = format!(
            "serve --control unix:c.sock {file} -f raw --node-name vm --vhost-user vu.sock"
        );
        let (_child, mut server) = bench.serve(&line);
        let load = bench.load("vu.sock", 1);
        bench.verified(load);
        bench.ends_with("disk snapshot vm top.qcow2 --control unix:c.sock", 0);
        let load = bench.load("vu.sock", 6);
        let begin = format!(
            r#"{{"execute":"{command}","arguments":{{"device":"vm","job-id":"j","speed":1048576,"auto-dismiss":false}}}}"#
        );
        assert!(qmp(&bench, &begin).contains("return"), "{}", bench.log());
        until(&bench, is_at_work);
        // One that cannot take over leaves the job where it was, too.
        bench.install("exit 1");
        bench.ends_with("upgrade unix:c.sock", 1);
        until(&bench, is_at_work);
        bench.install_again();
        for (round, pauses) in [(1, false), (2, true)] {
            if pauses {
                let pause = r#"{"execute":"job-pause","arguments":{"id":"j"}}"#;
                assert!(qmp(&bench, pause).contains("return"), "{}", bench.log());
            }
            let next = bench.upgrade("unix:c.sock");
            ends(server);
            server = next;
            until(&bench, |jobs| if pauses { is_paused(jobs) } else { is_at_work(jobs) });
            let log = bench.log();
            let goes_on = log.matches("goes on, which a server before this one began").count();
            assert_eq!(goes_on, round + 1, "{log}");
        }
        // It pauses, as it did, and goes on when it is told to.
        std::thread::sleep(Duration::from_millis(300));
        assert!(is_paused(&jobs(&bench)), "{}", bench.log());
        let resume = r#"{"execute":"job-resume","arguments":{"id":"j"}}"#;
        assert!(qmp(&bench, resume).contains("return"), "{}", bench.log());
        until(&bench, is_at_work);
        let faster = r#"{"execute":"block-job-set-speed","arguments":{"device":"j","speed":0}}"#;
        assert!(qmp(&bench, faster).contains("return"), "{}", bench.log());
        bench.verified(load);
        if command == "block-commit" {
            until(&bench, |jobs| jobs.contains("ready"));
            let complete = r#"{"execute":"block-job-complete","arguments":{"device":"j"}}"#;
            assert!(qmp(&bench, complete).contains("return"), "{}", bench.log());
        }
        until(&bench, |jobs| jobs.contains("concluded"));
        let dismiss = r#"{"execute":"job-dismiss","arguments":{"id":"j"}}"#;
        assert!(qmp(&bench, dismiss).contains("return"), "{}", bench.log());
        let load = bench.load("vu.sock", 1);
        bench.verified(load);
        let _ = kill_process(pid(server), Signal::TERM);
        ends(server);
        let log = bench.log();
        assert!(!log.contains("begin it again") && !log.contains("has failed"), "{log}");
        let below = bench.ends_with("info -f qcow2 top.qcow2", 0).contains("backing file");
        assert_eq!(below, command == "block-commit", "{log}");
    }
}
