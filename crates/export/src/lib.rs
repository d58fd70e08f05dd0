//! The wires a virtual block device is served over: NBD, vhost-user-blk, a file by FUSE, and a block
//! device of the host by ublk.
#![deny(unsafe_op_in_unsafe_fn)]

mod arena;
pub mod fuse;
pub mod nbd;
mod poll;
mod queue;
mod reclaim;
mod stop;
pub mod ublk;
pub mod vhost_user;

pub use stop::Stop;
