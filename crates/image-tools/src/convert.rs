//! An image copied into another, of any format.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ringtap_image::qcow2::bitmap_directory::flag;
use ringtap_image::qcow2::{self, BitmapChange, BitmapEntry, Crypt, SnapshotName};
use ringtap_image::{
    CacheMode, Container, Format, OpenError, OpenOptions, Place, is_store, on_a_ring, open_on,
    record,
};
use ringtap_stores::rbd;
use ringtap_vbd::{Copy, Progress, Vbd, Workers, copy};

use crate::create::{Made, Space};
use crate::error::Tried;
use crate::files::same_file;
use crate::map::changes_since;
use crate::measure::open_snapshot;
use crate::opening::{cannot, container};
use crate::unfinished::{Unfinished, finish};
use crate::{
    BackingFile, Doing, Error, FormatOptions, LazySecret, NewImage, Note, Reading, Watcher, chain,
    format_of, format_to_write,
};

/// Bytes read and written at once: what a processor's cache holds where all is in memory, else enough
/// for the file system to find large runs.
const PIECE_IN_MEMORY: usize = 128 << 10;
const PIECE_ON_DISK: usize = 1 << 20;
/// Requests in flight unless told otherwise. Writers to the page cache wait for one another.
const CACHED: usize = 4;
const DIRECT: usize = 16;
/// While one piece is compressed, another is read or written.
pub(crate) const PER_PROCESSOR: usize = 2;

/// What is copied, into what, and how.
#[derive(Clone, Debug)]
pub struct Convert {
    /// The images that are read, one after the other as one disk.
    pub sources: Vec<PathBuf>,
    /// Their format, if that is named.
    pub format: Option<Format>,
    /// The one source as it was at this snapshot inside it.
    pub snapshot: Option<SnapshotName>,
    /// Only these bytes of the one source.
    pub part: Option<Range<u64>>,
    /// Only what the one source, a raw image of Ceph, has had written since this snapshot of it: the target or what lies below it is
    /// what it was then.
    pub since: Option<String>,
    /// How host caching is used for them.
    pub source_cache: CacheMode,
    /// How they are opened.
    pub reading: Reading,
    /// The image that is written.
    pub target: PathBuf,
    /// What it is, or is to be.
    pub into: Target,
    /// How host caching is used for it.
    pub cache: CacheMode,
    /// Write to it though it is recorded as of another format.
    pub force_format: bool,
    /// Which bitmaps inside the one source are copied too.
    pub bitmaps: Bitmaps,
    /// Data is compressed; qcow2 only.
    pub compress: bool,
    /// Zeros found in so many consecutive bytes become holes; 0 keeps all as it is found.
    pub sparse: usize,
    /// Requests in flight at once; none: as suits the target.
    pub parallel: Option<usize>,
    /// The most bytes to read in a second.
    pub rate: Option<u64>,
    /// Go on with zeros where the source cannot be read; [`Note::Lost`] tells.
    pub salvage: bool,
}

/// What is written to.
#[derive(Clone, Debug)]
pub enum Target {
    /// An image that is made; what is there is lost.
    New(NewImage),
    /// One that is there.
    Existing {
        /// Its format, if that is named.
        format: Option<Format>,
        /// What opens it.
        secret: Option<LazySecret>,
        /// What it is known to read as where nothing is written: only what differs from that is copied.
        backing: Option<BackingFile>,
        /// It is known to read as zeros.
        zeroed: bool,
    },
}

impl Target {
    fn format(&self) -> Format {
        match self {
            Target::New(new) => new.options.format(),
            Target::Existing { format, backing, .. } => format.unwrap_or(match backing {
                Some(_) => Format::Qcow2,
                None => Format::Raw,
            }),
        }
    }

    fn backing(&self) -> Option<&BackingFile> {
        match self {
            Target::New(new) => new.backing.as_ref(),
            Target::Existing { backing, .. } => backing.as_ref(),
        }
    }

