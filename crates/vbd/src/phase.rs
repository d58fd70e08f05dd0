//! What a job is doing.

use serde::Serialize;

/// What a job is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// It has not begun.
    Waiting,
    /// It copies what there was when it began.
    Copying,
    /// It copies what has changed meanwhile.
    Following,
    /// It copies what has changed, and requests change the disk and its copy both.
    Both,
    /// The copy has been as good as the disk, and follows it; it ends when [`crate::Job::complete`] is called.
    Ready,
    /// Nothing is left but the end, which comes when [`crate::Job::finalize`] is called; the copy is kept as good as the disk.
    Pending,
    /// The disk is to stand still, or does, for the end.
    Ending,
    /// It has ended well.
    Done,
    /// It has failed, or was cancelled.
    Failed,
}

pub(crate) const PHASES: [Phase; 9] = [
    Phase::Waiting,
    Phase::Copying,
    Phase::Following,
    Phase::Both,
    Phase::Ready,
    Phase::Pending,
    Phase::Ending,
    Phase::Done,
    Phase::Failed,
];

/// The job was cancelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cancelled")]
pub struct Cancelled;
