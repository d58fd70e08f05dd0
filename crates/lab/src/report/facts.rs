//! The last part of `report.html`: the ledger, every sample, and what a reader needs to do it again.

use maud::{Markup, html};

use super::analysis::Analysis;
use super::{format, ledger};
use crate::sample::Layer;

/// Bytes at each layer, and what was used up.
pub fn ledger(analysis: &Analysis) -> Markup {
    let rows: Vec<_> = analysis.ledger.iter().filter(|row| !row.arm.contains('#')).collect();
    html! {
        @if !rows.is_empty() {
            h2 { "What went through each layer, and what was used up" }
            details {
                summary { (rows.len()) " rows; the device's traffic holds that of other programs, too" }
                div.card { div.scroll { table.sort {
                    thead { tr {
                        th { "stage" } th { "workload" } th { "backend" } th.n { "program asked" }
                        th.n { "its disk: read, written, flushes" } th.n { "device: read, written, flushes" }
                        th.n { "device / asked" } th.n { "device busy" } th.n { "steal" } th { "used up" }
                    } }
                    tbody { @for row in rows {
                        @let reach = ledger::reaches_disk(&row.ledger);
                        tr {
                            td { (row.stage.name()) } td.name { (row.workload) } td.name { (row.arm) }
                            td.n data-v=(row.ledger.program.unwrap_or(-1.0)) { (row.ledger.program.map_or_else(|| "–".into(), bytes)) }
                            td.n { (layer(row.ledger.disk)) }
                            td.n { (layer(row.ledger.device)) }
                            td.n data-v=(reach.unwrap_or(-1.0)) { (reach.map_or_else(|| "–".into(), format::digits)) }
                            td.n data-v=(row.ledger.device_busy.unwrap_or(-1.0)) { (percent(row.ledger.device_busy)) }
                            td.n data-v=(row.ledger.steal.unwrap_or(-1.0)) { (percent(row.ledger.steal)) }
                            td { (row.limiter) }
                        }
                    } }
                } } }
            }
        }
    }
}

fn bytes(count: f64) -> String {
    format!("{} MiB", format::digits(count / (1 << 20) as f64))
}

fn percent(share: Option<f64>) -> String {
    share.map_or_else(|| "–".into(), |share| format!("{:.0} %", share * 100.0))
}

fn layer(layer: Option<Layer>) -> String {
    layer.map_or_else(
        || "–".into(),
        |l| format!("{}, {}, {:.0}", bytes(l.read), bytes(l.written), l.flushes),
    )
}

/// Every sample with its place in the run.
pub fn samples(analysis: &Analysis) -> Markup {
    html! {
        h2 { "Every sample" }
        details {
            summary { (analysis.samples.len()) " samples in the order in which they were taken; samples.jsonl has them whole" }
            div.card { div.scroll { table.sort {
                thead { tr {
                    th.n { "round" } th { "stage" } th.n { "place" } th { "backend" } th { "workload" } th.n { "took" } th { "measured" }
                } }
                tbody { @for sample in &analysis.samples { tr {
                    td.n data-v=(sample.round) { (sample.round + 1) } td { (sample.stage.name()) } td.n data-v=(sample.position) { (sample.position + 1) }
                    td.name { (sample.arm) } td.name { (sample.workload) }
                    td.n data-v=(sample.seconds) { (format::digits(sample.seconds)) " s" }
                    td.small {
                        @for (metric, value) in &sample.metrics { (metric.title()) " " (format::value(*value, metric.unit())) "; " }
                        @if let Some(error) = &sample.error { span.slower { "failed: " (error) } }
                    }
                } } }
            } } }
        }
    }
}
