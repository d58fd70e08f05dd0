//! Making a new image.
//!
//! All of it lies in one row: header, refcount table, refcount blocks, L1 table and, where it is
//! preallocated, L2 tables and data. The header is written last, when the rest is stable.

use ringtap_io::Io;

use super::extension::{self, Extension};
use super::header::{
    CLUSTER_BITS, COPIED, MAX_EXTERNAL, MAX_L1_BYTES, MAX_NAME, MAX_REFCOUNT_TABLE_BYTES,
    autoclear, compatible, incompatible,
};
use super::tool::{ToolError, failed};
use super::{Compression, Crypt, Header};
use crate::{Container, Error, parse_size};

/// Bytes written at once.
const PIECE: u64 = 1 << 20;

/// How much of an image exists from the beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Preallocation {
    /// No more than it takes to be an empty image.
    #[default]
    Off,
    /// All tables; the data is a hole.
    Metadata,
    /// All tables, and space for all data.
    Falloc,
    /// All tables, and all data written as zeros.
    Full,
}

/// What to make; the defaults are those of `qemu-img create`.
#[derive(Clone, Debug)]
pub struct CreateOptions {
    /// Bytes the guest sees; rounded up to 512.
    pub size: u64,
    /// 2 or 3.
    pub version: u32,
    /// Bytes: a power of two from 512 to 2 MiB.
    pub cluster_size: u64,
    /// A power of two from 1 to 64.
    pub refcount_bits: u32,
    /// Subclusters.
    pub extended_l2: bool,
    /// Refcounts may lag behind while the image is in use.
    pub lazy_refcounts: bool,
    /// What exists from the beginning.
    pub preallocation: Preallocation,
    /// The backing file's name, as it is to be recorded.
    pub backing_file: Option<String>,
    /// The backing file's format.
    pub backing_format: Option<String>,
    /// The external data file's name, as it is to be recorded.
    pub data_file: Option<String>,
    /// The external data file is a raw image by itself.
    pub data_file_raw: bool,
    /// How compressed clusters are compressed.
    pub compression: Compression,
    /// The LUKS header with its key material, where guest data is encrypted.
    pub luks: Option<Vec<u8>>,
}

impl Default for CreateOptions {
    fn default() -> CreateOptions {
        CreateOptions {
            size: 0,
            version: 3,
            cluster_size: 65536,
            refcount_bits: 16,
            extended_l2: false,
            lazy_refcounts: false,
            preallocation: Preallocation::Off,
            backing_file: None,
            backing_format: None,
            data_file: None,
            data_file_raw: false,
            compression: Compression::Deflate,
            luks: None,
        }
    }
}

