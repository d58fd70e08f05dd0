//! Opening a qcow2 image by its path, with the files it names.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::slice;
use std::sync::Arc;

use ringtap_io::Io;

use super::data_file::open_data;
use super::extension::Encryption;
use super::header::incompatible;
use super::restart::RESTART_RECORDS;
use super::{Crypt, Header, Parts, Qcow2, at_snapshot, below};
use crate::backing::Chain;
use crate::names::{self, Role};
use crate::{
    Boxed, CacheMode, Container, Format, Image, OpenError, OpenOptions, Place, RestartLog,
    SectorCipher, luks,
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
    restart_of: Option<(u128, u64)>,
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
        let writes = !options.read_only;
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
            let under = names::find(&container, Role::Backing, slice::from_ref(&name), &options)?;
            let format = names::find_format(place.path(), &name, format.as_deref(), &under)?;
            names::is_as_recorded(&place, &name, format, &under)?;
            options.format = Some(format);
            options.read_only = true;
            if writes {
                below::make_whole(io, &under, &options, &chain).await?;
            }
            if options.format != Some(Format::Qcow2) {
                base = Some(chain.open(io, &under, &options).await?);
                break;
            }
            chain = chain.with(&under)?;
            place = under;
        }
        let (table_memory, tables_only) = (options.table_memory, options.tables_only);
        let restart_choice = options.restart_log;
        // Only those of the topmost image tell of the whole disk.
        while let Some(layer) = layers.pop() {
            let Layer { container, header, data, key, restart, restart_of } = layer;
            let top = layers.is_empty();
            let bitmaps = if top { options.bitmaps.clone() } else { Vec::new() };
            let parts = Parts {
                data,
                restart,
                restart_of,
                restart_choice,
                base,
                key,
                table_memory,
                bitmaps,
                tables_only,
                #[cfg(feature = "sabotage")]
                sabotage: None,
            };
            let image = Qcow2::open(io, container, header, parts).await?;
            base = Some(Box::new(image) as Box<dyn Image>);
        }
        let why = "there is nothing to open";
        base.ok_or(OpenError::Refused { path: place.path().to_owned(), why })
    })
}

/// Open an image upon one that is open already, in the place of the backing file that it names: for a snapshot of a disk
/// that is served.
pub async fn open_upon(
    io: &Io,
    place: &Place,
    options: &OpenOptions,
    base: Box<dyn Image>,
) -> Result<Box<dyn Image>, OpenError> {
    let mut options = options.clone();
    let layer = open_layer(io, place, &mut options).await?;
    let Layer { container, header, data, key, restart, restart_of } = layer;
    let parts = Parts {
        data,
        restart,
        restart_of,
        restart_choice: options.restart_log,
        base: Some(base),
        key,
        table_memory: options.table_memory,
        bitmaps: options.bitmaps,
        ..Parts::default()
    };
    Ok(Box::new(Qcow2::open(io, container, header, parts).await?))
}

/// Open the files of one image; from here on down the chain `options` are those it turns out to need.
async fn open_layer(io: &Io, place: &Place, options: &mut OpenOptions) -> Result<Layer, OpenError> {
    let mut container = Container::open(place, options)?;
    let mut header = Header::read(io, &container).await?;
    let snapshot = options.snapshot.take();
    let of_snapshot = snapshot.is_some();
    if let Some(which) = snapshot {
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
    let writable = !container.traits().read_only;
    // A snapshot was whole when it was taken; and what is being served under --force-share has a log that
    // goes on changing.
    let (restart, restart_of) = if options.no_restart_log {
        RestartLog::forget(&container);
        (None, None)
    } else if writable {
        (
            RestartLog::beside(&container, RESTART_RECORDS, options.needs_log())?,
            RestartLog::whose(&container),
        )
    } else if of_snapshot || !RestartLog::is_heeded(&container, options, RESTART_RECORDS) {
        (None, None)
    } else {
        (RestartLog::to_read(&container, RESTART_RECORDS)?, RestartLog::whose(&container))
    };
    let restart = restart.map(|log| match &data {
        Some(data) => log.with_data(data),
        None => log,
    });
    Ok(Layer { container, header, data, key, restart, restart_of })
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
