//! `ringtap convert`: an image copied into another, of any format.

use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use clap::Args;
use ringtap_daemon::Error as Fault;
use ringtap_image::qcow2::bitmap_directory::flag;
use ringtap_image::qcow2::{self, BitmapChange, BitmapEntry, Crypt, SnapshotName};
use ringtap_image::{
    CacheMode, Container, Format, OpenError, OpenOptions, Place, on_a_ring, open, open_on, probe,
    record,
};
use ringtap_vbd::{Copy, Progress, Vbd, Workers, copy};

use super::bar::{Bar, Talk};
use super::source::{Force, Sources, format_of, format_to_write, open_source};
use super::stop::{Signals, Stopped};
use super::target::{Made, NewImage, Recipe};
use super::{chain, offline};
use crate::names::{self, CacheName};

/// Bytes read and written at once: what a processor's cache holds where all is in memory, else enough
/// for the file system to find large runs.
const PIECE_IN_MEMORY: usize = 128 << 10;
const PIECE_ON_DISK: usize = 1 << 20;
/// Requests in flight unless told otherwise. Writers to the page cache wait for one another.
const CACHED: usize = 4;
const DIRECT: usize = 16;
/// While one piece is compressed, another is read or written.
const PER_PROCESSOR: usize = 2;

/// What `ringtap convert` is told.
#[derive(Debug, Args)]
pub(crate) struct ConvertArgs {
    /// The images to read, one after the other as one disk; the last FILE is the one to write
    #[arg(value_name = "FILE", num_args = 1.., required_unless_present = "options")]
    pub(crate) files: Vec<PathBuf>,

    /// Format of the sources [default: as written down, else by their marks]
    #[arg(
        short,
        long,
        value_parser = names::format(),
        value_name = "FORMAT",
        hide_possible_values = true
    )]
    pub(crate) format: Option<Format>,

    /// Format of the target [default: raw; qcow2 with -B]
    #[arg(
        short = 'O',
        long,
        value_parser = names::format(),
        value_name = "FORMAT",
        hide_possible_values = true
    )]
    pub(crate) output_format: Option<Format>,

    #[command(flatten)]
    pub(crate) new: NewImage,

    /// Make an overlay over this image, with only what differs from it. Relative to the target's folder
    #[arg(short = 'B', long, visible_short_alias = 'b', value_name = "FILE")]
    pub(crate) backing: Option<String>,

    /// Compress what is written; qcow2 only, with -o compression_type=zlib|zstd
    #[arg(short, long)]
    pub(crate) compress: bool,

    /// Read the source as it was at this snapshot inside it: its name or ID, or
    /// snapshot.name=NAME,snapshot.id=ID
    #[arg(short = 'l', long, value_name = "SNAPSHOT")]
    pub(crate) snapshot: Option<SnapshotName>,

    /// Copy the bitmaps inside the source too; those not saved are an error
    #[arg(long, conflicts_with = "snapshot")]
    pub(crate) bitmaps: bool,

    /// With --bitmaps: leave out those that were not saved when the source was last used
    #[arg(long, requires = "bitmaps")]
    pub(crate) skip_broken_bitmaps: bool,

    /// Write to a target that is there already
    #[arg(short = 'n', long)]
    pub(crate) no_create: bool,

    /// With -n: the target is known to read as zeros
    #[arg(long, requires = "no_create")]
    pub(crate) target_is_zero: bool,

    /// Leave out zeros of at least so many bytes, in holes; 0: keep every byte as data
    #[arg(short = 'S', long, value_name = "SIZE", value_parser = names::size, default_value = "4k")]
    pub(crate) sparse: u64,

    /// Requests in flight at once [default: 4 where the target's page cache is used, else 16]
    #[arg(short = 'm', long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) parallel: Option<u16>,

    /// Read no more than so many bytes in a second
    #[arg(short, long, value_name = "SIZE", value_parser = names::size)]
    pub(crate) rate: Option<u64>,

    /// Go on where the source cannot be read, with zeros instead; what was lost is told
    #[arg(long)]
    pub(crate) salvage: bool,

    /// Taken for the sake of qemu-img: how bytes are copied is for Ringtap to choose
    #[arg(short = 'C', hide = true)]
    pub(crate) copy_range: bool,

    /// Taken for the sake of qemu-img: writes go out of order anyway, within a few MiB
    #[arg(short = 'W', long)]
    pub(crate) out_of_order: bool,

    /// How host caching is used for the target
    #[arg(short = 't', long, value_enum, value_name = "MODE", default_value = "unsafe")]
    pub(crate) cache: CacheName,

    /// How host caching is used for the sources
    #[arg(short = 'T', long, value_enum, value_name = "MODE", default_value = "writeback")]
    pub(crate) source_cache: CacheName,

    #[command(flatten)]
    pub(crate) talk: Talk,

    #[command(flatten)]
    pub(crate) sources: Sources,

    #[command(flatten)]
    pub(crate) force: Force,

    /// Only these bytes of the one source.
    #[arg(skip)]
    pub(crate) part: Option<Range<u64>>,
}

