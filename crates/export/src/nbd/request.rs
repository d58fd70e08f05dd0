//! Requests: from bytes to a command that was checked once and for all.

use ringtap_vbd::Error;

use super::context::{self, Contexts};
use super::options::Fields;
use super::wire::{EXTENDED_REQUEST_MAGIC, MAX_PAYLOAD, REQUEST_MAGIC, cmd, cmd_flag, errno};

/// The head of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Bits of [`cmd_flag`].
    pub flags: u16,
    /// One of [`cmd`].
    pub kind: u16,
    /// Given back in the reply; ours to copy, not to read.
    pub cookie: u64,
    /// Where it begins, in bytes.
    pub offset: u64,
    /// How many bytes: of the export, or where a payload follows that is not what is written, of that.
    pub len: u64,
    /// Whether it is an extended header, with 64 bits of length.
    pub extended: bool,
}

/// What stands where a request should begin is none; nothing after it can be understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadMagic(pub u32);

/// What holds for the requests of a connection.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Bytes of the export.
    pub size: u64,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Whether structured replies were agreed on.
    pub structured: bool,
    /// Which contexts were agreed on for block status.
    pub contexts: Contexts,
}

/// What a valid request asks for; its range lies within the export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Send the bytes; in one chunk with `whole`.
    Read {
        /// Whether the client wants the reply in one piece.
        whole: bool,
    },
    /// Write the payload.
    Write,
    /// The client leaves.
    Disconnect,
    /// Make acknowledged writes stable.
    Flush,
    /// The range is not needed any more.
    Trim,
    /// The range will be read soon.
    Cache,
    /// The range must read as zeros.
    WriteZeroes {
        /// Whether its space may be freed.
        unmap: bool,
        /// Whether to fail rather than be slow.
        fast: bool,
    },
    /// Tell what the contexts say.
    BlockStatus {
        /// Whether one extent is all the client wants.
        one: bool,
        /// Which of them are asked about.
        of: Contexts,
    },
    /// The same, of contexts and a length that the payload tells: see [`Header::narrow`].
    NarrowBlockStatus {
        /// Whether one extent is all the client wants.
        one: bool,
    },
}

/// Bytes of a payload that names contexts: a length, and the ids of all there can be at most.
const NARROW: std::ops::RangeInclusive<u64> = 12..=8 + 4 * 64;

impl Header {
    /// Bytes of a header, and of an extended one.
    pub const LEN: usize = 28;
    /// See [`Header::LEN`].
    pub const EXTENDED_LEN: usize = 32;

    /// Bytes of a header.
    pub fn len_of(extended: bool) -> usize {
        if extended { Header::EXTENDED_LEN } else { Header::LEN }
    }

