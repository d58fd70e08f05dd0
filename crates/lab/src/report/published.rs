//! Published results, shown beside today's with how many runs they stand on.

use serde::Deserialize;

use super::format;
use crate::error::{Error, Result};
use crate::sample::Metric;
use crate::workload::bonnie::csv;

const DATA: &str = include_str!("../../data/published.toml");
const COLUMNS: [Metric; 6] = [
    Metric::PutChar,
    Metric::PutBlock,
    Metric::Rewrite,
    Metric::GetChar,
    Metric::GetBlock,
    Metric::Seeks,
];

/// A published comparison.
#[derive(Clone, Debug, PartialEq)]
pub struct Published {
    /// What was compared.
    pub title: String,
    /// On what, with what.
    pub setup: String,
    /// How many runs.
    pub runs: String,
    /// What its author concluded.
    pub said: String,
    /// Heads of the columns; none where only charts were published.
    pub columns: Vec<String>,
    /// Rows.
    pub rows: Vec<Vec<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    result: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    title: String,
    setup: String,
    runs: String,
    said: String,
    #[serde(default)]
    columns: Vec<String>,
    #[serde(default)]
    rows: Vec<Vec<String>>,
    #[serde(default)]
    bonnie: Vec<Line>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    name: String,
    line: String,
}

/// All published comparisons. bonnie++ lines are read as today's are: bounds stay bounds.
pub fn all() -> Result<Vec<Published>> {
    let wrong = |found: String| Error::Output { what: "data/published.toml", found };
    let file: File = toml::from_str(DATA).map_err(|e| wrong(e.to_string()))?;
    file.result.into_iter().map(published).collect()
}

fn published(entry: Entry) -> Result<Published> {
    let Entry { title, setup, runs, said, mut columns, mut rows, bonnie } = entry;
    if !bonnie.is_empty() {
        columns = std::iter::once("backend".to_owned())
            .chain(COLUMNS.iter().map(|metric| metric.title().to_owned()))
            .collect();
    }
    for Line { name, line } in bonnie {
        let row = csv::Row::parse(&line)?;
        let cell = |metric: &Metric| {
            let phase = row.phases.get(metric).copied().unwrap_or_default();
            let rate =
                phase.rate.map_or_else(String::new, |rate| format::value(rate, metric.unit()));
            let cpu = phase.cpu_percent.map_or_else(String::new, |cpu| format!(" ({cpu:.0} %)"));
            rate + &cpu
        };
        rows.push(std::iter::once(name).chain(COLUMNS.iter().map(cell)).collect());
    }
    Ok(Published { title, setup, runs, said, columns, rows })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_data_reads_and_its_tables_are_whole() {
        let all = all().unwrap();
        assert_eq!(all.len(), 4);
        for one in &all {
            assert!(one.rows.iter().all(|row| row.len() == one.columns.len()), "{}", one.title);
        }
        let loops = &all[0].rows[0];
        // 937880 KiB/s at 86 % CPU; seeks ended under half a second.
        assert_eq!((loops[5].as_str(), loops[6].as_str()), ("960 MB/s (86 %)", "≥ 16.0 k"));
    }
}
