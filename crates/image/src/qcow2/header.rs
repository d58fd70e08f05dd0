//! The header of a qcow2 image, with its extensions (docs/interop/qcow2 of QEMU: "Header").

use ringtap_io::Io;

use super::extension::{self, Bitmaps, Encryption, Extension};
use super::header_error::{HeaderError, MAGIC};
use crate::bytes::{be32, be64, take};
use crate::{Container, Error, OpenError};

/// Cluster sizes are 2^9 to 2^21 bytes.
pub const CLUSTER_BITS: std::ops::RangeInclusive<u32> = 9..=21;
/// The most bytes an L1 table takes.
pub const MAX_L1_BYTES: u64 = 32 << 20;
/// The most bytes a refcount table takes.
pub const MAX_REFCOUNT_TABLE_BYTES: u64 = 8 << 20;
/// The most bytes of a disk whose data lies in an external file: an entry has no bits for places beyond.
pub const MAX_EXTERNAL: u64 = 1 << 56;
/// The most snapshots of an image.
pub const MAX_SNAPSHOTS: u32 = 65536;
/// The longest LUKS header with its key material: as cryptsetup makes them.
const MAX_LUKS_BYTES: u64 = 16 << 20;
/// The most bytes of a backing file's name.
pub const MAX_NAME: usize = 1023;

/// In an L1 or L2 entry: what it points to has a refcount of exactly 1.
pub const COPIED: u64 = 1 << 63;
/// In an L2 entry: the cluster is compressed.
pub const COMPRESSED: u64 = 1 << 62;
/// In an L2 entry of a standard cluster without subclusters: it reads as zeros.
pub const ZERO: u64 = 1;
/// The bits of an L1 or L2 entry, or of a bitmap table's entry, that are a host offset.
pub const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
/// The bits of a refcount table entry that are a host offset.
pub const REFCOUNT_OFFSET_MASK: u64 = !0x1ff;
/// Reserved bits of an L1 entry.
pub const L1_RESERVED: u64 = !(OFFSET_MASK | COPIED);

/// Incompatible features: who does not know one of them must not open the image.
pub mod incompatible {
    /// Refcounts may be wrong; rebuild them before writing.
    pub const DIRTY: u64 = 1;
    /// Anything may be wrong; do not write.
    pub const CORRUPT: u64 = 1 << 1;
    /// Guest clusters lie in an external data file.
    pub const DATA_FILE: u64 = 1 << 2;
    /// Compressed clusters are not deflate.
    pub const COMPRESSION: u64 = 1 << 3;
    /// L2 entries have 128 bits and tell of 32 subclusters.
    pub const EXTENDED_L2: u64 = 1 << 4;
    /// Those we know.
    pub const KNOWN: u64 = 0x1f;
}

/// Compatible features: who does not know them may ignore them.
pub mod compatible {
    /// Refcounts need not be stable before what refers to them, while the dirty bit is set.
    pub const LAZY_REFCOUNTS: u64 = 1;
}

/// Autoclear features: who does not know one of them clears it before writing to the image.
pub mod autoclear {
    /// The bitmaps extension is consistent.
    pub const BITMAPS: u64 = 1;
    /// The external data file is a raw image by itself.
    pub const DATA_FILE_RAW: u64 = 1 << 1;
    /// Ringtap's own: a restart log holds newer tables. Whoever else writes to the image clears it, as
    /// the rule is, and the log is void.
    pub const RESTART_LOG: u64 = 1 << 63;
    /// With it, in these bits, which log, and in which state the image is: the boot, the file, and a
    /// generation that moves with every flush of tables.
    pub const RESTART_STAMP: u64 = 0x7fff_ffff_ffff_ff00;
    /// Those that are QEMU's.
    pub const KNOWN: u64 = 3;
}

/// How compressed clusters are compressed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Compression {
    /// Raw deflate (RFC 1951); QEMU calls it zlib.
    #[default]
    Deflate,
    /// Zstandard frames (RFC 8878).
    Zstd,
}

/// How guest data is encrypted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Crypt {
    /// Not at all.
    #[default]
    None,
    /// QEMU's old AES-CBC, given up as unsafe.
    Aes,
    /// LUKS1; the header extension says where its header lies.
    Luks,
}

