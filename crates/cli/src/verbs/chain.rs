//! The files that an image consists of, from the top down, without opening its content.

use std::collections::HashSet;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, bail};
use ringtap_image::qcow2::{self, BitmapEntry, Header, Snapshot};
use ringtap_image::{
    CacheMode, Container, Format, OpenError, OpenOptions, Role, luks, on_a_ring, vhd,
};

use super::source::{How, format_of, is_null};

/// The most layers of an image.
const DEEPEST: usize = 256;

/// One file of an image.
pub(crate) struct Layer {
    pub(crate) path: PathBuf,
    pub(crate) format: Format,
    pub(crate) how: How,
    /// The header, if it is qcow2.
    pub(crate) header: Option<Header>,
    pub(crate) backing: Option<Backing>,
    /// The header, if it is LUKS.
    pub(crate) luks: Option<luks::Header>,
    /// What it says of itself, if it is a VHD.
    pub(crate) vhd: Option<vhd::Facts>,
    /// Bytes of the file.
    pub(crate) len: u64,
    /// The snapshots inside it.
    pub(crate) snapshots: Vec<Snapshot>,
    /// The bitmaps inside it.
    pub(crate) bitmaps: Vec<BitmapEntry>,
    /// Who has the image, if that is why it was looked at without a lock.
    pub(crate) in_use: Option<(String, &'static str)>,
}

impl Layer {
    /// Why its backing file cannot be looked at, where there is none at that place.
    fn missing(&self) -> Option<OpenError> {
        let backing = self.backing.as_ref().filter(|backing| !backing.path.exists())?;
        Some(OpenError::Missing {
            image: self.path.clone(),
            what: Role::Backing,
            name: backing.name.clone().into(),
            path: backing.path.clone(),
        })
    }
}

/// A backing file as an image names it.
pub(crate) struct Backing {
    /// The name in the image.
    pub(crate) name: String,
    /// Where that is.
    pub(crate) path: PathBuf,
    /// Its format, if the image says it.
    pub(crate) format: Option<String>,
}

/// Look at one file.
pub(crate) fn layer(path: &Path, named: Option<Format>, share: bool) -> anyhow::Result<Layer> {
    let (format, how) = format_of(path, named)?;
    let mut layer = Layer {
        path: path.to_owned(),
        format,
        how,
        header: None,
        backing: None,
        luks: None,
        vhd: None,
        len: 0,
        snapshots: vec![],
        bitmaps: vec![],
        in_use: None,
    };
    if is_null(path) {
        return Ok(layer);
    }
    let mut options = OpenOptions {
        format: Some(format),
        cache: CacheMode::Writeback,
        read_only: true,
        force_share: share,
        ..OpenOptions::default()
    };
    let container = match Container::open(path, &options) {
        Err(OpenError::Locked { held, holder, .. }) => {
            layer.in_use = Some((holder, held));
            options.force_share = true;
            Container::open(path, &options)?
        }
        end => end?,
    };
    layer.len = container.len();
    if format == Format::Qcow2 {
        let (header, snapshots, bitmaps) = on_a_ring(path, |io| async move {
            let header = Header::read(&io, &container).await?;
            let list = qcow2::list_snapshots(&io, &container).await;
            let bitmaps = qcow2::list_bitmaps(&io, &container).await;
            Ok::<_, OpenError>((header, list.unwrap_or_default(), bitmaps.unwrap_or_default()))
        })??;
        layer.snapshots = snapshots;
        layer.bitmaps = bitmaps;
        layer.backing = header.backing_file.as_deref().map(|name| backing(path, name, &header));
        layer.header = Some(header);
    } else if format == Format::Vhd {
        let facts = on_a_ring(path, |io| async move { vhd::facts(&io, &container).await })??;
        layer.backing = parent(path, &facts);
        layer.vhd = Some(facts);
    } else if format == Format::Luks {
        let header = on_a_ring(path, |io| async move { luks::read_header(&io, &container).await })?
            .with_context(|| format!("cannot read the header of {}", path.display()))?;
        layer.luks = Some(header);
    }
    Ok(layer)
}

/// The parent of a VHD: the first of its names that leads somewhere.
fn parent(path: &Path, facts: &vhd::Facts) -> Option<Backing> {
    let there = facts.parent.iter().find(|name| beside(path, name).exists());
    let parts = there.or(facts.parent.first())?.components();
    let name: PathBuf = parts.filter(|part| *part != Component::CurDir).collect();
    let format = if facts.raw_parent { Format::Raw } else { Format::Vhd };
    Some(Backing {
        name: name.display().to_string(),
        path: beside(path, &name),
        format: Some(format.name().to_owned()),
    })
}

fn backing(path: &Path, name: &[u8], header: &Header) -> Backing {
    let text = String::from_utf8_lossy(name).into_owned();
    let format = header.backing_format().map(|it| String::from_utf8_lossy(it).into_owned());
    Backing { path: beside(path, std::ffi::OsStr::from_bytes(name).as_ref()), name: text, format }
}

/// A name within an image, seen from the folder of the image.
pub(crate) fn beside(image: &Path, name: &Path) -> PathBuf {
    image.parent().unwrap_or(Path::new("")).join(name)
}

/// Look at an image and all files below it.
pub(crate) fn layers(
    path: &Path,
    format: Option<Format>,
    share: bool,
) -> anyhow::Result<Vec<Layer>> {
    let mut seen = HashSet::new();
    let mut layers: Vec<Layer> = vec![];
    let mut next = Some((path.to_owned(), format));
    while let Some((path, format)) = next {
        let above = layers.last().map(|above| above.path.display().to_string());
        let of = || match &above {
            Some(above) => format!("the backing file of {above}"),
            None => "the image".to_owned(),
        };
        if let Some(backing) = layers.last().and_then(|above| above.missing()) {
            return Err(backing.into());
        }
        let layer = layer(&path, format, share).with_context(of)?;
        if let Ok(facts) = fs::metadata(&path) {
            if !seen.insert((facts.dev(), facts.ino())) {
                bail!("{} is its own backing file, by way of others", path.display());
            }
        }
        if layers.len() >= DEEPEST {
            bail!("more than {DEEPEST} files lie one over the other");
        }
        next = match &layer.backing {
            Some(backing) => {
                let format = match &backing.format {
                    Some(name) => Some(name.parse().with_context(|| {
                        format!("the backing file {} of {}", backing.name, path.display())
                    })?),
                    None => None,
                };
                Some((backing.path.clone(), format))
            }
            None => None,
        };
        layers.push(layer);
    }
    Ok(layers)
}

/// The files of an image from the top down, for those who only want their names.
pub(crate) fn names(path: &Path, format: Option<Format>) -> anyhow::Result<Vec<PathBuf>> {
    Ok(layers(path, format, true)?.into_iter().map(|layer| layer.path).collect())
}
