//! Why serving could not begin, or ended otherwise than it was asked to.

use std::io;
use std::path::{Path, PathBuf};

use ringtap_image::OpenError;
use ringtap_io::Panic;

/// An error of the daemon.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The wishes contradict each other.
    #[error("{0}")]
    Usage(String),
    /// An image could not be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// An overlay could not take an image's place.
    #[error("cannot have {} go on with the disk: {why}", overlay.display())]
    Snapshot {
        /// The overlay.
        overlay: PathBuf,
        /// Why not, and what to do.
        why: String,
    },
    /// What a disk's topmost images hold could not be brought into one below.
    #[error("cannot commit {}: {why}", path.display())]
    Commit {
        /// The topmost image.
        path: PathBuf,
        /// Why not.
        why: String,
    },
    /// What lies below a disk's topmost image could not be brought into that.
    #[error("cannot bring what lies below {} into it: {why}", path.display())]
    Stream {
        /// The topmost image.
        path: PathBuf,
        /// Why not.
        why: String,
    },
    /// A disk could not be made larger.
    #[error("cannot make {} larger: {why}", path.display())]
    Resize {
        /// The disk's image.
        path: PathBuf,
        /// Why not.
        why: String,
    },
    /// A file that describes a disk is wrong, or cannot be written.
    #[error("{0}")]
    File(String),
    /// A disk's image does not come, or does not leave, with its guest.
    #[error("cannot have {} come or leave with its guest: {why}", path.display())]
    Moves {
        /// The disk's image.
        path: PathBuf,
        /// Why not.
        why: String,
    },
    /// A disk's image stays here though its guest has left.
    #[error("{0}")]
    Stays(String),
    /// A server could not be followed by another.
    #[error("{0}")]
    Upgrade(String),
    /// A job could not be done.
    #[error("{0}")]
    Job(String),
    /// A disk could not be backed up.
    #[error("cannot back up {}: {why}", path.display())]
    Backup {
        /// The disk's image.
        path: PathBuf,
        /// Why not.
        why: String,
    },
    /// Bitmaps could not be kept, or changed.
    #[error("bitmaps of {}: {why}", path.display())]
    Bitmaps {
        /// The disk's image.
        path: PathBuf,
        /// Why not.
        why: String,
    },
    /// A disk could not be mirrored.
    #[error("cannot mirror {}: {why}", path.display())]
    Mirror {
        /// The disk's image.
        path: PathBuf,
        /// Why not.
        why: String,
    },
    /// A socket could not be made.
    #[error("cannot {tried} {address}: {source}{hint}")]
    Socket {
        /// What was tried.
        tried: &'static str,
        /// On which address.
        address: String,
        /// What the kernel said.
        source: io::Error,
        /// What to do, with the mark that joins it.
        hint: &'static str,
    },
    /// A server listens on that socket.
    #[error("{} is in use: {holder} listens on it; stop it, or choose another path", path.display())]
    Busy {
        /// The socket.
        path: PathBuf,
        /// Who, as far as the kernel tells.
        holder: String,
    },
    /// Something else than a socket stands there.
    #[error("{} exists and is not a socket: remove it, or choose another path", path.display())]
    NoSocket {
        /// The path.
        path: PathBuf,
    },
    /// The certificates for TLS cannot be used.
    #[error(transparent)]
    Tls(#[from] ringtap_export::nbd::CredentialsError),
    /// A file could not be mounted.
    #[error(transparent)]
    Fuse(#[from] ringtap_export::fuse::Error),
    /// A block device could not be made.
    #[error(transparent)]
    Ublk(#[from] ringtap_export::ublk::Error),
    /// Xen's guests cannot be served.
    #[error(transparent)]
    Xen(#[from] ringtap_export::xen::Error),
    /// Another serves them.
    #[error("another ringtap xen runs on this host{}: stop it first", process.as_ref().map(|id| format!(", process {id}")).unwrap_or_default())]
    XenServed {
        /// Its process.
        process: Option<String>,
    },
    /// The sockets handed over are not those asked for.
    #[error("{0}")]
    Handed(String),
    /// The kernel lends no io_uring.
    #[error(
        "cannot make an io_uring: {0}; look at sysctl kernel.io_uring_disabled, \
         and in a container at its seccomp profile"
    )]
    Ring(io::Error),
    /// A resource of the process could not be had.
    #[error("cannot {tried}: {source}")]
    Process {
        /// What was tried.
        tried: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// The file for the process id could not be written.
    #[error("cannot write the process id to {}: {source}", path.display())]
    PidFile {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The server cannot be confined.
    #[error("--sandbox on: this host lacks {0}; --sandbox auto does without")]
    Sandbox(String),
    /// The server cannot become another user.
    #[error(
        "cannot become user {user} (--user): {source}; that takes CAP_SETUID, CAP_SETGID and what root's folders take, and \
         a broker: start the server as root, or as that user and without --user"
    )]
    User {
        /// The number of the user.
        user: u32,
        /// What the system said.
        source: io::Error,
    },
    /// Some disks were served, and some were not.
    #[error("{count} of {of} disks could not be served: {first}")]
    NotServed {
        /// How many were not.
        count: usize,
        /// How many there should have been.
        of: usize,
        /// Why the first of them was not.
        #[source]
        first: Box<Error>,
    },
    /// A server ended by itself.
    #[error("the {server} server ended: {source}")]
    Server {
        /// Which, and where.
        server: String,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A panic has stopped disks.
    #[error(
        "{} stopped by a panic, which is an error of Ringtap itself: {panic}; its image is as a killed server \
         leaves it, and the next server takes up what was acknowledged",
        .disks.join(", ")
    )]
    Panicked {
        /// Their images.
        disks: Vec<String>,
        /// The first panic.
        panic: String,
    },
    /// Storage has fallen silent, and the server ended without what waits for it.
    #[error(
        "{} left: storage on a server, or a front-end's file, has answered nothing for {seconds} s, and this one ended without it; \
         what was acknowledged and not flushed may be lost",
        .what.join(", ")
    )]
    Left {
        /// Images, and what was done to them.
        what: Vec<String>,
        /// For how long.
        seconds: u64,
    },
    /// What was written could not be made stable at the end.
    #[error("cannot flush {}: {source}; writes that were not flushed before may be lost", path.display())]
    Flush {
        /// The image.
        path: PathBuf,
        /// What the image said.
        source: ringtap_image::Error,
    },
}

impl Error {
    pub(crate) fn panicked<'a>(disks: impl IntoIterator<Item = &'a Path>, panic: &Panic) -> Error {
        let disks = disks.into_iter().map(|disk| disk.display().to_string()).collect();
        Error::Panicked { disks, panic: panic.to_string() }
    }
}
