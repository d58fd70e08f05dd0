//! Builds of Ringtap beside each other: is the newer one as good? Several links of each side take part, since two links of the
//! same code differ by up to a tenth, and two of the older side are the floor.

mod suites;

use crate::arms::Arm;
use ringtap_lab::stats::medians::Ratio;
use serde::Serialize;
use std::fmt;
use std::path::{Path, PathBuf};

pub use suites::{Guard, Suite};

/// No line's interval may begin below this.
pub const LEAST_END: f64 = 0.93;
/// Nor the mean of all lines lie below this.
pub const LEAST_CENTRE: f64 = 0.98;

/// The links of both sides.
#[derive(Clone, Debug)]
pub struct Builds {
    /// Before.
    pub old: Vec<PathBuf>,
    /// After.
    pub new: Vec<PathBuf>,
}

impl Builds {
    /// Each link with the name of its arm.
    pub fn named(&self) -> impl Iterator<Item = (String, &Path)> {
        let of = |side| move |(n, link): (usize, _)| (format!("{side} {n}"), link);
        let old = (1..).zip(self.old.iter().map(PathBuf::as_path)).map(of("old"));
        old.chain((1..).zip(self.new.iter().map(PathBuf::as_path)).map(of("new")))
    }
}

/// The arm of one link: as the program that compares with peers makes it, by another name.
pub fn renamed(arms: Vec<Arm>, of: &str, name: &str) -> Option<Arm> {
    let arm = arms.into_iter().find(|arm| arm.name == of)?;
    Some(Arm { name: name.into(), ..arm })
}

/// What became of one line.
#[derive(Clone, Debug, Serialize)]
pub struct Line {
    /// Where, and the workload.
    pub name: String,
    /// New by old: the geometric mean over the links of each side, round by round.
    pub ratio: Ratio,
    /// The second old link by the first.
    pub floor: Option<Ratio>,
    /// CPU of the server for a request, new by old.
    pub cpu: Option<f64>,
}

/// One measurement of one link.
#[derive(Clone, Debug)]
pub struct Point {
    /// From 0.
    pub round: usize,
    /// Where, and the workload.
    pub line: String,
    /// The link's name.
    pub arm: String,
    /// How good it is: requests or copies in a second, or one by what is to be little.
    pub rate: f64,
    /// CPU seconds for each of what was done.
    pub cpu: Option<f64>,
}

/// A link that could not be measured on a line.
#[derive(Clone, Debug, Serialize)]
pub struct Missing {
    /// Where, and the workload.
    pub line: String,
    /// The link's name.
    pub arm: String,
    /// Why.
    pub reason: String,
}

/// What was measured, line by line. Rounds that lack a link are left out.
pub fn lines(points: &[Point], builds: &Builds) -> Vec<Line> {
    let mut names: Vec<&str> = Vec::new();
    for point in points {
        if !names.contains(&point.line.as_str()) {
            names.push(&point.line);
        }
    }
    let rounds = points.iter().map(|point| point.round + 1).max().unwrap_or(0);
    let arms = |side: &str, count: usize| -> Vec<String> {
        (1..=count).map(|n| format!("{side} {n}")).collect()
    };
    let (old, new) = (arms("old", builds.old.len()), arms("new", builds.new.len()));
    let mut list = Vec::new();
    for name in names {
        let of = |arm: &str, round: usize| {
            let point = points.iter().find(|p| p.line == name && p.arm == arm && p.round == round);
            point.map(|point| point.rate)
        };
        let mean = |arms: &[String], round: usize| -> Option<f64> {
            let logs: Option<Vec<f64>> =
                arms.iter().map(|arm| Some(of(arm, round)?.ln())).collect();
            let logs = logs?;
            Some((logs.iter().sum::<f64>() / logs.len() as f64).exp())
        };
        let whole: Vec<(f64, f64)> = (0..rounds)
            .filter_map(|round| Some((mean(&new, round)?, mean(&old, round)?)))
            .collect();
        let (ours, theirs): (Vec<f64>, Vec<f64>) = whole.into_iter().unzip();
        let pair = |a: &str, b: &str| {
            let both = (0..rounds).filter_map(|round| Some((of(a, round)?, of(b, round)?)));
            let (a, b): (Vec<f64>, Vec<f64>) = both.unzip();
            Ratio::of_rounds(&a, &b)
        };
        let cpu = |arms: &[String]| -> Option<f64> {
            let of_line = points.iter().filter(|p| p.line == name && arms.contains(&p.arm));
            let all: Vec<f64> = of_line.filter_map(|point| point.cpu).collect();
            (!all.is_empty()).then(|| ringtap_lab::stats::medians::median(&all))
        };
        if let Some(ratio) = Ratio::of_rounds(&ours, &theirs) {
            let floor = (old.len() > 1).then(|| pair(&old[1], &old[0])).flatten();
            let cpu = cpu(&new).zip(cpu(&old)).map(|(new, old)| new / old);
            list.push(Line { name: name.into(), ratio, floor, cpu });
        }
    }
    list
}