    fn secret(&self) -> Option<&LazySecret> {
        match self {
            Target::New(new) => new.secret.as_ref(),
            Target::Existing { secret, .. } => secret.as_ref(),
        }
    }

    fn is_new(&self) -> bool {
        matches!(self, Target::New(_))
    }
}

/// Which bitmaps are copied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Bitmaps {
    /// None.
    #[default]
    Leave,
    /// All; one that was not saved when the source was last used is an error.
    All,
    /// Those that were saved.
    Saved,
}

impl Convert {
    /// All of one image into another, as it is usual.
    pub fn new(source: PathBuf, target: PathBuf, into: Target) -> Convert {
        Convert {
            sources: vec![source],
            format: None,
            snapshot: None,
            part: None,
            since: None,
            source_cache: CacheMode::Writeback,
            reading: Reading::default(),
            target,
            into,
            cache: CacheMode::Unsafe,
            force_format: false,
            bitmaps: Bitmaps::Leave,
            compress: false,
            sparse: 4096,
            parallel: None,
            rate: None,
            salvage: false,
        }
    }

    /// What changed since a snapshot is told of the bytes that the cluster holds.
    fn source_format(&self) -> Option<Format> {
        if self.since.is_some() { Some(Format::Raw) } else { self.format }
    }

    fn snapshot_of(&self, snapshot: &SnapshotName) -> Result<Vbd, Error> {
        let [source] = &self.sources[..] else {
            return Err(Error::usage("-l reads one source: convert several one by one"));
        };
        open_snapshot(source, self.format, snapshot, self.source_cache, &self.reading)
    }
}

/// Copy. The target is stable when this returns.
///
/// # Errors
///
/// What is asked for does not go together, an image cannot be opened, made, read or written, or the work was stopped
/// ([`Error::Stopped`]). A target that was made and is stopped is removed again; any other that is not whole says so to whoever opens it,
/// as far as its file system lets it be noted, and the error tells.
pub fn convert(job: &Convert, watch: &Watcher) -> Result<(), Error> {
    let (target, sources) = (&job.target, &job.sources);
    let format = job.into.format();
    if job.compress && format != Format::Qcow2 {
        let why = format!("{format} images cannot be compressed: use -O qcow2, or leave -c out");
        return Err(Error::Usage(why));
    }
    if sources.iter().any(|source| same_file(source, target)) {
        return Err(read_and_overwritten(target));
    }
    for source in sources.iter().filter(|source| !is_store(source)) {
        // What cannot be found out here is said where it is opened.
        let files = format_of(source, job.format)
            .and_then(|(format, _)| chain::files(source, Some(format), &job.reading.names));
        if files.is_ok_and(|files| files.iter().any(|file| same_file(file, target))) {
            return Err(read_and_overwritten(target));
        }
    }
    let parts = parts(job)?;
    let bitmaps = if job.bitmaps == Bitmaps::Leave { vec![] } else { bitmaps_of(job, format)? };
    let from: Vec<Vbd> = match &job.snapshot {
        Some(snapshot) => vec![job.snapshot_of(snapshot)?],
        None => sources
            .iter()
            .map(|path| job.reading.open(path, job.source_format(), job.source_cache, watch))
            .collect::<Result<_, _>>()?,
    };
    let size = match &job.part {
        Some(part) => part.end - part.start,
        None => from.iter().map(|disk| disk.size()).sum(),
    };
    if let Some(backing) = job.into.backing() {
        backing.fits_below(format)?;
    }
    // What has not changed is in what lies below already.
    let over = if job.since.is_some() { Over::Nothing } else { over_what(job, watch)? };
    if matches!(over, Over::Image(_)) && from.len() > 1 {
        let why = "several sources make no overlay: convert them into one image first";
        return Err(Error::Usage(why.into()));
    }
    if let Target::New(new) = &job.into {
        will_take_bitmaps(job, new, size, &bitmaps)?;
    }
    let (made, zeroed) = match &job.into {
        Target::Existing { zeroed, .. } => (Made::default(), *zeroed),
        Target::New(new) => {
            let made = make(job, new, size, watch)?;
            let zeroed = match &new.options {
                // What is in a new container is noise.
                FormatOptions::Luks { .. } => false,
                FormatOptions::Raw(_) => is_new_file(target)?,
                // A fixed one on a device has what was there.
                FormatOptions::Vhd { .. } => new.backing.is_none() && is_new_file(target)?,
                FormatOptions::Qcow2 { own, encrypt, .. } => {
                    new.backing.is_none() && reads_as_zeros(own, encrypt.is_some())
                }
            };
            (made, zeroed)
        }
    };
    let compress = || job.compress.then(|| cluster_size(target)).transpose();
    // Before it is opened: whoever opens it to write marks the bitmaps that it has.
    let opened = takes_bitmaps(job, &bitmaps)
        .and_then(|()| open_target(job, format, size))
        .and_then(|to| Ok((to, compress()?)));
    if opened.is_err() && job.into.is_new() {
        return opened.map(drop).doing(|| Unfinished::begin(target).give_up(&made));
    }
    let ((to, place, format), compress) = opened?;
    if let Target::New(new) = &job.into {
        to.keep_space(has_its_space(&new.options));
    }
    let begun = Unfinished::begin(target);
    let written = write(job, from, &parts, &to, over, zeroed, compress, watch);
    if job.into.is_new() && written.as_ref().is_err_and(Error::is_stopped) {
        drop(to);
        return written.doing(|| begun.give_up(&made));
    }
    written
        .doing(|| format!("cannot convert to {}", target.display()))
        .doing(|| begun.message())?;
    finish(to, target)?;
    if !bitmaps.is_empty() {
        copy_bitmaps(job, bitmaps)
            .doing(|| format!("cannot copy bitmaps to {}", target.display()))
            .doing(|| begun.message())?;
    }
    begun.end()?;
    record::confirm_format(&place, format);
    Ok(())
}

