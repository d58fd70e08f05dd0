//! Names that are no disks': of files that images lie in, of images that lie below a disk, or did, and of moments that are
//! kept.
//!
//! A disk is one node with all its images, unless a client gives those names of their own: a file before the image in it
//! is opened, an image below before the one above, an overlay before it takes a disk's place. Then a name
//! stays with its image, as in QEMU, when the disk goes on in another.

use std::collections::BTreeMap;
use std::path::PathBuf;

use ringtap_image::{CacheMode, Place};

use crate::identity::Identity;
use crate::ids::DiskId;
use crate::moment::Begun;

/// A file that has a name of its own.
#[derive(Clone)]
pub(crate) struct FileNode {
    pub(crate) path: PathBuf,
    /// The file itself, whatever is put at its path.
    pub(crate) place: Place,
    pub(crate) read_only: bool,
    /// How the page cache is used, where that was said.
    pub(crate) cache: Option<CacheMode>,
    /// Whether discards free nothing of it.
    pub(crate) keeps_space: bool,
    pub(crate) driver: &'static str,
    /// Whether it was named with the image in it, and goes with that.
    pub(crate) implicit: bool,
}

/// An image that is no disk, and has a name.
#[derive(Clone)]
pub(crate) struct Lower {
    pub(crate) path: PathBuf,
    pub(crate) file: Option<Identity>,
    pub(crate) format: String,
    pub(crate) size: u64,
    /// The name of the file it lies in.
    pub(crate) in_file: Option<String>,
}

/// What a disk has to do with other names.
#[derive(Clone, Default)]
pub(crate) struct Ties {
    /// The name of the file that its image lies in.
    pub(crate) in_file: Option<String>,
    /// Nothing lies below it, whatever it names.
    pub(crate) alone: bool,
    /// The disk whose image its own was opened upon.
    pub(crate) upon: Option<DiskId>,
    /// Its images have names, so that it is called by that of the topmost.
    pub(crate) by_image: bool,
    /// It was described within the one upon it, and goes when nothing lies upon it any more.
    pub(crate) within: bool,
    /// The node that keeps the moment of which it is a view.
    pub(crate) shows: Option<String>,
}

/// A moment that is kept by a node.
pub(crate) struct KeptMoment {
    /// The disk that it is of.
    pub(crate) disk: DiskId,
    /// What takes old content.
    pub(crate) target: DiskId,
    pub(crate) begun: Begun,
}

/// All such names.
#[derive(Default)]
pub(crate) struct Graph {
    pub(crate) files: BTreeMap<String, FileNode>,
    pub(crate) lower: BTreeMap<String, Lower>,
    pub(crate) kept: BTreeMap<String, KeptMoment>,
}
