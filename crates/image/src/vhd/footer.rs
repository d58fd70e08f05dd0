//! The footer of a VHD: 512 bytes at the file's end, and at its beginning too where blocks are
//! allocated on demand (source: Virtual Hard Disk Image Format Specification 1.0, "Hard Disk Footer
//! Format"). All numbers are big-endian.

use crate::bytes::{get, put};

/// Bytes of a footer, and of a sector.
pub const SECTOR: u64 = 512;
/// The largest disk: 2040 GiB, where Hyper-V, Azure and QEMU stop.
pub const MOST: u64 = 0xff00_0000 * SECTOR;
/// The largest geometry, which says nothing about the size: 65535 cylinders, 16 heads, 255 sectors.
const MOST_GEOMETRY: (u16, u8, u8) = (65535, 16, 255);
const COOKIE: &[u8; 8] = b"conectix";
const CHECKSUM: usize = 64;
/// No dynamic header follows.
const NOWHERE: u64 = u64::MAX;

/// What kind of VHD it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The disk's bytes, then the footer.
    Fixed,
    /// Blocks allocated on demand.
    Dynamic,
    /// Blocks allocated on demand over a parent.
    Differencing,
}

/// A footer, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Footer {
    /// The kind.
    pub kind: Kind,
    /// Where the dynamic header lies, if the kind has one.
    pub header_at: u64,
    /// The size it names, in bytes.
    pub current_size: u64,
    /// Cylinders, heads, sectors per track.
    pub geometry: (u16, u8, u8),
    /// The program that made it.
    pub creator: [u8; 4],
    /// Seconds since 2000, UTC, when it was made.
    pub timestamp: u32,
    /// Its unique id, by which children know their parent.
    pub id: [u8; 16],
    /// The bytes as they are, unknown fields and all.
    bytes: [u8; 512],
}

/// Why 512 bytes are no footer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FooterError {
    /// Other bytes are there.
    #[error("no VHD footer is there")]
    Absent,
    /// The sum is wrong.
    #[error("the footer's checksum is {found:#010x} and its bytes give {sum:#010x}")]
    Checksum {
        /// The sum written in it.
        found: u32,
        /// The sum of its bytes.
        sum: u32,
    },
    /// Another version.
    #[error("the footer's version is {0:#010x}, and 0x00010000 is known")]
    Version(u32),
    /// Another type.
    #[error("the disk type is {0}, and 2 (fixed), 3 (dynamic) and 4 (differencing) are known")]
    Kind(u32),
}

impl Footer {
    /// Read 512 bytes.
    pub fn parse(bytes: &[u8; 512]) -> Result<Footer, FooterError> {
        if get::<8>(bytes, 0) != *COOKIE {
            return Err(FooterError::Absent);
        }
        let word = |at| u32::from_be_bytes(get(bytes, at));
        let (found, sum) = (word(CHECKSUM), checksum(bytes, CHECKSUM));
        if found != sum {
            return Err(FooterError::Checksum { found, sum });
        }
        if word(12) >> 16 != 1 {
            return Err(FooterError::Version(word(12)));
        }
        let kind = match word(60) {
            2 => Kind::Fixed,
            3 => Kind::Dynamic,
            4 => Kind::Differencing,
            other => return Err(FooterError::Kind(other)),
        };
        Ok(Footer {
            kind,
            header_at: u64::from_be_bytes(get(bytes, 16)),
            current_size: u64::from_be_bytes(get(bytes, 48)),
            geometry: (
                u16::from_be_bytes(get(bytes, 56)),
                get::<2>(bytes, 58)[0],
                get::<2>(bytes, 58)[1],
            ),
            creator: get(bytes, 28),
            timestamp: word(24),
            id: get(bytes, 68),
            bytes: *bytes,
        })
    }

    /// A footer for a new image of `size` bytes.
    pub fn new(
        kind: Kind,
        size: u64,
        geometry: (u16, u8, u8),
        id: [u8; 16],
        timestamp: u32,
    ) -> Footer {
        let header_at = if kind == Kind::Fixed { NOWHERE } else { SECTOR };
        let creator = *b"rtap";
        let mut bytes = [0; 512];
        put(&mut bytes, 0, COOKIE);
        put(&mut bytes, 8, &2u32.to_be_bytes());
        put(&mut bytes, 12, &0x0001_0000u32.to_be_bytes());
        put(&mut bytes, 16, &header_at.to_be_bytes());
        put(&mut bytes, 24, &timestamp.to_be_bytes());
        put(&mut bytes, 28, &creator);
        put(&mut bytes, 32, &0x0001_0000u32.to_be_bytes());
        // The specification knows Windows and Macintosh only.
        put(&mut bytes, 36, b"Wi2k");
        put(&mut bytes, 40, &size.to_be_bytes());
        put(&mut bytes, 48, &size.to_be_bytes());
        put(&mut bytes, 56, &geometry.0.to_be_bytes());
        put(&mut bytes, 58, &[geometry.1, geometry.2]);
        let number: u32 = match kind {
            Kind::Fixed => 2,
            Kind::Dynamic => 3,
            Kind::Differencing => 4,
        };
        put(&mut bytes, 60, &number.to_be_bytes());
        put(&mut bytes, 68, &id);
        let sum = checksum(&bytes, CHECKSUM);
        put(&mut bytes, CHECKSUM, &sum.to_be_bytes());
        Footer { kind, header_at, current_size: size, geometry, creator, timestamp, id, bytes }
    }

