//! Requests and answers of Xen's block protocol, in bytes, and every check a request needs.
//!
//! Source: Xen, public/io/blkif.h and public/io/protocols.h. Sectors are 512 bytes, whatever the
//! disk's own are.

use ringtap_vbd::Error;

/// Bytes of a sector.
pub const SECTOR: u64 = 512;
pub(crate) const PAGE: usize = 4096;
/// BLKIF_MAX_SEGMENTS_PER_REQUEST.
pub(crate) const DIRECT_SEGMENTS: usize = 11;
/// Segments of an indirect request, at most. A frontend that was promised so many may go on sending
/// them to the next server: do not lower it.
pub(crate) const INDIRECT_SEGMENTS: usize = 256;
/// Bytes of one segment's description.
pub(crate) const SEGMENT: usize = 8;
/// All of them are described in one page, though the protocol has room for eight.
const _: () = assert!(INDIRECT_SEGMENTS * SEGMENT <= PAGE);
/// Words of the longest request.
pub(crate) const WORDS: usize = 28;

const OP_READ: u8 = 0;
const OP_WRITE: u8 = 1;
const OP_WRITE_BARRIER: u8 = 2;
const OP_FLUSH: u8 = 3;
const OP_DISCARD: u8 = 5;
const OP_INDIRECT: u8 = 6;
const DISCARD_SECURE: u8 = 1;

/// A request as it lay in the ring: copied once, for the frontend may change it under us.
pub(crate) type Raw = [u32; WORDS];

/// How a frontend lays its requests out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Abi {
    /// 64-bit words at multiples of 8: x86_64, and ARM's.
    Wide,
    /// 64-bit words at multiples of 4: a 32-bit x86 guest.
    X86_32,
}

impl Abi {
    /// By the frontend's node "protocol"; none where it is unknown.
    pub(crate) fn named(protocol: Option<&str>) -> Option<Abi> {
        match protocol {
            // XEN_IO_PROTO_ABI_NATIVE: this machine's own.
            None => Some(Abi::Wide),
            Some("x86_64-abi" | "arm-abi") => Some(Abi::Wide),
            Some("x86_32-abi") => Some(Abi::X86_32),
            Some(_) => None,
        }
    }

    /// Words of one place in the ring.
    pub(crate) fn entry_words(self) -> usize {
        match self {
            Abi::Wide => 28,
            Abi::X86_32 => 27,
        }
    }

    /// Where the 64-bit fields begin.
    fn id(self) -> usize {
        match self {
            Abi::Wide => 8,
            Abi::X86_32 => 4,
        }
    }
}

/// How a request is answered. BLKIF_RSP_*.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i16)]
pub(crate) enum Status {
    Done = 0,
    Failed = -1,
    Unsupported = -2,
}

impl Status {
    pub(crate) fn of(end: Result<(), Error>) -> Status {
        match end {
            Ok(()) => Status::Done,
            Err(Error::Unsupported) => Status::Unsupported,
            Err(_) => Status::Failed,
        }
    }
}

/// A piece of a page of the frontend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) grant: u32,
    pub(crate) offset: u16,
    pub(crate) len: u16,
}

/// What is to happen with a request's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Read,
    Write,
    /// First a flush; then the write, if there are bytes.
    Flush,
    /// As a flush, with all requests before it ended, and none after it begun.
    Barrier,
}

/// What a request asks for. Offsets and lengths are bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    /// With segments of its own.
    Data {
        action: Action,
        offset: u64,
    },
    /// Its segments are described in a page of the frontend, granted as `table`.
    Indirect {
        action: Action,
        offset: u64,
        segments: usize,
        table: u32,
    },
    Discard {
        offset: u64,
        len: u64,
    },
}

/// A request, checked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parsed {
    /// The frontend's name for it, which the answer repeats.
    pub(crate) id: u64,
    /// The operation that the answer repeats.
    pub(crate) operation: u8,
    /// What it asks for, or what it is answered with at once.
    pub(crate) asked: Result<Asked, Status>,
}

struct Fields<'a>(&'a [u8; WORDS * 4]);

impl Fields<'_> {
    fn u16(&self, at: usize) -> u16 {
        u16::from_le_bytes([self.0[at], self.0[at + 1]])
    }

    fn u32(&self, at: usize) -> u32 {
        u32::from_le_bytes([0, 1, 2, 3].map(|i| self.0[at + i]))
    }

    fn u64(&self, at: usize) -> u64 {
        u64::from(self.u32(at)) | u64::from(self.u32(at + 4)) << 32
    }
}

fn bytes(sectors: u64) -> Result<u64, Status> {
    sectors.checked_mul(SECTOR).ok_or(Status::Failed)
}

/// An operation's name in the log.
pub(crate) fn name(operation: u8) -> &'static str {
    match operation {
        OP_READ => "read",
        OP_WRITE => "write",
        OP_WRITE_BARRIER => "barrier",
        OP_FLUSH => "flush",
        OP_DISCARD => "discard",
        _ => "unknown",
    }
}

