//! `ringtap disk checkpoint`: the bitmaps of disks that are served, and that outlive the server.

use std::io::Write;

use clap::{Args, Subcommand};
use serde_json::{Value, json};

use crate::names;
use crate::output::Output;
use crate::qmp::Qmp;

/// What `ringtap disk checkpoint` is told.
#[derive(Debug, Args)]
pub(crate) struct CheckpointArgs {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// From now on note what of a disk changes; `ringtap disk backup --checkpoint` does so from the backup's moment on
    Add {
        /// The disk's name
        node: String,
        /// The checkpoint's name
        name: String,
        /// Bytes of the regions that are noted: a power of two, from 512 on
        #[arg(short, long, value_name = "SIZE", value_parser = names::size, default_value = "64k")]
        granularity: u64,
    },
    /// List a disk's checkpoints, and how much has changed since each
    List {
        /// The disk's name
        node: String,
    },
    /// Forget a checkpoint
    Remove {
        /// The disk's name
        node: String,
        /// The checkpoint's name
        name: String,
    },
}

/// Carry it out.
pub(crate) fn run(qmp: &mut Qmp, args: &CheckpointArgs, output: Output) -> anyhow::Result<()> {
    match &args.verb {
        Verb::Add { node, name, granularity } => {
            let mut arguments = add(node, name);
            arguments["granularity"] = (*granularity).into();
            qmp.call("block-dirty-bitmap-add", arguments).map(drop)
        }
        Verb::Remove { node, name } => {
            let arguments = json!({ "node": node, "name": name });
            qmp.call("block-dirty-bitmap-remove", arguments).map(drop)
        }
        Verb::List { node } => list(qmp, node, output),
    }
}

/// What makes one.
pub(crate) fn add(node: &str, name: &str) -> Value {
    json!({ "node": node, "name": name, "persistent": true })
}

fn list(qmp: &mut Qmp, node: &str, output: Output) -> anyhow::Result<()> {
    let disks = crate::running::found(qmp, Some(node))?;
    let all = disks.into_iter().next().map(|mut disk| disk["dirty-bitmaps"].take());
    let all: Vec<Value> = match all {
        Some(Value::Array(all)) => all,
        _ => vec![],
    };
    let mut out = std::io::stdout().lock();
    if output == Output::Json {
        return Ok(writeln!(out, "{}", Value::from(all))?);
    }
    for one in &all {
        let name = one["name"].as_str().unwrap_or_default();
        let (count, granularity) = (&one["count"], &one["granularity"]);
        let facts = [
            ("inconsistent", "lost: everything may have changed, and it can only be removed"),
            ("busy", "in use by a backup"),
        ];
        let facts = facts.into_iter().filter(|(key, _)| one[*key] == true).map(|(_, text)| text);
        let memory = (one["persistent"] != true).then_some("until the server ends");
        let off = (one["recording"] != true && one["inconsistent"] != true).then_some("disabled");
        let more: String = facts.chain(memory).chain(off).map(|text| format!(", {text}")).collect();
        writeln!(out, "{name}: {count} bytes in regions of {granularity}{more}")?;
    }
    Ok(())
}
