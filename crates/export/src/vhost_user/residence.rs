//! Where a disk's image is while its guest moves from host to host.

use std::time::Duration;

/// Has the image of a disk here while its guest runs here.
pub trait Residence: Send + Sync {
    /// The guest's queues are about to start: have the image here, if it is not. What stands in the way is said for
    /// people.
    fn arrive(&self) -> Result<(), String>;

    /// The guest has stopped at the end of a migration: let go of the image, which may go on elsewhere. What stands in the
    /// way is said for people; it is asked for again as long as the guest stands still.
    fn leave(&self) -> Result<(), String>;
}

/// How long it takes until an image is asked for again that somebody else has, or that could not be let go of.
const FIRST: Duration = Duration::from_millis(20);
const MOST: Duration = Duration::from_secs(1);

/// The image is to come, or to go.
pub(super) struct Waiting {
    why: String,
    pub(super) pause: Duration,
}

impl Waiting {
    /// Since now, or still; people are told where that is news.
    pub(super) fn after(before: Option<Waiting>, what: &str, why: String) -> Waiting {
        if before.as_ref().is_none_or(|before| before.why != why) {
            tracing::warn!("{what} and is tried again: {why}");
        }
        let pause = before.map_or(FIRST, |before| (before.pause * 2).min(MOST));
        Waiting { why, pause }
    }
}
