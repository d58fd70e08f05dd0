//! Making a VHD.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use ringtap_io::Io;

use super::footer::{Footer, Kind, MOST, SECTOR, geometry, size_and_geometry};
use super::header::{Header, LEN, Locator};
use super::layout::Footers;
use super::{BLOCK_ALIGN, bad, end_with_footer, os, parent};
use crate::{Container, Error, OpenError};

/// Where the seconds of a VHD begin: 2000-01-01.
const EPOCH: Duration = Duration::from_secs(946_684_800);
const PIECE: usize = 1 << 20;
const BLOCK_SIZE: u32 = 2 << 20;

/// What VHD to make.
#[derive(Clone, Debug)]
pub struct CreateOptions {
    /// Bytes of the disk; those of the parent where there is one and this is 0.
    pub size: u64,
    /// The kind, QEMU's `subformat`.
    pub kind: Kind,
    /// Keep the size as it is, where it would be rounded up to a geometry: what Azure wants.
    pub force_size: bool,
    /// Bytes of a block, a power of two; none: 2 MiB. Others are rare, and not all programs take them.
    pub block_size: Option<u32>,
    /// What a differencing VHD is made over.
    pub parent: Option<Parent>,
    /// The image's unique id; none: a random one.
    pub id: Option<[u8; 16]>,
}

/// The parent of a new VHD.
#[derive(Clone, Debug)]
pub struct Parent {
    /// Where it lies. Absolute, and so is the child's path.
    pub path: PathBuf,
    /// Its footer.
    pub footer: Footer,
    /// When it was last changed, in seconds since 2000.
    pub time: u32,
}

impl Parent {
    /// The VHD in a container as a parent.
    pub async fn read(io: &Io, container: &Container) -> Result<Parent, OpenError> {
        let (footer, ..) = Footers::read(io, container).await?.choose(container)?;
        let path = container.path();
        let time = std::fs::metadata(path).and_then(|facts| facts.modified());
        Ok(Parent {
            path: std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned()),
            footer,
            time: time.map_or(0, seconds),
        })
    }
}

/// Make a VHD in a container that is open for writing; what it held is gone. Gives the bytes of the
/// disk, which may be more than was asked for: see [`CreateOptions::force_size`].
pub async fn create(
    io: &Io,
    container: &Container,
    options: &CreateOptions,
) -> Result<u64, OpenError> {
    if (options.kind == Kind::Differencing) != options.parent.is_some() {
        let found = "a differencing VHD has a parent, and no other has".to_owned();
        return Err(bad(container, 0, found, "name a parent, or another subformat"));
    }
    let (size, geometry) = size_of(options);
    if size == 0 || size > MOST {
        let found = format!("a disk of {size} bytes is asked for");
        return Err(bad(container, 0, found, "a VHD's disk has up to 2040 GiB; VHDX goes further"));
    }
    let id = match options.id {
        Some(id) => id,
        None => random_id().map_err(|source| OpenError::Os {
            what: "draw a unique id for",
            path: container.path().to_owned(),
            source,
        })?,
    };
    let footer = Footer::new(options.kind, size, geometry, id, seconds(SystemTime::now()));
    let failed = |error| os(container, "write a new VHD to", error);
    match options.kind {
        Kind::Fixed => write_fixed(io, container, &footer).await.map_err(failed)?,
        Kind::Dynamic | Kind::Differencing => {
            let header = plan(container, &footer, options)?;
            write_blocks(io, container, &footer, header).await.map_err(failed)?;
        }
    }
    Ok(size)
}

fn size_of(options: &CreateOptions) -> (u64, (u16, u8, u8)) {
    match &options.parent {
        Some(parent) if options.size == 0 || options.size == parent.footer.disk_size() => {
            let size = parent.footer.disk_size();
            let (cylinders, heads, sectors) = geometry(size / SECTOR);
            let exact =
                u64::from(cylinders) * u64::from(heads) * u64::from(sectors) * SECTOR == size;
            size_and_geometry(size, !exact)
        }
        _ => size_and_geometry(options.size, options.force_size),
    }
}

