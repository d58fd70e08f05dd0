//! What is to lie below a node that is opened otherwise.

use ringtap_image::record;

use super::job_words::JobType;
use super::nodes::Add;
use super::refs::Backing;
use super::refusal::Refusal;
use crate::identity::{Identity, identity};
use crate::ids::DiskId;
use crate::running::{Running, Served};

/// It, as a client says.
pub(super) enum Below {
    Stays,
    Nothing,
    Is(DiskId),
}

/// The file of what lies directly below.
fn below(served: &Served) -> Option<Identity> {
    let image = served.vbd.image().ok()?;
    image.below()?.place().and_then(|place| identity(&place.at()))
}

fn has_some(served: &Served) -> bool {
    served.vbd.image().is_ok_and(|image| image.below().is_some())
}

impl Running {
    /// What is to lie below a disk.
    pub(super) fn wanted_below(
        &self,
        id: DiskId,
        said: Option<Backing<Add>>,
    ) -> Result<Below, Refusal> {
        let refuse = |text: String| Err(Refusal::new(text));
        let Some(served) = self.disks.get(&id) else { return refuse("the disk is gone".into()) };
        let own = served.node();
        let name = match said {
            None if served.ties.upon.is_some() => {
                return refuse(format!("backing is missing for '{own}'"));
            }
            None => return Ok(Below::Stays),
            Some(Backing::Of(_)) => {
                return refuse("Cannot change the option 'backing.driver'".into());
            }
            Some(Backing::Nothing) if has_some(served) => return Ok(Below::Nothing),
            Some(Backing::Nothing) => return Ok(Below::Stays),
            Some(Backing::Node(name)) => name,
        };
        let lower = self.graph.lower.get(&name).and_then(|lower| lower.file);
        if lower.is_some() && lower == below(served) {
            return Ok(Below::Stays);
        }
        let wanted = self.named_node(&name)?;
        if wanted == id || self.lying_upon(id).contains(&wanted) {
            return refuse(format!(
                "Making '{name}' a backing child of '{own}' would create a cycle"
            ));
        }
        match self.lying().get(&id) {
            Some(Some(upon)) if *upon == wanted => Ok(Below::Stays),
            _ => Ok(Below::Is(wanted)),
        }
    }

    /// An error where what lies below a disk cannot become another, because a job needs it.
    pub(super) fn is_not_frozen(&self, id: DiskId) -> Result<(), Refusal> {
        let mut all = self.lying_upon(id);
        all.push(id);
        let freezes = |kind| matches!(kind, JobType::Stream | JobType::Commit);
        let mut jobs = self.at_work().filter(|(_, entry)| freezes(entry.kind));
        if !jobs.any(|(_, entry)| entry.disks.iter().any(|disk| all.contains(disk))) {
            return Ok(());
        }
        let Some(served) = self.disks.get(&id) else { return Ok(()) };
        let file = below(served);
        let lower =
            || self.graph.lower.iter().find(|(_, lower)| file.is_some() && lower.file == file);
        let upon = self.lying().remove(&id).flatten().and_then(|upon| self.disks.get(&upon));
        let name = upon.map(Served::node).or_else(|| lower().map(|(name, _)| &**name));
        Err(Refusal::new(format!(
            "Cannot change frozen 'backing' link from '{}' to '{}'",
            served.node(),
            name.unwrap_or("what its image names")
        )))
    }

    /// An error where a disk cannot lie upon that one.
    pub(super) fn may_lie_upon(
        &self,
        id: DiskId,
        wanted: DiskId,
        read_only: bool,
    ) -> Result<(), Refusal> {
        let refuse = |text: String| Err(Refusal::new(text));
        let (Some(served), Some(below)) = (self.disks.get(&id), self.disks.get(&wanted)) else {
            return refuse("the disk is gone".into());
        };
        let (own, name) = (served.node(), below.node());
        if self.pending.is_changing(wanted) {
            return refuse(format!("Node '{name}' is being changed"));
        }
        if !read_only && record::is_unsealed(&below.disk.path) {
            return refuse(format!("a killed server may not have made '{name}' stable"));
        }
        let is_read = self.is_shown(id) || self.reader_of(id).is_some();
        let written = self.is_written(wanted).then_some(name);
        if let Some(name) = written.or_else(|| self.written_below(wanted)).filter(|_| is_read) {
            return refuse(format!(
                "Permission conflict on node '{name}': it would be written to, and '{own}' lies upon it"
            ));
        }
        Ok(())
    }
}
