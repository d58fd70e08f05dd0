//! Opening a qcow2 image by its path, with the files it names.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use ringtap_io::Io;

use super::header::incompatible;
use super::restart::RESTART_RECORDS;
use super::{Header, Parts, Qcow2};
use crate::backing::{Chain, Named};
use crate::{
    Boxed, CacheMode, Container, Image, OpenError, OpenOptions, RestartLog, SectorCipher, luks,
};

/// Smaller clusters than this are not read with O_DIRECT: a block of it may hold two.
const SMALLEST_DIRECT: u64 = 4096;
/// The most bytes of a LUKS header with its key material.
const MOST_KEYS: u64 = 64 << 20;

/// Open an image and what it names, each in its turn; `chain` knows those opened above it.
pub(crate) fn open_chain<'a>(
    io: &'a Io,
    path: &'a Path,
    options: &'a OpenOptions,
    chain: Chain,
) -> Boxed<'a, Result<Box<dyn Image>, OpenError>> {
    Box::pin(async move {
        let mut options = options.clone();
        let mut container = Container::open(path, &options)?;
        let header = Header::read(io, &container).await?;
        let cluster = header.cluster_size();
        let too_small = cluster < SMALLEST_DIRECT.max(container.traits().request_alignment);
        if options.cache.direct() && too_small {
            options.cache = match options.cache {
                CacheMode::DirectSync => CacheMode::Writethrough,
                _ => CacheMode::Writeback,
            };
            drop(container);
            container = Container::open(path, &options)?;
        }
        let data = match header.has(incompatible::DATA_FILE) {
            true => Some(open_data(path, &header, &options)?),
            false => None,
        };
        options.layers = options.layers.map(|layers| layers.saturating_sub(1));
        let base = match &header.backing_file {
            Some(name) if options.layers != Some(0) => {
                let name = OsStr::from_bytes(name);
                let named = Named { by: path, name, format: header.backing_format() };
                Some(chain.open_backing(io, named, &options).await?)
            }
            _ => None,
        };
        let key = unlock(io, &container, &header, &options).await?;
        let restart = RestartLog::beside(&container, RESTART_RECORDS);
        let table_memory = options.table_memory;
        let parts = Parts { data, restart, base, key, table_memory, ..Parts::default() };
        Ok(Box::new(Qcow2::open(io, container, header, parts).await?) as Box<dyn Image>)
    })
}

/// The cipher of an encrypted image, where the secret for it is there.
async fn unlock(
    io: &Io,
    container: &Container,
    header: &Header,
    options: &OpenOptions,
) -> Result<Option<Box<dyn SectorCipher>>, OpenError> {
    let (Some(place), Some(secret)) = (header.encryption(), &options.secret) else {
        return Ok(None);
    };
    let path = || container.path().to_owned();
    let why = "its LUKS header would lie past the end of the file, or is larger than 64 MiB";
    let end = place.offset.checked_add(place.len).filter(|end| *end <= container.len());
    if end.is_none() || place.len > MOST_KEYS {
        return Err(OpenError::Refused { path: path(), why });
    }
    let mut bytes = vec![0; place.len as usize];
    container.read(io, place.offset, &mut bytes).await.map_err(|error| OpenError::Os {
        what: "read the LUKS header of",
        path: path(),
        source: std::io::Error::from_raw_os_error(error.errno()),
    })?;
    let key = luks::unlock_header(&bytes, secret)
        .map_err(|source| OpenError::Luks { path: path(), source })?;
    Ok(Some(Box::new(key)))
}

fn open_data(path: &Path, header: &Header, options: &OpenOptions) -> Result<Container, OpenError> {
    let why = "its guest data lies in an external file, and it does not name that";
    let refused = OpenError::Refused { path: path.to_owned(), why };
    let name = OsStr::from_bytes(header.data_file().ok_or(refused)?);
    let named = Named { by: path, name, format: Some(b"raw") };
    Container::open(&named.find(options)?, options)
}
