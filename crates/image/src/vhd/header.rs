//! The dynamic header: 1024 bytes that the footer of a dynamic or differencing VHD points to, with the
//! parent locators (source: Virtual Hard Disk Image Format Specification 1.0, "Dynamic Disk Header
//! Format").

use super::footer::{SECTOR, checksum};
use crate::bytes::{get, put};

/// Bytes of the header.
pub const LEN: usize = 1024;
/// A block that has no room yet, in the block allocation table.
pub const UNUSED: u32 = u32::MAX;
/// The most blocks of a disk: 2 TiB of 512 KiB blocks.
const MOST_BLOCKS: u64 = 1 << 22;
const COOKIE: &[u8; 8] = b"cxsparse";
const CHECKSUM: usize = 36;
const LOCATORS: usize = 576;

/// A dynamic header, checked for itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Where the block allocation table lies.
    pub table_at: u64,
    /// Entries it has.
    pub entries: u32,
    /// Bytes of a block, a power of two.
    pub block_size: u32,
    /// The parent's unique id.
    pub parent_id: [u8; 16],
    /// When the parent was last changed, in seconds since 2000.
    pub parent_time: u32,
    /// The parent's name.
    pub parent_name: String,
    /// Where other names of the parent lie.
    pub locators: Vec<Locator>,
}

/// A place that holds a name of the parent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Locator {
    /// In what form: `W2ru`, `W2ku`, `MacX` and others.
    pub code: [u8; 4],
    /// Bytes set aside for it.
    pub space: u64,
    /// Bytes of the name.
    pub len: u32,
    /// Where it lies.
    pub at: u64,
}

/// Why 1024 bytes are no dynamic header, or not one for the disk.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// Other bytes are there.
    #[error("no dynamic header is there")]
    Absent,
    /// The sum is wrong.
    #[error("the dynamic header's checksum is {found:#010x} and its bytes give {sum:#010x}")]
    Checksum {
        /// The sum written in it.
        found: u32,
        /// The sum of its bytes.
        sum: u32,
    },
    /// Another version.
    #[error("the dynamic header's version is {0:#010x}, and 0x00010000 is known")]
    Version(u32),
    /// Blocks of a strange size.
    #[error("the block size is {0} bytes, and a power of two from 512 to 256 MiB is known")]
    BlockSize(u32),
    /// Too few entries.
    #[error("the table has {found} entries and the disk of {size} bytes needs {needed}")]
    Entries {
        /// Entries there are.
        found: u32,
        /// Entries the disk needs.
        needed: u64,
        /// Bytes of the disk.
        size: u64,
    },
    /// Too many blocks.
    #[error("the disk has {0} blocks, and at most {MOST_BLOCKS} are supported")]
    Blocks(u64),
}

impl Header {
    /// Read 1024 bytes.
    pub fn parse(bytes: &[u8; LEN]) -> Result<Header, HeaderError> {
        if get::<8>(bytes, 0) != *COOKIE {
            return Err(HeaderError::Absent);
        }
        let word = |at| u32::from_be_bytes(get(bytes, at));
        let (found, sum) = (word(CHECKSUM), checksum(bytes, CHECKSUM));
        if found != sum {
            return Err(HeaderError::Checksum { found, sum });
        }
        if word(24) >> 16 != 1 {
            return Err(HeaderError::Version(word(24)));
        }
        let block_size = word(32);
        if !block_size.is_power_of_two() || !(512..=256 << 20).contains(&block_size) {
            return Err(HeaderError::BlockSize(block_size));
        }
        let units: Vec<u16> =
            (0..256).map(|index| u16::from_be_bytes(get(bytes, 64 + 2 * index))).collect();
        let units = units.split(|unit| *unit == 0).next().unwrap_or_default();
        let locators = (0..8).map(|index| Locator::parse(&get::<24>(bytes, LOCATORS + 24 * index)));
        Ok(Header {
            table_at: u64::from_be_bytes(get(bytes, 16)),
            entries: word(28),
            block_size,
            parent_id: get(bytes, 40),
            parent_time: word(56),
            parent_name: String::from_utf16_lossy(units),
            locators: locators.filter(|locator| locator.code != [0; 4]).collect(),
        })
    }

