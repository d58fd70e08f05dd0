//! Commands of the ublk driver, in bytes.
//!
//! Source: Linux, include/uapi/linux/ublk_cmd.h. Integers are in the machine's own order.

use ringtap_image::Info;
use ringtap_vbd::{Error, Kind};

/// A command's number, as the driver wants it: as an ioctl's.
const fn encode(direction: u32, size: u32, number: u32) -> u32 {
    direction << 30 | size << 16 | (b'u' as u32) << 8 | number
}

const CONTROL_SIZE: u32 = 32;
const READ: u32 = 2;
const READ_WRITE: u32 = 3;

pub(crate) mod control {
    use super::{CONTROL_SIZE, READ, READ_WRITE, encode};

    pub(crate) const ADD: u32 = encode(READ_WRITE, CONTROL_SIZE, 0x04);
    pub(crate) const DELETE: u32 = encode(READ_WRITE, CONTROL_SIZE, 0x05);
    pub(crate) const START: u32 = encode(READ_WRITE, CONTROL_SIZE, 0x06);
    pub(crate) const STOP: u32 = encode(READ_WRITE, CONTROL_SIZE, 0x07);
    pub(crate) const SET_PARAMS: u32 = encode(READ_WRITE, CONTROL_SIZE, 0x08);
    pub(crate) const GET_PARAMS: u32 = encode(READ, CONTROL_SIZE, 0x09);
    pub(crate) const START_RECOVERY: u32 = encode(READ_WRITE, CONTROL_SIZE, 0x10);
    pub(crate) const END_RECOVERY: u32 = encode(READ_WRITE, CONTROL_SIZE, 0x11);
    pub(crate) const INFO: u32 = encode(READ, CONTROL_SIZE, 0x12);
    pub(crate) const FEATURES: u32 = encode(READ, CONTROL_SIZE, 0x13);
    pub(crate) const DELETE_ASYNC: u32 = encode(READ, CONTROL_SIZE, 0x14);
    pub(crate) const UPDATE_SIZE: u32 = encode(READ_WRITE, CONTROL_SIZE, 0x15);
}

/// Fetch a request of a slot for the first time.
pub(crate) const FETCH: u32 = encode(READ_WRITE, 16, 0x20);
/// Answer a slot's request and fetch its next.
pub(crate) const COMMIT_AND_FETCH: u32 = encode(READ_WRITE, 16, 0x21);

pub(crate) mod feature {
    /// Requests' pages are registered with a queue's ring (Linux 6.16), and their bytes can also be
    /// read and written through the device's file. Not for ordinary users.
    pub(crate) const ZERO_COPY: u64 = 1 << 0 | 1 << 7 | 1 << 11;
    /// Requests wait for the next server, and those in flight are given to it again.
    pub(crate) const RECOVERY: u64 = 1 << 3 | 1 << 4;
    pub(crate) const UNPRIVILEGED: u64 = 1 << 5;
    /// Commands are numbered as above.
    pub(crate) const IOCTL_ENCODE: u64 = 1 << 6;
    pub(crate) const UPDATE_SIZE: u64 = 1 << 10;
    /// Devices can be quiesced (Linux 6.16).
    pub(crate) const QUIESCE: u64 = 1 << 12;
}

const OP_READ: u32 = 0;
const OP_WRITE: u32 = 1;
const OP_FLUSH: u32 = 2;
const OP_DISCARD: u32 = 3;
const OP_WRITE_ZEROES: u32 = 5;
const FLAG_FUA: u32 = 1 << 13;
const FLAG_NO_UNMAP: u32 = 1 << 15;
const FLAG_NOT_REGISTERED: u32 = 1 << 17;

const SECTOR: u64 = 512;
/// UBLK_MAX_QUEUE_DEPTH.
const MOST_DEPTH: usize = 4096;
const PAGE: usize = 4096;
/// `struct ublksrv_io_desc`.
pub(crate) const DESCRIPTOR: usize = 24;
/// UBLKSRV_IO_BUF_OFFSET: the requests' bytes lie from here on in the device's file.
const BYTES: u64 = 1 << 31;
/// UBLK_AUTO_BUF_REG_FALLBACK, where it lies in the address of a command.
const REGISTER_OR_SAY: u32 = 1 << 16;

