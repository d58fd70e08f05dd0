//! Disk images: where the bytes of a virtual disk are.
//!
//! An image never moves a guest's bytes. [`Image::map`] says where they lie, and the one place
//! that moves them (`ringtap-vbd`) does the same for every format.
#![forbid(unsafe_code)]

mod error;
mod image;
mod lock;
mod null;
mod open;
mod raw;

pub use error::{Error, OpenError};
pub use image::{Boxed, CacheMode, Discard, Extent, Image, Info, Status};
pub use null::Null;
pub use open::{Format, OpenOptions, open, parse_size};
pub use raw::Raw;
