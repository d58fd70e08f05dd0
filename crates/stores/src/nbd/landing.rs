//! Where what a connection receives lands, before it goes where it belongs.

use ringtap_io::Buffer;

/// Data of a read that is on its way.
#[derive(Clone, Copy)]
pub(super) struct Data {
    pub(super) cookie: u64,
    /// Where in the read it goes next, and how much is left.
    pub(super) at: u64,
    pub(super) left: u64,
    /// The reply ends with it.
    pub(super) done: bool,
}

/// What was received and not looked at yet.
pub(super) struct Landing {
    pub(super) bytes: Buffer,
    pub(super) start: usize,
    pub(super) end: usize,
    pub(super) data: Option<Data>,
}

impl Landing {
    pub(super) fn new(bytes: Buffer) -> Landing {
        Landing { bytes, start: 0, end: 0, data: None }
    }

    /// More goes to `end`.
    pub(super) fn make_room(&mut self) {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.start > 0 {
            self.bytes.bytes_mut().copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
    }

    /// So much has come, the first of it into memory of `direct` bytes.
    pub(super) fn received(&mut self, moved: usize, direct: usize) {
        let there = moved.min(direct);
        if let Some(data) = &mut self.data {
            data.at += there as u64;
            data.left -= there as u64;
        }
        self.end += moved - there;
    }
}
