//! A sparse extent: grains found through a directory of tables (Virtual Disk Format 5.0, "Hosted Sparse
//! Extents" and "Stream-Optimized Compressed Sparse Extents").

use std::collections::HashMap;
use std::io::Read;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use ringtap_io::{Io, Mem};

use super::common::{MOST, MOST_TABLES, SECTOR, bad};
use crate::bytes::get;
use crate::container::os;
use crate::{Container, Error, Extent, OpenError, Status};

const HEADER: usize = 512;
const ZEROED_GRAINS: u32 = 1 << 2;
const COMPRESSED: u32 = 1 << 16;
/// The directory is in a footer at the file's end.
const AT_END: u64 = u64::MAX;
const DAMAGED: &str = "the image is damaged, or no VMDK";

/// A sparse extent.
pub(super) struct Sparse {
    pub(super) container: Container,
    /// Bytes it covers.
    pub(super) size: u64,
    /// Where an embedded descriptor lies, and its length.
    pub(super) descriptor: Option<(u64, u64)>,
    grain: u64,
    per_table: u64,
    zeroed_grains: bool,
    compressed: bool,
    /// Where each table lies, in sectors; 0: nowhere.
    directory: Box<[u32]>,
    tables: Box<[OnceLock<Table>]>,
    /// Tables by their sectors: a directory may name one as often as it has entries.
    read: Mutex<HashMap<u32, Table>>,
    /// The grain that was decompressed last: its sector in the file, and its bytes.
    last: Mutex<Option<(u32, Arc<[u8]>)>>,
}

/// The sectors of grains; empty where all are 0.
type Table = Arc<[u32]>;

struct Header {
    flags: u32,
    capacity: u64,
    grain: u64,
    descriptor: (u64, u64),
    per_table: u32,
    directory: u64,
    algorithm: u16,
}

async fn read_header(io: &Io, container: &Container, at: u64) -> Result<Header, OpenError> {
    let mut bytes = [0; HEADER];
    let failed = |error| os(container, "read a header of", error);
    container.read(io, at, &mut bytes).await.map_err(failed)?;
    let version = u32::from_le_bytes(get(&bytes, 4));
    if get::<4>(&bytes, 0) != *b"KDMV" || !(1..=3).contains(&version) {
        let found = format!("no sparse extent of versions 1 to 3 (version {version})");
        return Err(bad(container, at, found, DAMAGED));
    }
    let long = |at| u64::from_le_bytes(get(&bytes, at));
    Ok(Header {
        flags: u32::from_le_bytes(get(&bytes, 8)),
        capacity: long(12),
        grain: long(20),
        descriptor: (long(28), long(36)),
        per_table: u32::from_le_bytes(get(&bytes, 44)),
        directory: long(56),
        algorithm: u16::from_le_bytes(get(&bytes, 77)),
    })
}

impl Sparse {
    /// Bytes of a grain.
    pub(super) fn grain(&self) -> u64 {
        self.grain
    }

    pub(super) fn is_compressed(&self) -> bool {
        self.compressed
    }

    pub(super) async fn read(io: &Io, container: Container) -> Result<Sparse, OpenError> {
        let wrong = |at, found: String| Err(bad(&container, at, found, DAMAGED));
        let mut header = read_header(io, &container, 0).await?;
        let descriptor = header.descriptor;
        if header.directory == AT_END {
            // The footer's marker, the footer, the end's marker.
            let at = container.len().checked_sub(1024).filter(|at| *at >= SECTOR);
            let Some(at) = at else { return wrong(56, "no room for a footer".to_owned()) };
            header = read_header(io, &container, at).await?;
        }
        let Header { flags, capacity, grain, per_table, directory, algorithm, .. } = header;
        let compressed = flags & COMPRESSED != 0;
        if compressed && algorithm != 1 {
            return wrong(77, format!("compression {algorithm}; deflate (1) is known"));
        }
        let sane = grain.is_power_of_two() && (8..=8192).contains(&grain);
        if !sane || per_table != 512 || capacity == 0 || capacity > MOST / SECTOR {
            let found =
                format!("{capacity} sectors in grains of {grain}, {per_table} grains in a table");
            return wrong(12, found);
        }
        let per_table = u64::from(per_table);
        let tables = capacity.div_ceil(grain * per_table);
        let at = directory.saturating_mul(SECTOR);
        let fits = at.checked_add(tables * 4).is_some_and(|end| end <= container.len());
        if tables > MOST_TABLES as u64 || directory == 0 || !fits {
            return wrong(56, format!("a directory of {tables} tables at {at}"));
        }
        let descriptor = match descriptor {
            (0, _) | (_, 0) => None,
            (at, len) => {
                let (at, len) = (at.saturating_mul(SECTOR), len.saturating_mul(SECTOR));
                if at.checked_add(len).is_none_or(|end| end > container.len()) {
                    return wrong(28, format!("a descriptor of {len} bytes at {at}"));
                }
                Some((at, len))
            }
        };
        let mut bytes = vec![0; tables as usize * 4];
        let failed = |error| os(&container, "read the grain directory of", error);
        container.read(io, at, &mut bytes).await.map_err(failed)?;
        Ok(Sparse {
            size: capacity * SECTOR,
            descriptor,
            grain: grain * SECTOR,
            per_table,
            zeroed_grains: flags & ZEROED_GRAINS != 0,
            compressed,
            directory: words(&bytes),
            tables: (0..tables).map(|_| OnceLock::new()).collect(),
            read: Mutex::default(),
            last: Mutex::default(),
            container,
        })
    }

