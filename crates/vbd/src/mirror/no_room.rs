//! Who hears that a job's target has no room.

use crate::Disk;
use crate::trouble::OnErrors;

/// As long as it is there requests of a job's target do not wait for room: the job hears of it.
pub(crate) struct DealsWithNoRoom(Disk);

impl Drop for DealsWithNoRoom {
    fn drop(&mut self) {
        self.0.shared.full.job_is_over();
    }
}

impl OnErrors {
    /// What the job is told to do comes before what the target is, also where that is to fail.
    pub(crate) fn deals_with_no_room(target: &Disk) -> DealsWithNoRoom {
        target.shared.full.tell_job();
        DealsWithNoRoom(target.clone())
    }
}
