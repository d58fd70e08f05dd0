//! What stops a build, and results in the forms of others: JUnit, OpenMetrics.

use std::io::Write;
use std::process::{Command, Output, Stdio};

use quick_junit::{Report, TestCase, TestCaseStatus};
use ringtap_lab::report::change::{self, Comparison};
use ringtap_lab::report::gate::{self, Gate};
use ringtap_lab::report::limit::Limit;
use ringtap_lab::report::{Analysis, junit, openmetrics};
use ringtap_lab::run::folder::State;
use ringtap_lab::sample::{Metric, Sample};

use super::{record, samples};

/// The loop device at this share of its reads a second before; the whole machine at half.
fn slower(rounds: u32, share: f64) -> Vec<Sample> {
    let mut all = samples(rounds);
    for sample in &mut all {
        let of = if sample.arm == "loop" { share } else { 1.0 } * 0.5;
        sample.metrics.entry(Metric::Iops).and_modify(|value| value.value *= of);
    }
    all
}

fn compared(before: u32, after: &[Sample], rounds: u32) -> Comparison {
    let old = Analysis::new(record(before, State::Complete), &samples(before));
    let new = Analysis::new(record(rounds, State::Complete), after);
    change::compare(&old, &new)
}

fn judged(comparison: &Comparison, limit: &str) -> Gate {
    gate::judge(comparison, limit.parse().unwrap())
}

#[test]
fn what_is_worse_than_the_limit_is_named_and_nothing_else() {
    let comparison = compared(10, &slower(10, 0.8), 10);
    let gate = judged(&comparison, "5%");
    assert_eq!(gate.worse.len(), 1, "{gate:?}");
    let line = &gate.worse[0];
    assert!(line.starts_with("host loop randread-4k-qd32, ") && line.contains("0.80"), "{line}");
    assert!(gate.judged > 3, "{gate:?}");
    // A machine that is half as fast is none of it: what the others are taken by is not judged, and is no pass either.
    assert!(!gate.is_whole() && gate.base.iter().all(|line| line.starts_with("host native ")));
    assert!(judged(&comparison, "25").worse.is_empty(), "0.80 lies within 25 %");
    let small = compared(10, &slower(10, 0.97), 10);
    let verdict = small.changes.iter().find(|c| c.arm == "loop").map(|c| c.verdict.as_str());
    assert_eq!(verdict, Some("the same within 5 %"), "the table's margin, not the operator's");
    assert_eq!(judged(&small, "1%").worse.len(), 1, "{:?}", judged(&small, "1%"));
    assert!(judged(&small, "4%").worse.is_empty());
    let better = compared(10, &slower(10, 1.3), 10);
    assert!(judged(&better, "0%").worse.is_empty());
    assert!(judged(&better, "0%").text().starts_with("none of "));
}

#[test]
fn what_is_missing_or_cannot_be_said_is_no_pass() {
    let few = judged(&compared(10, &slower(4, 0.5), 4), "5%");
    assert!(few.worse.is_empty() && !few.is_whole(), "{few:?}");
    assert!(few.text().contains("nothing can be said"), "{}", few.text());
    let mut without = slower(10, 1.0);
    without.retain(|sample| sample.arm != "loop");
    let lost = judged(&compared(10, &without, 10), "5%");
    assert!(!lost.is_whole() && lost.lost.iter().any(|line| line.starts_with("host loop, ")));
}

/// Without a control that held in both runs, no difference is one, and none is no pass.
#[test]
fn a_load_without_a_control_that_held_is_not_judged() {
    let reads = |samples: &[Sample]| {
        let mut all = samples.to_vec();
        all.retain(|sample| sample.workload == "randread-4k-qd32");
        all
    };
    let broken = |samples: &[Sample]| {
        let mut all = reads(samples);
        for sample in all.iter_mut().filter(|sample| sample.arm == "native#2") {
            sample.metrics.values_mut().for_each(|value| value.value *= 1.5);
        }
        all
    };
    let missing = |samples: &[Sample]| {
        let mut all = reads(samples);
        all.retain(|sample| sample.arm != "native#2");
        all
    };
    let (old, new) = (samples(10), slower(10, 0.5));
    let judge = |before: &[Sample], after: &[Sample]| {
        let [before, after] =
            [before, after].map(|all| Analysis::new(record(10, State::Complete), all));
        let comparison = change::compare(&before, &after);
        let verdict = comparison.changes.iter().find(|change| change.arm == "loop").unwrap();
        (judged(&comparison, "5%"), verdict.verdict.clone())
    };
    assert_eq!(judge(&reads(&old), &reads(&new)).0.worse.len(), 1);
    for (before, after, said) in [
        (broken(&old), reads(&new), "the A/A control of the earlier run failed"),
        (reads(&old), broken(&new), "the A/A control of the later run failed"),
        (missing(&old), reads(&new), "the earlier run has no A/A control"),
        (reads(&old), missing(&new), "the later run has no A/A control"),
    ] {
        let (gate, verdict) = judge(&before, &after);
        assert_eq!(verdict, format!("withheld: {said}"));
        assert!(gate.worse.is_empty() && !gate.is_whole(), "{said}: {gate:?}");
        assert!(gate.text().contains("A/A control"), "{}", gate.text());
    }
}

