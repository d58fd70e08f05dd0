//! Xen: disks of PV and PVH guests, by the block protocol of `xen-blkfront`, with no back end in the
//! kernel.
//!
//! The toolstack (`xl`) describes each disk in xenstore; those with `script=block-ringtap` are
//! served here. Requests come in rings of pages that the guest grants, calls by event channels, and
//! bytes are copied between the guest's pages and page-aligned buffers by the hypervisor, many
//! pages by one call (GNTDEV_GRANT_COPY): mapping pages for one request costs many times that.
//! Where the frontend uses the same pages again and again (persistent grants), they are mapped once,
//! and the ring's thread copies from and to them.
//!
//! A ring is a thread, as everywhere here; a disk has another that follows xenstore. What is under
//! way is noted on tmpfs, so that a killed server's successor takes over the rings where they were:
//! the guest stays connected and sees a pause.
//!
//! The devices are spoken to directly: a dozen ioctls and one simple protocol need none of Xen's C
//! libraries, which would tie the binary to Xen's version.

mod buffer_cache;
mod connect;
mod copies;
mod device;
mod evtchn;
mod gntdev;
mod ioctl;
mod nodes;
mod pages;
mod persistent;
mod queue;
mod record;
mod ring;
mod server;

#[doc(hidden)]
pub mod testing;
mod thread;
mod wire;
mod xenstore;

use std::io;

use ringtap_vbd::Disk;

pub use self::ring::RingError;
pub use self::server::Server;
pub use self::xenstore::StoreError;

/// How disks are shown to guests.
#[derive(Clone, Debug)]
pub struct Options {
    /// The most rings a guest's disk may have, each a thread; never more than there are processors.
    pub queues: u16,
    /// Whether to keep pages mapped that a frontend uses again and again.
    pub persistent: bool,
}

/// A disk that a guest is to have.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// What it is called in logs: `xenDOMAIN-NUMBER`.
    pub name: &'a str,
    /// What the toolstack was told: the `target=` of the guest's configuration.
    pub params: &'a str,
    /// Whether the guest may not write.
    pub read_only: bool,
}

/// Whoever knows how images are opened.
pub trait Disks: Send + Sync {
    /// Open a disk, or say why not: the text is shown by `xl`.
    fn open(&self, wanted: &Wanted<'_>) -> Result<Disk, String>;

    /// The guest has given the disk of that name back, or its server ends: close the image. Returns once that is done,
    /// or it is somebody else's to do as all is closed.
    fn close(&self, name: &str);
}

/// Why disks cannot be served to Xen guests.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// This is no host of guests.
    #[error(
        "cannot open /dev/xen/xenbus: {0}; this must be Xen's dom0, with \
         xenfs, xen-gntdev and xen-evtchn loaded, and root"
    )]
    Missing(io::Error),
    /// xenstored cannot be talked to.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A resource of the process could not be had.
    #[error("cannot {tried}: {source}")]
    Process {
        /// What was tried.
        tried: &'static str,
        /// What the system said.
        source: io::Error,
    },
}
