//! Opening a VMDK, with the extents that it names.

use std::path::PathBuf;

use ringtap_io::Io;

use super::common::{DESCRIPTOR, MOST, MOST_TABLES, bad};
use super::descriptor::{self, Descriptor, Part};
use super::image::{Kind, Piece, Vmdk};
use super::sparse::Sparse;
use crate::container::os;
use crate::names::{self, Role};
use crate::{Boxed, Container, Image, OpenError, OpenOptions, Place};

/// Open a VMDK, which must be asked for read-only: the file with the descriptor, or a sparse extent that
/// holds its own. Further extents are opened where they may be (`names`).
pub fn open<'a>(
    io: &'a Io,
    place: &'a Place,
    options: &'a OpenOptions,
) -> Boxed<'a, Result<Box<dyn Image>, OpenError>> {
    Box::pin(async move {
        let container = Container::open(place, options)?;
        open_with(io, container, Some(options)).await
    })
}

/// Open a VMDK that lies in one container, which must be read-only.
pub async fn open_in(io: &Io, container: Container) -> Result<Box<dyn Image>, OpenError> {
    open_with(io, container, None).await
}

async fn open_with(
    io: &Io,
    container: Container,
    outside: Option<&OpenOptions>,
) -> Result<Box<dyn Image>, OpenError> {
    let (pieces, _) = read(io, container, outside).await?;
    Ok(Box::new(Vmdk::new(pieces)))
}

/// The parts of the disk, and what is said of them where that is not one extent alone without a descriptor.
pub(super) async fn read(
    io: &Io,
    container: Container,
    outside: Option<&OpenOptions>,
) -> Result<(Vec<Piece>, Option<Descriptor>), OpenError> {
    if !container.traits().read_only {
        let found = "it is opened for writing";
        return Err(bad(
            &container,
            0,
            found,
            "VMDK is read-only here: convert it, or add --read-only",
        ));
    }
    let mut magic = [0; 4];
    let failed = |error| os(&container, "read", error);
    container.read(io, 0, &mut magic).await.map_err(failed)?;
    if &magic == b"KDMV" {
        let sparse = Sparse::read(io, container.clone()).await?;
        let descriptor = match sparse.descriptor {
            Some((at, len)) => Some(read_descriptor(io, &container, at, len).await?),
            None => None,
        };
        let piece = Piece { start: 0, len: sparse.size, kind: Kind::Sparse(sparse) };
        return Ok((vec![piece], descriptor));
    }
    let len = container.len();
    if len > DESCRIPTOR {
        let found = format!("no sparse extent, and {len} bytes are too many for a descriptor");
        return Err(bad(&container, 0, found, "is it a VMDK? name the descriptor file"));
    }
    let descriptor = read_descriptor(io, &container, 0, len).await?;
    let Some(options) = outside else {
        return Err(bad(&container, 0, "it names other files", "open it by its path"));
    };
    let mut pieces = Vec::new();
    let (mut start, mut tables): (u64, usize) = (0, 0);
    for part in &descriptor.parts {
        let kind = open_part(io, &container, options, part).await?;
        if let Kind::Sparse(sparse) = &kind {
            if sparse.size < part.len {
                let found = format!("{} holds {} bytes of {}", part.name, sparse.size, part.len);
                return Err(bad(&container, 0, found, "an extent is of another image"));
            }
            // Each takes memory, though an extent be named again and again.
            tables = tables.saturating_add(sparse.tables());
            if tables > MOST_TABLES {
                let found = format!("extents with more than {MOST_TABLES} grain tables in all");
                return Err(bad(&container, 0, found, "is it damaged?"));
            }
        }
        pieces.push(Piece { start, len: part.len, kind });
        start = start.saturating_add(part.len);
        if start > MOST {
            return Err(bad(&container, 0, "a disk of more than 62 TiB", "is it damaged?"));
        }
    }
    if start == 0 {
        return Err(bad(&container, 0, "a descriptor without extents", "is it a VMDK?"));
    }
    Ok((pieces, Some(descriptor)))
}

async fn open_part(
    io: &Io,
    image: &Container,
    options: &OpenOptions,
    part: &Part,
) -> Result<Kind, OpenError> {
    if part.kind == descriptor::PartKind::Zero {
        return Ok(Kind::Zero);
    }
    let place = names::find(image, Role::Extent, &[PathBuf::from(&part.name)], options)?;
    let container = Container::open(&place, options)?;
    match part.kind {
        descriptor::PartKind::Sparse => Ok(Kind::Sparse(Sparse::read(io, container).await?)),
        _ => {
            if part.offset.saturating_add(part.len) > container.len() {
                let found = format!(
                    "{} bytes, and {} at {} are needed",
                    container.len(),
                    part.len,
                    part.offset
                );
                return Err(bad(&container, 0, found, "the extent was cut short"));
            }
            Ok(Kind::Flat { container, offset: part.offset })
        }
    }
}

async fn read_descriptor(
    io: &Io,
    container: &Container,
    at: u64,
    len: u64,
) -> Result<Descriptor, OpenError> {
    let mut bytes = vec![0; len.min(DESCRIPTOR) as usize];
    let failed = |error| os(container, "read the descriptor of", error);
    container.read(io, at, &mut bytes).await.map_err(failed)?;
    Descriptor::parse(&bytes).map_err(|error| {
        bad(container, at, error, "only what is whole in itself is read here; merge it first")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The directory of a sparse extent may be a hole: a small file, named often, must not take much.
    #[test]
    fn an_extent_that_is_named_often_is_refused() {
        let dir = tempfile::tempdir().expect("a folder");
        let tables = 1u64 << 17;
        let mut header = [0; 512];
        crate::bytes::put(&mut header, 0, b"KDMV\x01");
        crate::bytes::put(&mut header, 12, &(tables * 512 * 8).to_le_bytes());
        crate::bytes::put(&mut header, 20, &[8]);
        crate::bytes::put(&mut header, 44, &512u32.to_le_bytes());
        crate::bytes::put(&mut header, 56, &[1]);
        let extent = dir.path().join("e.vmdk");
        std::fs::write(&extent, header).expect("written");
        let file = std::fs::File::options().write(true).open(&extent).expect("opened");
        file.set_len(512 + 4 * tables).expect("a hole");
        let open_with = |times: usize| {
            let path = dir.path().join("d.vmdk");
            let lines = "RW 8 SPARSE \"e.vmdk\"\n".repeat(times);
            std::fs::write(&path, format!("# Disk DescriptorFile\n{lines}")).expect("written");
            let options = OpenOptions {
                cache: crate::CacheMode::Writeback,
                read_only: true,
                ..OpenOptions::default()
            };
            let named = Place::from(&path);
            crate::on_a_ring(&path, |io| async move { open(&io, &named, &options).await.map(drop) })
                .expect("a ring")
        };
        open_with(4).expect("as many as there may be");
        let refused = open_with(5).expect_err("more").to_string();
        assert!(refused.contains("grain tables in all"), "{refused}");
    }
}