    /// Take a header apart; `None` where it is not whole.
    pub fn parse(bytes: &[u8], extended: bool) -> Option<Result<Header, BadMagic>> {
        let bytes = bytes.get(..Header::len_of(extended))?;
        let mut fields = Fields(bytes);
        let magic = fields.u32().ok()?;
        if magic != if extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC } {
            return Some(Err(BadMagic(magic)));
        }
        Some(Ok(Header {
            flags: fields.u16().ok()?,
            kind: fields.u16().ok()?,
            cookie: fields.u64().ok()?,
            offset: fields.u64().ok()?,
            len: if extended { fields.u64().ok()? } else { fields.u32().ok()?.into() },
            extended,
        }))
    }

    /// Bytes that follow the header, whether or not the request is valid.
    pub fn payload(&self) -> u64 {
        // QEMU's client (10.0) forgets the flag where it writes.
        let flag = self.extended && self.flags & cmd_flag::PAYLOAD_LEN != 0;
        let follows = flag || self.kind == cmd::WRITE;
        if follows { self.len } else { 0 }
    }

    /// Whether its payload is longer than any client may send, so that nothing after it is waited for.
    /// (One with 32 bits of length is skipped.)
    pub fn is_absurd(&self) -> bool {
        self.extended && self.payload() > u64::from(MAX_PAYLOAD)
    }

    /// What the payload of [`Command::NarrowBlockStatus`] makes of it.
    pub fn narrow(mut self, payload: &[u8], rules: &Rules) -> Result<(Header, Contexts), u32> {
        let mut fields = Fields(payload);
        self.len = fields.u64().map_err(|_| errno::EINVAL)?;
        self.flags &= !cmd_flag::PAYLOAD_LEN;
        let mut of = Contexts::default();
        for id in fields.0.chunks(4) {
            let id = Fields(id).u32().map_err(|_| errno::EINVAL)?;
            match context::number(id) {
                Some(number) if rules.contexts.has(number) && !of.has(number) => of.add(number),
                _ => return Err(errno::EINVAL),
            }
        }
        if of.is_empty() || self.len == 0 || !self.is_within(rules) {
            return Err(errno::EINVAL);
        }
        Ok((self, of))
    }

    fn is_within(&self, rules: &Rules) -> bool {
        self.offset.checked_add(self.len).is_some_and(|end| end <= rules.size)
    }

    /// Whether it is a read, which is answered by chunks where replies are structured.
    pub fn is_read(&self) -> bool {
        self.kind == cmd::READ
    }

    /// Its command's name in the log.
    pub fn operation(&self) -> &'static str {
        match self.kind {
            cmd::READ => "read",
            cmd::WRITE => "write",
            cmd::DISC => "disconnect",
            cmd::FLUSH => "flush",
            cmd::TRIM => "discard",
            cmd::CACHE => "cache",
            cmd::WRITE_ZEROES => "write-zeroes",
            cmd::BLOCK_STATUS => "block-status",
            _ => "unknown",
        }
    }

    /// Whether what it writes must be stable before the reply.
    pub fn fua(&self) -> bool {
        self.flags & cmd_flag::FUA != 0
    }

    /// The command, or the NBD error to reply with.
    pub fn check(&self, rules: &Rules) -> Result<Command, u32> {
        let has = |flag| self.flags & flag != 0;
        let (command, flags) = match self.kind {
            cmd::READ => (Command::Read { whole: has(cmd_flag::DF) }, cmd_flag::DF),
            cmd::WRITE if self.extended => (Command::Write, cmd_flag::PAYLOAD_LEN),
            cmd::WRITE => (Command::Write, 0),
            cmd::DISC => return Ok(Command::Disconnect),
            cmd::FLUSH => (Command::Flush, 0),
            cmd::TRIM => (Command::Trim, 0),
            cmd::CACHE => (Command::Cache, 0),
            cmd::WRITE_ZEROES => (
                Command::WriteZeroes {
                    unmap: !has(cmd_flag::NO_HOLE),
                    fast: has(cmd_flag::FAST_ZERO),
                },
                cmd_flag::NO_HOLE | cmd_flag::FAST_ZERO,
            ),
            cmd::BLOCK_STATUS if self.payload() > 0 => (
                Command::NarrowBlockStatus { one: has(cmd_flag::REQ_ONE) },
                cmd_flag::REQ_ONE | cmd_flag::PAYLOAD_LEN,
            ),
            cmd::BLOCK_STATUS => {
                let (one, of) = (has(cmd_flag::REQ_ONE), rules.contexts);
                (Command::BlockStatus { one, of }, cmd_flag::REQ_ONE)
            }
            _ => return Err(errno::EINVAL),
        };
        // Clients set FUA on commands of any kind; it has no effect where nothing is written.
        if self.flags & !(flags | cmd_flag::FUA) != 0 {
            return Err(errno::EINVAL);
        }
        let writes =
            matches!(command, Command::Write | Command::Trim | Command::WriteZeroes { .. });
        if writes && rules.read_only {
            return Err(errno::EPERM);
        }
        let too_long = self.len > u64::from(MAX_PAYLOAD);
        match command {
            Command::Read { whole: true } if !rules.structured => Err(errno::EINVAL),
            Command::Read { .. } if too_long && rules.structured => Err(errno::EOVERFLOW),
            Command::Read { .. } | Command::Write if too_long => Err(errno::EINVAL),
            Command::Flush if (self.offset, self.len) != (0, 0) => Err(errno::EINVAL),
            Command::BlockStatus { of, .. } if of.is_empty() || self.len == 0 => Err(errno::EINVAL),
            Command::NarrowBlockStatus { .. } => {
                let named = NARROW.contains(&self.len) && self.len % 4 == 0;
                if named && !rules.contexts.is_empty() { Ok(command) } else { Err(errno::EINVAL) }
            }
            Command::Flush => Ok(command),
            _ if self.is_within(rules) => Ok(command),
            Command::Write | Command::WriteZeroes { .. } => Err(errno::ENOSPC),
            _ => Err(errno::EINVAL),
        }
    }
}

