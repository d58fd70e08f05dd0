//! The files that an image consists of, from the top down, without opening its content.

use std::collections::HashSet;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use ringtap_image::qcow2::{self, BitmapEntry, Crypt, Header, HeaderError, Snapshot, ToolError};
use ringtap_image::{
    CacheMode, Container, Format, LeftBehind, OpenError, OpenOptions, Place, Role, find_named,
    luks, on_a_ring, record, vhd,
};

use ringtap_io::Io;

use crate::files::{beside, is_null};
use crate::{Doing, Error, Known, Names, Note, Watcher, format_of};

/// Bytes that the header of LUKS 1 has, and more.
const LUKS1: u64 = 4096;

/// The most layers of an image.
const DEEPEST: usize = 256;

/// One file of an image.
#[derive(Debug)]
pub struct Layer {
    /// As the image above names it.
    pub path: PathBuf,
    /// Where that was found.
    pub place: Place,
    /// Its format.
    pub format: Format,
    /// How that is known.
    pub known: Known,
    /// The header, if it is qcow2.
    pub header: Option<Header>,
    /// What lies below it.
    pub backing: Option<Backing>,
    /// The header, if it is LUKS.
    pub luks: Option<luks::Header>,
    /// That of the LUKS inside it, if it is qcow2 and that can be read.
    pub inside: Option<luks::Header>,
    /// What it says of itself, if it is a VHD.
    pub vhd: Option<vhd::Facts>,
    /// Bytes of the file.
    pub len: u64,
    /// Whether what is read of it is compared with digests, if it is an object of a server.
    pub verified: Option<bool>,
    /// The snapshots inside it.
    pub snapshots: Vec<Snapshot>,
    /// Why those cannot be read.
    pub unreadable_snapshots: Option<String>,
    /// The bitmaps inside it.
    pub bitmaps: Vec<BitmapEntry>,
    /// What a killed server left, that is not in the image.
    pub left: Option<LeftBehind>,
    /// Who has the image, if that is why it was looked at without a lock.
    pub in_use: Option<(String, &'static str)>,
}

impl Layer {
    /// Where its data is, if that is in a file of its own.
    fn data_file(&self) -> Option<PathBuf> {
        let name = self.header.as_ref()?.data_file()?;
        Some(beside(&self.path, Path::new(std::ffi::OsStr::from_bytes(name))))
    }

