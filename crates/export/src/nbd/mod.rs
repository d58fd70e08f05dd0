//! NBD, the network block device protocol: fixed newstyle, simple and structured replies, extended
//! headers.
//!
//! [`Server`] takes connections, as many as there are `places` for. Each has a thread with one ring
//! (`welcome`): `handshake` agrees on an export, `connection` receives requests in runs, `carry_out`
//! serves each in a slot of its own, and `batch` gathers the replies of a turn into one send, through
//! `tls` where that was agreed on. What is read from and written to the wire ([`Handshake`],
//! [`Header`]) are pure functions over bytes.
//!
//! Source of the protocol: doc/proto.md of github.com/NetworkBlockDevice/nbd, and for extended headers
//! the same file in its branch extension-ext-header.

mod alarm;
mod answer;
mod batch;
mod budget;
mod carry_out;
mod connection;
mod context;
mod credentials;
mod exports;
mod handover;
mod handshake;
mod input;
mod lies_in;
mod limits;
mod listener;
mod memory;
mod options;
mod pass_on;
mod peer;
mod pieces;
mod pipes;
mod places;
mod read;
mod receive;
mod reply;
mod request;
mod server;
mod slot;
mod status;
mod tls;
mod users;
mod welcome;

pub use ringtap_stores::nbd::wire;

pub use budget::Budget;
pub use context::{Contexts, MAX_BITMAPS};
pub use credentials::{Credentials, CredentialsError, Tls};
pub use exports::NamedExport;
pub use handover::{NewOnesWait, Session};
pub use handshake::{Choice, Facts, Handshake, Refusal, Security, Step};
pub use limits::Limits;
pub use listener::Listener;
pub use request::{BadMagic, Command, Header, Rules};
pub use server::{Error, Server, Withdrawn};
