//! Virtual block devices: the one place where a guest's bytes move.
//!
//! Every request of every transport passes [`Vbd::serve`], where statistics, limits and fair share
//! stand. An image says where bytes are; `transfer` moves them, `bounce` helps where O_DIRECT
//! asks for more alignment than the request has.
#![forbid(unsafe_code)]

mod backup;
mod bitmaps;
mod bounce;
mod bytes;
mod change;
mod copy;
mod differ;
mod discard;
mod disk;
mod door;
#[cfg(all(test, feature = "shuttle"))]
mod door_models;
mod failures;
mod filter;
mod former;
mod full;
#[cfg(all(test, feature = "shuttle"))]
mod full_models;
mod gate;
#[cfg(all(test, feature = "shuttle"))]
mod gate_models;
mod health;
mod hold;
mod in_flight;
mod inspect;
mod job;
mod keep;
#[cfg(all(test, feature = "shuttle"))]
mod keep_models;
mod level;
mod limits;
mod map;
mod medium;
mod mirror;
mod moment;
mod name;
mod phase;
mod placement;
mod ranges;
#[cfg(all(test, feature = "shuttle"))]
mod ranges_models;
mod request;
#[cfg(feature = "sabotage")]
#[doc(hidden)]
pub mod sabotage;
mod shares;
mod stats;
mod stream;
#[cfg(test)]
mod timed;
mod told;
mod track;
#[cfg(all(test, feature = "shuttle"))]
mod track_models;
mod tracking;
mod transfer;
mod trouble;
mod unfinished;
mod vbd;
mod walk;
mod workers;

pub use backup::{Backup, Breaks, Moment, Scratch, View};
#[cfg(feature = "sabotage")]
#[doc(hidden)]
pub use bitmaps::BitmapWrongs;
pub use bitmaps::{BitmapChange, BitmapsAlone, DirtyBitmap, MergedFrom, StagedBitmaps, Successor};
pub use change::{Busy, Quiesced};
pub use copy::{Copy, CopyError, Lost, copy};
pub use differ::{Compare, CompareError, Found, compare};
pub use disk::{Disk, WeakDisk, WriteThrough};
pub use failures::{Refusal, Seldom};
pub use former::Former;
pub use health::{Health, Listening};
pub use in_flight::Pending;
pub use inspect::{Connection, DeviceState, Poll, QueueState};
pub use job::{Behind, Job, JobProgress, Wishes};
pub use limits::{Fairness, Limits, Rate, Rates, ThrottleGroup, Waited};
#[cfg(feature = "sabotage")]
#[doc(hidden)]
pub use mirror::Wrongs;
pub use mirror::{Ending, Mirror, MirrorError, Scope};
pub use name::{DISK, LABEL, disk_span, shortened};
pub use phase::{Cancelled, Phase};
pub use placement::{Placement, Processors};
pub use request::{Kind, Request};
pub use ringtap_image::Error;
pub use shares::{BackingDevice, DeviceShares, MOST_WEIGHT, Share, TenantState, WEIGHT, Who};
pub use stats::{Counts, Latencies, Latency, Stats};
#[cfg(feature = "sabotage")]
#[doc(hidden)]
pub use stream::StreamWrongs;
pub use stream::{Stream, StreamError};
pub use track::Tracker;
pub use trouble::{Action, IoStatus, OnError, OnErrors, Trouble};
pub use unfinished::{LeftMarks, LeftToCopy, LeftToSave, Unfinished};
pub use vbd::Vbd;
pub use workers::{Progress, Workers};
