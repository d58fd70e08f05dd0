//! The lab in a build or a timer: exit codes of `ringtap report --fail-if-worse`, and contrib's script.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use ringtap_tests::ringtap;
use serde_json::Value;

use crate::program::{Output, Running};
use crate::{folder, run};

/// A run that is kept for the lab's own tests: six rounds of QEMU's disk and Ringtap's.
fn kept() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/lab/tests/runs/schema-0")
}

/// A copy of it made a day later, in which Ringtap has this share of its rate in dd.
fn later(folder: &Path, name: &str, share: f64) {
    let run = folder.join(name);
    fs::create_dir(&run).expect("a folder");
    let record = fs::read_to_string(kept().join("run.json")).expect("a record");
    let mut record: Value = serde_json::from_str(&record).expect("JSON");
    record["began"] = "2026-11-24T00:57:56+00:00".into();
    fs::write(run.join("run.json"), record.to_string()).expect("written");
    let mut samples = String::new();
    for line in fs::read_to_string(kept().join("samples.jsonl")).expect("samples").lines() {
        let mut sample: Value = serde_json::from_str(line).expect("JSON");
        if sample["arm"] == "ringtap-vhost" && sample["workload"] == "dd-throughput" {
            let rate = &mut sample["metrics"]["bandwidth"]["value"];
            *rate = (rate.as_f64().expect("a number") * share).into();
        }
        samples += &format!("{sample}\n");
    }
    fs::write(run.join("samples.jsonl"), samples).expect("written");
}

fn report(folder: &Path, words: &str) -> Output {
    run(folder, &format!("report --before {} {words}", kept().display()))
}

#[test]
fn a_build_fails_where_something_became_worse() {
    let dir = folder();
    later(dir.path(), "same", 1.0);
    later(dir.path(), "slow", 0.5);
    let same = report(dir.path(), "same --fail-if-worse 5%");
    assert!(same.stderr.contains("none of "), "{}", same.stderr);
    same.ok();
    let slow = report(dir.path(), "slow --fail-if-worse 5%").failed(4);
    assert!(slow.contains("vm ringtap-vhost dd-throughput, "), "{slow}");
    report(dir.path(), "slow").ok();
    report(dir.path(), "slow --fail-if-worse 60%").ok();
    let xml = report(dir.path(), "slow --fail-if-worse 5% --output junit");
    assert_eq!(xml.status.code(), Some(4));
    assert!(xml.stdout.contains("<failure "), "{}", xml.stdout);
    let json = report(dir.path(), "slow --fail-if-worse 5% --output json");
    let json: Value = serde_json::from_str(&json.stdout).expect("JSON");
    assert_eq!(json["gate"]["worse"].as_array().map(Vec::len), Some(1), "{}", json["gate"]);
    let wrong = report(dir.path(), "slow --fail-if-worse five").failed(2);
    assert!(wrong.contains("write 5% or 5"), "{wrong}");
    let metrics = run(dir.path(), "report --output openmetrics same").ok();
    assert!(
        metrics.ends_with("# EOF\n") && metrics.contains("ringtap_lab_bandwidth_bytes_per_second{"),
        "{metrics}"
    );
    report(dir.path(), "slow --output openmetrics").failed(2);
    run(dir.path(), "report slow --fail-if-worse 5%").failed(2);
}

#[test]
fn the_timers_script_keeps_runs_and_holds_each_against_a_base_that_stays() {
    let dir = folder();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../contrib/lab/ringtap-compare");
    let once = |limit: &str, rebase: &str| {
        let mut command = Command::new(&script);
        let words = "runs --stages host --backends native,loop-direct --workloads dd-latency-direct --size 32M --rounds 1";
        command.current_dir(dir.path()).args(words.split_whitespace()).args(["--dir", "."]);
        let path = std::env::var("PATH").expect("a path");
        let ours = ringtap().parent().expect("a folder").display().to_string();
        command.env("PATH", format!("{ours}:{path}")).env("LIMIT", limit).env("REBASE", rebase);
        command.env("METRICS", "ringtap.prom");
        Running::start(command).wait()
    };
    once("5%", "").ok();
    let link = |name: &str| fs::read_link(dir.path().join("runs").join(name)).expect("a run");
    let first = link("base");
    assert!(dir.path().join("runs").join(&first).join("report.html").exists());
    let metrics = fs::read_to_string(dir.path().join("ringtap.prom")).expect("metrics");
    assert!(metrics.contains("ringtap_lab_time_per_op_seconds{"), "{metrics}");
    // One round decides nothing, and that is no pass.
    let second = once("5%", "").failed(3);
    assert!(second.contains("nothing can be said"), "{second}");
    assert_eq!(link("base"), first);
    assert_ne!(link("last"), first);
    once("5%", "1").ok();
    assert_eq!(link("base"), link("last"));
    assert_ne!(link("base"), first);
}
