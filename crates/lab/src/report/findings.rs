//! What others have published, asked again of this run: each claim with what was measured here, its interval and its
//! conditions, whichever way it came out.

use serde::Serialize;

use super::analysis::Analysis;
use super::ranking::{self, Group};
use super::{format, words};
use crate::sample::{Metric, Stage, Value};
use crate::stats::{FEWEST_ROUNDS, Paired, Ratio};
use crate::workload;

/// A published finding and what this run says of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Finding {
    /// The question.
    pub question: &'static str,
    /// What was published.
    pub published: &'static str,
    /// What the backends did by themselves.
    pub tables: Vec<Table>,
    /// What comparing them shows, a sentence each.
    pub lines: Vec<String>,
    /// The same as numbers, beside what was published.
    pub answers: Vec<Answer>,
    /// All in one sentence.
    pub sum: String,
    /// Under which conditions.
    pub conditions: String,
}

/// One comparison of a finding.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Answer {
    /// Where.
    pub stage: Stage,
    /// Which arm.
    pub arm: String,
    /// Beside which other; none where it is set beside itself alone.
    pub against: Option<String>,
    /// In which workload.
    pub workload: &'static str,
    /// By which metric.
    pub metric: Metric,
    /// What was published of it; none where nothing was.
    pub published: Option<&'static str>,
    /// Times as good.
    pub ratio: f64,
    /// `">="` or `"<="` where the ratio is a bound.
    pub bound: Option<&'static str>,
    /// Its 95 % interval.
    pub interval: Option<(f64, f64)>,
    /// Rounds that it stands on.
    pub rounds: usize,
    /// Whether it came out as published, or the other way round; none where nothing can be told apart.
    pub held: Option<bool>,
}

/// Medians with their 95 % intervals, a row for each backend.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Table {
    /// The workload and the stage.
    pub title: String,
    /// Heads of the columns.
    pub heads: Vec<&'static str>,
    /// Rows: the backend, then its values.
    pub rows: Vec<Vec<String>>,
}

/// A published claim: `arm` beside `against` is better or worse.
struct Claim {
    stages: &'static [Stage],
    arm: &'static str,
    against: &'static str,
    workload: &'static str,
    metrics: &'static [Metric],
    /// What was published: worse (or better).
    worse: bool,
    /// Its figures.
    figures: &'static str,
}

/// What is told of an arm by itself.
struct Told {
    stages: &'static [Stage],
    workload: &'static str,
    metrics: &'static [Metric],
}

struct Question {
    question: &'static str,
    published: &'static str,
    told: &'static [Told],
    /// Arms of which it was published that two loads get less each than one alone.
    shared: &'static [(Stage, &'static str)],
    claims: &'static [Claim],
}

const BONNIE: &str = "bonnie-direct";
/// Stages inside a guest.
pub const VM: &[Stage] = &[Stage::Vm, Stage::Guest];
const PAIRS: &[Stage] = &[Stage::TwoVms, Stage::TwoGuests, Stage::Two];
const EVEN: &[Metric] = &[
    Metric::SumIops,
    Metric::Keeps,
    Metric::SecondKeeps,
    Metric::FirstShare,
    Metric::Jain,
    Metric::P99Factor,
    Metric::SecondP99Factor,
];
const BLOCKS: &[Metric] = &[Metric::PutBlock, Metric::Rewrite, Metric::GetBlock, Metric::Seeks];

const fn claim(
    arm: &'static str,
    against: &'static str,
    metrics: &'static [Metric],
    worse: bool,
    figures: &'static str,
) -> Claim {
    Claim { stages: VM, arm, against, workload: BONNIE, metrics, worse, figures }
}

