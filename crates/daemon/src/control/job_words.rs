//! What jobs do, and how far they are, in words.

use super::shape::{Read as _, words};

words! {
    /// What a job does.
    enum JobType { "commit" Commit, "stream" Stream, "mirror" Mirror, "backup" Backup, "create" Create }
}

impl JobType {
    /// What that word of another process means.
    pub(crate) fn of(word: &str) -> Option<JobType> {
        JobType::read(word.into(), "type").ok()
    }
}

words! {
    /// How far a job is.
    enum JobStatus {
        "created" Created, "running" Running, "paused" Paused, "ready" Ready, "standby" Standby, "waiting" Waiting, "pending" Pending,
        "aborting" Aborting, "concluded" Concluded, "null" Null,
    }
}