fn read_and_overwritten(target: &Path) -> Error {
    Error::Usage(format!("{} would be read and overwritten at once", target.display()))
}

fn make(job: &Convert, new: &NewImage, size: u64, watch: &Watcher) -> Result<Made, Error> {
    let mut new = new.clone();
    new.spares_what_lies_below(&job.target, &job.reading)?;
    if job.compress {
        new.can_be_compressed()?;
    }
    new.size.get_or_insert(size);
    let wanted = new.settle_size(&job.reading, true, watch)?;
    if wanted < size {
        return Err(Error::Refused(format!("size={wanted}: the sources have {size} bytes")));
    }
    let secret = new.secret.as_ref().map(LazySecret::read).transpose()?;
    new.make(&job.target, secret.as_ref())
}

/// Whether what was made there is a file, or as one: all of it was empty.
fn is_new_file(target: &Path) -> Result<bool, Error> {
    if rbd::is_path_of_rbd(target) {
        return Ok(true);
    }
    let facts = target.metadata().tried(|| format!("cannot look at {}", target.display()))?;
    Ok(facts.is_file())
}

/// The bitmaps of the one source that are to be copied.
fn bitmaps_of(job: &Convert, target: Format) -> Result<Vec<BitmapEntry>, Error> {
    let [source] = &job.sources[..] else {
        return Err(Error::usage("--bitmaps reads one source: convert several one by one"));
    };
    let (format, _) = format_of(source, job.format)?;
    for (path, format) in [(source.as_path(), format), (Path::new("the target"), target)] {
        if format != Format::Qcow2 {
            return Err(cannot(path, format, "have no bitmaps: leave --bitmaps out"));
        }
    }
    let (whole, broken): (Vec<_>, Vec<_>) =
        chain::layer(source, Some(format), job.reading.force_share)?
            .bitmaps
            .into_iter()
            .partition(BitmapEntry::is_usable);
    match broken.first() {
        Some(bitmap) if job.bitmaps != Bitmaps::Saved => Err(Error::Refused(format!(
            "bitmap {:?} of {} was not saved when the image was last used: \
             remove it with bitmap --remove, or add --skip-broken-bitmaps",
            bitmap.name,
            source.display()
        ))),
        _ => Ok(whole),
    }
}