const QUESTIONS: &[Question] = &[
    Question {
        question: "A file against LVM",
        published: "a file (loop) writes blocks at 18–23 MB/s where LVM writes 107–120, reads at 122–154 where LVM reads 150–159, \
                    and swings more",
        told: &[],
        shared: &[],
        claims: &[
            claim("loop", "lvm", &[Metric::PutBlock], true, "0.17–0.19"),
            claim("loop", "lvm", &[Metric::GetBlock], true, "0.81–0.97"),
            reads("loop", "lvm", "0.81–0.97 in bonnie++"),
            claim("loop", "lvm", &[Metric::Seeks], true, "0.79–0.91"),
            claim("ringtap-vhost", "lvm", BLOCKS, false, "not published"),
        ],
    },
    Question {
        question: "Loop against the tap",
        published: "loop reads from the host's cache (938 MB/s against 132) at a high cost of CPU and writes blocks at a fifth of \
                    the tap's rate; the tap is balanced",
        told: &[],
        shared: &[],
        claims: &[
            claim("ringtap-vhost", "loop", &[Metric::PutBlock], false, "5.2"),
            claim("ringtap-vhost", "loop", &[Metric::Rewrite], true, "0.19"),
            claim("ringtap-vhost", "loop", &[Metric::GetBlock], true, "0.14"),
            reads("ringtap-vhost", "loop", "0.14 in bonnie++"),
            claim("ringtap-vhost", "loop", &[Metric::Seeks], true, "≤ 0.016"),
        ],
    },
    Question {
        question: "A fresh snapshot",
        published: "a volume with a fresh LVM snapshot writes blocks at 12–18 MB/s instead of 107–120, and at 57–65 once what is \
                    written has been copied",
        told: &[Told {
            stages: VM,
            workload: "snapshot-life",
            metrics: &[Metric::FreshWrite, Metric::SettledWrite, Metric::FirstWriteCost],
        }],
        shared: &[],
        claims: &[
            claim("lvm-snapshot", "lvm", &[Metric::PutBlock], true, "0.11–0.15"),
            Claim {
                stages: VM,
                arm: "ringtap-overlay",
                against: "lvm-snapshot",
                workload: "snapshot-life",
                metrics: &[Metric::FreshWrite, Metric::SettledWrite],
                worse: false,
                figures: "not published",
            },
            small("lvm-snapshot", "lvm", true),
            small("ringtap-overlay", "lvm-snapshot", false),
            small("ringtap-overlay", "virtio-overlay", false),
        ],
    },
    Question {
        question: "Two guests on one disk",
        published: "on files both got 8–11 MB/s of block writes instead of 18–23 alone, and one of them 15–30 % less than the other",
        told: &[
            Told { stages: PAIRS, workload: "two-write", metrics: EVEN },
            Told { stages: PAIRS, workload: "two-read", metrics: EVEN },
            Told {
                stages: PAIRS,
                workload: "quiet-read",
                metrics: &[
                    Metric::AloneIops,
                    Metric::Keeps,
                    Metric::P99Factor,
                    Metric::SecondKeeps,
                    Metric::SecondP99Factor,
                ],
            },
        ],
        shared: &[(Stage::TwoVms, "loop"), (Stage::TwoGuests, "loop"), (Stage::Two, "loop")],
        claims: &[
            pair(Stage::TwoVms, "ringtap-vhost", "loop", "two-write", Metric::SumIops),
            pair(Stage::TwoVms, "ringtap-vhost", "lvm", "two-write", Metric::SumIops),
            pair(Stage::TwoVms, "ringtap-vhost", "loop", "quiet-read", Metric::Keeps),
            pair(Stage::TwoVms, "ringtap-vhost", "lvm", "quiet-read", Metric::Keeps),
            pair(Stage::TwoGuests, "ringtap-vhost", "loop", "two-write", Metric::SumIops),
            pair(Stage::TwoGuests, "ringtap-vhost", "lvm", "two-write", Metric::SumIops),
            pair(Stage::TwoGuests, "ringtap-vhost", "loop", "quiet-read", Metric::Keeps),
            pair(Stage::TwoGuests, "ringtap-vhost", "lvm", "quiet-read", Metric::Keeps),
            pair(Stage::Two, "ringtap-nbd", "loop", "two-write", Metric::SumIops),
            pair(Stage::Two, "ringtap-nbd", "loop", "quiet-read", Metric::Keeps),
        ],
    },
    Question {
        question: "Emulation against paravirtual disks",
        published: "an IDE disk by full emulation is far behind virtio; Xen's paravirtual disk the best of the three",
        told: &[],
        shared: &[],
        claims: &[
            dd("ide", "virtio-raw", "dd-throughput", Metric::Bandwidth, true),
            dd("ide", "virtio-raw", "dd-latency-direct", Metric::TimePerOp, true),
            dd("ringtap-vhost", "virtio-raw", "dd-throughput", Metric::Bandwidth, false),
            dd("ringtap-vhost", "virtio-raw", "dd-latency-direct", Metric::TimePerOp, false),
        ],
    },
    Question {
        question: "Archiving a tree",
        published: "find | cpio over 24,000 files takes 7 % longer on a paravirtual disk than natively",
        told: &[],
        shared: &[],
        claims: &[
            Claim {
                figures: "0.93 for a paravirtual disk against the native one",
                ..dd("ringtap-vhost", "virtio-raw", "archive", Metric::Elapsed, true)
            },
            Claim {
                figures: "not published",
                ..dd("loop", "lvm", "archive", Metric::Elapsed, true)
            },
        ],
    },
];

