//! Checkpoints of backups that were cut short.

use ringtap_image::on_a_ring;

use crate::Disk;
use crate::moment::withdrawn;

/// There is no copy from which the checkpoint of a backup could go on that was cut short: it goes. What is to be said of that.
pub(super) fn withdraw((disk, vbd): &(Disk, ringtap_vbd::Disk), name: Option<String>) -> String {
    let is_there = |name: &String| vbd.dirty_bitmaps().iter().any(|one| one.name == *name);
    let Some(name) = name.filter(is_there) else { return String::new() };
    let (own, of, named) = (disk.clone(), vbd.clone(), name.clone());
    // Nobody is served by this thread yet, or the disk has only just come: it waits for three syncs of a small file.
    let end = on_a_ring(&disk.path, |io| async move { withdrawn(&io, &own, &of, named).await });
    if let Err(error) = end {
        tracing::warn!("{error}");
    }
    match is_there(&name) {
        false => format!("; its checkpoint {name} is removed"),
        true => {
            let node = disk.node_name.as_deref().unwrap_or_default();
            format!(
                "; its checkpoint {name} says nothing of any copy: ringtap disk checkpoint remove {node} {name}"
            )
        }
    }
}
