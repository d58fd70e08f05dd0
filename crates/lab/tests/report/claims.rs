//! Published claims of the stages xen and two-vms, asked of runs that are made up.

use ringtap_lab::plan::question;
use ringtap_lab::report::Analysis;
use ringtap_lab::report::finding::{Answer, Outcome};
use ringtap_lab::run::folder::{Arm, State};
use ringtap_lab::sample::{Metric, Sample, Stage};

use super::{record, samples};

fn arm(stage: Stage, name: &str, backend: &str) -> Arm {
    let (title, remark, command) = (String::new(), None, None);
    let (name, backend) = (name.into(), backend.into());
    Arm { stage, name, backend, title, cached: false, remark, command }
}

/// A run of so many arms in one workload; `value` of each by its name.
fn run(
    stage: Stage,
    arms: &[&str],
    workload: &str,
    metrics: &[Metric],
    value: &dyn Fn(&str, Metric) -> f64,
) -> Analysis {
    let mut record = record(12, State::Complete);
    record.plan.stages = vec![stage];
    record.plan.backends = arms.iter().map(|name| (stage, (*name).to_owned())).collect();
    record.plan.workloads = vec![workload.into()];
    record.plan.questions = question::published(&record.plan);
    let twin = format!("{}#2", arms[0]);
    let names = arms.iter().copied().chain([twin.as_str()]);
    record.arms = names.map(|name| arm(stage, name, name.trim_end_matches("#2"))).collect();
    let one = samples(1).remove(0);
    let mut all = Vec::new();
    for round in 0..12u32 {
        for (position, arm) in (0u32..).zip(&record.arms) {
            let noise = 1.0 + 0.002 * f64::from((round * 7 + position * 3) % 5) - 0.004;
            let metrics = metrics
                .iter()
                .map(|metric| (*metric, (value(&arm.backend, *metric) * noise).into()))
                .collect();
            all.push(Sample {
                stage,
                arm: arm.name.clone(),
                workload: workload.into(),
                round,
                position,
                // A round is a boot of its own.
                boot: Some(round),
                metrics,
                ..one.clone()
            });
        }
    }
    Analysis::new(record, &all)
}

fn find<'a>(analysis: &'a Analysis, arm: &str, metric: Metric) -> &'a Answer {
    let answers = analysis.findings.iter().flat_map(|finding| &finding.answers);
    let is = |answer: &&Answer| answer.arm == arm && answer.metric == metric;
    answers.into_iter().find(is).unwrap_or_else(|| panic!("{arm} {metric:?}"))
}

/// Natively, in a PV guest, and Ringtap as it is and known to be slower.
const XEN: [&str; 4] = ["phy-lvm", "native", "tap-raw", "tap-slow"];

fn guest_at(ratio: f64) -> Analysis {
    run(Stage::Xen, &XEN, "filecopy", &[Metric::Copy1024], &|arm, _| match arm {
        "phy-lvm" => 1e8 * ratio,
        "tap-slow" => 0.8e8,
        _ => 1e8,
    })
}

#[test]
fn what_was_published_as_equal_holds_where_it_is_equal() {
    let outcome = |ratio| find(&guest_at(ratio), "phy-lvm", Metric::Copy1024).outcome;
    assert_eq!(outcome(1.0), Some(Outcome::Held));
    assert_eq!(outcome(0.5), Some(Outcome::Differs));
    assert_eq!(outcome(1.5), Some(Outcome::Differs));
    assert_eq!(
        find(&guest_at(0.5), "phy-lvm", Metric::Copy1024).published.as_deref(),
        Some("1.03")
    );
}

#[test]
fn a_load_in_which_a_slower_server_does_not_show_is_blind() {
    let analysis = run(Stage::Xen, &XEN, "filecopy", &[Metric::Copy1024], &|_, _| 1e8);
    let answer = find(&analysis, "phy-lvm", Metric::Copy1024);
    assert_eq!(answer.outcome, Some(Outcome::Blind), "{answer:?}");
}

#[test]
fn each_of_two_guests_columns_are_told_and_what_each_keeps_is_held_against_what_was_published() {
    let arms = ["virtio-raw", "ringtap-vhost", "loop", "slow"];
    let metrics =
        [Metric::FirstPutAlone, Metric::FirstPut, Metric::FirstPutKeeps, Metric::SecondPutKeeps];
    let analysis = run(Stage::TwoVms, &arms, "two-bonnie", &metrics, &|_, metric| match metric {
        Metric::FirstPutAlone => 2e7,
        Metric::FirstPut => 1e7,
        Metric::FirstPutKeeps => 0.5,
        _ => 0.05,
    });
    let first = find(&analysis, "loop", Metric::FirstPutKeeps);
    assert_eq!(
        (first.outcome, first.published.as_deref()),
        (Some(Outcome::Held), Some("0.39–0.61"))
    );
    let second = find(&analysis, "loop", Metric::SecondPutKeeps);
    assert_eq!(second.outcome, Some(Outcome::OtherSize), "a twentieth, and no half");
    let tables = analysis.findings.iter().flat_map(|finding| &finding.tables);
    let table = tables.into_iter().find(|t| t.title.contains("bonnie++ in two guests")).unwrap();
    assert!(table.heads.contains(&"block write, the first beside the other"), "{:?}", table.heads);
    assert!(table.rows.iter().any(|row| row[2].starts_with("10.0 MB/s")), "{:?}", table.rows);
}

/// What one keeps is decided as any other comparison: by twelve rounds, with a control that held.
#[test]
fn what_one_keeps_is_no_claim_without_rounds_or_a_control() {
    let arms = ["virtio-raw", "ringtap-vhost", "loop", "slow"];
    let keeps = Metric::FirstPutKeeps;
    let whole = run(Stage::TwoVms, &arms, "two-bonnie", &[keeps], &|_, _| 0.5);
    let outcome = |analysis: &Analysis| find(analysis, "loop", keeps).outcome;
    assert_eq!(outcome(&whole), Some(Outcome::Held));
    let mut few = whole.samples.clone();
    few.retain(|sample| sample.round < 11);
    let mut short = whole.run.clone();
    short.plan.rounds = 11;
    assert_eq!(outcome(&Analysis::new(short, &few)), Some(Outcome::Open));
    // Of a run that was to have more, which says that it is whole.
    assert_eq!(outcome(&Analysis::new(whole.run.clone(), &few)), Some(Outcome::NotComparable));
    let mut broken = whole.samples.clone();
    for sample in broken.iter_mut().filter(|sample| sample.arm.ends_with("#2")) {
        sample.metrics.values_mut().for_each(|value| value.value *= 1.5);
    }
    let broken = Analysis::new(whole.run.clone(), &broken);
    assert_eq!(outcome(&broken), Some(Outcome::NotComparable));
}
