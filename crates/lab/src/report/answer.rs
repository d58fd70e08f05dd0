//! The usual question's answer in one sentence, which page and console share.

use super::analysis::Analysis;
use super::format;
use super::page::names;
use super::ranking::{self, Group};
use super::row::Row;
use crate::plan::quick;
use crate::run::folder::Arm;
use crate::stats::Decision;
use crate::workload::{self, Workload};

/// More than this nobody reads as a sentence; the rest is counted.
const LONGEST: usize = 420;
const FASTER: &str = "Faster for a guest on this host: ";

/// Rows of the usual question.
pub fn rows(analysis: &Analysis) -> impl Iterator<Item = &Row> {
    analysis.rows.iter().filter(|row| row.question.as_deref() == Some(quick::QUESTION))
}

/// Whether the run asked it.
pub fn is_asked(analysis: &Analysis) -> bool {
    analysis.run.plan.questions.iter().any(|question| question.name == quick::QUESTION)
}

fn barred(analysis: &Analysis, win: &Win<'_>) -> Option<&'static str> {
    let known = |arm: &&Arm| arm.stage == win.row.stage && arm.name == win.winner;
    let Some(arm) = analysis.run.arms.iter().find(known) else { return Some("not in the run") };
    why_unranked(analysis, arm, workload::find(&win.row.workload)?)
}

/// Why an arm that is faster is not named best; `None` where it may be. The ranking decides, as everywhere.
pub fn why_unranked(analysis: &Analysis, arm: &Arm, load: &dyn Workload) -> Option<&'static str> {
    if ranking::is_ranked(analysis, arm, load) {
        return None;
    }
    Some(match ranking::group(analysis, arm) {
        Group::Lies => "passes on no flush",
        Group::Unchecked => "flushes not counted",
        Group::Cached => "through the host's page cache",
        Group::Durable if ranking::is_known_slow(arm) => "slowed on purpose",
        Group::Durable => "answered from a cache",
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
    let (wins, others): (Vec<Win<'_>>, Vec<Win<'_>>) =
        rows(analysis).filter_map(Win::of).partition(|win| barred(analysis, win).is_none());
    let others = unnamed(analysis, &others);
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
                format!("{} ({})", plain(winner), over.join(", "))
            })
            .collect();
        (!parts.is_empty()).then(|| format!("{name}: {}", parts.join(", ")))
    });
    let loads: Vec<String> = loads.collect();
    Some(match (loads.is_empty(), others.is_empty()) {
        (true, true) => {
            "For a guest on this host no way was shown to be better than another.".into()
        }
        (true, false) => {
            let head = "For a guest on this host nothing that may be named best was shown to be better; faster, but not named best: ";
            format!("{}.", joined(head, &others, LONGEST))
        }
        (false, true) => format!("{}.", joined(FASTER, &loads, LONGEST)),
        (false, false) => {
            let best = joined(FASTER, &loads, LONGEST);
            format!("{best}. {}.", joined("Not named best: ", &others, LONGEST))
        }
    })
}

/// Winners that are not named best, each with why and the loads it won.
fn unnamed(analysis: &Analysis, wins: &[Win<'_>]) -> Vec<String> {
    let mut list: Vec<(&str, &str, Vec<&str>)> = Vec::new();
    for win in wins {
        let (Some(why), Some(load)) = (barred(analysis, win), workload::find(&win.row.workload))
        else {
            continue;
        };
        let load = names::workload(load);
        match list.iter_mut().find(|(arm, known, _)| (*arm, *known) == (win.winner, why)) {
            Some((.., loads)) if loads.contains(&load) => {}
            Some((.., loads)) => loads.push(load),
            None => list.push((win.winner, why, vec![load])),
        }
    }
    list.iter()
        .map(|(arm, why, loads)| format!("{} ({why}) in {}", plain(arm), loads.join(", ")))
        .collect()
}

fn times(win: &Win<'_>) -> String {
    let ends = format::interval(win.ends);
    let ends = if ends.is_empty() { ends } else { format!(" [{ends}]") };
    format!("{}{ends} × {}", format::digits(win.ratio), plain(win.loser))
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