/// Where Ringtap is its plan's reference it is judged all the same.
#[test]
fn ringtap_is_never_what_the_others_are_taken_by() {
    let compare = |kept: &[&str], slow: &str| {
        let run = |share: f64| {
            let mut all = samples(12);
            all.retain(|sample| sample.workload == "randread-4k-qd32");
            for sample in &mut all {
                // The first arm, its twin and another's, without the drift of the machine.
                let drift = 1.0 + 0.2 * f64::from(sample.round);
                let of = if sample.arm.trim_end_matches("#2") == slow { share } else { 1.0 };
                sample.metrics.values_mut().for_each(|value| value.value *= of / drift);
            }
            for sample in &mut all {
                sample.arm = sample.arm.replace("native", "ringtap-first");
            }
            let mut record = record(12, State::Complete);
            for arm in &mut record.arms {
                arm.name = arm.name.replace("native", "ringtap-first");
                arm.backend = arm.backend.replace("native", "ringtap-first");
            }
            record.arms.retain(|arm| kept.contains(&arm.name.trim_end_matches("#2")));
            Analysis::new(record, &all)
        };
        change::compare(&run(1.0), &run(0.5))
    };
    let comparison = compare(&["ringtap-first", "qemu-nbd"], "native");
    let ours = comparison.changes.iter().find(|change| change.arm == "ringtap-first").unwrap();
    assert_eq!(ours.by.as_deref(), Some("qemu-nbd"));
    let gate = judged(&comparison, "5%");
    assert!(gate.worse.len() == 1 && gate.worse[0].contains("ringtap-first"), "{gate:?}");
    // Alone it is as measured.
    let gate = judged(&compare(&["ringtap-first"], "native"), "5%");
    assert!(gate.worse.len() == 1 && gate.judged == 1, "{gate:?}");
    // And where what it is taken by got slower, nobody knows what of it is the machine.
    let gate = judged(&compare(&["ringtap-first", "qemu-nbd"], "qemu-nbd"), "5%");
    assert!(gate.worse.is_empty() && !gate.is_whole() && gate.base.len() == 1, "{gate:?}");
    assert!(gate.text().contains("is itself worse"), "{}", gate.text());
}

#[test]
fn what_failed_or_did_not_end_is_no_pass() {
    let mut all = samples(10);
    for sample in all.iter_mut().filter(|sample| sample.arm == "loop" && sample.round % 4 == 0) {
        sample.metrics.clear();
        sample.error = Some("no room".into());
    }
    let half = compared(10, &all, 10);
    let gate = judged(&half, "5%");
    assert!(gate.worse.is_empty() && !gate.is_whole(), "{gate:?}");
    assert!(gate.text().contains("failed in the later run:\n  host loop, "), "{}", gate.text());
    let name = format!("loop randread-4k-qd32 {}", Metric::Iops.title());
    assert!(has(&cases(&junit::changes(&half, None).unwrap()), &name, is_bad));

    let old = Analysis::new(record(10, State::Complete), &samples(10));
    for state in [State::Interrupted, State::Failed, State::Running] {
        let comparison = change::compare(&old, &Analysis::new(record(10, state), &samples(10)));
        let gate = judged(&comparison, "5%");
        assert!(!gate.is_whole() && gate.text().contains("PARTIAL"), "{}", gate.text());
        let list = cases(&junit::changes(&comparison, None).unwrap());
        assert!(has(&list, "came to its end", is_bad));
    }
}

#[test]
fn a_limit_is_a_share() {
    for good in ["5%", "5", "0.5 %", "0"] {
        good.parse::<Limit>().unwrap_or_else(|e| panic!("{good}: {e}"));
    }
    for bad in ["", "five", "100%", "-1", "nan", "inf"] {
        assert!(bad.parse::<Limit>().unwrap_err().contains("no share"), "{bad}");
    }
}

