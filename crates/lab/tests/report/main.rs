//! The report as a pure function of a run's folder, on a folder that is made up.

mod beside;
mod browser;
mod caches;
mod change;
mod claims;
mod decisions;
mod folder;
mod gate;
mod lines;
mod loads;
mod parts;
mod schema;
mod shown;

use std::path::Path;

use ringtap_lab::env::Missing;
use ringtap_lab::host::Host;
use ringtap_lab::plan::Plan;
use ringtap_lab::plan::question;
use ringtap_lab::report::finding::Outcome;
use ringtap_lab::report::ranking::{self, Group};
use ringtap_lab::report::{self, Analysis, across, page, table};
use ringtap_lab::run::folder::{Arm, Folder, Record, SCHEMA, Skip, State};
use ringtap_lab::sample::{Layer, Ledger, Metric, Sample, Stage, Value};
use scraper::{Html, Selector};

/// (arm, its speed as a share of the reference's)
const ARMS: &[(&str, f64)] = &[
    ("native", 1.0),
    ("native#2", 1.0),
    ("loop", 0.5),
    ("loop-direct", 1.0),
    ("ringtap-nbd", 2.0),
    ("qemu-nbd", 1.0),
];

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
    let mut record = Record {
        schema: SCHEMA,
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
            within: None,
            boot_limit: None,
            memory: None,
            only: Default::default(),
            measured: Vec::new(),
            own: Vec::new(),
            questions: Vec::new(),
            sized_by_noise: false,
            margin: 0.05,
        },
        host: Host { cpu: "CPU <1>".into(), ..Host::default() },
        guest: None,
        stages: Vec::new(),
        written: None,
        arms: ARMS.iter().map(arm).collect(),
        skipped: vec![Skip {
            stage: Stage::Host,
            backend: "lvm".into(),
            workload: None,
            missing: Missing::new("this kernel has no device-mapper", "another kernel"),
        }],
    };
    record.plan.questions = question::usual(&record.plan);
    record
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
                    boot: None,
                    began_ms: 1,
                    seconds: 0.5,
                    metrics: metrics.into_iter().collect(),
                    ledger: None,
                    curve: Vec::new(),
                    stalls: Vec::new(),
                    movement: None,
                    note: (workload == "bonnie").then(|| "a note <here>".into()),
                    error: None,
                });
            }
        }
    }
    list
}

/// The same run with the flushes of these arms counted.
fn checked(flushes: &[(&str, f64)], mut all: Vec<Sample>) -> Analysis {
    let mut record = record(12, State::Complete);
    record.plan.workloads.push("durability".into());
    for (arm, flushes) in flushes {
        let mut sample = all[0].clone();
        sample.arm = (*arm).into();
        sample.workload = "durability".into();
        sample.metrics = [(Metric::FlushPerSync, (*flushes).into())].into_iter().collect();
        all.push(sample);
    }
    Analysis::new(record, &all)
}

const ALL_FLUSH: &[(&str, f64)] =
    &[("native", 1.0), ("loop-direct", 1.0), ("ringtap-nbd", 1.0), ("qemu-nbd", 1.0)];

#[test]
fn under_twelve_rounds_there_are_points() {
    let analysis = Analysis::new(record(5, State::Complete), &samples(5));
    assert!(analysis.rows.iter().all(|row| row.interval.is_none() && !row.decision.is_answer()));
    assert!(analysis.rows.iter().any(|row| row.ratio.is_some()));
    assert!(table::render(&analysis, false, Some(160)).contains("no verdicts"));
    let eleven = Analysis::new(record(11, State::Complete), &samples(11));
    assert!(eleven.rows.iter().all(|row| !row.decision.is_answer()));
    assert!(eleven.rows.iter().any(|row| row.interval.is_some()), "intervals without an answer");
}

