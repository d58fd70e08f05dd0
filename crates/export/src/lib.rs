//! The wires a virtual block device is served over: NBD and vhost-user-blk.
#![deny(unsafe_op_in_unsafe_fn)]

pub mod nbd;
mod stop;
pub mod vhost_user;

pub use stop::Stop;
