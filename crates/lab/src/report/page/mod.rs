//! `report.html`: one file that opens without a network. Nothing is loaded; its one script sorts tables.
//!
//! The first screen answers (`first`), cards below it show each question and load (`cards`), what few readers want is
//! folded (`folds`). All of it draws from plain values (`view`).

mod cards;
mod curves;
mod first;
mod folds;
mod forest;
pub(super) mod frame;
pub(super) mod marks;
pub(super) mod names;
pub mod view;

use maud::html;

use super::analysis::Analysis;
pub(super) use first::{here, outcome, pair, published, what};
pub(super) use folds::probability;

/// The page of a run.
pub fn render(analysis: &Analysis) -> String {
    let views = view::views(analysis);
    let stage = view::first(&views).map(|view| view.stage);
    frame::page(
        &format!("Ringtap compare, {}", analysis.run.began),
        html! {
            (first::screen(analysis, &views))
            (folds::troubles(analysis))
            (cards::questions(analysis))
            @for view in views.iter().filter(|view| Some(view.stage) == stage) { (cards::stage(analysis, view, true)) }
            @for view in views.iter().filter(|view| Some(view.stage) != stage) { (cards::stage(analysis, view, false)) }
            (folds::conditions(analysis))
            (folds::all(analysis))
        },
    )
}

/// The answer of the first screen, in one sentence.
pub fn answer(analysis: &Analysis) -> String {
    first::answer(analysis, &view::views(analysis))
}

/// What it holds for, in one sentence.
pub fn limits(analysis: &Analysis) -> String {
    first::limits(analysis)
}
