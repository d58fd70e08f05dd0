//! Fixed VHDs: a raw disk with a footer behind it.

use ringtap_io::Io;

use super::check::Served;
use crate::qcow2::ToolError;
use crate::{Boxed, Container, Discard, Error, Extent, Image, Info, OnlineCheck, Raw, Status};

/// A fixed VHD. The footer is never touched.
#[derive(Clone)]
pub(super) struct Fixed {
    raw: Raw,
    container: Container,
    info: Info,
}

impl Fixed {
    pub(super) fn new(container: Container, size: u64) -> Fixed {
        let raw = Raw::new(container.clone());
        let info = Info { format: "vpc", size, logical_block_size: 512, ..raw.info().clone() };
        Fixed { raw, container, info }
    }
}

impl Image for Fixed {
    fn info(&self) -> &Info {
        &self.info
    }

    fn fork(&self) -> Box<dyn Image> {
        Box::new(self.clone())
    }

    #[inline]
    fn map(&self, offset: u64, len: u64) -> Extent<'_> {
        let (file, writable) = (self.container.file(), !self.info.read_only);
        Extent::Data { file, offset, len, writable, cipher: None }
    }

    fn container(&self) -> Option<&crate::Container> {
        Some(&self.container)
    }

    fn place(&self) -> Option<crate::Place> {
        Some(self.container.place())
    }

    fn let_write(&self, may: bool) {
        self.container.let_write(may);
    }

    fn stop_writing(&self) {
        self.container.stop_writing();
    }

    fn flush<'a>(&'a self, io: &'a Io) -> Boxed<'a, Result<(), Error>> {
        self.raw.flush(io)
    }

    fn discard<'a>(
        &'a self,
        io: &'a Io,
        offset: u64,
        len: u64,
        mode: Discard,
    ) -> Boxed<'a, Result<(), Error>> {
        self.raw.discard(io, offset, len, mode)
    }

    fn status<'a>(&'a self, io: &'a Io, offset: u64, len: u64) -> Boxed<'a, Result<Status, Error>> {
        self.raw.status(io, offset, len)
    }

    fn online_check<'a>(
        &'a self,
        _: &'a Io,
    ) -> Boxed<'a, Result<Option<Box<dyn OnlineCheck>>, ToolError>> {
        Box::pin(async move {
            let container = self.container.clone();
            Ok(Some(Box::new(Served { container, grows: false }) as Box<_>))
        })
    }

    fn current_size(&self) -> Result<u64, Error> {
        Ok(self.info.size)
    }
}