/// The header of an image: what the file's first cluster says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// 2 or 3.
    pub version: u32,
    /// The cluster size is 2 to the power of this.
    pub cluster_bits: u32,
    /// Bytes the guest sees.
    pub size: u64,
    /// How guest data is encrypted.
    pub crypt: Crypt,
    /// Entries of the active L1 table.
    pub l1_size: u32,
    /// Where the active L1 table lies.
    pub l1_offset: u64,
    /// Where the refcount table lies.
    pub refcount_table_offset: u64,
    /// Clusters of the refcount table.
    pub refcount_table_clusters: u32,
    /// Number of internal snapshots.
    pub snapshots: u32,
    /// Where the snapshot table lies; 0 where there is none.
    pub snapshots_offset: u64,
    /// Features, see [`incompatible`].
    pub incompatible: u64,
    /// Features, see [`compatible`].
    pub compatible: u64,
    /// Features, see [`autoclear`].
    pub autoclear: u64,
    /// A refcount has 2 to the power of this bits.
    pub refcount_order: u32,
    /// How compressed clusters are compressed.
    pub compression: Compression,
    /// Header fields past those known here, kept as they are.
    pub further: Vec<u8>,
    /// The extensions in their order, unknown ones too; without the end marker.
    pub extensions: Vec<Extension>,
    /// The backing file's name as it is written in the image.
    pub backing_file: Option<Vec<u8>>,
}

impl Header {
    /// Bytes to read for [`Header::cluster_size_of`].
    pub const PROBE: usize = 24;

    /// The cluster size of an image that begins with these bytes; so much is to be read for
    /// [`Header::parse`].
    pub fn cluster_size_of(start: &[u8]) -> Result<usize, HeaderError> {
        let short = HeaderError::Short { len: start.len(), need: Header::PROBE };
        let found = take(start, 0).ok_or(short.clone())?;
        if found != MAGIC {
            return Err(HeaderError::Magic { found });
        }
        let bits = be32(start, 20).ok_or(short)?;
        if !CLUSTER_BITS.contains(&bits) {
            return Err(field(20, "cluster_bits", bits, "9 to 21 are possible"));
        }
        Ok(1 << bits)
    }

    /// Read the header of the image in a container, tables not looked at.
    pub async fn read(io: &Io, container: &Container) -> Result<Header, OpenError> {
        let path = || container.path().to_owned();
        let wrong = |source| OpenError::Qcow2 { path: path(), source };
        let failed = |error: Error| {
            let source = std::io::Error::from_raw_os_error(error.errno());
            OpenError::Os { what: "read the header of", path: path(), source }
        };
        let within = |len: usize| container.len().min(len as u64) as usize;
        let mut bytes = vec![0; within(Header::PROBE)];
        container.read(io, 0, &mut bytes).await.map_err(failed)?;
        let cluster = Header::cluster_size_of(&bytes).map_err(wrong)?;
        bytes.resize(within(cluster), 0);
        container.read(io, 0, &mut bytes).await.map_err(failed)?;
        Header::parse(&bytes).map_err(wrong)
    }