async fn write_fixed(io: &Io, container: &Container, footer: &Footer) -> Result<(), Error> {
    let size = footer.current_size;
    if !container.traits().regular {
        let end = container.len().saturating_sub(SECTOR);
        if end < size {
            return Err(Error::Full);
        }
        // A copy that another image left there would contradict it.
        container.write(io, 0, &[0; SECTOR as usize]).await?;
        container.write(io, end, footer.bytes()).await?;
        return container.sync(io).await;
    }
    container.set_len(io, 0).await?;
    container.set_len(io, size + SECTOR).await?;
    container.write(io, size, footer.bytes()).await?;
    // Whole blocks may have made it longer.
    container.set_len(io, size + SECTOR).await?;
    container.sync(io).await
}

/// A header, and what is written elsewhere: places and bytes.
struct Plan {
    header: Header,
    names: Vec<(u64, Vec<u8>)>,
}

fn plan(
    container: &Container,
    footer: &Footer,
    options: &CreateOptions,
) -> Result<Plan, OpenError> {
    let block_size = options.block_size.unwrap_or(BLOCK_SIZE);
    let mut header = Header {
        table_at: 0,
        entries: 0,
        block_size,
        parent_id: [0; 16],
        parent_time: 0,
        parent_name: String::new(),
        locators: Vec::new(),
    };
    if !block_size.is_power_of_two() || !(4096..=256 << 20).contains(&block_size) {
        let found = format!("blocks of {block_size} bytes are asked for");
        return Err(bad(container, 0, found, "ask for a power of two from 4096; 2 MiB is usual"));
    }
    header.entries =
        u32::try_from(footer.current_size.div_ceil(u64::from(block_size))).unwrap_or(u32::MAX);
    header
        .blocks(footer.current_size)
        .map_err(|error| bad(container, 0, error, "ask for larger blocks; 2 MiB is usual"))?;
    let mut at = BLOCK_ALIGN;
    let mut names = Vec::new();
    if let Some(above) = &options.parent {
        header.parent_id = above.footer.id;
        header.parent_time = above.time;
        header.parent_name = above
            .path
            .file_name()
            .map(|name| name.to_string_lossy().into_owned())
            .unwrap_or_default();
        let child =
            std::fs::canonicalize(container.path()).unwrap_or_else(|_| container.path().to_owned());
        for (code, bytes) in parent::encoded(&above.path, &child) {
            let space = (bytes.len() as u64).next_multiple_of(SECTOR);
            header.locators.push(Locator { code, space, len: bytes.len() as u32, at });
            names.push((at, bytes));
            at += space;
        }
    }
    // The table has pages of its own: what is written later never touches the header's.
    header.table_at = at.next_multiple_of(BLOCK_ALIGN);
    Ok(Plan { header, names })
}

async fn write_blocks(
    io: &Io,
    container: &Container,
    footer: &Footer,
    plan: Plan,
) -> Result<(), Error> {
    let Plan { header, names } = plan;
    let regular = container.traits().regular;
    let table_end = header.table_at + header.table_size();
    if regular {
        container.set_len(io, 0).await?;
    } else if container.len() < table_end + SECTOR {
        return Err(Error::Full);
    }
    let ones = vec![0xff; PIECE.min(header.table_size() as usize)];
    let mut done = 0;
    while done < header.table_size() {
        let part = ones.get(..(header.table_size() - done) as usize).unwrap_or(&ones);
        container.write(io, header.table_at + done, part).await?;
        done += part.len() as u64;
    }
    // A map of full blocks, left on a device by another image, must not be taken for ours.
    container.write(io, table_end, &[0; SECTOR as usize]).await?;
    for (at, bytes) in &names {
        container.write(io, *at, bytes).await?;
    }
    let bytes: [u8; LEN] = header.to_bytes();
    container.write(io, footer.header_at, &bytes).await?;
    container.sync(io).await?;
    if regular {
        end_with_footer(io, container, footer, table_end).await?;
    } else {
        container.write(io, container.len() - SECTOR, footer.bytes()).await?;
    }
    container.write(io, 0, footer.bytes()).await?;
    container.sync(io).await
}

fn seconds(time: SystemTime) -> u32 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH + EPOCH);
    since.map_or(0, |since| since.as_secs() as u32)
}

/// A random UUID, version 4.
fn random_id() -> std::io::Result<[u8; 16]> {
    let mut id = [0; 16];
    getrandom::fill(&mut id).map_err(|error| std::io::Error::other(error.to_string()))?;
    Ok(uuid::Builder::from_random_bytes(id).into_uuid().into_bytes())
}
