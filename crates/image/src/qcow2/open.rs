//! Opening a qcow2 image whose files are there already.

use std::collections::HashSet;
use std::io;
use std::path::Path;
use std::sync::{Arc, OnceLock, Weak};

use ringtap_io::Io;
use ringtap_io::sync::Mutex;
use ringtap_io::sync::atomic::AtomicBool;

use super::bitmap_set::{self, BitmapSet, Loading};
use super::decoder::Decoder;
use super::entry::Geometry;
use super::events::Events;
use super::flush::patch;
use super::header::{COPIED, MAX_EXTERNAL, OFFSET_MASK, autoclear, incompatible};
use super::refcount::Refcounts;
use super::sabotage::{Broken, Sabotage};
use super::space::Space;
use super::table::{Cache, Tables};
use super::{Crypt, Header, Qcow2, Shared, State, check, restart};
use crate::group_commit::GroupCommit;
use crate::lower::Lower;
use crate::{
    Container, Epochs, Error, Image, Info, OpenError, RestartChoice, RestartLog, SectorCipher,
};

/// Memory for L2 tables, unless told otherwise.
pub const DEFAULT_TABLE_MEMORY: u64 = 64 << 20;
/// Memory for clusters that were decompressed lately.
const DECODED_MEMORY: usize = 4 << 20;
/// Tables are read in pieces of so many bytes.
const PIECE: u64 = 1 << 20;

/// What an image is made of besides its own file.
#[derive(Default)]
pub struct Parts {
    /// The external data file, for an image that has one.
    pub data: Option<Container>,
    /// The backing file, opened read-only, for an image that has one.
    pub base: Option<Box<dyn Image>>,
    /// The cipher of an encrypted image, with its key.
    pub key: Option<Arc<dyn SectorCipher>>,
    /// The most bytes of L2 tables to keep in memory; 64 MiB unless told otherwise.
    pub table_memory: Option<u64>,
    /// Where changes are kept over a killed server; what is in it already is taken up.
    pub restart: Option<RestartLog>,
    /// What the image would say of its log, by which one that is missing is missed.
    pub restart_of: Option<(u128, u64)>,
    /// What becomes of a log of which it cannot be told whether it belongs to the image.
    pub restart_choice: Option<RestartChoice>,
    /// Names of bitmaps to show.
    pub bitmaps: Vec<String>,
    /// What to do wrong.
    #[cfg(feature = "sabotage")]
    pub sabotage: Option<Sabotage>,
    /// Nobody will look at the data: an encrypted image needs no key.
    pub tables_only: bool,
}

impl Parts {
    #[cfg(feature = "sabotage")]
    pub(super) fn broken(&self) -> Broken {
        Broken { how: self.sabotage }
    }

    #[cfg(not(feature = "sabotage"))]
    pub(super) fn broken(&self) -> Broken {
        Broken::default()
    }
}