impl CreateOptions {
    /// Set an option of `-o` by its name in qemu-img. The error says what would be right.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        let switch = || match value {
            "on" | "true" | "yes" => Ok(true),
            "off" | "false" | "no" => Ok(false),
            _ => Err(format!("{name}={value}: write {name}=on or {name}=off")),
        };
        let wrong = |want: &str| Err(format!("{name}={value}: {want}"));
        match name {
            "size" => match parse_size(value) {
                Some(size) => self.size = size,
                None => return wrong("write a size like 10G"),
            },
            "compat" => match value {
                "0.10" | "v2" => self.version = 2,
                "1.1" | "v3" => self.version = 3,
                _ => return wrong("write 0.10 or v2, 1.1 or v3"),
            },
            "cluster_size" => match parse_size(value) {
                Some(size) => self.cluster_size = size,
                None => return wrong("write a size from 512 to 2M"),
            },
            "refcount_bits" => match value.parse() {
                Ok(bits) => self.refcount_bits = bits,
                Err(_) => return wrong("write 1, 2, 4, 8, 16, 32 or 64"),
            },
            "extended_l2" => self.extended_l2 = switch()?,
            "lazy_refcounts" => self.lazy_refcounts = switch()?,
            "preallocation" => {
                self.preallocation = match value {
                    "off" => Preallocation::Off,
                    "metadata" => Preallocation::Metadata,
                    "falloc" => Preallocation::Falloc,
                    "full" => Preallocation::Full,
                    _ => return wrong("write off, metadata, falloc or full"),
                }
            }
            "backing_file" => self.backing_file = Some(value.to_owned()),
            "backing_fmt" => self.backing_format = Some(value.to_owned()),
            "data_file" => self.data_file = Some(value.to_owned()),
            "data_file_raw" => self.data_file_raw = switch()?,
            "compression_type" => {
                self.compression = match value {
                    "zlib" => Compression::Deflate,
                    "zstd" => Compression::Zstd,
                    _ => return wrong("write zlib or zstd"),
                }
            }
            _ => return Err(format!("{name} is not an option of qcow2 images")),
        }
        Ok(())
    }

    /// Bytes of the image's file once every cluster of its disk is written, data and tables. The error
    /// says what would be right.
    pub fn full_size(&self) -> Result<u64, &'static str> {
        self.check()?;
        let preallocation = Preallocation::Metadata;
        let plan = plan(&CreateOptions { preallocation, ..self.clone() })?;
        Ok(plan.end << plan.header.cluster_bits)
    }

    /// What does not go together, or cannot be.
    fn check(&self) -> Result<(), &'static str> {
        let bits = self.cluster_size.trailing_zeros();
        if !self.cluster_size.is_power_of_two() || !CLUSTER_BITS.contains(&bits) {
            return Err("cluster_size must be a power of two from 512 to 2M");
        }
        if !self.refcount_bits.is_power_of_two() || self.refcount_bits > 64 {
            return Err("refcount_bits must be 1, 2, 4, 8, 16, 32 or 64");
        }
        let needs_v3 = self.refcount_bits != 16
            || self.extended_l2
            || self.lazy_refcounts
            || self.data_file.is_some()
            || self.compression != Compression::Deflate;
        match self.version {
            2 if needs_v3 => {
                return Err("refcount_bits other than 16, extended_l2, lazy_refcounts, data_file \
                            and compression_type=zstd need compat=1.1");
            }
            2 | 3 => {}
            _ => return Err("versions 2 and 3 exist"),
        }
        if self.extended_l2 && bits < 14 {
            return Err("extended_l2 needs clusters of at least 16K");
        }
        if self.data_file.is_none() && self.data_file_raw {
            return Err("data_file_raw needs data_file");
        }
        if self.data_file_raw && self.backing_file.is_some() {
            return Err("an image with data_file_raw has no backing file");
        }
        if self.backing_file.is_none() && self.backing_format.is_some() {
            return Err("backing_fmt needs backing_file");
        }
        if self.data_file.is_some() && self.lazy_refcounts {
            return Err("lazy_refcounts has no meaning with data_file");
        }
        let preallocated = self.preallocation != Preallocation::Off;
        if self.backing_file.is_some() && preallocated && !self.extended_l2 {
            return Err("preallocation would hide the backing file, but for extended_l2=on");
        }
        let name_len = |name: &Option<String>| name.as_ref().map_or(1, String::len);
        if !(1..=MAX_NAME).contains(&name_len(&self.backing_file))
            || !(1..=MAX_NAME).contains(&name_len(&self.data_file))
        {
            return Err("names of files have 1 to 1023 bytes");
        }
        if name_len(&self.backing_format) > 15 {
            return Err("names of formats have at most 15 bytes");
        }
        Ok(())
    }

    fn header(&self) -> Header {
        let mut header = Header {
            version: self.version,
            cluster_bits: self.cluster_size.trailing_zeros(),
            size: self.size,
            crypt: Crypt::None,
            l1_size: 0,
            l1_offset: 0,
            refcount_table_offset: 0,
            refcount_table_clusters: 0,
            snapshots: 0,
            snapshots_offset: 0,
            incompatible: 0,
            compatible: 0,
            autoclear: 0,
            refcount_order: self.refcount_bits.trailing_zeros(),
            compression: self.compression,
            further: Vec::new(),
            extensions: Vec::new(),
            backing_file: self.backing_file.clone().map(String::into_bytes),
        };
        let when = |set: bool, bit: u64| if set { bit } else { 0 };
        header.incompatible = when(self.extended_l2, incompatible::EXTENDED_L2)
            | when(self.data_file.is_some(), incompatible::DATA_FILE)
            | when(self.compression != Compression::Deflate, incompatible::COMPRESSION);
        header.compatible = when(self.lazy_refcounts, compatible::LAZY_REFCOUNTS);
        header.autoclear = when(self.data_file_raw, autoclear::DATA_FILE_RAW);
        let mut add = |kind, text: &Option<String>| {
            let data = text.clone().map(String::into_bytes);
            header.extensions.extend(data.map(|data| Extension { kind, data }));
        };
        add(extension::BACKING_FORMAT, &self.backing_format);
        add(extension::DATA_FILE, &self.data_file);
        if self.version > 2 {
            header.extensions.push(extension::our_feature_names());
            header.make_room();
        }
        header
    }
}

