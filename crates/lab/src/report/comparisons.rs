//! Every pair of arms that a report shows, with its answer. The answers come from [`decision::family`] and from nowhere
//! else: the comparisons of a question are decided together, all others are exploratory.

use super::analysis::{Analysis, reference, workloads};
use super::ranking::{self, Generator};
use super::row::{Floor, Row};
use crate::backend;
use crate::plan::question::Primary;
use crate::run::folder::Record;
use crate::sample::{Metric, Stage, twin};
use crate::stats::decision::{self, Control, Decision, Member, Sensitivity};
use crate::stats::{self, Paired, Ratio};
use crate::workload::{self, Workload};

/// A pair of arms of a stage, as a row shows it.
type Pair = (Stage, String, String);

/// All comparisons of a run and its controls.
pub fn rows(analysis: &Analysis) -> (Vec<Row>, Vec<Floor>) {
    let floors = floors(analysis);
    let mut rows = Vec::new();
    let mut pairs = Vec::new();
    for (stage, arm, against) in all_pairs(&analysis.run) {
        for workload in workloads(&analysis.run) {
            for &metric in Metric::ALL.iter().filter(|metric| !is_twice(workload, **metric)) {
                let paired = analysis.paired(stage, &arm, &against, workload.name(), metric);
                if let Some(paired) = paired {
                    rows.push(row(analysis, (stage, &arm, &against), workload, metric, &paired));
                    pairs.push(paired);
                }
            }
        }
    }
    for question in &analysis.run.plan.questions {
        let of = |row: &Row| row.question.as_ref() == Some(&question.name);
        let members: Vec<usize> = (0..rows.len()).filter(|&at| of(&rows[at])).collect();
        let family: Vec<Member<'_>> =
            members.iter().map(|&at| member(analysis, &floors, &rows[at], &pairs[at])).collect();
        let decided = decision::family(&family, analysis.run.plan.margin, analysis.run.plan.seed);
        for (&at, decided) in members.iter().zip(decided) {
            rows[at].decision = decided.decision;
            rows[at].p = Some(decided.p);
            rows[at].same_p = Some(decided.same_p);
        }
    }
    (rows, floors)
}

fn member<'a>(analysis: &Analysis, floors: &[Floor], row: &Row, paired: &'a Paired) -> Member<'a> {
    let floor = floors.iter().find(|floor| {
        floor.stage == row.stage && floor.workload == row.workload && floor.metric == row.metric
    });
    Member {
        paired,
        control: floor.map(|floor| Control { floor: floor.floor, holds: floor.holds }),
        sensitivity: floor
            .map_or(Sensitivity::Untried, |floor| analysis.sensitivity(&row.arm, floor)),
        same_generator: analysis.generator(row.stage, &row.arm)
            == analysis.generator(row.stage, &row.against),
        cut: [&row.arm, &row.against]
            .iter()
            .any(|arm| analysis.is_cut(row.stage, arm, &row.workload)),
    }
}

/// With one block size, bytes and I/Os a second are the same comparison.
fn is_twice(workload: &dyn Workload, metric: Metric) -> bool {
    metric == Metric::Bandwidth && workload.headline() == [Metric::Iops]
        || metric == Metric::Iops && workload.headline() == [Metric::Bandwidth]
}

fn row(
    analysis: &Analysis,
    (stage, arm, against): (Stage, &str, &str),
    workload: &dyn Workload,
    metric: Metric,
    paired: &Paired,
) -> Row {
    let primary = Primary {
        stage,
        arm: arm.into(),
        against: against.into(),
        workload: workload.name().into(),
        metric,
    };
    let question =
        analysis.run.plan.questions.iter().find(|question| question.primary.contains(&primary));
    let Primary { arm, against, workload: name, .. } = primary;
    Row {
        stage,
        // A twin shows the floor; it is no claim.
        headline: workload.headline().contains(&metric) && arm != twin(&against),
        arm,
        against,
        workload: name,
        metric,
        question: question.map(|question| question.name.clone()),
        rounds: paired.rounds,
        blocks: paired.blocks.len(),
        ours: paired.medians.0,
        theirs: paired.medians.1,
        ratio: paired.ratio.map(Ratio::number),
        bound: match paired.ratio {
            Some(Ratio::AtLeast(_)) => Some(">="),
            Some(Ratio::AtMost(_)) => Some("<="),
            _ => None,
        },
        bootstrap: paired.bootstrap,
        interval: paired.interval,
        p: None,
        same_p: None,
        decision: Decision::Exploratory,
    }
}