/// Check a request and list the segments it brings itself.
pub(crate) fn parse(abi: Abi, raw: &Raw, segments: &mut Vec<Segment>) -> Parsed {
    segments.clear();
    let mut all = [0; WORDS * 4];
    for (place, word) in all.chunks_exact_mut(4).zip(raw) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    let fields = Fields(&all);
    let (mut operation, second) = (all[0], all[1]);
    let id = abi.id();
    let asked = match operation {
        OP_READ => data(abi, &fields, Action::Read, segments),
        OP_WRITE => data(abi, &fields, Action::Write, segments),
        OP_WRITE_BARRIER => data(abi, &fields, Action::Barrier, segments),
        OP_FLUSH => data(abi, &fields, Action::Flush, segments),
        // Whoever asks for a secure erase must not believe that it happened.
        OP_DISCARD if second & DISCARD_SECURE != 0 => Err(Status::Unsupported),
        OP_DISCARD => discard(fields.u64(id + 8), fields.u64(id + 16)),
        OP_INDIRECT => {
            operation = second;
            indirect(&fields, id, operation)
        }
        _ => Err(Status::Unsupported),
    };
    Parsed { id: fields.u64(id), operation, asked }
}

fn data(
    abi: Abi,
    fields: &Fields<'_>,
    action: Action,
    segments: &mut Vec<Segment>,
) -> Result<Asked, Status> {
    let count = usize::from(fields.0[1]);
    let may_be_empty = matches!(action, Action::Flush | Action::Barrier);
    if count > DIRECT_SEGMENTS || (count == 0 && !may_be_empty) {
        return Err(Status::Failed);
    }
    let id = abi.id();
    // A flush of nothing lies nowhere.
    let sector = if count == 0 { 0 } else { fields.u64(id + 8) };
    let from = id + 16;
    list(&fields.0[from..from + count * SEGMENT], segments)?;
    Ok(Asked::Data { action, offset: bytes(sector)? })
}

fn discard(sector: u64, sectors: u64) -> Result<Asked, Status> {
    Ok(Asked::Discard { offset: bytes(sector)?, len: bytes(sectors)? })
}

fn indirect(fields: &Fields<'_>, id: usize, operation: u8) -> Result<Asked, Status> {
    let action = match operation {
        OP_READ => Action::Read,
        OP_WRITE => Action::Write,
        _ => return Err(Status::Unsupported),
    };
    let segments = usize::from(fields.u16(2));
    if segments == 0 || segments > INDIRECT_SEGMENTS {
        return Err(Status::Failed);
    }
    let offset = bytes(fields.u64(id + 8))?;
    // The device's handle and two bytes to align lie between.
    Ok(Asked::Indirect { action, offset, segments, table: fields.u32(id + 20) })
}

/// Check and list the segments described by `table`, a whole number of descriptions.
pub(crate) fn list(table: &[u8], segments: &mut Vec<Segment>) -> Result<(), Status> {
    for entry in table.chunks_exact(SEGMENT) {
        let grant = u32::from_le_bytes([0, 1, 2, 3].map(|i| entry[i]));
        let (first, last) = (u16::from(entry[4]), u16::from(entry[5]));
        if first > last || last >= (PAGE as u64 / SECTOR) as u16 {
            return Err(Status::Failed);
        }
        let sector = SECTOR as u16;
        segments.push(Segment { grant, offset: first * sector, len: (last - first + 1) * sector });
    }
    Ok(())
}

