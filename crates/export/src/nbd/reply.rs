//! The heads of replies.

use super::request::Header;
use super::wire::{EXTENDED_REPLY_MAGIC, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, chunk};

/// The longest head, of an error with its message.
pub(super) const MAX_HEAD: usize = 128;

/// What stands before a reply's data.
pub(super) struct Head {
    bytes: [u8; MAX_HEAD],
    len: usize,
}

impl Head {
    fn new() -> Head {
        Head { bytes: [0; MAX_HEAD], len: 0 }
    }

    fn put(mut self, bytes: &[u8]) -> Head {
        let len = bytes.len().min(MAX_HEAD - self.len);
        self.bytes[self.len..][..len].copy_from_slice(&bytes[..len]);
        self.len += len;
        self
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// A simple reply; without an error the data of a read follows.
    pub(super) fn simple(cookie: u64, error: u32) -> Head {
        Head::new()
            .put(&SIMPLE_REPLY_MAGIC.to_be_bytes())
            .put(&error.to_be_bytes())
            .put(&cookie.to_be_bytes())
    }

    /// The head of a chunk; `len` bytes of it follow.
    fn chunk(to: To, done: bool, kind: u16, len: u32) -> Head {
        let flags = if done { chunk::DONE } else { 0 };
        let magic = if to.extended { EXTENDED_REPLY_MAGIC } else { STRUCTURED_REPLY_MAGIC };
        let head = Head::new()
            .put(&magic.to_be_bytes())
            .put(&flags.to_be_bytes())
            .put(&kind.to_be_bytes())
            .put(&to.cookie.to_be_bytes());
        match to.extended {
            true => head.put(&to.offset.to_be_bytes()).put(&u64::from(len).to_be_bytes()),
            false => head.put(&len.to_be_bytes()),
        }
    }

    /// A chunk that says no more than that all went well.
    pub(super) fn none(to: To) -> Head {
        Head::chunk(to, true, chunk::NONE, 0)
    }

    /// A chunk of `len` bytes of data, which follow.
    pub(super) fn data(to: To, done: bool, offset: u64, len: u32) -> Head {
        Head::chunk(to, done, chunk::OFFSET_DATA, len + 8).put(&offset.to_be_bytes())
    }

    /// A chunk that stands for `len` zeros.
    pub(super) fn hole(to: To, done: bool, offset: u64, len: u32) -> Head {
        Head::chunk(to, done, chunk::OFFSET_HOLE, 12)
            .put(&offset.to_be_bytes())
            .put(&len.to_be_bytes())
    }

    /// The extents of one metadata context, so many; their descriptors follow.
    pub(super) fn block_status(to: To, done: bool, context: u32, extents: u32) -> Head {
        match to.extended {
            true => Head::chunk(to, done, chunk::BLOCK_STATUS_EXT, extents * 16 + 8)
                .put(&context.to_be_bytes())
                .put(&extents.to_be_bytes()),
            false => Head::chunk(to, done, chunk::BLOCK_STATUS, extents * 8 + 4)
                .put(&context.to_be_bytes()),
        }
    }

    /// An error with a few words about it.
    pub(super) fn error(to: To, error: u32, message: &str) -> Head {
        let room = MAX_HEAD - 38;
        let message = &message.as_bytes()[..message.len().min(room)];
        Head::chunk(to, true, chunk::ERROR, 6 + message.len() as u32)
            .put(&error.to_be_bytes())
            .put(&(message.len() as u16).to_be_bytes())
            .put(message)
    }
}

/// What a chunk answers.
#[derive(Clone, Copy, Debug)]
pub(super) struct To {
    cookie: u64,
    offset: u64,
    extended: bool,
}

impl From<&Header> for To {
    fn from(header: &Header) -> To {
        To { cookie: header.cookie, offset: header.offset, extended: header.extended }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_agree_with_what_follows() {
        assert_eq!(Head::simple(7, 5).bytes().len(), 16);
        for extended in [false, true] {
            let to = To { cookie: 1, offset: 0x77, extended };
            let (fixed, extent) = if extended { (32, 16) } else { (20, 8) };
            let length = |head: &Head| match extended {
                true => u64::from_be_bytes(*head.bytes()[24..].first_chunk().expect("8")),
                false => u32::from_be_bytes(*head.bytes()[16..].first_chunk().expect("4")).into(),
            };
            for (head, follows) in [
                (Head::none(to), 0),
                (Head::data(to, true, 0, 4096), 4096),
                (Head::hole(to, false, 0, 4096), 0),
                (Head::block_status(to, true, 1, 3), 3 * extent),
                (Head::error(to, 5, "no"), 0),
                (Head::error(to, 5, &"x".repeat(1000)), 0),
            ] {
                assert_eq!((head.bytes().len() + follows) as u64, fixed + length(&head));
                if extended {
                    assert_eq!(head.bytes()[16..24], [0, 0, 0, 0, 0, 0, 0, 0x77]);
                }
            }
            let head = Head::error(to, 5, "no");
            assert_eq!(&head.bytes()[fixed as usize..], b"\0\0\0\x05\0\x02no");
        }
    }
}
