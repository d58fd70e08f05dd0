//! Opening a qcow2 image by its path, with the files it names.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use ringtap_io::Io;

use super::extension::Encryption;
use super::header::incompatible;
use super::restart::RESTART_RECORDS;
use super::{Crypt, Header, Parts, Qcow2};
use crate::backing::{Chain, Named};
use crate::{
    Boxed, CacheMode, Container, Image, OpenError, OpenOptions, RestartLog, SectorCipher, luks,
};

/// Smaller clusters than this are not read with O_DIRECT: a block of it may hold two.
const SMALLEST_DIRECT: u64 = 4096;

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
        let key = match header.encryption() {
            Some(place) if header.crypt == Crypt::Luks => {
                Some(unlock(io, &container, place, &options).await?)
            }
            _ => None,
        };
        let restart = (!options.read_only).then(|| restart_log(&container)).flatten();
        let table_memory = options.table_memory;
        let parts = Parts { data, restart, base, key, table_memory, ..Parts::default() };
        Ok(Box::new(Qcow2::open(io, container, header, parts).await?) as Box<dyn Image>)
    })
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

/// The log beside which the image is served; without one a killed server loses what was not flushed.
fn restart_log(container: &Container) -> Option<RestartLog> {
    let open = container.open_file()?;
    match RestartLog::open(&RestartLog::usual_folder(), open, RESTART_RECORDS) {
        Ok(log) => Some(log),
        Err(error) => {
            let path = container.path().display();
            tracing::warn!(
                "no restart log for {path}: {error}; what is not flushed would not outlive a killed server"
            );
            None
        }
    }
}

fn open_data(path: &Path, header: &Header, options: &OpenOptions) -> Result<Container, OpenError> {
    let why = "its guest data lies in an external file, and it does not name that";
    let refused = OpenError::Refused { path: path.to_owned(), why };
    let name = OsStr::from_bytes(header.data_file().ok_or(refused)?);
    let named = Named { by: path, name, format: Some(b"raw") };
    Container::open(&named.find(options)?, options)
}