#[test]
fn a_folder_read_back_gives_the_same_report() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let mut folder = Folder::create(&run).unwrap();
    folder.write_record(&record(12, State::Complete)).unwrap();
    samples(12).iter().for_each(|sample| folder.append(sample).unwrap());
    let direct = Analysis::new(record(12, State::Complete), &samples(12));
    let page = |analysis: &Analysis| page::render(analysis);
    assert_eq!(page(&report::load(&run).unwrap()), page(&direct));
    assert_eq!(page(&report::load(&run).unwrap()), page(&direct), "and again the same");
    let json = serde_json::to_value(&direct).unwrap();
    let row = json["rows"]
        .as_array()
        .unwrap()
        .iter()
        .find(|r| r["arm"] == "loop" && r["metric"] == "iops")
        .unwrap();
    assert_eq!(row["decision"], "slower");
    cut_last_line(&run);
    assert_eq!(
        report::load(&run).unwrap().series[0].values.len(),
        12,
        "a cut last line is left out"
    );
    std::fs::write(run.join("samples.jsonl"), "rubbish\n{\"x\":1}\n").unwrap();
    assert!(report::load(&run).unwrap_err().to_string().contains("line 1"));
}

fn write(dir: &Path, name: &str, record: &Record, samples: &[Sample]) -> std::path::PathBuf {
    let run = dir.join(name);
    let mut folder = Folder::create(&run).unwrap();
    folder.write_record(record).unwrap();
    samples.iter().for_each(|sample| folder.append(sample).unwrap());
    run
}

#[test]
fn the_first_page_answers_and_ranks_only_what_may_be_ranked() {
    // The fastest is seen not to flush.
    let flushes = [("native", 1.0), ("ringtap-nbd", 0.0), ("qemu-nbd", 1.01), ("loop-direct", 1.0)];
    let analysis = checked(&flushes, samples(12));
    let find = |name: &str| analysis.run.arms.iter().find(|arm| arm.name == name).unwrap();
    assert_eq!(ranking::group(&analysis, find("ringtap-nbd")), Group::Lies);
    assert_eq!(ranking::group(&analysis, find("loop")), Group::Cached);
    assert_eq!(ranking::group(&analysis, find("qemu-nbd")), Group::Durable);
    let answers = ranking::answers(&analysis);
    let read = answers[0].1.iter().find(|line| line.contains("depth 32")).unwrap();
    assert!(read.contains("loop is 0.50 times as good as native (95 %: "), "{read}");
    assert!(read.contains("another load generator: "), "{read}");
    let workload = ringtap_lab::workload::find("randread-4k-qd32").unwrap();
    let best = ranking::best(&analysis, Stage::Host, workload, Metric::Iops).unwrap();
    assert_ne!(best.0.name, "ringtap-nbd", "what does not flush is never named best");
    let claims = report::words::claims(&analysis).join("\n");
    assert!(claims.contains("ringtap-nbd (which does not flush)"), "{claims}");
    assert!(claims.contains("loop (through a page cache)"), "{claims}");
    let text = page::render(&analysis);
    let page = Html::parse_document(&text);
    let select = |css: &str| -> Vec<String> {
        let css = Selector::parse(css).unwrap();
        page.select(&css).map(|e| e.text().collect::<String>()).collect()
    };
    let rows = select("table.forest tbody tr");
    assert_eq!(rows.len(), 5, "the twin is no way of its own: {rows:?}");
    let row = |way: &str| rows.iter().find(|row| row.starts_with(way)).unwrap();
    assert!(row("Ringtap, NBD").starts_with("Ringtap, NBD✗"), "{rows:?}");
    assert!(row("loop device").starts_with("loop devicepage cache–"), "{rows:?}");
    assert!(row("qemu-nbd").starts_with("qemu-nbd✓"), "{rows:?}");
    assert!(text.contains("flushes do not reach the disk: 0.00 for each fsync; never ranked"));
    let unchecked = Analysis::new(self::record(12, State::Complete), &samples(12));
    assert!(page::render(&unchecked).contains("flushes were not counted"));
    assert!(table::render(&analysis, false, Some(160)).contains("HOSTS LIE"));
}

