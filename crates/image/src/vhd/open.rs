//! Opening a VHD, with its parents.

use std::path::PathBuf;

use ringtap_io::Io;

use super::dynamic::Dynamic;
use super::fixed::Fixed;
use super::footer::{Footer, Kind};
use super::layout::Layout;
use super::restart::{self, RESTART_RECORDS};
use super::{bad, os, parent};
use crate::names::{self, Role};
use crate::restart::forget_note;
use crate::{
    Boxed, CacheMode, Container, Image, Null, OpenError, OpenOptions, Place, Raw, RestartChoice,
    RestartLog,
};

/// The longest chain of parents.
const DEEPEST: usize = 32;

/// An image of a chain, and its footer.
type Link = (Box<dyn Image>, Footer);

/// Open a VHD of any kind. A parent is opened where it may be (`names`), read-only, and must be the one that is meant.
pub fn open<'a>(
    io: &'a Io,
    place: &'a Place,
    options: &'a OpenOptions,
) -> Boxed<'a, Result<Box<dyn Image>, OpenError>> {
    Box::pin(async move { Ok(open_link(io, place, options, &[]).await?.0) })
}

/// Open a VHD in a container, over a parent that was opened before if it is a differencing one.
pub async fn open_in(
    io: &Io,
    container: Container,
    parent: Option<Box<dyn Image>>,
) -> Result<Box<dyn Image>, OpenError> {
    open_in_with(io, container, parent, None).await
}

/// As [`open_in`], with a log in which changes are kept over a killed server; what is in it is taken
/// up.
pub async fn open_in_with(
    io: &Io,
    container: Container,
    parent: Option<Box<dyn Image>>,
    restart: Option<RestartLog>,
) -> Result<Box<dyn Image>, OpenError> {
    let layout = Layout::read(io, &container).await?;
    let align = container.traits().request_alignment;
    if !layout.is_aligned(align) {
        let found = format!("blocks that do not begin at multiples of {align} bytes");
        return Err(bad(&container, 0, found, "open it through the page cache"));
    }
    assemble(io, container, layout, parent, restart, None).await
}

/// What a VHD says of itself.
#[derive(Clone, Debug)]
pub struct Facts {
    /// Bytes of the disk.
    pub size: u64,
    /// The kind.
    pub kind: Kind,
    /// Bytes of a block; none of a fixed one.
    pub block_size: Option<u32>,
    /// Names of the parent, the best first.
    pub parent: Vec<PathBuf>,
    /// Whether the parent is a raw disk.
    pub raw_parent: bool,
}

/// Read the facts of a VHD; its parent need not be there.
pub async fn facts(io: &Io, container: &Container) -> Result<Facts, OpenError> {
    let layout = Layout::read(io, container).await?;
    let (kind, sparse) = (layout.footer.kind, layout.sparse.as_ref());
    let parent = match sparse {
        Some(sparse) if kind == Kind::Differencing => {
            parent::names(io, container, &sparse.header).await?
        }
        _ => Vec::new(),
    };
    let header = sparse.map(|sparse| &sparse.header);
    Ok(Facts {
        size: layout.size,
        kind,
        block_size: header.map(|header| header.block_size),
        raw_parent: header.is_some_and(|header| header.parent_id == [0; 16]),
        parent,
    })
}

/// Take up what a killed server left in the restart log of an image, in a container that is open for
/// writing.
pub async fn settle(
    io: &Io,
    container: &Container,
    choice: Option<RestartChoice>,
) -> Result<(), OpenError> {
    let mut restart = RestartLog::beside(container, RESTART_RECORDS, false)?;
    let number = restart::fingerprint_of(io, container).await;
    restart::heed(container, number, &mut restart, choice)?;
    if let Some(log) = &mut restart {
        log.decide(choice)?;
    }
    let to_use = restart.as_ref().filter(|log| log.is_to_be_used()).and_then(RestartLog::left);
    if to_use.is_none_or(|left| left.records.is_empty()) {
        forget_note(container);
        // One that was closed stays known for that.
        restart.iter().filter(|log| !log.is_closed()).for_each(|log| log.close(false));
        return Ok(());
    }
    let layout = Layout::read(io, container).await?;
    let below = layout.footer.kind == Kind::Differencing;
    // What lies below is not looked at.
    let below = below.then(|| Box::new(Null::new(layout.size, true)) as Box<dyn Image>);
    let image = assemble(io, container.clone(), layout, below, restart, choice).await?;
    image.close(io).await.map_err(|error| os(container, "take up the restart log of", error))
}

