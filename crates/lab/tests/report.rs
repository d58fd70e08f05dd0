//! The report as a pure function of a run's folder, on a folder that is made up.

use std::path::Path;

use ringtap_lab::env::Missing;
use ringtap_lab::host::Host;
use ringtap_lab::plan::Plan;
use ringtap_lab::report::{self, Analysis, html, table};
use ringtap_lab::run::folder::{Arm, Folder, Record, Skip, State};
use ringtap_lab::sample::{Metric, Sample, Stage, Value};
use ringtap_lab::stats::Verdict;
use scraper::{Html, Selector};

/// (arm, its speed as a share of the reference's)
const ARMS: &[(&str, f64)] =
    &[("native", 1.0), ("native#2", 1.0), ("loop", 0.5), ("ringtap-nbd", 2.0), ("qemu-nbd", 1.0)];

fn record(rounds: u32, state: State) -> Record {
    let arm = |(name, _): &(&str, f64)| Arm {
        stage: Stage::Host,
        name: (*name).into(),
        backend: name.trim_end_matches("#2").into(),
        title: "<b>a & b</b>".into(),
        cached: *name == "loop",
        remark: Some("its CPU is not counted".into()),
        command: Some("serve --x 'a b'".into()),
    };
    Record {
        lab: "0".into(),
        began: "2026-11-21T21:00:00+00:00".into(),
        ended: None,
        state,
        troubles: vec!["loop: </pre><script>alert(1)</script>".into()],
        plan: Plan {
            stages: vec![Stage::Host, Stage::Guest],
            backends: ARMS
                .iter()
                .filter(|a| !a.0.contains('#'))
                .map(|a| (Stage::Host, a.0.into()))
                .collect(),
            workloads: vec!["randread-4k-qd32".into(), "dd-latency-direct".into(), "bonnie".into()],
            rounds,
            size: 1 << 28,
            seconds: 0.4,
            ramp: 0.0,
            seed: 3,
            dir: "/var/tmp".into(),
        },
        host: Host { cpu: "CPU <1>".into(), ..Host::default() },
        guest: None,
        stages: Vec::new(),
        arms: ARMS.iter().map(arm).collect(),
        skipped: vec![Skip {
            stage: Stage::Host,
            backend: "lvm".into(),
            workload: None,
            missing: Missing::new("this kernel has no device-mapper", "another kernel"),
        }],
    }
}

fn samples(rounds: u32) -> Vec<Sample> {
    let mut list = Vec::new();
    for round in 0..rounds {
        for (position, (arm, speed)) in (0..).zip(ARMS) {
            // The level drifts by round; each arm has its own small noise.
            let noise = 1.0 + 0.004 * f64::from((round * 7 + position * 3) % 5) - 0.008;
            let level = (1.0 + 0.2 * f64::from(round)) * speed * noise;
            for workload in ["randread-4k-qd32", "dd-latency-direct", "bonnie"] {
                if workload != "randread-4k-qd32" && arm.ends_with("nbd") {
                    continue;
                }
                let bounded = arm.starts_with("native");
                let metrics: Vec<(Metric, Value)> = match workload {
                    "randread-4k-qd32" => vec![
                        (Metric::Iops, (100_000.0 * level).into()),
                        (Metric::P50, (300_000.0 / level).into()),
                        (Metric::P99, (900_000.0 / level).into()),
                        (Metric::ServerCpu, (10.0 / speed).into()),
                        (Metric::ClientCpu, 3.0.into()),
                    ],
                    "dd-latency-direct" => vec![(Metric::TimePerOp, (50_000.0 / level).into())],
                    _ => vec![(
                        Metric::GetBlock,
                        Value { value: 5e8 * if bounded { 1.0 } else { level }, at_least: bounded },
                    )],
                };
                list.push(Sample {
                    stage: Stage::Host,
                    arm: (*arm).into(),
                    workload: workload.into(),
                    round,
                    position,
                    began_ms: 1,
                    seconds: 0.5,
                    metrics: metrics.into_iter().collect(),
                    ledger: None,
                    curve: Vec::new(),
                    note: (workload == "bonnie").then(|| "a note <here>".into()),
                    error: None,
                });
            }
        }
    }
    list
}

fn verdict(
    analysis: &Analysis,
    arm: &str,
    against: &str,
    workload: &str,
    metric: Metric,
) -> Verdict {
    analysis.row(Stage::Host, arm, against, workload, metric).unwrap().verdict
}

