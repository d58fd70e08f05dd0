//! The place of an image that is not open here: its guest runs elsewhere, and another server has it.

use ringtap_io::Io;

use crate::{Boxed, Discard, Error, Extent, Image, Info, Status};

/// Why nothing of it can be had.
const AWAY: Error = Error::Os(libc::ENXIO);

/// An image of which only the facts are known. All else fails.
#[derive(Clone)]
pub struct Away {
    info: Info,
}

impl Away {
    /// One that looks like that.
    pub fn new(info: Info) -> Away {
        Away { info }
    }
}

impl Image for Away {
    fn info(&self) -> &Info {
        &self.info
    }

    fn fork(&self) -> Box<dyn Image> {
        Box::new(self.clone())
    }

    fn map(&self, _: u64, _: u64) -> Extent<'_> {
        Extent::NotLoaded
    }

    fn load<'a>(&'a self, _: &'a Io, _: u64) -> Boxed<'a, Result<(), Error>> {
        Box::pin(async { Err(AWAY) })
    }

    fn flush<'a>(&'a self, _: &'a Io) -> Boxed<'a, Result<(), Error>> {
        // It was flushed before.
        Box::pin(async { Ok(()) })
    }

    fn discard<'a>(
        &'a self,
        _: &'a Io,
        _: u64,
        _: u64,
        _: Discard,
    ) -> Boxed<'a, Result<(), Error>> {
        Box::pin(async { Err(AWAY) })
    }

    fn status<'a>(&'a self, _: &'a Io, _: u64, _: u64) -> Boxed<'a, Result<Status, Error>> {
        Box::pin(async { Err(AWAY) })
    }

    fn current_size(&self) -> Result<u64, Error> {
        Ok(self.info.size)
    }
}
