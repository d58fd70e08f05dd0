//! The transports a virtual block device is served over: NBD, vhost-user-blk, a file by FUSE, a block device
//! of the host by ublk, and Xen's block protocol.
#![deny(unsafe_op_in_unsafe_fn)]

mod areas;
mod arena;
mod driver;
mod footprint;
pub mod fuse;
#[cfg(test)]
mod heard;
pub mod nbd;
mod poll;
mod queue;
mod reclaim;
#[cfg(feature = "sabotage")]
#[doc(hidden)]
pub mod sabotage;
mod stop;
mod tuning;
pub mod ublk;
pub mod vhost_user;
pub mod xen;

pub use footprint::give_back_startup;
pub use reclaim::{become_io_flusher, keep_alive};
pub use stop::Stop;
pub use tuning::Polling;
