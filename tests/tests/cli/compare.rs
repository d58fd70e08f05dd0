//! `ringtap compare` and `report` as users start them, with Ringtap among the backends.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use ringtap_tests::ringtap;
use rustix::process::Signal;
use serde_json::Value;

use crate::folder;
use crate::program::{Output, Running, program};

fn command(folder: &Path, words: &str) -> std::process::Command {
    let mut command = std::process::Command::new(ringtap());
    let seconds = if words.contains("--seconds") { "" } else { "--seconds 0.2" };
    let words = format!("compare {seconds} --ramp 0 --dir . {words}");
    command.current_dir(folder).args(words.split_whitespace());
    command
}

fn compare(folder: &Path, words: &str) -> Running {
    Running::start(command(folder, words))
}

fn json(output: Output) -> Value {
    serde_json::from_str(&output.ok()).expect("JSON")
}

/// Stage and arm of each series of values of a metric above 0.
fn measured(report: &Value, metric: &str) -> BTreeSet<String> {
    let series = report["series"].as_array().expect("series");
    let of_metric = series.iter().filter(|one| one["metric"] == metric);
    let good = of_metric.filter(|one| one["median"]["value"].as_f64() > Some(0.0));
    good.map(|one| format!("{} {}", one["stage"], one["arm"]).replace('"', "")).collect()
}

#[test]
fn ringtap_is_measured_on_the_host_and_in_a_real_guest() {
    let dir = folder();
    let words = "--rounds 1 --stages host,guest --size 32M --workloads randread-4k-qd32 --output json --out run \
                 --backends native,native-load,ringtap-nbd,ringtap-vhost,ubd";
    let report = json(compare(dir.path(), words).wait());
    assert_eq!(report["run"]["state"], "complete");
    assert_eq!(report["failures"].as_array().map(Vec::len), Some(0), "{}", report["failures"]);
    let all = [
        "guest ringtap-vhost",
        "guest ubd",
        "guest ubd#2",
        "host native",
        "host native#2",
        "host native-load",
        "host ringtap-nbd",
        "host ringtap-vhost",
    ];
    assert_eq!(measured(&report, "iops"), all.map(str::to_owned).into());
    let servers = ["guest ringtap-vhost", "host ringtap-nbd", "host ringtap-vhost"];
    assert_eq!(measured(&report, "server_cpu"), servers.map(str::to_owned).into());

    let again = super::run(dir.path(), "report run --output json");
    assert!(again.stderr.contains("run/report.html"), "{}", again.stderr);
    assert_eq!(json(again)["series"], report["series"]);
    let page = fs::read_to_string(dir.path().join("run/report.html")).expect("the page");
    assert!(page.contains("ringtap-vhost") && page.contains("<svg"), "no charts");
}

#[test]
fn an_overlay_of_ringtaps_own_is_served_fresh_to_each_workload() {
    let dir = folder();
    let words = "--rounds 1 --stages guest --size 32M --workloads randwrite-4k-qd1,snapshot-life --output json --out run \
                 --backends ubd,ringtap-overlay";
    let report = json(compare(dir.path(), words).wait());
    assert_eq!(report["failures"].as_array().map(Vec::len), Some(0), "{}", report["failures"]);
    let fresh = BTreeSet::from(["guest ringtap-overlay".to_owned()]);
    assert_eq!(measured(&report, "fresh_write"), fresh);
    assert!(measured(&report, "iops").is_superset(&fresh));
}

#[test]
fn two_loads_share_vhost_user_disks_and_fresh_overlays() {
    let dir = folder();
    // Most of it in common to both, on a busy machine, too.
    let words = "--seconds 3 --rounds 1 --stages two --size 32M --workloads two-write --output json --out run \
                 --backends ringtap-vhost,ringtap-overlay,lvm-snapshot";
    let report = json(compare(dir.path(), words).wait());
    assert_eq!(report["failures"].as_array().map(Vec::len), Some(0), "{}", report["failures"]);
    let mut all = ["ringtap-overlay", "ringtap-overlay#2", "ringtap-vhost"]
        .map(|arm| format!("two {arm}"))
        .to_vec();
    let skipped = report["run"]["skipped"].as_array().expect("what was skipped");
    match skipped.iter().find(|skip| skip["backend"] == "lvm-snapshot") {
        Some(skip) => assert!(skip["reason"].as_str().is_some_and(|why| !why.is_empty()), "{skip}"),
        None => all.push("two lvm-snapshot".into()),
    }
    assert_eq!(measured(&report, "sum_iops"), all.iter().cloned().collect());
    assert_eq!(measured(&report, "keeps"), all.into_iter().collect());
    let loads = report["contention"].as_array().expect("each of two loads");
    let of = |arm: &str| loads.iter().filter(|one| one["arm"] == arm).count();
    assert_eq!(of("ringtap-vhost"), 2, "each of two loads");
    let shares = loads.iter().filter_map(|one| one["share"].as_f64());
    assert!(
        shares.clone().count() > 0 && shares.into_iter().all(|part| (0.0..=1.0).contains(&part))
    );
}

