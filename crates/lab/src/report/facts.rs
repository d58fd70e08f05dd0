//! The last part of `report.html`: the ledger, every sample, and what a reader needs to do it again.

use maud::{Markup, html};

use super::analysis::Analysis;
use super::{format, ledger, words};
use crate::sample::{Layer, Metric, Unit};
use crate::stats::steady::RANGE;

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
                        th.n { "its disk: read, written, flushes" } th.n { "server: read, written" } th.n { "device: read, written, flushes" }
                        th.n { "device / asked" } th.n { "device busy" } th.n { "steal" } th { "used up" }
                    } }
                    tbody { @for row in rows {
                        @let reach = ledger::reaches_disk(&row.ledger);
                        tr {
                            td { (row.stage.name()) } td.name { (row.workload) } td.name { (row.arm) }
                            td.n data-v=(row.ledger.program.unwrap_or(-1.0)) { (row.ledger.program.map_or_else(|| "–".into(), bytes)) }
                            td.n { (layer(row.ledger.disk)) }
                            td.n { (row.ledger.server.map_or_else(|| "–".into(), |m| format!("{}, {}", bytes(m.read), bytes(m.written)))) }
                            td.n { (layer(row.ledger.device)) }
                            td.n data-v=(reach.unwrap_or(-1.0)) { (reach.map_or_else(|| "–".into(), format::digits)) }
                            td.n data-v=(row.ledger.device_busy.unwrap_or(-1.0)) { (percent(row.ledger.device_busy)) }
                            td.n data-v=(row.ledger.steal.unwrap_or(-1.0)) { (percent(row.ledger.steal)) }
                            td.prose { (row.limiter) }
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

/// Times without an answer, and the layer that each was about.
pub fn stalls(analysis: &Analysis) -> Markup {
    let rated = || analysis.samples.iter().filter(|s| s.metrics.contains_key(&Metric::LongestGap));
    let rows = || rated().flat_map(|sample| sample.stalls.iter().map(move |stall| (sample, stall)));
    html! {
        @if rated().next().is_some() {
            h2 { "Stalls: over 100 ms without an answer" }
            @if rows().next().is_none() {
                p { "None in " (rated().count()) " runs of a load by schedule." }
            } @else {
                p.soft.small { "Loads by schedule; the shares are the part of the gap in which the device had requests, and in which server and client (in a guest: all of it) ran or were ready and had no processor." }
                div.card { div.scroll { table.sort {
                    thead { tr {
                        th { "stage" } th { "backend" } th { "workload" } th.n { "round" } th.n { "at" } th.n { "lasted" } th { "what stood still" }
                        th.n { "device" } th.n { "server ran" } th.n { "server waited" } th.n { "client ran" } th.n { "client waited" }
                    } }
                    tbody { @for (sample, stall) in rows() { tr {
                        td { (sample.stage.name()) } td.name { (sample.arm) } td.name { (sample.workload) } td.n data-v=(sample.round) { (sample.round + 1) }
                        td.n data-v=(stall.at) { (format::digits(stall.at)) " s" }
                        td.n data-v=(stall.seconds) { (format::number(stall.seconds * 1e9, Unit::Nanoseconds)) }
                        td.prose { (words::still(stall.layer)) }
                        @for share in [stall.device, stall.server, stall.server_waits, stall.client, stall.client_waits] {
                            td.n data-v=(share.unwrap_or(-1.0)) { (percent(share)) }
                        }
                    } } }
                } } }
            }
        }
    }
}

/// Every sample with its place in the run.
pub fn samples(analysis: &Analysis) -> Markup {
    html! {
        h2 { "Every sample" }
        details.raw {
            summary { (analysis.samples.len()) " samples in the order in which they were taken; samples.jsonl has them whole" }
            div.card { div.scroll { table.sort {
                thead { tr {
                    th.n { "round" } th { "stage" } th.n { "place" } th { "backend" } th { "workload" } th.n { "took" } th { "measured" }
                } }
                tbody { @for sample in &analysis.samples { tr {
                    td.n data-v=(sample.round) { (sample.round + 1) } td { (sample.stage.name()) } td.n data-v=(sample.position) { (sample.position + 1) }
                    td.name { (sample.arm) } td.name { (sample.workload) }
                    td.n data-v=(sample.seconds) { (format::digits(sample.seconds)) " s" }
                    td.small.prose {
                        @for (metric, value) in &sample.metrics { (metric.title()) " " (format::value(*value, metric.unit())) "; " }
                        @if let Some(moved) = sample.movement.filter(|moved| *moved > RANGE) { "not steady: its rate moved by " (percent(Some(moved))) " within the run; " }
                        @if let Some(error) = &sample.error { span.slower { "failed: " (error) } }
                    }
                } } }
            } } }
        }
    }
}
