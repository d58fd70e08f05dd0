//! Disks that go on in another image than the one they are named by.

use ringtap_image::{Place, record};

use crate::{Disk, Error};

/// The most images after one another.
const MOST: usize = 200;

/// Find where a disk goes on that was given by the name of an image it has left.
pub(crate) fn follow(disk: &mut Disk) -> Result<(), Error> {
    if disk.options.read_only {
        return Ok(());
    }
    let first = disk.path.clone();
    for _ in 0..MOST {
        let Ok(place) = Place::hold(&disk.path) else { break };
        let Some(successor) = record::find_successor(&place)? else { break };
        disk.path = successor.path().to_owned();
        disk.options.format = None;
        disk.options.force_format = false;
    }
    if disk.path != first {
        tracing::info!(
            "the disk of {} goes on in {}: that is served",
            first.display(),
            disk.path.display()
        );
    }
    Ok(())
}
