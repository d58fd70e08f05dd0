//! What an image is, what lies below it, and who uses it.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use ringtap_image::qcow2::header::incompatible;
use ringtap_image::qcow2::{BitmapEntry, Crypt, Header, Snapshot};
use ringtap_image::{
    CacheMode, Format, LeftBehind, OpenError, is_store, luks, on_a_ring, open, probe, record, vhdx,
    vmdk,
};
use rustix::fs::{AtFlags, CWD, StatxFlags};

use crate::chain::{self, Layer};
use crate::error::Tried;
use crate::files::is_null;
use crate::{Error, Known, Reading};

const STATX_DIOALIGN: StatxFlags = StatxFlags::from_bits_retain(0x2000);

/// The facts of one image of a chain.
#[derive(Clone, Debug)]
pub struct Info {
    /// The image, as it was named, or as the one above names it.
    pub path: PathBuf,
    /// Its format.
    pub format: Format,
    /// How that is known.
    pub known: Known,
    /// Bytes the guest sees.
    pub size: u64,
    /// Bytes taken where it lies; none where that is no file.
    pub taken: Option<u64>,
    /// Bytes of a cluster or block, where there are such.
    pub cluster_size: Option<u64>,
    /// Whether its data is encrypted.
    pub encrypted: bool,
    /// The header of the LUKS inside it, if it is qcow2 and has one that can be read.
    pub inside: Option<Box<luks::Header>>,
    /// It says that it was not closed in order.
    pub dirty: bool,
    /// What it names as lying below it.
    pub backing: Option<Below>,
    /// The snapshots inside it.
    pub snapshots: Vec<Snapshot>,
    /// The bitmaps inside it.
    pub bitmaps: Vec<BitmapEntry>,
    /// The files that it consists of, but for its data file.
    pub children: Vec<Child>,
    /// What belongs to its format.
    pub specific: Specific,
    /// What a guest sees as block sizes, where it was opened: logical and physical, in bytes.
    pub block_sizes: Option<(u32, u32)>,
    /// What O_DIRECT asks for; none where the file system does not do it, or does not tell.
    pub direct_io: Option<Alignment>,
    /// Who has it.
    pub lock: Lock,
    /// What a killed server left, that is not in the image.
    pub restart_log: Option<LeftBehind>,
    /// The verb that began to write it and has not finished.
    pub unfinished: Option<String>,
    /// The image in which its disk goes on.
    pub successor: Option<PathBuf>,
    /// The format whose signature the file bears, where that is not its format.
    pub looks_like: Option<&'static str>,
}

/// What an image names as lying below it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Below {
    /// The name in the image.
    pub name: String,
    /// Where that is.
    pub path: PathBuf,
    /// Its format, as the image says it.
    pub format: Option<String>,
}

/// What belongs to a format.
#[derive(Clone, Debug)]
pub enum Specific {
    /// Nothing more.
    None,
    /// The header of a qcow2 image.
    Qcow2(Box<Header>),
    /// The header of a LUKS container.
    Luks(Box<luks::Header>),
    /// What a VMDK says of itself.
    Vmdk(vmdk::Facts),
}

/// A file that an image consists of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Child {
    /// What it is to the image: `file`, or `extents.N`.
    pub name: String,
    /// The file.
    pub path: PathBuf,
    /// Bytes of it.
    pub len: u64,
    /// Bytes taken where it lies; none where that is no file.
    pub taken: Option<u64>,
}

impl Child {
    /// By its name, and where it was found.
    fn of(name: String, path: &Path, found: &Path, len: u64) -> Child {
        let taken = taken(found);
        Child { name, path: path.to_owned(), len: len.next_multiple_of(512), taken }
    }

    /// QEMU's name of what gives access to it.
    pub fn driver(&self) -> &str {
        if is_store(&self.path) {
            let scheme = self.path.to_str().and_then(|name| name.split(':').next());
            return scheme.map_or("", |scheme| scheme.split('+').next().unwrap_or_default());
        }
        match fs::metadata(&self.path).map(|it| it.file_type().is_block_device()) {
            Ok(true) => "host_device",
            _ => "file",
        }
    }
}