const fn pair(
    stage: Stage,
    arm: &'static str,
    against: &'static str,
    workload: &'static str,
    metric: Metric,
) -> Claim {
    let stages: &[Stage] = match stage {
        Stage::Two => &[Stage::Two],
        Stage::TwoVms => &[Stage::TwoVms],
        _ => &[Stage::TwoGuests],
    };
    let metrics: &[Metric] =
        if matches!(metric, Metric::Keeps) { &[Metric::Keeps] } else { &[Metric::SumIops] };
    Claim { stages, arm, against, workload, metrics, worse: false, figures: "not published" }
}

/// Writes of 4 KiB right after the snapshot was taken.
const fn small(arm: &'static str, against: &'static str, worse: bool) -> Claim {
    let metrics: &[Metric] = &[Metric::Iops];
    let (workload, figures) = ("randwrite-4k-qd32", "not published");
    Claim { stages: VM, arm, against, workload, metrics, worse, figures }
}

const fn reads(arm: &'static str, against: &'static str, figures: &'static str) -> Claim {
    let metrics: &[Metric] = &[Metric::Bandwidth];
    Claim { stages: VM, arm, against, workload: "read-1m-qd8", metrics, worse: true, figures }
}

const fn dd(
    arm: &'static str,
    against: &'static str,
    workload: &'static str,
    metric: Metric,
    worse: bool,
) -> Claim {
    let metrics: &[Metric] = match metric {
        Metric::Bandwidth => &[Metric::Bandwidth],
        Metric::Elapsed => &[Metric::Elapsed],
        _ => &[Metric::TimePerOp],
    };
    Claim { stages: VM, arm, against, workload, metrics, worse, figures: "charts only" }
}

/// The published findings that this run has something to say about.
pub fn findings(analysis: &Analysis) -> Vec<Finding> {
    QUESTIONS.iter().filter_map(|question| answer(analysis, question)).collect()
}