/// The controls of every load: the reference beside its twin, and the arm that is known to be slower beside the one it is
/// otherwise.
fn floors(analysis: &Analysis) -> Vec<Floor> {
    let mut list = Vec::new();
    for (stage, _) in analysis.stages() {
        let Some(reference) = reference(&analysis.run, stage) else { continue };
        for workload in workloads(&analysis.run) {
            for &metric in Metric::ALL {
                let twin =
                    analysis.paired(stage, &twin(reference), reference, workload.name(), metric);
                let Some((twin, control)) = twin.and_then(|twin| {
                    let control = Control::of(&twin)?;
                    Some((twin.interval?, control))
                }) else {
                    continue;
                };
                let slow = backend::known_slow(stage).and_then(|(slow, base)| {
                    analysis.paired(stage, slow, base, workload.name(), metric)
                });
                list.push(Floor {
                    stage,
                    workload: workload.name().into(),
                    metric,
                    floor: control.floor,
                    holds: control.holds,
                    twin: (twin.low, twin.high),
                    sensitivity: slow.as_ref().map_or(Sensitivity::Untried, Sensitivity::of),
                    slow: slow.and_then(|slow| {
                        let interval = slow.interval?;
                        Some((slow.ratio?.number(), (interval.low, interval.high)))
                    }),
                });
            }
        }
    }
    list
}

/// What the plan's questions are about, every arm with its stage's reference, Ringtap with each peer, each once.
fn all_pairs(run: &Record) -> Vec<Pair> {
    let mut list: Vec<Pair> = Vec::new();
    let has = |stage: Stage, name: &str| {
        run.arms.iter().any(|arm| arm.stage == stage && arm.name == name)
    };
    let mut add = |stage: Stage, arm: &str, against: &str| {
        let turned = |(of, a, b): &Pair| *of == stage && a == against && b == arm;
        let pair = (stage, arm.to_owned(), against.to_owned());
        if has(stage, arm)
            && has(stage, against)
            && !list.contains(&pair)
            && !list.iter().any(turned)
        {
            list.push(pair);
        }
    };
    for one in run.plan.questions.iter().flat_map(|question| &question.primary) {
        add(one.stage, &one.arm, &one.against);
    }
    for arm in &run.arms {
        match reference(run, arm.stage) {
            Some(reference) if reference != arm.name => add(arm.stage, &arm.name, reference),
            _ => {}
        }
    }
    for peers in backend::peers() {
        peers.against.iter().for_each(|other| add(peers.stage, peers.arm, other));
    }
    list
}

impl Analysis {
    fn generator(&self, stage: Stage, arm: &str) -> Option<Generator> {
        let known = self.run.arms.iter().find(|of| of.stage == stage && of.name == arm);
        known.map(ranking::generator)
    }

    /// Whether the controls of a load show an arm that is slower than this one would be: where another load generator drives
    /// them, what was seen of them was not tried of it.
    pub(super) fn sensitivity(&self, arm: &str, floor: &Floor) -> Sensitivity {
        let stage = floor.stage;
        let slow = backend::known_slow(stage).map(|(slow, _)| slow);
        let controls = [slow, reference(&self.run, stage)];
        let ours = self.generator(stage, arm);
        let alike = controls.into_iter().flatten().all(|of| self.generator(stage, of) == ours);
        match floor.sensitivity {
            Sensitivity::Seen if !alike => Sensitivity::Untried,
            other => other,
        }
    }

    /// The comparison of `arm` with `against`, whichever way round its row stands; exploratory where it has none.
    pub fn answer(
        &self,
        stage: Stage,
        arm: &str,
        against: &str,
        workload: &str,
        metric: Metric,
    ) -> Option<Row> {
        let load = workload::find(workload)?;
        if let Some(row) = self.row(stage, arm, against, workload, metric) {
            return Some(row.clone());
        }
        if let Some(row) = self.row(stage, against, arm, workload, metric) {
            return Some(turned(row));
        }
        let paired = self.paired(stage, arm, against, workload, metric)?;
        Some(row(self, (stage, arm, against), load, metric, &paired))
    }
}

/// The same comparison seen from the other arm.
fn turned(row: &Row) -> Row {
    let over = |(low, high): (f64, f64)| (1.0 / high, 1.0 / low);
    Row {
        arm: row.against.clone(),
        against: row.arm.clone(),
        ours: row.theirs,
        theirs: row.ours,
        ratio: row.ratio.map(|ratio| 1.0 / ratio),
        bound: row.bound.map(|bound| if bound == ">=" { "<=" } else { ">=" }),
        bootstrap: row.bootstrap.map(over),
        interval: row.interval.map(|interval| {
            let (low, high) = over((interval.low, interval.high));
            stats::Interval { low, high, centre: 1.0 / interval.centre, ..interval }
        }),
        decision: match row.decision {
            Decision::Faster => Decision::Slower,
            Decision::Slower => Decision::Faster,
            other => other,
        },
        ..row.clone()
    }
}