impl Qcow2 {
    /// Open the image in a container. Whether it is writable, the container says.
    pub async fn open(
        io: &Io,
        container: Container,
        header: Header,
        parts: Parts,
    ) -> Result<Qcow2, OpenError> {
        let path = container.path().to_owned();
        let wrong = |source| OpenError::Qcow2 { path: path.clone(), source };
        let refused = |why| OpenError::Refused { path: path.clone(), why };
        header.check_tables(container.len()).map_err(wrong)?;
        let read_only = container.traits().read_only;
        if !read_only && header.has(incompatible::CORRUPT) {
            return Err(refused(
                "it is marked corrupt: repair it with check --repair all, or open it read-only",
            ));
        }
        let (mut header, mut parts) = (header, parts);
        let (of, choice) = (parts.restart_of, parts.restart_choice);
        let data = parts.data.as_ref();
        restart::decide(&container, &header, &mut parts.restart, of, choice, data)?;
        if let Some(log) = parts.restart.as_ref().filter(|log| !read_only && log.is_to_be_used()) {
            // Killed again before all of it is taken up, it is still the image's.
            log.watch();
        }
        if !read_only && header.has(incompatible::DIRTY) {
            // Its last user left refcounts to be found out again.
            let report = check::repair_unasked(io, &container).await;
            if !report.is_ok_and(|report| report.corruptions == 0) {
                return Err(refused(
                    "its refcounts were not written when it was last used and cannot be repaired: \
                     look at it with check, or open it read-only",
                ));
            }
            header = Header::read(io, &container).await?;
        }
        match (header.crypt, &parts.key) {
            (Crypt::Aes, _) => {
                return Err(refused(
                    "it is encrypted with QEMU's old AES, which is given up as unsafe",
                ));
            }
            (Crypt::Luks, None) if !parts.tables_only => {
                return Err(refused("it is encrypted with LUKS and no key is given"));
            }
            _ => {}
        }
        let has_data_file = header.has(incompatible::DATA_FILE);
        if has_data_file != parts.data.is_some() {
            return Err(refused("its guest data lies in an external file, which is not given"));
        }
        if has_data_file && !read_only && header.size > MAX_EXTERNAL {
            return Err(refused(
                "its tables cannot say where data lies beyond 64 PiB of its external data file: \
                 open it read-only, or make it smaller with resize --shrink",
            ));
        }
        let geometry = Geometry::new(&header, container.is_copied_from());
        let failed = |what| {
            let path = path.clone();
            move |error: Error| {
                let source = io::Error::from_raw_os_error(error.errno());
                OpenError::Os { what, path, source }
            }
        };
        let l1 = read_table(io, &container, header.l1_offset, geometry.tables())
            .await
            .map_err(failed("read the L1 table of"))?;
        let table = match read_only {
            true => Vec::new(),
            false => {
                let bytes = u64::from(header.refcount_table_clusters) << header.cluster_bits;
                read_table(io, &container, header.refcount_table_offset, bytes / 8)
                    .await
                    .map_err(failed("read the refcount table of"))?
            }
        };
        if !read_only {
            let log = parts.restart.is_some();
            clear_features(io, &container, &header, log)
                .await
                .map_err(failed("clear the autoclear features of"))?;
        }
        let mut bitmaps = BitmapSet::default();
        if !read_only || !parts.bitmaps.is_empty() {
            let (shown, log, broken) = (&*parts.bitmaps, parts.restart.as_ref(), parts.broken());
            let loading = Loading { shown, log, broken };
            bitmaps = BitmapSet::load(io, &container, loading).await.map_err(bitmap_set::failed)?;
        }
        let info = info_of(&geometry, &container, &parts);
        let broken = parts.broken();
        // A simulation's time stands still while another thread works.
        let inline = container.is_simulated();
        let cluster = header.cluster_size() as usize;
        let decoder = Decoder::new(header.compression, cluster, DECODED_MEMORY, inline);
        let memory = parts.table_memory.unwrap_or(DEFAULT_TABLE_MEMORY);
        let shown = parts.restart.as_ref().filter(|log| read_only && log.is_to_be_used());
        let memory = memory.max(shown.map_or(0, |log| restart::memory_to_show(log, &geometry)));
        let refcounts = Refcounts::new(&header, table);
        let mut state = State::new();
        if !read_only {
            add_structures(&mut state, &header, &l1, &refcounts);
        }
        let guest_file = parts.data.as_ref().unwrap_or(&container).file();
        let shared = Shared {
            info,
            guest_file,
            data_is_raw: header.autoclear & autoclear::DATA_FILE_RAW != 0,
            header,
            container,
            data: parts.data,
            base: Lower::new(parts.base),
            key: parts.key,
            tables: Tables::new(geometry, l1, memory),
            state: Mutex::new(state),
            refcounts: Mutex::new(refcounts),
            dirty: AtomicBool::new(false),
            corrupt: AtomicBool::new(false),
            read_beside: AtomicBool::new(false),
            header_busy: AtomicBool::new(false),
            restart: OnceLock::new(),
            bitmaps: Arc::new(bitmaps),
            decoder,
            broken,
            epochs: Arc::new(Epochs::default()),
            flushes: GroupCommit::default(),
            events: Events::default(),
        };
        match parts.restart {
            Some(log) if read_only => shared.show(io, &log).await?,
            Some(log) => shared.take_up(io, log).await?,
            None => {}
        }
        // The log is named in the image by now: who finds the marks finds the bits, too.
        if !read_only && !broken.does(Sabotage::BitmapsNotMarked) {
            bitmap_set::mark(io, &shared.container).await.map_err(bitmap_set::failed)?;
        }
        Ok(Qcow2 { shared: Arc::new(shared) })
    }
}

