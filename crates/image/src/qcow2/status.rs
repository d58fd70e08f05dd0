//! What a range holds, for block status.

use ringtap_io::Io;

use super::Shared;
use super::entry::Kind;
use crate::{Error, Status};

impl Shared {
    pub(super) async fn status(&self, io: &Io, offset: u64, len: u64) -> Result<Status, Error> {
        let run = loop {
            match self.tables.run(offset, len) {
                Some(run) => break run,
                None => {
                    self.load_entry(io, offset >> self.tables.geometry.cluster_bits).await?;
                }
            }
        };
        let len = run.len;
        Ok(match run.kind {
            Kind::Data { host, .. } => Status { at: Some(host), ..Status::data(len) },
            Kind::Compressed => Status { compressed: true, ..Status::data(len) },
            Kind::Zero { host } => {
                Status { allocated: host.is_some(), at: host, ..Status::hole(len) }
            }
            Kind::Bad => return Err(self.mark_corrupt(io).await),
            Kind::Unallocated => return self.status_below(io, offset, len).await,
        })
    }

    async fn status_below(&self, io: &Io, offset: u64, len: u64) -> Result<Status, Error> {
        if !self.base.is_there() {
            return Ok(Status { depth: 1, present: false, ..Status::hole(len) });
        }
        match self.base.reaching(offset, len) {
            Some((base, len)) => {
                let status = base.status(io, offset, len).await?;
                Ok(Status { depth: status.depth + 1, ..status })
            }
            // Past the end of the backing file the zeros are the image's own, says QEMU.
            None => Ok(Status { present: false, ..Status::hole(len) }),
        }
    }
}
