//! Disks that come and go with their guests, as the server sees it.

use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};

use crate::Disk;
use crate::identity::Identity;
use crate::ids::DiskId;
use crate::residence::{Asked, Host, Residence, lock};
use crate::running::{Event, Running, Served};

impl Host for Sender<Event> {
    fn has_arrived(&self, id: DiskId, disk: Disk, file: Option<Identity>, resized: bool) {
        tell(self, move |running| running.has_arrived(id, disk, file, resized));
    }

    fn stays(&self, id: DiskId) {
        tell(self, move |running| _ = running.pending.changing.remove(&id));
    }

    fn has_left(&self, id: DiskId) {
        tell(self, move |running| running.has_left(id));
    }

    fn ask_to_leave(
        &self,
        id: DiskId,
        with_guest: bool,
        asked: Arc<Mutex<Asked>>,
        answers: Sender<Result<(), String>>,
    ) {
        tell(self, move |running| {
            let mut answer = lock(&asked);
            if matches!(*answer, Asked::GivenUp) {
                return;
            }
            let may = running.may_leave(id, with_guest);
            if let Ok(disk) = &may {
                running.pending.changing.insert(id);
                *answer = Asked::May(disk.clone());
            }
            let _ = answers.send(may.map(drop));
        });
    }
}

fn tell(events: &Sender<Event>, what: impl FnOnce(&mut Running) + Send + 'static) {
    // Where nobody attends any more all ends.
    let _ = events.send(Event::Do(Box::new(what)));
}

impl Running {
    /// How a disk was opened that nobody but one guest has to do with.
    fn may_leave(&self, id: DiskId, with_guest: bool) -> Result<Box<Disk>, String> {
        let refuse = |why: &str| Err(why.to_owned());
        let Some(served) = self.disks.get(&id) else { return refuse("it is gone") };
        let exports = self.exports.iter().filter(|export| export.disk == id).count();
        let coming = self.pending.exports.iter().any(|one| one.disk == id);
        if self.quit || served.vbd.health().failure().is_some() {
            return refuse("it is about to end");
        }
        if exports > usize::from(with_guest) || coming {
            return refuse(match with_guest {
                true => "it has more exports than that guest's",
                false => "it has exports: its guest takes it along, or they are to go first",
            });
        }
        if self.pending.changing.contains(&id) || self.pending.bitmaps_changing.contains(&id) {
            return refuse("a job is at work on it, or it is being changed");
        }
        if self.user_of_disk(id).is_some() || served.ties.upon.is_some() {
            return refuse("its image lies upon that of another disk here, or below it");
        }
        if served.moment.is_some() || !served.vbd.dirty_bitmaps().is_empty() {
            return refuse("it has bitmaps, which would not learn of what is written elsewhere");
        }
        if served.disk.options.read_only || served.disk.is_null() {
            return refuse("others can have it as it is");
        }
        Ok(served.disk.clone().into())
    }

    /// The image of a disk is closed.
    fn has_left(&mut self, id: DiskId) {
        self.pending.changing.remove(&id);
        self.pending.away.insert(id);
        if let Some(served) = self.disks.get_mut(&id) {
            served.disk.incoming = true;
        }
    }

    /// The image of a disk is here, opened so.
    fn has_arrived(&mut self, id: DiskId, disk: Disk, file: Option<Identity>, resized: bool) {
        self.pending.away.remove(&id);
        let Some(served) = self.disks.get_mut(&id) else { return };
        served.file = file;
        (served.disk.path, served.disk.options) = (disk.path, disk.options);
        served.disk.incoming = false;
        if resized {
            self.transports_of(id).iter().for_each(|transport| transport.resized());
        }
    }

    /// Where the image of a disk is.
    pub(crate) fn residence_of(&self, id: DiskId) -> Option<Arc<Residence>> {
        self.disks.get(&id).map(|served: &Served| served.residence.clone())
    }
}
