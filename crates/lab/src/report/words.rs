//! What a report says in sentences.

use super::analysis::Analysis;
use super::format;
use super::ranking::{self, Group};
use super::row::Row;
use crate::env::Missing;
use crate::run::folder::{Skip, State};
use crate::sample::{Stage, Still};
use crate::stats::{Decision, median};
use crate::workload;

/// How far the run came, in a sentence.
pub fn state_in_words(analysis: &Analysis) -> String {
    let (done, asked) = (analysis.complete_rounds, analysis.run.plan.rounds);
    let missing = ranges(&analysis.missing);
    let state = match analysis.run.state {
        State::Complete if !missing.is_empty() => {
            let whole = asked - analysis.missing.len() as u32;
            format!(
                "PARTIAL: it ended as a whole, and samples are gone since; {whole} of {asked} rounds are whole"
            )
        }
        State::Complete if asked == 1 => "1 round, complete".into(),
        State::Complete => format!("{asked} rounds, complete"),
        State::Interrupted => format!("PARTIAL: interrupted; {done} of {asked} rounds are whole"),
        State::Running => {
            format!("PARTIAL: the run goes on or was killed; {done} of {asked} rounds are whole")
        }
        State::Failed => {
            format!("PARTIAL: ended early by an error; {done} of {asked} rounds are whole")
        }
    };
    match missing.is_empty() {
        true => state,
        false => format!("{state}; missing, or not whole: {missing}"),
    }
}

/// Rounds, from 0, as people count them: "3, 7 to 12".
pub fn ranges(rounds: &[u32]) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for &round in rounds {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == round => *last = round,
            _ => runs.push((round, round)),
        }
    }
    let words = runs.iter().map(|(first, last)| match last - first {
        0 => format!("{}", first + 1),
        1 => format!("{}, {}", first + 1, last + 1),
        _ => format!("{} to {}", first + 1, last + 1),
    });
    words.collect::<Vec<_>>().join(", ")
}

/// What a stage is.
pub fn stage(analysis: &Analysis, stage: Stage) -> String {
    let run = &analysis.run;
    let known =
        run.stages.iter().find(|(of, _)| *of == stage).map(|(_, words)| without_folders(words));
    known.unwrap_or_else(|| {
        let one = !stage.is_of_host() && !stage.is_contention() && stage.boots_each_round();
        let guest = run.guest.clone().filter(|_| one);
        guest.unwrap_or_else(|| crate::stage::of(stage).words().what.into())
    })
}

/// How the disks were made ready: whether random writes found all of them written.
pub fn preconditioned(analysis: &Analysis) -> String {
    let Some(written) = analysis.run.written.filter(|written| written.bytes > 0) else {
        return "Disks are written once before they are measured.".into();
    };
    let share = written.allocated as f64 / written.bytes as f64;
    let mut text = format!(
        "Before anything was measured every disk was written once, all of it, with what does not compress: {} MiB in all, of \
         which the file system had {:.0} % allocated then.",
        written.bytes >> 20,
        share * 100.0
    );
    if share < 0.99 {
        text += " That is less than was written: it compresses, shares or allocates late, and a random write may have to find \
                 room first.";
    }
    match written.again {
        0 => {}
        again => {
            let times = if again == 1 { "Once".into() } else { format!("{again} times") };
            text += &format!(
                " {times} a disk was written again before the next backend, because something of it had been discarded."
            );
        }
    }
    text + " SNIA's test writes twice the range first; here the rounds that are not steady are marked instead. Overlays, \
            snapshots and what a program does to its own file system begin fresh."
}

/// Half of the loads have a noise floor above this: then the run says first that it is unsteady.
const UNSTEADY: f64 = 0.25;

/// That the same backend twice differed so much that little can be told apart.
pub fn unsteady(analysis: &Analysis) -> Option<String> {
    let floors: Vec<f64> = analysis.floors.iter().map(|floor| floor.floor).collect();
    let middle = median(&floors).filter(|middle| *middle > UNSTEADY)?;
    Some(format!(
        "Unsteady: the same backend measured twice differs by up to ±{} % in the middle of {} comparisons. Other work on this \
         machine, or a device shared with others, hides what is smaller; measured again on a quiet machine, or with more and \
         longer rounds, more can be told apart.",
        format::digits(middle * 100.0),
        floors.len()
    ))
}

/// The folders of a path in brackets are no reader's business.
pub(super) fn without_folders(words: &str) -> String {
    let Some((before, rest)) = words.split_once("(/") else { return words.to_owned() };
    let Some((path, after)) = rest.split_once(')') else { return words.to_owned() };
    format!("{before}({}){after}", path.rsplit('/').next().unwrap_or(path))
}

