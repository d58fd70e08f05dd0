//! Jobs that have ended, and those that wait for a word, when a server is followed by another: whoever began them learns how
//! they have ended.

use serde_json::Value;

use crate::bench::{Bench, ends, stop};
use crate::jobs::{jobs, qmp, until};
use crate::mirrors::{FILE, ask, serve, target_image};
use crate::said::members;

/// What is said of all jobs, but for what they do at the moment.
fn known(bench: &Bench) -> Vec<Value> {
    let of_jobs = ["id", "type", "status", "current-progress", "total-progress", "error"];
    let of_block_jobs = ["len", "offset", "speed", "auto-finalize", "auto-dismiss", "io-status"];
    let (all, block) = (jobs(bench), qmp(bench, r#"{"execute":"query-block-jobs"}"#));
    let of = |text: &str, keys: [&str; 6]| keys.map(|key| members(text, key)).concat();
    [of(&all, of_jobs), of(&block, of_block_jobs)].concat()
}

#[test]
fn jobs_that_have_ended_wait_to_be_dismissed() {
    let mut bench = Bench::new();
    target_image(&mut bench, FILE);
    let mut server = serve(&mut bench, FILE);
    let backup = |bench: &Bench, id: &str, more: &str| {
        let rest = r#""device":"vm","target":"there","sync":"full","auto-dismiss":false"#;
        ask(bench, "blockdev-backup", &format!("{rest},\"job-id\":\"{id}\"{more}"));
    };
    let ended = |bench: &Bench, count: usize| {
        until(bench, |jobs| jobs.matches("concluded").count() == count);
    };
    backup(&bench, "well", "");
    ended(&bench, 1);
    backup(&bench, "cut", r#","speed":1048576"#);
    ask(&bench, "job-cancel", r#""id":"cut""#);
    ended(&bench, 2);
    backup(&bench, "waits", r#","auto-finalize":false"#);
    until(&bench, |jobs| jobs.contains("pending"));
    let before = known(&bench);
    assert!(before.contains(&"Operation canceled".into()), "{before:?}");
    for _ in 0..2 {
        let next = bench.upgrade("unix:c.sock");
        ends(server);
        server = next;
        until(&bench, |jobs| jobs.contains("pending"));
        assert_eq!(known(&bench), before, "{}", bench.log());
    }
    // A name is taken as long as its job is there.
    let again = r#"{"execute":"blockdev-backup","arguments":{"device":"vm","target":"there","sync":"full","job-id":"well"}}"#;
    let refused = qmp(&bench, again);
    assert!(refused.contains("already in use"), "{refused}");
    ask(&bench, "job-finalize", r#""id":"waits""#);
    ended(&bench, 3);
    let next = bench.upgrade("unix:c.sock");
    ends(server);
    ended(&bench, 3);
    for id in ["well", "cut", "waits"] {
        ask(&bench, "job-dismiss", &format!("\"id\":\"{id}\""));
    }
    assert!(!jobs(&bench).contains("concluded"), "{}", jobs(&bench));
    stop(next);
    bench.ends_with("compare -f raw -F qcow2 a.raw b.qcow2", 0);
}