    /// The header as it is written.
    pub fn to_bytes(&self) -> [u8; LEN] {
        let mut bytes = [0; LEN];
        put(&mut bytes, 0, COOKIE);
        put(&mut bytes, 8, &u64::MAX.to_be_bytes());
        put(&mut bytes, 16, &self.table_at.to_be_bytes());
        put(&mut bytes, 24, &0x0001_0000u32.to_be_bytes());
        put(&mut bytes, 28, &self.entries.to_be_bytes());
        put(&mut bytes, 32, &self.block_size.to_be_bytes());
        put(&mut bytes, 40, &self.parent_id);
        put(&mut bytes, 56, &self.parent_time.to_be_bytes());
        for (index, unit) in self.parent_name.encode_utf16().take(255).enumerate() {
            put(&mut bytes, 64 + 2 * index, &unit.to_be_bytes());
        }
        for (index, locator) in self.locators.iter().take(8).enumerate() {
            put(&mut bytes, LOCATORS + 24 * index, &locator.to_bytes());
        }
        let sum = checksum(&bytes, CHECKSUM);
        put(&mut bytes, CHECKSUM, &sum.to_be_bytes());
        bytes
    }

    /// The number of blocks of a disk of `size` bytes, where the table has an entry for each.
    pub fn blocks(&self, size: u64) -> Result<u32, HeaderError> {
        let needed = size.div_ceil(u64::from(self.block_size));
        if needed > MOST_BLOCKS {
            return Err(HeaderError::Blocks(needed));
        }
        if needed > u64::from(self.entries) {
            return Err(HeaderError::Entries { found: self.entries, needed, size });
        }
        Ok(needed as u32)
    }

    /// Bytes of a block's sector bitmap: a bit for each sector, in whole sectors.
    pub fn bitmap_size(&self) -> u64 {
        (u64::from(self.block_size) / SECTOR).div_ceil(8).next_multiple_of(SECTOR)
    }

    /// Bytes of the table, in whole sectors.
    pub fn table_size(&self) -> u64 {
        (u64::from(self.entries) * 4).next_multiple_of(SECTOR)
    }
}

impl Locator {
    fn parse(bytes: &[u8; 24]) -> Locator {
        let word = |at| u32::from_be_bytes(get(bytes, at));
        // The specification counts sectors here; most writers count bytes.
        let space = match u64::from(word(4)) {
            space if space < SECTOR => space * SECTOR,
            space => space,
        };
        Locator { code: get(bytes, 0), space, len: word(8), at: u64::from_be_bytes(get(bytes, 16)) }
    }

    fn to_bytes(self) -> [u8; 24] {
        let mut bytes = [0; 24];
        put(&mut bytes, 0, &self.code);
        put(&mut bytes, 4, &(self.space as u32).to_be_bytes());
        put(&mut bytes, 8, &self.len.to_be_bytes());
        put(&mut bytes, 16, &self.at.to_be_bytes());
        bytes
    }

    /// Where its space ends.
    pub fn end(&self) -> u64 {
        self.at.saturating_add(self.space.max(u64::from(self.len)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_reads_back() {
        let header = Header {
            table_at: 8192,
            entries: 6,
            block_size: 2 << 20,
            parent_id: [3; 16],
            parent_time: 99,
            parent_name: "bäse.vhd".to_owned(),
            locators: vec![Locator { code: *b"W2ru", space: 512, len: 20, at: 4096 }],
        };
        let mut bytes = header.to_bytes();
        assert_eq!(Header::parse(&bytes), Ok(header.clone()));
        assert_eq!((header.bitmap_size(), header.table_size()), (512, 512));
        assert_eq!(header.blocks(12 << 20), Ok(6));
        assert!(header.blocks((12 << 20) + 512).is_err());
        bytes[33] ^= 1;
        assert!(matches!(Header::parse(&bytes), Err(HeaderError::Checksum { .. })));
    }
}
