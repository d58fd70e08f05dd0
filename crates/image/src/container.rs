//! The file or block device that holds an image.

use std::fmt::Display;
use std::fs;
use std::io;
use std::ops::{Deref, Range};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use ringtap_io::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use ringtap_io::{Buffer, File, Io, Nature, Op, OpenFile, Wall, Witness};
use ringtap_stores::Store;
use rustix::fs::SeekFrom;

use crate::file_facts::Facts;
use crate::place::path_of;
use crate::{Error, Format, OpenError, OpenOptions, Place, Standing, lock, record};

mod cached;
mod device;
mod facts;
mod found;
mod length;
mod status;
mod store;
mod syncs;

use cached::drop_cached_pages;
use facts::{direct_alignment, len_of, on_rotating_medium, work_in_memory_inline};
use syncs::Syncs;

/// The most that one metadata transfer moves.
const PIECE: usize = 1 << 20;

/// The file or block device that holds an image, open and locked. Clones are the same one.
#[derive(Clone)]
pub struct Container {
    file: File,
    /// The open file behind it; none where a simulation provides it, or a store.
    open: Option<Arc<lock::Locked>>,
    store: Option<Store>,
    path: Arc<Path>,
    /// The numbers of a regular file and of the device that it lies on, as it was opened.
    numbers: Option<(u64, u64)>,
    traits: Traits,
    /// It lies on tmpfs.
    in_memory: bool,
    /// The cache mode is to flush nothing.
    never_synced: bool,
    rotational: bool,
    state: Arc<State>,
    /// Notes when the file is changed, from when a restart log asks for it.
    witness: Arc<Witness>,
    /// When a simulated one was last written to.
    simulated_time: Option<SimulatedTime>,
}

type SimulatedTime = Arc<dyn Fn() -> Wall + Send + Sync>;

/// Metadata that was read, where the kernel put it.
pub(crate) struct Piece {
    buffer: Buffer,
    range: Range<usize>,
}

impl Deref for Piece {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.buffer.bytes()[self.range.clone()]
    }
}

/// How a container wants to be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Traits {
    /// A regular file: it grows, and what lies past its end reads as zeros once it has grown.
    pub regular: bool,
    /// Writes are refused.
    pub read_only: bool,
    /// Offsets and lengths must be multiples of this (1: any will do).
    pub request_alignment: u64,
    /// Memory must start and end at multiples of this.
    pub memory_alignment: usize,
    /// Sector size of the device, at least 512.
    pub logical_block_size: u32,
    /// Size it had better be written in.
    pub physical_block_size: u32,
}

impl Traits {
    /// A regular file that is used through the page cache.
    pub const FILE: Traits = Traits {
        regular: true,
        read_only: false,
        request_alignment: 1,
        memory_alignment: 1,
        logical_block_size: 512,
        physical_block_size: 4096,
    };
}

#[derive(Default)]
struct State {
    len: AtomicU64,
    noted_length: length::NotedLength,
    /// What the file system turned out not to do.
    no_punch: AtomicBool,
    no_zero_range: AtomicBool,
    no_allocate: AtomicBool,
    syncs: Syncs,
    /// Nothing of where its disk goes on was written down when it was locked for writing.
    nothing_begun: AtomicBool,
    /// As its restart log found it when it was opened.
    standing: OnceLock<Standing>,
    /// What was known of its file when it was opened, where it is written to.
    opened: OnceLock<Facts>,
}