pub(crate) fn run(args: &ConvertArgs) -> anyhow::Result<ExitCode> {
    let format = args.output_format.unwrap_or(match args.backing {
        Some(_) => Format::Qcow2,
        None => Format::Raw,
    });
    if let Some(text) = args.new.help_wanted(format) {
        print!("{text}");
        return Ok(ExitCode::SUCCESS);
    }
    let Some((target, sources)) = args.files.split_last().filter(|(_, rest)| !rest.is_empty())
    else {
        return Err(Fault::Usage("name the image to read and the image to write".into()).into());
    };
    if args.compress && format != Format::Qcow2 {
        let why = format!("{format} images cannot be compressed: use -O qcow2, or leave -c out");
        return Err(Fault::Usage(why).into());
    }
    if sources.iter().any(|source| same_file(source, target)) {
        let why = format!("{} would be read and overwritten at once", target.display());
        return Err(Fault::Usage(why).into());
    }
    let bitmaps = if args.bitmaps { bitmaps_of(args, sources, format)? } else { vec![] };
    let cache = CacheMode::from(args.source_cache);
    let from: Vec<Vbd> = match &args.snapshot {
        Some(snapshot) => vec![open_snapshot(args, sources, snapshot)?],
        None => sources
            .iter()
            .map(|path| open_source(path, args.format, cache, &args.sources))
            .collect::<anyhow::Result<_>>()?,
    };
    let size = match &args.part {
        Some(part) => part.end - part.start,
        None => from.iter().map(|vbd| vbd.size()).sum(),
    };

    let mut recipe = args.new.recipe(target, Some(format), args.backing.as_deref())?;
    let over = over_what(args, sources, &recipe)?;
    if args.compress && !args.no_create {
        recipe.can_be_compressed()?;
    }
    let mut made = Made::default();
    if !args.no_create {
        recipe.size.get_or_insert(size);
        let wanted = recipe.settle_size(&args.sources, true)?;
        ensure!(wanted >= size, "size={wanted}: the sources have {size} bytes");
        made = recipe.make(target, args.new.secret()?.as_ref())?;
    }
    let zeroed = if args.no_create {
        args.target_is_zero
    } else {
        match format {
            // What is in a new container is noise.
            Format::Luks => false,
            Format::Raw => is_new_file(target)?,
            // A fixed one on a device has what was there.
            Format::Vhd => recipe.backing.is_none() && is_new_file(target)?,
            _ => recipe.backing.is_none(),
        }
    };
    let (to, place, format) = open_target(args, target, format)?;
    ensure!(
        to.size() >= size,
        "{} has {} bytes, and the sources {size}",
        target.display(),
        to.size()
    );
    let begun = Unfinished::begin(target);
    let compress = if args.compress { Some(cluster_size(target)?) } else { None };
    let written = write(args, from, &to, over, zeroed, in_memory(target), compress);
    let stopped = written.as_ref().is_err_and(|error| error.is::<Stopped>());
    if stopped && !args.no_create {
        return written.map(|()| ExitCode::SUCCESS).with_context(|| begun.give_up(to, &made));
    }
    written
        .with_context(|| format!("cannot convert to {}", target.display()))
        .with_context(|| begun.message())?;
    finish(to, target)?;
    if !bitmaps.is_empty() {
        copy_bitmaps(args, &sources[0], target, bitmaps)
            .with_context(|| format!("cannot copy bitmaps to {}", target.display()))
            .with_context(|| begun.message())?;
    }
    begun.end()?;
    record::confirm_format(&place, format);
    Ok(ExitCode::SUCCESS)
}

/// Whether what was made there is a file, or as one: all of it was empty.
fn is_new_file(target: &Path) -> anyhow::Result<bool> {
    Ok(ringtap_stores::rbd::is_path_of_rbd(target) || target.metadata()?.is_file())
}