/// Where the descriptors of a queue lie in the device's file, and how many bytes.
pub(crate) fn descriptors_of(queue: u16, depth: u16) -> (u64, usize) {
    let most = (MOST_DEPTH * DESCRIPTOR).next_multiple_of(PAGE);
    let len = (usize::from(depth) * DESCRIPTOR).next_multiple_of(PAGE);
    (u64::from(queue) * most as u64, len)
}

/// Where the bytes of a slot's request lie in the device's file.
pub(crate) fn bytes_of(queue: u16, tag: u16) -> u64 {
    BYTES + (u64::from(queue) << 41 | u64::from(tag) << 25)
}

/// `struct ublk_auto_buf_reg`: register the next request's pages at this place, or say in its
/// descriptor that this could not be done.
pub(crate) fn register_at(index: u16) -> u32 {
    u32::from(index) | REGISTER_OR_SAY
}

/// `struct ublksrv_io_cmd`.
pub(crate) fn io_command(queue: u16, tag: u16, result: i32, address: u64) -> [u8; 16] {
    let mut out = [0; 16];
    out[0..2].copy_from_slice(&queue.to_ne_bytes());
    out[2..4].copy_from_slice(&tag.to_ne_bytes());
    out[4..8].copy_from_slice(&result.to_ne_bytes());
    out[8..16].copy_from_slice(&address.to_ne_bytes());
    out
}

/// `struct ublksrv_ctrl_cmd`.
pub(crate) fn control_command(
    id: u32,
    address: u64,
    len: u16,
    path_len: u16,
    data: u64,
) -> [u8; 80] {
    let mut out = [0; 80];
    out[0..4].copy_from_slice(&id.to_ne_bytes());
    // For no queue in particular.
    out[4..6].copy_from_slice(&u16::MAX.to_ne_bytes());
    out[6..8].copy_from_slice(&len.to_ne_bytes());
    out[8..16].copy_from_slice(&address.to_ne_bytes());
    out[16..24].copy_from_slice(&data.to_ne_bytes());
    out[24..26].copy_from_slice(&path_len.to_ne_bytes());
    out
}

/// What a device does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It is not a block device yet, or no more.
    Dead,
    /// It is served.
    Live,
    /// Its server is gone; its requests wait for another.
    Waiting,
}

/// `struct ublksrv_ctrl_dev_info`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeviceInfo {
    pub(crate) queues: u16,
    pub(crate) depth: u16,
    pub(crate) state: State,
    pub(crate) most_bytes: u32,
    pub(crate) id: u32,
    pub(crate) pid: i32,
    pub(crate) features: u64,
    /// The server's own, which the driver keeps: whose the device is.
    pub(crate) mark: u64,
}

impl DeviceInfo {
    pub(crate) const LEN: usize = 64;

    /// Whether requests come with pages that are registered, not with copies.
    pub(crate) fn is_zero_copy(&self) -> bool {
        self.features & feature::ZERO_COPY == feature::ZERO_COPY
    }

    pub(crate) fn encode(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        out[0..2].copy_from_slice(&self.queues.to_ne_bytes());
        out[2..4].copy_from_slice(&self.depth.to_ne_bytes());
        out[8..12].copy_from_slice(&self.most_bytes.to_ne_bytes());
        out[12..16].copy_from_slice(&self.id.to_ne_bytes());
        out[16..20].copy_from_slice(&self.pid.to_ne_bytes());
        out[24..32].copy_from_slice(&self.features.to_ne_bytes());
        out[32..40].copy_from_slice(&self.mark.to_ne_bytes());
        out
    }