/// The NBD error for what went wrong with a request.
pub(super) fn error_of(command: Command, error: Error) -> u32 {
    match error {
        Error::Os(libc::ENOMEM) => errno::ENOMEM,
        Error::Os(libc::ESHUTDOWN) => errno::ESHUTDOWN,
        Error::Os(libc::EPERM | libc::EACCES) | Error::ReadOnly => errno::EPERM,
        Error::Os(_) | Error::Corrupt | Error::Stopped | Error::Lost => errno::EIO,
        Error::Range => match command {
            Command::Write | Command::WriteZeroes { .. } => errno::ENOSPC,
            _ => errno::EINVAL,
        },
        Error::Full => errno::ENOSPC,
        // Only a client that asked for speed has a use for this answer.
        Error::Unsupported => match command {
            Command::WriteZeroes { fast: true, .. } => errno::ENOTSUP,
            _ => errno::EIO,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contexts(numbers: &[usize]) -> Contexts {
        let mut contexts = Contexts::default();
        numbers.iter().for_each(|number| contexts.add(*number));
        contexts
    }

    fn rules() -> Rules {
        Rules { size: 1 << 30, read_only: false, structured: true, contexts: contexts(&[0, 2]) }
    }

    fn check(kind: u16, flags: u16, offset: u64, len: u32) -> Result<Command, u32> {
        let len = len.into();
        Header { flags, kind, cookie: 0, offset, len, extended: false }.check(&rules())
    }

    fn extended(kind: u16, flags: u16, offset: u64, len: u64) -> Header {
        Header { flags, kind, cookie: 0, offset, len, extended: true }
    }

    #[test]
    fn headers_are_taken_apart() {
        let mut bytes = vec![];
        bytes.extend(REQUEST_MAGIC.to_be_bytes());
        bytes.extend(3u16.to_be_bytes());
        bytes.extend(cmd::WRITE.to_be_bytes());
        bytes.extend(0x1122_3344_5566_7788u64.to_be_bytes());
        bytes.extend(0x99u64.to_be_bytes());
        bytes.extend(0x1000u32.to_be_bytes());
        assert_eq!(bytes.len(), Header::LEN);
        let header = Header::parse(&bytes, false).expect("whole").expect("valid");
        let (cookie, offset, len) = (0x1122_3344_5566_7788, 0x99, 0x1000);
        let compact = Header { flags: 3, kind: 1, cookie, offset, len, extended: false };
        assert_eq!(header, compact);
        assert_eq!(header.payload(), 0x1000);
        assert_eq!(Header::parse(&bytes[..27], false), None);
        assert_eq!(Header::parse(&bytes, true), None);
        bytes.splice(..4, EXTENDED_REQUEST_MAGIC.to_be_bytes());
        assert_eq!(Header::parse(&bytes, false), Some(Err(BadMagic(EXTENDED_REQUEST_MAGIC))));
        bytes.splice(24.., 0x1_0000_1000u64.to_be_bytes());
        let header = Header::parse(&bytes, true).expect("whole").expect("valid");
        assert_eq!(header, Header { len: 0x1_0000_1000, extended: true, ..compact });
        assert_eq!(header.payload(), 0x1_0000_1000, "a write has one, flag or not");
        assert!(header.is_absurd());
        assert_eq!(Header { kind: cmd::TRIM, ..header }.payload(), 0);
        bytes[0] = 0;
        assert_eq!(Header::parse(&bytes, true), Some(Err(BadMagic(0x00e4_1c71))));
    }

    #[test]
    fn extended_headers_say_what_follows() {
        let check = |kind, flags, len| extended(kind, flags, 0, len).check(&rules());
        let payload = cmd_flag::PAYLOAD_LEN;
        assert_eq!(check(cmd::WRITE, payload, 512), Ok(Command::Write));
        assert_eq!(check(cmd::WRITE, 0, 512), Ok(Command::Write));
        for kind in 0..=20 {
            let told = extended(kind, payload, 0, 512);
            assert_eq!(told.payload(), 512, "{kind}");
            if ![cmd::WRITE, cmd::DISC].contains(&kind) {
                assert_eq!(told.check(&rules()), Err(errno::EINVAL), "{kind}");
            }
        }
        assert!(extended(cmd::READ, payload, 0, u64::from(MAX_PAYLOAD) + 1).is_absurd());
        assert!(!extended(cmd::READ, payload, 0, u64::from(MAX_PAYLOAD)).is_absurd());
        assert!(!extended(cmd::TRIM, 0, 0, u64::MAX).is_absurd());
        // 64 bits of length, and no more than there is.
        let large = Rules { size: 1 << 44, ..rules() };
        for kind in [cmd::TRIM, cmd::WRITE_ZEROES, cmd::CACHE, cmd::BLOCK_STATUS] {
            assert!(extended(kind, 0, 0, 1 << 44).check(&large).is_ok(), "{kind}");
            assert!(extended(kind, 0, 1, 1 << 44).check(&large).is_err(), "{kind}");
            assert!(extended(kind, 0, 1, u64::MAX).check(&large).is_err(), "{kind}");
        }
        assert_eq!(extended(cmd::READ, 0, 0, 1 << 33).check(&large), Err(errno::EOVERFLOW));
    }

    #[test]
    fn a_payload_narrows_block_status() {
        let flags = cmd_flag::PAYLOAD_LEN | cmd_flag::REQ_ONE;
        let narrow = |len: u64, ids: &[u32]| {
            let mut payload = len.to_be_bytes().to_vec();
            ids.iter().for_each(|id| payload.extend(id.to_be_bytes()));
            let header = extended(cmd::BLOCK_STATUS, flags, 512, payload.len() as u64);
            assert_eq!(header.check(&rules()), Ok(Command::NarrowBlockStatus { one: true }));
            header.narrow(&payload, &rules())
        };
        let (header, of) = narrow(1 << 20, &[3]).expect("one of two");
        assert_eq!((header.len, header.payload(), of), (1 << 20, 0, contexts(&[2])));
        assert_eq!(narrow(1, &[3, 1]).expect("both").1, contexts(&[0, 2]));
        for (len, ids) in [
            (1, &[2][..]),
            (1, &[0]),
            (1, &[65]),
            (1, &[1, 1]),
            (0, &[1]),
            (1 << 30, &[1]),
            (u64::MAX, &[1]),
        ] {
            assert_eq!(narrow(len, ids), Err(errno::EINVAL), "{len} {ids:?}");
        }
        for len in [1, 8, 11, 13, 8 + 65 * 4] {
            let header = extended(cmd::BLOCK_STATUS, flags, 0, len);
            assert_eq!(header.check(&rules()), Err(errno::EINVAL), "{len}");
        }
        let none = Rules { contexts: contexts(&[]), ..rules() };
        assert!(extended(cmd::BLOCK_STATUS, flags, 0, 12).check(&none).is_err());
    }

    #[test]
    fn ranges() {
        let end = rules().size;
        assert_eq!(check(cmd::READ, 0, end - 1, 1), Ok(Command::Read { whole: false }));
        assert_eq!(check(cmd::READ, 0, end, 0), Ok(Command::Read { whole: false }));
        assert_eq!(check(cmd::READ, 0, end, 1), Err(errno::EINVAL));
        assert_eq!(check(cmd::READ, 0, u64::MAX, 2), Err(errno::EINVAL));
        assert_eq!(check(cmd::WRITE, 0, end - 1, 2), Err(errno::ENOSPC));
        assert_eq!(check(cmd::WRITE_ZEROES, 0, u64::MAX, 1), Err(errno::ENOSPC));
        assert_eq!(check(cmd::TRIM, 0, end - 1, 2), Err(errno::EINVAL));
        assert_eq!(check(cmd::CACHE, 0, end - 1, 2), Err(errno::EINVAL));
        assert_eq!(check(cmd::BLOCK_STATUS, 0, end - 1, 2), Err(errno::EINVAL));
        assert!(check(cmd::WRITE_ZEROES, 0, 0, 1 << 30).is_ok());
        assert!(check(cmd::READ, 0, 0, MAX_PAYLOAD).is_ok());
        assert_eq!(check(cmd::READ, 0, 0, MAX_PAYLOAD + 1), Err(errno::EOVERFLOW));
        assert_eq!(check(cmd::WRITE, 0, 0, MAX_PAYLOAD + 1), Err(errno::EINVAL));
        assert_eq!(check(cmd::FLUSH, 0, 0, 1), Err(errno::EINVAL));
    }

    #[test]
    fn flags_and_kinds() {
        for kind in 0..=20 {
            let ok: &[u16] = match kind {
                cmd::READ => &[cmd_flag::DF],
                cmd::WRITE_ZEROES => &[cmd_flag::NO_HOLE, cmd_flag::FAST_ZERO],
                cmd::BLOCK_STATUS => &[cmd_flag::REQ_ONE],
                _ => &[],
            };
            let (offset, len) = if kind == cmd::FLUSH { (0, 0) } else { (512, 512) };
            for bit in 0..16 {
                let flag = 1 << bit;
                let allowed = flag == cmd_flag::FUA || ok.contains(&flag);
                let known = kind <= cmd::BLOCK_STATUS;
                let expect = kind == cmd::DISC || (known && allowed);
                assert_eq!(check(kind, flag, offset, len).is_ok(), expect, "{kind} {flag:#x}");
            }
        }
    }

    #[test]
    fn rules_bind() {
        let header = |kind, flags| {
            let (cookie, offset, len, extended) = (0, 0, 512, false);
            Header { flags, kind, cookie, offset, len, extended }
        };
        let read_only = Rules { read_only: true, ..rules() };
        for kind in [cmd::WRITE, cmd::TRIM, cmd::WRITE_ZEROES] {
            assert_eq!(header(kind, 0).check(&read_only), Err(errno::EPERM));
        }
        let simple = Rules { structured: false, contexts: contexts(&[]), ..rules() };
        assert_eq!(header(cmd::READ, cmd_flag::DF).check(&simple), Err(errno::EINVAL));
        assert_eq!(header(cmd::BLOCK_STATUS, 0).check(&simple), Err(errno::EINVAL));
    }
}