    /// Read a header from an image's first cluster, or as much of it as the file has. Tables are not
    /// looked at: see [`Header::check_tables`].
    pub fn parse(bytes: &[u8]) -> Result<Header, HeaderError> {
        let cluster = Header::cluster_size_of(bytes)?;
        let bytes = bytes.get(..cluster).unwrap_or(bytes);
        let version = be32(bytes, 4).unwrap_or(0);
        if !(2..=3).contains(&version) {
            return Err(field(4, "version", version, "2 and 3 are known"));
        }
        let need = if version == 2 { 72 } else { 104 };
        let short = || HeaderError::Short { len: bytes.len(), need };
        let u32_at = |at| be32(bytes, at).ok_or_else(short);
        let u64_at = |at| be64(bytes, at).ok_or_else(short);
        let of_v3 = |at| if version == 2 { Ok(0) } else { u64_at(at) };
        let crypt = match u32_at(32)? {
            0 => Crypt::None,
            1 => Crypt::Aes,
            2 => Crypt::Luks,
            other => return Err(field(32, "crypt_method", other, "0 to 2 are known")),
        };
        let (order, length) = if version == 2 { (4, 72) } else { (u32_at(96)?, u32_at(100)?) };
        if order > 6 {
            return Err(field(96, "refcount_order", order, "at most 6 is possible"));
        }
        let length = length as usize;
        if length < need || length % 8 != 0 || length > cluster {
            let want = "it must be a multiple of 8 from 104 to the cluster size";
            return Err(field(100, "header_length", length as u64, want));
        }
        if length > bytes.len() {
            return Err(HeaderError::Short { len: bytes.len(), need: length });
        }
        let name_at = u64_at(8)?;
        let extensions = extension::parse(bytes, length, name_at)?;
        let mut header = Header {
            version,
            cluster_bits: cluster.trailing_zeros(),
            size: u64_at(24)?,
            crypt,
            l1_size: u32_at(36)?,
            l1_offset: u64_at(40)?,
            refcount_table_offset: u64_at(48)?,
            refcount_table_clusters: u32_at(56)?,
            snapshots: u32_at(60)?,
            snapshots_offset: u64_at(64)?,
            incompatible: of_v3(72)?,
            compatible: of_v3(80)?,
            autoclear: of_v3(88)?,
            refcount_order: order,
            compression: Compression::Deflate,
            further: bytes.get(112..length).unwrap_or_default().to_vec(),
            extensions,
            backing_file: None,
        };
        header.check_features()?;
        let kind = if length > 104 { bytes.get(104).copied().unwrap_or(0) } else { 0 };
        header.compression = match (kind, header.has(incompatible::COMPRESSION)) {
            (0, false) => Compression::Deflate,
            (1, true) => Compression::Zstd,
            _ => {
                let want = "1 (zstd) with the compression feature or 0 without it is possible";
                return Err(field(104, "compression_type", kind, want));
            }
        };
        if header.extended_l2() && header.cluster_bits < 14 {
            let want = "with extended L2 entries it must be at least 14";
            return Err(field(20, "cluster_bits", header.cluster_bits, want));
        }
        if name_at != 0 {
            header.backing_file = Some(backing_name(bytes, name_at, u32_at(16)?)?);
        }
        if header.crypt == Crypt::Luks && header.encryption().is_none() {
            let what = "the image is encrypted and does not say where its LUKS header lies";
            return Err(HeaderError::Content { kind: extension::ENCRYPTION, what });
        }
        Ok(header)
    }

    fn check_features(&self) -> Result<(), HeaderError> {
        let unknown = self.incompatible & !incompatible::KNOWN;
        if unknown != 0 {
            let names = extension::feature_names(&self.extensions, 0, unknown);
            return Err(HeaderError::Unknown { names });
        }
        Ok(())
    }

    /// Whether the offsets and sizes of the tables can be right, in a file of `len` bytes.
    pub fn check_tables(&self, len: u64) -> Result<(), HeaderError> {
        if self.size > (1 << 62) {
            return Err(field(24, "size", self.size, "at most 2^62 bytes are possible"));
        }
        if u64::from(self.l1_size) * 8 > MAX_L1_BYTES {
            return Err(field(36, "l1_size", self.l1_size, "at most 32 MiB of L1 table are read"));
        }
        if u64::from(self.l1_size) < self.l1_entries_for(self.size) {
            let want = "the disk's size needs a larger table";
            return Err(field(36, "l1_size", self.l1_size, want));
        }
        let offset = |at, name, offset: u64| {
            if offset % self.cluster_size() != 0 {
                return Err(field(at, name, offset, "it must be a multiple of the cluster size"));
            }
            if offset == 0 || offset >= len {
                return Err(field(at, name, offset, "it must lie in the file after the header"));
            }
            Ok(())
        };
        if self.l1_size > 0 {
            offset(40, "l1_table_offset", self.l1_offset)?;
        }
        let clusters = self.refcount_table_clusters;
        if clusters == 0 {
            let want = "an image has one: rebuild it with check --repair all";
            return Err(field(56, "refcount_table_clusters", clusters, want));
        }
        if u64::from(clusters) << self.cluster_bits > MAX_REFCOUNT_TABLE_BYTES {
            let want = "at most 8 MiB of refcount table are read";
            return Err(field(56, "refcount_table_clusters", clusters, want));
        }
        offset(48, "refcount_table_offset", self.refcount_table_offset)?;
        if self.snapshots > MAX_SNAPSHOTS {
            return Err(field(60, "nb_snapshots", self.snapshots, "at most 65536 are possible"));
        }
        if self.snapshots > 0 {
            offset(64, "snapshots_offset", self.snapshots_offset)?;
        }
        if self.encryption().is_some_and(|place| place.len > MAX_LUKS_BYTES) {
            let what = "the LUKS header that it tells of is longer than 16 MiB, which none is";
            return Err(HeaderError::Content { kind: extension::ENCRYPTION, what });
        }
        Ok(())
    }

