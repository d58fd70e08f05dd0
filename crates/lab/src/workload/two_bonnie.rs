//! bonnie++ in two guests at once: each one's columns beside what it has alone.

use std::time::Duration;

use super::bonnie::{self, Mode, Shape, csv};
use super::{Client, Listed, Measured, Settings, Workload};
use crate::env::{Env, Missing};
use crate::error::{Error, Result};
use crate::sample::{Metric, Value};

/// A column of bonnie++ and where what two guests got in it stands.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    /// bonnie++'s own; of two guests at once the sum of both.
    pub both: Metric,
    /// Each guest's.
    pub guests: [Places; 2],
}

/// Where a guest's part of a column stands.
#[derive(Clone, Copy, Debug)]
pub struct Places {
    /// What it has alone.
    pub alone: Metric,
    /// What it has beside the other.
    pub beside: Metric,
    /// The one by the other.
    pub keeps: Metric,
}

const fn places(alone: Metric, beside: Metric, keeps: Metric) -> Places {
    Places { alone, beside, keeps }
}

/// The columns that are measured.
pub const COLUMNS: [Column; 4] = [
    Column {
        both: Metric::PutBlock,
        guests: [
            places(Metric::FirstPutAlone, Metric::FirstPut, Metric::FirstPutKeeps),
            places(Metric::SecondPutAlone, Metric::SecondPut, Metric::SecondPutKeeps),
        ],
    },
    Column {
        both: Metric::Rewrite,
        guests: [
            places(Metric::FirstRewriteAlone, Metric::FirstRewrite, Metric::FirstRewriteKeeps),
            places(Metric::SecondRewriteAlone, Metric::SecondRewrite, Metric::SecondRewriteKeeps),
        ],
    },
    Column {
        both: Metric::GetBlock,
        guests: [
            places(Metric::FirstGetAlone, Metric::FirstGet, Metric::FirstGetKeeps),
            places(Metric::SecondGetAlone, Metric::SecondGet, Metric::SecondGetKeeps),
        ],
    },
    Column {
        both: Metric::Seeks,
        guests: [
            places(Metric::FirstSeeksAlone, Metric::FirstSeeks, Metric::FirstSeeksKeeps),
            places(Metric::SecondSeeksAlone, Metric::SecondSeeks, Metric::SecondSeeksKeeps),
        ],
    },
];

/// A run of bonnie++ in a guest.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    /// What it printed.
    pub row: csv::Row,
    /// From when to when, in milliseconds of one clock of both.
    pub span: (f64, f64),
}

/// How it is run on a disk of so many bytes.
pub fn shape(disk: u64) -> Shape {
    Shape { files: 1, ..bonnie::shape(disk, Mode::Direct) }
}

/// How long a run may take.
pub const LIMIT: Duration = Duration::from_secs(900);
/// Before and behind bonnie++'s line: the guest's clock.
const CLOCK: &str = "ringtap clock ";

/// What a guest's shell does: it waits until `at` by its own clock, in milliseconds since 1970, where that is not 0, and runs
/// bonnie++ on the file system in `place`.
pub fn script(place: &str, disk: u64, at: u64) -> String {
    let words: Vec<String> =
        bonnie::args(place, shape(disk)).iter().map(|word| format!("'{word}'")).collect();
    format!(
        "left=$(({at} - $(date +%s%3N)))\n\
         [ $left -le 0 ] || sleep $((left / 1000)).$(printf %03d $((left % 1000)))\n\
         echo \"{CLOCK}$(date +%s%3N)\"\nbonnie++ {}\nstatus=$?\necho \"{CLOCK}$(date +%s%3N)\"\nexit $status",
        words.join(" ")
    )
}

/// Reads what that printed, in a guest whose clock is so many milliseconds ahead.
pub fn run(stdout: &str, ahead: f64) -> Result<Run> {
    let clocks: Vec<f64> = stdout
        .lines()
        .filter_map(|line| line.strip_prefix(CLOCK)?.trim().parse::<f64>().ok())
        .collect();
    let &[from, to] = &clocks[..] else {
        return Err(Error::Output {
            what: "a guest's clock around bonnie++",
            found: format!("{} of two readings", clocks.len()),
        });
    };
    Ok(Run { row: csv::Row::find(stdout)?, span: (from - ahead, to - ahead) })
}

/// What two runs have in common, as a share of the shorter.
fn common([one, other]: [&Run; 2]) -> f64 {
    let together = one.span.1.min(other.span.1) - one.span.0.max(other.span.0);
    let shorter = (one.span.1 - one.span.0).min(other.span.1 - other.span.0);
    if shorter > 0.0 { (together / shorter).max(0.0) } else { 0.0 }
}

