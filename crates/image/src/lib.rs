//! Disk images: where the bytes of a virtual disk are.
//!
//! An image never moves a guest's bytes. [`Image::map`] says where they lie, and the one place
//! that moves them (`ringtap-vbd`) does the same for every format.
#![forbid(unsafe_code)]

mod away;
mod backing;
pub mod bitmap_store;
mod boot;
mod boxed;
mod bytes;
mod cache_mode;
mod container;
mod epoch;
#[cfg(all(test, feature = "shuttle"))]
mod epoch_models;
mod error;
mod extent;
mod file_facts;
mod file_name;
mod findable;
mod foreign;
mod format;
mod group_commit;
mod image;
mod info;
mod keep_as;
mod limit;
mod lock;
mod lower;
pub mod luks;
mod mixture;
mod names;
mod null;
mod number;
mod numbered;
mod online;
mod open;
mod open_error;
mod options;
mod own_ring;
mod place;
pub mod probe;
pub mod qcow2;
mod raw;
mod reap;
pub mod record;
mod restart;
#[cfg(all(test, feature = "shuttle"))]
mod restart_models;
mod secret;
mod size;
mod standing;
mod state;
mod user;
pub mod vhd;
pub mod vhdx;
pub mod vmdk;
mod whole;

pub use away::Away;
pub use boxed::Boxed;
pub use cache_mode::CacheMode;
pub use container::{Container, Traits};
pub use epoch::{Epochs, InFlight, Ticket};
pub use error::Error;
pub use extent::{Allocation, Cipher, Discard, Extent, SectorCipher, Status};
pub use foreign::foreign_name;
pub use format::{Format, UnknownFormat};
pub use image::Image;
pub use info::Info;
pub use keep_as::keep_as;
pub use limit::limit_of_length;
pub use luks::Luks;
pub use mixture::warn_of_mixture;
pub use names::{NameError, Role, find as find_named, find_of_held, is_understood, whole_name};
pub use null::Null;
pub use online::OnlineCheck;
pub use open::{open, open_on, open_place};
pub use open_error::OpenError;
pub use options::OpenOptions;
pub use own_ring::on_a_ring;
pub use place::Place;
pub use raw::Raw;
pub use restart::{
    Identity, Left, LeftBehind, Record, RestartChoice, RestartLog, Words, folder_is_on_disk,
    has_folder, set_folder,
};
pub use ringtap_stores::{certificates_of, is_store};
pub use secret::{Secret, SecretError, SecretSource};
pub use size::parse_size;
pub use standing::Standing;
pub use state::{CacheState, LayerState, LogState};