#[test]
fn what_the_device_did_not_see_is_not_ranked() {
    let read = "randread-4k-qd32";
    let best = |seen: f64| {
        let mut all = samples(12);
        for sample in all.iter_mut().filter(|s| s.arm == "ringtap-nbd" && s.workload == read) {
            let device = Some(Layer { read: seen, ..Layer::default() });
            sample.ledger = Some(Ledger { program: Some(1e6), device, ..Ledger::default() });
        }
        let analysis = checked(ALL_FLUSH, all);
        let workload = ringtap_lab::workload::find(read).unwrap();
        let best = ranking::best(&analysis, Stage::Host, workload, Metric::Iops).unwrap();
        (best.0.name.clone(), page::render(&analysis))
    };
    let (from_disk, page) = best(0.9e6);
    assert_eq!(from_disk, "ringtap-nbd");
    assert!(!page.contains("a cache: the device saw"));
    let (next, page) = best(0.1e6);
    assert_ne!(next, "ringtap-nbd");
    assert!(page.contains("a cache: the device saw 10.0 % of the bytes"));
}

#[test]
fn a_backend_that_failed_has_a_row_in_every_form() {
    let mut all = samples(12);
    for sample in all.iter_mut().filter(|s| s.arm == "qemu-nbd") {
        sample.metrics.clear();
        sample.error = Some("qemu-nbd failed\n`all` of it".into());
    }
    let analysis = Analysis::new(record(12, State::Complete), &all);
    let page = Html::parse_document(&page::render(&analysis));
    let css = Selector::parse("table.forest tbody tr, table.strips tbody tr").unwrap();
    let rows: Vec<String> = page.select(&css).map(|row| row.text().collect()).collect();
    let failed = |row: &&String| row.starts_with("qemu-nbd") && row.contains("failed");
    assert_eq!(rows.iter().filter(failed).count(), 2, "of the one workload that it had: {rows:?}");
    let words: String = page.root_element().text().collect();
    assert!(words.contains("What failed") && words.contains("`all` of it"));
    let text = table::render(&analysis, false, Some(160));
    assert!(
        text.lines().any(|l| l.starts_with("qemu-nbd") || l.starts_with(" qemu-nbd")),
        "{text}"
    );
    assert!(text.contains("failed: see below"), "{text}");
    let markdown = report::markdown::render(&analysis);
    assert!(markdown.contains("| qemu-nbd | failed: see below |"), "{markdown}");
    assert!(markdown.contains("(12 samples): `qemu-nbd failed 'all' of it`"), "{markdown}");
}

#[test]
fn files_beside_the_page_hold_every_number() {
    let dir = tempfile::tempdir().unwrap();
    let run = write(dir.path(), "run", &record(12, State::Complete), &samples(12));
    let analysis = report::load(&run).unwrap();
    report::write_html(&run, &analysis).unwrap();
    let csv = std::fs::read_to_string(run.join("samples.csv")).unwrap();
    let numbers: usize = samples(12).iter().map(|sample| sample.metrics.len()).sum();
    assert_eq!(csv.lines().count(), numbers + 1);
    assert!(csv.lines().all(|line| line.split(',').count() == 11), "{csv}");
    assert!(csv.contains(",get_block,BytesPerSecond,500000000,at_least"));
    let markdown = std::fs::read_to_string(run.join("report.md")).unwrap();
    assert!(markdown.contains("| loop device |") && markdown.contains("slower"), "{markdown}");
    let json: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(run.join("report.json")).unwrap()).unwrap();
    assert_eq!(json["rows"].as_array().unwrap().len(), analysis.rows.len());
}

