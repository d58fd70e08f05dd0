//! What `ringtap compare` prints at its end: which way for what, what is no different, what is out or blind here and why,
//! and where the page is.

use std::path::Path;

use super::analysis::Analysis;
use super::answer::{joined, plain};
use super::format;
use super::page;
use super::page::names;
use super::ranking;
use super::row::{Floor, Row};
use super::words::state_in_words;
use crate::stats::decision::{Decision, Sensitivity, Why};
use crate::workload;

/// More than this is three lines of most terminals; the rest is counted.
const LONGEST: usize = 280;
/// Columns where the terminal does not say.
const COLUMNS: usize = 100;

/// The four lines, each a sentence or two.
pub fn lines(analysis: &Analysis, page: &Path) -> [String; 4] {
    [
        page::answer(analysis),
        no_different(analysis),
        out(analysis),
        format!("Page: {}; all tables: -v", page.display()),
    ]
}

/// The same for a terminal of so many columns, what goes on below indented. The path of the page stays whole.
pub fn render(analysis: &Analysis, page: &Path, columns: Option<u16>) -> String {
    let columns = columns.map_or(COLUMNS, usize::from).max(40);
    let [answer, same, out, page] = lines(analysis, page);
    let mut text: String = [answer, same, out].iter().map(|line| wrapped(line, columns)).collect();
    text.push_str(&page);
    text.push('\n');
    text
}

fn wrapped(line: &str, columns: usize) -> String {
    let (mut text, mut at) = (String::new(), 0);
    for word in line.split(' ').filter(|word| !word.is_empty()) {
        let long = word.chars().count();
        if at > 0 && at + 1 + long > columns {
            text.push_str("\n  ");
            at = 2;
        } else if at > 0 {
            text.push(' ');
            at += 1;
        }
        text.push_str(word);
        at += long;
    }
    text.push('\n');
    text
}

/// Rows of questions whose answer is of one kind, as pairs by load.
fn pairs(analysis: &Analysis, counts: impl Fn(Decision) -> bool) -> Vec<String> {
    let asked: Vec<&Row> =
        analysis.rows.iter().filter(|row| row.question.is_some() && counts(row.decision)).collect();
    let mut loads: Vec<&str> = asked.iter().map(|row| row.workload.as_str()).collect();
    loads.dedup();
    let mut seen: Vec<&str> = Vec::new();
    loads.retain(|load| {
        !seen.contains(load) && {
            seen.push(load);
            true
        }
    });
    loads
        .iter()
        .map(|load| {
            let of = asked.iter().filter(|row| row.workload == *load);
            let of: Vec<String> =
                of.map(|row| format!("{} and {}", plain(&row.arm), plain(&row.against))).collect();
            format!("{} ({})", load_name(load), of.join(", "))
        })
        .collect()
}

fn load_name(load: &str) -> String {
    workload::find(load).map_or_else(|| load.to_owned(), |of| names::workload(of).to_owned())
}

fn no_different(analysis: &Analysis) -> String {
    let margin = format::digits(analysis.run.plan.margin * 100.0);
    let margin = margin.trim_end_matches('0').trim_end_matches('.');
    let same = pairs(analysis, |decision| matches!(decision, Decision::NoDifference { .. }));
    let open = pairs(analysis, |decision| matches!(decision, Decision::Open { .. }));
    let same = match same.is_empty() {
        true => format!("No different (within {margin} %): nothing was shown to be"),
        false => joined(&format!("No different (within {margin} %): "), &same, LONGEST),
    };
    match open.is_empty() {
        true => format!("{same}."),
        false => format!("{}.", joined(&format!("{same}. Not decided: "), &open, LONGEST)),
    }
}

/// What has no answer or no place, and why.
fn out(analysis: &Analysis) -> String {
    let mut parts = Vec::new();
    if analysis.is_partial() {
        parts.push(state_in_words(analysis));
    }
    parts.extend(flushes(analysis));
    let loads = |list: Vec<&str>| list.into_iter().map(load_name).collect::<Vec<_>>().join(", ");
    let failed = floors(analysis, |floor| !floor.holds);
    if !failed.is_empty() {
        let loads = loads(failed);
        parts.push(format!("no answer for {loads}: the same way measured twice differed"));
    }
    let blind = floors(analysis, |floor| floor.holds && floor.sensitivity == Sensitivity::Blind);
    if !blind.is_empty() {
        let loads = loads(blind);
        parts.push(format!("blind here: {loads}, where 20 % more time in the server did not show"));
    }
    let all = [
        Why::RoundsMissing,
        Why::TooFew,
        Why::NoControl,
        Why::Bound,
        Why::Unproven,
        Why::OtherGenerator,
    ];
    for why in all {
        let of = pairs(analysis, |decision| decision == Decision::Withheld { why });
        if !of.is_empty() {
            parts.push(format!("{}: {}", format::why(why), of.join(", ")));
        }
    }
    parts.extend(analysis.failures.iter().map(|failure| {
        format!(
            "{} failed: {}",
            plain(&failure.arm),
            failure.error.lines().next().unwrap_or_default()
        )
    }));
    let skipped = super::words::skipped(&analysis.run.skipped).into_iter();
    parts.extend(
        skipped
            .filter(|(_, missing)| !missing.reason.starts_with("the plan runs"))
            .map(|(what, missing)| format!("{what}: {} ({})", missing.reason, missing.remedy)),
    );
    if parts.is_empty() {
        return "Out or blind here: nothing.".into();
    }
    format!("{}.", joined("Out or blind here: ", &parts, LONGEST))
}

/// Whose flushes end nowhere, or were not counted: they are named best nowhere.
fn flushes(analysis: &Analysis) -> Vec<String> {
    let mut parts = Vec::new();
    let (mut unchecked, mut all) = (Vec::new(), 0);
    let arms = analysis.run.arms.iter().filter(|arm| arm.name == arm.backend);
    for arm in arms.filter(|arm| !ranking::is_known_slow(arm)) {
        all += 1;
        match ranking::check(analysis, arm) {
            Some(check) if !check.durable => parts.push(format!(
                "{} says an fsync is done that no flush was made for ({} for each)",
                plain(&arm.name),
                format::digits(check.flushes)
            )),
            Some(_) => {}
            None => unchecked.push(plain(&arm.name)),
        }
    }
    if !unchecked.is_empty() {
        let who = if unchecked.len() == all { "all".to_owned() } else { unchecked.join(", ") };
        let skip = analysis.run.skipped.iter().find(|skip| {
            let of = skip.workload.as_deref().and_then(workload::find);
            of.is_some_and(|workload| workload.is_check())
        });
        let why = skip.map_or_else(String::new, |skip| format!(" ({})", skip.missing.reason));
        parts.push(format!("flushes were not counted of {who}{why}: named best nowhere"));
    }
    parts
}

/// Loads of the plan's questions of which a control says something.
fn floors(analysis: &Analysis, counts: impl Fn(&Floor) -> bool) -> Vec<&str> {
    let mut list: Vec<&str> = Vec::new();
    for row in analysis.rows.iter().filter(|row| row.question.is_some()) {
        let floor = analysis.floor(row.stage, &row.workload, row.metric);
        if floor.is_some_and(&counts) && !list.contains(&row.workload.as_str()) {
            list.push(&row.workload);
        }
    }
    list
}
