//! The report: terminal table, `report.html`, JSON; and of two runs, `changes.html`. All are pure functions of a run's folder.
//!
//! What a report shows (`row`, `finding`, `column`, `durability`) lies below [`analysis`], which has all of it; what works it out
//! (`comparisons`, `findings`, `columns`) lies above that, and `analyse`, which has all of it worked out, above those. Tables and
//! pages show it.

pub mod across;
mod analyse;
pub mod analysis;
pub mod answer;
pub mod beside;
pub mod caches;
pub mod change;
pub mod change_page;
pub mod claims;
pub mod column;
pub mod columns;
pub mod comparisons;
pub mod contention;
pub mod durability;
pub mod files;
pub mod finding;
mod findings;
pub mod format;
pub mod gate;
pub mod junit;
mod latency;
pub mod ledger;
pub mod limit;
pub mod lines;
pub mod markdown;
mod medians;
pub mod openmetrics;
pub mod page;
pub mod published;
pub mod ranking;
pub mod row;
pub mod series;
pub mod steady;
pub mod svg;
pub mod table;
pub mod words;

use std::path::{Path, PathBuf};

pub use analysis::Analysis;

use crate::backend::own;
use crate::error::{Error, Result};
use crate::run::folder;

/// Reads a run's folder and analyses it.
pub fn load(run: &Path) -> Result<Analysis> {
    let (record, samples) = folder::read(run)?;
    // How they are reached says what drove them.
    record.plan.own.iter().try_for_each(own::add)?;
    Ok(Analysis::new(record, &samples))
}

/// Writes `report.html` (and `report.md`, `samples.csv`, `report.json`) into the run's folder and returns its path.
pub fn write_html(run: &Path, analysis: &Analysis) -> Result<PathBuf> {
    let path = run.join("report.html");
    folder::replace(&path, &page::render(analysis))?;
    files::write(run, analysis)?;
    Ok(path)
}

/// Writes `changes.html`, what changed from one run to the other, into `folder` and returns its path.
pub fn write_changes(
    folder: &Path,
    before: &Analysis,
    after: &Analysis,
    comparison: &change::Comparison,
) -> Result<PathBuf> {
    std::fs::create_dir_all(folder).map_err(Error::file("create", folder))?;
    let path = folder.join("changes.html");
    folder::replace(&path, &change_page::render(before, after, comparison))?;
    Ok(path)
}
