//! `report --with FILE`: rows that others have measured, beside one's own. Any bonnie++ CSV, any fio JSON. They are single
//! values of another machine: ratios to them have no interval and no verdict.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use ringtap_guest::fio::{Job as Told, Report, Side, Unreadable};
use serde::Serialize;

use super::analysis::Analysis;
use super::format;
use crate::error::{Error, Result};
use crate::sample::{Better, Metric, Unit, Value};
use crate::workload::bonnie::{self, csv};
use crate::workload::job::Job;
use crate::workload::{self, Workload};

/// A row of others.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Other {
    /// The file that it is from.
    pub file: String,
    /// What it calls itself: bonnie++'s machine, fio's job.
    pub name: String,
    /// What was run, in words.
    pub what: String,
    /// bonnie++'s version: columns of others do not mean the same.
    pub bonnie: Option<String>,
    /// The loads of the lab that ask the same.
    pub workloads: Vec<&'static str>,
    /// What it does otherwise than they all, where that is why there are none.
    pub unlike: Option<String>,
    /// Whether its percentiles are of completion alone, without the time of submission.
    pub completion_only: bool,
    /// What was measured.
    pub metrics: Vec<(Metric, Value)>,
}

/// A value of others beside that of an arm here.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Pair {
    /// Which of the rows.
    pub row: usize,
    /// What was measured.
    pub metric: Metric,
    /// The others' value.
    pub theirs: Value,
    /// Stage, arm and load here, and the median; none where nothing here asks the same.
    pub ours: Option<(String, Value)>,
    /// Times as good here; none where one of them is a bound.
    pub ratio: Option<f64>,
    /// Why there is no ratio.
    pub why: Option<String>,
}

/// Rows of others and what stands beside them.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Beside {
    /// The rows.
    pub rows: Vec<Other>,
    /// Their values, each once for each arm here that has the same.
    pub pairs: Vec<Pair>,
}

/// Reads the files and sets them beside the run.
pub fn beside(analysis: &Analysis, files: &[impl AsRef<Path>]) -> Result<Beside> {
    let mut rows = Vec::new();
    for file in files {
        rows.extend(read(file.as_ref())?);
    }
    let pairs = rows.iter().enumerate().flat_map(|(at, row)| pairs(analysis, at, row)).collect();
    Ok(Beside { rows, pairs })
}

fn read(path: &Path) -> Result<Vec<Other>> {
    let text = fs::read_to_string(path).map_err(Error::file("read", path))?;
    let file = path.display().to_string();
    let is_csv = |line: &&str| line.matches(',').count() >= 20 && !line.contains('{');
    let rows = match text.lines().any(|line| is_csv(&line)) {
        true => text.lines().filter(is_csv).map(|line| of_bonnie(&file, line)).collect(),
        false => of_fio(&file, &text),
    };
    let wrong = |found| Error::Output { what: "a bonnie++ CSV line or fio's JSON", found };
    let rows: Vec<Other> = rows.map_err(|error| wrong(format!("{file}: {error}")))?;
    if rows.is_empty() {
        return Err(wrong(format!("{file} has no row with a value")));
    }
    Ok(rows)
}

fn of_bonnie(file: &str, line: &str) -> Result<Other> {
    let row = csv::Row::parse(line)?;
    let size = row.file_size.map_or_else(String::new, |bytes| format!(", {} MiB", bytes >> 20));
    Ok(Other {
        file: file.into(),
        name: row.name.clone(),
        what: format!("bonnie++ {}{size}", row.version),
        bonnie: Some(row.version.clone()),
        workloads: of_kind(|workload| workload.has_columns()),
        unlike: None,
        completion_only: false,
        metrics: row.phases.iter().filter_map(|(metric, p)| Some((*metric, p.rate?))).collect(),
    })
}