/// The disk of the one source, as it was at a snapshot.
fn open_snapshot(
    args: &ConvertArgs,
    sources: &[PathBuf],
    snapshot: &SnapshotName,
) -> anyhow::Result<Vbd> {
    let [source] = sources else {
        let why = "-l reads one source: convert several one by one";
        return Err(Fault::Usage(why.into()).into());
    };
    let (format, _) = format_of(source, args.format)?;
    if format != Format::Qcow2 {
        return Err(offline::cannot(source, format, "have no snapshots: leave -l out"));
    }
    let cache = CacheMode::from(args.source_cache);
    let options =
        OpenOptions { snapshot: Some(snapshot.clone()), ..args.sources.options(format, cache)? };
    Ok(Vbd::new(open(source, &options)?, cache))
}

/// The bitmaps of the one source that are to be copied.
fn bitmaps_of(
    args: &ConvertArgs,
    sources: &[PathBuf],
    target: Format,
) -> anyhow::Result<Vec<BitmapEntry>> {
    let [source] = sources else {
        let why = "--bitmaps reads one source: convert several one by one";
        return Err(Fault::Usage(why.into()).into());
    };
    let (format, _) = format_of(source, args.format)?;
    for (path, format) in [(source.as_path(), format), (Path::new("the target"), target)] {
        if format != Format::Qcow2 {
            return Err(offline::cannot(path, format, "have no bitmaps: leave --bitmaps out"));
        }
    }
    let (whole, broken): (Vec<_>, Vec<_>) =
        chain::layer(source, Some(format), args.sources.force_share)?
            .bitmaps
            .into_iter()
            .partition(BitmapEntry::is_usable);
    if let (Some(bitmap), false) = (broken.first(), args.skip_broken_bitmaps) {
        bail!(
            "bitmap {:?} of {} was not saved when the image was last used: \
             remove it with bitmap --remove, or add --skip-broken-bitmaps",
            bitmap.name,
            source.display()
        );
    }
    Ok(whole)
}