/// All lines together.
#[derive(Clone, Debug, Serialize)]
pub struct Verdict {
    /// Each line.
    pub lines: Vec<Line>,
    /// What could not be measured.
    pub missing: Vec<Missing>,
    /// The geometric mean of their ratios.
    pub centre: f64,
    /// Whether the newer side holds.
    pub holds: bool,
}

/// Whether the newer side is as good. What a link of the older side cannot do is told; of the newer side it counts.
pub fn verdict(lines: Vec<Line>, missing: Vec<Missing>) -> Verdict {
    let logs: f64 = lines.iter().map(|line| line.ratio.value.ln()).sum();
    let centre = (logs / lines.len().max(1) as f64).exp();
    let whole = !missing.iter().any(|missing| missing.arm.starts_with("new"));
    let good = centre >= LEAST_CENTRE && lines.iter().all(is_good_enough);
    let holds = whole && good && !lines.is_empty();
    Verdict { lines, missing, centre, holds }
}

/// Without an interval nothing holds.
fn is_good_enough(line: &Line) -> bool {
    line.ratio.interval.is_some_and(|(low, _)| low >= LEAST_END)
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ends = |ratio: &Ratio| match ratio.interval {
            Some((low, high)) => format!("{:.3} [{low:.3}, {high:.3}]", ratio.value),
            None => format!("{:.3}", ratio.value),
        };
        let floor = self.floor.as_ref().map_or_else(String::new, ends);
        let cpu = self.cpu.map_or_else(String::new, |cpu| format!("{cpu:.3}"));
        let mark = if is_good_enough(self) { "" } else { "  BELOW" };
        write!(f, "{:<34} {:>24} {floor:>24} {cpu:>7}{mark}", self.name, ends(&self.ratio))
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Missing { line, arm, reason } in &self.missing {
            writeln!(f, "not measured: {line}, {arm}: {reason}")?;
        }
        writeln!(f, "{:<34} {:>24} {:>24} {:>7}", "line", "new by old", "old by old", "CPU")?;
        for line in &self.lines {
            writeln!(f, "{line}")?;
        }
        write!(
            f,
            "centre {:.3} (at least {LEAST_CENTRE}), each lower end at least {LEAST_END}: {}",
            self.centre,
            if self.holds { "holds" } else { "does not hold" }
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points(new: f64) -> Vec<Point> {
        let mut points = Vec::new();
        for round in 0..8 {
            for (arm, speed) in [("old 1", 1.0), ("old 2", 1.04), ("new 1", new), ("new 2", new)] {
                let noise = 1.0 + 0.002 * ((round * 7) % 5) as f64;
                points.push(Point {
                    round,
                    line: "nbd tmpfs randread".into(),
                    arm: arm.into(),
                    rate: 1e5 * speed * noise,
                    cpu: Some(1e-6 / speed),
                });
            }
        }
        points
    }

    fn builds() -> Builds {
        let two = || vec![PathBuf::from("a"), PathBuf::from("b")];
        Builds { old: two(), new: two() }
    }

    #[test]
    fn a_slower_side_does_not_hold() {
        let builds = builds();
        let names: Vec<String> = builds.named().map(|(name, _)| name).collect();
        assert_eq!(names, ["old 1", "old 2", "new 1", "new 2"]);
        for (speed, holds) in [(1.03, true), (0.97, false), (0.9, false)] {
            let lines = lines(&points(speed), &builds);
            assert!((lines[0].floor.unwrap().value - 1.04).abs() < 1e-9);
            let verdict = verdict(lines, vec![]);
            assert_eq!(verdict.holds, holds, "{verdict}");
        }
        assert!(!verdict(vec![], vec![]).holds, "nothing measured is nothing shown");
    }

    #[test]
    fn what_the_newer_side_cannot_do_any_more_does_not_hold() {
        for (arm, holds) in [("old 2", true), ("new 1", false)] {
            let missing = Missing {
                line: "ublk randread".into(),
                arm: arm.into(),
                reason: "unknown option --ublk".into(),
            };
            let verdict = verdict(lines(&points(1.0), &builds()), vec![missing]);
            assert_eq!(verdict.holds, holds, "{verdict}");
            let said = format!("not measured: ublk randread, {arm}: unknown option --ublk");
            assert!(verdict.to_string().starts_with(&said), "{verdict}");
        }
    }
}
