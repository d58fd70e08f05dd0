//! Jobs of a server that was killed, begun again by the next.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::mpsc::Receiver;

use serde_json::{Map, Value};

use super::command::Command as _;
use super::commit::BlockCommit;
use super::jobs::tell_of_loss;
use super::replay::carry_out;
use super::withdraw::withdraw;
use crate::chain::{layers, position};
use crate::ids::DiskId;
use crate::ledger::{self, Line};
use crate::passed::Left;
use crate::running::{Event, Running, Served};

/// Go on with the jobs that the disks had, or say that they are gone.
pub(crate) fn resume(running: &mut Running, inbox: &Receiver<Event>, ids: &[DiskId]) {
    let of = |id: &DiskId| running.disks.get(id).map(|served| ledger::whole(&served.disk.path));
    let images: Vec<PathBuf> = ids.iter().filter_map(of).collect();
    let mut goes_on = HashSet::new();
    for (line, written) in ledger::left(&images) {
        // One that is at work here has its line.
        if running.at_work().any(|(id, _)| *id == line.id) {
            std::mem::forget(written);
            continue;
        }
        let same = line.is_of_these_files();
        let Some(image) = line.image().map(Path::to_owned) else { continue };
        let Line { id, command, mut arguments, target, .. } = line;
        // Killed before the line of the server before that was removed.
        if goes_on.contains(&(image.clone(), id.clone())) {
            continue;
        }
        // Its name may be another by now.
        let found = running.disks.values().find(|served| ledger::whole(&served.disk.path) == image);
        let Some(served) = found else { continue };
        let (span, node) = (served.vbd.span().clone(), served.node().to_owned());
        let of = (served.disk.clone(), served.vbd.clone());
        let _disk = span.enter();
        let told = running.told.clone();
        let checkpoint = ledger::checkpoint(&command, &arguments);
        let gone = |why: &str| {
            let why = &format!("{why}{}", withdraw(&of, checkpoint.clone()));
            // Where this server had it clients have not heard of its end.
            tell_of_loss(&told, &id, &command);
            match &target {
                Some(target) => tracing::warn!(
                    "the job {id} ({command}) ended with the server before this one: {} is no copy of the disk; begin it \
                 again{why}",
                    target.display()
                ),
                None => tracing::warn!(
                    "the job {id} ({command}) ended with the server before this one, and left the disk as good as it was; \
                 begin it again{why}"
                ),
            }
        };
        if same && command == BlockCommit::NAME && is_committed(served, &arguments) {
            tracing::info!(
                "the job {id} ({command}) of a server before this one has done its work"
            );
            continue;
        }
        // Nobody could have it end where there is no control socket.
        let is_left =
            running.pending.passing.get(&id).is_some_and(|passing| passing.left.is_some());
        let cannot = target.is_some() && !is_left;
        if cannot || running.config.control.is_empty() || !same {
            gone(if same { "" } else { ": an image that it was at work on is another now" });
            continue;
        }
        arguments.insert("device".to_owned(), node.into());
        running.pending.resuming = Some(id.clone());
        let begun = carry_out(running, inbox, &command, arguments);
        running.pending.resuming = None;
        match begun {
            Ok(()) => {
                tracing::info!(
                    "the job {id} ({command}) goes on, which a server before this one began"
                );
                // Where this one is killed before it has written a line of its own, the next goes by that.
                let entered = running.jobs.get(&id).map(|entry| entry.entered.clone());
                entered.inspect(|entered| entered.follows(written));
                goes_on.insert((image, id));
            }
            Err(why) => gone(&format!(": {why}")),
        }
    }
    // Of those that still end for another process more is to be known later.
    let at_work: HashSet<String> = running.at_work().map(|(id, _)| id.clone()).collect();
    let (passing, disks) = (&mut running.pending.passing, &mut running.disks);
    passing.retain(|id, one| {
        let stays = at_work.contains(id);
        if let (false, Some(Left::Save(_))) = (stays, &one.left) {
            // Its moment is lost, and nothing shows it any more.
            let targets = one.disks.iter().skip(1);
            targets.for_each(|id| disks.get_mut(id).into_iter().for_each(|to| to.moment = None));
        }
        stays
    });
}

/// Whether what was to go lies below the disk no more, and what was to stay does.
fn is_committed(served: &Served, arguments: &Map<String, Value>) -> bool {
    let path = |key: &str| arguments.get(key).and_then(Value::as_str).map(Path::new);
    let (Some(top), Some(base)) = (path("top"), path("base")) else { return false };
    let Ok(image) = served.vbd.image() else { return false };
    let below = layers(&*image);
    position(&below, top).is_none() && position(&below, base).is_some()
}
