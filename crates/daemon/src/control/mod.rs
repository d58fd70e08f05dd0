//! Control of a running server: QMP, as QEMU's storage daemon speaks it, on a UNIX socket.
//!
//! `server` takes clients, each with a thread (`client`); `wire` finds the JSON in what they send. What a `command` is lies below
//! all commands, of which each family has a file; `table`, above them, says which there are. What they take and answer is
//! described once, by `shape`, which reads it, writes it and explains it. Replies and events go out by `outgoing`, from
//! whichever thread.
//!
//! Source: QEMU, docs/interop/qmp-spec.rst, qapi/ and storage-daemon/qapi/.

mod about;
mod access;
mod active;
mod add;
mod aside;
mod backups;
mod bitmaps;
mod check;
mod client;
mod command;
mod commit;
mod copies;
mod create;
mod delete;
mod dial;
mod exports;
mod inspect;
mod job_words;
mod jobs;
mod keeping;
mod moment;
mod nbd_server;
mod nodes;
mod opening;
mod outgoing;
mod pause;
mod query;
mod refs;
mod refusal;
mod regions;
mod remote;
mod reopen;
mod reopen_backing;
mod reopen_named;
mod replay;
mod request;
mod resize;
mod resume;
mod room;
mod schema;
mod secrets;
mod server;
mod shape;
mod snapshot;
mod stream;
mod table;
#[doc(hidden)]
pub mod testing;
mod throttle;
mod tls;
mod upgrade;
mod users;
pub mod wire;
mod withdraw;
mod within;

pub(crate) use job_words::{JobStatus, JobType};
pub(crate) use jobs::{
    tell_of_behind, tell_of_end, tell_of_pending, tell_of_phase, tell_of_ready, tell_of_trouble,
};
pub(crate) use outgoing::{Events, Held, hold_back, let_go};
pub(crate) use query::ExportDeleted;
pub(crate) use replay::replay;
pub(crate) use resume::resume;
pub(crate) use server::{Server, Way};