/// What a stall was about.
pub fn still(layer: Still) -> &'static str {
    match layer {
        Still::Unseen => "nobody looked",
        Still::Hypervisor => "the hypervisor below this machine took its processors",
        Still::Memory => "this machine's memory: tasks waited for it",
        Still::Device => "the device: it had requests all the time",
        Still::ServerWaits => "the server was ready and had no processor",
        Still::Server => "the server was at work",
        Still::ClientWaits => "the client was ready and had no processor",
        Still::Client => "the client was at work",
        Still::Nobody => "all slept: a timer, a lock, or a program that was stopped",
    }
}

/// What was left out, with equal reasons put together: ("host ringtap-nbd, qemu-nbd: dd-throughput, bonnie", why).
pub fn skipped(skipped: &[Skip]) -> Vec<(String, &Missing)> {
    struct Group<'a> {
        stage: &'a str,
        backends: Vec<&'a str>,
        workloads: Vec<&'a str>,
        missing: &'a Missing,
    }
    let mut groups: Vec<Group<'_>> = Vec::new();
    for skip in skipped {
        let known = groups.iter_mut().find(|group| {
            group.stage == skip.stage.name()
                && group.missing == &skip.missing
                && group.workloads.is_empty() == skip.workload.is_none()
        });
        let group = match known {
            Some(group) => group,
            None => {
                let (stage, missing) = (skip.stage.name(), &skip.missing);
                groups.push(Group { stage, backends: Vec::new(), workloads: Vec::new(), missing });
                let last = groups.len() - 1;
                &mut groups[last]
            }
        };
        if !group.backends.contains(&skip.backend.as_str()) {
            group.backends.push(&skip.backend);
        }
        if let Some(workload) = skip.workload.as_deref().filter(|w| !group.workloads.contains(w)) {
            group.workloads.push(workload);
        }
    }
    groups
        .into_iter()
        .map(|group| {
            let workloads = match group.workloads.is_empty() {
                true => String::new(),
                false => format!(" with {}", group.workloads.join(", ")),
            };
            (format!("{} {}{workloads}", group.stage, group.backends.join(", ")), group.missing)
        })
        .collect()
}

/// The claims that the run supports, as sentences; those about Ringtap and its peers first.
pub fn claims(analysis: &Analysis) -> Vec<String> {
    let peers = analysis.peer_rows();
    let of = |row: &Row| {
        (row.stage, row.arm.clone(), row.against.clone(), row.workload.clone(), row.metric)
    };
    let known: Vec<_> = peers.iter().map(|row| of(row)).collect();
    peers
        .into_iter()
        .chain(analysis.rows.iter().filter(|row| row.headline && !known.contains(&of(row))))
        .filter_map(|row| sentence(analysis, row))
        .collect()
}

/// An arm's name, with why it is not ranked.
fn name(analysis: &Analysis, row: &Row, arm: &str) -> String {
    let known = analysis.run.arms.iter().find(|a| a.stage == row.stage && a.name == arm);
    match known.map(|arm| ranking::group(analysis, arm)) {
        Some(Group::Lies) => format!("{arm} (which does not flush)"),
        Some(Group::Cached) => format!("{arm} (through a page cache)"),
        _ => arm.to_owned(),
    }
}

fn sentence(analysis: &Analysis, row: &Row) -> Option<String> {
    let title =
        workload::find(&row.workload).map_or(row.workload.as_str(), |workload| workload.title());
    let what = format!("{title} ({}, {})", row.metric.title(), row.stage);
    let interval = format::decision(row);
    let (ours, theirs) = (name(analysis, row, &row.arm), name(analysis, row, &row.against));
    let ratio = format::ratio(row);
    match row.decision {
        Decision::Faster => Some(format!(
            "{ours} is {ratio} times as good as {theirs} in {what}; 95 %: {interval}."
        )),
        Decision::Slower => {
            Some(format!("{ours} reaches {ratio} of {theirs} in {what}; 95 %: {interval}."))
        }
        Decision::NoDifference { margin } => {
            let margin = format::digits(margin * 100.0);
            Some(format!(
                "{ours} and {theirs} are no different, within {margin} %, in {what}; 95 %: {interval}."
            ))
        }
        Decision::Open { .. } | Decision::Withheld { .. } | Decision::Exploratory => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_is_named_by_its_file() {
        let words = without_folders("QEMU (/root/.cache/x/vmlinuz-6.1.0), two CPUs (slow)");
        assert_eq!(words, "QEMU (vmlinuz-6.1.0), two CPUs (slow)");
        assert_eq!(without_folders("no path"), "no path");
    }
}
