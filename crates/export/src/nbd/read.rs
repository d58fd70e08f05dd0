//! Reads, and the zeros in them that need not be sent.

use ringtap_io::{Buffer, PAGE};
use ringtap_vbd::{Error, Kind};

use super::answer::{Part, Parts, Reply};
use super::connection::Connection;
use super::pipes::{HOLDS, Pipe};
use super::reply::MAX_HEAD;
use super::request::Header;

/// Reads from here on are looked through for zeros.
const WORTH_A_LOOK: usize = 64 << 10;
/// Reads from here on go through a pipe where they can: less is copied sooner than workers are woken
/// for it.
const WORTH_A_PIPE: usize = 256 << 10;
/// Holes smaller than this are read as data.
const WORTH_A_HOLE: usize = 16 << 10;
/// Parts of one reply; the last takes the rest.
const MAX_PARTS: usize = PAGE / MAX_HEAD;

impl Connection {
    /// Whether a read is to be answered out of the page cache, without a copy.
    pub(super) fn lends_pages(&self, header: &Header) -> bool {
        let len = header.len as usize;
        let expected = self.structured && self.zeros_expected.get();
        (WORTH_A_PIPE..=HOLDS).contains(&len)
            && !expected
            && self.pipes.is_one_free()
            && self.vbd.lends_pages(header.offset, header.len)
    }

    pub(super) async fn read(
        &self,
        header: &Header,
        whole: bool,
        mut buffer: Buffer,
    ) -> Result<Reply, Error> {
        if buffer.bytes().len() < header.len as usize {
            match self.read_to_pipe(header, &buffer).await {
                Ok(Some(pipe)) => {
                    return Ok(Reply::Piped(pipe, header.len as usize - PAGE, buffer, PAGE));
                }
                Ok(None) => {}
                Err(error) => {
                    self.memory.give_back(buffer);
                    return Err(error);
                }
            }
            self.memory.give_back(buffer);
            buffer = self.memory.take(header.len as usize).await.map_err(Error::Os)?;
        }
        let look = self.structured && !whole && header.len as usize >= WORTH_A_LOOK;
        let end = match look {
            false => self.read_all(header, &buffer).await,
            // Limits count each request once, and those of holes, too.
            true if self.zeros_expected.get() && !self.vbd.may_be_held() => {
                match self.read_parts(header, &buffer).await {
                    Ok(parts) => return Ok(Reply::Parts(buffer, parts)),
                    Err(error) => Err(error),
                }
            }
            true => self.read_all(header, &buffer).await,
        };
        let bytes = &buffer.bytes()[..header.len as usize];
        if let Err(error) = end {
            self.memory.give_back(buffer);
            return Err(error);
        }
        if look && is_zero(&bytes[bytes.len() - PAGE..]) {
            self.zeros_expected.set(true);
            if is_zero(bytes) {
                self.memory.give_back(buffer);
                return Ok(Reply::Hole(header.len as usize));
            }
        }
        Ok(Reply::Data(buffer, header.len as usize))
    }

    /// Read the last page into `tail` and what comes before it into a pipe; none where that cannot
    /// be, or the last page is zeros, so that more may be.
    async fn read_to_pipe(&self, header: &Header, tail: &Buffer) -> Result<Option<Pipe>, Error> {
        let Some(pipe) = self.pipes.take() else { return Ok(None) };
        let before = header.len as usize - PAGE;
        let end = self.transfer(header, Kind::Read, before, tail.mem().window(0, PAGE)).await;
        if end.is_err() || self.structured && is_zero(&tail.bytes()[..PAGE]) {
            self.pipes.give_back(pipe);
            return end.map(|()| None);
        }
        match self.transfer(header, Kind::Read, 0, pipe.to_fill(before)).await {
            Ok(()) => Ok(Some(pipe)),
            // The file has ended, or its file system cannot do it: what is wrong a plain read will say.
            Err(error) => {
                self.pipes.close(pipe);
                if error != Error::Unsupported {
                    self.pipes.refuse();
                }
                Ok(None)
            }
        }
    }

    async fn read_all(&self, header: &Header, buffer: &Buffer) -> Result<(), Error> {
        self.transfer(header, Kind::Read, 0, buffer.mem().window(0, header.len as usize)).await
    }

    /// Read after zeros were read: ask where holes are before reading. Dense disks are not asked,
    /// for finding the end of their data can take the file system long.
    async fn read_parts(&self, header: &Header, buffer: &Buffer) -> Result<Parts, Error> {
        let heads = self.memory.take_more(PAGE).map_err(Error::Os)?;
        let mut parts = self.find_parts(header).await;
        for part in parts.iter_mut().filter(|part| !part.hole) {
            let mem = buffer.mem().window(part.from, part.len);
            let end = self.transfer(header, Kind::Read, part.from, mem).await;
            if let Err(error) = end {
                self.memory.give_back(heads);
                return Err(error);
            }
            let bytes = &buffer.bytes()[part.from..][..part.len];
            part.hole = part.len >= WORTH_A_LOOK && is_zero(bytes);
        }
        self.zeros_expected.set(parts.last().is_some_and(|last| last.hole));
        Ok(Parts { parts, heads })
    }

    async fn find_parts(&self, header: &Header) -> Vec<Part> {
        let len = header.len as usize;
        let mut parts: Vec<Part> = Vec::new();
        let mut from = 0;
        while from < len {
            let left = len - from;
            let asked = match parts.len() + 1 < MAX_PARTS {
                true => {
                    let at = header.offset + from as u64;
                    self.vbd.status(&self.io, at, left as u64).await.ok()
                }
                false => None,
            };
            let (found, hole) = match asked {
                Some(status) => {
                    let found = (status.len as usize).clamp(1, left);
                    (found, status.zero && found >= WORTH_A_HOLE)
                }
                _ => (left, false),
            };
            match parts.last_mut() {
                Some(last) if last.hole == hole => last.len += found,
                _ => parts.push(Part { from, len: found, hole }),
            }
            from += found;
        }
        parts
    }
}

fn is_zero(bytes: &[u8]) -> bool {
    // Zero at the front, and each byte as the one 64 before it: a comparison of memory, which the
    // C library does fast and ends at the first difference.
    let front = bytes.len().min(64);
    bytes[..front].iter().all(|byte| *byte == 0) && bytes[front..] == bytes[..bytes.len() - front]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_byte_makes_it_data() {
        for len in [0, 1, 63, 64, 65, 4096, 4097] {
            let mut bytes = vec![0; len];
            assert!(is_zero(&bytes));
            for at in 0..len {
                bytes[at] = 1;
                assert!(!is_zero(&bytes), "{at} of {len}");
                bytes[at] = 0;
            }
        }
    }
}
