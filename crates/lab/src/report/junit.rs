//! Results as JUnit XML, for what shows tests: a case for each arm and load of a run, or for each change between two.

use quick_junit::{NonSuccessKind, TestCase, TestCaseStatus, TestSuite};

use super::analysis::{Analysis, Failure};
use super::change::Comparison;
use super::format;
use super::gate;
use super::limit::Limit;
use crate::sample::{Metric, Stage, Value};

/// A run: what failed fails, what could not run is skipped, the medians stand in the output.
pub fn run(analysis: &Analysis) -> Result<String, quick_junit::SerializeError> {
    let mut report = quick_junit::Report::new("ringtap compare");
    for stage in Stage::ALL {
        let mut suite = TestSuite::new(stage.name());
        for arm in analysis.run.arms.iter().filter(|arm| arm.stage == stage) {
            for workload in &analysis.run.plan.workloads {
                suite.add_test_cases(case(analysis, stage, &arm.name, workload));
            }
        }
        if !suite.test_cases.is_empty() {
            report.add_test_suite(suite);
        }
    }
    report.to_string()
}

fn case(analysis: &Analysis, stage: Stage, arm: &str, workload: &str) -> Option<TestCase> {
    let failure = analysis.failures.iter().find(|failure| {
        failure.stage == stage
            && failure.arm == arm
            && failure.workloads.iter().any(|of| of == workload)
    });
    let skip = analysis.run.skipped.iter().find(|skip| {
        skip.stage == stage
            && skip.backend == arm
            && skip.workload.as_deref().is_none_or(|of| of == workload)
    });
    let medians: Vec<(Metric, Value)> = analysis
        .series
        .iter()
        .filter(|s| s.stage == stage && s.arm == arm && s.workload == workload)
        .filter_map(|series| Some((series.metric, series.median?)))
        .collect();
    let status = match (failure, skip) {
        (Some(failure), _) => failed(failure),
        (None, Some(skip)) => {
            let mut status = TestCaseStatus::skipped();
            status.set_message(format!("{}: {}", skip.missing.reason, skip.missing.remedy));
            status
        }
        (None, None) if medians.is_empty() => return None,
        (None, None) => TestCaseStatus::success(),
    };
    let mut case = TestCase::new(format!("{arm} {workload}"), status);
    case.set_classname(format!("{stage}.{workload}"));
    let seconds: f64 = analysis
        .samples
        .iter()
        .filter(|s| s.stage == stage && s.arm == arm && s.workload == workload)
        .map(|sample| sample.seconds)
        .sum();
    case.set_time(std::time::Duration::try_from_secs_f64(seconds).unwrap_or_default());
    let lines = medians.iter().map(|(metric, value)| {
        format!("{}: {}\n", metric.title(), format::value(*value, metric.unit()))
    });
    case.set_system_out(lines.collect::<String>());
    Some(case)
}

fn failed(failure: &Failure) -> TestCaseStatus {
    let mut status = TestCaseStatus::non_success(NonSuccessKind::Error);
    status.set_message(format!("{} samples failed: {}", failure.samples, failure.error));
    status
}

/// Two runs: what is worse than the limit (without one: what is worse) fails, what failed or is missing in the later run is an
/// error, as is a later run that did not come to its end, what nothing can be said of is skipped.
pub fn changes(
    comparison: &Comparison,
    limit: Option<Limit>,
) -> Result<String, quick_junit::SerializeError> {
    let mut report = quick_junit::Report::new("ringtap report --before");
    let limit = limit.unwrap_or_default();
    if let Some(state) = &comparison.partial {
        let mut status = TestCaseStatus::non_success(NonSuccessKind::Error);
        status.set_message(state.as_str());
        let mut suite = TestSuite::new("the later run");
        suite.add_test_case(TestCase::new("came to its end", status));
        report.add_test_suite(suite);
    }
    for stage in Stage::ALL {
        let mut suite = TestSuite::new(stage.name());
        for change in comparison.changes.iter().filter(|change| change.stage == stage) {
            let status = if gate::is_worse(change, &comparison.changes, limit) {
                let mut status = TestCaseStatus::non_success(NonSuccessKind::Failure);
                status.set_message(gate::in_words(change));
                status
            } else if let Some(failure) = comparison.failed.iter().find(|failure| {
                failure.stage == stage
                    && failure.arm == change.arm
                    && failure.workloads.contains(&change.workload)
            }) {
                failed(failure)
            } else if change.p.is_none() {
                let mut status = TestCaseStatus::skipped();
                status.set_message(change.verdict.as_str());
                status
            } else {
                TestCaseStatus::success()
            };
            let name = format!("{} {} {}", change.arm, change.workload, change.metric.title());
            let mut case = TestCase::new(name, status);
            case.set_classname(format!("{stage}.{}", change.workload));
            case.set_system_out(format!("{}: {}", change.verdict, gate::in_words(change)));
            suite.add_test_case(case);
        }
        for only in gate::lost(comparison).filter(|only| only.stage == stage) {
            for name in &only.workloads {
                let mut status = TestCaseStatus::non_success(NonSuccessKind::Error);
                status.set_message(format!("missing in the later run: {}", only.why));
                let mut case = TestCase::new(format!("{} {name}", only.arm), status);
                case.set_classname(format!("{stage}.{name}"));
                suite.add_test_case(case);
            }
        }
        if !suite.test_cases.is_empty() {
            report.add_test_suite(suite);
        }
    }
    report.to_string()
}
