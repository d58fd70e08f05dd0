//! What was promised of a disk's limits, its group's and its share: it is served with all of that, or not at all.

use ringtap_vbd::{ThrottleGroup, Vbd};

use crate::identity::{Identity, identity};
use crate::ids::DiskId;
use crate::opened::close_unused;
use crate::running::Running;
use crate::threads::spawn;
use crate::{Disk, Error};

impl Running {
    /// One disk more, with nothing that serves it yet.
    ///
    /// # Errors
    /// Where it would be served without something that it was promised: its image is closed again.
    pub(crate) fn add(&mut self, disk: Disk, vbd: Vbd) -> Result<DiskId, Error> {
        let file = identity(&disk.path);
        self.add_known(disk, vbd, file)
    }

    /// The same where it is known which file the image is.
    pub(crate) fn add_known(
        &mut self,
        disk: Disk,
        vbd: Vbd,
        file: Option<Identity>,
    ) -> Result<DiskId, Error> {
        let promised = self.group_of(&disk).and_then(|group| {
            vbd.share_device();
            vbd.set_share(disk.share).map(|()| group)
        });
        match promised {
            Ok(group) => {
                vbd.set_limits(disk.limits);
                vbd.set_group(group);
                Ok(self.add_promised(disk, vbd, file))
            }
            Err(why) => {
                let error = Error::Usage(format!("{}: {why}", disk.path.display()));
                let closes = spawn("close", move || close_unused(&disk.path, vbd));
                match closes {
                    Ok(thread) => self.pending.threads.push(("close".into(), thread)),
                    Err(error) => tracing::warn!("cannot close it again: {error}"),
                }
                Err(error)
            }
        }
    }

    /// A disk that was here until now: its floor is no news to its device.
    pub(crate) fn add_again(
        &mut self,
        disk: Disk,
        vbd: Vbd,
        file: Option<Identity>,
    ) -> Result<DiskId, Error> {
        let named = |why: String| Error::Usage(format!("{}: {why}", disk.path.display()));
        let group = self.group_of(&disk);
        let group = group.and_then(|group| vbd.set_share(disk.share).map(|()| group));
        let group = group.map_err(named)?;
        vbd.share_device();
        vbd.set_limits(disk.limits);
        vbd.set_group(group);
        Ok(self.add_promised(disk, vbd, file))
    }

    fn group_of(&self, disk: &Disk) -> Result<Option<ThrottleGroup>, String> {
        let Some(name) = &disk.group else { return Ok(None) };
        let group = self.groups.get(name).cloned().map(Some);
        group.ok_or_else(|| {
            format!("there is no throttle group {name}, and it is served with its limits or not at all: add the group first")
        })
    }
}
