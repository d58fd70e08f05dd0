//! Many virtual block devices served by one process.
//!
//! [`serve`] opens the images of a [`Config`], binds their sockets, starts one server thread a
//! socket group and then waits for signals: SIGTERM and SIGINT end it in order, SIGHUP looks again
//! how large the images are, SIGUSR1 prints statistics. [`serve_xen`] does so with the disks that
//! Xen's toolstack names.
#![deny(unsafe_op_in_unsafe_fn)]

mod address;
mod config;
mod error;
mod events;
mod facts;
mod handed;
mod labels;
mod late;
mod opened;
mod pid_file;
mod plan;
mod process;
mod running;
mod serve;
mod socket;
mod target;
mod tls;
mod xen;

pub use address::Address;
pub use config::{Announce, Config, Disk};
pub use error::Error;
#[doc(hidden)]
pub use opened::Wrap;
pub use process::report_panics;
pub use ringtap_export::Polling;
pub use ringtap_export::nbd::Limits as NbdLimits;
pub use ringtap_export::ublk;
pub use serve::{serve, serve_wrapped};
pub use target::{Target, TargetError};
pub use tls::{NbdTls, TlsMode};
pub use xen::{XenConfig, serve_xen};