impl State {
    pub(super) fn new() -> State {
        State {
            cache: Cache::default(),
            allocations: Default::default(),
            space: Space::new(),
            referred: Vec::new(),
            shared: Vec::new(),
            packing: Default::default(),
            released: Vec::new(),
            retired: Vec::new(),
            structures: HashSet::new(),
            moment: Weak::new(),
            held: Vec::new(),
        }
    }
}

fn info_of(geometry: &Geometry, container: &Container, parts: &Parts) -> Info {
    let own = container.traits();
    let below = parts.base.as_ref().map(|base| base.info());
    let data = parts.data.as_ref().map(|data| data.traits());
    let request = below.map_or(1, |info| info.request_alignment);
    let request = request.max(data.map_or(1, |traits| traits.request_alignment));
    let memory = below.map_or(1, |info| info.memory_alignment);
    let memory = memory.max(data.map_or(1, |traits| traits.memory_alignment));
    let rotational = parts.data.as_ref().unwrap_or(container).is_rotational()
        || below.is_some_and(|info| info.rotational);
    let sector = parts.key.as_ref().map_or(1, |key| key.sector_size());
    let request_alignment = request.max(own.request_alignment).max(sector);
    Info {
        format: "qcow2",
        size: geometry.size,
        read_only: own.read_only,
        request_alignment,
        memory_alignment: memory.max(own.memory_alignment),
        discard_alignment: 1 << geometry.unit_bits,
        logical_block_size: own.logical_block_size.max(request_alignment as u32),
        physical_block_size: own.physical_block_size.max(request_alignment as u32),
        discard: geometry.zero_flag || parts.base.is_none(),
        fast_zero: geometry.zero_flag || parts.base.is_none(),
        rotational,
    }
}

async fn read_table(
    io: &Io,
    container: &Container,
    offset: u64,
    entries: u64,
) -> Result<Vec<u64>, Error> {
    let mut table = Vec::with_capacity(entries as usize);
    let (mut at, end) = (offset, offset + entries * 8);
    while at < end {
        let mut piece = vec![0; PIECE.min(end - at) as usize];
        container.read(io, at, &mut piece).await?;
        table.extend(crate::bytes::entries(&piece));
        at += piece.len() as u64;
    }
    Ok(table)
}

/// Features that ask for it are cleared before the first write.
async fn clear_features(
    io: &Io,
    container: &Container,
    header: &Header,
    log: bool,
) -> Result<(), Error> {
    let log = if log { autoclear::RESTART_LOG | autoclear::RESTART_STAMP } else { 0 };
    let keep = header.known_autoclear() | log;
    if header.version > 2 && header.autoclear & !keep != 0 {
        patch(io, container, 88, &(header.autoclear & keep).to_be_bytes()).await?;
    }
    Ok(())
}

/// Where the image's own structures lie, so far as opening has read.
fn add_structures(state: &mut State, header: &Header, l1: &[u64], refcounts: &Refcounts) {
    let bits = header.cluster_bits;
    let mut add = |offset: u64, len: u64| {
        for cluster in offset >> bits..(offset + len).div_ceil(1 << bits) {
            state.add_structure(cluster);
        }
    };
    add(0, 1);
    add(header.l1_offset, u64::from(header.l1_size) * 8);
    add(header.refcount_table_offset, u64::from(header.refcount_table_clusters) << bits);
    for offset in refcounts.offsets() {
        add(offset, 1);
    }
    for entry in l1.iter().filter(|entry| **entry & COPIED != 0) {
        add(entry & OFFSET_MASK, 1);
    }
}

impl Qcow2 {
    /// The image's own file.
    pub fn path(&self) -> &Path {
        self.shared.container.path()
    }
}