/// Each job of fio's JSON, its reads and its writes.
fn of_fio(file: &str, text: &str) -> Result<Vec<Other>> {
    let report = Report::parse(text)?;
    let version = &report.version;
    let mut rows = Vec::new();
    for job in report.jobs()? {
        let option = |name: &str| report.option(job, name);
        let pattern = option("rw");
        // What fio takes where nothing is said.
        let block = Some(option("bs")).filter(|of| !of.is_empty()).unwrap_or("4k".into());
        let depth = Some(option("iodepth")).filter(|of| !of.is_empty()).unwrap_or("1".into());
        let known = ringtap_load::parse_size(&block).ok().zip(depth.parse().ok());
        let unlike = unlike(&option, job, known.is_some());
        let more = unlike.as_deref().map(|unlike| format!(", {unlike}")).unwrap_or_default();
        let blocks =
            known.map_or_else(|| block.clone(), |(bytes, _): (u64, u32)| format!("{bytes} bytes"));
        for (side, write) in [("read", false), ("write", true)] {
            let (metrics, completion_only) = values(job.side(write));
            if metrics.is_empty() {
                continue;
            }
            let is_whole = pattern == side || pattern == format!("rand{side}");
            let random = pattern.starts_with("rand");
            let synced = write && option("fsync") == "1";
            let asked = known.map(|(block, depth)| Job { random, write, block, depth, synced });
            let same = |workload: &dyn Workload| asked.is_some() && workload.job() == asked;
            rows.push(Other {
                file: file.into(),
                name: job.name.clone(),
                what: format!("{version}, {pattern} ({side}) of {blocks}, depth {depth}{more}"),
                bonnie: None,
                workloads: match is_whole && unlike.is_none() {
                    true => of_kind(same),
                    false => Vec::new(),
                },
                unlike: unlike.clone(),
                completion_only,
                metrics,
            });
        }
    }
    Ok(rows)
}

/// Options that make another load of a job.
const SHAPING: &[&str] = &[
    "bssplit",
    "bsrange",
    "blocksize_range",
    "bs_unaligned",
    "bs_is_seq_rand",
    "rate",
    "rate_iops",
    "rate_process",
    "thinktime",
    "random_distribution",
    "percentage_random",
    "rwmixread",
    "rwmixwrite",
    "zonemode",
    "verify",
];

/// What a job does that none of the lab's loads does: several at once, in blocks of several sizes, at a rate, through the page
/// cache; or that it failed. `readable`: whether block size and depth are numbers.
fn unlike(option: &dyn Fn(&str) -> String, job: &Told, readable: bool) -> Option<String> {
    if let Err(Unreadable::Failed { code, .. }) = job.succeeded() {
        return Some(format!("ended by error {code}"));
    }
    if !readable {
        return Some(format!("of blocks {:?} at depth {:?}", option("bs"), option("iodepth")));
    }
    if let Some(name) = SHAPING.iter().find(|name| !["", "0"].contains(&option(name).as_str())) {
        return Some(format!("with {name}={}", option(name)));
    }
    let jobs = option("numjobs");
    if !["", "1"].contains(&jobs.as_str()) {
        return Some(format!("{jobs} jobs at once"));
    }
    let (direct, engine) = (option("direct"), option("ioengine"));
    // Over NBD there is no page cache of the client's.
    (direct != "1" && engine != "nbd").then(|| "through the page cache (no direct=1)".to_owned())
}

/// A job's values, and whether its percentiles are of completion alone.
fn values(side: &Side) -> (Vec<(Metric, Value)>, bool) {
    if side.total_ios == 0.0 {
        return (Vec::new(), false);
    }
    // Completion is what fio prints percentiles of unless lat_percentiles=1 asks for the whole.
    let completion_only = !side.lat_ns.has_percentiles();
    let latency = if completion_only { &side.clat_ns } else { &side.lat_ns };
    let all = [
        (Metric::Iops, side.iops),
        (Metric::Bandwidth, side.bw_bytes),
        (Metric::P50, latency.percentile(50.0)),
        (Metric::P99, latency.percentile(99.0)),
    ];
    let known = all.into_iter().filter_map(|(metric, value)| Some((metric, value?)));
    let known = known.filter(|(_, value)| *value > 0.0);
    (known.map(|(metric, value)| (metric, value.into())).collect(), completion_only)
}