    /// How many grain tables it may have.
    pub(super) fn tables(&self) -> usize {
        self.tables.len()
    }

    fn place_of(&self, offset: u64) -> (usize, usize) {
        let grain = offset / self.grain;
        ((grain / self.per_table) as usize, (grain % self.per_table) as usize)
    }

    /// What the table says of a grain, if it is known; 0: nothing.
    fn entry_of(&self, offset: u64) -> Option<u32> {
        let (table, index) = self.place_of(offset);
        if self.directory.get(table) == Some(&0) {
            return Some(0);
        }
        Some(self.tables.get(table)?.get()?.get(index).copied().unwrap_or(0))
    }

    /// The grain's sector, if its table is known; 0: nowhere.
    fn sector_of(&self, offset: u64) -> Option<u32> {
        let sector = self.entry_of(offset)?;
        let zeroed = sector == 1 && self.zeroed_grains;
        Some(if zeroed { 0 } else { sector })
    }

    /// Of zeros, `len` bytes at most from an offset on, whether their grains say so or say nothing.
    pub(super) fn hole(&self, offset: u64, len: u64) -> Status {
        let entry = self.entry_of(offset);
        let step = |at: u64| match self.is_empty(at) {
            true => self.rest_of_table(at),
            false => self.grain - at % self.grain,
        };
        let mut run = step(offset);
        while run < len && self.entry_of(offset + run) == entry {
            run += step(offset + run);
        }
        let of = Status::hole(len.min(run));
        match entry {
            Some(1..) => of,
            _ => Status { depth: 1, present: false, ..of },
        }
    }

    /// Whether all of the table for a byte says nothing.
    fn is_empty(&self, offset: u64) -> bool {
        let (table, _) = self.place_of(offset);
        self.directory.get(table) == Some(&0)
            || self.tables.get(table).and_then(OnceLock::get).is_some_and(|table| table.is_empty())
    }

    /// Bytes up to where the next table begins.
    fn rest_of_table(&self, offset: u64) -> u64 {
        let covered = self.grain * self.per_table;
        covered - offset % covered
    }