fn cases(xml: &str) -> Vec<TestCase> {
    let report = Report::deserialize_from_str(xml).unwrap_or_else(|e| panic!("{e}: {xml}"));
    report.test_suites.into_iter().flat_map(|suite| suite.test_cases).collect()
}

fn has(cases: &[TestCase], name: &str, of: fn(&TestCaseStatus) -> bool) -> bool {
    cases.iter().any(|case| case.name.as_str() == name && of(&case.status))
}

fn is_bad(status: &TestCaseStatus) -> bool {
    matches!(status, TestCaseStatus::NonSuccess { .. })
}

fn is_good(status: &TestCaseStatus) -> bool {
    matches!(status, TestCaseStatus::Success { .. })
}

#[test]
fn junit_has_a_case_for_each_change_and_for_each_arm_and_load() {
    let comparison = compared(10, &slower(10, 0.8), 10);
    let title = Metric::Iops.title();
    let xml = junit::changes(&comparison, Some("5%".parse().unwrap())).unwrap();
    let list = cases(&xml);
    assert_eq!(list.len(), comparison.changes.len());
    assert!(has(&list, &format!("loop randread-4k-qd32 {title}"), is_bad), "{xml}");
    assert!(has(&list, &format!("qemu-nbd randread-4k-qd32 {title}"), is_good), "{xml}");
    let loose = junit::changes(&comparison, Some("30%".parse().unwrap())).unwrap();
    assert!(!has(&cases(&loose), &format!("loop randread-4k-qd32 {title}"), is_bad));

    let mut all = samples(3);
    for sample in all.iter_mut().filter(|sample| sample.arm == "qemu-nbd") {
        sample.metrics.clear();
        sample.error = Some("it <failed> & \"ended\"".into());
    }
    let xml = junit::run(&Analysis::new(record(3, State::Complete), &all)).unwrap();
    let list = cases(&xml);
    assert!(has(&list, "qemu-nbd randread-4k-qd32", is_bad), "{xml}");
    assert!(has(&list, "loop randread-4k-qd32", is_good), "{xml}");
    // As a parser that is not of this crate's family reads it.
    let parsed = python(
        "import sys, xml.etree.ElementTree as e; print(len(e.parse(sys.stdin).findall('.//testcase')))",
        &xml,
    );
    assert_eq!(
        String::from_utf8_lossy(&parsed.stdout).trim(),
        list.len().to_string(),
        "{parsed:?}"
    );
}

#[test]
fn openmetrics_is_read_by_prometheus_own_parser() {
    let text =
        openmetrics::render(&Analysis::new(record(12, State::Complete), &samples(12))).unwrap();
    let script = "import sys\n\
        from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse\n\
        for f in parse(sys.stdin.read()):\n    \
            for s in f.samples: print(s.name, s.labels.get('backend'), s.labels.get('workload'), s.value)";
    let parsed = python(script, &text);
    assert!(parsed.status.success(), "{}\n{text}", String::from_utf8_lossy(&parsed.stderr));
    let lines = String::from_utf8(parsed.stdout).unwrap();
    let value = |start: &str| -> f64 {
        let line = lines.lines().find(|line| line.starts_with(start));
        let line = line.unwrap_or_else(|| panic!("{start}: {lines}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    };
    let loops = value("ringtap_lab_iops loop randread-4k-qd32 ");
    let native = value("ringtap_lab_iops native randread-4k-qd32 ");
    assert!((loops / native - 0.5).abs() < 0.02, "{lines}");
    assert!(
        value("ringtap_lab_p50_seconds native randread-4k-qd32 ") < 1e-3,
        "in seconds: {lines}"
    );
    assert!((value("ringtap_lab_times_as_good loop randread-4k-qd32 ") - 0.5).abs() < 0.02);
    assert!(
        !lines.contains("ringtap_lab_times_as_good loop bonnie"),
        "a bound is no ratio: {lines}"
    );
    assert_eq!(value("ringtap_lab_began_timestamp_seconds "), 1_795_294_800.0);
}

#[test]
fn openmetrics_has_no_ratio_of_a_load_whose_control_failed() {
    let has = |all: &[Sample]| {
        let text = openmetrics::render(&Analysis::new(record(12, State::Complete), all)).unwrap();
        text.contains("ringtap_lab_times_as_good{")
    };
    let mut all = samples(12);
    assert!(has(&all));
    for sample in all.iter_mut().filter(|sample| sample.arm == "native#2") {
        sample.metrics.values_mut().for_each(|value| value.value *= 1.5);
    }
    assert!(!has(&all));
}

fn python(script: &str, input: &str) -> Output {
    let mut child = Command::new("/usr/bin/python3")
        .args(["-c", script])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}
