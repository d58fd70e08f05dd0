//! What the tests on simulated disks share.

use ringtap_io::{Io, Mem};
use ringtap_sim::{Ask, Device, SECTOR};
use ringtap_vbd::{Error, Kind, Request, Vbd};

/// A VBD as a guest sees it, unless it forgets something on purpose.
pub struct Served {
    pub vbd: Vbd,
    /// It acknowledges a flush that it never carries out.
    pub drops_flushes: bool,
    /// It forgets that a request had FUA.
    pub drops_fua: bool,
}

impl Served {
    pub fn new(vbd: Vbd) -> Served {
        Served { vbd, drops_flushes: false, drops_fua: false }
    }
}

impl Device for Served {
    type Error = Error;

    async fn serve(&self, io: &Io, ask: &Ask, mem: Mem) -> Result<(), Error> {
        let (kind, range, fua) = match ask {
            Ask::Read(range) => (Kind::Read, range.clone(), false),
            Ask::Write { range, durable } => (Kind::Write, range.clone(), *durable),
            Ask::Zero { range, unmap, durable } => {
                (Kind::WriteZeroes { unmap: *unmap, fast: false }, range.clone(), *durable)
            }
            Ask::Discard(range) => (Kind::Discard, range.clone(), false),
            Ask::Flush if self.drops_flushes => return Ok(()),
            Ask::Flush => (Kind::Flush, 0..0, false),
        };
        let bytes = |sectors: u64| sectors * SECTOR as u64;
        let (offset, len) = (bytes(range.start), bytes(range.end - range.start));
        let fua = fua && !self.drops_fua;
        self.vbd.serve(io, Request { kind, offset, len, mem, fua }).await
    }
}
