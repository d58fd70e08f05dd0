//! The first screen: the answer, its limits, the forest with the CPU time, the published claims.

use maud::{Markup, html};

use super::names::anchor;
use super::view::{self, Load, View, Way};
use super::{forest, names};
use crate::report::analysis::Analysis;
use crate::report::finding::{Answer, Outcome};
use crate::report::words::state_in_words;
use crate::report::{answer, format, words};
use crate::run::folder::State;
use crate::stats::FEWEST_ROUNDS;
use crate::stats::decision::ROUNDS;
use crate::workload;

/// Loads that fit beside each other with the CPU time.
pub const LOADS: usize = 5;
/// Ways that fit above the claims.
const WAYS: usize = 8;
/// Claims that fit below the forest; the others are counted.
const CLAIMS: usize = 10;

/// The first screen.
pub fn screen(analysis: &Analysis, views: &[View<'_>]) -> Markup {
    let run = &analysis.run;
    html! {
        header.lead {
            p.eyebrow { "ringtap compare · " (run.began.get(..10).unwrap_or(&run.began)) " · " (state_in_words(analysis)) }
            h1 { (answer(analysis, views)) }
            p.limits { (limits(analysis)) }
            @if analysis.is_partial() { p.banner { (state_in_words(analysis)) } }
            @if let Some(words) = words::unsteady(analysis) { p.banner { (words) } }
            (controls(views))
        }
        @if let Some(view) = view::first(views) {
            section.first {
                (forest::table(view, 0, view.compared.min(LOADS), true, WAYS))
                (legend(view))
            }
        }
        (claims(analysis))
    }
}

/// What the signs mean, in one line.
fn legend(view: &View<'_>) -> Markup {
    let cached =
        view.ways.iter().any(|way| way.cells.iter().flatten().any(|c| c.from_cache.is_some()));
    let marks: Vec<&str> =
        view.ways.iter().flat_map(|way| &way.cells).flatten().map(|cell| cell.word.mark).collect();
    html! {
        p.legend {
            span { b.faster { "▲" } " faster" } span { b.slower { "▼" } " slower" } span { b { "=" } " no different" } span { b { "?" } " undecided" }
            @if marks.contains(&"⊘") { span { b { "⊘" } " the load's controls failed, or it is blind" } }
            @if marks.contains(&"≠") { span { b { "≠" } " another load generator: not comparable" } }
            span { "ring: nothing claimed" }
            span { "bar through the dot: 95 % interval" }
            @if view.loads.iter().any(|load| load.band.is_some()) { span { i.band {} " grey: " (view.against) " against itself" } }
            span { "✓ ✗ fsync reaches the disk or not" }
            @if view.loads.iter().all(|load| !load.named) { span { b { "exploratory" } ": no comparison was named before the run, so nothing is claimed" } }
            @if cached { span { "* from a cache, not the disk" } }
        }
    }
}

/// The answer in one sentence.
pub fn answer(analysis: &Analysis, views: &[View<'_>]) -> String {
    if analysis.only_points() {
        let rounds = analysis.complete_rounds.max(analysis.run.plan.rounds);
        return format!(
            "No answer yet: {rounds} rounds give points; intervals need {FEWEST_ROUNDS}, answers {ROUNDS}."
        );
    }
    let asked: Vec<&Answer> = published(analysis).collect();
    if !asked.is_empty() {
        let count = |outcome: Outcome| {
            asked.iter().filter(|answer| answer.outcome == Some(outcome)).count()
        };
        let parts = [
            (count(Outcome::Held), "held"),
            (count(Outcome::OtherSize), "the same way by another size"),
            (count(Outcome::Reversed), "reversed"),
            (count(Outcome::Differs), "different where none was published"),
            (count(Outcome::NoDifference), "no difference"),
            (count(Outcome::Blind), "blind here"),
            (count(Outcome::Open), "undecided"),
            (count(Outcome::NotComparable), "not comparable"),
        ];
        let parts: Vec<String> = parts
            .iter()
            .filter(|(count, _)| *count > 0)
            .map(|(count, what)| format!("{count} {what}"))
            .collect();
        return format!(
            "{} published comparisons asked again here: {}.",
            asked.len(),
            listed(&parts)
        );
    }
    if let Some(sentence) = answer::sentence(analysis) {
        return sentence;
    }
    let Some(view) = view::first(views) else {
        return "Nothing was measured that can be compared.".into();
    };
    let ours = view.ways.iter().find(|way| is_ours(way) && way.label != view.against);
    let way = ours.or(view.ways.iter().find(|way| way.label != view.against));
    way.map_or_else(
        || format!("Only {} was measured: there is nothing to compare it with.", view.against),
        |way| beside(analysis, view, way),
    )
}

fn is_ours(way: &Way<'_>) -> bool {
    way.arm.backend.starts_with("ringtap") || way.arm.backend.starts_with("tap-")
}

/// One way beside the reference, load by load. Who is faster and is not ranked is not told without the reason.
fn beside(analysis: &Analysis, view: &View<'_>, way: &Way<'_>) -> String {
    let reference = view.ways.iter().find(|way| way.label == view.against);
    let barred = |class: &str, load: &Load| {
        let better = match class {
            "faster" => Some(way),
            "slower" => reference,
            _ => None,
        };
        better.and_then(|way| answer::why_unranked(analysis, way.arm, load.workload))
    };
    let cells = || {
        let cells = way.cells.iter().zip(&view.loads);
        cells.filter_map(|(cell, load)| cell.as_ref().map(|cell| (cell, load)))
    };
    let of = |class: &str| -> Vec<String> {
        cells()
            .filter(|(cell, load)| cell.word.class == class && barred(class, load).is_none())
            .map(|(cell, load)| match cell.ratio.filter(|_| class != "same") {
                Some(ratio) if class != "open" => {
                    format!("{} ({}×)", load.title, format::digits(ratio))
                }
                _ => load.title.clone(),
            })
            .collect()
    };
    let mut parts: Vec<String> = [
        ("faster", "faster in"),
        ("slower", "slower in"),
        ("same", "no different in"),
        ("open", "not decided in"),
    ]
    .into_iter()
    .filter_map(|(class, what)| {
        let loads = of(class);
        (!loads.is_empty()).then(|| format!("{what} {}", listed(&loads)))
    })
    .collect();
    let mut reasons: Vec<(&str, &str)> = Vec::new();
    for (cell, load) in cells() {
        let class = cell.word.class;
        let winner = if class == "faster" { way.label.as_str() } else { view.against.as_str() };
        reasons.extend(barred(class, load).map(|why| (winner, why)));
    }
    reasons.dedup();
    parts.extend(reasons.iter().map(|(way, why)| format!("{way} not ranked ({why})")));
    if parts.is_empty() {
        return format!("{} beside {}: no verdict in any load.", way.label, view.against);
    }
    format!("{} beside {}: {}.", way.label, view.against, parts.join("; "))
}

/// "a, b and c".
fn listed(parts: &[String]) -> String {
    match parts {
        [] => String::new(),
        [one] => one.clone(),
        [all @ .., last] => format!("{} and {last}", all.join(", ")),
    }
}

/// What the answer holds for, in one sentence.
pub fn limits(analysis: &Analysis) -> String {
    let run = &analysis.run;
    let words: Vec<&str> = run.stages.iter().map(|(_, words)| words.as_str()).collect();
    let translated = words.iter().chain(run.guest.as_deref().iter()).any(|w| w.contains("TCG"));
    let virtual_ones = if run.host.virtual_machine { "virtual " } else { "" };
    let rounds = match run.state {
        State::Complete if !analysis.is_partial() => run.plan.rounds,
        State::Complete => run.plan.rounds - analysis.missing.len() as u32,
        _ => analysis.complete_rounds,
    };
    let mut text = format!(
        "Holds for this machine: {} {virtual_ones}CPUs, {}, disks of {} MiB, {rounds} rounds",
        run.host.cpus,
        run.host.file_system,
        run.plan.size >> 20,
    );
    if translated {
        text += "; no KVM here, so the guest's processor is translated: ratios count, rates do not";
    }
    text + "."
}

/// Said in red: loads whose control failed.
fn controls(views: &[View<'_>]) -> Markup {
    let failed: Vec<String> = views
        .iter()
        .map(|view| {
            let of = view.loads.iter().filter(|load| load.failed).map(|load| load.title.as_str());
            (view, of.collect::<Vec<_>>())
        })
        .filter(|(_, loads)| !loads.is_empty())
        .map(|(view, loads)| {
            format!("{}: {}", names::stage(view.stage).to_lowercase(), loads.join(", "))
        })
        .collect();
    html! {
        @if !failed.is_empty() {
            p.bad { b { "Control failed" } ", no verdict there (the same way measured twice differs): " (failed.join("; ")) "." }
        }
    }
}

/// Comparisons of which something was published.
pub fn published(analysis: &Analysis) -> impl Iterator<Item = &Answer> {
    analysis.findings.iter().flat_map(|f| &f.answers).filter(|answer| answer.published.is_some())
}

/// What became of a claim, with its class.
pub fn outcome(answer: &Answer) -> (&'static str, &'static str) {
    match answer.outcome {
        Some(outcome @ (Outcome::Held | Outcome::OtherSize)) => ("faster", outcome.title()),
        Some(outcome @ Outcome::Reversed) => ("slower", outcome.title()),
        Some(outcome) => ("soft", outcome.title()),
        None => ("soft", "nothing published"),
    }
}

/// What is set beside what.
pub fn pair(answer: &Answer) -> String {
    match &answer.against {
        Some(against) => format!("{} against {}", names::named(&answer.arm), names::named(against)),
        None => format!("{}, one of two against alone", names::named(&answer.arm)),
    }
}

/// In which load, and where that is not plain in which stage.
pub fn what(answer: &Answer) -> String {
    let load = workload::find(answer.workload).map_or_else(
        || answer.workload.to_owned(),
        |workload| names::load(workload, answer.metric),
    );
    load + crate::stage::of(answer.stage).words().behind
}

/// A ratio with its interval.
pub fn here(answer: &Answer) -> String {
    let bound = match answer.bound {
        Some(">=") => "≥ ",
        Some(_) => "≤ ",
        None => "",
    };
    let ends = format::interval(answer.interval);
    match answer.ratio.map(format::digits) {
        None => "–".into(),
        Some(ratio) if ends.is_empty() => format!("{bound}{ratio}"),
        Some(ratio) => format!("{bound}{ratio} [{ends}]"),
    }
}

/// The published claims as one table.
fn claims(analysis: &Analysis) -> Markup {
    let rows = || {
        analysis.findings.iter().flat_map(|finding| {
            let of = finding.answers.iter().filter(|answer| answer.published.is_some());
            of.map(move |answer| (finding.question, answer))
        })
    };
    let count = rows().count();
    html! {
        @if count > 0 {
            section.claims {
                div.scroll { table {
                    thead { tr { th { "Published claims: times as good" } th { "load" } th.n { "published" } th.n { "here" } th { "that is" } } }
                    tbody { @for (question, answer) in rows().take(CLAIMS) { tr {
                        td { a href=(format!("#{}", anchor(question))) { (pair(answer)) } }
                        td { (what(answer)) }
                        td.n { (answer.published.as_deref().unwrap_or_default()) } td.n { (here(answer)) }
                        @let (class, said) = outcome(answer);
                        td class=(class) { (said) }
                    } } }
                } }
                @if count > CLAIMS { p.small { a href="#questions" { (count - CLAIMS) " more, each with its card" } } }
            }
        }
    }
}