/// Whether the image that is to be made can get these bitmaps.
fn will_take_bitmaps(
    job: &Convert,
    new: &NewImage,
    size: u64,
    bitmaps: &[BitmapEntry],
) -> Result<(), Error> {
    let FormatOptions::Qcow2 { own, .. } = &new.options else { return Ok(()) };
    if own.version < 3 && !bitmaps.is_empty() {
        let why = "version 2 has none: make it with compat=1.1, or leave --bitmaps out";
        return Err(without_bitmaps(job, why));
    }
    let size = new.size.unwrap_or(size);
    have_one_size(job, size.checked_next_multiple_of(512).unwrap_or(size), bitmaps)
}

/// Whether the target, which is there, can get these bitmaps.
fn takes_bitmaps(job: &Convert, bitmaps: &[BitmapEntry]) -> Result<(), Error> {
    if bitmaps.is_empty() {
        return Ok(());
    }
    let to = chain::layer(&*job.target, Some(Format::Qcow2), true)?;
    let Some(new) = &to.header else { return Ok(()) };
    if new.version < 3 {
        let why = "version 2 has none: amend it to compat=1.1, or leave --bitmaps out";
        return Err(without_bitmaps(job, why));
    }
    have_one_size(job, new.size, bitmaps)?;
    let taken = bitmaps.iter().find(|it| to.bitmaps.iter().any(|there| there.name == it.name));
    taken.map_or(Ok(()), |bitmap| {
        let why = format!(
            "it has a bitmap {:?} already: remove that with bitmap --remove, or leave --bitmaps out",
            bitmap.name
        );
        Err(without_bitmaps(job, &why))
    })
}

/// That the target's disk has as many bytes as the one that the bitmaps are of.
fn have_one_size(job: &Convert, size: u64, bitmaps: &[BitmapEntry]) -> Result<(), Error> {
    let (Some(source), false) = (job.sources.first(), bitmaps.is_empty()) else { return Ok(()) };
    let from = chain::layer(&**source, Some(Format::Qcow2), true)?;
    match from.header.filter(|old| old.size != size) {
        None => Ok(()),
        Some(old) => {
            let why = format!(
                "its disk has {size} bytes, and that of {} has {}: take one of that size, or leave --bitmaps out",
                source.display(),
                old.size
            );
            Err(without_bitmaps(job, &why))
        }
    }
}

fn without_bitmaps(job: &Convert, why: &str) -> Error {
    Error::Refused(format!("bitmaps cannot be copied to {}: {why}", job.target.display()))
}

/// Copy bitmaps into an image that is whole but for them, all at once.
fn copy_bitmaps(job: &Convert, bitmaps: Vec<BitmapEntry>) -> Result<(), Error> {
    let from = container(&job.sources[0], job.reading.force_share)?;
    let options = OpenOptions { cache: CacheMode::Writeback, ..OpenOptions::default() };
    let to = Container::open(&job.target, &options)?;
    Ok(on_a_ring(&job.target, |io| async move {
        let mut changes = vec![];
        for bitmap in bitmaps {
            let bits = qcow2::load_bitmap(&io, &from, &bitmap.name).await?;
            let (name, granularity) = (bitmap.name, Some(1 << bitmap.granularity_bits));
            changes.push(BitmapChange::Add { name: name.clone(), granularity });
            changes.push(BitmapChange::Merge { into: name.clone(), from: Arc::new(bits) });
            if bitmap.flags & flag::AUTO == 0 {
                changes.push(BitmapChange::Disable(name));
            }
        }
        qcow2::change_bitmaps(&io, &to, &changes).await
    })??)
}

