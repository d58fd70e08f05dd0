//! What a VMDK says of itself and of its extents.

use std::path::PathBuf;

use ringtap_io::Io;

use super::descriptor::Part;
use super::image::{Kind, Piece};
use crate::{Container, OpenError, OpenOptions, Place};

/// What a VMDK says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// The number that changes with the content.
    pub cid: u32,
    /// How VMware calls its layout.
    pub create_type: String,
    /// The parts of its disk, one after the other.
    pub extents: Vec<ExtentFacts>,
}

/// A part of the disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExtentFacts {
    /// Bytes of the disk.
    pub size: u64,
    /// The file it lies in, as the image names it; none of zeros alone.
    pub path: Option<PathBuf>,
    /// Where that was found.
    pub found: Option<PathBuf>,
    /// Bytes of that file.
    pub file_len: u64,
    /// Its kind as the descriptor names it; none where that lies within the extent.
    pub kind: Option<&'static str>,
    /// Bytes of a grain, where it is sparse.
    pub grain: Option<u64>,
    /// Whether its grains are compressed.
    pub compressed: bool,
}

/// Look at a VMDK, and at its extents where they may be opened; none where it has no descriptor.
///
/// # Errors
///
/// Those of [`super::open`].
pub async fn facts(
    io: &Io,
    place: &Place,
    options: &OpenOptions,
) -> Result<Option<Facts>, OpenError> {
    let container = Container::open(place, options)?;
    let (pieces, descriptor) = super::open::read(io, container.clone(), Some(options)).await?;
    let Some(descriptor) = descriptor else { return Ok(None) };
    let is_own = |it: &Container| it.path() == container.path();
    let within = pieces.iter().filter_map(Piece::container).any(is_own);
    let parts = descriptor.parts.iter().filter(|_| !within).map(Some);
    let parts = parts.chain(std::iter::repeat(None));
    Ok(Some(Facts {
        cid: descriptor.cid,
        create_type: descriptor.create_type,
        extents: pieces.iter().zip(parts).map(|(it, part)| extent(&container, it, part)).collect(),
    }))
}

fn extent(image: &Container, piece: &Piece, part: Option<&Part>) -> ExtentFacts {
    let file = piece.container();
    let (grain, compressed) = match &piece.kind {
        Kind::Sparse(sparse) => (Some(sparse.grain()), sparse.is_compressed()),
        _ => (None, false),
    };
    // As the image names it, and not where a link led.
    let name = part.map_or(image.path().to_owned(), |it| image.path().with_file_name(&it.name));
    ExtentFacts {
        size: piece.len,
        path: file.map(|_| name),
        found: file.map(|it| it.path().to_owned()),
        file_len: file.map_or(0, Container::len),
        kind: part.map(|it| it.kind.name()),
        grain,
        compressed,
    }
}
