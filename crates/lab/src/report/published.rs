//! Published results, shown beside today's with how many runs they stand on.

use serde::Deserialize;

use super::format;
use crate::error::{Error, Result};
use crate::sample::{Metric, Unit};
use crate::workload::bonnie::{PHASES, csv};

const DATA: &str = include_str!("../../data/published.toml");
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
    let lines: Vec<(String, csv::Row)> = bonnie
        .into_iter()
        .map(|Line { name, line }| Ok((name, csv::Row::parse(&line)?)))
        .collect::<Result<_>>()?;
    let run = |metric: &Metric| {
        lines
            .iter()
            .any(|(_, row)| row.phases.get(metric).is_some_and(|phase| phase.rate.is_some()))
    };
    let phases: Vec<Metric> = PHASES.into_iter().filter(run).collect();
    if !lines.is_empty() {
        columns = std::iter::once("backend".to_owned())
            .chain(phases.iter().map(|metric| metric.title().to_owned()))
            .collect();
    }
    for (name, row) in &lines {
        let cell = |metric: &Metric| {
            let phase = row.phases.get(metric).copied().unwrap_or_default();
            let rate =
                phase.rate.map_or_else(String::new, |rate| format::value(rate, metric.unit()));
            let cpu = phase.cpu_percent.map_or_else(String::new, |cpu| format!(" ({cpu:.0} %)"));
            let slowest = phase.slowest_ns.map_or_else(String::new, |ns| {
                format!(", slowest {}", format::number(ns, Unit::Nanoseconds))
            });
            rate + &cpu + &slowest
        };
        rows.push(std::iter::once(name.clone()).chain(phases.iter().map(cell)).collect());
    }
    if let [(first, one), (second, two)] = &lines[..] {
        let ratios = csv::compare(two, one)?;
        let cell = |metric: &Metric| match ratios.get(metric) {
            Some((ratio, ">=")) => format!("≥ {}", format::digits(*ratio)),
            Some((ratio, "<=")) => format!("≤ {}", format::digits(*ratio)),
            Some((ratio, _)) => format::digits(*ratio),
            None => "two bounds".into(),
        };
        let name = format!("{second} / {first}, no interval");
        rows.push(std::iter::once(name).chain(phases.iter().map(cell)).collect());
    }
    Ok(Published { title, setup, runs, said, columns, rows })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_data_reads_and_its_tables_are_whole() {
        let all = all().unwrap();
        assert_eq!(all.len(), 6);
        for one in &all {
            assert!(one.rows.iter().all(|row| row.len() == one.columns.len()), "{}", one.title);
        }
        let loops = &all[0].rows[0];
        // 937880 KiB/s at 86 % CPU; seeks ended under half a second.
        // Twelve phases and the name; the tap writes blocks five times as fast, and seeks are a bound.
        assert_eq!((loops.len(), all[0].rows[2][2].as_str()), (13, "5.18"));
        assert_eq!(all[0].rows[2][6], "≤ 0.016");
        assert!(all[3].rows[0][2].contains("slowest 1.20 s"), "{:?}", all[3].rows[0]);
        assert_eq!((loops[5].as_str(), loops[6].as_str()), ("960 MB/s (86 %)", "≥ 16.0 k/s"));
    }
}
