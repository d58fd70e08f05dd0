//! Opening the images of a configuration: one that cannot be served stops one disk, or all.

use std::collections::HashMap;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use ringtap_image::{Format, Image, OpenError, Place, open_place, record};
use ringtap_io::Panic;
use ringtap_vbd::{Vbd, disk_span};

use crate::labels::labels;
use crate::{Config, Disk, Error};

/// What an image is given to before it is served, with its path.
pub type Wrap<'a> = &'a dyn Fn(&Path, Box<dyn Image>) -> Box<dyn Image>;

/// A disk that could not be opened.
pub(crate) struct LeftOut {
    pub(crate) disk: Disk,
    /// What its threads would be called.
    pub(crate) label: String,
    /// Why, when it was tried last.
    pub(crate) error: Error,
}

/// The disks that are served, in the order of the configuration, and those that are not.
pub(crate) struct Opened {
    /// The configuration without the disks that are not served.
    pub(crate) config: Config,
    /// The device of each of its disks.
    pub(crate) vbds: Vec<Vbd>,
    /// The disks that are not served.
    pub(crate) left_out: Vec<LeftOut>,
    /// The files of those opened for writing as a format that was named.
    pub(crate) named: Vec<(Place, Format)>,
}

impl Opened {
    /// Open every image. With [`Config::strict`], and where no other disk is left to serve, the first failure
    /// is returned; a mistake of the command line always is.
    /// `wrap` may put another image before each.
    pub(crate) fn open(config: Config, wrap: Wrap<'_>) -> Result<Opened, Error> {
        refuse_twice(&config.disks)?;
        let labels = labels(&config.disks);
        let Config { disks, strict, .. } = config;
        let config = Config { disks: vec![], ..config };
        let mut opened = Opened { config, vbds: vec![], left_out: vec![], named: vec![] };
        let alone = disks.len() == 1;
        for (disk, label) in disks.into_iter().zip(labels) {
            let name = disk.path.display().to_string();
            let span = disk_span(&name).entered();
            match device(&disk, &label, wrap) {
                Ok((vbd, named)) => {
                    opened.named.extend(named);
                    opened.vbds.push(vbd);
                    opened.config.disks.push(disk);
                }
                Err(error) if strict || alone || is_of_command_line(&error) => return Err(error),
                Err(error) => {
                    tracing::error!("not served: {error}");
                    opened.left_out.push(LeftOut { disk, label, error });
                }
            }
            drop(span);
        }
        match opened.vbds.is_empty() {
            true => {
                Err(outcome(opened.left_out, 0)
                    .expect_err("there was a disk, and it is not served"))
            }
            false => Ok(opened),
        }
    }
}

/// Record what the images are, once all is up: from now on a guest decides what a raw disk looks like.
pub(crate) fn record_formats(named: &[(Place, Format)]) {
    for (place, format) in named {
        record::confirm_format(place, *format);
    }
}

/// An error where a disk was left out, however well the `served` others were.
pub(crate) fn outcome(left_out: Vec<LeftOut>, served: usize) -> Result<(), Error> {
    let count = left_out.len();
    let Some(first) = left_out.into_iter().next() else { return Ok(()) };
    Err(Error::NotServed { count, of: count + served, first: Box::new(first.error) })
}

/// Whether nothing that happens to the image would help, but only another command line.
fn is_of_command_line(error: &Error) -> bool {
    matches!(
        error,
        Error::Usage(_) | Error::Open(OpenError::NoFormat { .. } | OpenError::NullSize { .. })
    )
}

/// Two disks on one image: each would find the other's lock, and name this very process.
fn refuse_twice(disks: &[Disk]) -> Result<(), Error> {
    let mut seen: HashMap<Identity, &Disk> = HashMap::new();
    for disk in disks {
        let Some(other) = identity(&disk.path).and_then(|file| seen.insert(file, disk)) else {
            continue;
        };
        if !(disk.options.read_only && other.options.read_only) {
            return Err(Error::Usage(format!(
                "{} and {} are one image, named for two disks: give one disk all the addresses, as in \
                 {} -f FORMAT --nbd unix:A --vhost-user B; or add --read-only to both",
                other.path.display(),
                disk.path.display(),
                other.path.display()
            )));
        }
    }
    Ok(())
}

/// What tells a file or a block device from all others.
pub(crate) type Identity = (bool, u64, u64);

/// Which file a path leads to now.
pub(crate) fn identity(path: &Path) -> Option<Identity> {
    let found = std::fs::metadata(path).ok()?;
    match found.file_type().is_block_device() {
        true => Some((true, found.rdev(), 0)),
        false => Some((false, found.dev(), found.ino())),
    }
}

/// Tell of a file that was opened and is not at its path any more.
pub(crate) fn tell_of_another_file(path: &Path, opened: Option<Identity>) {
    let shown = path.display();
    match (opened, identity(path)) {
        (Some(_), None) => tracing::warn!(
            "{shown}: its file was deleted or moved away; what is served is still that file, and \
             where it was deleted it is gone when this ends"
        ),
        (Some(opened), Some(now)) if opened != now => tracing::warn!(
            "{shown}: another file has taken its place; what is served is still the one that was \
             opened: start the server again to serve the new one"
        ),
        _ => {}
    }
}

/// A disk's image, opened, and what is to be recorded of it.
pub(crate) fn device(
    disk: &Disk,
    label: &str,
    wrap: Wrap<'_>,
) -> Result<(Vbd, Option<(Place, Format)>), Error> {
    let opened = Panic::catch(|| open(disk, wrap));
    let opened = opened.unwrap_or_else(|panic| Err(Error::panicked([&*disk.path], &panic)));
    opened.map(|(vbd, named)| (vbd.named(&disk.path.display().to_string(), label), named))
}

fn open(disk: &Disk, wrap: Wrap<'_>) -> Result<(Vbd, Option<(Place, Format)>), Error> {
    // One file from here on, whatever is put at its path.
    let place = Place::hold(&disk.path).unwrap_or_else(|_| (&disk.path).into());
    let cache = disk.options.cache;
    let image = wrap(&disk.path, open_place(&place, &disk.options)?);
    let named = disk.options.format.filter(|_| !image.info().read_only);
    let named = named.map(|format| (place, format));
    let vbd = match disk.logical_block_size {
        None => Vbd::new(image, cache),
        Some(bytes) => {
            let size = image.info().size;
            if size % u64::from(bytes) != 0 {
                return Err(Error::Usage(format!(
                    "{}: its {size} bytes are not whole sectors of {bytes}, so a guest would not see the \
                     last of them: resize it, or give another --logical-block-size",
                    disk.path.display()
                )));
            }
            Vbd::with_logical_block_size(image, cache, bytes)
        }
    };
    if disk.growable && vbd.grow(vbd.size()).is_err() {
        return Err(Error::Usage(format!(
            "{}: --growable takes a raw image in a regular file",
            disk.path.display()
        )));
    }
    Ok((vbd.held_back(disk.hold), named))
}
