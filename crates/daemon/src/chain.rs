//! The images below a disk's topmost one, by their files; and what is written of one that is to lie upon another from now on.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ringtap_export::fuse;
use ringtap_image::{Container, Format, Image, OpenOptions, Place, Role, qcow2, record};
use ringtap_io::Io;
use ringtap_vbd::{Busy, Quiesced, Vbd};

use crate::Disk;
use crate::identity::identity;

/// How long requests in flight may take before the disk is tried again, and how often it is.
pub(crate) const STILL: u64 = Duration::from_secs(1).as_nanos() as u64;
pub(crate) const TRIES: u32 = 10;
/// How long it goes on in between: requests that have waited end, and longer ones.
pub(crate) const REST: u64 = Duration::from_millis(100).as_nanos() as u64;

/// One of the images below.
pub(crate) struct Layer {
    /// Its whole path; empty where it has no file.
    pub(crate) path: PathBuf,
    pub(crate) format: Format,
    pub(crate) size: u64,
}

/// Images below, by their paths.
pub(crate) struct Names {
    /// Those that the disk does not need any more.
    pub(crate) gone: Vec<PathBuf>,
    /// All.
    pub(crate) below: Vec<PathBuf>,
}

/// What is to lie directly below an image, as that is to name it.
pub(crate) struct Backing {
    pub(crate) name: String,
    pub(crate) path: PathBuf,
    pub(crate) format: Format,
}

/// What stays below those that go.
pub(crate) struct Stays {
    /// How many lie upon it.
    pub(crate) above: u32,
    pub(crate) backing: Backing,
}

/// How an image of a disk's chain is opened by itself; `left` are it and those below.
pub(crate) fn options_of(disk: &Disk, format: Format, left: u32) -> OpenOptions {
    OpenOptions {
        format: Some(format),
        force_format: false,
        succeeded: true,
        bitmaps: vec![],
        // As many as there are, whatever the last of them names.
        layers: Some(left),
        ..disk.options.clone()
    }
}

/// The same, to be read only.
pub(crate) fn to_read(options: OpenOptions) -> OpenOptions {
    OpenOptions { read_only: true, ..options }
}

/// The images below, the next one first; those without files have no names.
pub(crate) fn layers(top: &dyn Image) -> Vec<Layer> {
    let of = |image: &dyn Image| {
        let path = image
            .place()
            .map(|place| fs::canonicalize(place.at()).unwrap_or_else(|_| place.path().to_owned()));
        let info = image.info();
        let format = info.format.parse().unwrap_or(Format::Raw);
        Layer { path: path.unwrap_or_default(), format, size: info.size }
    };
    std::iter::successors(top.below(), |image| image.below()).map(of).collect()
}

/// An error where a disk as a file, mounted there, would hide one of the files that it consists of: the server would wait for itself
/// where it opens that anew. Those were known when they were opened, and nothing is asked of them.
pub(crate) fn hides_none(vbd: &ringtap_vbd::Disk, path: &Path) -> Result<(), fuse::Error> {
    let (Ok(there), Ok(top)) = (fs::metadata(path), vbd.image()) else { return Ok(()) };
    let is_it = |file: &Container| file.numbers() == Some((there.dev(), there.ino()));
    let has_data = |image: &dyn Image| image.data_file().is_some_and(is_it);
    let of = |image: &dyn Image| image.container().is_some_and(is_it) || has_data(image);
    let below = std::iter::successors(top.below(), |image| image.below()).any(of);
    match below || has_data(&*top) {
        true => Err(fuse::Error::Below { path: path.to_owned() }),
        false => Ok(()),
    }
}

/// The image with so many above it.
pub(crate) fn nth(top: &dyn Image, above: u32) -> Option<&dyn Image> {
    (0..above).try_fold(top, |image, _| image.below())
}

/// Which of these a file is.
pub(crate) fn position(layers: &[Layer], file: &Path) -> Option<usize> {
    let wanted = identity(file);
    layers
        .iter()
        .position(|layer| layer.path == file || wanted.is_some() && identity(&layer.path) == wanted)
}

impl Backing {
    /// That image, named as the client wants it; by its whole path where nothing is said. `upon` is the image that names it.
    ///
    /// # Errors
    /// Why it could not be opened again by that name.
    pub(crate) fn of(layer: &Layer, name: Option<&str>, upon: &Path) -> Result<Backing, String> {
        let name = match name {
            Some(name) => {
                let folder = upon.parent().unwrap_or(Path::new("/"));
                let named = fs::canonicalize(folder.join(OsStr::from_bytes(name.as_bytes())));
                let named = named.ok().and_then(|named| identity(&named));
                let is_it = named.is_some() && named == identity(&layer.path);
                // An image that is on no disk of this host has no other name.
                if !is_it && Path::new(name) != layer.path {
                    let base = layer.path.display();
                    return Err(format!(
                        "{name:?} does not lead to {base}, which is to stay below: it could not be opened again"
                    ));
                }
                name.to_owned()
            }
            None => layer.path.to_str().ok_or("the path of what stays is not UTF-8")?.to_owned(),
        };
        Ok(Backing { name, path: layer.path.clone(), format: layer.format })
    }
}

/// Have the disk stand still, however often that takes.
pub(crate) async fn stand_still<'a>(io: &Io, vbd: &'a Vbd) -> Result<Quiesced<'a>, Busy> {
    let mut left = TRIES;
    loop {
        left -= 1;
        match vbd.quiesce(io, STILL).await {
            Err(Busy::Late) if left > 0 => io.sleep(REST).await,
            end => return end,
        }
    }
}

/// Have an image at rest name what lies below it from now on; `shown` is what it is called.
///
/// # Errors
/// Why it names what it did.
pub(crate) async fn rename(
    io: &Io,
    place: &Place,
    options: &OpenOptions,
    stays: Option<&Backing>,
    shown: &Path,
) -> Result<(), String> {
    let container = Container::open(place, options).map_err(|error| error.to_string())?;
    let unsaid = |error| {
        // It is opened upon that all the same; next time --backing has to say so.
        tracing::warn!("cannot write down what {} lies upon: {error}", shown.display());
    };
    if let Some(stays) = stays {
        record::also_allow(&place.at(), Role::Backing, &stays.path).unwrap_or_else(unsaid);
    }
    let backing = stays.map(|stays| (&*stays.name, stays.format.name()));
    let end = qcow2::set_backing(io, &container, backing).await;
    end.map_err(|error| error.to_string())?;
    let path = stays.map(|stays| &*stays.path);
    record::set_allowed(&place.at(), Role::Backing, path).unwrap_or_else(unsaid);
    if let Some(stays) = stays {
        let end = record::set_format_below(&place.at(), &stays.path, stays.format);
        end.unwrap_or_else(unsaid);
    }
    Ok(())
}

/// Whoever has a name of the disk from before finds it, in `goes_on`, without those that are not needed any more.
pub(crate) fn lead(names: &Names, goes_on: &Path) {
    let gone: Vec<_> = names.gone.iter().filter_map(|path| identity(path)).collect();
    for path in &names.below {
        let next = record::successor(path).and_then(|next| identity(&next));
        // Another disk may go on from the same image.
        if !next.is_some_and(|next| gone.contains(&next)) {
            continue;
        }
        if let Err(error) = record::lead_on(path, goes_on) {
            let path = path.display();
            tracing::warn!("cannot write down where the disk of {path} goes on: {error}");
        }
    }
}
