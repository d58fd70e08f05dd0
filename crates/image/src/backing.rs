//! Chains of images, one below the other.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::{FileTypeExt, MetadataExt};

use ringtap_io::Io;

use crate::{Boxed, Image, OpenError, OpenOptions, Place};

/// The most images above each other.
const DEEPEST: usize = 200;

/// In the place of the device a file is on: block devices, and stores by their names.
const DEVICES: u64 = u64::MAX;
const STORES: u64 = u64::MAX - 1;

/// Opens an image of any format below the images of a chain.
type Opener = for<'a> fn(
    &'a Io,
    &'a Place,
    &'a OpenOptions,
    Chain,
) -> Boxed<'a, Result<Box<dyn Image>, OpenError>>;

/// The images opened above one another, so that none is met twice.
#[derive(Clone)]
pub(crate) struct Chain {
    /// Device and inode.
    above: Vec<(u64, u64)>,
    /// How what lies below them is opened: a format does not know the others.
    opener: Opener,
}

impl Chain {
    /// One without images.
    pub(crate) fn new(opener: Opener) -> Chain {
        Chain { above: Vec::new(), opener }
    }

    /// The image at `place`, below these.
    pub(crate) fn open<'a>(
        self,
        io: &'a Io,
        place: &'a Place,
        options: &'a OpenOptions,
    ) -> Boxed<'a, Result<Box<dyn Image>, OpenError>> {
        (self.opener)(io, place, options, self)
    }

    /// The image at `place` by itself.
    pub(crate) fn open_alone<'a>(
        &self,
        io: &'a Io,
        place: &'a Place,
        options: &'a OpenOptions,
    ) -> Boxed<'a, Result<Box<dyn Image>, OpenError>> {
        Chain::new(self.opener).open(io, place, options)
    }

    /// One image more, that in this file.
    pub(crate) fn with(mut self, place: &Place) -> Result<Chain, OpenError> {
        let path = place.path();
        let failed = |source| OpenError::Os { what: "open", path: path.to_owned(), source };
        let file = match ringtap_stores::is_store(path) {
            true => {
                let mut hasher = DefaultHasher::new();
                path.hash(&mut hasher);
                (STORES, hasher.finish())
            }
            false => {
                let facts = fs::metadata(place.at()).map_err(failed)?;
                match facts.file_type().is_block_device() {
                    true => (DEVICES, facts.rdev()),
                    false => (facts.dev(), facts.ino()),
                }
            }
        };
        let refused = |why| OpenError::Refused { path: path.to_owned(), why };
        if self.above.contains(&file) {
            return Err(refused("it is its own backing file, directly or by way of others"));
        }
        if self.above.len() >= DEEPEST {
            return Err(refused("more than 200 images lie above it"));
        }
        self.above.push(file);
        Ok(self)
    }
}
