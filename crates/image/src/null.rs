//! The image that holds nothing: reads give zeros, writes are forgotten. For measuring.

use ringtap_io::Io;

use crate::{Boxed, Discard, Error, Extent, Image, Info, Status};

/// A disk of zeros that forgets what is written to it.
#[derive(Clone)]
pub struct Null {
    info: Info,
}

impl Null {
    /// A null disk of `size` bytes, rounded up to 512.
    pub fn new(size: u64, read_only: bool) -> Null {
        Null {
            info: Info {
                format: "null",
                size: size.next_multiple_of(512),
                read_only,
                request_alignment: 1,
                memory_alignment: 1,
                discard_alignment: 1,
                logical_block_size: 512,
                physical_block_size: 4096,
                discard: true,
                fast_zero: true,
                rotational: false,
            },
        }
    }
}

impl Image for Null {
    fn info(&self) -> &Info {
        &self.info
    }

    fn fork(&self) -> Box<dyn Image> {
        Box::new(self.clone())
    }

    fn map(&self, _: u64, len: u64) -> Extent<'_> {
        Extent::Zero { len, writable: true }
    }

    fn flush<'a>(&'a self, _: &'a Io) -> Boxed<'a, Result<(), Error>> {
        Box::pin(async { Ok(()) })
    }

    fn discard<'a>(
        &'a self,
        _: &'a Io,
        _: u64,
        _: u64,
        _: Discard,
    ) -> Boxed<'a, Result<(), Error>> {
        Box::pin(async { Ok(()) })
    }

    fn status<'a>(&'a self, _: &'a Io, _: u64, len: u64) -> Boxed<'a, Result<Status, Error>> {
        Box::pin(async move { Ok(Status::hole(len)) })
    }

    fn current_size(&self) -> Result<u64, Error> {
        Ok(self.info.size)
    }
}
