//! Disks that grow.

use ringtap_image::Error as ImageError;

use super::command::Command;
use super::outgoing::Reply;
use super::refusal::Refusal;
use super::shape::{Done, arguments};
use crate::Disk;
use crate::ids::DiskId;
use crate::larger::make_larger;
use crate::running::{Running, Then};
use crate::threads::contained;

arguments! {
    /// `block_resize`
    struct Resize {
        "device" device: Option<String>,
        "node-name" node_name: Option<String>,
        "size" size: i64,
    }
}

impl Resize {
    fn found(&self, running: &Running) -> Result<(DiskId, u64), Refusal> {
        let id = running.one_of(self.device.as_deref(), self.node_name.as_deref())?;
        let size = u64::try_from(self.size).ok().filter(|size| *size > 0);
        let size = size.ok_or_else(|| Refusal::new("Parameter 'size' expects a >0 size"))?;
        Ok((id, size))
    }
}

/// Make a disk so large, where its image can, or has been made so.
fn grow(disk: &Disk, vbd: &ringtap_vbd::Disk, size: u64) -> Result<(), Refusal> {
    let (now, sector) = (vbd.size(), u64::from(vbd.info().logical_block_size.max(512)));
    if vbd.is_read_only() {
        return Err(Refusal::new("the disk is read-only"));
    }
    if size % sector != 0 {
        return Err(Refusal::new(format!("{size} bytes are not whole sectors of {sector}")));
    }
    // A device, or a file that somebody else has made larger, is so large already.
    let is_so = || vbd.reload_size().is_ok() && vbd.size() == size;
    if size < now {
        return Err(Refusal::new(format!(
            "the disk has {now} bytes, and is not made smaller while it is served"
        )));
    }
    match vbd.grow(size) {
        Ok(()) => Ok(()),
        Err(_) if is_so() => Ok(()),
        Err(ImageError::Unsupported) => Ok(make_larger(disk, vbd, size)?),
        Err(error) => Err(Refusal::new(format!("cannot make the disk larger: {error}"))),
    }
}

impl Command for Resize {
    const NAME: &'static str = "block_resize";
    type Answer = Done;

    fn run(self, running: &mut Running, reply: Reply<Done>) {
        let (id, size) = match self.found(running) {
            Ok(found) => found,
            Err(refusal) => return reply.give(Err(refusal)),
        };
        let Some(served) = running.disks.get(&id) else { return };
        let (disk, vbd, transports) =
            (served.disk.clone(), served.vbd.clone(), running.transports_of(id));
        if running.pending.is_changing(id) || running.pending.bitmaps_changing.contains(&id) {
            let why =
                format!("Node '{}' is being changed, or a job is at work on it", served.node());
            return reply.give(Err(Refusal::new(why)));
        }
        if let Some(user) = running.user_of_disk(id) {
            let why = format!("Node '{}' is in use: '{user}' lies upon it", served.node());
            return reply.give(Err(Refusal::new(why)));
        }
        running.pending.changing.insert(id);
        let begun = running.in_time("resize", move || -> Then {
            let work = || {
                let _disk = vbd.span().enter();
                grow(&disk, &vbd, size)?;
                tracing::info!("now {size} bytes");
                transports.iter().for_each(|transport| transport.resized());
                Ok(Done {})
            };
            let panicked =
                || Err(Refusal::new("a panic has ended it, which is an error of Ringtap itself"));
            let end = contained(work).unwrap_or_else(panicked);
            Box::new(move |running| {
                running.pending.changing.remove(&id);
                reply.give(end);
            })
        });
        if let Err(error) = begun {
            running.pending.changing.remove(&id);
            tracing::error!("cannot make a disk larger: {error}");
        }
    }
}
