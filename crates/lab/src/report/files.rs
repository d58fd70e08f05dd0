//! What a report leaves beside `report.html`: `report.md`, `samples.csv`, `report.json`.

use std::fmt::Write;
use std::path::Path;

use super::analysis::Analysis;
use super::markdown;
use crate::error::{Error, Result};
use crate::run::folder::replace;
use crate::sample::Metric;

/// Writes all of them.
pub fn write(run: &Path, analysis: &Analysis) -> Result<()> {
    replace(&run.join("report.md"), &markdown::render(analysis))?;
    replace(&run.join("samples.csv"), &csv(analysis))?;
    let json = serde_json::to_string_pretty(analysis).map_err(|e| Error::Plan(e.to_string()))?;
    replace(&run.join("report.json"), &(json + "\n"))
}

/// Every number of every sample, a line each.
pub fn csv(analysis: &Analysis) -> String {
    let mut text = String::from(
        "round,position,stage,backend,workload,began_ms,seconds,metric,unit,value,bound\n",
    );
    for sample in &analysis.samples {
        for (metric, value) in &sample.metrics {
            let name = name(*metric);
            let _ = writeln!(
                text,
                "{},{},{},{},{},{},{},{name},{:?},{},{}",
                sample.round,
                sample.position,
                sample.stage,
                quoted(&sample.arm),
                quoted(&sample.workload),
                sample.began_ms,
                sample.seconds,
                metric.unit(),
                value.value,
                if value.at_least { "at_least" } else { "" }
            );
        }
    }
    text
}

/// A metric's name in files.
pub(super) fn name(metric: Metric) -> String {
    let name = serde_json::to_value(metric).ok();
    name.as_ref().and_then(|name| name.as_str()).unwrap_or_default().to_owned()
}

fn quoted(field: &str) -> String {
    if field.contains([',', '"', '\n']) {
        format!("\"{}\"", field.replace('"', "\"\""))
    } else {
        field.to_owned()
    }
}
