//! `__ringtap_check`: whether a disk's image contradicts itself, looked at while it is served.

use std::path::Path;

use ringtap_image::OnlineCheck;
use ringtap_image::qcow2::{Report, ToolError};
use ringtap_io::Tasks;

use super::command::Command;
use super::outgoing::Reply;
use super::query::driver;
use super::refusal::Refusal;
use super::shape::{answer, arguments};
use crate::Error;
use crate::ids::DiskId;
use crate::running::{Event, Running};
use crate::threads::{contained, spawn};

arguments! {
    /// `__ringtap_check`
    struct Check { "node-name" node_name: String }
}

answer! {
    /// What was found in an image, with QEMU's names: what there is none of is left out.
    struct CheckInfo {
        "filename" filename: String,
        "format" format: String,
        /// Whether images of that format have anything to check.
        "checked" checked: bool,
        "check-errors" check_errors: u64,
        "image-end-offset" image_end: Option<u64>,
        "corruptions" corruptions: Option<u64>,
        "leaks" leaks: Option<u64>,
        "total-clusters" total_clusters: Option<u64>,
        "allocated-clusters" allocated_clusters: Option<u64>,
        "fragmented-clusters" fragmented_clusters: Option<u64>,
        "compressed-clusters" compressed_clusters: Option<u64>,
        /// What is wrong, the first of it, a sentence each.
        "messages" messages: Option<Vec<String>>,
    }
}

impl CheckInfo {
    fn of(filename: String, format: String, found: Option<Report>) -> CheckInfo {
        let checked = found.is_some();
        let Report {
            corruptions,
            leaks,
            image_end,
            total_clusters,
            allocated_clusters,
            fragmented_clusters,
            compressed_clusters,
            messages,
            ..
        } = found.unwrap_or_default();
        let some = |count: u64| Some(count).filter(|count| *count > 0);
        CheckInfo {
            filename,
            format,
            checked,
            check_errors: 0,
            image_end: some(image_end),
            corruptions: some(corruptions),
            leaks: some(leaks),
            total_clusters: some(total_clusters),
            allocated_clusters: some(allocated_clusters),
            fragmented_clusters: some(fragmented_clusters),
            compressed_clusters: some(compressed_clusters),
            messages: Some(messages).filter(|messages| !messages.is_empty()),
        }
    }
}

/// Look; the disk is not used by this any more once its tables are known to stay.
fn look(vbd: ringtap_vbd::Disk, path: &Path) -> Result<CheckInfo, Refusal> {
    let image = vbd.image().map_err(|error| Refusal::new(error.to_string()))?;
    let format = driver(image.info().format).to_owned();
    drop(image);
    let mut tasks = Tasks::new(ringtap_io::reactor().map_err(Error::Ring)?);
    let io = tasks.io().clone();
    let driven = |source| Error::Process { tried: "drive the io_uring", source };
    let end: Result<Option<Report>, ToolError> = tasks
        .block_on(async move {
            let vbd = vbd.fork();
            let begun: Option<Box<dyn OnlineCheck>> = vbd.online_check(&io).await?;
            drop(vbd);
            match begun {
                None => Ok(None),
                Some(check) => check.run(&io).await.map(Some),
            }
        })
        .map_err(driven)?;
    let found = end.map_err(|error| Refusal::new(error.to_string()))?;
    Ok(CheckInfo::of(path.display().to_string(), format, found))
}

impl Command for Check {
    const NAME: &'static str = "__ringtap_check";
    type Answer = CheckInfo;

    fn run(self, running: &mut Running, reply: Reply<CheckInfo>) {
        let id = match running.named_node(&self.node_name).and_then(|id| running.may_check(id)) {
            Ok(id) => id,
            Err(refusal) => return reply.give(Err(refusal)),
        };
        let Some(served) = running.disks.get(&id) else { return };
        let (vbd, path) = (served.vbd.clone(), served.disk.path.clone());
        // Nobody closes the image, or opens it anew, before the check has ended.
        running.pending.changing.insert(id);
        let events = running.events.clone();
        // A server that ends closes the image first, and the check ends by that.
        let begun = spawn("check", move || {
            let _disk = vbd.span().clone().entered();
            let end = contained(|| look(vbd, &path)).unwrap_or_else(|| {
                Err(Refusal::new("a panic has ended it, which is an error of Ringtap itself"))
            });
            let _ = events.send(Event::Do(Box::new(move |running| {
                running.pending.changing.remove(&id);
                reply.give(end);
            })));
        });
        match begun {
            Ok(thread) => {
                running.pending.checks.retain(|thread| !thread.is_finished());
                running.pending.checks.push(thread);
            }
            Err(error) => {
                running.pending.changing.remove(&id);
                tracing::error!("cannot check a disk: {error}");
            }
        }
    }
}

impl Running {
    /// A disk whose image stays as it is open.
    fn may_check(&self, id: DiskId) -> Result<DiskId, Refusal> {
        let name = self.disks.get(&id).map_or("", |served| served.node());
        if self.pending.away.contains(&id) {
            return Err(Refusal::new(format!(
                "Node '{name}' is inactive: its image is not open here"
            )));
        }
        if self.pending.is_changing(id) || self.pending.bitmaps_changing.contains(&id) {
            let why =
                format!("Node '{name}' is being changed or checked, or a job is at work on it");
            return Err(Refusal::new(why));
        }
        Ok(id)
    }
}