#[test]
fn runs_of_one_plan_merge_and_others_do_not() {
    let dir = tempfile::tempdir().unwrap();
    let three = write(dir.path(), "a", &record(3, State::Complete), &samples(3));
    let four = write(dir.path(), "b", &record(4, State::Complete), &samples(4));
    let (merged, all) = across::merge(&[&three, &four]).unwrap();
    assert_eq!((merged.plan.rounds, all.len()), (7, samples(7).len()));
    assert!(all.iter().any(|sample| sample.round == 6) && all.iter().all(|s| s.round < 7));
    let analysis = Analysis::new(merged, &all);
    assert!(analysis.rows.iter().any(|row| row.interval.is_some()), "seven rounds together");
    // Of two that were interrupted, the rounds that are whole in either.
    let cut = |name: &str, began: &str| {
        let (mut record, samples) = (record(4, State::Interrupted), samples(3));
        record.began = began.into();
        let arms = record.arms.clone();
        record.plan.workloads.retain(|load| {
            arms.iter().all(|arm| {
                let is_of = |s: &&Sample| s.arm == arm.name && s.workload == *load;
                samples.iter().any(|s| is_of(&s) && s.stage == arm.stage)
            })
        });
        assert!(!record.plan.workloads.is_empty());
        write(dir.path(), name, &record, &samples)
    };
    let cut = [cut("f", "2026-11-20T22:00:00+00:00"), cut("g", "2026-11-20T23:00:00+00:00")];
    let (merged, all) = across::merge(&[&cut[0], &cut[1]]).unwrap();
    let analysis = Analysis::new(merged, &all);
    assert_eq!((analysis.complete_rounds, analysis.run.plan.rounds), (6, 8));
    let mut other = record(3, State::Complete);
    other.plan.size *= 2;
    let other = write(dir.path(), "c", &other, &samples(3));
    let error = across::merge(&[&three, &other]).unwrap_err().to_string();
    assert!(error.contains("the size of the disks") && error.contains("--before"), "{error}");
    assert!(error.contains("512 MiB") && error.contains("256 MiB"), "{error}");
    let newer: Vec<Sample> = samples(3)
        .into_iter()
        .map(|s| Sample { note: s.note.map(|_| "bonnie++ 2.00a: 8 MiB of data".into()), ..s })
        .collect();
    let older: Vec<Sample> = newer
        .iter()
        .cloned()
        .map(|s| Sample { note: s.note.map(|_| "bonnie++ 1.03: 8 MiB of data".into()), ..s })
        .collect();
    let newer = write(dir.path(), "d", &record(3, State::Complete), &newer);
    let earlier =
        Record { began: "2026-11-20T21:00:00+00:00".into(), ..record(3, State::Complete) };
    let older = write(dir.path(), "e", &earlier, &older);
    let error = across::merge(&[&older, &newer]).unwrap_err().to_string();
    assert!(error.contains("bonnie++ differs (2.00a, and 1.03)"), "{error}");
    // A run beside its copy would have each round twice.
    let error = across::merge(&[&three, &four, &newer]).unwrap_err().to_string();
    assert!(error.contains("named already"), "{error}");
    let error = across::merge(&[dir.path()]).unwrap_err().to_string();
    assert!(error.contains("holds no run"), "{error}");
}

/// A run in a guest as `ringtap compare published` makes it: (arm, block writes, block reads; MB/s).
fn published(rounds: u32) -> (Record, Vec<Sample>) {
    const GUESTS: &[(&str, f64, f64)] = &[
        ("virtio-raw", 100.0, 200.0),
        ("virtio-raw#2", 100.0, 200.0),
        ("ringtap-vhost", 90.0, 205.0),
        ("qsd-vhost", 91.0, 190.0),
        ("loop", 30.0, 600.0),
        ("lvm", 99.0, 199.0),
        ("lvm-snapshot", 12.0, 198.0),
    ];
    let mut record = record(rounds, State::Complete);
    let arms = GUESTS.iter().map(|(name, ..)| Arm {
        stage: Stage::Vm,
        name: (*name).into(),
        backend: name.trim_end_matches("#2").into(),
        cached: *name == "loop",
        ..record.arms[0].clone()
    });
    record.arms = arms.collect();
    record.plan.stages = vec![Stage::Vm];
    record.plan.workloads = vec!["bonnie-direct".into(), "snapshot-life".into()];
    let names = GUESTS.iter().filter(|guest| !guest.0.contains('#'));
    record.plan.backends = names.map(|guest| (Stage::Vm, guest.0.into())).collect();
    record.plan.questions = question::published(&record.plan);
    let mut list = Vec::new();
    for round in 0..rounds {
        for (position, (arm, write, read)) in (0..).zip(GUESTS) {
            let noise = 1.0 + 0.003 * f64::from((round * 5 + position * 3) % 7) - 0.009;
            let rate = |mega: f64| Value::from(mega * 1e6 * noise);
            let bound = Value { value: 2048.0, at_least: true };
            let bonnie = [
                (Metric::PutBlock, rate(*write)),
                (Metric::GetBlock, rate(*read)),
                (Metric::SeqCreate, bound),
            ];
            let life = [(Metric::FreshWrite, rate(10.0)), (Metric::SettledWrite, rate(80.0))];
            let mut add = |workload: &str, metrics: &[(Metric, Value)]| {
                list.push(Sample {
                    stage: Stage::Vm,
                    arm: (*arm).into(),
                    workload: workload.into(),
                    round,
                    position,
                    metrics: metrics.iter().copied().collect(),
                    ..samples(1)[0].clone()
                });
            };
            add("bonnie-direct", &bonnie);
            if *arm == "lvm-snapshot" {
                add("snapshot-life", &life);
            }
        }
    }
    (record, list)
}

