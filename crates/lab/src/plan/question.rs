//! Which comparisons a run is made for. They are named before it, at most [`MOST`] a question; a question is one family, and
//! only its comparisons get an answer. Everything else that a run shows is exploratory.

use serde::{Deserialize, Serialize};

use super::Plan;
use crate::backend;
use crate::report::claims;
use crate::sample::{Metric, Stage};
use crate::workload::{self, Workload};

/// Most comparisons of a question.
pub const MOST: usize = 12;

/// A question and the comparisons that answer it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Question {
    /// Its name, for flags and rows.
    pub name: String,
    /// The question as a sentence.
    pub asks: String,
    /// Its comparisons.
    pub primary: Vec<Primary>,
}

/// One comparison, named before the run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Primary {
    /// Where.
    pub stage: Stage,
    /// Which arm.
    pub arm: String,
    /// Against which.
    pub against: String,
    /// In which workload.
    pub workload: String,
    /// By which metric.
    pub metric: Metric,
}

/// The questions of a plan that names none: one for each workload, Ringtap's comparisons with its peers first, then each
/// backend's with the stage's reference.
pub fn usual(plan: &Plan) -> Vec<Question> {
    plan.workloads()
        .into_iter()
        .filter(|workload| !workload.is_check())
        .filter_map(|workload| {
            let mut primary: Vec<Primary> = Vec::new();
            for pair in plan.stages.iter().flat_map(|stage| pairs(plan, *stage)) {
                for one in pair.on(plan, workload) {
                    if !primary.contains(&one) && primary.len() < MOST {
                        primary.push(one);
                    }
                }
            }
            let asks = format!("{}: which way?", workload.title());
            (!primary.is_empty()).then(|| Question { name: workload.name().into(), asks, primary })
        })
        .collect()
}

/// The published questions, as far as the plan has their backends and workloads, with Ringtap's own beside them.
pub fn published(plan: &Plan) -> Vec<Question> {
    let mut asked: Vec<Primary> = Vec::new();
    claims::QUESTIONS
        .iter()
        .filter_map(|question| {
            let mut primary: Vec<Primary> = Vec::new();
            for claim in question.claims {
                let workload = workload::find(claim.workload)?;
                for &stage in claim.stages.iter().filter(|stage| plan.stages.contains(stage)) {
                    let pair = Pair { stage, arm: claim.arm, against: claim.against };
                    let fits = pair.runs(plan, workload) && primary.len() < MOST;
                    for &metric in claim.metrics.iter().filter(|_| fits) {
                        let one = pair.primary(workload, metric);
                        // A comparison has one answer, in the question that comes first.
                        if !asked.contains(&one) && primary.len() < MOST {
                            asked.push(one.clone());
                            primary.push(one);
                        }
                    }
                }
            }
            let (name, asks) = (question.name.into(), question.question.into());
            (!primary.is_empty()).then_some(Question { name, asks, primary })
        })
        .collect()
}

/// Two arms of a stage.
#[derive(Clone, Copy, Debug)]
pub struct Pair<'a> {
    /// Where.
    pub stage: Stage,
    /// Which arm.
    pub arm: &'a str,
    /// Against which.
    pub against: &'a str,
}

impl Pair<'_> {
    /// Their comparisons in a workload, as far as the plan runs it on both.
    pub fn on(self, plan: &Plan, workload: &dyn Workload) -> Vec<Primary> {
        if !self.runs(plan, workload) {
            return Vec::new();
        }
        workload.headline().iter().map(|metric| self.primary(workload, *metric)).collect()
    }

    fn runs(self, plan: &Plan, workload: &dyn Workload) -> bool {
        let on = |backend: &str| {
            let of = |(stage, name): &(Stage, String)| *stage == self.stage && name == backend;
            plan.backends.iter().any(of) && plan.runs(self.stage, workload.name(), backend)
        };
        let planned = plan.workloads.iter().any(|name| name == workload.name());
        planned && workload.runs_on(self.stage) && on(self.arm) && on(self.against)
    }

    fn primary(self, workload: &dyn Workload, metric: Metric) -> Primary {
        Primary {
            stage: self.stage,
            arm: self.arm.into(),
            against: self.against.into(),
            workload: workload.name().into(),
            metric,
        }
    }
}

fn pairs(plan: &Plan, stage: Stage) -> Vec<Pair<'_>> {
    let peers = backend::peers().filter(|peers| peers.stage == stage);
    let peers = peers.flat_map(|peers| {
        peers.against.iter().map(move |against| Pair { stage, arm: peers.arm, against })
    });
    let names =
        || plan.backends.iter().filter(|(of, _)| *of == stage).map(|(_, name)| name.as_str());
    let own = plan.own.iter().filter(|own| own.stages().contains(&stage));
    let own = own.map(|own| Pair { stage, arm: &own.name, against: own.rival(stage) });
    let reference = names().next();
    let others = names().skip(1).filter_map(|arm| Some(Pair { stage, arm, against: reference? }));
    own.chain(peers).chain(others).collect()
}

/// What is wrong with a plan's questions.
pub fn check(questions: &[Question]) -> Result<(), String> {
    for question in questions {
        if question.primary.len() > MOST {
            return Err(format!(
                "question {:?} has {} comparisons: give at most {MOST}, for they share one chance of error",
                question.name,
                question.primary.len()
            ));
        }
        if let Some(lost) =
            question.primary.iter().find(|one| workload::find(&one.workload).is_none())
        {
            return Err(format!(
                "question {:?} is about a workload {:?}, and there is none",
                question.name, lost.workload
            ));
        }
    }
    let mut all: Vec<&Primary> = questions.iter().flat_map(|question| &question.primary).collect();
    while let Some(one) = all.pop() {
        if all.contains(&one) {
            return Err(format!(
                "{} against {} in {} is asked twice: a comparison has one answer",
                one.arm, one.against, one.workload
            ));
        }
    }
    Ok(())
}