    /// What lies below it is about to change, or another image comes to lie there.
    pub(crate) fn tell_of_snapshots(&self, watch: &Watcher) {
        if !self.snapshots.is_empty() {
            let (path, count) = (self.path.clone(), self.snapshots.len());
            watch.note(&Note::SnapshotsChange { path, count });
        }
    }
}

/// A backing file as an image names it.
#[derive(Debug)]
pub struct Backing {
    /// The name in the image.
    pub name: String,
    own_name: PathBuf,
    /// Where that is.
    pub path: PathBuf,
    /// Its format, if the image says it.
    pub format: Option<String>,
    /// What was found there, where that was asked for.
    found: Option<Place>,
}

/// Look at one file, and of those that it names at the data file alone, where something waits for both.
pub fn top(path: &Path, named: Option<Format>, share: bool, names: &Names) -> Result<Layer, Error> {
    look_at(&path.into(), named, share, names, false)
}

/// The other image that one names as what lies below it.
pub fn named_below(path: &Path, format: Format) -> Result<Option<String>, Error> {
    Ok(layer(path, Some(format), true)?.backing.map(|below| below.name))
}

/// Look at one file, and at none that it names.
pub fn layer(place: impl Into<Place>, named: Option<Format>, share: bool) -> Result<Layer, Error> {
    look_at(&place.into(), named, share, &Names::default(), false)
}

/// Whether it is the table of snapshots that is to blame.
fn of_snapshots(error: &ToolError) -> bool {
    match error {
        ToolError::Corrupt { .. } => true,
        ToolError::Open(OpenError::Qcow2 { source, .. }) => {
            matches!(source, HeaderError::Field { at: 60 | 64, .. })
        }
        _ => false,
    }
}

/// Look at one file, and if asked find what lies below it. `names` says what may be opened.
fn look_at(
    place: &Place,
    named: Option<Format>,
    share: bool,
    names: &Names,
    find_below: bool,
) -> Result<Layer, Error> {
    let path = place.path();
    let (format, known) = format_of(place, named)?;
    let mut layer = Layer {
        path: path.to_owned(),
        place: place.clone(),
        format,
        known,
        header: None,
        backing: None,
        luks: None,
        inside: None,
        vhd: None,
        len: 0,
        verified: None,
        snapshots: vec![],
        unreadable_snapshots: None,
        bitmaps: vec![],
        left: None,
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
        allow_backing: names.backing.clone(),
        data_files: names.data_files.clone(),
        ..OpenOptions::default()
    };
    let container = match Container::open(place, &options) {
        Err(OpenError::Locked { held, holder, .. }) => {
            layer.in_use = Some((holder, held));
            options.force_share = true;
            Container::open(place, &options)?
        }
        end => end?,
    };
    // Where nobody is kept off it is said who is there.
    layer.in_use = layer.in_use.or_else(|| container.writer());
    layer.len = container.len();
    layer.verified = container.is_verified();
    let opened = container.clone();
    // Of one that is being served that says nothing.
    let at_rest = layer.in_use.is_none();
    let own = container.clone();
    if format == Format::Qcow2 {
        let (header, snapshots, bitmaps, inside) = on_a_ring(path, |io| async move {
            let header = Header::read(&io, &container).await?;
            let list = qcow2::list_snapshots(&io, &container).await;
            let bitmaps = qcow2::list_bitmaps(&io, &container).await;
            let inside = inside(&io, &container, &header).await;
            Ok::<_, OpenError>((header, list, bitmaps.unwrap_or_default(), inside))
        })??;
        layer.unreadable_snapshots =
            snapshots.as_ref().err().filter(|it| of_snapshots(it)).map(ToString::to_string);
        if at_rest {
            layer.left = told(qcow2::left(&own, &header, &options));
        }
        layer.snapshots = snapshots.unwrap_or_default();
        layer.bitmaps = bitmaps;
        layer.inside = inside;
        layer.backing = header.backing_file.as_deref().map(|name| backing(path, name, &header));
        layer.header = Some(header);
    } else if format == Format::Vhd {
        let (facts, left) = on_a_ring(path, |io| async move {
            let facts = vhd::facts(&io, &container).await?;
            let left = if at_rest { vhd::left(&io, &own).await } else { Ok(None) };
            Ok::<_, OpenError>((facts, left))
        })??;
        layer.left = told(left);
        layer.backing = parent(path, &facts);
        layer.vhd = Some(facts);
    } else if format == Format::Luks {
        let header = on_a_ring(path, |io| async move { luks::read_header(&io, &container).await })?
            .doing(|| format!("cannot read the header of {}", path.display()))?;
        layer.luks = Some(header);
    }
    if let Some(below) = layer.backing.as_mut().filter(|_| find_below) {
        let role = if format == Format::Vhd { Role::Parent } else { Role::Backing };
        let all = match &layer.vhd {
            Some(facts) => facts.parent.clone(),
            None => vec![below.own_name.clone()],
        };
        below.found = Some(find_named(&opened, role, &all, &options)?);
    }
    opened.leave();
    Ok(layer)
}

/// A log that cannot be read keeps nobody from the other facts.
fn told(left: Result<Option<LeftBehind>, OpenError>) -> Option<LeftBehind> {
    left.unwrap_or_else(|error| {
        tracing::warn!("{error}");
        None
    })
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
        found: None,
        own_name: name,
    })
}

/// The header of the LUKS inside a qcow2 image. Its key material is not needed.
async fn inside(io: &Io, container: &Container, header: &Header) -> Option<luks::Header> {
    let place = header.encryption().filter(|_| header.crypt == Crypt::Luks)?;
    for len in [place.len.min(LUKS1), place.len] {
        let bytes = luks::read_header_at(io, container, place.offset, len).await.ok()?;
        if let Ok(found) = luks::parse(&bytes) {
            return Some(found);
        }
    }
    None
}

fn backing(path: &Path, name: &[u8], header: &Header) -> Backing {
    let text = String::from_utf8_lossy(name).into_owned();
    let format = header.backing_format().map(|it| String::from_utf8_lossy(it).into_owned());
    let own_name = PathBuf::from(std::ffi::OsStr::from_bytes(name));
    Backing { path: beside(path, &own_name), own_name, name: text, format, found: None }
}