/// Copy bitmaps into an image that is whole but for them, all at once.
fn copy_bitmaps(
    args: &ConvertArgs,
    source: &Path,
    target: &Path,
    bitmaps: Vec<BitmapEntry>,
) -> anyhow::Result<()> {
    let from = offline::container(source, args.sources.force_share)?;
    let options = OpenOptions { cache: CacheMode::Writeback, ..OpenOptions::default() };
    let to = Container::open(target, &options)?;
    Ok(on_a_ring(target, |io| async move {
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
fn cluster_size(target: &Path) -> anyhow::Result<usize> {
    let header = chain::layer(target, Some(Format::Qcow2), true)?.header;
    let header = header.filter(|it| it.crypt == Crypt::None && it.data_file().is_none());
    match header {
        Some(header) => Ok(header.cluster_size() as usize),
        None => {
            let why = "images that are encrypted or have an external data file hold nothing \
                       compressed: leave -c out";
            Err(Fault::Usage(format!("{}: {why}", target.display())).into())
        }
    }
}

/// Whether a file's bytes are in memory (tmpfs).
fn in_memory(path: &Path) -> bool {
    const TMPFS: u64 = 0x0102_1994;
    rustix::fs::statfs(path).is_ok_and(|facts| facts.f_type as u64 == TMPFS)
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

fn over_what(args: &ConvertArgs, sources: &[PathBuf], recipe: &Recipe) -> anyhow::Result<Over> {
    let Some(backing) = &recipe.backing else { return Ok(Over::Nothing) };
    if let [source] = sources {
        let (format, _) = format_of(source, args.format)?;
        let layers = chain::layers(source, Some(format), true, &args.sources.names)?;
        let depth = layers.iter().position(|layer| {
            same_file(&layer.path, &backing.path) && layer.format == backing.format
        });
        if let Some(depth) = depth.filter(|depth| *depth > 0) {
            return Ok(Over::Layer(depth as u32));
        }
    }
    let cache = CacheMode::from(args.source_cache);
    Ok(Over::Image(open_source(&backing.path, Some(backing.format), cache, &args.sources)?))
}

pub(crate) fn same_file(one: &Path, other: &Path) -> bool {
    let id = |path: &Path| path.metadata().ok().map(|facts| (facts.dev(), facts.ino()));
    id(one).is_some() && id(one) == id(other)
}

fn open_target(
    args: &ConvertArgs,
    target: &Path,
    format: Format,
) -> anyhow::Result<(Vbd, Place, Format)> {
    let format = if args.no_create {
        // What is there already may be of another format than is to be written.
        format_to_write(target, args.output_format)?
    } else {
        format
    };
    let cache = CacheMode::from(args.cache);
    let options = OpenOptions {
        read_only: false,
        force_share: false,
        // What was made here is what it was to be.
        force_format: args.force.force_format || !args.no_create,
        secret: args.new.secret()?,
        // What was made here is made anew.
        no_restart_log: !args.no_create,
        ..args.sources.options(format, cache)?
    };
    let failed = |source| OpenError::Os { what: "open", path: target.to_owned(), source };
    let place = Place::hold(target).map_err(failed)?;
    let opened = place.clone();
    let image = on_a_ring(target, |io| async move { open_on(&io, &opened, &options).await })??;
    Ok((Vbd::new(image, cache), place, format))
}

fn write(
    args: &ConvertArgs,
    from: Vec<Vbd>,
    to: &Vbd,
    over: Over,
    zeroed: bool,
    in_memory: bool,
    compress: Option<usize>,
) -> anyhow::Result<()> {
    let progress = Arc::new(Progress::default());
    let signals = Signals::stop(&progress)?;
    let _bar = Bar::show(args.talk, &progress, from.iter().map(|vbd| vbd.size()).sum());
    let (layers, base) = match over {
        Over::Nothing => (0..u32::MAX, None),
        Over::Layer(depth) => (0..depth, None),
        Over::Image(base) => (0..u32::MAX, Some(base)),
    };
    if base.is_some() && from.len() > 1 {
        bail!("several sources make no overlay: convert them into one image first");
    }
    let direct = CacheMode::from(args.cache).direct();
    let usual = if direct { DIRECT } else { CACHED };
    let workers = match (compress, args.parallel) {
        (Some(_), None) => Workers::of_all(PER_PROCESSOR),
        (_, requests) => Workers::of(requests.map_or(usual, usize::from)),
    };
    let piece = if in_memory { PIECE_IN_MEMORY } else { PIECE_ON_DISK };
    let piece = piece.max(compress.unwrap_or(0));
    let mut to_offset = 0;
    for from in from {
        let range = args.part.clone().unwrap_or(0..from.size());
        let size = range.end - range.start;
        let job = Copy {
            range,
            to_offset,
            layers: layers.clone(),
            unless_in: base.as_ref().map(|base| base.disk().clone()),
            zeroed,
            sparse: args.sparse as usize,
            piece,
            compress,
            rate: args.rate,
            salvage: args.salvage.then_some(if args.talk.quiet { |_, _, _| {} } else { lost }),
            workers,
            ..Copy::new(from, to.fork())
        };
        signals.ended(copy(job, &progress))?;
        to_offset += size;
    }
    Ok(())
}

/// Tell of bytes that could not be read.
fn lost(offset: u64, len: u64, error: ringtap_image::Error) {
    eprintln!(
        "ringtap: warning: {len} bytes at {offset} of the source could not be read, and are zeros \
         now: {error}"
    );
}

/// Flush and close a target that is whole now.
pub(crate) fn finish(to: Vbd, target: &Path) -> anyhow::Result<()> {
    on_a_ring(target, |io| async move {
        to.flush(&io).await?;
        to.close(&io).await
    })?
    .with_context(|| format!("cannot make {} stable", target.display()))
}

/// A target that is not whole yet, and says so to whoever opens it.
pub(crate) struct Unfinished {
    path: PathBuf,
    noted: bool,
}

impl Unfinished {
    pub(crate) fn begin(path: &Path) -> Unfinished {
        Unfinished { path: path.to_owned(), noted: probe::unfinished(path, "convert") }
    }

    pub(crate) fn message(&self) -> String {
        let noted = match self.noted {
            true => "ringtap refuses it from now on",
            false => "nothing in it says so",
        };
        format!("{} is not whole ({noted}): remove it", self.path.display())
    }

    /// Leave nothing that may be taken for a whole image where it was made here; gives what to say. A
    /// file that was there before stays, empty where nothing in it tells.
    fn give_up(&self, to: Vbd, made: &Made) -> String {
        drop(to);
        let name = self.path.display();
        let file = self.path.metadata().is_ok_and(|facts| facts.is_file());
        if made.remove(&self.path) {
            format!("{name} is removed, for it was not whole")
        } else if file && !self.noted && std::fs::File::create(&self.path).is_ok() {
            format!("{name} is empty, for it was not whole")
        } else {
            self.message()
        }
    }

    pub(crate) fn end(self) -> anyhow::Result<()> {
        probe::finished(&self.path)
            .with_context(|| format!("cannot mark {} as whole", self.path.display()))
    }
}
