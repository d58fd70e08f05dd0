//! The client's end of a simulated connection.

use std::cell::RefCell;
use std::io;

use ringtap_io::{File, Mem, Part};
use ringtap_sim::Disk;
use rustix::net::Shutdown;

/// It moves as many bytes at once as its seed says.
pub(in super::super) struct Stream {
    disk: Disk,
    end: File,
    rng: RefCell<fastrand::Rng>,
}

impl Stream {
    pub(super) fn new(disk: &Disk, end: File, seed: u64) -> Stream {
        Stream { disk: disk.clone(), end, rng: RefCell::new(fastrand::Rng::with_seed(seed)) }
    }

    pub(in super::super) fn file(&self) -> File {
        self.end
    }

    /// Of so many bytes at least one.
    fn some_of(&self, len: usize) -> usize {
        let mut rng = self.rng.borrow_mut();
        if len > 1 && rng.u8(0..4) == 0 { rng.usize(1..len) } else { len }
    }

    pub(in super::super) fn receive(&self, mem: Mem, more: &mut [u8]) -> io::Result<usize> {
        let most = self.some_of(mem.len() + more.len());
        let bytes = self.disk.receive_now(self.end, most)?;
        let (first, rest) = bytes.split_at(bytes.len().min(mem.len()));
        mem.copy_from(first);
        more[..rest.len()].copy_from_slice(rest);
        Ok(bytes.len())
    }

    pub(in super::super) fn send<'a>(
        &self,
        parts: impl IntoIterator<Item = Part<'a>>,
    ) -> io::Result<usize> {
        if self.rng.borrow_mut().u8(0..8) == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let mut bytes = Vec::new();
        for part in parts {
            match part {
                Part::Bytes(part) => bytes.extend(part),
                Part::Mem(mem) => {
                    let at = bytes.len();
                    bytes.resize(at + mem.len(), 0);
                    mem.copy_to(&mut bytes[at..]);
                }
            }
        }
        bytes.truncate(self.some_of(bytes.len()));
        self.disk.send_now(self.end, &bytes)?;
        Ok(bytes.len())
    }

    pub(in super::super) fn shut(&self, how: Shutdown) {
        match how {
            Shutdown::Both => self.disk.hang_up(self.end),
            _ => self.disk.shut(self.end),
        }
    }
}