#[test]
fn published_findings_are_asked_again_and_losses_are_said() {
    let (record, list) = published(12);
    let analysis = Analysis::new(record, &list);
    let find = |question: &str| {
        let found = analysis.findings.iter().find(|finding| finding.question == question);
        found.unwrap_or_else(|| panic!("{question}: {:?}", analysis.findings))
    };
    let file = find("A file against LVM");
    // Slower writes as published; reads are the other way round here.
    assert!(
        file.sum == "Of 2 comparisons: same direction, another size in 1, reversed in 1.",
        "{}",
        file.sum
    );
    let writes = file.lines.iter().find(|line| line.contains("block write")).unwrap();
    assert!(
        writes.contains("loop (through a page cache) 30")
            && writes.contains("0.30 times as good (95 %: 0."),
        "{writes}"
    );
    let answer = file.answers.iter().find(|a| a.metric == Metric::PutBlock).unwrap();
    assert_eq!(answer.published.as_deref(), Some("0.17–0.19"));
    assert_eq!(answer.outcome, Some(Outcome::OtherSize), "far from the published size: {answer:?}");
    assert!(answer.ringtap.as_ref().is_some_and(|ours| ours.starts_with("0.9")), "{answer:?}");
    let ours = file.answers.iter().filter(|answer| answer.arm == "ringtap-vhost");
    assert!(ours.clone().count() > 1 && ours.clone().all(|answer| answer.outcome.is_none()));
    assert!(file.conditions.contains("12 rounds") && file.conditions.contains("256 MiB"));
    let fresh = find("A fresh snapshot");
    let told = &fresh.tables[0];
    assert_eq!(told.heads, ["backend", "writes, fresh snapshot", "writes, settled"]);
    assert!(told.rows[0][1].contains("MB/s (") && told.rows[0][1].contains(" to "), "{told:?}");
    assert!(analysis.findings.iter().all(|finding| finding.question != "Two guests on one disk"));

    let column = |metric| {
        let of = |c: &&report::column::Column| c.metric == metric && c.workload == "bonnie-direct";
        analysis.columns.iter().find(of).unwrap_or_else(|| panic!("{metric:?}"))
    };
    let write = column(Metric::PutBlock);
    assert_eq!(write.best.as_ref().unwrap().0, "virtio-raw");
    assert!(
        write.words.contains("10.3 % behind, exploratory (the best was found by looking)"),
        "{}",
        write.words
    );
    let read = column(Metric::GetBlock);
    assert!(read.words.contains("loop goes through a page cache"), "{}", read.words);
    assert!(column(Metric::SeqCreate).words.contains("bounds on both sides"));
    assert!(column(Metric::PutChar).words.contains("not run (-f)"));
    let few = Analysis::new(published(3).0, &published(3).1);
    let words = |analysis: &Analysis| -> String {
        analysis.findings.iter().flat_map(|f| f.lines.clone()).collect()
    };
    assert!(words(&few).contains("points only"));
    assert!(few.findings.iter().all(|f| f.sum.contains("no answer")), "no verdict");
    let text = page::render(&analysis);
    let page = Html::parse_document(&text);
    let css = |selector: &str| Selector::parse(selector).unwrap();
    let claims: Vec<String> =
        page.select(&css(".claims tbody tr")).map(|row| row.text().collect()).collect();
    let file = "loop device against LVM volume";
    let told =
        |row: &&String| row.starts_with(file) && row.ends_with("same direction, another size");
    assert_eq!(claims.iter().filter(told).count(), 1, "{claims:?}");
    assert!(claims.iter().all(|row| !row.starts_with("Ringtap, raw against LVM")), "{claims:?}");
    // Each claim leads to the card of its question, which has what nobody published, too.
    for link in page.select(&css(".claims a")) {
        let card = page.select(&css(link.attr("href").unwrap())).next().expect("a card");
        let rows = card.select(&css("table.claim tbody tr")).count();
        assert!(rows > 0 && card.select(&css("table.claim svg")).count() > rows, "and an axis");
    }
    let said = report::page::answer(&analysis);
    assert!(said.contains("published comparisons") && said.contains("1 held"), "{said}");
    assert!(text.contains("A fresh snapshot") && text.contains("column by column"));
    let markdown = report::markdown::render(&analysis);
    assert!(
        markdown.contains("## Published claims, asked again") && markdown.contains("## Conditions")
    );
}

