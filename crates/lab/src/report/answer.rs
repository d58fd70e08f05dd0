//! The usual question's answer in one sentence, which page and console share.

use super::analysis::{Analysis, Row};
use super::format;
use super::page::names;
use super::ranking::{self, Group};
use crate::plan::quick;
use crate::sample::Stage;
use crate::stats::Decision;
use crate::workload;

/// More than this nobody reads as a sentence; the rest is counted.
const LONGEST: usize = 420;

/// Rows of the usual question.
pub fn rows(analysis: &Analysis) -> impl Iterator<Item = &Row> {
    analysis.rows.iter().filter(|row| row.question.as_deref() == Some(quick::QUESTION))
}

/// Whether the run asked it.
pub fn is_asked(analysis: &Analysis) -> bool {
    analysis.run.plan.questions.iter().any(|question| question.name == quick::QUESTION)
}

/// Whether an arm may be named best: its flushes were counted and reached the disk.
pub fn may_be_best(analysis: &Analysis, stage: Stage, arm: &str) -> bool {
    let known = analysis.run.arms.iter().find(|known| known.stage == stage && known.name == arm);
    known.is_some_and(|arm| {
        let checked = ranking::check(analysis, arm).is_some_and(|check| check.durable);
        checked && !ranking::is_known_slow(arm)
    })
}

/// A difference, seen from the better side.
struct Win<'a> {
    row: &'a Row,
    winner: &'a str,
    loser: &'a str,
    ratio: f64,
    ends: Option<(f64, f64)>,
}

impl<'a> Win<'a> {
    fn of(row: &'a Row) -> Option<Win<'a>> {
        let (ratio, ends) = (row.ratio?, row.interval.map(|i| (i.low, i.high)));
        match row.decision {
            Decision::Faster => {
                Some(Win { row, winner: &row.arm, loser: &row.against, ratio, ends })
            }
            Decision::Slower => Some(Win {
                row,
                winner: &row.against,
                loser: &row.arm,
                ratio: 1.0 / ratio,
                ends: ends.map(|(low, high)| (1.0 / high, 1.0 / low)),
            }),
            _ => None,
        }
    }
}

/// Which way for what; `None` where the run asked something else.
pub fn sentence(analysis: &Analysis) -> Option<String> {
    if !is_asked(analysis) {
        return None;
    }
    let wins: Vec<Win<'_>> = rows(analysis)
        .filter_map(Win::of)
        .filter(|win| may_be_best(analysis, win.row.stage, win.winner))
        .collect();
    let loads = analysis.run.plan.workloads.iter().filter_map(|load| {
        let mut of: Vec<&Win<'_>> = wins.iter().filter(|win| win.row.workload == *load).collect();
        let name = names::workload(workload::find(load)?);
        // Who is beaten by nobody comes first.
        of.sort_by_key(|win| {
            wins.iter().any(|other| other.row.workload == *load && other.loser == win.winner)
        });
        let mut winners: Vec<&str> = of.iter().map(|win| win.winner).collect();
        winners.dedup();
        let parts: Vec<String> = winners
            .iter()
            .map(|winner| {
                let over: Vec<String> =
                    of.iter().filter(|win| win.winner == *winner).map(|win| times(win)).collect();
                format!("{} ({})", called(analysis, of[0].row.stage, winner), over.join(", "))
            })
            .collect();
        (!parts.is_empty()).then(|| format!("{name}: {}", parts.join(", ")))
    });
    let loads: Vec<String> = loads.collect();
    if loads.is_empty() {
        return Some("For a guest on this host no way was shown to be better than another.".into());
    }
    Some(format!("{}.", joined("Faster for a guest on this host: ", &loads, LONGEST)))
}

fn times(win: &Win<'_>) -> String {
    let ends = format::interval(win.ends);
    let ends = if ends.is_empty() { ends } else { format!(" [{ends}]") };
    format!("{}{ends} × {}", format::digits(win.ratio), plain(win.loser))
}

/// What a reader calls an arm within a sentence; where it is told, that a page cache of the host is what is fast.
fn called(analysis: &Analysis, stage: Stage, name: &str) -> String {
    let arm = analysis.run.arms.iter().find(|arm| arm.stage == stage && arm.name == name);
    let cached = arm.is_some_and(|arm| ranking::group(analysis, arm) == Group::Cached);
    if cached { format!("{}, by the host's page cache,", plain(name)) } else { plain(name) }
}

/// A name without a comma.
pub fn plain(name: &str) -> String {
    names::named(name).replace(',', "")
}

/// As many as fit, and how many more there are.
pub fn joined(head: &str, items: &[String], longest: usize) -> String {
    let mut text = head.to_owned();
    for (at, item) in items.iter().enumerate() {
        let mark = if at == 0 { "" } else { "; " };
        if at > 0 && text.chars().count() + item.chars().count() > longest {
            return format!("{text}; {} more on the page", items.len() - at);
        }
        text = text + mark + item;
    }
    text
}