/// Bytes of a cluster of a qcow2 image, which must be one that can hold compressed ones.
pub(crate) fn cluster_size(target: &Path) -> Result<usize, Error> {
    let header = chain::layer(target, Some(Format::Qcow2), true)?.header;
    let header = header.filter(|it| it.crypt == Crypt::None && it.data_file().is_none());
    match header {
        Some(header) => Ok(header.cluster_size() as usize),
        None => {
            let why = "images that are encrypted or have an external data file hold nothing \
                       compressed: leave -c out";
            Err(Error::Usage(format!("{}: {why}", target.display())))
        }
    }
}

/// Whether a file's bytes are in memory (tmpfs).
fn in_memory(path: &Path) -> bool {
    const TMPFS: u64 = 0x0102_1994;
    path.is_file() && rustix::fs::statfs(path).is_ok_and(|facts| facts.f_type as u64 == TMPFS)
}

/// With `since` what is copied: ranges of the source, in order.
fn parts(job: &Convert) -> Result<Vec<Range<u64>>, Error> {
    let Some(since) = &job.since else { return Ok(vec![]) };
    let [source] = &job.sources[..] else {
        return Err(Error::usage("--since reads one source"));
    };
    if job.into.is_new() && job.into.backing().is_none() {
        return Err(Error::usage(
            "--since copies only what has changed: name the copy of then, -B FILE for an overlay upon it, or with -n as the target",
        ));
    }
    // Where zeros are taken for granted, what has become zeros since would stay as it was.
    if let Target::Existing { zeroed: true, .. } = job.into {
        return Err(Error::usage("--since brings a copy up to date: leave --target-is-zero out"));
    }
    if job.compress || job.part.is_some() {
        return Err(Error::usage("--since copies changes as they are: leave the other out"));
    }
    let changes = changes_since(source, job.format, since)?;
    Ok(changes.iter().map(|change| change.start..change.start + change.length).collect())
}

/// What shows through where an overlay holds nothing.
enum Over {
    /// Nothing: all must be copied.
    Nothing,
    /// The source's own layer at this depth: what lies above it must be copied.
    Layer(u32),
    /// An image: what differs from it must be copied.
    Image(Vbd),
}

fn over_what(job: &Convert, watch: &Watcher) -> Result<Over, Error> {
    let Some(backing) = job.into.backing() else { return Ok(Over::Nothing) };
    if let [source] = &job.sources[..] {
        let (format, _) = format_of(source, job.format)?;
        let layers = chain::layers(source, Some(format), true, &job.reading.names)?;
        let depth = layers.iter().position(|layer| {
            same_file(&layer.path, &backing.path) && layer.format == backing.format
        });
        if let Some(depth) = depth.filter(|depth| *depth > 0) {
            return Ok(Over::Layer(depth as u32));
        }
    }
    let format = Some(backing.format);
    let secret = either(job.reading.secret.as_ref(), job.into.secret());
    let reading = Reading { secret, ..job.reading.clone() };
    Ok(Over::Image(reading.open(&backing.path, format, job.source_cache, watch)?))
}

/// What lies below the target may be of the images that are read, or the target's own.
fn either(one: Option<&LazySecret>, other: Option<&LazySecret>) -> Option<LazySecret> {
    LazySecret::any([one, other].into_iter().flatten().cloned().collect())
}