/// Puts together what each has alone and what each has beside the other. Where the two had less than `least` of the shorter one's
/// time in common it is no measurement of two at once.
pub fn measured(alone: [&Run; 2], beside: [&Run; 2], disk: u64, least: f64) -> Result<Measured> {
    let share = common(beside);
    if share < least {
        return Err(Error::Guest(format!(
            "bonnie++ in the two guests had only {:.0} % of its time in common: a larger --size helps",
            share * 100.0
        )));
    }
    let mut measured = Measured::default();
    let rate = |run: &Run, metric: Metric| run.row.phases.get(&metric)?.rate;
    for column in COLUMNS {
        let mut sum: Option<Value> = None;
        for (which, places) in column.guests.into_iter().enumerate() {
            let (alone, beside) =
                (rate(alone[which], column.both), rate(beside[which], column.both));
            if let Some(alone) = alone {
                measured.metrics.insert(places.alone, alone);
            }
            let Some(beside) = beside else { continue };
            measured.metrics.insert(places.beside, beside);
            sum = Some(match sum {
                Some(sum) => Value {
                    value: sum.value + beside.value,
                    at_least: sum.at_least || beside.at_least,
                },
                None => beside,
            });
            // Of a bound there is no share.
            if let Some(alone) = alone.filter(|alone| !alone.at_least && !beside.at_least) {
                measured.metrics.insert(places.keeps, (beside.value / alone.value).into());
            }
        }
        if let Some(sum) = sum {
            measured.metrics.insert(column.both, sum);
        }
    }
    let Shape { size_mib, files, .. } = shape(disk);
    measured.note = Some(format!(
        "bonnie++ {}: {size_mib} MiB of data past the cache (-D) and {files}×1024 files in each of two guests, {:.0} % of the \
         shorter one's time in common; each goes through its phases at its own pace",
        beside[0].row.version,
        share * 100.0
    ));
    Ok(measured)
}

/// The workload.
pub struct TwoBonnie;

const LISTED: Listed = Listed {
    name: "two-bonnie",
    title: "bonnie++ in two guests at once, on ext4, past the page cache",
    group: None,
    headline: bonnie::HEADLINE,
    quick: false,
};

/// The only one.
pub const WORKLOADS: &[&dyn Workload] = &[&TwoBonnie];

impl Workload for TwoBonnie {
    fn listed(&self) -> &Listed {
        &LISTED
    }
    fn client(&self) -> Client {
        Client::TwoFiles
    }
    /// Each alone, and both in the time that both alone take.
    fn seconds(&self, settings: &Settings) -> f64 {
        2.5 * (4.0 + 25.0 * settings.gib())
    }
    fn missing(&self, env: &Env) -> Option<Missing> {
        env.program("bonnie++", "bonnie++").or_else(|| env.program("mkfs.ext4", "e2fsprogs"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(put: &str, get: &str) -> String {
        format!(
            "1.98,2.00a,lab,1,1,32M,,8192,5,,,{put},10,500,5,,,{get},9,4000,7,1,,,,,+++++,+++,+++++,+++,+++++,+++,+++++,+++,\
             +++++,+++,+++++,+++,,1ms,1ms,,1ms,1ms,1ms,1ms,1ms,1ms,1ms,1ms"
        )
    }

    fn of(put: &str, get: &str, span: (u64, u64)) -> Run {
        let text = format!("{CLOCK}{}\n{}\n{CLOCK}{}\n", span.0, line(put, get), span.1);
        run(&text, 500.0).unwrap()
    }

    #[test]
    fn each_guests_columns_stand_beside_its_own_alone() {
        let alone = [of("1000", "8000", (500, 9500)), of("2000", "8000", (10_500, 19_500))];
        let beside = [of("400", "+++++", (20_500, 40_500)), of("500", "4000", (21_500, 45_500))];
        assert_eq!(beside[0].span, (20_000.0, 40_000.0), "by the clock of this machine");
        let pair = |of: &'static str| (of, 96 << 20);
        let (_, disk) = pair("");
        let measured =
            measured([&alone[0], &alone[1]], [&beside[0], &beside[1]], disk, 0.6).unwrap();
        let value = |metric| measured.metrics[&metric].value;
        assert_eq!(value(Metric::FirstPutAlone), 1000.0 * 1024.0);
        assert_eq!(value(Metric::SecondPut), 500.0 * 1024.0);
        assert_eq!((value(Metric::FirstPutKeeps), value(Metric::SecondPutKeeps)), (0.4, 0.25));
        assert_eq!(value(Metric::PutBlock), 900.0 * 1024.0, "both together");
        // A bound is none to be divided by, and makes the sum one.
        assert!(!measured.metrics.contains_key(&Metric::FirstGetKeeps));
        assert!(measured.metrics[&Metric::GetBlock].at_least);
        assert_eq!(value(Metric::SecondGetKeeps), 0.5);
        assert!(measured.note.unwrap().contains("95 % of the shorter"), "19 of 20 seconds");
    }

    #[test]
    fn two_that_did_not_run_together_are_no_measurement() {
        let (one, other) = (of("1", "1", (500, 10_500)), of("1", "1", (9500, 19_500)));
        let error = measured([&one, &other], [&one, &other], 96 << 20, 0.6).unwrap_err();
        assert!(error.to_string().contains("10 % of its time in common"), "{error}");
        assert!(run(&line("1", "1"), 0.0).is_err(), "without a clock");
    }

    #[test]
    fn a_real_shell_waits_for_its_moment() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("bonnie++");
        std::fs::write(&program, format!("#!/bin/sh\necho '{}'\n", line("7", "9"))).unwrap();
        std::os::unix::fs::PermissionsExt::set_mode(
            &mut std::fs::metadata(&program).unwrap().permissions(),
            0o755,
        );
        std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755))
            .unwrap();
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        let at = u64::try_from(now.as_millis()).unwrap() + 700;
        let path = format!("{}:{}", dir.path().display(), std::env::var("PATH").unwrap());
        let output = std::process::Command::new("sh")
            .args(["-c", &script("/nowhere", 96 << 20, at)])
            .env("PATH", path)
            .output()
            .unwrap();
        let run = run(&String::from_utf8(output.stdout).unwrap(), 0.0).unwrap();
        assert!(run.span.0 >= at as f64, "{run:?}, {at}");
    }
}