fn of_kind(same: impl Fn(&dyn Workload) -> bool) -> Vec<&'static str> {
    workload::all().filter(|workload| same(*workload)).map(|workload| workload.name()).collect()
}

fn pairs(analysis: &Analysis, at: usize, row: &Other) -> Vec<Pair> {
    let mut pairs = Vec::new();
    for &(metric, theirs) in &row.metrics {
        let ours = analysis.series.iter().filter(|series| {
            series.metric == metric
                && !series.arm.contains('#')
                && row.workloads.contains(&series.workload.as_str())
        });
        let before = pairs.len();
        for series in ours {
            let Some(median) = series.median else { continue };
            let version = version_here(analysis, &series.workload);
            let why = match (&row.bonnie, version) {
                (Some(theirs), Some(ours)) if layout(theirs) != layout(&ours) => {
                    Some(format!("bonnie++ {ours} here: its columns mean something else"))
                }
                _ if median.at_least || theirs.at_least => Some("a bound".into()),
                _ if row.completion_only && metric.unit() == Unit::Nanoseconds => {
                    Some("completion alone, without submission (no lat_percentiles=1)".into())
                }
                _ => None,
            };
            let ratio = match metric.better() {
                Better::Higher => median.value / theirs.value,
                Better::Lower => theirs.value / median.value,
            };
            let name = format!("{} {} {}", series.stage, series.arm, series.workload);
            let ratio = why.is_none().then_some(ratio);
            pairs.push(Pair { row: at, metric, theirs, ours: Some((name, median)), ratio, why });
        }
        if pairs.len() == before {
            let why = row.unlike.as_ref().map(|unlike| format!("no load here is {unlike}"));
            let why = Some(why.unwrap_or_else(|| "nothing here asks the same".into()));
            pairs.push(Pair { row: at, metric, theirs, ours: None, ratio: None, why });
        }
    }
    pairs
}

fn version_here(analysis: &Analysis, workload: &str) -> Option<String> {
    let notes = analysis.notes.iter().filter(|(_, of, _)| of == workload);
    notes.into_iter().find_map(|(.., note)| Some(bonnie::version(note)?.to_owned()))
}

/// Versions whose columns mean the same.
fn layout(version: &str) -> &str {
    match version {
        v if v.starts_with("1.03") => "1.03",
        v if v.starts_with("1.96") || v.starts_with("1.97") => "1.96",
        _ => "1.98",
    }
}

/// Rows and pairs as a table in Markdown, which reads as plain text too.
pub fn markdown(beside: &Beside) -> String {
    let mut text = String::from(
        "\n## Beside what others measured\n\nSingle values of other machines: no interval, no verdict.\n\n\
         | others | what | metric | theirs | here | median | times as good |\n|---|---|---|---|---|---|---|\n",
    );
    for pair in &beside.pairs {
        let row = &beside.rows[pair.row];
        let unit = pair.metric.unit();
        let (name, ours) = match &pair.ours {
            Some((name, median)) => (name.as_str(), format::value(*median, unit)),
            None => ("", String::new()),
        };
        let why = pair.why.as_deref().unwrap_or_default();
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {name} | {ours} | {} |",
            plain(&row.name),
            plain(&row.what),
            pair.metric.title(),
            format::value(pair.theirs, unit),
            pair.ratio.map_or_else(|| why.to_owned(), format::digits),
        );
    }
    text
}

/// A program's words in one cell.
fn plain(words: &str) -> String {
    words.chars().map(|c| if c == '|' || c.is_control() { ' ' } else { c }).collect()
}
