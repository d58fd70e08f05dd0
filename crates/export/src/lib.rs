//! The wires a virtual block device is served over: NBD and vhost-user-blk.
#![deny(unsafe_op_in_unsafe_fn)]

pub mod nbd;
mod poll;
mod queue;
mod stop;
pub mod vhost_user;

pub use stop::Stop;
