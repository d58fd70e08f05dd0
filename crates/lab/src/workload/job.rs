//! A job of fio's, and what it runs on.

use std::path::PathBuf;

/// A fio job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Job {
    /// Random offsets, or one after the other.
    pub random: bool,
    /// Writes, or reads.
    pub write: bool,
    /// Bytes of one I/O.
    pub block: u64,
    /// I/Os in flight.
    pub depth: u32,
    /// An fsync behind each write.
    pub synced: bool,
}

impl Job {
    /// fio's (and `ringtap-lab load`'s) word for the pattern.
    pub fn pattern(self) -> &'static str {
        match (self.random, self.write) {
            (true, false) => "randread",
            (true, true) => "randwrite",
            (false, false) => "read",
            (false, true) => "write",
        }
    }
}

/// What fio runs on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// A file or block device, by io_uring and O_DIRECT.
    Path(String),
    /// An NBD export.
    Nbd(String),
    /// An image of a Ceph's pool `rbd`, by librbd without its cache.
    Rbd {
        /// The cluster's configuration, for fio's environment.
        conf: PathBuf,
        /// The image.
        image: &'static str,
    },
}

impl Target {
    /// fio's arguments for it, where `engine` is that for files and devices.
    pub fn args(&self, engine: &str) -> Vec<String> {
        match self {
            Target::Path(path) => vec![
                format!("--filename={}", escape(path)),
                format!("--ioengine={engine}"),
                "--direct=1".into(),
            ],
            Target::Nbd(uri) => vec!["--ioengine=nbd".into(), format!("--uri={uri}")],
            Target::Rbd { image, .. } => vec![
                "--ioengine=rbd".into(),
                "--pool=rbd".into(),
                "--clientname=admin".into(),
                "--busy_poll=0".into(),
                format!("--rbdname={image}"),
            ],
        }
    }
}

/// A path for fio, which splits file names at colons.
pub fn escape(path: &str) -> String {
    path.replace('\\', "\\\\").replace(':', "\\:")
}