    /// The same image's footer for a disk of `size` bytes, which all programs take for just that.
    pub fn resized(&self, size: u64) -> Footer {
        let mut bytes = self.bytes;
        let geometry = MOST_GEOMETRY;
        put(&mut bytes, 48, &size.to_be_bytes());
        put(&mut bytes, 56, &geometry.0.to_be_bytes());
        put(&mut bytes, 58, &[geometry.1, geometry.2]);
        let sum = checksum(&bytes, CHECKSUM);
        put(&mut bytes, CHECKSUM, &sum.to_be_bytes());
        Footer { current_size: size, geometry, bytes, ..self.clone() }
    }

    /// The footer as it is written.
    pub fn bytes(&self) -> &[u8; 512] {
        &self.bytes
    }

    /// Bytes of the disk. Virtual PC and QEMU mean the geometry, everybody else the current size; the
    /// largest geometry means the current size to all.
    pub fn disk_size(&self) -> u64 {
        let (cylinders, heads, sectors) = self.geometry;
        let by_geometry =
            matches!(&self.creator, b"vpc " | b"qemu") && self.geometry != MOST_GEOMETRY;
        let size = if by_geometry {
            u64::from(cylinders) * u64::from(heads) * u64::from(sectors) * SECTOR
        } else {
            self.current_size
        };
        size - size % SECTOR
    }
}

/// The complement of the sum of all bytes but the four at `at`, where the sum is written.
pub(super) fn checksum(bytes: &[u8], at: usize) -> u32 {
    let sum: u32 = (0..)
        .zip(bytes)
        .filter(|(index, _)| !(at..at + 4).contains(index))
        .map(|(_, byte)| u32::from(*byte))
        .fold(0, u32::wrapping_add);
    !sum
}

/// The geometry for that many sectors, which may hold a little less (source: the specification's
/// appendix "CHS Calculation").
pub fn geometry(sectors: u64) -> (u16, u8, u8) {
    let sectors = sectors.min(65535 * 16 * 255);
    let (per_track, heads, tracks);
    if sectors >= 65535 * 16 * 63 {
        per_track = 255;
        heads = 16;
        tracks = sectors / per_track;
    } else {
        let few = sectors / 17;
        let some = few.div_ceil(1024).max(4);
        if few < some * 1024 && some <= 16 {
            (per_track, heads, tracks) = (17, some, few);
        } else if sectors / 31 < 16 * 1024 {
            (per_track, heads, tracks) = (31, 16, sectors / 31);
        } else {
            (per_track, heads, tracks) = (63, 16, sectors / 63);
        }
    }
    ((tracks / heads) as u16, heads as u8, per_track as u8)
}

/// Size and geometry of a new disk of at least `size` bytes: the next larger that has a geometry, as
/// qemu-img does; with `force`, and where there is none, the size itself under the largest geometry.
pub fn size_and_geometry(size: u64, force: bool) -> (u64, (u16, u8, u8)) {
    let sectors = size.div_ceil(SECTOR);
    if !force {
        // A cylinder is at most 16 * 255 sectors; one of those numbers fits exactly.
        for more in 0..=16 * 255 {
            let (cylinders, heads, per_track) = geometry(sectors + more);
            let holds = u64::from(cylinders) * u64::from(heads) * u64::from(per_track);
            if holds >= sectors {
                return (holds * SECTOR, (cylinders, heads, per_track));
            }
        }
    }
    (sectors * SECTOR, MOST_GEOMETRY)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_footer_reads_back() {
        let footer = Footer::new(Kind::Dynamic, 10 << 20, geometry(20480), [7; 16], 42);
        assert_eq!(Footer::parse(footer.bytes()), Ok(footer.clone()));
        let mut bytes = *footer.bytes();
        bytes[300] ^= 1;
        assert!(matches!(Footer::parse(&bytes), Err(FooterError::Checksum { .. })));
        bytes[0] = 0;
        assert_eq!(Footer::parse(&bytes), Err(FooterError::Absent));
    }

    #[test]
    fn geometries_hold_what_they_are_for() {
        // Figures of qemu-img 7.2 and of the specification's formula.
        assert_eq!(geometry(20480), (301, 4, 17));
        assert_eq!(size_and_geometry(10 << 20, false).0, 10_514_432);
        assert_eq!(size_and_geometry(10 << 20, true), (10 << 20, MOST_GEOMETRY));
        for size in [1, 512, 1 << 20, 100 << 20, (1 << 30) + 512, 5 << 30, 100 << 30, 127 << 30] {
            let (rounded, geometry) = size_and_geometry(size, false);
            let (cylinders, heads, sectors) = geometry;
            let holds = u64::from(cylinders) * u64::from(heads) * u64::from(sectors) * 512;
            assert!(rounded >= size && holds == rounded, "{size}: {rounded}");
            assert!(rounded - size < 512 * 16 * 255, "{size}: {rounded}");
        }
        assert_eq!(size_and_geometry(1 << 40, false), (1 << 40, MOST_GEOMETRY));
    }
}
