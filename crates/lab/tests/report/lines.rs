//! The four lines at the end of a comparison, on runs of the usual question that are made up.

use std::path::Path;

use clap::Parser;
use ringtap_lab::CompareArgs;
use ringtap_lab::backend;
use ringtap_lab::env::Missing;
use ringtap_lab::plan::Plan;
use ringtap_lab::report::{Analysis, lines, page};
use ringtap_lab::run::folder::{Arm, Record, Skip, State};
use ringtap_lab::sample::{Metric, Sample, Stage};

use super::{record, samples};

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: CompareArgs,
}

fn plan() -> Plan {
    Plan::from_args(&Cli::parse_from(["compare", "--dir", "/tmp", "--seed", "3"]).args).unwrap()
}

/// How fast an arm is in a load, in thousands a second.
type Speed<'a> = &'a dyn Fn(&str, &str) -> f64;

/// A run of the usual question with these speeds and flushes for each fsync.
fn run(speed: Speed<'_>, flushes: &dyn Fn(&str) -> Option<f64>) -> Analysis {
    let plan = plan();
    let names: Vec<String> = plan.backends.iter().map(|(_, name)| name.clone()).collect();
    let arm = |name: &str| {
        let of = name.trim_end_matches("#2");
        let entry = backend::find(Stage::Vm, of).unwrap();
        Arm {
            stage: Stage::Vm,
            name: name.into(),
            backend: of.into(),
            title: entry.title.into(),
            cached: entry.backend.cached(),
            remark: None,
            command: None,
        }
    };
    let twin = format!("{}#2", names[0]);
    let all: Vec<&str> = names.iter().map(String::as_str).chain([twin.as_str()]).collect();
    let template = samples(1).remove(0);
    let mut list = Vec::new();
    for name in &names {
        if let Some(flushes) = flushes(name) {
            list.push(Sample {
                stage: Stage::Vm,
                arm: name.clone(),
                workload: "durability".into(),
                metrics: [(Metric::FlushPerSync, flushes.into())].into(),
                ..template.clone()
            });
        }
    }
    for round in 0..plan.rounds {
        for (position, name) in (0..).zip(&all) {
            let of = name.trim_end_matches("#2");
            for load in plan.workloads.iter().filter(|load| plan.runs(Stage::Vm, load, of)) {
                let noise = 1.0 + 0.004 * f64::from((round * 7 + position * 3) % 5) - 0.008;
                let value = 1000.0 * speed(of, load) * noise;
                list.push(Sample {
                    stage: Stage::Vm,
                    arm: (*name).into(),
                    workload: load.clone(),
                    round,
                    position,
                    boot: Some(round),
                    metrics: [(Metric::Iops, value.into()), (Metric::Bandwidth, value.into())]
                        .into(),
                    note: None,
                    ..template.clone()
                });
            }
        }
    }
    let mut arms: Vec<Arm> = all.iter().map(|name| arm(name)).collect();
    arms.sort_by_key(|arm| names.iter().position(|name| *name == arm.backend));
    let record = Record { plan, arms, skipped: Vec::new(), ..record(12, State::Complete) };
    Analysis::new(record, &list)
}

fn honest(arm: &str) -> Option<f64> {
    Some(if arm == "qsd-vhost" { 0.0 } else { 1.01 })
}

fn usual(arm: &str, load: &str) -> f64 {
    match (arm, load) {
        ("slow", "randread-4k-qd1") => 1.0,
        ("slow", _) => 0.85,
        ("ringtap-vhost", "randwrite-4k-qd32") => 2.0,
        ("virtio-default", "write-4k-fsync") => 1.5,
        ("ringtap-overlay", _) => 3.0,
        _ => 1.0,
    }
}

fn four(analysis: &Analysis) -> [String; 4] {
    lines::lines(analysis, Path::new("/runs/1/report.html"))
}

