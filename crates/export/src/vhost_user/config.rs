//! The configuration space of virtio-blk (virtio 1.2, section 5.2.4).

use ringtap_vbd::Disk;

use super::request::{ID_BYTES, MOST_ZEROED};

/// Bytes of the fields served here; the rest of the space reads as zeros.
const BYTES: usize = 60;
/// Where the write-cache field stands.
const WRITE_CACHE: usize = 32;
const SECTOR: u64 = 512;
/// Segments of one request: 1 MiB may lie scattered over 256 pages.
const MOST_SEGMENTS: u32 = 256;
/// The largest configuration space that vhost-user carries.
pub(crate) const SPACE: usize = 256;

/// The space as the guest sees it now, its write cache on or off.
pub(crate) fn space(vbd: &Disk, queues: u16, write_cache: bool) -> [u8; SPACE] {
    let info = vbd.info();
    let logical = u64::from(info.logical_block_size.max(512));
    let physical = u64::from(info.physical_block_size).max(logical);
    let mut space = [0; SPACE];
    let mut put = |at: usize, bytes: &[u8]| space[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &(vbd.size() / SECTOR).to_le_bytes());
    put(12, &MOST_SEGMENTS.to_le_bytes());
    put(20, &(logical as u32).to_le_bytes());
    put(24, &[(physical / logical).ilog2() as u8]);
    put(26, &((physical / logical) as u16).to_le_bytes());
    put(WRITE_CACHE, &[u8::from(write_cache)]);
    put(34, &queues.to_le_bytes());
    put(36, &MOST_ZEROED.to_le_bytes());
    put(40, &1u32.to_le_bytes());
    put(44, &((info.discard_alignment.max(logical) / SECTOR) as u32).to_le_bytes());
    put(48, &MOST_ZEROED.to_le_bytes());
    put(52, &1u32.to_le_bytes());
    put(56, &[1]);
    debug_assert!(space[BYTES..].iter().all(|byte| *byte == 0));
    space
}

/// The guest writes to the space. Only the write-cache field may be written: whether it is to be
/// on. None where it is anything else.
pub(crate) fn write(offset: u32, bytes: &[u8]) -> Option<bool> {
    match (offset as usize, bytes) {
        (WRITE_CACHE, [on]) if *on <= 1 => Some(*on == 1),
        _ => None,
    }
}

/// The identity that VIRTIO_BLK_T_GET_ID gives: cut to its 20 bytes, padded with zeros.
pub(crate) fn identity(serial: &str) -> [u8; ID_BYTES] {
    let mut identity = [0; ID_BYTES];
    let len = serial.len().min(ID_BYTES);
    identity[..len].copy_from_slice(&serial.as_bytes()[..len]);
    identity
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringtap_image::{CacheMode, Null};
    use ringtap_vbd::Vbd;

    #[test]
    fn fields_stand_where_the_specification_says() {
        let vbd = Vbd::new(Box::new(Null::new(1 << 30, false)), CacheMode::None);
        let space = space(&vbd, 3, true);
        assert_eq!(space[0..8], (1u64 << 21).to_le_bytes());
        assert_eq!(space[20..24], 512u32.to_le_bytes());
        assert_eq!((space[24], space[26]), (3, 8));
        assert_eq!((space[32], space[34]), (1, 3));
        assert_eq!((write(32, &[0]), write(32, &[1])), (Some(false), Some(true)));
        assert_eq!((write(0, &[0]), write(32, &[7]), write(32, &[0, 0])), (None, None, None));
    }
}