/// The target, which must have at least so many bytes.
fn open_target(job: &Convert, format: Format, size: u64) -> Result<(Vbd, Place, Format), Error> {
    let target = &job.target;
    let (format, secret, is_new) = match &job.into {
        // What is there already may be of another format than is to be written.
        Target::Existing { format, secret, .. } => {
            (format_to_write(target, *format)?, secret, false)
        }
        Target::New(new) => (format, &new.secret, true),
    };
    // What was made here is what it was to be, and made anew.
    let force_format = job.force_format || is_new;
    let secret = match job.into.backing() {
        Some(_) => either(secret.as_ref(), job.reading.secret.as_ref()),
        None => secret.clone(),
    };
    let options = OpenOptions {
        secret: secret.as_ref().map(LazySecret::read).transpose()?,
        no_restart_log: is_new,
        ..job.reading.options_to_write(format, job.cache, force_format)?
    };
    let failed = |source| OpenError::Os { what: "open", path: target.to_owned(), source };
    let place = Place::hold(target).map_err(failed)?;
    let opened = place.clone();
    let image = on_a_ring(target, |io| async move { open_on(&io, &opened, &options).await })??;
    let to = Vbd::new(image, job.cache);
    if to.size() < size {
        let (name, has) = (target.display(), to.size());
        return Err(Error::Refused(format!("{name} has {has} bytes, and the sources {size}")));
    }
    Ok((to, place, format))
}

/// Whether a new image reads as zeros: what is allocated at once reads as noise where it is encrypted, and as what was there in
/// an external data file.
fn reads_as_zeros(new: &qcow2::CreateOptions, encrypted: bool) -> bool {
    let allocated = new.preallocation != qcow2::Preallocation::Off || new.data_file_raw;
    !allocated || !(encrypted || new.data_file.is_some())
}

/// Whether a new image has its space from the beginning, which holes of the source do not give back.
fn has_its_space(new: &FormatOptions) -> bool {
    match new {
        FormatOptions::Raw(space) | FormatOptions::Luks { space, .. } => *space != Space::Off,
        FormatOptions::Qcow2 { own, .. } => own.preallocation != qcow2::Preallocation::Off,
        FormatOptions::Vhd { fixed, .. } => *fixed,
    }
}

#[allow(clippy::too_many_arguments)] // each is another thing that was found out before
fn write(
    job: &Convert,
    from: Vec<Vbd>,
    parts: &[Range<u64>],
    to: &Vbd,
    over: Over,
    zeroed: bool,
    compress: Option<usize>,
    watch: &Watcher,
) -> Result<(), Error> {
    let progress = Arc::new(Progress::default());
    watch.begins(from.iter().map(|disk| disk.size()).sum(), &progress);
    let (layers, base) = match over {
        Over::Nothing => (0..u32::MAX, None),
        Over::Layer(depth) => (0..depth, None),
        Over::Image(base) => (0..u32::MAX, Some(base)),
    };
    let usual = if job.cache.direct() { DIRECT } else { CACHED };
    let workers = match (compress, job.parallel) {
        (Some(_), None) => Workers::of_all(PER_PROCESSOR),
        (_, requests) => Workers::of(requests.unwrap_or(usual)),
    };
    let piece = if in_memory(&job.target) { PIECE_IN_MEMORY } else { PIECE_ON_DISK };
    let piece = piece.max(compress.unwrap_or(0));
    let mut to_offset = 0;
    for from in from {
        let range = job.part.clone().unwrap_or(0..from.size());
        let size = range.end - range.start;
        let watch = watch.clone();
        let lost = move |offset, len, error| watch.note(&Note::Lost { offset, len, error });
        let job = Copy {
            range,
            only: job.since.is_some().then(|| parts.to_vec()),
            to_offset,
            layers: layers.clone(),
            unless_in: base.as_ref().map(|base| base.disk().clone()),
            zeroed,
            sparse: job.sparse,
            piece,
            compress,
            rate: job.rate,
            salvage: if job.salvage { Some(Box::new(lost)) } else { None },
            workers,
            ..Copy::new(from, to.fork())
        };
        copy(job, &progress)?;
        to_offset += size;
    }
    Ok(())
}
