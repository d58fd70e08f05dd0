//! One answer for each comparison, wherever it is printed.

use ringtap_lab::plan::question;
use ringtap_lab::report::{self, Analysis, ranking, table};
use ringtap_lab::run::folder::{Record, State};
use ringtap_lab::sample::{Metric, Sample, Stage};
use ringtap_lab::stats::decision::Sensitivity;
use ringtap_lab::stats::{Decision, Why};

use super::{record, samples};

fn decision(
    analysis: &Analysis,
    arm: &str,
    against: &str,
    workload: &str,
    metric: Metric,
) -> Decision {
    analysis.row(Stage::Host, arm, against, workload, metric).unwrap().decision
}

#[test]
fn twelve_rounds_give_answers() {
    let analysis = Analysis::new(record(12, State::Complete), &samples(12));
    assert_eq!(analysis.complete_rounds, 0, "the nbd arms lack workloads, and nothing says why");
    let read = "randread-4k-qd32";
    let of = |arm, against| decision(&analysis, arm, against, read, Metric::Iops);
    assert_eq!(of("loop", "native"), Decision::Slower);
    assert_eq!(of("ringtap-nbd", "qemu-nbd"), Decision::Faster);
    // fio's engine for NBD has a cost of its own.
    let other = Decision::Withheld { why: Why::OtherGenerator };
    assert_eq!(of("ringtap-nbd", "native"), other);
    assert_eq!(of("qemu-nbd", "native"), other);
    // Equal, and no arm known to be slower shows that a difference could have been seen.
    assert_eq!(of("loop-direct", "native"), Decision::Withheld { why: Why::Unproven });
    assert_eq!(
        decision(&analysis, "loop", "native", "dd-latency-direct", Metric::TimePerOp),
        Decision::Slower
    );
    // The twin and metrics that were not named before the run get none.
    assert_eq!(of("native#2", "native"), Decision::Exploratory);
    assert_eq!(decision(&analysis, "loop", "native", read, Metric::P50), Decision::Exploratory);
    let floor = analysis.floor(Stage::Host, read, Metric::Iops).unwrap();
    assert!(floor.holds && floor.floor > 0.0 && floor.floor < 0.03, "{floor:?}");
    // Drift of 100 % over the run, and still the ratio is right: rounds are paired.
    let row = analysis.row(Stage::Host, "loop", "native", read, Metric::Iops).unwrap();
    let interval = row.interval.unwrap();
    assert!(interval.low > 0.49 && interval.high < 0.51, "{interval:?}");
    // Asked the other way round it is the same answer.
    let turned = analysis.answer(Stage::Host, "native", "loop", read, Metric::Iops).unwrap();
    assert_eq!(turned.decision, Decision::Faster);
    assert!((turned.ratio.unwrap() * row.ratio.unwrap() - 1.0).abs() < 1e-12);
}

/// Table, page, columns and findings print the answer of the row, and a failed control takes it from all of them.
#[test]
fn a_failed_control_leaves_no_answer_anywhere() {
    let mut all = samples(12);
    for sample in all.iter_mut().filter(|s| s.arm == "native#2") {
        sample.metrics.values_mut().for_each(|value| value.value *= 1.5);
    }
    let analysis = Analysis::new(record(12, State::Complete), &all);
    let read = "randread-4k-qd32";
    let vetoed = Decision::Withheld { why: Why::ControlFailed };
    assert_eq!(decision(&analysis, "loop", "native", read, Metric::Iops), vetoed);
    assert_eq!(decision(&analysis, "ringtap-nbd", "qemu-nbd", read, Metric::Iops), vetoed);
    assert!(report::words::claims(&analysis).iter().all(|claim| !claim.contains("4 KiB")));
    let text = table::render(&analysis, false, Some(200));
    assert!(text.contains("the A/A control failed"), "{text}");
    let section = text.split("\nhost: ").find(|part| part.starts_with("random read")).unwrap();
    assert!(!section.contains("faster") && !section.contains("slower"), "{section}");
    let answers = ranking::answers(&analysis);
    assert!(
        !answers[0]
            .1
            .iter()
            .any(|line| line.contains("depth 32") && line.contains("times as good"))
    );
}