    /// The bytes to write at the file's beginning; at most a cluster.
    pub fn to_bytes(&self) -> Result<Vec<u8>, HeaderError> {
        let mut bytes = self.to_bytes_without_name();
        let name = self.backing_file.as_deref().unwrap_or_default();
        if !name.is_empty() {
            let at = bytes.len() as u64;
            bytes.extend_from_slice(name);
            bytes[8..16].copy_from_slice(&at.to_be_bytes());
            bytes[16..20].copy_from_slice(&(name.len() as u32).to_be_bytes());
        }
        let room = self.cluster_size() as usize;
        if bytes.len() > room || name.len() > MAX_NAME {
            return Err(HeaderError::Full { need: bytes.len(), room });
        }
        Ok(bytes)
    }

    fn to_bytes_without_name(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(1024);
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&self.version.to_be_bytes());
        bytes.extend_from_slice(&[0; 12]);
        bytes.extend_from_slice(&self.cluster_bits.to_be_bytes());
        bytes.extend_from_slice(&self.size.to_be_bytes());
        bytes.extend_from_slice(&(self.crypt as u32).to_be_bytes());
        bytes.extend_from_slice(&self.l1_size.to_be_bytes());
        bytes.extend_from_slice(&self.l1_offset.to_be_bytes());
        bytes.extend_from_slice(&self.refcount_table_offset.to_be_bytes());
        bytes.extend_from_slice(&self.refcount_table_clusters.to_be_bytes());
        bytes.extend_from_slice(&self.snapshots.to_be_bytes());
        bytes.extend_from_slice(&self.snapshots_offset.to_be_bytes());
        if self.version > 2 {
            bytes.extend_from_slice(&self.incompatible.to_be_bytes());
            bytes.extend_from_slice(&self.compatible.to_be_bytes());
            bytes.extend_from_slice(&self.autoclear.to_be_bytes());
            bytes.extend_from_slice(&self.refcount_order.to_be_bytes());
            let length = (112 + self.further.len().next_multiple_of(8)) as u32;
            bytes.extend_from_slice(&length.to_be_bytes());
            bytes.extend_from_slice(&[self.compression as u8, 0, 0, 0, 0, 0, 0, 0]);
            bytes.extend_from_slice(&self.further);
            bytes.resize(length as usize, 0);
        }
        extension::write(&self.extensions, &mut bytes);
        bytes
    }

    /// Whether an incompatible feature is set.
    pub fn has(&self, incompatible: u64) -> bool {
        self.incompatible & incompatible != 0
    }

    /// Bytes of a cluster.
    pub fn cluster_size(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Whether L2 entries have 128 bits and tell of subclusters.
    pub fn extended_l2(&self) -> bool {
        self.has(incompatible::EXTENDED_L2)
    }

    /// Bytes of an L2 entry: 8 or 16.
    pub fn l2_entry_size(&self) -> u64 {
        if self.extended_l2() { 16 } else { 8 }
    }

    /// Entries of an L2 table.
    pub fn l2_entries(&self) -> u64 {
        self.cluster_size() / self.l2_entry_size()
    }

    /// Bytes of the disk that one L2 table maps; at most 2^39.
    pub fn l2_coverage(&self) -> u64 {
        self.l2_entries() << self.cluster_bits
    }

    /// Entries an L1 table needs for a disk of `size` bytes.
    pub fn l1_entries_for(&self, size: u64) -> u64 {
        size.div_ceil(self.l2_coverage())
    }

    /// Bytes of a subcluster: a 32nd of a cluster with extended L2 entries, else the whole.
    pub fn subcluster_size(&self) -> u64 {
        if self.extended_l2() { self.cluster_size() / 32 } else { self.cluster_size() }
    }

    /// Bits of a refcount: 1 to 64.
    pub fn refcount_bits(&self) -> u32 {
        1 << self.refcount_order
    }

    /// The largest refcount.
    pub fn max_refcount(&self) -> u64 {
        u64::MAX >> (64 - self.refcount_bits())
    }

    /// Refcounts in a refcount block; at most 2^24.
    pub fn refcount_block_entries(&self) -> u64 {
        (self.cluster_size() * 8) >> self.refcount_order
    }

    /// Where a compressed cluster's L2 entry says its data lies: offset and length in bytes, the last
    /// sector whole. At most two clusters long.
    pub fn compressed_extent(&self, entry: u64) -> (u64, u64) {
        let shift = 62 - (self.cluster_bits - 8);
        let offset = entry & ((1 << shift) - 1) & 0x00ff_ffff_ffff_ffff;
        let further = (entry >> shift) & ((1 << (self.cluster_bits - 8)) - 1);
        (offset, (further + 1) * 512 - offset % 512)
    }

    /// The L2 entry of a compressed cluster whose `len` > 0 bytes lie at `offset`; none where the
    /// format cannot say that.
    pub fn compressed_entry(&self, offset: u64, len: u64) -> Option<u64> {
        let shift = 62 - (self.cluster_bits - 8);
        let further = offset.checked_add(len)?.checked_sub(1)? / 512 - offset / 512;
        let fits = offset < (1 << shift.min(56)) && further < (1 << (self.cluster_bits - 8));
        fits.then_some(COMPRESSED | (further << shift) | offset)
    }

    /// The backing file's format, where it is recorded.
    pub fn backing_format(&self) -> Option<&[u8]> {
        self.extension(extension::BACKING_FORMAT)
    }

    /// The external data file's name, where it is recorded.
    pub fn data_file(&self) -> Option<&[u8]> {
        self.extension(extension::DATA_FILE)
    }

    /// Where the encryption's own header lies.
    pub fn encryption(&self) -> Option<Encryption> {
        Encryption::parse(self.extension(extension::ENCRYPTION)?)
    }

    /// The bitmaps extension, where it is there and said to be consistent.
    pub fn bitmaps(&self) -> Option<Bitmaps> {
        let consistent = self.autoclear & autoclear::BITMAPS != 0;
        Bitmaps::parse(self.extension(extension::BITMAPS)?).filter(|_| consistent)
    }

    /// Those autoclear features that are QEMU's and that go on being true while the image is written to.
    pub(super) fn known_autoclear(&self) -> u64 {
        let bitmaps = if self.bitmaps().is_some() { 0 } else { autoclear::BITMAPS };
        self.autoclear & autoclear::KNOWN & !bitmaps
    }

    /// The data of the first extension of this type.
    pub fn extension(&self, kind: u32) -> Option<&[u8]> {
        let found = self.extensions.iter().find(|extension| extension.kind == kind);
        found.map(|extension| extension.data.as_slice())
    }

    /// Leave the names of features out where the cluster has no room for them: they are only for other programs' messages.
    pub(super) fn make_room(&mut self) {
        if self.to_bytes().is_err() {
            self.set_extension(extension::FEATURE_NAMES, None);
        }
    }

    /// Set the data of an extension, or remove it.
    pub fn set_extension(&mut self, kind: u32, data: Option<Vec<u8>>) {
        let place = self.extensions.iter().position(|extension| extension.kind == kind);
        match (place, data) {
            (Some(place), Some(data)) => self.extensions[place].data = data,
            (Some(place), None) => {
                self.extensions.remove(place);
            }
            (None, Some(data)) => self.extensions.insert(0, Extension { kind, data }),
            (None, None) => {}
        }
    }
}

fn field(at: usize, name: &'static str, found: impl Into<u64>, want: &'static str) -> HeaderError {
    HeaderError::Field { at, name, found: found.into(), want }
}

fn backing_name(bytes: &[u8], at: u64, len: u32) -> Result<Vec<u8>, HeaderError> {
    if len as usize > MAX_NAME || len == 0 {
        return Err(field(16, "backing_file_size", len, "it must be 1 to 1023"));
    }
    let end = at.checked_add(u64::from(len)).filter(|end| *end <= bytes.len() as u64);
    let name = end.and_then(|end| bytes.get(at as usize..end as usize));
    let want = "the name must lie in the first cluster";
    Ok(name.ok_or_else(|| field(8, "backing_file_offset", at, want))?.to_vec())
}

#[cfg(test)]
#[path = "header_tests.rs"]
mod tests;
