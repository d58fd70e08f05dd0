//! A run's medians and ratios as OpenMetrics text, for node_exporter's textfile collector or a push gateway.

use std::fmt;
use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit as Named};

use super::analysis::Analysis;
use super::files;
use super::row::Row;
use crate::sample::{Metric, Unit};
use crate::stats::decision::{Decision, Why};

type Labels = Vec<(&'static str, String)>;
type Gauges = Family<Labels, Gauge<f64, AtomicU64>>;

/// A name, what it says, and where it stands in a row.
type End = (&'static str, &'static str, fn(&Row) -> Option<f64>);

/// All of a run, times in seconds.
pub fn render(analysis: &Analysis) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix("ringtap_lab");
    for &metric in Metric::ALL {
        let gauges = Gauges::default();
        let mut any = false;
        for series in analysis.series.iter().filter(|series| series.metric == metric) {
            let Some(median) = series.median else { continue };
            let labels = vec![
                ("stage", series.stage.to_string()),
                ("backend", series.arm.clone()),
                ("workload", series.workload.clone()),
                ("bound", if median.at_least { "at least" } else { "" }.into()),
            ];
            gauges.get_or_create(&labels).set(median.value * scale(metric.unit()));
            any = true;
        }
        let help = format!("Median over the rounds: {}", metric.title());
        match unit(metric.unit()) {
            _ if !any => {}
            Some(unit) => registry.register_with_unit(files::name(metric), help, unit, gauges),
            None => registry.register(files::name(metric), help, gauges),
        }
    }
    let ends: [End; 3] = [
        (
            "times_as_good",
            "Ratio to another backend, above 1 is better: the centre of its 95 % interval",
            |row| row.ratio,
        ),
        ("times_as_good_low", "Lower end of its 95 % interval", |row| Some(row.interval?.low)),
        ("times_as_good_high", "Upper end of its 95 % interval", |row| Some(row.interval?.high)),
    ];
    for (name, help, value) in ends {
        let gauges = Gauges::default();
        for row in analysis.rows.iter().filter(|row| row.headline && is_measured(analysis, row)) {
            if let Some(value) = value(row) {
                gauges.get_or_create(&labels(row)).set(value);
            }
        }
        registry.register(name, help, gauges);
    }
    let failures = Gauges::default();
    for failure in &analysis.failures {
        let labels = vec![("stage", failure.stage.to_string()), ("backend", failure.arm.clone())];
        failures.get_or_create(&labels).inc_by(failure.samples as f64);
    }
    registry.register("failed_samples", "Samples that failed", failures);
    if let Ok(began) = analysis.run.began.parse::<jiff::Timestamp>() {
        let gauge = Gauge::<f64, AtomicU64>::default();
        gauge.set(began.as_second() as f64);
        registry.register_with_unit("began_timestamp", "When the run began", Named::Seconds, gauge);
    }
    let mut text = String::new();
    encode(&mut text, &registry)?;
    Ok(text)
}

/// Whether a ratio is one: a bound says only which way, and a load whose control failed says nothing.
fn is_measured(analysis: &Analysis, row: &Row) -> bool {
    let is_bound = |arm: &str| {
        let median = analysis.median(row.stage, arm, &row.workload, row.metric);
        median.is_some_and(|median| median.at_least)
    };
    let floor = analysis.floor(row.stage, &row.workload, row.metric);
    let withheld = Decision::Withheld { why: Why::Bound };
    floor.is_none_or(|floor| floor.holds)
        && row.decision != withheld
        && !is_bound(&row.arm)
        && !is_bound(&row.against)
}

fn labels(row: &Row) -> Labels {
    vec![
        ("stage", row.stage.to_string()),
        ("backend", row.arm.clone()),
        ("against", row.against.clone()),
        ("workload", row.workload.clone()),
        ("metric", files::name(row.metric)),
    ]
}

/// The unit's name behind a metric's, where it has one.
fn unit(unit: Unit) -> Option<Named> {
    match unit {
        Unit::BytesPerSecond => Some(Named::Other("bytes_per_second".into())),
        Unit::Nanoseconds => Some(Named::Seconds),
        Unit::CpuPerMillion => Some(Named::Other("seconds_per_million".into())),
        Unit::CpuPerGib => Some(Named::Other("seconds_per_gibibyte".into())),
        Unit::Share => Some(Named::Ratios),
        Unit::PerSecond | Unit::Factor => None,
    }
}

fn scale(unit: Unit) -> f64 {
    if unit == Unit::Nanoseconds { 1e-9 } else { 1.0 }
}