fn answer(analysis: &Analysis, question: &Question) -> Option<Finding> {
    let (mut lines, mut tables, mut answers) = (Vec::new(), Vec::new(), Vec::new());
    let mut stages: Vec<Stage> = Vec::new();
    let (mut held, mut turned, mut open) = (0, 0, 0);
    for told in question.told {
        for &stage in told.stages {
            if let Some(table) = tell(analysis, stage, told) {
                note(&mut stages, stage);
                tables.push(table);
            }
        }
    }
    for (stage, arm) in question.shared {
        let Some((line, answer)) = share(analysis, *stage, arm) else { continue };
        match answer.held {
            Some(true) => held += 1,
            Some(false) => turned += 1,
            None => open += 1,
        }
        note(&mut stages, *stage);
        lines.push(line);
        answers.push(answer);
    }
    for claim in question.claims {
        for &stage in claim.stages {
            for &metric in claim.metrics {
                let Some((line, answer)) = compare(analysis, stage, claim, metric) else {
                    continue;
                };
                // What nobody published can neither hold nor not.
                match answer.held.filter(|_| answer.published.is_some()) {
                    Some(true) => held += 1,
                    Some(false) => turned += 1,
                    None if answer.published.is_none() => {}
                    None => open += 1,
                }
                note(&mut stages, stage);
                lines.push(line);
                answers.push(answer);
            }
        }
    }
    if lines.is_empty() && tables.is_empty() {
        return None;
    }
    let sum = match (held, turned, open) {
        (0, 0, _) if analysis.only_points() => {
            format!("Under {FEWEST_ROUNDS} rounds there are points and no answer.")
        }
        (0, 0, 0) => "No published direction to hold against it.".into(),
        (1, 0, 0) => "As published in the one comparison.".into(),
        (held, 0, 0) => format!("As published in all {held} comparisons."),
        (0, 1, 0) => "The other way round in the one comparison.".into(),
        (0, turned, 0) => format!("The other way round in all {turned} comparisons."),
        (0, 0, 1) => "Not told apart in the one comparison.".into(),
        (0, 0, open) => format!("Not told apart in any of {open} comparisons."),
        (held, turned, open) => {
            let all = held + turned + open;
            let parts =
                [(held, "as published"), (turned, "the other way round"), (open, "not told apart")];
            let parts = parts.iter().filter(|(count, _)| *count > 0);
            let parts: Vec<String> =
                parts.map(|(count, what)| format!("{what} in {count}")).collect();
            format!("Of {all} comparisons: {}.", parts.join(", "))
        }
    };
    let plan = &analysis.run.plan;
    let stages: Vec<String> =
        stages.iter().map(|stage| format!("{stage}: {}", words::stage(analysis, *stage))).collect();
    let conditions = format!(
        "{}, disks of {} MiB on {}; each interval holds by itself, not for all of them together; {}",
        rounds(plan.rounds as usize),
        plan.size >> 20,
        analysis.run.host.file_system,
        stages.join("; ")
    );
    let Question { question, published, .. } = *question;
    Some(Finding { question, published, tables, lines, answers, sum, conditions })
}

fn note(stages: &mut Vec<Stage>, stage: Stage) {
    if !stages.contains(&stage) {
        stages.push(stage);
    }
}

fn rounds(count: usize) -> String {
    if count == 1 { "1 round".into() } else { format!("{count} rounds") }
}

/// What each arm of a stage did by itself, with the interval of its median.
fn tell(analysis: &Analysis, stage: Stage, told: &Told) -> Option<Table> {
    let ran = |metric: &&Metric| {
        let of = |s: &super::analysis::Series| {
            s.stage == stage && s.workload == told.workload && s.metric == **metric
        };
        analysis.series.iter().any(of)
    };
    let metrics: Vec<Metric> = told.metrics.iter().filter(ran).copied().collect();
    let arms = analysis.run.arms.iter().filter(|arm| arm.stage == stage && !ranking::is_twin(arm));
    let rows: Vec<Vec<String>> = arms
        .filter(|arm| {
            let has =
                |metric: &Metric| analysis.find(stage, &arm.name, told.workload, *metric).is_some();
            metrics.iter().any(has)
        })
        .map(|arm| {
            let cell =
                |metric: &Metric| with_ends(analysis, stage, &arm.name, told.workload, *metric);
            let values = metrics.iter().map(|metric| cell(metric).unwrap_or_else(|| "–".into()));
            std::iter::once(name(analysis, stage, &arm.name)).chain(values).collect()
        })
        .collect();
    let title = workload::find(told.workload).map_or(told.workload, |workload| workload.title);
    let quiet = told.workload.starts_with("quiet");
    let head = |metric: &Metric| match metric {
        Metric::Keeps if !quiet => "the first keeps of what it has alone",
        Metric::P99Factor if !quiet => "the first's p99 beside / alone",
        Metric::SecondKeeps if quiet => "the loud one keeps",
        Metric::P99Factor => "the quiet one's p99 beside / alone",
        Metric::SecondP99Factor if quiet => "the loud one's p99 beside / alone",
        metric => metric.title(),
    };
    (!rows.is_empty()).then(|| Table {
        title: format!("{stage}: {title}"),
        heads: std::iter::once("backend").chain(metrics.iter().map(head)).collect(),
        rows,
    })
}

