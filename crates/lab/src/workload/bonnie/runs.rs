//! bonnie++ run after run on one file system: on a fresh snapshot the first runs copy what they write over, later ones find it
//! copied. Published were such rows, from the first to those that had settled.

use super::Mode;
use super::csv::Row;
use crate::env::{Env, Missing};
use crate::error::{Error, Result};
use crate::sample::{Metric, Value};
use crate::stats;
use crate::workload::machine::{Machine, Tool};
use crate::workload::{Client, Listed, Measured, Settings, Workload};

/// Runs at most.
pub const MOST: usize = 8;
/// Two runs in a row that differ by less have settled.
const SETTLED: f64 = 0.1;

/// Runs it, by what each run prints, until it has settled.
pub fn until_settled(mut run: impl FnMut() -> Result<String>) -> Result<Measured> {
    let mut rows = Vec::new();
    while !settled(&rows) {
        rows.push(Row::find(&run()?)?);
    }
    measured(&rows)
}

/// Whether no more runs are needed: the last two write as fast as each other, and so is nothing left to be copied.
fn settled(rows: &[Row]) -> bool {
    match rows {
        [.., one, two] => {
            let (one, two) = (write(one).unwrap_or(0.0), write(two).unwrap_or(0.0));
            rows.len() >= MOST || (rows.len() > 2 && (two / one - 1.0).abs() < SETTLED)
        }
        _ => false,
    }
}

fn write(row: &Row) -> Result<f64> {
    match row.phases.get(&Metric::PutBlock).and_then(|phase| phase.rate) {
        Some(rate) if !rate.at_least => Ok(rate.value),
        _ => Err(Error::Output {
            what: "bonnie++'s row",
            found: "block write took under half a second, which it gives no rate for: a larger --size helps".into(),
        }),
    }
}

/// What the runs show together: block writes of the first and of the last, and block reads.
fn measured(rows: &[Row]) -> Result<Measured> {
    let writes: Vec<f64> = rows.iter().map(write).collect::<Result<_>>()?;
    let reads = rows.iter().filter_map(|row| row.phases.get(&Metric::GetBlock)?.rate);
    let reads: Vec<Value> = reads.collect();
    let none = || Error::Output { what: "bonnie++'s rows", found: "not one".into() };
    let (first, last) = writes.first().zip(writes.last()).ok_or_else(none)?;
    let mut measured = Measured::default();
    measured.metrics.insert(Metric::FreshWrite, (*first).into());
    if rows.len() < MOST {
        measured.metrics.insert(Metric::SettledWrite, (*last).into());
        measured.metrics.insert(Metric::FirstWriteCost, (last / first).into());
    }
    measured.metrics.extend(stats::median_value(&reads).map(|read| (Metric::GetBlock, read)));
    let count = writes.len() as f64;
    measured.curve =
        writes.iter().zip(1..).map(|(rate, n)| (f64::from(n) / count, *rate)).collect();
    let version = &rows[0].version;
    let mib = rows[0].file_size.unwrap_or(0) >> 20;
    let end = if rows.len() < MOST { "settled" } else { "ended" };
    measured.note = Some(format!(
        "bonnie++ {version}: {mib} MiB of data, {} runs one after another until {end}; block writes {} MB/s",
        rows.len(),
        writes.iter().map(|rate| format!("{:.0}", rate / 1e6)).collect::<Vec<_>>().join(", ")
    ));
    let asked: f64 = rows.iter().map(Row::asked).sum();
    measured.asked = Some(asked).filter(|bytes| *bytes > 0.0);
    Ok(measured)
}

/// The workload.
pub struct Runs;

const LISTED: Listed = Listed {
    name: "bonnie-runs",
    title: "bonnie++ run after run until settled",
    group: None,
    headline: &[Metric::FreshWrite, Metric::SettledWrite, Metric::GetBlock],
    quick: false,
};

impl Workload for Runs {
    fn listed(&self) -> &Listed {
        &LISTED
    }
    fn client(&self) -> Client {
        Client::Files
    }
    fn seconds(&self, settings: &Settings) -> f64 {
        5.0 * (2.0 + 15.0 * settings.gib())
    }
    fn missing(&self, env: &Env) -> Option<Missing> {
        env.program("bonnie++", "bonnie++")
    }
    fn run(&self, machine: &dyn Machine) -> Result<Measured> {
        let shape = super::shape(machine.settings().size, Mode::Direct);
        machine.files(&mut |files| {
            until_settled(|| {
                let said = files.run(Tool::Bonnie, &super::args(files.dir(), shape))?;
                files.settle().map(|()| said)
            })
        })
    }
    fn is_repeated(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(write: u32) -> Row {
        let line = format!(
            "a,128M,,,{write},3,5000,4,,,90000,8,+++++,+++,1,+++++,+++,+++++,+++,+++++,+++,+++++,+++,+++++,+++,+++++,+++"
        );
        Row::parse(&line).unwrap()
    }

    #[test]
    fn runs_go_on_until_two_are_alike() {
        let rows = |writes: &[u32]| writes.iter().map(|write| row(*write)).collect::<Vec<_>>();
        for (writes, end) in [
            (&[9000][..], false),
            (&[9000, 9100], false),
            (&[9000, 30_000, 60_000], false),
            (&[9000, 60_000, 61_000], true),
            (&[1, 9, 1, 9, 1, 9, 1, 9], true),
        ] {
            assert_eq!(settled(&rows(writes)), end, "{writes:?}");
        }
        let measured = measured(&rows(&[10_000, 50_000, 50_500])).unwrap();
        assert!((measured.metrics[&Metric::FirstWriteCost].value - 5.05).abs() < 1e-9);
        assert_eq!(measured.metrics[&Metric::FreshWrite].value, 10_000.0 * 1024.0);
        assert_eq!(measured.metrics[&Metric::GetBlock].value, 90_000.0 * 1024.0);
        assert_eq!((measured.curve.len(), measured.curve[2].0), (3, 1.0));
    }

    #[test]
    fn a_phase_without_a_rate_is_an_error_with_a_remedy() {
        let mut short = row(1);
        short.phases.get_mut(&Metric::PutBlock).unwrap().rate.as_mut().unwrap().at_least = true;
        assert!(measured(&[short]).unwrap_err().to_string().contains("larger --size"));
    }
}