fn taken(path: &Path) -> Option<u64> {
    let found = fs::metadata(path).ok().filter(fs::Metadata::is_file)?;
    Some(found.blocks() * 512)
}

/// What O_DIRECT asks for, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alignment {
    /// Of offsets and lengths.
    pub offset: u64,
    /// Of memory.
    pub memory: u64,
}

/// Who has an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lock {
    /// No program writes to it.
    Free,
    /// It lies on a server, which does not tell.
    Unknown,
    /// Another program has it.
    Held {
        /// Which.
        by: String,
        /// For what.
        what: &'static str,
    },
}

/// The facts of an image. It may be in use.
///
/// # Errors
///
/// It cannot be opened, or its header cannot be read.
pub fn info(path: &Path, named: Option<Format>, reading: &Reading) -> Result<Info, Error> {
    let layer = chain::top(path, named, reading.force_share, &reading.names)?;
    if layer.backing.is_some() {
        chain::warn_of_mixture(path, named, &reading.names);
    }
    look(&layer, reading)
}

/// The facts of an image and of all that lie below it, from the top down.
///
/// # Errors
///
/// Those of [`info`]; one of them may not be opened as what another names; they lie in a circle.
pub fn chain(path: &Path, named: Option<Format>, reading: &Reading) -> Result<Vec<Info>, Error> {
    let layers = chain::layers(path, named, reading.force_share, &reading.names)?;
    chain::warn_of_mixture_in(&layers);
    layers.iter().map(|layer| look(layer, reading)).collect()
}

fn look(layer: &Layer, reading: &Reading) -> Result<Info, Error> {
    let path = &layer.path;
    // Of one that somebody changes that says nothing.
    if let Some(why) = layer.unreadable_snapshots.as_ref().filter(|_| layer.in_use.is_none()) {
        return Err(Error::Refused(why.clone()));
    }
    let mut facts = Info {
        path: path.clone(),
        format: layer.format,
        known: layer.known,
        size: 0,
        taken: None,
        cluster_size: None,
        encrypted: false,
        inside: layer.inside.clone().map(Box::new),
        dirty: false,
        backing: layer.backing.as_ref().map(|it| Below {
            name: it.name.clone(),
            path: it.path.clone(),
            format: it.format.clone(),
        }),
        snapshots: vec![],
        bitmaps: vec![],
        children: vec![],
        specific: Specific::None,
        block_sizes: None,
        direct_io: None,
        lock: match &layer.in_use {
            Some((by, what)) => Lock::Held { by: by.clone(), what },
            None if is_store(path) => Lock::Unknown,
            None => Lock::Free,
        },
        restart_log: layer.left.clone(),
        unfinished: probe::unfinished_work(path),
        successor: record::successor(path),
        looks_like: None,
    };
    if let Some(header) = &layer.header {
        facts.size = header.size;
        facts.cluster_size = Some(header.cluster_size());
        facts.encrypted = header.crypt != Crypt::None;
        facts.dirty = header.has(incompatible::DIRTY);
        facts.snapshots = layer.snapshots.clone();
        facts.bitmaps = layer.bitmaps.clone();
        facts.specific = Specific::Qcow2(Box::new(header.clone()));
    } else {
        if let Some(header) = &layer.luks {
            let rest = layer.len.saturating_sub(header.payload_offset);
            facts.size = header.payload_len.unwrap_or(rest) / 512 * 512;
            facts.encrypted = true;
            facts.specific = Specific::Luks(Box::new(header.clone()));
        }
        if let Some(vhd) = &layer.vhd {
            facts.size = vhd.size;
            facts.cluster_size = vhd.block_size.map(u64::from);
        }
        // A container is opened only with its secret, an image only over what lies below it.
        let closed = layer.luks.is_some() && reading.secret.is_none();
        if !closed && layer.backing.is_none() {
            facts.open(layer, reading)?;
        }
    }
    if is_null(path) {
        return Ok(facts);
    }
    if let Specific::Vmdk(vmdk) = &facts.specific {
        let others = vmdk.extents.iter().enumerate();
        let others = others.filter(|(_, it)| it.path.as_ref().is_some_and(|other| other != path));
        let child = |(nth, it): (usize, &vmdk::ExtentFacts)| {
            let [path, found] =
                [&it.path, &it.found].map(|it| it.as_deref().unwrap_or(Path::new("")));
            Child::of(format!("extents.{nth}"), path, found, it.file_len)
        };
        facts.children = others.map(child).collect();
    }
    facts.children.push(Child::of("file".into(), path, path, layer.len));
    if fs::metadata(path).is_ok() {
        facts.taken = taken(path).map(|_| facts.children.iter().filter_map(|it| it.taken).sum());
        let signature = probe::signature(path).unwrap_or_default();
        facts.looks_like = signature.filter(|name| *name != facts.format.name());
    }
    facts.direct_io = known_alignment(path).or(facts.direct_io);
    Ok(facts)
}