    pub(super) fn map(&self, offset: u64, len: u64) -> Extent<'_> {
        let inside = offset % self.grain;
        let rest = self.grain - inside;
        let Some(sector) = self.sector_of(offset) else { return Extent::NotLoaded };
        // Grains that follow one another are one extent.
        let step = if sector == 0 { 0 } else { self.grain / SECTOR };
        let (mut run, mut next) = (rest, u64::from(sector) + step);
        while !self.compressed && run < len && offset + run < self.size {
            let at = offset + run;
            if self.sector_of(at).map(u64::from) != Some(next) {
                break;
            }
            run += if self.is_empty(at) { self.rest_of_table(at) } else { self.grain };
            next += step;
        }
        let len = len.min(run);
        match sector {
            0 => Extent::Zero { len, writable: false },
            _ if self.compressed => Extent::Compressed { len },
            _ => Extent::Data {
                file: self.container.file(),
                offset: u64::from(sector) * SECTOR + inside,
                len,
                writable: false,
                cipher: None,
            },
        }
    }

    pub(super) async fn load(&self, io: &Io, offset: u64) -> Result<(), Error> {
        let (table, _) = self.place_of(offset);
        let sector = self.directory.get(table).copied().unwrap_or(0);
        let known = self.known().get(&sector).cloned();
        let entries = match known {
            Some(entries) => entries,
            None => self.read_table(io, u64::from(sector) * SECTOR).await?,
        };
        self.known().insert(sector, entries.clone());
        if let Some(place) = self.tables.get(table) {
            place.get_or_init(|| entries);
        }
        Ok(())
    }

    fn known(&self) -> std::sync::MutexGuard<'_, HashMap<u32, Table>> {
        self.read.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn read_table(&self, io: &Io, at: u64) -> Result<Table, Error> {
        let len = self.per_table * 4;
        if at < SECTOR || at + len > self.container.len() {
            return Err(Error::Corrupt);
        }
        let mut bytes = vec![0; len as usize];
        self.container.read(io, at, &mut bytes).await?;
        let entries = words(&bytes);
        let ends = self.container.len() / SECTOR;
        if entries.iter().any(|sector| u64::from(*sector) > ends) {
            return Err(Error::Corrupt);
        }
        Ok(if entries.iter().all(|sector| *sector == 0) { Arc::default() } else { entries.into() })
    }

    pub(super) async fn decompress(&self, io: &Io, offset: u64, mem: Mem) -> Result<usize, Error> {
        let Some(sector @ 1..) = self.sector_of(offset) else { return Ok(0) };
        let bytes = match self.kept(sector) {
            Some(bytes) => bytes,
            None => {
                let bytes = self.inflate(io, offset, sector).await?;
                *self.last() = Some((sector, bytes.clone()));
                bytes
            }
        };
        let inside = (offset % self.grain) as usize;
        Ok(mem.copy_from(bytes.get(inside..).unwrap_or_default()))
    }

    fn last(&self) -> std::sync::MutexGuard<'_, Option<(u32, Arc<[u8]>)>> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn kept(&self, sector: u32) -> Option<Arc<[u8]>> {
        let last = self.last();
        last.as_ref().filter(|(kept, _)| *kept == sector).map(|(_, bytes)| bytes.clone())
    }

    /// A whole grain: a marker of its place and length, then deflated bytes.
    async fn inflate(&self, io: &Io, offset: u64, sector: u32) -> Result<Arc<[u8]>, Error> {
        let at = u64::from(sector) * SECTOR;
        let mut marker = [0; 12];
        self.container.read(io, at, &mut marker).await?;
        let (place, len) =
            (u64::from_le_bytes(get(&marker, 0)), u32::from_le_bytes(get(&marker, 8)));
        // Deflate never makes much more of what it cannot make less.
        let most = self.grain + self.grain / 8 + 1024;
        if place != (offset - offset % self.grain) / SECTOR || u64::from(len) > most {
            return Err(Error::Corrupt);
        }
        let mut deflated = vec![0; len as usize];
        self.container.read(io, at + 12, &mut deflated).await?;
        let mut bytes = Vec::with_capacity(self.grain as usize);
        let decoder = flate2::read::ZlibDecoder::new(&*deflated);
        // The last grain of a disk may end with it.
        decoder.take(self.grain).read_to_end(&mut bytes).map_err(|_| Error::Corrupt)?;
        bytes.resize(self.grain as usize, 0);
        Ok(bytes.into())
    }
}

fn words(bytes: &[u8]) -> Box<[u32]> {
    bytes.chunks_exact(4).map(|word| u32::from_le_bytes(get(word, 0))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Traits;
    use ringtap_io::Tasks;
    use ringtap_sim::{Chances, Disk, Sim};

    #[test]
    fn a_table_named_often_is_kept_once() {
        let mut image = vec![0; 64 << 10];
        let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, b"KDMV");
        put(4, &1u32.to_le_bytes());
        // Four tables of 512 grains of 8 sectors.
        put(12, &(4u64 * 512 * 8).to_le_bytes());
        put(20, &8u64.to_le_bytes());
        put(44, &512u32.to_le_bytes());
        put(56, &1u64.to_le_bytes());
        for (entry, sector) in [8u32, 8, 16, 8].into_iter().enumerate() {
            put(512 + 4 * entry, &sector.to_le_bytes());
        }
        put(8 * 512, &100u32.to_le_bytes());
        let disk = Disk::new(512);
        let file = disk.add_file(0, 1);
        disk.poke(file, 0, &image);
        let traits = Traits { read_only: true, ..Traits::FILE };
        let container = Container::simulated(file, disk.size(file), traits);
        let mut tasks = Tasks::new(Box::new(Sim::new(&disk, 1).chances(Chances::NEVER)));
        let io = tasks.io().clone();
        let loaded = tasks.block_on(async move {
            let sparse = Sparse::read(&io, container).await.expect("an extent");
            for table in 0..4 {
                sparse.load(&io, table * 512 * 4096).await.expect("a table");
            }
            sparse
        });
        let sparse = loaded.expect("the simulation runs");
        let tables: Vec<&Table> = sparse.tables.iter().filter_map(OnceLock::get).collect();
        assert_eq!(tables.len(), 4);
        assert!(Arc::ptr_eq(tables[0], tables[1]) && Arc::ptr_eq(tables[0], tables[3]));
        assert!(tables[2].is_empty(), "nothing but zeros");
        let table = 512 * 4096;
        assert!(
            matches!(sparse.map(4096, 9 * table), Extent::Zero { len, .. } if len == table - 4096)
        );
        assert!(
            matches!(sparse.map(2 * table + 5, 9 * table), Extent::Zero { len, .. } if len == table - 5)
        );
        assert_eq!(
            [0, 1, 2].map(|table| sparse.sector_of(table * 512 * 4096)),
            [Some(100), Some(100), Some(0)]
        );
    }
}
