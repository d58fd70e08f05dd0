//! `ringtap disk detach`: a disk that needs nothing below any more.

use std::io::Write;

use anyhow::bail;
use clap::Args;
use serde_json::{Value, json};

use crate::job::{How, tell};
use crate::output::Output;
use crate::qmp::Qmp;
use crate::running::found;

/// A disk that is to need nothing below.
#[derive(Debug, Args)]
pub(crate) struct DetachArgs {
    /// The disk's name
    node: String,

    #[command(flatten)]
    how: How,
}

/// Bring all that lies below into the topmost image, and say what that was.
pub(crate) fn detach(qmp: &mut Qmp, args: &DetachArgs, output: Output) -> anyhow::Result<()> {
    let (node, id) = (&args.node, format!("detach-{}", args.node));
    let how = args.how.beside(output);
    let (file, below) = chain_of(qmp, node)?;
    let jobs = qmp.call("query-jobs", json!({}))?;
    let begun = jobs.as_array().into_iter().flatten().find(|job| job["id"] == id);
    let waited = match begun.map(|job| &job["status"]) {
        // One that a killed server had begun, and this one goes on with.
        Some(status) if status != "concluded" => {
            if let Some(rate) = how.rate {
                let rate = json!({ "device": id, "speed": rate });
                qmp.call("block-job-set-speed", rate)?;
            }
            how.see_to_its_end(qmp, &id, "job-complete", &mut || {})?.is_some()
        }
        _ if below.is_empty() => true,
        old => {
            if old.is_some() {
                qmp.call("job-dismiss", json!({ "id": id }))?;
            }
            let device = json!({ "device": node });
            how.carry_out(qmp, "block-stream", &id, device, "job-complete")?.is_some()
        }
    };
    if !waited {
        return match output {
            Output::Json => tell(node, &id, None, json!({})),
            Output::Text => Ok(()),
        };
    }
    let (_, left) = chain_of(qmp, node)?;
    if !left.is_empty() {
        bail!("something lies below {node} all the same: see `ringtap disk info {node}`");
    }
    let mut out = std::io::stdout().lock();
    match (output, below.first()) {
        (Output::Json, _) => {
            let told = json!({ "node-name": node, "file": file, "detached": below });
            writeln!(out, "{told}")?;
        }
        (Output::Text, _) if how.talk.quiet => {}
        (Output::Text, None) => writeln!(out, "{node}: nothing lies below it")?,
        (Output::Text, Some(first)) => {
            let first = first["filename"].as_str().unwrap_or_default();
            writeln!(out, "{node} needs {first} no more: {file} has it all")?;
        }
    }
    Ok(())
}

/// A disk's topmost image, and those below it from the top down.
fn chain_of(qmp: &mut Qmp, node: &str) -> anyhow::Result<(String, Vec<Value>)> {
    let disks = found(qmp, Some(node))?;
    let mut image = disks.first().map_or(&Value::Null, |disk| &disk["image"]);
    let file = image["filename"].as_str().unwrap_or_default().to_owned();
    let mut below = vec![];
    while image["backing-image"].is_object() {
        image = &image["backing-image"];
        below.push(json!({ "filename": image["filename"], "format": image["format"] }));
    }
    Ok((file, below))
}
