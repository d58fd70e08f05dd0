//! A plan that was measured in two runs, each with loads of its own.

use super::*;
use ringtap_lab::run::rest;

const LEFT_OUT: &str = "bonnie";

/// The first run without one load, which is a gap with its reason, and a second with that load alone.
fn halves(dir: &Path) -> (std::path::PathBuf, std::path::PathBuf) {
    let mut first = record(3, State::Complete);
    first.skipped.push(Skip {
        stage: Stage::Host,
        backend: "loop".into(),
        workload: Some(LEFT_OUT.into()),
        missing: Missing::new("it was left out to stay within 40 minutes", "a longer --within"),
    });
    // What ran nothing but that load is not there at all.
    first.arms.retain(|arm| arm.name != "loop-direct");
    let mut rest = record(3, State::Complete);
    rest.began = "2026-11-22T21:00:00+00:00".into();
    rest.host.versions = vec![("ringtap".into(), "0.2".into())];
    first.host.versions = vec![("ringtap".into(), "0.1".into())];
    let (of_rest, of_first): (Vec<Sample>, Vec<Sample>) =
        samples(3).into_iter().partition(|s| s.workload == LEFT_OUT);
    let of_first: Vec<Sample> = of_first.into_iter().filter(|s| s.arm != "loop-direct").collect();
    let of_rest =
        of_rest.into_iter().map(|s| Sample { boot: Some(s.round), ..s }).collect::<Vec<_>>();
    (write(dir, "first", &first, &of_first), write(dir, "rest", &rest, &of_rest))
}

#[test]
fn what_was_left_out_is_set_beside_what_was_measured() {
    let dir = tempfile::tempdir().unwrap();
    let (first, rest) = halves(dir.path());
    for runs in [[&*first, &*rest], [&*rest, &*first]] {
        let (merged, all) = across::merge(&runs).unwrap();
        assert_eq!(merged.plan.rounds, 3, "no round is counted twice");
        assert_eq!(all.iter().map(|s| s.round).max(), Some(2));
        let gaps: Vec<&str> =
            merged.skipped.iter().filter_map(|skip| skip.workload.as_deref()).collect();
        assert!(gaps.is_empty(), "{gaps:?} are measured");
        assert!(merged.skipped.iter().any(|skip| skip.backend == "lvm"), "as before");
        let names: Vec<&str> = merged.arms.iter().map(|arm| arm.name.as_str()).collect();
        assert_eq!(names[..2], ["native", "native#2"], "the reference is the first");
        assert_eq!(names.iter().filter(|name| **name == "loop-direct").count(), 1, "{names:?}");
        assert!(
            merged.troubles.iter().any(|t| t.contains("version of ringtap differs between loads"))
        );
        let analysis = Analysis::new(merged, &all);
        for load in ["randread-4k-qd32", "dd-latency-direct", LEFT_OUT] {
            assert!(analysis.rows.iter().any(|row| row.workload == load), "{load}");
        }
    }
    // Another number of rounds is another plan.
    let mut more = record(4, State::Complete);
    more.began = "2026-11-23T21:00:00+00:00".into();
    let of_more: Vec<Sample> = samples(4).into_iter().filter(|s| s.workload == LEFT_OUT).collect();
    let more = write(dir.path(), "more", &more, &of_more);
    let error = across::merge(&[&first, &more]).unwrap_err().to_string();
    assert!(error.contains("the number of rounds differs"), "{error}");
}

#[test]
fn the_rest_of_a_run_is_its_plan_without_what_it_measured() {
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: ringtap_lab::cli::CompareArgs,
    }

    let dir = tempfile::tempdir().unwrap();
    let (first, _) = halves(dir.path());
    let args = |words: &[&str]| Cli::parse_from([&["compare"], words].concat()).args;
    let plan = rest::plan(&args(&["--within", "1h"]), &first).unwrap();
    let measured: Vec<&str> = plan.measured.iter().map(|(_, load)| load.as_str()).collect();
    assert_eq!(measured, ["dd-latency-direct", "randread-4k-qd32"]);
    assert_eq!((plan.within, plan.rounds), (Some(3600.0), 3));
    let broken = write(dir.path(), "broken", &record(3, State::Interrupted), &samples(2));
    let error = rest::plan(&args(&[]), &broken).unwrap_err().to_string();
    assert!(error.contains("did not come to its end"), "{error}");
    let words = ["compare", "--rest-of", "x", "--rounds", "3"];
    assert!(Cli::try_parse_from(words).is_err(), "the plan is that of the run");
}
