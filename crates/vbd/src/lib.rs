//! Virtual block devices: the one place where a guest's bytes move.
//!
//! Every request of every wire passes [`Vbd::serve`], where statistics (and later limits and fair
//! share) stand. An image says where bytes are; `transfer` moves them, `bounce` helps where O_DIRECT
//! asks for more alignment than the request has.
#![forbid(unsafe_code)]

mod bounce;
mod bytes;
mod change;
mod copy;
mod crew;
mod differ;
mod discard;
mod disk;
mod door;
#[cfg(all(test, feature = "shuttle"))]
mod door_models;
mod failures;
mod gate;
#[cfg(all(test, feature = "shuttle"))]
mod gate_models;
mod health;
mod hold;
mod in_flight;
mod inspect;
mod level;
mod name;
mod request;
#[cfg(feature = "sabotage")]
#[doc(hidden)]
pub mod sabotage;
mod stats;
mod transfer;
mod vbd;
mod walk;

pub use change::{Busy, Quiesced};
pub use copy::{Copy, CopyError, copy};
pub use crew::{Crew, Progress};
pub use differ::{Compare, CompareError, Found, compare};
pub use disk::{Disk, WeakDisk, WriteThrough};
pub use failures::Refusal;
pub use health::{Health, Listening};
pub use in_flight::Pending;
pub use inspect::{Connection, DeviceState, Poll, QueueState};
pub use name::{DISK, LABEL, disk_span, shortened};
pub use request::{Kind, Request};
pub use ringtap_image::Error;
pub use stats::{Counts, Latency, Stats};
pub use vbd::Vbd;
