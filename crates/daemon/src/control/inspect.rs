//! `__ringtap_inspect`: everything there is, as a tree.

use serde_json::{Map, Value, json};

use super::command::Command;
use super::outgoing::Reply;
use super::refusal::Refusal;
use super::shape::arguments;
use crate::entry::Entry;
use crate::ids::DiskId;
use crate::running::{Running, Served};
use crate::stats::DiskStats;

arguments! {
    /// `__ringtap_inspect`
    struct Inspect {
        /// Only what is there, step by step: `disks/vm/queues`.
        "path" path: Option<String>,
    }
}

impl Command for Inspect {
    const NAME: &'static str = "__ringtap_inspect";
    type Answer = Value;

    fn run(self, running: &mut Running, reply: Reply<Value>) {
        let path = self.path.unwrap_or_default();
        let found = below(tree(running), &path);
        let lacks = || Refusal::new(format!("There is nothing at '{path}'"));
        reply.give(found.ok_or_else(lacks));
    }
}

/// What is at a path: names of an object's, numbers of an array's.
fn below(tree: Value, path: &str) -> Option<Value> {
    path.split('/').filter(|step| !step.is_empty()).try_fold(tree, |tree, step| match tree {
        Value::Object(mut all) => all.remove(step),
        Value::Array(mut all) => {
            let at = step.parse::<usize>().ok().filter(|at| *at < all.len())?;
            Some(all.swap_remove(at))
        }
        _ => None,
    })
}

fn tree(running: &Running) -> Value {
    let disks: Map<String, Value> =
        running.disks.iter().map(|(id, served)| disk(running, *id, served)).collect();
    let jobs: Map<String, Value> =
        running.jobs.iter().map(|(id, entry)| (id.clone(), job(running, entry))).collect();
    let groups: Map<String, Value> = running
        .groups
        .iter()
        .map(|(name, group)| (name.clone(), super::throttle::told(&group.limits(), &group.share())))
        .collect();
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "pid": std::process::id(),
        "disks": disks,
        "jobs": jobs,
        "groups": groups,
    })
}

/// A disk by its node's name: what SIGUSR1 prints of it, and what shows it.
fn disk(running: &Running, id: DiskId, served: &Served) -> (String, Value) {
    let mut all = serde_json::to_value(DiskStats::of(served)).unwrap_or_default();
    let shown = running.exports.iter().filter(|export| export.disk == id).map(|export| {
        let transport = running.servers.get(&export.server).map(|serving| &serving.transport);
        let told = json!({
            "type": export.kind,
            "writable": export.writable,
            "closing": export.closing,
            "places": transport.map(|transport| transport.places(&export.name)).unwrap_or_default(),
        });
        (export.id.clone(), told)
    });
    all["exports"] = Value::Object(shown.collect());
    all["group"] = json!(served.disk.group);
    all["limited"] = super::throttle::told(&served.disk.limits, &served.disk.share);
    (served.node().to_owned(), all)
}

fn job(running: &Running, entry: &Entry) -> Value {
    let mut all = serde_json::to_value(entry.job.progress()).unwrap_or_default();
    all["type"] = json!(entry.kind.word());
    all["status"] = json!(entry.status().word());
    all["speed"] = json!(entry.speed);
    all["error"] = json!(entry.error());
    let disks = entry.disks.iter().filter_map(|id| running.disks.get(id));
    all["disks"] = disks.map(|served| served.node().to_owned()).collect();
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_leads_to_what_is_there_and_nowhere_else() {
        let tree = || json!({ "disks": { "a": { "queues": [1, { "x": 2 }] } } });
        assert_eq!(below(tree(), ""), Some(tree()));
        assert_eq!(below(tree(), "/disks//a/queues/1/x"), Some(json!(2)));
        for path in
            ["disk", "disks/b", "disks/a/queues/2", "disks/a/queues/x", "disks/a/queues/0/0"]
        {
            assert_eq!(below(tree(), path), None, "{path}");
        }
    }
}