/// Where everything lies, in clusters.
struct Plan {
    header: Header,
    luks: Option<(u64, u64)>,
    refcount_blocks: u64,
    blocks_at: u64,
    l2_at: u64,
    l2_tables: u64,
    data_at: u64,
    /// All that has a refcount.
    end: u64,
    /// What L2 entries say of each cluster.
    bitmap: u64,
    external: bool,
}

/// Make a new image of `options` in a container, whose content is lost. With `data_file` the data
/// goes to `data`, which keeps its content where it is a raw image. It is stable afterwards.
pub async fn create(
    io: &Io,
    container: &Container,
    data: Option<&Container>,
    options: &CreateOptions,
) -> Result<Header, ToolError> {
    let refused = |why: &str| ToolError::Refused {
        path: container.path().to_owned(),
        why: format!("cannot create it: {why}"),
    };
    options.check().map_err(refused)?;
    if options.data_file.is_some() != data.is_some() {
        return Err(refused("an external data file must be both named and given"));
    }
    let plan = plan(options).map_err(refused)?;
    let header = &plan.header;
    let bytes = header.to_bytes().map_err(|source| {
        let path = container.path().to_owned();
        ToolError::Header { path, source }
    })?;
    let (cluster, end) = (header.cluster_size(), plan.end << header.cluster_bits);
    let write = async |offset: u64, bytes: &[u8]| {
        container.write(io, offset, bytes).await.map_err(failed(container, "write to", offset))
    };
    // What was there before must not be taken for an image, wherever this stops.
    if container.traits().regular {
        container.set_len(io, 0).await.map_err(failed(container, "empty", 0))?;
        container.set_len(io, end).await.map_err(failed(container, "extend", end))?;
    } else {
        if end > container.len() {
            return Err(refused(&format!(
                "it takes {end} bytes at once, and the device has {}",
                container.len()
            )));
        }
        write(0, &vec![0; cluster.max(4096) as usize]).await?;
    }
    container.sync(io).await.map_err(failed(container, "sync", 0))?;

    if let (Some((at, _)), Some(luks)) = (plan.luks, &options.luks) {
        write(at << header.cluster_bits, luks).await?;
    }
    let mut table = vec![0; (u64::from(header.refcount_table_clusters) * cluster) as usize];
    for (entry, block) in table.chunks_exact_mut(8).zip(0..plan.refcount_blocks) {
        let offset = (plan.blocks_at + block) << header.cluster_bits;
        entry.copy_from_slice(&offset.to_be_bytes());
    }
    write(header.refcount_table_offset, &table).await?;
    for block in 0..plan.refcount_blocks {
        let first = block * header.refcount_block_entries();
        let used = (plan.end - first).min(header.refcount_block_entries());
        let bytes = ones(used, header.refcount_order, cluster as usize);
        write((plan.blocks_at + block) << header.cluster_bits, &bytes).await?;
    }
    let l1_bytes = (u64::from(header.l1_size) * 8).next_multiple_of(cluster);
    let mut l1 = vec![0; l1_bytes as usize];
    for (entry, table) in l1.chunks_exact_mut(8).zip(0..plan.l2_tables) {
        let offset = (plan.l2_at + table) << header.cluster_bits;
        entry.copy_from_slice(&(offset | COPIED).to_be_bytes());
    }
    write(header.l1_offset, &l1).await?;
    write_l2(io, container, &plan).await?;
    let clusters = options.size.next_multiple_of(512).div_ceil(cluster);
    if let Some(data) = data {
        grow_data_file(io, data, options).await?;
        let extent = (0, options.size.next_multiple_of(512));
        fill(io, data, extent, options.preallocation, options.data_file_raw).await?;
        data.sync(io).await.map_err(failed(data, "sync", 0))?;
    } else if plan.l2_tables > 0 {
        let extent = (plan.data_at << header.cluster_bits, clusters << header.cluster_bits);
        fill(io, container, extent, options.preallocation, false).await?;
    }
    container.sync(io).await.map_err(failed(container, "sync", 0))?;
    write(0, &bytes).await?;
    container.sync(io).await.map_err(failed(container, "sync", 0))?;
    Ok(plan.header)
}