/// Look at an image and all files below it, those that it may name.
pub fn layers(
    path: &Path,
    format: Option<Format>,
    share: bool,
    names: &Names,
) -> Result<Vec<Layer>, Error> {
    layers_to((path, format), share, names, |_| true)
}

/// The same, down to the last that `goes`.
fn layers_to(
    (path, format): (&Path, Option<Format>),
    share: bool,
    names: &Names,
    goes: impl Fn(&Path) -> bool,
) -> Result<Vec<Layer>, Error> {
    let mut seen = HashSet::new();
    let mut layers: Vec<Layer> = vec![];
    let mut next = Some((path.to_owned(), Place::from(path), format));
    while let Some((path, place, format)) = next {
        let above = layers.last().map(|above| above.path.display().to_string());
        let of = || match &above {
            Some(above) => format!("the backing file of {above}"),
            None => "the image".to_owned(),
        };
        let mut layer = look_at(&place, format, share, names, true).doing(of)?;
        if let Ok(facts) = fs::metadata(place.at()) {
            if !seen.insert((facts.dev(), facts.ino())) {
                return Err(Error::Circle { path });
            }
        }
        if layers.len() >= DEEPEST {
            let why = format!("more than {DEEPEST} files lie one over the other");
            return Err(Error::Refused(why));
        }
        next = match &layer.backing {
            Some(backing) => {
                let format = match &backing.format {
                    Some(name) => Some(name.parse::<Format>().doing(|| {
                        format!("the backing file {} of {}", backing.name, path.display())
                    })?),
                    None => None,
                };
                let found = backing.found.clone().filter(|_| goes(&backing.path));
                found.map(|found| (backing.path.clone(), found, format))
            }
            None => None,
        };
        // As the image above names it.
        layer.path = path;
        layers.push(layer);
    }
    Ok(layers)
}

/// Say where an image is read whose disk goes on in what lies below it. Only files are looked at: of what lies on a server no such
/// thing is recorded.
pub(crate) fn warn_of_mixture(path: &Path, format: Option<Format>, names: &Names) {
    let is_file = |path: &Path| fs::metadata(path).is_ok_and(|facts| facts.is_file());
    if is_file(path) {
        let layers = layers_to((path, format), true, names, is_file);
        warn_of_mixture_in(&layers.unwrap_or_default());
    }
}

/// The same of images that were found.
pub(crate) fn warn_of_mixture_in(layers: &[Layer]) {
    let paths: Vec<PathBuf> = layers.iter().map(|layer| layer.path.clone()).collect();
    ringtap_image::warn_of_mixture(&paths);
}

/// The files of an image from the top down, those of its data too, for those who only want their names.
pub fn files(path: &Path, format: Option<Format>, names: &Names) -> Result<Vec<PathBuf>, Error> {
    let layers = layers(path, format, true, names)?.into_iter();
    Ok(layers.flat_map(|layer| [Some(layer.path.clone()), layer.data_file()]).flatten().collect())
}

/// Write down that an image made or changed here may name that file, and no other.
pub fn record(image: &Place, role: Role, file: Option<&Path>) {
    let end = record::set_allowed(&image.at(), role, file);
    end.unwrap_or_else(|error| unrecorded(image, file.unwrap_or(Path::new("nothing")), &error));
}

/// Of which format that is, whatever the image says later.
pub fn record_format_below(image: &Place, below: &Path, format: Format) {
    let end = record::set_format_below(&image.at(), below, format);
    end.unwrap_or_else(|error| unrecorded(image, below, &error));
}

/// That it may name that file as well, before it does.
pub fn also_allow(image: &Place, role: Role, file: &Path) {
    let end = record::also_allow(&image.at(), role, file);
    end.unwrap_or_else(|error| unrecorded(image, file, &error));
}

fn unrecorded(image: &Place, file: &Path, error: &std::io::Error) {
    let file = file.display();
    tracing::warn!(
        "cannot write down that {} may name {file}: {error}; where image and folder are not your \
             own, that is to be named each time",
        image.path().display()
    );
}
