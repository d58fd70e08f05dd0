//! A VMDK of one or more extents.

use std::sync::Arc;

use ringtap_io::{Io, Mem};

use super::sparse::Sparse;
use crate::findable::Findable;
use crate::qcow2::ToolError;
use crate::{Boxed, Container, Discard, Error, Extent, Image, Info, OnlineCheck, Status};

/// A part of the disk.
pub(super) struct Piece {
    /// Where it begins in the disk.
    pub(super) start: u64,
    pub(super) len: u64,
    pub(super) kind: Kind,
}

impl Piece {
    pub(super) fn container(&self) -> Option<&Container> {
        match &self.kind {
            Kind::Flat { container, .. } => Some(container),
            Kind::Sparse(sparse) => Some(&sparse.container),
            Kind::Zero => None,
        }
    }
}

pub(super) enum Kind {
    Flat { container: Container, offset: u64 },
    Sparse(Sparse),
    Zero,
}

/// A VMDK. Clones are the same one.
#[derive(Clone)]
pub(super) struct Vmdk {
    shared: Arc<Shared>,
}

struct Shared {
    info: Info,
    pieces: Vec<Piece>,
}

impl Vmdk {
    /// Of pieces that follow one another.
    pub(super) fn new(pieces: Vec<Piece>) -> Vmdk {
        let containers = || pieces.iter().filter_map(Piece::container);
        let traits = || containers().map(|container| container.traits());
        let request_alignment = traits().map(|traits| traits.request_alignment).max().unwrap_or(1);
        let info = Info {
            format: "vmdk",
            size: pieces.last().map_or(0, |piece| piece.start + piece.len),
            read_only: true,
            request_alignment,
            memory_alignment: traits().map(|traits| traits.memory_alignment).max().unwrap_or(1),
            discard_alignment: request_alignment.max(512),
            logical_block_size: 512,
            physical_block_size: 4096,
            discard: false,
            fast_zero: false,
            rotational: containers().any(|container| container.is_rotational()),
        };
        Vmdk { shared: Arc::new(Shared { info, pieces }) }
    }
}

impl Shared {
    /// The piece with the byte at `offset`, that byte's place in it, and the bytes from there on.
    fn piece(&self, offset: u64) -> Option<(&Piece, u64, u64)> {
        let after = self.pieces.partition_point(|piece| piece.start <= offset);
        let piece = self.pieces.get(after.checked_sub(1)?)?;
        let inside = offset - piece.start;
        (inside < piece.len).then(|| (piece, inside, piece.len - inside))
    }

    fn find(&self, offset: u64, len: u64) -> Extent<'_> {
        let Some((piece, inside, rest)) = self.piece(offset) else {
            return Extent::Zero { len, writable: false };
        };
        let len = len.min(rest);
        match &piece.kind {
            Kind::Zero => Extent::Zero { len, writable: false },
            Kind::Sparse(sparse) => sparse.map(inside, len),
            Kind::Flat { container, offset } => Extent::Data {
                file: container.file(),
                offset: offset + inside,
                len,
                writable: false,
                cipher: None,
            },
        }
    }

    /// Of bytes that lie at a place in a file: a flat extent may have holes.
    async fn data(&self, io: &Io, offset: u64, at: u64, len: u64) -> Result<Status, Error> {
        match self.piece(offset) {
            Some((Piece { kind: Kind::Flat { container, .. }, .. }, ..)) => {
                container.status(io, at, len).await
            }
            _ => Ok(Status { at: Some(at), ..Status::data(len) }),
        }
    }

    /// Of zeros, whether the image says so or nobody has written there.
    fn hole(&self, offset: u64, len: u64) -> Status {
        match self.piece(offset) {
            Some((Piece { kind: Kind::Sparse(sparse), .. }, inside, _)) => sparse.hole(inside, len),
            _ => Status::hole(len),
        }
    }

    async fn load_table(&self, io: &Io, offset: u64) -> Result<(), Error> {
        match self.piece(offset) {
            Some((Piece { kind: Kind::Sparse(sparse), .. }, inside, _)) => {
                sparse.load(io, inside).await
            }
            _ => Ok(()),
        }
    }

    async fn fill(&self, io: &Io, offset: u64, mem: Mem) -> Result<usize, Error> {
        match self.piece(offset) {
            Some((Piece { kind: Kind::Sparse(sparse), .. }, inside, rest)) => {
                let mem = mem.window(0, usize::try_from(rest).unwrap_or(usize::MAX));
                sparse.decompress(io, inside, mem).await
            }
            _ => Ok(0),
        }
    }
}

impl Image for Vmdk {
    fn info(&self) -> &Info {
        &self.shared.info
    }

    fn fork(&self) -> Box<dyn Image> {
        Box::new(self.clone())
    }

    fn map(&self, offset: u64, len: u64) -> Extent<'_> {
        self.shared.find(offset, len)
    }

    fn load<'a>(&'a self, io: &'a Io, offset: u64) -> Boxed<'a, Result<(), Error>> {
        Box::pin(self.shared.load_table(io, offset))
    }

    fn decompress<'a>(
        &'a self,
        io: &'a Io,
        offset: u64,
        mem: Mem,
    ) -> Boxed<'a, Result<usize, Error>> {
        Box::pin(self.shared.fill(io, offset, mem))
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
        Box::pin(async { Err(Error::ReadOnly) })
    }

    fn status<'a>(&'a self, io: &'a Io, offset: u64, len: u64) -> Boxed<'a, Result<Status, Error>> {
        Box::pin(async move {
            if let Extent::NotLoaded = self.shared.find(offset, len) {
                self.shared.load_table(io, offset).await?;
            }
            match self.shared.find(offset, len) {
                Extent::Data { offset: at, len, .. } => self.shared.data(io, offset, at, len).await,
                Extent::Compressed { len } => Ok(Status { compressed: true, ..Status::data(len) }),
                Extent::Zero { len, .. } => Ok(self.shared.hole(offset, len)),
                Extent::NotLoaded => Err(Error::Corrupt),
            }
        })
    }

    fn online_check<'a>(
        &'a self,
        _: &'a Io,
    ) -> Boxed<'a, Result<Option<Box<dyn OnlineCheck>>, ToolError>> {
        Box::pin(async move {
            let first = self.shared.pieces.iter().find_map(Piece::container);
            let path = first.map(|container| container.path().to_owned()).unwrap_or_default();
            Ok(Some(Box::new(Findable { image: self.fork(), path }) as Box<_>))
        })
    }

    fn current_size(&self) -> Result<u64, Error> {
        Ok(self.shared.info.size)
    }
}