#[test]
fn which_way_for_what() {
    let analysis = run(&usual, &honest);
    let [answer, same, out, page] = four(&analysis);
    assert!(answer.starts_with("Faster for a guest on this host: "), "{answer}");
    let write = answer.split("; ").find(|part| part.contains("random write, depth 32")).unwrap();
    assert!(write.contains("Ringtap raw (1.99 [") && write.contains("× QEMU's virtio-blk default"));
    assert!(write.contains("Ringtap fresh overlay (3.01 ["), "{write}");
    // Where the host's page cache is what is fast, it says so, and names it best nowhere.
    let (best, others) = answer.split_once(". Not named best: ").expect("who is faster is told");
    assert!(!best.contains("with fsync"), "{best}");
    assert!(
        others.contains("virtio-blk default (through the host's page cache) in ")
            && others.contains("with fsync"),
        "{others}"
    );
    assert!(same.starts_with("No different (within 8 %): "), "{same}");
    assert!(same.contains("sequential read") && !same.contains("Not decided"), "{same}");
    assert!(out.contains("blind here: 4 KiB random read, depth 1"), "{out}");
    assert!(out.contains("qemu-storage-daemon says an fsync is done that no flush was made for"));
    assert_eq!(page, "Page: /runs/1/report.html; all tables: -v");
    assert_eq!(page::answer(&analysis), answer, "the page says the same");
    let text = page::render(&analysis);
    assert!(text.contains("Ringtap fresh overlay (3.01 ["));
    // Every sign of the first screen is explained; what was not asked has no card.
    assert!(
        text.contains("<b>⊘</b> the load&#39;s controls failed")
            || text.contains("<b>⊘</b> the load's controls failed")
    );
    assert!(!text.contains("<b>≠</b>"), "there is none of these");
    assert!(
        !text.contains("Published: ") && !text.contains("What was published"),
        "nothing of it is asked"
    );
}

/// Barred or unchecked, it is named best nowhere, however fast.
#[test]
fn who_does_not_flush_is_named_best_nowhere() {
    let lies = |arm: &str| Some(if arm == "virtio-default" { 0.0 } else { 1.0 });
    let [answer, _, out, _] = four(&run(&usual, &lies));
    assert!(
        !answer.contains("virtio-blk default, by") && !answer.contains("virtio-blk default (1")
    );
    assert!(answer.contains("Ringtap raw (1.99 ["), "{answer}");
    assert!(out.contains("QEMU's virtio-blk default says an fsync is done"), "{out}");
    let [answer, _, out, _] = four(&run(&usual, &|_| None));
    assert!(answer.contains("nothing that may be named best was shown to be better"), "{answer}");
    assert!(answer.contains("Ringtap raw (flushes not counted) in "), "{answer}");
    let [answer, ..] = four(&run(&|_, _| 1.0, &honest));
    assert_eq!(answer, "For a guest on this host no way was shown to be better than another.");
    assert!(out.contains("flushes were not counted of all"), "{out}");
}

#[test]
fn a_failed_control_has_no_answer_and_says_so() {
    let plain = run(&|_, _| 1.0, &honest);
    let mut all = plain.samples.clone();
    for sample in
        all.iter_mut().filter(|s| s.arm == "virtio-default#2" && s.workload == "read-1m-qd8")
    {
        sample.metrics.values_mut().for_each(|value| value.value *= 1.5);
    }
    let [_, same, out, _] = four(&Analysis::new(plain.run.clone(), &all));
    assert!(out.contains("no answer for sequential read"), "{out}");
    assert!(!same.contains("sequential read"), "{same}");
}

#[test]
fn twelve_lines_are_enough_whatever_happened() {
    let analysis = run(&usual, &honest);
    let mut all = analysis.samples.clone();
    for sample in all.iter_mut().filter(|s| s.arm.starts_with("ringtap") && s.round % 2 == 1) {
        sample.error = Some(format!(
            "a server of {} that ended with many words: {}",
            sample.arm,
            "why ".repeat(90)
        ));
        sample.metrics.clear();
    }
    let mut run = analysis.run.clone();
    run.state = State::Interrupted;
    run.skipped = vec![Skip {
        stage: Stage::Vm,
        backend: "host-loop".into(),
        workload: None,
        missing: Missing::new("loop devices need root", "sudo"),
    }];
    let broken = Analysis::new(run, &all);
    for analysis in [&analysis, &broken] {
        // Two more are said before: how long it takes, and that there is no KVM.
        let text = lines::render(analysis, Path::new("/runs/1/report.html"), Some(100));
        assert!(text.lines().count() <= 10, "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
        assert!(text.ends_with("Page: /runs/1/report.html; all tables: -v\n"), "{text}");
    }
    assert!(four(&broken)[2].contains("PARTIAL: interrupted"), "{:?}", four(&broken));
}
