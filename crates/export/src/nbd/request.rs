//! Requests: from bytes to a command that was checked once and for all.

use ringtap_vbd::Error;

use super::options::Fields;
use super::wire::{MAX_PAYLOAD, REQUEST_MAGIC, cmd, cmd_flag, errno};

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
    /// How many bytes.
    pub len: u32,
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
    /// Whether block status of any context was agreed on.
    pub status: bool,
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
    },
}

impl Header {
    /// Bytes of a header.
    pub const LEN: usize = 28;

    /// Take a header apart; `None` where fewer bytes than [`Header::LEN`] are there.
    pub fn parse(bytes: &[u8]) -> Option<Result<Header, BadMagic>> {
        let bytes = bytes.first_chunk::<{ Header::LEN }>()?;
        let mut fields = Fields(bytes);
        let magic = fields.u32().ok()?;
        if magic != REQUEST_MAGIC {
            return Some(Err(BadMagic(magic)));
        }
        Some(Ok(Header {
            flags: fields.u16().ok()?,
            kind: fields.u16().ok()?,
            cookie: fields.u64().ok()?,
            offset: fields.u64().ok()?,
            len: fields.u32().ok()?,
        }))
    }

    /// Bytes that follow the header, whether or not the request is valid.
    pub fn payload(&self) -> u32 {
        if self.kind == cmd::WRITE { self.len } else { 0 }
    }

    /// Whether it is a read, which is answered by chunks where replies are structured.
    pub fn is_read(&self) -> bool {
        self.kind == cmd::READ
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
            cmd::BLOCK_STATUS => {
                (Command::BlockStatus { one: has(cmd_flag::REQ_ONE) }, cmd_flag::REQ_ONE)
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
        let within = self.offset.checked_add(u64::from(self.len)).is_some_and(|e| e <= rules.size);
        match command {
            Command::Read { whole: true } if !rules.structured => Err(errno::EINVAL),
            Command::Read { .. } if self.len > MAX_PAYLOAD && rules.structured => {
                Err(errno::EOVERFLOW)
            }
            Command::Read { .. } | Command::Write if self.len > MAX_PAYLOAD => Err(errno::EINVAL),
            Command::Flush if (self.offset, self.len) != (0, 0) => Err(errno::EINVAL),
            Command::BlockStatus { .. } if !rules.status || self.len == 0 => Err(errno::EINVAL),
            Command::Flush => Ok(command),
            _ if within => Ok(command),
            Command::Write | Command::WriteZeroes { .. } => Err(errno::ENOSPC),
            _ => Err(errno::EINVAL),
        }
    }
}

/// The NBD error for what went wrong with a request.
pub(super) fn error_of(command: Command, error: Error) -> u32 {
    match error {
        Error::Os(libc::ENOMEM) => errno::ENOMEM,
        Error::Os(libc::EPERM | libc::EACCES) | Error::ReadOnly => errno::EPERM,
        Error::Os(_) | Error::Corrupt => errno::EIO,
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

    const RULES: Rules = Rules { size: 1 << 30, read_only: false, structured: true, status: true };

    fn check(kind: u16, flags: u16, offset: u64, len: u32) -> Result<Command, u32> {
        Header { flags, kind, cookie: 0, offset, len }.check(&RULES)
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
        let header = Header::parse(&bytes).expect("whole").expect("valid");
        let cookie = 0x1122_3344_5566_7788;
        assert_eq!(header, Header { flags: 3, kind: 1, cookie, offset: 0x99, len: 0x1000 });
        assert_eq!(header.payload(), 0x1000);
        assert_eq!(Header::parse(&bytes[..27]), None);
        bytes[0] = 0;
        assert_eq!(Header::parse(&bytes), Some(Err(BadMagic(0x0060_9513))));
    }

    #[test]
    fn ranges() {
        let end = RULES.size;
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
        let header = |kind, flags| Header { flags, kind, cookie: 0, offset: 0, len: 512 };
        let read_only = Rules { read_only: true, ..RULES };
        for kind in [cmd::WRITE, cmd::TRIM, cmd::WRITE_ZEROES] {
            assert_eq!(header(kind, 0).check(&read_only), Err(errno::EPERM));
        }
        let simple = Rules { structured: false, status: false, ..RULES };
        assert_eq!(header(cmd::READ, cmd_flag::DF).check(&simple), Err(errno::EINVAL));
        assert_eq!(header(cmd::BLOCK_STATUS, 0).check(&simple), Err(errno::EINVAL));
    }
}