/// An answer's words: of a wide frontend the last is padding.
pub(crate) fn answer(abi: Abi, id: u64, operation: u8, status: Status) -> ([u32; 4], usize) {
    let tail = u32::from(operation) | u32::from(status as i16 as u16) << 16;
    let words = match abi {
        Abi::Wide => 4,
        Abi::X86_32 => 3,
    };
    ([id as u32, (id >> 32) as u32, tail, 0], words)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A request laid out by a frontend's compiler: field after field.
    fn raw(abi: Abi, head: [u8; 4], id: u64, sector: u64, rest: &[u8]) -> Raw {
        let mut bytes = head.to_vec();
        if abi == Abi::Wide {
            bytes.extend([0; 4]);
        }
        bytes.extend(id.to_le_bytes());
        bytes.extend(sector.to_le_bytes());
        bytes.extend(rest);
        bytes.resize(WORDS * 4, 0xee);
        std::array::from_fn(|i| u32::from_le_bytes([0, 1, 2, 3].map(|j| bytes[4 * i + j])))
    }

    fn segment(grant: u32, first: u8, last: u8) -> Vec<u8> {
        [&grant.to_le_bytes()[..], &[first, last, 0xaa, 0xbb]].concat()
    }

    const BOTH: [Abi; 2] = [Abi::Wide, Abi::X86_32];

    #[test]
    fn sizes_are_those_of_the_header() {
        // sizeof(union blkif_sring_entry) for x86_64 and x86_32.
        assert_eq!(Abi::Wide.entry_words() * 4, 112);
        assert_eq!(Abi::X86_32.entry_words() * 4, 108);
        assert_eq!(Abi::named(Some("x86_32-abi")), Some(Abi::X86_32));
        assert_eq!(Abi::named(None), Some(Abi::Wide));
        assert_eq!(Abi::named(Some("ia64-abi")), None);
    }

    #[test]
    fn transfers_are_read_in_both_layouts() {
        for abi in BOTH {
            let table = [segment(7, 0, 7), segment(9, 2, 3)].concat();
            let mut segments = vec![];
            let parsed = parse(abi, &raw(abi, [1, 2, 0, 0], 55, 16, &table), &mut segments);
            assert_eq!((parsed.id, parsed.operation), (55, OP_WRITE));
            let wanted = Asked::Data { action: Action::Write, offset: 16 * 512 };
            assert_eq!(parsed.asked, Ok(wanted));
            let wanted = [
                Segment { grant: 7, offset: 0, len: 4096 },
                Segment { grant: 9, offset: 1024, len: 1024 },
            ];
            assert_eq!(segments, wanted);
        }
    }

    #[test]
    fn indirect_requests_name_their_table() {
        for abi in BOTH {
            let mut rest = vec![0xca, 0xfe, 0, 0];
            rest.extend((1u32..=8).flat_map(|grant| grant.to_le_bytes()));
            let mut segments = vec![];
            let parsed = parse(abi, &raw(abi, [6, 0, 200, 0], 3, 8, &rest), &mut segments);
            // The answer bears the operation inside.
            assert_eq!((parsed.id, parsed.operation), (3, OP_READ));
            let (action, offset) = (Action::Read, 4096);
            assert_eq!(
                parsed.asked,
                Ok(Asked::Indirect { action, offset, segments: 200, table: 1 })
            );
        }
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let mut segments = vec![];
        let whole = segment(1, 0, 7);
        for (head, sector, rest, status) in [
            ([0, 0, 0, 0], 0, vec![], Status::Failed),
            ([1, 12, 0, 0], 0, vec![0; 88], Status::Failed),
            ([0, 1, 0, 0], 0, segment(1, 4, 3), Status::Failed),
            ([0, 1, 0, 0], 0, segment(1, 0, 8), Status::Failed),
            ([0, 1, 0, 0], u64::MAX, whole.clone(), Status::Failed),
            ([3, 12, 0, 0], 0, vec![], Status::Failed),
            ([4, 1, 0, 0], 0, whole.clone(), Status::Unsupported),
            ([5, 1, 0, 0], 0, vec![8, 0, 0, 0, 0, 0, 0, 0], Status::Unsupported),
            ([5, 0, 0, 0], 0, vec![0xff; 8], Status::Failed),
            ([6, 0, 0, 0], 0, vec![], Status::Failed),
            ([6, 1, 1, 1], 0, vec![], Status::Failed),
            ([6, 3, 5, 0], 0, vec![], Status::Unsupported),
            ([6, 6, 5, 0], 0, vec![], Status::Unsupported),
            ([255, 1, 0, 0], 0, whole, Status::Unsupported),
        ] {
            for abi in BOTH {
                let parsed = parse(abi, &raw(abi, head, 1, sector, &rest), &mut segments);
                assert_eq!(parsed.asked, Err(status), "{head:?}");
            }
        }
    }

    #[test]
    fn a_flush_needs_no_bytes_and_no_place() {
        let mut segments = vec![];
        for (operation, action) in [(2, Action::Barrier), (3, Action::Flush)] {
            let raw = raw(Abi::Wide, [operation, 0, 0, 0], 1, u64::MAX, &[]);
            let parsed = parse(Abi::Wide, &raw, &mut segments);
            assert_eq!(parsed.asked, Ok(Asked::Data { action, offset: 0 }));
        }
    }

    #[test]
    fn answers_have_the_layout_of_the_header() {
        let (words, count) = answer(Abi::Wide, 0x1_0000_0002, OP_FLUSH, Status::Unsupported);
        assert_eq!((words, count), ([2, 1, 0xfffe_0003, 0], 4));
        assert_eq!(answer(Abi::X86_32, 2, OP_READ, Status::Done), ([2, 0, 0, 0], 3));
    }

    proptest! {
        /// Whatever lies in the ring, what is taken for a request keeps to the protocol's bounds.
        #[test]
        fn any_words_are_taken_or_refused(
            mut raw in prop::array::uniform28(any::<u32>()),
            operation in 0u32..8,
            wide in any::<bool>(),
        ) {
            raw[0] = raw[0] & !0xff | operation;
            let abi = if wide { Abi::Wide } else { Abi::X86_32 };
            let mut segments = vec![];
            let parsed = parse(abi, &raw, &mut segments);
            if let Ok(asked) = parsed.asked {
                prop_assert!(segments.len() <= DIRECT_SEGMENTS);
                for segment in &segments {
                    let end = usize::from(segment.offset) + usize::from(segment.len);
                    prop_assert!(segment.len > 0 && end <= PAGE);
                }
                match asked {
                    Asked::Data { action: Action::Read | Action::Write, .. } => {
                        prop_assert!(!segments.is_empty());
                    }
                    Asked::Indirect { segments, .. } => {
                        prop_assert!((1..=INDIRECT_SEGMENTS).contains(&segments));
                    }
                    _ => {}
                }
            }
        }
    }
}