/// A median with its 95 % interval.
fn with_ends(
    analysis: &Analysis,
    stage: Stage,
    arm: &str,
    workload: &str,
    metric: Metric,
) -> Option<String> {
    let series = analysis.find(stage, arm, workload, metric)?;
    let median = format::value(series.median?, metric.unit());
    let ends = match series.interval {
        Some((low, high)) => {
            let end = |value| format::number(value, metric.unit());
            format!(" ({} to {})", end(low), end(high))
        }
        None if analysis.only_points() => String::new(),
        None => format!(" ({}, no interval)", rounds(series.values.len())),
    };
    Some(median + &ends)
}

/// What the first of two equal loads keeps of what it has alone: published were 42 % to 50 %.
fn share(analysis: &Analysis, stage: Stage, arm: &str) -> Option<(String, Answer)> {
    const WORKLOAD: &str = "two-write";
    let series = analysis.find(stage, arm, WORKLOAD, Metric::Keeps)?;
    let ratio = series.median?.value;
    let far = is_beyond(analysis, stage, WORKLOAD, Metric::Keeps, ratio);
    let outcome = match series.interval {
        Some((_, high)) if high < 1.0 && far => Some(true),
        Some((low, _)) if low > 1.0 && far => Some(false),
        _ => None,
    };
    let keeps = with_ends(analysis, stage, arm, WORKLOAD, Metric::Keeps)?;
    let words = match outcome {
        Some(true) => "the same way round",
        Some(false) => "the other way round",
        None => "here not told apart from all of it",
    };
    let answer = Answer {
        stage,
        arm: arm.to_owned(),
        against: None,
        workload: WORKLOAD,
        metric: Metric::Keeps,
        published: Some("0.42–0.50"),
        ratio,
        bound: None,
        interval: series.interval,
        rounds: series.values.len(),
        held: outcome,
    };
    let arm = name(analysis, stage, arm);
    let count = rounds(series.values.len());
    Some((
        format!(
            "Two loads on {arm} ({stage}): one keeps {keeps} of the writes that it has alone, {count}; published: 42–50 %: {words}."
        ),
        answer,
    ))
}

/// Whether a ratio is further from 1 than two runs of the stage's reference are: no claim is smaller.
fn is_beyond(
    analysis: &Analysis,
    stage: Stage,
    workload: &str,
    metric: Metric,
    ratio: f64,
) -> bool {
    let floor = analysis.floor(stage, workload, metric).map_or(0.0, |floor| floor.floor);
    ratio.ln().abs() > floor.ln_1p()
}

