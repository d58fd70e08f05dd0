//! What the programs of this crate are told on the command line.

use crate::image::Fs;
use clap::{Args, ValueEnum};
use ringtap_load::parse_size;
use std::path::PathBuf;

pub use ringtap_load::Output;

/// Options that `vhost_user` and `nbd` share.
#[derive(Clone, Debug, Args)]
pub struct Options {
    /// Rounds; below 6 no interval is given.
    #[arg(long, value_name = "N", default_value_t = 6)]
    pub rounds: usize,

    /// Seconds per measurement.
    #[arg(long, value_name = "S", default_value_t = 2.0)]
    pub seconds: f64,

    /// The Ringtap to measure [default: beside this program, else in PATH].
    #[arg(long, value_name = "PATH")]
    pub ringtap: Option<PathBuf>,

    /// What lies under the servers.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "tmpfs,ext4,null")]
    pub fs: Vec<Fs>,

    /// Only workloads whose name contains one of these (randread-4k-d32, write-1M-d8).
    #[arg(long, value_name = "TEXT", value_delimiter = ',')]
    pub only: Vec<String>,

    /// Only servers whose name contains one of these.
    #[arg(long, value_name = "TEXT", value_delimiter = ',')]
    pub servers: Vec<String>,

    /// Bytes of the image.
    #[arg(long, value_name = "BYTES", default_value = "1G", value_parser = parse_size)]
    pub size: u64,

    /// Folder on a disk, for --fs ext4 [default: the current one].
    #[arg(long, value_name = "PATH")]
    pub dir: Option<PathBuf>,

    /// Keep the server on CPU 0 and the client on CPU 1.
    #[arg(long)]
    pub pin: bool,

    /// How to print the result.
    #[arg(long, value_enum, default_value = "table")]
    pub output: Output,
}

impl Options {
    /// Where images on a disk go.
    pub fn disk(&self) -> PathBuf {
        self.dir.clone().unwrap_or_else(|| ".".into())
    }

    /// True if `name` is not ruled out by `list`.
    pub fn wanted(list: &[String], name: &str) -> bool {
        list.is_empty() || list.iter().any(|text| name.contains(text.as_str()))
    }
}

/// Which program puts load on vhost-user servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Judge {
    /// The blkio crate, in our load loop.
    Blkio,
    /// `qemu-img bench` of QEMU 10 (Debian 13's, fetched on first use); sequential only.
    Qemu10,
}
