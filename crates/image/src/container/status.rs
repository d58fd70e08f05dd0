//! Which bytes of a file are in holes.

use ringtap_io::Io;
use rustix::fs::SeekFrom;

use super::Container;
use crate::{Error, Status};

impl Container {
    /// What the bytes from an offset on are, as they lie in the file.
    pub(crate) async fn status(&self, io: &Io, offset: u64, len: u64) -> Result<Status, Error> {
        let Some(holds) = self.holds(io, offset, len).await? else {
            return Ok(self.local_status(offset, len));
        };
        let all = Status { at: Some(offset), ..Status::data(holds.len.min(len)) };
        Ok(Status { allocated: !holds.hole, zero: holds.zero, ..all })
    }

    fn local_status(&self, offset: u64, len: u64) -> Status {
        let all_data = Status { at: Some(offset), ..Status::data(len) };
        let Some(open) = self.open_file() else { return all_data };
        let seek = |from| rustix::fs::seek(open, from);
        let end = offset + len;
        // The size is rounded up to 512; the file ends where it ends, and zeros follow.
        let hole_to = |to: u64| Status { at: Some(offset), ..Status::hole(to.min(end) - offset) };
        match seek(SeekFrom::Data(offset)) {
            Ok(data) if data > offset => hole_to(data),
            Ok(_) => match seek(SeekFrom::Hole(offset)) {
                Ok(hole) if hole > offset => Status { len: hole.min(end) - offset, ..all_data },
                _ => all_data,
            },
            Err(rustix::io::Errno::NXIO) => hole_to(end),
            // A block device, or a file system that cannot tell: all of it may be data.
            Err(_) => all_data,
        }
    }
}