/// A claim in a sentence, and whether it holds; `None` for what cannot be told.
fn compare(
    analysis: &Analysis,
    stage: Stage,
    claim: &Claim,
    metric: Metric,
) -> Option<(String, Answer)> {
    let ours = analysis.find(stage, claim.arm, claim.workload, metric)?;
    let theirs = analysis.find(stage, claim.against, claim.workload, metric)?;
    let paired = Paired::new(&ours.values, &theirs.values, metric.better(), analysis.run.plan.seed);
    let title = workload::find(claim.workload).map_or(claim.workload, |workload| workload.title);
    let what = format!("{title}, {} ({stage})", metric.title());
    let value = |value: Option<Value>| {
        value.map_or_else(|| "?".into(), |value| format::value(value, metric.unit()))
    };
    let bound = match paired.ratio? {
        Ratio::Is(_) => "",
        Ratio::AtLeast(_) => "at least ",
        Ratio::AtMost(_) => "at most ",
    };
    let ratio = format!("{bound}{} times as good", format::digits(paired.ratio?.number()));
    let far = |centre| is_beyond(analysis, stage, claim.workload, metric, centre);
    let outcome = match (paired.interval, paired.ratio?) {
        (Some(ends), _) if ends.high < 1.0 && far(ends.centre) => Some(claim.worse),
        (Some(ends), _) if ends.low > 1.0 && far(ends.centre) => Some(!claim.worse),
        (None, Ratio::AtLeast(bound)) if bound > 1.0 && paired.rounds >= FEWEST_ROUNDS => {
            Some(!claim.worse)
        }
        (None, Ratio::AtMost(bound)) if bound < 1.0 && paired.rounds >= FEWEST_ROUNDS => {
            Some(claim.worse)
        }
        _ => None,
    };
    let ends = match paired.interval {
        Some(i) => format!(
            "95 %: {}–{}, {}",
            format::digits(i.low),
            format::digits(i.high),
            rounds(paired.rounds)
        ),
        None if paired.rounds < FEWEST_ROUNDS => {
            format!("{}: too few for an interval", rounds(paired.rounds))
        }
        None if bound.is_empty() => {
            format!("{}, no interval: some of them are bounds", rounds(paired.rounds))
        }
        None => format!("a bound: bonnie++ did not print the number; {}", rounds(paired.rounds)),
    };
    let near = match paired.interval {
        Some(ends) if outcome.is_none() && (ends.high < 1.0 || ends.low > 1.0) => {
            "; less than the noise floor"
        }
        _ => "",
    };
    let before = match (claim.figures, outcome) {
        ("not published", None) => "; not told apart".into(),
        ("not published", Some(_)) => String::new(),
        (figures, outcome) => format!(
            "; published: {figures}: {}",
            match outcome {
                Some(true) => "the same way round",
                Some(false) => "the other way round",
                None => "here not told apart",
            }
        ),
    };
    let line = format!(
        "{what}: {} {} against {} {}: {ratio} ({ends}){near}{before}.",
        name(analysis, stage, claim.arm),
        value(ours.median),
        name(analysis, stage, claim.against),
        value(theirs.median)
    );
    let answer = Answer {
        stage,
        arm: claim.arm.to_owned(),
        against: Some(claim.against.to_owned()),
        workload: claim.workload,
        metric,
        published: Some(claim.figures).filter(|figures| *figures != "not published"),
        ratio: paired.ratio?.number(),
        bound: match paired.ratio? {
            Ratio::Is(_) => None,
            Ratio::AtLeast(_) => Some(">="),
            Ratio::AtMost(_) => Some("<="),
        },
        interval: paired.interval.map(|ends| (ends.low, ends.high)),
        rounds: paired.rounds,
        held: outcome,
    };
    Some((line, answer))
}

/// An arm's name, with why it is ranked with no other.
fn name(analysis: &Analysis, stage: Stage, arm: &str) -> String {
    let known = analysis.run.arms.iter().find(|a| a.stage == stage && a.name == arm);
    match known.map(|arm| ranking::group(analysis, arm)) {
        Some(Group::Cached) => format!("{arm} (through a page cache)"),
        Some(Group::Lies) => format!("{arm} (which does not flush)"),
        _ => arm.to_owned(),
    }
}
