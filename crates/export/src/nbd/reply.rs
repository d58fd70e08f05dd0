//! The heads of replies.

use super::wire::{SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, chunk};

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

    fn structured(cookie: u64, done: bool, kind: u16, len: u32) -> Head {
        let flags = if done { chunk::DONE } else { 0 };
        Head::new()
            .put(&STRUCTURED_REPLY_MAGIC.to_be_bytes())
            .put(&flags.to_be_bytes())
            .put(&kind.to_be_bytes())
            .put(&cookie.to_be_bytes())
            .put(&len.to_be_bytes())
    }

    /// A chunk that says no more than that all went well.
    pub(super) fn none(cookie: u64) -> Head {
        Head::structured(cookie, true, chunk::NONE, 0)
    }

    /// A chunk of `len` bytes of data, which follow.
    pub(super) fn data(cookie: u64, done: bool, offset: u64, len: u32) -> Head {
        Head::structured(cookie, done, chunk::OFFSET_DATA, len + 8).put(&offset.to_be_bytes())
    }

    /// A chunk that stands for `len` zeros.
    pub(super) fn hole(cookie: u64, done: bool, offset: u64, len: u32) -> Head {
        Head::structured(cookie, done, chunk::OFFSET_HOLE, 12)
            .put(&offset.to_be_bytes())
            .put(&len.to_be_bytes())
    }

    /// The extents of one metadata context; `len` bytes of descriptors follow.
    pub(super) fn block_status(cookie: u64, done: bool, context: u32, len: u32) -> Head {
        Head::structured(cookie, done, chunk::BLOCK_STATUS, len + 4).put(&context.to_be_bytes())
    }

    /// An error with a few words about it.
    pub(super) fn error(cookie: u64, error: u32, message: &str) -> Head {
        let room = MAX_HEAD - 26;
        let message = &message.as_bytes()[..message.len().min(room)];
        Head::structured(cookie, true, chunk::ERROR, 6 + message.len() as u32)
            .put(&error.to_be_bytes())
            .put(&(message.len() as u16).to_be_bytes())
            .put(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_agree_with_what_follows() {
        let length =
            |head: &Head| u32::from_be_bytes(*head.bytes()[16..].first_chunk().expect("4"));
        assert_eq!(Head::simple(7, 5).bytes().len(), 16);
        for (head, follows) in [
            (Head::none(1), 0),
            (Head::data(1, true, 0, 4096), 4096),
            (Head::hole(1, false, 0, 4096), 0),
            (Head::block_status(1, true, 1, 24), 24),
            (Head::error(1, 5, "no"), 0),
            (Head::error(1, 5, &"x".repeat(1000)), 0),
        ] {
            assert_eq!(head.bytes().len() + follows, 20 + length(&head) as usize);
        }
        let head = Head::error(1, 5, "no");
        assert_eq!(&head.bytes()[20..], b"\0\0\0\x05\0\x02no");
    }
}