    pub(crate) fn decode(bytes: &[u8; Self::LEN]) -> DeviceInfo {
        let word = |at: usize| u32::from_ne_bytes([0, 1, 2, 3].map(|i| bytes[at + i]));
        let short = |at: usize| u16::from_ne_bytes([bytes[at], bytes[at + 1]]);
        let long = |at: usize| u64::from_ne_bytes([0, 1, 2, 3, 4, 5, 6, 7].map(|i| bytes[at + i]));
        DeviceInfo {
            queues: short(0),
            depth: short(2),
            state: match short(4) {
                0 => State::Dead,
                1 => State::Live,
                _ => State::Waiting,
            },
            most_bytes: word(8),
            id: word(12),
            pid: word(16) as i32,
            features: long(24),
            mark: long(32),
        }
    }
}

/// Bytes of [`params`].
pub(crate) const PARAMS: usize = 116;
const READ_ONLY: u32 = 1 << 0;
const VOLATILE_CACHE: u32 = 1 << 2;

/// What [`params`] made of a disk, when its device was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Described {
    pub(crate) read_only: bool,
    pub(crate) write_cache: bool,
    /// Bytes.
    pub(crate) size: u64,
}

impl Described {
    pub(crate) fn decode(params: &[u8; PARAMS]) -> Described {
        let word = |at: usize| u32::from_ne_bytes([0, 1, 2, 3].map(|i| params[at + i]));
        let sectors = u64::from_ne_bytes([0, 1, 2, 3, 4, 5, 6, 7].map(|i| params[24 + i]));
        Described {
            read_only: word(8) & READ_ONLY != 0,
            write_cache: word(8) & VOLATILE_CACHE != 0,
            size: sectors.saturating_mul(SECTOR),
        }
    }
}

/// `struct ublk_params` with what a disk is: the parts "basic" and "discard", and for requests whose
/// pages go to the image as they are "dma_align".
pub(crate) fn params(
    info: &Info,
    size: u64,
    write_cache: bool,
    device: &DeviceInfo,
) -> [u8; PARAMS] {
    const BASIC: u32 = 1 << 0;
    const DISCARD: u32 = 1 << 1;
    const DMA_ALIGN: u32 = 1 << 4;
    const FUA: u32 = 1 << 3;
    let logical = info.logical_block_size.next_power_of_two().clamp(512, 4096);
    let physical = info.physical_block_size.next_power_of_two().clamp(logical, 1 << 20);
    let mut attributes = if info.read_only { READ_ONLY } else { 0 };
    if write_cache {
        attributes |= VOLATILE_CACHE | FUA;
    }
    let mut out = [0; PARAMS];
    let types = if device.is_zero_copy() { BASIC | DISCARD | DMA_ALIGN } else { BASIC | DISCARD };
    let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &(PARAMS as u32).to_ne_bytes());
    put(4, &types.to_ne_bytes());
    put(8, &attributes.to_ne_bytes());
    let shift = |size: u32| size.trailing_zeros() as u8;
    // Logical, physical, best and least sizes of a request.
    put(12, &[shift(logical), shift(physical), shift(physical), shift(physical)]);
    put(16, &(device.most_bytes / 512).to_ne_bytes());
    put(24, &(size / SECTOR).to_ne_bytes());
    let granularity = u32::try_from(info.discard_alignment).unwrap_or(1 << 30).max(logical);
    let most = u32::MAX / 512 / granularity * granularity;
    let (discard, zeroes) = match info.read_only {
        true => (0, 0),
        false => (if info.discard { most } else { 0 }, if info.fast_zero { most } else { 0 }),
    };
    put(44, &granularity.to_ne_bytes());
    put(48, &discard.to_ne_bytes());
    put(52, &zeroes.to_ne_bytes());
    put(56, &1u16.to_ne_bytes());
    let memory = info.memory_alignment.next_power_of_two().clamp(512, PAGE / 2) as u32;
    put(108, &(memory - 1).to_ne_bytes());
    out
}

/// `struct ublksrv_io_desc`: one request as the driver describes it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Descriptor {
    pub(crate) op_flags: u32,
    pub(crate) sectors: u32,
    pub(crate) start: u64,
}

