//! Two runs beside each other.

use std::sync::LazyLock;

use ringtap_lab::report::change::{self, Change, Comparison};
use ringtap_lab::report::{self, Analysis, change_page};
use ringtap_lab::run::folder::State;
use ringtap_lab::sample::{Metric, Sample, Stage, Value};
use scraper::{Html, Selector};

use super::{record, samples, write};

/// The machine is twice as fast afterwards; the loop device alone gained a half on top.
pub fn faster(rounds: u32) -> Vec<Sample> {
    let mut all = samples(rounds);
    for sample in &mut all {
        let gain = if sample.arm == "loop" { 3.0 } else { 2.0 };
        for (metric, value) in &mut sample.metrics {
            match metric {
                Metric::Iops | Metric::GetBlock => value.value *= gain,
                Metric::TimePerOp => value.value /= gain,
                _ => {}
            }
        }
    }
    all
}

/// Analysing a run takes a while where nothing is optimised: those that several tests look at are analysed once.
static OLD: LazyLock<Analysis> =
    LazyLock::new(|| Analysis::new(record(8, State::Complete), &samples(8)));
static NEW: LazyLock<Analysis> =
    LazyLock::new(|| Analysis::new(record(8, State::Complete), &faster(8)));

fn find<'a>(comparison: &'a Comparison, arm: &str, workload: &str) -> &'a Change {
    let of = |c: &&Change| c.arm == arm && c.workload == workload;
    let found = comparison.changes.iter().find(of);
    found.unwrap_or_else(|| panic!("{arm} {workload}: {comparison:?}"))
}

const READ: &str = "randread-4k-qd32";

#[test]
fn a_change_is_seen_and_a_faster_machine_is_none() {
    let (old, new) = (&*OLD, &*NEW);
    let comparison = change::compare(old, new);
    let change = find(&comparison, "loop", READ);
    let ratio = |change: &Change| change.ratio.unwrap();
    assert!((ratio(change) - 1.5).abs() < 0.02 && change.verdict == change::BETTER, "{change:?}");
    assert_eq!((change.by.as_deref(), change.rounds), (Some("native"), (8, 8)));
    let (low, high) = change.interval.unwrap();
    assert!(1.45 < low && low < 1.5 && 1.5 < high && high < 1.55, "{change:?}");
    let latency = find(&comparison, "loop", "dd-latency-direct");
    assert!((ratio(latency) - 1.5).abs() < 0.02 && latency.verdict == change::BETTER);
    let back = change::compare(new, old);
    assert_eq!(find(&back, "loop", "dd-latency-direct").verdict, change::WORSE);
    let same = find(&comparison, "qemu-nbd", READ);
    assert!((ratio(same) - 1.0).abs() < 0.02 && same.verdict == "the same within 5 %", "{same:?}");
    let machine = find(&comparison, "native", READ);
    assert!((ratio(machine) - 2.0).abs() < 0.3 && machine.by.is_none(), "the machine itself");
    assert!(comparison.unlike.is_empty() && comparison.only.is_empty(), "{comparison:?}");
    let text = change::markdown(old, new, &comparison);
    assert!(text.contains("| better |") && text.contains("host loop is better in "), "{text}");
    assert!(text.contains(&change::sum(&comparison.changes)), "{text}");
}

#[test]
fn few_rounds_and_bounds_decide_nothing_and_are_shown() {
    let new = &*NEW;
    let few = Analysis::new(record(5, State::Interrupted), &samples(5));
    let comparison = change::compare(&few, new);
    assert!(comparison.changes.iter().all(|c| c.interval.is_none() && c.p.is_none()));
    let change = find(&comparison, "loop", READ);
    assert!(change.ratio.is_some() && change.verdict == "points only", "{change:?}");
    // The reference has bounds only: what is taken by it is no number either, and still a row.
    let bonnie = find(&comparison, "loop", "bonnie");
    assert_eq!((bonnie.ratio, bonnie.verdict.as_str()), (None, "bounds in some rounds"));
    assert_eq!(bonnie.rounds, (5, 8));
    assert!(change::markdown(&few, new, &comparison).contains("PARTIAL: interrupted"));
    assert!(change_page::render(&few, new, &comparison).contains("PARTIAL: interrupted"));
}

#[test]
fn one_bound_among_the_rounds_is_not_left_out() {
    let mut one = samples(8);
    let bounded = one.iter_mut().find(|s| s.arm == "loop" && s.workload == READ && s.round == 7);
    let bound = Value { value: 1e6, at_least: true };
    bounded.unwrap().metrics.insert(Metric::Iops, bound);
    let comparison = change::compare(&OLD, &Analysis::new(record(8, State::Complete), &one));
    assert_eq!(find(&comparison, "loop", READ).verdict, "bounds in some rounds");
}

/// What a load cannot show, it does not show to be the same.
#[test]
fn a_blind_load_is_not_said_to_be_the_same() {
    let verdict = |share| {
        let (record, all) = super::decisions::with_slow(8, share);
        let run = Analysis::new(record, &all);
        find(&change::compare(&run, &run), "loop", READ).verdict.clone()
    };
    assert_eq!(verdict(0.8), "the same within 5 %");
    assert_eq!(verdict(1.0), "blind here");
}