fn plan(options: &CreateOptions) -> Result<Plan, &'static str> {
    let mut header = options.header();
    header.size = options.size.checked_next_multiple_of(512).ok_or("it is too large")?;
    let cluster = header.cluster_size();
    let l1_entries = header.l1_entries_for(header.size).max(1);
    if l1_entries * 8 > MAX_L1_BYTES {
        return Err("the disk is too large for clusters of this size: use a larger cluster_size");
    }
    let external = options.data_file.is_some();
    if external && header.size > MAX_EXTERNAL {
        return Err("with data_file a disk has 64 PiB at most");
    }
    // The raw data file is found by whoever ignores it only if every cluster is said to be there.
    let preallocated = options.preallocation != Preallocation::Off || options.data_file_raw;
    let l2_tables = if preallocated { header.l1_entries_for(header.size) } else { 0 };
    let data = if preallocated && !external { header.size.div_ceil(cluster) } else { 0 };
    let luks = options.luks.as_ref().map_or(0, |luks| (luks.len() as u64).div_ceil(cluster));
    let l1 = (l1_entries * 8).div_ceil(cluster);
    let (mut table, mut blocks) = (1, 1);
    let end = loop {
        let end = 1 + luks + table + blocks + l1 + l2_tables + data;
        let want_blocks = end.div_ceil(header.refcount_block_entries());
        let want_table = (want_blocks * 8).div_ceil(cluster);
        if (want_table, want_blocks) == (table, blocks) {
            break end;
        }
        (table, blocks) = (table.max(want_table), blocks.max(want_blocks));
    };
    if table * cluster > MAX_REFCOUNT_TABLE_BYTES || end > (1 << 55) >> header.cluster_bits {
        return Err("so much cannot be preallocated with clusters of this size");
    }
    if luks > 0 {
        let len = options.luks.as_ref().map_or(0, |luks| luks.len() as u64);
        let encryption = extension::Encryption { offset: cluster, len };
        header.set_extension(extension::ENCRYPTION, Some(encryption.to_bytes()));
        header.crypt = Crypt::Luks;
        header.make_room();
    }
    let table_at = 1 + luks;
    let blocks_at = table_at + table;
    let l1_at = blocks_at + blocks;
    header.refcount_table_offset = table_at << header.cluster_bits;
    header.refcount_table_clusters = table as u32;
    header.l1_offset = l1_at << header.cluster_bits;
    header.l1_size = l1_entries as u32;
    Ok(Plan {
        luks: (luks > 0).then_some((1, luks)),
        refcount_blocks: blocks,
        blocks_at,
        l2_at: l1_at + l1,
        l2_tables,
        data_at: l1_at + l1 + l2_tables,
        end,
        // With a backing file the clusters have their place, and none of their subclusters is there.
        bitmap: if options.backing_file.is_some() { 0 } else { 0xffff_ffff },
        external,
        header,
    })
}