/// A request, but for its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Asked {
    pub(crate) kind: Kind,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) fua: bool,
    /// Whether its pages are registered, where they should be.
    pub(crate) registered: bool,
}

impl Descriptor {
    /// What it asks for; reads and writes move `most` bytes at most.
    pub(crate) fn parse(self, most: usize) -> Result<Asked, Error> {
        let flag = |flag: u32| self.op_flags & flag != 0;
        let kind = match self.op_flags & 0xff {
            OP_READ => Kind::Read,
            OP_WRITE => Kind::Write,
            OP_FLUSH => Kind::Flush,
            OP_DISCARD => Kind::Discard,
            OP_WRITE_ZEROES => Kind::WriteZeroes { unmap: !flag(FLAG_NO_UNMAP), fast: false },
            _ => return Err(Error::Unsupported),
        };
        if kind == Kind::Flush {
            return Ok(Asked { kind, offset: 0, len: 0, fua: false, registered: false });
        }
        let offset = self.start.checked_mul(SECTOR).ok_or(Error::Range)?;
        let len = u64::from(self.sectors) * SECTOR;
        if matches!(kind, Kind::Read | Kind::Write) && len > most as u64 {
            return Err(Error::Range);
        }
        let registered = !flag(FLAG_NOT_REGISTERED);
        Ok(Asked { kind, offset, len, fua: flag(FLAG_FUA), registered })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_have_the_numbers_of_the_header() {
        assert_eq!(control::ADD, 0xc020_7504);
        assert_eq!(control::INFO, 0x8020_7512);
        assert_eq!(FETCH, 0xc010_7520);
        assert_eq!(descriptors_of(2, 128), (2 * 98_304, 4096));
        assert_eq!(bytes_of(1, 3), 0x8000_0000 + (1 << 41) + (3 << 25));
        assert_eq!(register_at(5), 0x1_0005);
    }

    #[test]
    fn device_facts_survive_the_journey() {
        let info = DeviceInfo {
            queues: 3,
            depth: 64,
            state: State::Dead,
            most_bytes: 1 << 19,
            id: u32::MAX,
            pid: 17,
            features: feature::RECOVERY,
            mark: 0x1234_5678_9abc_def0,
        };
        assert_eq!(DeviceInfo::decode(&info.encode()), info);
    }

    #[test]
    fn what_a_disk_was_said_to_be_can_be_read_again() {
        let image = ringtap_image::open("null:1M".as_ref(), &Default::default()).expect("an image");
        let device = DeviceInfo { features: 0, ..DeviceInfo::decode(&[0; DeviceInfo::LEN]) };
        for (read_only, write_cache) in [(false, true), (true, false)] {
            let info = Info { read_only, ..image.info().clone() };
            let size = 3 << 20;
            let described = Described::decode(&params(&info, size, write_cache, &device));
            assert_eq!(described, Described { read_only, write_cache, size });
        }
    }

    #[test]
    fn descriptors_are_read_or_refused() {
        let parse =
            |op_flags, sectors, start| Descriptor { op_flags, sectors, start }.parse(1 << 19);
        let asked = parse(OP_WRITE | FLAG_FUA, 8, 3).expect("a write");
        assert_eq!(
            (asked.kind, asked.offset, asked.len, asked.fua),
            (Kind::Write, 1536, 4096, true)
        );
        let asked = parse(OP_WRITE_ZEROES | FLAG_NO_UNMAP, u32::MAX, 0).expect("zeros");
        assert_eq!(asked.kind, Kind::WriteZeroes { unmap: false, fast: false });
        assert_eq!(parse(OP_READ, 1025, 0), Err(Error::Range));
        assert_eq!(parse(OP_READ, 8, u64::MAX / 2), Err(Error::Range));
        assert_eq!(parse(77, 8, 0), Err(Error::Unsupported));
        assert_eq!(parse(OP_FLUSH, 9, u64::MAX).map(|asked| asked.len), Ok(0));
    }
}
