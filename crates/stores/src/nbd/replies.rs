//! Replies as they come: a pure function over bytes.

use ringtap_io::Holds;

use super::handshake::{Agreed, Replies};
use super::wire::{
    EXTENDED_REPLY_MAGIC, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, chunk, errno, state,
};

/// The most that a chunk without a read's data may hold.
const MOST: u64 = 60 << 10;

/// What the next bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// The whole reply to a request; where it was a read that went well, its data follows.
    Simple {
        /// Of which.
        cookie: u64,
        /// A positive errno, or 0.
        error: i32,
    },
    /// One chunk of it, or the last.
    Chunk {
        /// Of which.
        cookie: u64,
        /// What it says.
        says: Says,
        /// Nothing follows.
        done: bool,
    },
}

/// What a chunk says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Says {
    /// Nothing.
    Nothing,
    /// So many bytes of data follow, of this place of the disk.
    Data {
        /// The place.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// So many zeros are at this place.
    Hole {
        /// The place.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// What the first bytes of the range hold.
    Status(Holds),
    /// It failed, with a positive errno.
    Failed(i32),
}

/// The server breaks the protocol.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the server breaks the protocol: {0}")]
pub struct Broken(pub &'static str);

/// Our errno of the protocol's.
pub fn errno_of(error: u32) -> i32 {
    match error {
        0 => 0,
        errno::EPERM => libc::EPERM,
        errno::ENOMEM => libc::ENOMEM,
        errno::EINVAL => libc::EINVAL,
        errno::ENOSPC => libc::ENOSPC,
        errno::EOVERFLOW => libc::EOVERFLOW,
        errno::ENOTSUP => libc::EOPNOTSUPP,
        errno::ESHUTDOWN => libc::ESHUTDOWN,
        _ => libc::EIO,
    }
}

fn word(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).map_or(0, |it| u64::from_be_bytes(it.try_into().unwrap_or_default()))
}

fn half(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).map_or(0, |it| u32::from_be_bytes(it.try_into().unwrap_or_default()))
}

/// The next reply at the start of `bytes`, with the bytes that it takes; `None` where it is not whole yet. Data of a read is
/// no part of it.
pub fn parse(bytes: &[u8], agreed: &Agreed) -> Result<Option<(Reply, usize)>, Broken> {
    if bytes.len() < 16 {
        return Ok(None);
    }
    let (cookie, magic) = (word(bytes, 8), half(bytes, 0));
    if magic == SIMPLE_REPLY_MAGIC && agreed.replies != Replies::Extended {
        let error = errno_of(half(bytes, 4));
        return Ok(Some((Reply::Simple { cookie, error }, 16)));
    }
    let (head, len) = match agreed.replies {
        Replies::Structured if magic == STRUCTURED_REPLY_MAGIC => (20, u64::from(half(bytes, 16))),
        Replies::Extended if magic == EXTENDED_REPLY_MAGIC => (32, word(bytes, 24)),
        _ => return Err(Broken("what follows is no reply")),
    };
    if bytes.len() < head {
        return Ok(None);
    }
    let (flags, kind) = (half(bytes, 4) >> 16, half(bytes, 4) as u16);
    let payload = &bytes[head..];
    // Of data only the place is a part of this.
    let own = if kind == chunk::OFFSET_DATA { 8 } else { len };
    if len < own || own > MOST {
        return Err(Broken("a chunk of an impossible length"));
    }
    if (payload.len() as u64) < own {
        return Ok(None);
    }
    let payload = &payload[..own as usize];
    let exactly = |wanted: u64| match len == wanted {
        true => Ok(()),
        false => Err(Broken("a chunk of a wrong length")),
    };
    let says = match kind {
        chunk::NONE => exactly(0).map(|()| Says::Nothing)?,
        chunk::OFFSET_DATA => Says::Data { offset: word(payload, 0), len: len - 8 },
        chunk::OFFSET_HOLE if agreed.replies == Replies::Extended && len == 16 => {
            Says::Hole { offset: word(payload, 0), len: word(payload, 8) }
        }
        chunk::OFFSET_HOLE => exactly(12)
            .map(|()| Says::Hole { offset: word(payload, 0), len: half(payload, 8).into() })?,
        chunk::BLOCK_STATUS if Some(half(payload, 0)) == agreed.status && len >= 12 => {
            Says::Status(holds(half(payload, 4).into(), half(payload, 8).into())?)
        }
        chunk::BLOCK_STATUS_EXT if Some(half(payload, 0)) == agreed.status && len >= 24 => {
            Says::Status(holds(word(payload, 8), word(payload, 16))?)
        }
        chunk::BLOCK_STATUS | chunk::BLOCK_STATUS_EXT => Says::Nothing,
        error if error & 1 << 15 != 0 => match errno_of(half(payload, 0)) {
            // An error all the same.
            0 => Says::Failed(libc::EIO),
            error => Says::Failed(error),
        },
        _ => return Err(Broken("a chunk of an unknown kind")),
    };
    let done = flags as u16 & chunk::DONE != 0;
    Ok(Some((Reply::Chunk { cookie, says, done }, head + own as usize)))
}

fn holds(len: u64, flags: u64) -> Result<Holds, Broken> {
    if len == 0 {
        return Err(Broken("an extent without bytes"));
    }
    let has = |flag: u32| flags & u64::from(flag) != 0;
    // Of one that is no whole number of sectors the rest is asked for again, as data.
    match len / Holds::STEP * Holds::STEP {
        0 => Ok(Holds { len: Holds::STEP, hole: false, zero: false }),
        len => Ok(Holds { len, hole: has(state::HOLE), zero: has(state::ZERO) }),
    }
}