/// A run with Ringtap over vhost-user, and with it slowed, which reaches so much of it.
pub fn with_slow(rounds: u32, share: f64) -> (Record, Vec<Sample>) {
    let (mut record, mut all) = (record(rounds, State::Complete), samples(rounds));
    for (name, speed) in [("ringtap-vhost", 1.0), ("slow", share)] {
        let mut arm = record.arms[0].clone();
        (arm.name, arm.backend) = (name.into(), name.into());
        record.arms.push(arm);
        let of: Vec<Sample> = all.iter().filter(|s| s.arm == "loop-direct").cloned().collect();
        all.extend(of.into_iter().map(|mut sample| {
            sample.arm = name.into();
            sample.metrics.values_mut().for_each(|value| value.value *= speed);
            sample
        }));
    }
    (record, all)
}

/// That a slower server is seen behind one load generator shows nothing of another's.
#[test]
fn no_difference_is_not_proven_by_another_load_generator() {
    let (record, all) = with_slow(12, 0.8);
    let analysis = Analysis::new(record, &all);
    let read = "randread-4k-qd32";
    let floor = analysis.floor(Stage::Host, read, Metric::Iops).unwrap();
    assert_eq!(floor.sensitivity, Sensitivity::Seen);
    let unproven = Decision::Withheld { why: Why::Unproven };
    assert_eq!(decision(&analysis, "loop-direct", "native", read, Metric::Iops), unproven);
}

/// Xen boots once: its rounds are no boots, and no answer comes of one.
#[test]
fn rounds_of_one_boot_are_one_block() {
    let blocks = |boot: &dyn Fn(&Sample) -> Option<u32>| {
        let mut all = samples(12);
        all.iter_mut().for_each(|sample| sample.boot = boot(sample));
        let analysis = Analysis::new(record(12, State::Complete), &all);
        let read = "randread-4k-qd32";
        let row = analysis.row(Stage::Host, "loop", "native", read, Metric::Iops).unwrap();
        (row.blocks, row.decision)
    };
    let few = Decision::Withheld { why: Why::TooFew };
    assert_eq!(blocks(&|_| None), (12, Decision::Slower));
    assert_eq!(blocks(&|of| Some(of.round / 2)), (6, Decision::Slower));
    assert_eq!(blocks(&|_| Some(3)), (1, few));
    // Booted anew in the middle of a round, which then has a part in both boots.
    let anew = |of: &Sample| Some(u32::from((of.round, of.position) > (5, 2)));
    assert_eq!(blocks(&anew), (1, few));
    // Each arm of a round by itself.
    assert_eq!(blocks(&|of| Some(of.round * 9 + of.position)), (12, Decision::Slower));
    // A lab of before did not count Xen's.
    let (mut record, mut all) = (record(12, State::Complete), samples(12));
    record.arms.iter_mut().for_each(|arm| arm.stage = Stage::Xen);
    all.iter_mut().for_each(|sample| sample.stage = Stage::Xen);
    let analysis = Analysis::new(record, &all);
    assert!(!analysis.rows.is_empty() && analysis.rows.iter().all(|row| row.blocks <= 1));
    let comparison = report::change::compare(&analysis, &analysis);
    assert!(comparison.changes.iter().all(|change| change.p.is_none()), "{comparison:?}");
}

/// The quotient of the medians may lie outside of it: rounds drift, and one arm has two that are odd.
#[test]
fn the_ratio_is_the_centre_of_the_interval_beside_it() {
    let mut all = samples(12);
    for sample in all.iter_mut().filter(|s| s.arm == "loop-direct") {
        let gain = if (6..8).contains(&sample.round) { 0.4 } else { 1.1 };
        sample.metrics.values_mut().for_each(|value| value.value *= gain);
    }
    let analysis = Analysis::new(record(12, State::Complete), &all);
    let read = "randread-4k-qd32";
    let row = analysis.row(Stage::Host, "loop-direct", "native", read, Metric::Iops).unwrap();
    let quotient = row.ours.unwrap().value / row.theirs.unwrap().value;
    assert!(row.interval.unwrap().low > quotient, "{row:?}");
    let text = table::render(&analysis, false, Some(200));
    let line = text.lines().find(|line| line.trim_start().starts_with("loop-direct")).unwrap();
    assert!(line.contains("1.10") && !line.contains("1.09"), "{line}");
    for row in &analysis.rows {
        if let Some(interval) = row.interval {
            let ratio = row.ratio.unwrap();
            assert!(interval.low <= ratio && ratio <= interval.high, "{row:?}");
            assert_eq!(ratio, interval.centre);
        }
    }
}