/// A refcount block whose first `used` clusters have a refcount of 1.
fn ones(used: u64, order: u32, len: usize) -> Vec<u8> {
    let mut block = vec![0u8; len];
    if order < 3 {
        let per_byte = 8 >> order;
        let full = [0xff, 0x55, 0x11].get(order as usize).copied().unwrap_or(0);
        let (whole, rest) = ((used / per_byte) as usize, (used % per_byte) as u32);
        block.iter_mut().take(whole).for_each(|byte| *byte = full);
        if let Some(byte) = block.get_mut(whole) {
            *byte = full & ((1u16 << (rest << order)) - 1) as u8;
        }
    } else {
        let width = 1 << (order - 3);
        for entry in block.chunks_exact_mut(width).take(used as usize) {
            entry.iter_mut().last().into_iter().for_each(|byte| *byte = 1);
        }
    }
    block
}

async fn write_l2(io: &Io, container: &Container, plan: &Plan) -> Result<(), ToolError> {
    let header = &plan.header;
    let clusters = header.size.div_ceil(header.cluster_size());
    let tables_bytes = plan.l2_tables << header.cluster_bits;
    let per_piece = PIECE.max(header.cluster_size()) / header.l2_entry_size();
    let mut done = 0;
    let mut bytes = Vec::new();
    while done * header.l2_entry_size() < tables_bytes {
        bytes.clear();
        let count = per_piece.min(tables_bytes / header.l2_entry_size() - done);
        for index in done..done + count {
            let at = if plan.external { index } else { plan.data_at + index };
            let there = index < clusters;
            let entry = if there { (at << header.cluster_bits) | COPIED } else { 0 };
            bytes.extend_from_slice(&entry.to_be_bytes());
            if header.extended_l2() {
                bytes.extend_from_slice(&if there { plan.bitmap } else { 0 }.to_be_bytes());
            }
        }
        let offset = (plan.l2_at << header.cluster_bits) + done * header.l2_entry_size();
        let end = container.write(io, offset, &bytes).await;
        end.map_err(failed(container, "write to", offset))?;
        done += count;
    }
    Ok(())
}

/// A raw data file keeps what it holds; another is emptied.
async fn grow_data_file(
    io: &Io,
    data: &Container,
    options: &CreateOptions,
) -> Result<(), ToolError> {
    if !data.traits().regular {
        return Ok(());
    }
    if !options.data_file_raw {
        data.set_len(io, 0).await.map_err(failed(data, "empty", 0))?;
    }
    let size = options.size.next_multiple_of(512);
    let wanted = options.data_file_raw || options.preallocation != Preallocation::Off;
    if wanted && data.len() < size {
        data.set_len(io, size).await.map_err(failed(data, "extend", size))?;
    }
    Ok(())
}

/// Make room for data, which reads as zeros afterwards, but for what is there and to be kept.
pub(super) async fn fill(
    io: &Io,
    container: &Container,
    (offset, len): (u64, u64),
    preallocation: Preallocation,
    keep: bool,
) -> Result<(), ToolError> {
    let fresh = container.traits().regular;
    let reserve = matches!(preallocation, Preallocation::Falloc | Preallocation::Full);
    if preallocation == Preallocation::Off || len == 0 {
        return Ok(());
    }
    if reserve && fresh {
        match container.allocate(io, offset, len).await {
            Err(Error::Unsupported) => {}
            end => end.map_err(failed(container, "reserve space in", offset))?,
        }
    }
    if keep || (fresh && preallocation != Preallocation::Full) {
        return Ok(());
    }
    // A device holds whatever it held before.
    if !fresh && preallocation != Preallocation::Full {
        match container.zero_range(io, offset, len).await {
            Err(Error::Unsupported) => {}
            end => return end.map_err(failed(container, "zero", offset)),
        }
    }
    let zeros = vec![0; PIECE.min(len) as usize];
    let mut done = 0;
    while done < len {
        let part = (len - done).min(PIECE) as usize;
        let at = offset + done;
        let end = container.write(io, at, zeros.get(..part).unwrap_or(&zeros)).await;
        end.map_err(failed(container, "write to", at))?;
        done += part as u64;
    }
    Ok(())
}
