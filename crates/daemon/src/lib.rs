//! Many virtual block devices served by one process.
//!
//! [`serve`] opens the images of a [`Config`], binds their sockets, starts one server thread a
//! socket group and then waits for signals: SIGTERM, SIGINT and SIGQUIT end it in order, SIGHUP
//! looks again how large the images are, SIGUSR1 prints statistics.
#![deny(unsafe_op_in_unsafe_fn)]

mod address;
mod at_once;
mod attached;
mod backup;
mod being_opened;
mod carried;
mod chain;
mod checkpoints;
mod commit;
mod config;
mod confinement;
#[doc(hidden)]
pub mod control;
mod create;
mod described;
mod disk;
mod end;
mod ended;
mod entry;
mod error;
mod facts;
mod folder;
mod graph;
mod handed;
mod handover;
mod identity;
mod ids;
mod in_time;
mod inner;
mod inner_stream;
mod jobs;
mod keep;
mod keeper;
mod keeping;
mod kept;
mod labels;
mod larger;
mod late;
mod layers;
mod ledger;
mod left_out;
mod look;
mod metrics;
mod mirror;
mod moment;
mod moves;
mod newcomers;
mod node;
mod opened;
mod otherwise;
mod passed;
mod passing;
mod pending;
mod pid_file;
mod plan;
mod process;
mod promised;
mod reopen;
mod residence;
mod running;
mod sandbox;
mod scratch;
mod serve;
mod signals;
mod snapshot;
mod socket;
mod start;
mod stats;
mod stopping;
mod stream;
mod successor;
mod switch;
mod target;
#[doc(hidden)]
pub mod testing;
mod threads;
mod tls;
mod transports;
mod turns;
mod twice;
mod upon;
mod written;
mod xen;
mod xen_config;

pub use address::Address;
pub use config::{Announce, Config, ControlAt};
pub use confinement::Sandbox;
pub use disk::{Allotment, Disk, OnError, Placed, QUEUES};
pub use error::Error;
pub use folder::{Described, Folder, ReadFile};
pub use handover::takes_over;
pub use keeping::Keeping;
#[doc(hidden)]
pub use opened::Wrap;
pub use process::report_panics;
pub use ringtap_export::Polling;
pub use ringtap_export::nbd::Limits as NbdLimits;
pub use ringtap_export::ublk;
pub use ringtap_sandbox::User;
pub use ringtap_vbd::{Limits as DiskLimits, MOST_WEIGHT, Processors, Rate, Rates, Share};
pub use sandbox::{end_broker, start_broker};
pub use serve::{serve, serve_upgradable, serve_wrapped};
pub use target::{Target, TargetError};
pub use tls::{NbdTls, TlsMode};
pub use xen_config::XenConfig;