async fn assemble(
    io: &Io,
    container: Container,
    mut layout: Layout,
    parent: Option<Box<dyn Image>>,
    mut restart: Option<RestartLog>,
    choice: Option<RestartChoice>,
) -> Result<Box<dyn Image>, OpenError> {
    let Some(sparse) = layout.sparse.take() else {
        return Ok(Box::new(Fixed::new(container, layout.size)));
    };
    let writable = !container.traits().read_only;
    if let Some(log) = &mut restart {
        log.decide(choice)?;
        if writable && log.is_to_be_used() {
            // Killed again before all of it is taken up, it is still the image's.
            log.watch();
        }
    }
    let wanted = layout.footer.kind == Kind::Differencing;
    if wanted != parent.is_some() {
        let found = if wanted { "it needs its parent" } else { "it has no parent" };
        return Err(bad(&container, 60, found, "name the image as it is"));
    }
    if !sparse.head && writable {
        // From now on it is the one that counts.
        let failed = |error| os(&container, "write the footer's copy of", error);
        container.write(io, 0, layout.footer.bytes()).await.map_err(failed)?;
        container.sync(io).await.map_err(failed)?;
    }
    let image = Dynamic::new(container, layout, sparse, parent);
    if let Some(log) = restart {
        match writable {
            true => image.shared.take_up(io, log).await?,
            false => image.shared.show(io, &log).await?,
        }
    }
    Ok(Box::new(image))
}

/// One image of a chain; `children` are those above it.
fn open_link<'a>(
    io: &'a Io,
    place: &'a Place,
    options: &'a OpenOptions,
    children: &'a [PathBuf],
) -> Boxed<'a, Result<Link, OpenError>> {
    Box::pin(async move {
        let path = place.path();
        let mut container = Container::open(place, options)?;
        let mut layout = Layout::read(io, &container).await?;
        if !layout.is_aligned(container.traits().request_alignment) {
            drop(container);
            container = Container::open(place, &through_page_cache(options))?;
            layout = Layout::read(io, &container).await?;
        }
        let footer = layout.footer.clone();
        let parent = match (&layout.sparse, footer.kind) {
            (Some(sparse), Kind::Differencing) => {
                let names = parent::names(io, &container, &sparse.header).await?;
                let below = names::find(&container, Role::Parent, &names, options)?;
                let mut chain = children.to_vec();
                chain.push(std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned()));
                if chain.iter().any(|above| above == below.path()) || chain.len() > DEEPEST {
                    let found = format!("its parent {} ends no chain", below.path().display());
                    return Err(bad(
                        &container,
                        0,
                        found,
                        "a chain has no rings and 33 images at most",
                    ));
                }
                let id = sparse.header.parent_id;
                Some(open_parent(io, &container, &layout, &below, id, options, &chain).await?)
            }
            _ => None,
        };
        let writes = !container.traits().read_only;
        let heeded = writes || RestartLog::is_heeded(&container, options, RESTART_RECORDS);
        let mut restart = if options.no_restart_log {
            RestartLog::forget(&container);
            None
        } else if writes {
            // A fixed one has no tables.
            let needed = layout.sparse.is_some() && options.needs_log();
            RestartLog::beside(&container, RESTART_RECORDS, needed)?
        } else if !heeded {
            // What is being served has a log that goes on changing.
            None
        } else {
            RestartLog::to_read(&container, RESTART_RECORDS)?
        };
        if !options.no_restart_log && heeded && layout.sparse.is_some() {
            let number = restart::fingerprint(&layout.footer);
            restart::heed(&container, number, &mut restart, options.restart_log)?;
        }
        let choice = options.restart_log;
        Ok((assemble(io, container, layout, parent, restart, choice).await?, footer))
    })
}

async fn open_parent(
    io: &Io,
    child: &Container,
    layout: &Layout,
    place: &Place,
    id: [u8; 16],
    options: &OpenOptions,
    chain: &[PathBuf],
) -> Result<Box<dyn Image>, OpenError> {
    let direct = OpenOptions { read_only: true, ..options.clone() };
    let cached = through_page_cache(&direct);
    // The chain is served in blocks of the largest size among it, and those must fit the child too.
    let first = if child.traits().request_alignment == 1 { &cached } else { &direct };
    let parent = open_by_id(io, child, place, id, first, chain).await?;
    if layout.is_aligned(parent.info().request_alignment) {
        return Ok(parent);
    }
    drop(parent);
    open_by_id(io, child, place, id, &cached, chain).await
}

async fn open_by_id(
    io: &Io,
    child: &Container,
    place: &Place,
    id: [u8; 16],
    options: &OpenOptions,
    chain: &[PathBuf],
) -> Result<Box<dyn Image>, OpenError> {
    if id == [0; 16] {
        // What Xen's tools write where the parent is a raw disk.
        return Ok(Box::new(Raw::open(place, options)?));
    }
    let (parent, footer) = open_link(io, place, options, chain).await?;
    if footer.id != id {
        let found = format!("{} is not its parent: the unique ids differ", place.path().display());
        let advice = "the parent was replaced; find the one that the image was made over";
        return Err(bad(child, 512 + 40, found, advice));
    }
    Ok(parent)
}

fn through_page_cache(options: &OpenOptions) -> OpenOptions {
    let cache = match options.cache {
        CacheMode::None => CacheMode::Writeback,
        CacheMode::DirectSync => CacheMode::Writethrough,
        other => other,
    };
    OpenOptions { cache, ..options.clone() }
}
