//! A disk whose guest has whole clusters stored compressed, as `convert -c` does.

use ringtap_io::{Io, Mem};
use ringtap_sim::{Ask, Device, SECTOR};
use ringtap_vbd::{Error, Vbd};

use crate::common::Served;

/// A VBD that compresses whole clusters, where its image can.
pub struct Packs {
    served: Served,
    /// Sectors of a cluster.
    cluster: Option<u64>,
}

impl Packs {
    pub fn new(vbd: Vbd, cluster: Option<u64>) -> Packs {
        Packs { served: Served::new(vbd), cluster }
    }
}

impl Device for Packs {
    type Error = Error;

    async fn serve(&self, io: &Io, ask: &Ask, mem: Mem) -> Result<(), Error> {
        let vbd = &self.served.vbd;
        if let (Ask::Write { range, durable }, Some(cluster)) = (ask, self.cluster) {
            let ends = range.end % cluster == 0 || range.end * SECTOR as u64 == vbd.size();
            if range.start % cluster == 0 && ends {
                let mut bytes = vec![0; mem.len()];
                mem.copy_to(&mut bytes);
                match vbd.compress(io, range.start * SECTOR as u64, &bytes).await {
                    // Encrypted images and those with an external data file.
                    Err(Error::Unsupported) => {}
                    Ok(()) if *durable => return vbd.flush(io).await,
                    end => return end,
                }
            }
        }
        self.served.serve(io, ask, mem).await
    }
}

/// Let half of the writes be of whole clusters, one or a few.
pub fn whole_clusters(rng: &mut fastrand::Rng, asks: &mut [Ask], cluster: u64, sectors: u64) {
    for ask in asks {
        let Ask::Write { range, .. } = ask else { continue };
        if rng.bool() {
            let first = range.start - range.start % cluster;
            *range = first..(first + cluster * rng.u64(1..=4)).min(sectors);
        }
    }
}
