//! The walls around a server, and the broker that opens for it what lies outside them.
//!
//! [`start`] makes the broker: a process that keeps what the operator may do, parses nothing that a guest, a client or
//! an image can write, and does what is on the operator's [`List`] and nothing else. [`confine`] puts the walls around
//! the caller: no new privileges, few capabilities, landlock, a list of system calls. What is behind them asks
//! [`ask`], whose functions do the same directly where there is no broker.
#![deny(unsafe_op_in_unsafe_fn)]

pub mod ask;
mod asker;
mod broker;
mod call;
mod calls;
mod client;
mod devices;
mod files;
mod holder;
mod list;
mod manager;
mod maps;
mod mount_words;
mod next;
mod notifier;
mod rights;
mod sockets;
mod user;
mod walk;
mod walls;

#[doc(hidden)]
pub use broker::testing;
pub use broker::{Hooks, restart, start};
pub use client::{dismiss, is_there, seal};
pub use devices::{DeviceAct, DeviceDone, DeviceWish, Devices, let_go};
pub use files::{Files, everywhere_but_the_systems};
pub use holder::Holder;
pub use list::List;
pub use mount_words::unescaped;
pub use next::Next;
pub use user::User;
pub use walk::{open_beneath, open_without_links};
pub use walls::{Confined, Lacking, Needs, Walls, confine, narrow};
