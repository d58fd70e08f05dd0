//! Opening an image by its name.

use std::io;
use std::path::{Path, PathBuf};

use ringtap_io::{Io, Tasks};

use crate::backing::Chain;
use crate::{
    Boxed, CacheMode, Format, Image, Luks, Null, OpenError, Place, Raw, RestartChoice, Secret,
    mixture, probe, qcow2, record, vhd, vhdx, vmdk,
};

/// How to open an image.
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    /// The format; where it is not named, that written down when Ringtap made the image.
    pub format: Option<Format>,
    /// Write to the image as that format though it is known to be another.
    pub force_format: bool,
    /// Host caching.
    pub cache: CacheMode,
    /// Refuse writes.
    pub read_only: bool,
    /// Take no lock, and look at the image though others may write to it. Read-only.
    pub force_share: bool,
    /// With that: look in the restart log all the same where nobody writes to the image, and say so where somebody does.
    pub heed_log: bool,
    /// Files that images may name as what lies below them or as a part of them, and folders with such.
    pub allow_backing: Vec<PathBuf>,
    /// Files that images may name as their external data files.
    pub data_files: Vec<PathBuf>,
    /// Open no more than so many images of a chain, and let nothing lie below the last of them.
    pub layers: Option<u32>,
    /// Show a qcow2 image as it was at this snapshot of it. Read-only.
    pub snapshot: Option<qcow2::SnapshotName>,
    /// The most bytes of an image's tables to keep in memory.
    pub table_memory: Option<u64>,
    /// What opens an encrypted image.
    pub secret: Option<Secret>,
    /// Names of the image's dirty bitmaps to show.
    pub bitmaps: Vec<String>,
    /// Pass the guest's discards on through encryption, which shows which parts are in use.
    pub allow_discards: bool,
    /// Keep no restart log: who writes this image begins anew after a kill.
    pub no_restart_log: bool,
    /// Do not open the image for writing where no restart log can be kept of what a flush has yet to make stable, unless each
    /// write makes it so, or [`RestartChoice::Optional`] was chosen. As servers do.
    pub needs_log: bool,
    /// What becomes of a restart log of which it cannot be told whether it belongs to the image.
    pub restart_log: Option<RestartChoice>,
    /// Write to the image though its disk goes on in another.
    pub succeeded: bool,
    /// Nobody will look at the image's data: what is encrypted stays locked.
    pub tables_only: bool,
}

impl OpenOptions {
    pub(crate) fn needs_log(&self) -> bool {
        self.needs_log
            && !self.cache.writethrough()
            && self.restart_log != Some(RestartChoice::Optional)
    }
}

/// Open `disk`: a path, or `null:SIZE` with a size in bytes or like 10G.
pub fn open(disk: &Path, options: &OpenOptions) -> Result<Box<dyn Image>, OpenError> {
    open_place(&disk.into(), options)
}

/// As [`open`], of what is held.
pub fn open_place(place: &Place, options: &OpenOptions) -> Result<Box<dyn Image>, OpenError> {
    let disk = place.path();
    if let Some(text) = disk.to_str().and_then(|text| text.strip_prefix("null:")) {
        let size = parse_size(text).ok_or_else(|| OpenError::NullSize { text: text.to_owned() })?;
        without_bitmaps(disk, options)?;
        return Ok(Box::new(Null::new(size, options.read_only)));
    }
    let options = &settled(place, options)?;
    if options.format.is_some_and(|format| format != Format::Qcow2) {
        without_bitmaps(disk, options)?;
    }
    if options.format == Some(Format::Raw) {
        return Ok(Box::new(Raw::open(place, options)?));
    }
    let (place, options) = (place.clone(), options.clone());
    let image = on_a_ring(disk, |io| async move {
        open_in_chain(&io, &place, &options, Chain::default()).await
    })??;
    mixture::warn_of(&*image);
    Ok(image)
}

fn without_bitmaps(disk: &Path, options: &OpenOptions) -> Result<(), OpenError> {
    let why = "bitmaps are to be shown, and only qcow2 images have any";
    let refused = OpenError::Refused { path: disk.to_owned(), why };
    if options.bitmaps.is_empty() { Ok(()) } else { Err(refused) }
}

