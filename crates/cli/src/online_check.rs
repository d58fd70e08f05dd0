//! `ringtap disk check`: whether a disk's image contradicts itself, while its guest runs.

use std::process::ExitCode;

use clap::Args;
use ringtap_image_tools::check::Report;
use serde_json::{Value, json};

use crate::output::Output;
use crate::qmp::Qmp;
use crate::verbs::check::say;

/// What `ringtap disk check` is told.
#[derive(Debug, Args)]
pub(crate) struct OnlineCheckArgs {
    /// The disk's name
    node: String,

    /// Say nothing but warnings and errors
    #[arg(short, long)]
    quiet: bool,
}

/// Have the server look, and say what it has found, with the exit status of `ringtap check`.
pub(crate) fn run(
    qmp: &mut Qmp,
    args: &OnlineCheckArgs,
    output: Output,
) -> anyhow::Result<ExitCode> {
    let answer = qmp.call("__ringtap_check", json!({ "node-name": args.node }))?;
    let text = |key: &str| answer[key].as_str().unwrap_or_default();
    let found = (answer["checked"] == true).then(|| report(&answer));
    Ok(say(text("filename"), text("format"), found.as_ref(), output, args.quiet))
}

fn report(answer: &Value) -> Report {
    let count = |key: &str| answer[key].as_u64().unwrap_or_default();
    let messages = answer["messages"].as_array().into_iter().flatten();
    Report {
        corruptions: count("corruptions"),
        leaks: count("leaks"),
        image_end: count("image-end-offset"),
        total_clusters: count("total-clusters"),
        allocated_clusters: count("allocated-clusters"),
        fragmented_clusters: count("fragmented-clusters"),
        compressed_clusters: count("compressed-clusters"),
        messages: messages.filter_map(|one| Some(one.as_str()?.to_owned())).collect(),
        ..Report::default()
    }
}