#[test]
fn no_finding_is_smaller_than_the_noise_floor() {
    let (record, mut list) = published(12);
    for sample in list.iter_mut().filter(|s| s.arm == "virtio-raw#2") {
        let factor = if sample.round % 2 == 0 { 16.0 } else { 0.0625 };
        sample.metrics.values_mut().for_each(|value| value.value *= factor);
    }
    let analysis = Analysis::new(record, &list);
    let floor = analysis.floor(Stage::Vm, "bonnie-direct", Metric::PutBlock).unwrap();
    assert!(floor.floor > 9.0, "{floor:?}");
    let file = analysis.findings.iter().find(|f| f.question == "A file against LVM").unwrap();
    assert_eq!(file.sum, "Of 2 comparisons: not decided in 2.");
    let writes = file.lines.iter().find(|line| line.contains("block write")).unwrap();
    assert!(writes.contains("open (not by more rounds)"), "{writes}");
    let answers = ranking::answers(&analysis);
    let best = answers[0].1.iter().find(|line| line.contains("(block write)")).unwrap();
    assert!(best.contains("not decided: ") && !best.contains("times as good"), "{best}");
}

fn cut_last_line(run: &Path) {
    let path = run.join("samples.jsonl");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, format!("{text}{{\"stage\":\"ho")).unwrap();
}

#[test]
fn an_unsteady_machine_is_said_first() {
    let page = |samples: Vec<Sample>| {
        let analysis = Analysis::new(record(8, State::Complete), &samples);
        (page::render(&analysis), report::markdown::render(&analysis))
    };
    let (quiet, text) = page(samples(8));
    assert!(!quiet.contains("Unsteady:") && !text.contains("Unsteady:"));
    let mut noisy = samples(8);
    for sample in noisy.iter_mut().filter(|sample| sample.arm == "native#2") {
        let factor = if sample.round % 2 == 0 { 3.0 } else { 0.4 };
        sample.metrics.values_mut().for_each(|value| value.value *= factor);
    }
    let (noisy, text) = page(noisy);
    let said = noisy.find("Unsteady: the same backend").expect("the banner");
    assert!(said < noisy.find("class=\"forest\"").unwrap());
    assert!(text.contains("**Unsteady: the same backend"), "{text}");
}

#[test]
fn a_durable_copy_is_ranked_though_it_reads_from_the_cache() {
    let of = |name: &str| {
        let mut all = samples(12);
        for sample in all.iter_mut().filter(|s| s.workload == "randread-4k-qd32") {
            let device = Some(Layer { written: 1e5, ..Layer::default() });
            sample.workload = name.into();
            sample.ledger = Some(Ledger { program: Some(1e6), device, ..Ledger::default() });
        }
        let mut run = record(12, State::Complete);
        run.plan.workloads.push(name.into());
        let analysis = Analysis::new(run, &all);
        let arm = analysis.run.arms.iter().find(|arm| arm.name == "ringtap-nbd").unwrap();
        ranking::from_cache(&analysis, arm, ringtap_lab::workload::find(name).unwrap())
    };
    assert_eq!(of("filecopy"), Some(0.1));
    assert_eq!(of("filecopy-durable"), None);
}