#[test]
fn a_question_of_thirteen_is_refused() {
    let mut record = record(12, State::Complete);
    let one = record.plan.questions[0].primary[0].clone();
    let question = &mut record.plan.questions[0];
    question.primary =
        (0..13).map(|n| question::Primary { against: format!("x{n}"), ..one.clone() }).collect();
    let error = question::check(&record.plan.questions).unwrap_err();
    assert!(error.contains("has 13 comparisons"), "{error}");
    record.plan.questions[0].primary = vec![one.clone(), one];
    assert!(question::check(&record.plan.questions).unwrap_err().contains("asked twice"));
}

#[test]
fn bounds_are_shown_as_bounds_and_decide_nothing() {
    let analysis = Analysis::new(record(12, State::Complete), &samples(12));
    let row = analysis.row(Stage::Host, "loop", "native", "bonnie", Metric::GetBlock).unwrap();
    let bound = Decision::Withheld { why: Why::Bound };
    assert_eq!((row.bound, row.interval, row.decision), (Some("<="), None, bound));
    let text = table::render(&analysis, false, Some(160));
    assert!(text.contains("≥ 500 MB/s"), "{text}");
}

/// Of a folder that says that it is whole, cut afterwards: which rounds are gone is said, and what they were part of is not decided.
#[test]
fn a_run_whose_samples_are_cut_is_no_whole_one() {
    let dir = tempfile::tempdir().unwrap();
    let run = super::write(dir.path(), "run", &record(14, State::Complete), &samples(14));
    let whole = report::load(&run).unwrap();
    assert_eq!(report::words::state_in_words(&whole), "14 rounds, complete");
    let read = "randread-4k-qd32";
    let of = |analysis: &Analysis| decision(analysis, "loop", "native", read, Metric::Iops);
    assert_eq!(of(&whole), Decision::Slower);
    let file = run.join("samples.jsonl");
    let text = std::fs::read_to_string(&file).unwrap();
    // In the middle of a line of the last round but one: twelve rounds, which would do, are whole.
    let at = text.lines().position(|line| line.contains("\"round\":12")).unwrap();
    let kept: Vec<&str> = text.lines().take(at + 3).collect();
    std::fs::write(&file, format!("{}\n{}", kept.join("\n"), "{\"stage\":\"ho")).unwrap();
    let cut = report::load(&run).unwrap();
    let told = report::words::state_in_words(&cut);
    assert!(told.starts_with("PARTIAL") && told.contains("12 of 14"), "{told}");
    assert!(told.ends_with("missing, or not whole: 13, 14"), "{told}");
    assert_eq!(of(&cut), Decision::Withheld { why: Why::RoundsMissing });
    assert!(report::page::render(&cut).contains("missing, or not whole: 13, 14"));
    assert!(table::render(&cut, false, Some(200)).contains("rounds are missing"));
    // One that was killed, or stopped, never said that it was whole: it is decided by what it has, and says what it has not.
    let mut killed = cut.run.clone();
    killed.state = State::Running;
    let killed = Analysis::new(killed, &cut.samples);
    assert_eq!(of(&killed), Decision::Slower);
    let told = report::words::state_in_words(&killed);
    assert!(told.contains("was killed") && told.ends_with("not whole: 13, 14"), "{told}");
    // A hole in the middle.
    let hole: Vec<_> = whole.samples.iter().filter(|one| one.round != 4).cloned().collect();
    let hole = Analysis::new(whole.run.clone(), &hole);
    assert!(report::words::state_in_words(&hole).ends_with("not whole: 5"));
    assert_eq!(of(&hole), Decision::Withheld { why: Why::RoundsMissing });
}