/// The options with the format found where it is not named.
fn settled(place: &Place, options: &OpenOptions) -> Result<OpenOptions, OpenError> {
    let at = place.at();
    if let Some(verb) = probe::unfinished_work(&at) {
        return Err(OpenError::Unfinished { path: place.path().to_owned(), verb });
    }
    let format = options.format.or_else(|| record::format(&at));
    Ok(OpenOptions { format, ..options.clone() })
}

/// As [`open`], from a task: a path only, and the format named.
pub fn open_on<'a>(
    io: &'a Io,
    place: impl Into<Place>,
    options: &'a OpenOptions,
) -> Boxed<'a, Result<Box<dyn Image>, OpenError>> {
    let place = place.into();
    Box::pin(async move { open_in_chain(io, &place, options, Chain::default()).await })
}

/// As [`open_on`], below the images of `chain`.
pub(crate) fn open_in_chain<'a>(
    io: &'a Io,
    place: &'a Place,
    options: &'a OpenOptions,
    chain: Chain,
) -> Boxed<'a, Result<Box<dyn Image>, OpenError>> {
    Box::pin(async move {
        match options.format {
            Some(Format::Raw) => Ok(Box::new(Raw::open(place, options)?) as Box<dyn Image>),
            Some(Format::Qcow2) => qcow2::open_chain(io, place, options, chain.with(place)?).await,
            Some(Format::Vhd) => vhd::open(io, place, options).await,
            Some(Format::Luks) => Ok(Box::new(Luks::open(io, place, options).await?) as _),
            Some(Format::Vhdx) => vhdx::open(io, place, options).await,
            Some(Format::Vmdk) => vmdk::open(io, place, options).await,
            None => Err(OpenError::NoFormat { path: place.path().to_owned() }),
        }
    })
}

/// Run a task to its end on a ring of its own, or the one that the thread keeps; `path` is for the message where there is no ring.
pub fn on_a_ring<T: 'static, F: Future<Output = T> + 'static>(
    path: &Path,
    task: impl FnOnce(Io) -> F,
) -> Result<T, OpenError> {
    let failed = |source: io::Error| OpenError::Os {
        what: "set io_uring up for",
        path: path.into(),
        source,
    };
    let mut tasks = Tasks::new(ringtap_io::passing_reactor().map_err(failed)?);
    let task = task(tasks.io().clone());
    tasks.block_on(task).map_err(failed)
}

/// Bytes of a size like `4096`, `0x1000`, `10G`, `1.5T`; powers of 1024, at most 2^62.
pub fn parse_size(text: &str) -> Option<u64> {
    let text = text.trim();
    let size = match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(digits) => {
            let plain = digits.bytes().all(|digit| digit.is_ascii_hexdigit());
            u64::from_str_radix(digits, 16).ok().filter(|_| plain)
        }
        None => {
            // No exponents, groups of digits or parts of a byte.
            let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
            let unit = text[number.len()..].trim_end_matches(['b', 'B']);
            let plain = number.bytes().all(|digit| digit.is_ascii_digit())
                || (!unit.is_empty() && number.bytes().all(|c| c.is_ascii_digit() || c == b'.'));
            parse_size::Config::new().with_binary().parse_size(text).ok().filter(|_| plain)
        }
    };
    size.filter(|bytes| *bytes <= 1 << 62)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("4k", 4096),
            ("10G", 10 << 30),
            ("1.5M", 3 << 19),
            ("2TiB", 2 << 40),
            ("1.5E", 3 << 59),
            ("0x10000", 65536),
            ("1.3k", 1331),
            ("512B", 512),
        ] {
            assert_eq!(parse_size(text), Some(bytes), "{text}");
        }
        for text in [
            "",
            "G",
            "-1",
            "1X",
            "1.3",
            "1.3B",
            "1_000",
            "1 k",
            "k1",
            "1.",
            "9999999999T",
            "5E",
            "16E",
            "nan",
            "1e5",
            "0x",
            "0x1g",
            "0x-1",
        ] {
            assert_eq!(parse_size(text), None, "{text}");
        }
    }

    #[test]
    fn a_format_must_be_named() {
        let error = open(Path::new("/tmp/x"), &OpenOptions::default()).err().expect("refused");
        assert!(error.to_string().contains("-f raw"), "{error}");
        assert!(open(Path::new("null:1G"), &OpenOptions::default()).is_ok());
    }
}
