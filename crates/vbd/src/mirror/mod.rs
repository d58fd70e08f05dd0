//! Copying a disk while it is served.
//!
//! First all that is there is copied, then what has changed meanwhile, over and over: see [`crate::Tracker`] for why nothing
//! is lost. When little is left the disk stands still, the rest is copied, the target is made stable, and takes the
//! disk's place or is left as it is. Where what is left does not become less, requests change both from then on.

pub(crate) mod again;
mod both;
mod brake;
pub(crate) mod content;
mod ending;
pub(crate) mod error;
mod first;
mod left;
pub(crate) mod no_room;
mod over;
pub(crate) mod target;
pub(crate) mod terms;
#[cfg(test)]
mod tests;
pub(crate) mod together;
pub(crate) mod unstable;
mod work;

pub use error::MirrorError;
#[cfg(feature = "sabotage")]
#[doc(hidden)]
pub use terms::Wrongs;
pub use terms::{Ending, Mirror, Scope};
