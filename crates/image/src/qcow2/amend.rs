//! What an image says of itself, changed by one write of its header: all of what is asked for, or nothing.

use ringtap_io::Io;

use super::downgrade::{self, downgrade};
use super::extension;
use super::header::{MAX_NAME, autoclear, compatible};
use super::offline::Offline;
use super::rewrite::Rewrite;
use super::snapshot::replace_table;
use super::snapshot_table;
use super::tool::ToolError;
use super::{Crypt, Header};
use crate::luks::{self, HeaderPlace, KeyslotChange, KeyslotPlan};
use crate::{Container, OpenError, Secret};

/// What to change; what is none stays.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Amendment {
    /// The version, 2 or 3.
    pub version: Option<u32>,
    /// The name of its external data file, where it has one.
    pub data_file: Option<String>,
    /// Whether its external data file is a raw image by itself; what is not does not become one.
    pub data_file_raw: Option<bool>,
    /// Whether refcounts may lag behind while the image is in use.
    pub lazy_refcounts: Option<bool>,
}

/// Change what an image at rest says of itself. A power cut leaves it as it was or as it is to be.
pub async fn amend(io: &Io, container: &Container, amendment: &Amendment) -> Result<(), ToolError> {
    let mut image = Offline::open_to_change(io, container).await?;
    match prepare(&mut image, amendment).await? {
        Tables::Stay => image.write_header().await,
        Tables::LoseZeros => downgrade(&mut image).await,
        Tables::TellSizes => tell_sizes(&mut image).await,
    }
}

/// Whether [`amend`] would refuse that. Changes nothing.
pub async fn may_amend(
    io: &Io,
    container: &Container,
    amendment: &Amendment,
) -> Result<(), ToolError> {
    let mut image = Offline::open_to_change(io, container).await?;
    prepare(&mut image, amendment).await.map(drop)
}

/// What becomes of an image's tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tables {
    Stay,
    /// Version 2 cannot say zeros.
    LoseZeros,
    /// Version 3 has snapshots say how large the disk was.
    TellSizes,
}

/// Look whether all of it can be, and change the header in memory, but for the step to version 2.
async fn prepare(image: &mut Offline<'_>, amendment: &Amendment) -> Result<Tables, ToolError> {
    let version = amendment.version.unwrap_or(image.header.version);
    if version < 3 && amendment.lazy_refcounts == Some(true) {
        return Err(image.refused("lazy_refcounts needs version 3: add compat=1.1"));
    }
    name_data_file(image, amendment)?;
    let mut tables = Tables::Stay;
    match (image.header.version, version) {
        (2, 3) => tables = upgrade(image).await?,
        (3, 2) => {
            downgrade::refuse(image).await?;
            tables = Tables::LoseZeros;
        }
        _ => {}
    }
    match amendment.lazy_refcounts {
        Some(true) if image.header.data_file().is_some() => {
            return Err(image.refused("lazy_refcounts has no meaning with an external data file"));
        }
        Some(true) => image.header.compatible |= compatible::LAZY_REFCOUNTS,
        Some(false) => image.header.compatible &= !compatible::LAZY_REFCOUNTS,
        None => {}
    }
    let wrong = |source| ToolError::Header { path: image.container.path().to_owned(), source };
    image.header.make_room();
    image.header.to_bytes().map_err(wrong)?;
    Ok(tables)
}

/// What is said of the external data file.
fn name_data_file(image: &mut Offline<'_>, amendment: &Amendment) -> Result<(), ToolError> {
    let has_one = image.header.data_file().is_some();
    let is_raw = image.header.autoclear & autoclear::DATA_FILE_RAW != 0;
    match &amendment.data_file {
        Some(_) if !has_one => {
            return Err(
                image.refused("it has no external data file: convert it with -o data_file=FILE")
            );
        }
        Some(name) if !(1..=MAX_NAME).contains(&name.len()) => {
            return Err(image.refused("a data file's name has 1 to 1023 bytes"));
        }
        Some(name) => {
            image.header.set_extension(extension::DATA_FILE, Some(name.as_bytes().to_vec()));
        }
        None => {}
    }
    match amendment.data_file_raw {
        Some(true) if !is_raw => {
            let why = "its data file does not become a raw image where it is: convert the image with \
                       -o data_file=FILE,data_file_raw=on";
            Err(image.refused(why))
        }
        Some(false) => {
            image.header.autoclear &= !autoclear::DATA_FILE_RAW;
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Everything of version 2 means the same in version 3, but that its snapshots must tell how large the
/// disk was.
async fn upgrade(image: &mut Offline<'_>) -> Result<Tables, ToolError> {
    let (snapshots, _) = snapshot_table::read(image).await?;
    image.header.version = 3;
    image.header.extensions.push(extension::our_feature_names());
    image.header.make_room();
    match snapshots.iter().any(|snapshot| snapshot.disk_size.is_none()) {
        true => Ok(Tables::TellSizes),
        false => Ok(Tables::Stay),
    }
}

/// A disk of version 2 is as large at its snapshots as it is now.
async fn tell_sizes(image: &mut Offline<'_>) -> Result<(), ToolError> {
    let (mut snapshots, old_len) = snapshot_table::read(image).await?;
    let size = image.header.size;
    snapshots.iter_mut().for_each(|snapshot| snapshot.complete(size));
    let mut rewrite = Rewrite::of(image).await?;
    replace_table(&mut rewrite, &snapshots, old_len).await?;
    rewrite.commit().await
}

/// Whether the keyslots of an encrypted image that nobody uses can be changed so; see [`luks::plan_keyslots`].
pub async fn plan_keyslots(
    io: &Io,
    container: &Container,
    change: KeyslotChange,
    secret: Option<&Secret>,
    force: bool,
) -> Result<KeyslotPlan, OpenError> {
    let path = || container.path().to_owned();
    let header = Header::read(io, container).await?;
    let Some(place) = header.encryption().filter(|_| header.crypt == Crypt::Luks) else {
        let why = "it is not encrypted with LUKS, and has no keyslots";
        return Err(OpenError::Refused { path: path(), why });
    };
    let place = HeaderPlace { offset: place.offset, len: Some(place.len) };
    let end = luks::plan_keyslots(io, container, place, change, secret, force).await;
    end.map_err(|source| OpenError::Luks { path: path(), source })
}