#[test]
fn six_rounds_give_verdicts() {
    let analysis = Analysis::new(record(6, State::Complete), &samples(6));
    assert_eq!(analysis.complete_rounds, 0, "the nbd arms lack workloads, and nothing says why");
    let read = "randread-4k-qd32";
    assert_eq!(verdict(&analysis, "loop", "native", read, Metric::Iops), Verdict::Slower);
    assert_eq!(verdict(&analysis, "ringtap-nbd", "native", read, Metric::Iops), Verdict::Faster);
    assert_eq!(verdict(&analysis, "ringtap-nbd", "qemu-nbd", read, Metric::Iops), Verdict::Faster);
    assert!(matches!(
        verdict(&analysis, "qemu-nbd", "native", read, Metric::Iops),
        Verdict::Equivalent { .. }
    ));
    assert_eq!(
        verdict(&analysis, "loop", "native", "dd-latency-direct", Metric::TimePerOp),
        Verdict::Slower
    );
    // The twin and metrics that are no headline get none.
    assert_eq!(verdict(&analysis, "native#2", "native", read, Metric::Iops), Verdict::None);
    assert_eq!(verdict(&analysis, "loop", "native", read, Metric::P50), Verdict::None);
    let floor = analysis.floor(Stage::Host, read, Metric::Iops).unwrap();
    assert!(floor.holds && floor.floor > 0.0 && floor.floor < 0.03, "{floor:?}");
    // Drift of 100 % over the run, and still the ratio is right: rounds are paired.
    let row = analysis.row(Stage::Host, "loop", "native", read, Metric::Iops).unwrap();
    let interval = row.interval.unwrap();
    assert!(interval.low > 0.49 && interval.high < 0.51, "{interval:?}");
}

#[test]
fn bounds_are_shown_as_bounds_and_decide_nothing() {
    let analysis = Analysis::new(record(6, State::Complete), &samples(6));
    let row = analysis.row(Stage::Host, "loop", "native", "bonnie", Metric::GetBlock).unwrap();
    assert_eq!((row.bound, row.interval, row.verdict), (Some("<="), None, Verdict::None));
    let text = table::render(&analysis, false, Some(160));
    assert!(text.contains("≥ 500 MB/s"), "{text}");
}

#[test]
fn five_rounds_are_points() {
    let analysis = Analysis::new(record(5, State::Complete), &samples(5));
    assert!(analysis.rows.iter().all(|row| row.interval.is_none() && row.verdict == Verdict::None));
    assert!(analysis.rows.iter().any(|row| row.ratio.is_some()));
    assert!(table::render(&analysis, false, Some(160)).contains("no verdicts"));
}

#[test]
fn the_page_is_sound_and_needs_nothing_else() {
    let analysis = Analysis::new(record(6, State::Interrupted), &samples(6));
    let text = html::render(&analysis);
    let page = Html::parse_document(&text);
    assert!(page.errors.is_empty(), "{:?}", page.errors);
    let all = |selector: &str| page.select(&Selector::parse(selector).unwrap()).collect::<Vec<_>>();
    assert!(
        all("script, link, img, iframe, object, embed, image, use, form").is_empty(),
        "nothing is loaded, nothing runs"
    );
    assert!(all("[src], [href], [srcset], [style*=url], [onclick], [onload]").is_empty());
    for forbidden in ["http:", "https:", "url(", "@import", "<script"] {
        assert!(!text.contains(forbidden), "{forbidden}");
    }
    assert!(text.contains("prefers-color-scheme: dark"));
    // Every arm has its bar in every workload that it has samples of.
    let charts: Vec<String> = all("section svg").iter().map(|svg| svg.text().collect()).collect();
    assert_eq!(charts.len(), 5, "bars, latency and cost; bars; bars");
    for (arm, _) in ARMS {
        assert!(
            charts[0].contains(arm) && charts[1].contains(arm) && charts[2].contains(arm),
            "{arm}"
        );
    }
    let words: String = page.root_element().text().collect();
    assert!(
        words.contains("PARTIAL: interrupted")
            && words.contains("device-mapper")
            && words.contains("<b>a & b</b>")
    );
    assert!(words.contains("a note <here>"));
}

#[test]
fn a_folder_read_back_gives_the_same_report() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let mut folder = Folder::create(&run).unwrap();
    folder.write_record(&record(6, State::Complete)).unwrap();
    samples(6).iter().for_each(|sample| folder.append(sample).unwrap());
    let direct = Analysis::new(record(6, State::Complete), &samples(6));
    let page = |analysis: &Analysis| html::render(analysis);
    assert_eq!(page(&report::load(&run).unwrap()), page(&direct));
    assert_eq!(page(&report::load(&run).unwrap()), page(&direct), "and again the same");
    let json = serde_json::to_value(&direct).unwrap();
    let row = json["rows"]
        .as_array()
        .unwrap()
        .iter()
        .find(|r| r["arm"] == "loop" && r["metric"] == "iops")
        .unwrap();
    assert_eq!(row["verdict"], "slower");
    cut_last_line(&run);
    assert_eq!(
        report::load(&run).unwrap().series[0].values.len(),
        6,
        "a cut last line is left out"
    );
    std::fs::write(run.join("samples.jsonl"), "rubbish\n{\"x\":1}\n").unwrap();
    assert!(report::load(&run).unwrap_err().to_string().contains("line 1"));
}

fn cut_last_line(run: &Path) {
    let path = run.join("samples.jsonl");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, format!("{text}{{\"stage\":\"ho")).unwrap();
}
