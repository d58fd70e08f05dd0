//! Opening a qcow2 image by its path, with the files it names.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::slice;
use std::sync::Arc;

use ringtap_io::Io;

use super::extension::Encryption;
use super::header::incompatible;
use super::restart::{RESTART_RECORDS, names_log};
use super::{Crypt, Header, Parts, Qcow2, at_snapshot};
use crate::backing::Chain;
use crate::names::{self, Role};
use crate::open::open_in_chain;
use crate::{
    Boxed, CacheMode, Container, Format, Image, OpenError, OpenOptions, Place, RestartLog,
    SectorCipher, luks, record,
};

/// Smaller clusters than this are not read with O_DIRECT: a block of it may hold two.
const SMALLEST_DIRECT: u64 = 4096;

/// An image of which the files are open and nothing has been read but the header.
struct Layer {
    container: Container,
    header: Header,
    data: Option<Container>,
    key: Option<Arc<dyn SectorCipher>>,
    restart: Option<RestartLog>,
}

/// Open an image and what it names; `chain` knows the images above it and itself. Layer by layer, not
/// one within the other: a stack holds no 200 of them.
pub(crate) fn open_chain<'a>(
    io: &'a Io,
    place: &'a Place,
    options: &'a OpenOptions,
    mut chain: Chain,
) -> Boxed<'a, Result<Box<dyn Image>, OpenError>> {
    Box::pin(async move {
        let (mut place, mut options) = (place.clone(), options.clone());
        let mut layers = Vec::new();
        let mut base = None;
        loop {
            let layer = open_layer(io, &place, &mut options).await?;
            let container = layer.container.clone();
            let name = layer.header.backing_file.clone();
            let format = layer.header.backing_format().map(<[u8]>::to_vec);
            layers.push(layer);
            options.layers = options.layers.map(|left| left.saturating_sub(1));
            let Some(name) = name.filter(|_| options.layers != Some(0)) else { break };
            let name = PathBuf::from(OsStr::from_bytes(&name));
            let below = names::find(&container, Role::Backing, slice::from_ref(&name), &options)?;
            let format = names::find_format(place.path(), &name, format.as_deref(), &below)?;
            options.format = Some(format);
            options.read_only = true;
            if options.format != Some(Format::Qcow2) {
                base = Some(open_in_chain(io, &below, &options, chain).await?);
                break;
            }
            chain = chain.with(&below)?;
            place = below;
        }
        let (table_memory, tables_only) = (options.table_memory, options.tables_only);
        // Only those of the topmost image tell of the whole disk.
        while let Some(Layer { container, header, data, key, restart }) = layers.pop() {
            let top = layers.is_empty();
            let bitmaps = if top { options.bitmaps.clone() } else { Vec::new() };
            let parts = Parts {
                data,
                restart,
                base,
                key,
                table_memory,
                bitmaps,
                tables_only,
                ..Parts::default()
            };
            let image = Qcow2::open(io, container, header, parts).await?;
            base = Some(Box::new(image) as Box<dyn Image>);
        }
        let why = "there is nothing to open";
        base.ok_or(OpenError::Refused { path: place.path().to_owned(), why })
    })
}

/// Open the files of one image; from here on down the chain `options` are those it turns out to need.
async fn open_layer(io: &Io, place: &Place, options: &mut OpenOptions) -> Result<Layer, OpenError> {
    let path = place.path();
    let mut container = Container::open(place, options)?;
    let mut header = Header::read(io, &container).await?;
    if let Some(which) = options.snapshot.take() {
        at_snapshot::show(io, &container, &mut header, &which).await?;
    }
    let cluster = header.cluster_size();
    let too_small = cluster < SMALLEST_DIRECT.max(container.traits().request_alignment);
    if options.cache.direct() && too_small {
        options.cache = match options.cache {
            CacheMode::DirectSync => CacheMode::Writethrough,
            _ => CacheMode::Writeback,
        };
        drop(container);
        container = Container::open(place, options)?;
    }
    let data = match header.has(incompatible::DATA_FILE) {
        true => Some(open_data(&container, &header, options)?),
        false => None,
    };
    let key = match header.encryption() {
        Some(place) if header.crypt == Crypt::Luks && !options.tables_only => {
            Some(unlock(io, &container, place, options).await?)
        }
        _ => None,
    };
    let restart = match options.no_restart_log {
        true => {
            RestartLog::forget(&container);
            None
        }
        false => RestartLog::beside(&container, RESTART_RECORDS)?,
    };
    // Of one that is being served, under --force-share, that says nothing.
    if let Some(count) = left_unread(&container, &header).filter(|_| !options.force_share) {
        tracing::warn!(
            "{}: a killed server left {count} changes that are not in the image yet, and are not \
             seen here: open it for writing once, as serve and check --repair leaks do",
            path.display()
        );
    }
    Ok(Layer { container, header, data, key, restart })
}

/// How many changes a killed server left that whoever only reads does not see.
fn left_unread(container: &Container, header: &Header) -> Option<usize> {
    let left = RestartLog::left_for(container, RESTART_RECORDS);
    let left = left.filter(|left| container.traits().read_only && names_log(header, left.stamp));
    left.map(|left| left.records.len())
}

/// The cipher behind the LUKS header at that place, which counts sectors from the file's beginning.
async fn unlock(
    io: &Io,
    container: &Container,
    place: Encryption,
    options: &OpenOptions,
) -> Result<Arc<dyn SectorCipher>, OpenError> {
    let failed = |source| OpenError::Luks { path: container.path().to_owned(), source };
    let secret = options.secret.as_ref().ok_or(luks::Error::NoSecret).map_err(failed)?;
    let header = luks::read_header_at(io, container, place.offset, place.len).await;
    luks::unlock_header(&header.map_err(failed)?, secret).map_err(failed)
}

fn open_data(
    image: &Container,
    header: &Header,
    options: &OpenOptions,
) -> Result<Container, OpenError> {
    let why = "its guest data lies in an external file, and it does not name that";
    let refused = OpenError::Refused { path: image.path().to_owned(), why };
    let name = PathBuf::from(OsStr::from_bytes(header.data_file().ok_or(refused)?));
    let data = names::find(image, Role::DataFile, slice::from_ref(&name), options)?;
    let options = OpenOptions { format: Some(Format::Raw), ..options.clone() };
    let container = Container::open(&data, &options)?;
    record::belong_together(&image.place(), &data, &options)?;
    Ok(container)
}
