//! Rows of others beside a run.

use std::path::PathBuf;

use ringtap_lab::report::Analysis;
use ringtap_lab::report::beside::{self, Beside, Pair};
use ringtap_lab::run::folder::State;
use ringtap_lab::sample::{Metric, Sample};

use super::{record, samples};

/// A published row of bonnie++ 1.03.
const LOOP: &str = "vm101,2064M,25511,35,18075,3,199488,47,71094,98,937880,86,+++++,+++,16,+++++,+++,+++++,+++,+++++,+++,+++++,+++,+++++,+++,+++++,+++";

const FIO: &str = r#"nbd: connected
{ "fio version": "fio-3.40", "global options": { "bs": "4k", "iodepth": "32", "direct": "1" }, "jobs": [
  { "jobname": "theirs | x", "job options": { "rw": "randread" }, "read": { "total_ios": 90, "iops": 50000.0, "bw_bytes": 204800000,
    "lat_ns": { "percentile": { "50.000000": 600000, "99.000000": 900000 } } }, "write": { "total_ios": 0 } },
  { "jobname": "completion", "job options": { "rw": "randread" }, "read": { "total_ios": 90, "iops": 1.0, "bw_bytes": 4096,
    "lat_ns": { "mean": 7 }, "clat_ns": { "percentile": { "50.000000": 500000 } } } },
  { "jobname": "many", "job options": { "rw": "randread", "numjobs": "4" }, "read": { "total_ios": 90, "iops": 8.0, "bw_bytes": 1 } },
  { "jobname": "cached", "job options": { "rw": "randread", "direct": "0" }, "read": { "total_ios": 90, "iops": 9.0, "bw_bytes": 1 } },
  { "jobname": "large", "job options": { "rw": "randread", "bs": "64k" }, "read": { "total_ios": 90, "iops": 7.0, "bw_bytes": 1 } } ] }"#;

fn of(version: &str) -> Vec<Sample> {
    let noted = |s: Sample| Sample {
        note: s.note.map(|_| format!("bonnie++ {version}: 8 MiB of data")),
        ..s
    };
    samples(6).into_iter().map(noted).collect()
}

fn set(version: &str, files: &[(&str, &str)]) -> Result<Beside, String> {
    let dir = tempfile::tempdir().unwrap();
    let paths: Vec<PathBuf> = files.iter().map(|(name, _)| dir.path().join(name)).collect();
    files.iter().zip(&paths).for_each(|((_, text), path)| std::fs::write(path, text).unwrap());
    let analysis = Analysis::new(record(6, State::Complete), &of(version));
    beside::beside(&analysis, &paths).map_err(|error| error.to_string())
}

fn find<'a>(beside: &'a Beside, metric: Metric, arm: &str) -> &'a Pair {
    let is = |pair: &&Pair| {
        pair.metric == metric && pair.ours.as_ref().is_some_and(|(name, _)| name.contains(arm))
    };
    beside.pairs.iter().find(is).unwrap_or_else(|| panic!("{metric:?} {arm}: {beside:?}"))
}

#[test]
fn bonnies_rows_stand_beside_those_of_the_same_version() {
    let beside = set("1.03", &[("theirs.csv", LOOP)]).unwrap();
    let pair = find(&beside, Metric::GetBlock, "host loop bonnie");
    let (_, ours) = pair.ours.as_ref().unwrap();
    let theirs = 937_880.0 * 1024.0;
    assert_eq!(pair.theirs.value, theirs);
    assert!((pair.ratio.unwrap() - ours.value / theirs).abs() < 1e-9, "{pair:?}");
    // The reference has bounds only.
    let native = find(&beside, Metric::GetBlock, "native");
    assert_eq!((native.ratio, native.why.as_deref()), (None, Some("a bound")));
    let alone = beside.pairs.iter().find(|pair| pair.metric == Metric::PutChar).unwrap();
    assert_eq!(alone.why.as_deref(), Some("nothing here asks the same"));
    let other = set("2.00a", &[("theirs.csv", LOOP)]).unwrap();
    let pair = find(&other, Metric::GetBlock, "host loop bonnie");
    assert!(pair.ratio.is_none() && pair.why.as_deref().unwrap().contains("something else"));
}