impl Container {
    /// Open and lock a regular file or a block device; for writing, only as the format it is known to be,
    /// where the options name one.
    pub fn open(place: impl Into<Place>, options: &OpenOptions) -> Result<Container, OpenError> {
        let place = place.into();
        if ringtap_stores::is_store(place.path()) {
            return Container::open_store(place.path(), options);
        }
        let (path, at) = (place.path(), place.at());
        let failed = |what| {
            let path: PathBuf = path.to_owned();
            move |source: io::Error| OpenError::Os { what, path, source }
        };
        let facts = fs::metadata(&at).map_err(failed("open"))?;
        let kind = facts.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            let found = if kind.is_dir() { "directory" } else { "special file" };
            return Err(OpenError::Kind { path: path.to_owned(), found });
        }
        let flags = if options.cache.direct() { libc::O_DIRECT } else { 0 };
        let file = fs::File::options()
            .read(true)
            .write(!options.read_only)
            .custom_flags(flags | libc::O_CLOEXEC)
            .open(&at)
            .map_err(failed("open"))?;
        // The node of a device lies in memory (devtmpfs), and says nothing of the device.
        let in_memory = kind.is_file()
            && work_in_memory_inline(&file).map_err(failed("look at the file system of"))?;
        let open = OpenFile::new(OwnedFd::from(file));
        let direct = options.cache.direct();
        open.set_nature(Nature { image: true, in_memory, page_cache: !direct });
        let file = if options.force_share && options.read_only {
            lock::unlocked(open)
        } else {
            lock::lock(open, path, !options.read_only)?
        };
        let mut nothing_begun = false;
        if !options.read_only {
            let at = path_of(file.as_fd());
            record::may_write(&at, path, options)?;
            nothing_begun = record::may_go_on(&at, path, options)?;
        }
        if options.cache.direct() && !options.read_only {
            drop_cached_pages(&file);
        }
        let len = len_of(&*file).map_err(failed("find the size of"))?;
        let (request_alignment, memory_alignment) = if options.cache.direct() {
            direct_alignment(&file).map_err(failed("find the O_DIRECT alignment of"))?
        } else {
            (1, 1)
        };
        let (logical, physical) = if kind.is_block_device() {
            (
                rustix::fs::ioctl_blksszget(&*file).unwrap_or(512),
                rustix::fs::ioctl_blkpbszget(&*file).unwrap_or(4096),
            )
        } else {
            (512, 4096)
        };
        let logical = logical.max(request_alignment as u32);
        let traits = Traits {
            regular: kind.is_file(),
            read_only: options.read_only,
            request_alignment,
            memory_alignment,
            logical_block_size: logical,
            physical_block_size: physical.max(logical),
        };
        let rotational = on_rotating_medium(&file).map_err(failed("look at the device of"))?;
        let handle = file.handle();
        let container = Container::simulated(handle, len, traits);
        if !options.read_only {
            file.set_witness(container.witness.clone());
        }
        let (open, path) = (Some(Arc::new(file)), path.into());
        let never_synced = !options.cache.flushes();
        let numbers = kind.is_file().then(|| (facts.dev(), facts.ino()));
        let files = Container { open, path, numbers, ..container };
        let container = Container { in_memory, rotational, never_synced, ..files };
        if !options.read_only {
            let _first = container.state.opened.set(container.file_facts());
        }
        container.state.nothing_begun.store(nothing_begun, SeqCst);
        Ok(container)
    }

    /// A container that only the reactor knows, `len` bytes long.
    pub fn simulated(file: File, len: u64, traits: Traits) -> Container {
        let state = Arc::new(State { len: AtomicU64::new(len), ..State::default() });
        let path = Path::new("simulated").into();
        let (in_memory, rotational, never_synced) = (false, false, false);
        let (witness, simulated_time) = Default::default();
        Container {
            file,
            open: None,
            store: None,
            path,
            numbers: None,
            traits,
            in_memory,
            rotational,
            never_synced,
            state,
            witness,
            simulated_time,
        }
    }

    /// The same, of which the simulation says when it was last written to.
    pub fn with_time(self, time: impl Fn() -> Wall + Send + Sync + 'static) -> Container {
        Container { simulated_time: Some(Arc::new(time)), ..self }
    }

    pub(crate) fn simulated_time(&self) -> Option<Wall> {
        self.simulated_time.as_ref().map(|time| time())
    }

    /// Who notes when the file is changed.
    pub fn witness(&self) -> &Arc<Witness> {
        &self.witness
    }

    /// What is known of its file now.
    pub(crate) fn file_facts(&self) -> Facts {
        let is_device = !self.traits.regular;
        match self.open_file() {
            Some(file) => Facts::of(file, is_device, self.traits.request_alignment > 1),
            None => Facts::simulated(self.simulated_time()),
        }
    }

    /// What was known of its file when it was opened, before anything was written to it.
    pub(crate) fn facts_at_first(&self) -> Facts {
        self.state.opened.get().copied().unwrap_or_else(|| self.file_facts())
    }

    /// Its restart log has found it so, before anything was written to it.
    pub(crate) fn stands(&self, standing: &Standing) {
        let _first = self.state.standing.set(standing.clone());
    }

    /// Whether it was in the state in which its last user left it when it was opened, where a restart log knew.
    pub(crate) fn standing(&self) -> Option<&Standing> {
        self.state.standing.get()
    }

    /// The handle that operations take.
    #[inline]
    pub fn file(&self) -> File {
        self.file
    }

    /// How it wants to be used.
    #[inline]
    pub fn traits(&self) -> &Traits {
        &self.traits
    }

    /// Whether the kernel takes the disk below for one that seeks.
    pub fn is_rotational(&self) -> bool {
        self.rotational
    }

    /// Whether what is read of it is mostly copied out of the host's memory.
    pub(crate) fn is_copied_from(&self) -> bool {
        self.in_memory || self.traits.request_alignment == 1
    }

    /// Whether others may open it for writing while it is open here, for reading.
    pub(crate) fn let_write(&self, may: bool) {
        if let Some(open) = &self.open {
            open.let_write(may);
        }
    }

    /// Nobody writes to it any more by this handle or its clones: let others open it for reading.
    pub(crate) fn stop_writing(&self) {
        if let Some(open) = &self.open {
            open.stop_writing();
        }
    }

    /// Its name, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The open file, where it is a real one.
    pub(crate) fn open_file(&self) -> Option<&OpenFile> {
        self.open.as_deref().map(|locked| &**locked)
    }

    /// Who else has it open for writing, and that it has. What this process holds of it by this container does not count.
    pub fn writer(&self) -> Option<(String, &'static str)> {
        lock::writer(self.open_file()?.as_fd(), &self.path)
    }

    /// Whether it is the reactor's alone: no file of this host, and on no server.
    pub(crate) fn is_simulated(&self) -> bool {
        self.open.is_none() && self.store.is_none()
    }

    /// The file, for as long as it is open.
    pub fn place(&self) -> Place {
        match self.open_file() {
            Some(file) => Place::at_fd(&self.path, path_of(file.as_fd())),
            None => (&*self.path).into(),
        }
    }

    /// It was written to as `format` and all is well: from now on it is known to be that.
    pub fn confirm_format(&self, format: Format) {
        if self.open.is_some() {
            record::confirm_format(self.place(), format);
        }
    }

    /// Bytes it holds, as far as this process has made it so.
    pub fn len(&self) -> u64 {
        self.state.len.load(SeqCst)
    }

    /// Whether it holds no byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes it holds now, should someone else have changed that.
    pub fn present_len(&self) -> Result<u64, Error> {
        let len = match (self.open_file(), &self.store) {
            (Some(open), _) => len_of(open)
                .map_err(|error| Error::from_errno(error.raw_os_error().unwrap_or(libc::EIO)))?,
            (None, Some(store)) if self.traits.regular => store.len(),
            (None, _) => return Ok(self.len()),
        };
        self.state.len.store(len, SeqCst);
        Ok(len)
    }

    /// Whether the range is known to be a hole, which reads as zeros.
    pub fn is_hole(&self, offset: u64, len: u64) -> bool {
        self.next_data(offset).is_none_or(|data| data >= offset.saturating_add(len))
    }

    /// The first byte from `offset` on that is not known to be in a hole; none where all are.
    pub fn next_data(&self, offset: u64) -> Option<u64> {
        let Some(open) = self.open_file() else { return Some(offset) };
        match rustix::fs::seek(open, SeekFrom::Data(offset)) {
            Ok(data) => Some(data.max(offset)),
            Err(rustix::io::Errno::NXIO) => None,
            Err(_) => Some(offset),
        }
    }

    /// Make a regular file so long that it holds `len` bytes rounded to 512, where it is shorter.
    pub fn lengthen(&self, len: u64) -> Result<(), Error> {
        if !self.traits.regular || self.traits.read_only {
            return Err(Error::Unsupported);
        }
        if len > self.present_len()?.next_multiple_of(512) {
            match (self.open_file(), &self.store) {
                (Some(file), _) => rustix::fs::ftruncate(file, len)
                    .map_err(|error| Error::from_errno(error.raw_os_error()))?,
                (None, Some(store)) => store.set_len(len).map_err(Error::from_errno)?,
                (None, None) => return Err(Error::Unsupported),
            }
            self.state.len.store(len, SeqCst);
        }
        Ok(())
    }

    /// Read metadata: any offset and length; what lies past the end is zeros.
    pub async fn read(&self, io: &Io, offset: u64, bytes: &mut [u8]) -> Result<(), Error> {
        for (piece, offset) in bytes.chunks_mut(PIECE).zip((offset..).step_by(PIECE)) {
            piece.copy_from_slice(&self.read_piece(io, offset, piece.len()).await?);
        }
        Ok(())
    }

    /// As [`Container::read`], into memory of its own, which must not be much.
    pub(crate) async fn read_piece(
        &self,
        io: &Io,
        offset: u64,
        len: usize,
    ) -> Result<Piece, Error> {
        let align = self.traits.request_alignment;
        let first = offset - offset % align;
        let from = (offset - first) as usize;
        let room = (from + len).next_multiple_of(align as usize);
        let mut buffer = io.buffer(room).map_err(Error::Os)?;
        let read = io
            .read_blocks(self.file, first, buffer.mem(), align as usize)
            .await
            .map_err(Error::from_errno)?;
        buffer.bytes_mut()[read..].fill(0);
        Ok(Piece { buffer, range: from..from + len })
    }

    /// Write metadata: any offset and length. Blocks that are covered in part are read first; nobody
    /// else may write to them meanwhile. Not stable before [`Container::sync`].
    pub async fn write(&self, io: &Io, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        let align = self.traits.request_alignment;
        let mut done = 0;
        while done < bytes.len() {
            let at = offset + done as u64;
            let part = (bytes.len() - done).min(PIECE);
            let first = at - at % align;
            let skip = (at - first) as usize;
            let len = (skip + part).next_multiple_of(align as usize);
            let mut buffer = io.buffer(len).map_err(Error::Os)?;
            if len != part {
                self.read(io, first, buffer.bytes_mut()).await?;
            }
            buffer.bytes_mut()[skip..skip + part].copy_from_slice(&bytes[done..done + part]);
            io.write(self.file, first, buffer.mem(), false).await.map_err(Error::from_errno)?;
            done += part;
        }
        let end = offset + bytes.len() as u64;
        self.reaches(end.next_multiple_of(align));
        Ok(())
    }

    /// Make every completed write stable; not where the cache mode is to flush nothing, which is true of the
    /// image's own tables too, as with QEMU.
    pub async fn sync(&self, io: &Io) -> Result<(), Error> {
        if self.never_synced {
            return Ok(());
        }
        let syncs = &self.state.syncs;
        if self.is_cached() {
            return syncs.sync(io, self.file, &self.path).await;
        }
        syncs.check()?;
        io.sync(self.file).await.map_err(Error::from_errno)
    }

    /// Whether a write may be asked to be stable when it ends (FUA). Through the page cache [`Container::sync`] makes stable,
    /// and nothing else: an error that is told to another is told to nobody after that.
    pub fn takes_durable_writes(&self) -> bool {
        !self.is_cached()
    }

    /// Whether writes go to the page cache of this machine.
    fn is_cached(&self) -> bool {
        self.traits.request_alignment == 1 && self.store.is_none()
    }

    /// Write back the pages that others have left of a block device. Before anything is in flight. Where that fails
    /// [`Container::sync`] does, too: nobody else hears of what was lost.
    pub(crate) fn settle_device(&self) {
        if let Some(device) = self.open_file().filter(|_| !self.traits.regular) {
            if let Err(error) = rustix::fs::fdatasync(device) {
                self.state.syncs.heard(&self.path, -error.raw_os_error());
            }
        }
    }

    /// See [`crate::Image::lost_by`].
    pub(crate) fn lost_by(&self) -> Option<Error> {
        self.state.syncs.lost_by()
    }

    /// See [`crate::Image::is_written_anew`].
    pub(crate) fn is_written_anew(&self) {
        self.state.syncs.believe_again();
    }

    /// See [`crate::Image::abandon`].
    pub(crate) fn abandon(&self) {
        self.state.syncs.abandon();
    }

    /// Free the range; it reads as zeros afterwards. [`Error::Unsupported`] where that cannot be.
    pub async fn punch(&self, io: &Io, offset: u64, len: u64) -> Result<(), Error> {
        let op = Op::PunchHole { file: self.file, offset, len };
        self.try_op(io, op, &self.state.no_punch).await
    }

    /// Make the range zeros and keep its space. [`Error::Unsupported`] where that cannot be.
    pub async fn zero_range(&self, io: &Io, offset: u64, len: u64) -> Result<(), Error> {
        let op = Op::ZeroRange { file: self.file, offset, len };
        self.try_op(io, op, &self.state.no_zero_range).await
    }

    /// Reserve space for the range, within the length it has or past it, and leave what it reads as.
    /// [`Error::Unsupported`] where that cannot be.
    pub async fn allocate(&self, io: &Io, offset: u64, len: u64) -> Result<(), Error> {
        let op = Op::Allocate { file: self.file, offset, len };
        self.try_op(io, op, &self.state.no_allocate).await
    }

    /// As [`Container::allocate`], for room that may never be written to. On tmpfs nothing is reserved:
    /// there a write finds its room as fast without, and what is reserved is filled with zeros at once.
    pub async fn reserve(&self, io: &Io, offset: u64, len: u64) -> Result<(), Error> {
        if self.reserves() { self.allocate(io, offset, len).await } else { Ok(()) }
    }

    /// Whether [`Container::reserve`] does anything.
    pub(crate) fn reserves(&self) -> bool {
        !self.in_memory
    }

    /// Whether the file system reserves space, as far as is known.
    pub fn can_allocate(&self) -> bool {
        !self.state.no_allocate.load(Relaxed)
    }

    async fn try_op(&self, io: &Io, op: Op, lacks: &AtomicBool) -> Result<(), Error> {
        if lacks.load(Relaxed) {
            return Err(Error::Unsupported);
        }
        let end = io.to_the_end(op).await.map_err(Error::from_errno);
        if end == Err(Error::Unsupported) {
            lacks.store(true, Relaxed);
        }
        end
    }
}

