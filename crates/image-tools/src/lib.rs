//! What is done to disk images at rest, as functions: each takes typed wishes, gives typed facts, and says nothing to
//! anybody but its caller. It reads no command line, prints nothing, handles no signal and ends no process.
//!
//! | module | what it does |
//! |---|---|
//! | [`amend`] | what an image says of itself, and what is recorded of it |
//! | [`mod@bench`] | requests sent to an image as fast as it answers them |
//! | [`bitmap`] | the dirty bitmaps inside an image |
//! | [`check`] | whether an image contradicts itself, and repair |
//! | [`commit`] | what an overlay holds, written into an image below it |
//! | [`compare`] | whether two images have the same content |
//! | [`convert`] | an image copied into another, of any format |
//! | [`create`] | new images, and what they are to be |
//! | [`detach`] | an overlay that needs nothing below any more |
//! | [`held`] | the same in files that the caller holds |
//! | [`info`] | what an image is, what lies below it, and who uses it |
//! | [`keyslots`] | the keyslots of a LUKS header |
//! | [`map`] | where the content of an image lies |
//! | [`measure`] | how much space a new image would take |
//! | [`rebase`] | another image below an overlay |
//! | [`resize`] | disks made larger, or smaller |
//! | [`snapshot`] | the snapshots inside an image |
//!
//! # Images that are read, and images that are changed
//!
//! [`Reading`] says how an image that is only read is opened: beside whom, with which secret, and what it may name. The
//! format of one is named, else recorded, else told by its signature ([`format_of`]). [`Writing`] says it of one that is changed: its
//! format is never guessed ([`format_to_write`]), for a guest may have put any signature there. Both lock the image as
//! servers do, so that nobody changes what somebody else uses.
//!
//! # Errors
//!
//! Functions fail with an [`Error`]: its variants are what a caller may act upon, and [`Error::While`] puts around one of
//! them what was being done. [`Error::cause`] looks through that. [`Error::is_usage`] tells a wish that makes no sense from an
//! image that could not be read, changed or trusted. (Comparing has errors of its own, which say of which image they are.) What a failure
//! leaves is said by each function: an image as it was, one that says that it is not whole, or none where none was.
//!
//! # Progress and cancellation
//!
//! What takes long is told to a [`Watch`], which the caller brings: [`Watch::begins`] hands it the [`Progress`] of the work, which any
//! thread may look at, and whose [`Progress::stop`] ends the work early, with [`Error::Stopped`]. [`Watch::note`] hears what is worth
//! knowing and is no error. Who wants neither passes [`unwatched`].
#![forbid(unsafe_code)]

pub mod amend;
pub mod bench;
pub mod bitmap;
mod chain;
pub mod check;
pub mod commit;
pub mod compare;
pub mod convert;
pub mod create;
pub mod detach;
mod error;
mod files;
pub mod held;
pub mod info;
pub mod keyslots;
pub mod map;
pub mod measure;
pub mod opening;
pub mod rbd;
mod reading;
pub mod rebase;
pub mod resize;
mod secret;
pub mod snapshot;
mod spared;
mod unfinished;
mod waiting;
mod watch;

pub use chain::named_below;
pub use create::{BackingFile, FormatOptions, NamedFormat, NewImage};
pub(crate) use error::Doing;
pub use error::Error;
pub use opening::{Writing, format_to_write};
pub use reading::{Known, Names, Reading, format_of};
pub use ringtap_vbd::Progress;
pub use secret::{LazySecret, read_secret};
pub use waiting::waits_for_nothing;
pub use watch::{Note, Watch, Watcher, unwatched};
