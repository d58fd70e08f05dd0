//! Many virtual block devices served by one process.
//!
//! [`serve`] opens the images of a [`Config`], binds their sockets, starts one server thread a
//! socket group and then waits for signals: SIGTERM and SIGINT end it in order, SIGHUP looks again
//! how large the images are, SIGUSR1 prints statistics.
#![deny(unsafe_op_in_unsafe_fn)]

mod address;
mod config;
mod error;
mod facts;
mod handed;
mod pid_file;
mod plan;
mod process;
mod serve;
mod socket;

pub use address::Address;
pub use config::{Announce, Config, Disk};
pub use error::Error;
pub use ringtap_export::ublk;
pub use serve::serve;