/// What was tried on a container and failed.
pub(crate) fn os(container: &Container, what: &'static str, error: Error) -> OpenError {
    OpenError::Os {
        what,
        path: container.path().to_owned(),
        source: io::Error::from_raw_os_error(error.errno()),
    }
}

/// What is wrong with a container's content, and what to do about it.
pub(crate) fn malformed(
    format: &'static str,
    container: &Container,
    at: u64,
    found: impl Display,
    advice: &'static str,
) -> OpenError {
    OpenError::Malformed {
        format,
        path: container.path().to_owned(),
        offset: at,
        found: found.to_string(),
        advice,
    }
}

#[cfg(test)]
mod tests {
    use ringtap_io::Tasks;
    use ringtap_sim::{Chances, Disk, Sim};

    use super::*;
    use crate::CacheMode;

    /// A simulation has no such file, so that a sync asked for fails.
    #[test]
    fn nothing_is_synced_where_nothing_is_to_be_flushed() {
        let own = tempfile::NamedTempFile::new().expect("a file");
        for (cache, asked) in [(CacheMode::Unsafe, false), (CacheMode::Writeback, true)] {
            let options = OpenOptions { cache, ..OpenOptions::default() };
            let container = Container::open(own.path(), &options).expect("opened");
            let disk = Disk::new(512);
            let mut tasks = Tasks::new(Box::new(Sim::new(&disk, 1).chances(Chances::NEVER)));
            let io = tasks.io().clone();
            let synced = tasks.block_on(async move { container.sync(&io).await }).expect("turns");
            assert_eq!(synced.is_err(), asked, "{cache:?}");
        }
    }
}