/// Each run by its own reference would set ratios beside other ratios.
#[test]
fn both_runs_are_taken_by_what_both_have() {
    let without = |name: &str, samples: &[Sample]| {
        let mut other = record(8, State::Complete);
        other.arms.retain(|arm| arm.backend != name);
        Analysis::new(other, samples)
    };
    // The first of these is native, and of those the loop device.
    let (old, new) = (without("loop", &samples(8)), without("native", &faster(8)));
    let comparison = change::compare(&old, &new);
    let change = find(&comparison, "qemu-nbd", READ);
    assert_eq!(change.by.as_deref(), Some("loop-direct"));
    assert!((change.ratio.unwrap() - 1.0).abs() < 0.02, "{change:?}");
    let base = find(&comparison, "loop-direct", READ);
    assert!(base.by.is_none() && (base.ratio.unwrap() - 2.0).abs() < 0.4, "{base:?}");
    let lost = comparison.only.iter().find(|only| only.arm == "native").unwrap();
    assert_eq!((lost.has, lost.why.as_str()), ("before", "the backend was not in its plan"));
}

#[test]
fn what_only_one_run_has_is_said_with_the_reason() {
    let (mut old, mut new) = (record(8, State::Complete), record(8, State::Complete));
    old.plan.workloads.retain(|workload| workload != "dd-latency-direct");
    old.host.versions = vec![("fio".into(), "fio-3.33".into())];
    new.host.versions = vec![("dd".into(), "9.1".into()), ("fio".into(), "fio-3.40".into())];
    new.arms.retain(|arm| arm.name != "loop");
    new.skipped[0].backend = "loop".into();
    let mut all = samples(8);
    all.retain(|s| s.arm != "loop");
    for sample in all.iter_mut().filter(|s| s.arm == "qemu-nbd") {
        sample.metrics.clear();
        sample.error = Some("it broke\nwith much to say".into());
    }
    let (old, new) = (Analysis::new(old, &samples(8)), Analysis::new(new, &all));
    let comparison = change::compare(&old, &new);
    let why = |arm: &str| {
        let of = |only: &&change::Only| only.arm == arm;
        comparison.only.iter().find(of).unwrap_or_else(|| panic!("{arm}: {comparison:?}"))
    };
    assert_eq!(why("loop").why, "could not run: this kernel has no device-mapper");
    assert_eq!(why("loop").workloads, [READ, "bonnie"]);
    assert_eq!(why("qemu-nbd").why, "failed: it broke");
    assert_eq!(
        (why("native").has, why("native").why.as_str()),
        ("after", "the workload was not in its plan")
    );
    assert_eq!(comparison.unlike.len(), 1, "{:?}", comparison.unlike);
    assert_eq!(comparison.unlike[0].what, "the version of fio");
    let text = change::markdown(&old, &new, &comparison);
    assert!(text.contains("fio-3.40") && text.contains("no device-mapper"), "{text}");
}

#[test]
fn versions_of_bonnie_are_not_compared() {
    let noted = |version: &str| -> Vec<Sample> {
        let mut all = samples(8);
        for sample in all.iter_mut().filter(|s| s.workload == "bonnie") {
            sample.note = Some(format!("bonnie++ {version}: 170 MiB of data"));
            sample.metrics = [(Metric::PutBlock, 1e8.into())].into_iter().collect();
        }
        all
    };
    let run = |version| Analysis::new(record(8, State::Complete), &noted(version));
    let (older, newer) = (run("1.03"), run("2.00a"));
    let comparison = change::compare(&older, &newer);
    let change = find(&comparison, "loop", "bonnie");
    assert_eq!((change.ratio, change.interval), (None, None));
    assert_eq!(change.verdict, "not compared: bonnie++ 1.03 and 2.00a");
    assert!(comparison.unlike.iter().any(|u| u.what == "the version of bonnie++"));
    let alike = change::compare(&newer, &newer);
    assert_eq!(find(&alike, "loop", "bonnie").verdict, "the same within 5 %");
}

#[test]
fn the_page_of_changes_is_written_and_sound() {
    let dir = tempfile::tempdir().unwrap();
    let mut other = record(8, State::Complete);
    other.host.kernel = "Linux <99>".into();
    other.arms.retain(|arm| arm.name != "ringtap-nbd");
    let old = report::load(&write(dir.path(), "a", &record(8, State::Complete), &samples(8)));
    let new = report::load(&write(dir.path(), "b", &other, &faster(8)));
    let (old, new) = (old.unwrap(), new.unwrap());
    let comparison = change::compare(&old, &new);
    let folder = dir.path().join("c d");
    let path = report::write_changes(&folder, &old, &new, &comparison).unwrap();
    let text = std::fs::read_to_string(&path).unwrap();
    let page = Html::parse_document(&text);
    assert!(page.errors.is_empty(), "{:?}", page.errors);
    let all = |selector: &str| page.select(&Selector::parse(selector).unwrap()).collect::<Vec<_>>();
    assert!(all("link, img, iframe, object, embed, form, [src], [href], [onclick]").is_empty());
    for forbidden in ["http:", "https:", "url(", "@import", "fetch("] {
        assert!(!text.contains(forbidden), "{forbidden}");
    }
    assert_eq!(all("script").len(), 1);
    let charts: Vec<String> = all("table.strips").iter().map(|of| of.text().collect()).collect();
    assert_eq!(charts.len(), 2, "reads and dd; bonnie has bounds only");
    assert!(charts[0].contains("loop device") && charts[0].contains("× 1.50"), "{}", charts[0]);
    let (bands, rows) = (all(".strips rect[fill='var(--band)']"), all(".strips tbody tr"));
    assert!(bands.len() == rows.len() && !rows.is_empty(), "the noise floor beside each");
    let words: String = page.root_element().text().collect();
    for told in
        ["Linux <99>", "In one of the runs only", "bounds in some rounds", "host loop is better"]
    {
        assert!(words.contains(told), "{told}");
    }
    let find =
        |arm: &str| comparison.changes.iter().any(|c| c.arm == arm && c.stage == Stage::Host);
    assert!(find("loop") && !find("ringtap-nbd") && !find("native#2"));
}