/// What the kernel says that O_DIRECT asks for (Linux 6.1; not every file system tells).
fn known_alignment(path: &Path) -> Option<Alignment> {
    let facts = rustix::fs::statx(CWD, path, AtFlags::empty(), STATX_DIOALIGN).ok()?;
    let told = facts.stx_mask & STATX_DIOALIGN.bits() != 0 && facts.stx_dio_offset_align != 0;
    told.then(|| Alignment {
        offset: facts.stx_dio_offset_align.into(),
        memory: facts.stx_dio_mem_align.into(),
    })
}

impl Info {
    /// Whether it is no file but `null:SIZE`.
    pub fn is_null(&self) -> bool {
        is_null(&self.path)
    }

    /// What opening it tells.
    fn open(&mut self, layer: &Layer, reading: &Reading) -> Result<(), Error> {
        let mut options = reading.options(layer.format, CacheMode::None)?;
        (options.force_share, options.heed_log) = (true, false);
        let mut image = open(&layer.path, &options);
        let mut direct = !is_null(&layer.path);
        if matches!(&image, Err(OpenError::Os { source, .. }) if source.kind() == io::ErrorKind::InvalidInput)
        {
            direct = false;
            options.cache = CacheMode::Writeback;
            image = open(&layer.path, &options);
        }
        if let (Err(OpenError::Unfinished { .. }), Format::Raw) = (&image, layer.format) {
            let found = fs::metadata(&layer.path);
            let found = found.tried(|| format!("cannot look at {}", layer.path.display()))?;
            self.size = found.len().next_multiple_of(512);
            return Ok(());
        }
        let image = image?;
        let place = layer.place.clone();
        match layer.format {
            Format::Vmdk if !is_store(&layer.path) => {
                let found = on_a_ring(&layer.path, |io| async move {
                    vmdk::facts(&io, &place, &options).await
                })??;
                self.cluster_size = found.as_ref().and_then(|it| it.extents.first()?.grain);
                self.specific = found.map_or(Specific::None, Specific::Vmdk);
            }
            Format::Vhdx => {
                self.cluster_size = Some(on_a_ring(&layer.path, |io| async move {
                    vhdx::block_size(&io, &place, &options).await
                })??);
            }
            _ => {}
        }
        let info = image.info();
        self.size = info.size;
        self.block_sizes = Some((info.logical_block_size, info.physical_block_size));
        self.direct_io = direct.then_some(Alignment {
            offset: info.request_alignment,
            memory: info.memory_alignment as u64,
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sparse_image_takes_less_than_it_shows() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("disk");
        fs::File::create(&path)
            .and_then(|file| file.set_len((1 << 30) + 7))
            .expect("a sparse file");
        let facts = info(&path, None, &Reading::default()).expect("facts");
        assert_eq!(facts.size, (1 << 30) + 512);
        assert!(facts.taken.expect("a file") < 1 << 20);
        assert_eq!((facts.lock, facts.known), (Lock::Free, Known::Probed));
    }
}
