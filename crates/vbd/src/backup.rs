//! What a disk held at one moment, while it goes on.
//!
//! From that moment on the old content of a region is written to the target before a request changes the region for the
//! first time. What the target does not have yet, the disk still holds. Who reads a region of the disk for the moment, or
//! copies it to the target, has the range for itself: no request that waits for its old content to be saved
//! goes on meanwhile. What a region held is read after it is known not to be saved, and whether the target has failed
//! after that: once it has, requests no longer wait.

mod aside;
mod before;
mod begin;
mod kept;
mod left;
pub(crate) mod moment;
mod saving;
mod set_aside;
mod stability;
mod stable;
mod view;

pub use aside::Scratch;
pub use begin::Backup;
pub use kept::Breaks;
pub use moment::Moment;
pub use view::View;
pub(crate) use view::{Borrowed, Moments};