#[test]
fn bonnie_itself_runs_and_is_read() {
    let dir = folder();
    let words = "--rounds 1 --stages host --size 64M --backends native --workloads bonnie --output json --out run";
    let report = json(compare(dir.path(), words).wait());
    assert_eq!(report["failures"].as_array().map(Vec::len), Some(0), "{}", report["failures"]);
    let workload = report["series"][0]["workload"].as_str().expect("a workload");
    assert!(workload.contains("bonnie"), "{workload}");
    let log = fs::read_to_string(dir.path().join("run/samples.jsonl")).expect("samples");
    assert_eq!(log.lines().count(), 3, "its flushes, native and its twin: {log}");
}

#[test]
fn a_terminal_sees_how_long_it_still_takes_and_a_file_does_not() {
    let dir = folder();
    let words =
        "--rounds 1 --stages host --size 32M --backends native --workloads randread-4k-qd32";
    let plain = compare(dir.path(), &format!("{words} --out plain")).wait();
    let line = format!("{} compare --seconds 0.2 --ramp 0 --dir .", ringtap().display());
    let mut script = program("script", "bsdutils");
    script.args(["-qec", &format!("{line} {words} --out shown"), "/dev/null"]);
    script.current_dir(dir.path());
    let shown = Running::start(script).wait().ok();
    assert!(shown.contains("s left"), "{shown:?}");
    assert!(!plain.stderr.contains("s left") && !plain.stderr.contains('\r'), "{}", plain.stderr);
    plain.ok();
}

#[test]
fn a_comparison_that_is_stopped_leaves_a_report_and_no_server() {
    let dir = folder();
    let words = "--rounds 50 --stages host,guest --size 32M --workloads randread-4k-qd32 --out run \
                 --backends native,ringtap-vhost,ubd";
    let mut running = compare(dir.path(), words);
    let samples = dir.path().join("run/samples.jsonl");
    running.until("first sample", |_| {
        fs::read_to_string(&samples).ok().filter(|text| text.contains("ringtap-vhost"))
    });
    running.signal(Signal::INT);
    let end = running.wait();
    assert_eq!(end.status.code(), Some(3), "{}", end.stderr);
    let page = fs::read_to_string(dir.path().join("run/report.html")).expect("the page");
    assert!(page.to_lowercase().contains("partial"), "it does not say that it is a part");
    let home = dir.path().canonicalize().expect("the folder");
    assert_eq!(left_in(&home), Vec::<String>::new(), "processes stay");
}

#[test]
fn a_comparison_over_fuse_leaves_no_mount_and_no_loop_device() {
    let dir = folder();
    let home = dir.path().canonicalize().expect("the folder");
    let start = |words: &str| {
        let words = format!(
            "--stages host --size 32M --backends native,ringtap-fuse --workloads randwrite-4k-qd1 {words}"
        );
        let mut command = command(&home, &words);
        // Mounts are where temporary files go.
        command.env("TMPDIR", &home);
        Running::start(command)
    };
    let device = || {
        let mut below: Vec<_> = fs::read_dir(&home).expect("it").flatten().collect();
        below.retain(|entry| entry.file_name().to_string_lossy().starts_with("ringtap-lab-"));
        let notes = below.iter().map(|lab| lab.path().join("host-ringtap-fuse-1/ringtap.loop"));
        notes.filter_map(|note| fs::read_to_string(note).ok()).find(|node| !node.is_empty())
    };
    let clean = || {
        let left = fs::read_dir(&home).expect("it").flatten().map(|entry| entry.file_name());
        let left: BTreeSet<_> = left.filter(|name| name != "whole" && name != "cut").collect();
        assert!(left.is_empty(), "{left:?}");
        let mounts = fs::read_to_string("/proc/self/mountinfo").expect("mounts");
        assert!(!mounts.contains(home.to_str().expect("a plain path")), "{mounts}");
        assert_eq!(left_in(&home), Vec::<String>::new(), "processes stay");
    };

    let report = json(start("--rounds 1 --out whole --output json").wait());
    clean();
    assert_eq!(report["failures"].as_array().map(Vec::len), Some(0), "{}", report["failures"]);
    let all = ["host native", "host native#2", "host ringtap-fuse"];
    assert_eq!(measured(&report, "iops"), all.map(str::to_owned).into());

    let mut running = start("--rounds 50 --out cut");
    let node = running.until("loop device", |_| device());
    running.signal(Signal::INT);
    let end = running.wait();
    assert_eq!(end.status.code(), Some(3), "{}", end.stderr);
    clean();
    // What lies on a mount that is gone is said to lie on nothing.
    let name = Path::new(&node).file_name().expect("a node");
    let file = Path::new("/sys/block").join(name).join("loop/backing_file");
    let file = fs::read_to_string(file).unwrap_or_default();
    assert!(file.trim() != "/" && !file.contains("ringtap.fuse"), "{node} still lies on {file}");
}

/// Command lines of the processes that have a file open, or their working folder, below a folder.
fn left_in(folder: &Path) -> Vec<String> {
    let processes = fs::read_dir("/proc").expect("/proc").flatten();
    let with_files = processes.filter(|process| {
        let links = fs::read_dir(process.path().join("fd")).into_iter().flatten().flatten();
        let files = links.map(|link| link.path()).chain([process.path().join("cwd")]);
        files.filter_map(|link| fs::read_link(link).ok()).any(|file| file.starts_with(folder))
    });
    let line = |path: &Path| fs::read_to_string(path.join("cmdline")).unwrap_or_default();
    with_files.map(|process| line(&process.path()).replace('\0', " ")).collect()
}