#[test]
fn fios_jobs_stand_beside_loads_that_ask_the_same() {
    let beside = set("1.03", &[("a.json", FIO), ("b.csv", LOOP)]).unwrap();
    let pair = find(&beside, Metric::Iops, "host loop randread-4k-qd32");
    let (_, ours) = pair.ours.as_ref().unwrap();
    assert!((pair.ratio.unwrap() - ours.value / 50_000.0).abs() < 1e-9, "{pair:?}");
    // A latency is better where it is lower.
    let latency = find(&beside, Metric::P50, "host loop randread-4k-qd32");
    let (_, ours) = latency.ours.as_ref().unwrap();
    assert!((latency.ratio.unwrap() - 600_000.0 / ours.value).abs() < 1e-9, "{latency:?}");
    let large = beside.rows.iter().position(|row| row.name == "large").unwrap();
    assert!(beside.pairs.iter().filter(|p| p.row == large).all(|p| p.ours.is_none()));
    // Of completion alone, of several jobs, or through a page cache: not what is measured here.
    let of = |name: &str| {
        let at = beside.rows.iter().position(|row| row.name == name).unwrap();
        beside.pairs.iter().filter(move |pair| pair.row == at)
    };
    let p50 = of("completion").find(|pair| pair.metric == Metric::P50).unwrap();
    assert!(
        p50.ratio.is_none() && p50.why.as_ref().unwrap().contains("completion alone"),
        "{p50:?}"
    );
    assert!(of("completion").any(|pair| pair.metric == Metric::Iops && pair.ratio.is_some()));
    for (name, why) in [("many", "4 jobs at once"), ("cached", "through the page cache")] {
        assert!(
            of(name).all(|p| p.ours.is_none() && p.why.as_ref().unwrap().contains(why)),
            "{name}"
        );
        assert!(of(name).count() > 0);
    }
    let text = beside::markdown(&beside);
    assert!(
        text.contains("| theirs   x | fio-3.40, randread (read) of 4096 bytes, depth 32 |"),
        "{text}"
    );
    assert!(text.lines().filter(|l| l.starts_with('|')).all(|l| l.matches('|').count() == 8));
}

/// They were taken for 4096 bytes as fast as it goes.
#[test]
fn a_job_that_asks_something_else_has_no_ratio() {
    for (options, error, why) in [
        (r#""bs": "4k,64k""#, 0, "4k,64k"),
        (r#""bs": "lots""#, 0, "lots"),
        (r#""iodepth": "?""#, 0, "depth"),
        (r#""bssplit": "4k/50:64k/50""#, 0, "bssplit=4k/50:64k/50"),
        (r#""bsrange": "1k-8k""#, 0, "bsrange=1k-8k"),
        (r#""rate_iops": "100""#, 0, "rate_iops=100"),
        (r#""rate": "1m""#, 0, "rate=1m"),
        (r#""rw": "randread""#, 5, "error 5"),
    ] {
        let text = format!(
            r#"{{ "fio version": "fio-3.40", "global options": {{ "bs": "4k", "iodepth": "32", "direct": "1", "rw": "randread" }},
            "jobs": [ {{ "jobname": "x", "error": {error}, "job options": {{ {options} }},
            "read": {{ "total_ios": 90, "iops": 5.0, "bw_bytes": 20480 }} }} ] }}"#
        );
        let beside = set("1.03", &[("a.json", &text)]).unwrap();
        assert!(!beside.pairs.is_empty(), "{options}");
        for pair in &beside.pairs {
            assert!(pair.ours.is_none() && pair.ratio.is_none(), "{options}: {pair:?}");
            assert!(pair.why.as_ref().unwrap().contains(why), "{pair:?}");
        }
        assert!(beside::markdown(&beside).contains(why), "{options}");
    }
    let same = FIO.replace(r#""jobname": "theirs | x","#, r#""jobname": "theirs", "error": 0,"#);
    assert!(set("1.03", &[("a.json", &same)]).unwrap().pairs.iter().any(|p| p.ratio.is_some()));
}

#[test]
fn what_is_neither_is_refused_by_name() {
    for text in
        ["", "rubbish", "{}", "{\"jobs\": []}", "a,b,c,d,e,f,g,h,i,j,k,l,m,n,o,p,q,r,s,t,u,v"]
    {
        let error = set("1.03", &[("bad.file", text)]).unwrap_err();
        assert!(error.contains("bad.file"), "{text}: {error}");
    }
}
