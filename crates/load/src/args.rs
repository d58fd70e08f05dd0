//! What a load is told on the command line.

use crate::Error;
use clap::{Args, ValueEnum};
use std::path::PathBuf;

/// Which way the bytes go, and in which order the blocks are visited.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Rw {
    /// Random reads.
    Randread,
    /// Random writes.
    Randwrite,
    /// Random, half reads, half writes.
    Randrw,
    /// Sequential reads, starting again at the end.
    Read,
    /// Sequential writes, starting again at the end.
    Write,
}

impl Rw {
    /// True if this load may write.
    pub fn writes(self) -> bool {
        !matches!(self, Rw::Randread | Rw::Read)
    }

    /// True if blocks are visited in order.
    pub fn sequential(self) -> bool {
        matches!(self, Rw::Read | Rw::Write)
    }

    /// The name fio and this program use.
    pub fn name(self) -> &'static str {
        match self {
            Rw::Randread => "randread",
            Rw::Randwrite => "randwrite",
            Rw::Randrw => "randrw",
            Rw::Read => "read",
            Rw::Write => "write",
        }
    }
}

/// How the result is printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For people.
    #[default]
    Table,
    /// One JSON object.
    Json,
}

/// Put load on a vhost-user-blk device (or, for reference, on a file by io_uring).
#[derive(Clone, Debug, Args)]
pub struct LoadArgs {
    /// Socket of the vhost-user-blk server.
    #[arg(long, value_name = "PATH", required_unless_present = "native")]
    pub socket: Option<PathBuf>,

    /// Run the same loop on FILE by io_uring with O_DIRECT, registered file and buffers.
    #[arg(long, value_name = "FILE", conflicts_with = "socket")]
    pub native: Option<PathBuf>,

    /// Direction and order of the requests.
    #[arg(long, value_enum, default_value = "randread")]
    pub rw: Rw,

    /// Bytes per request (4k, 1M).
    #[arg(long, value_name = "BYTES", default_value = "4k", value_parser = parse_size)]
    pub bs: u64,

    /// Requests kept in flight on each queue.
    #[arg(long, value_name = "N", default_value_t = 32)]
    pub depth: usize,

    /// Seconds to measure.
    #[arg(long, value_name = "S", default_value_t = 5.0)]
    pub seconds: f64,

    /// Seconds of load before the measurement begins.
    #[arg(long, value_name = "S", default_value_t = 0.0)]
    pub ramp: f64,

    /// Begin at this moment, in milliseconds since 1970, once the device is there: loads of several processes begin together.
    #[arg(long, value_name = "MS")]
    pub begin_at: Option<u64>,

    /// Use only the first BYTES of the device.
    #[arg(long, value_name = "BYTES", value_parser = parse_size)]
    pub size: Option<u64>,

    /// Queues, with one thread each.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub queues: usize,

    /// Descriptors per virtqueue, a power of two [default: 256, or as many as the depth needs].
    #[arg(long, value_name = "N")]
    pub queue_size: Option<u16>,

    /// Scatter each request over memory segments of BYTES, as a guest scatters over its pages.
    #[arg(long, value_name = "BYTES", value_parser = parse_size)]
    pub segment: Option<u64>,

    /// Send a flush after every N writes.
    #[arg(long, value_name = "N")]
    pub fsync_every: Option<u64>,

    /// Spin on the used ring instead of sleeping.
    #[arg(long, conflicts_with = "eventfd")]
    pub poll: bool,

    /// Sleep until the server signals, as a guest would (the default).
    #[arg(long)]
    pub eventfd: bool,

    /// Stamp what is written and read everything back afterwards.
    #[arg(long)]
    pub verify: bool,

    /// How to print the result.
    #[arg(long, value_enum, default_value = "table")]
    pub output: Output,
}

impl LoadArgs {
    /// Descriptors a request takes: header, data segments, status.
    pub(crate) fn descriptors(&self) -> u64 {
        2 + self.segment.map_or(1, |segment| self.bs.div_ceil(segment))
    }

    /// Refuses what could not work on any device.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let refuse = |text: String| Err(Error::Arguments(text));
        if self.bs == 0 || self.bs % 512 != 0 || self.bs > 1 << 30 {
            return refuse(format!("--bs {}: give a multiple of 512 up to 1G", self.bs));
        }
        if self.segment.is_some_and(|s| s == 0 || s % 512 != 0) {
            return refuse("--segment: give a multiple of 512".into());
        }
        if self.segment.is_some() && self.native.is_some() {
            return refuse(
                "--segment is for vhost-user: native buffers are registered whole".into(),
            );
        }
        if self.depth == 0 || self.depth > 16384 || self.queues == 0 || self.queues > 1024 {
            return refuse("--depth must be 1 to 16384, --queues 1 to 1024".into());
        }
        let times = [("--seconds", self.seconds), ("--ramp", self.ramp)];
        if let Some((name, value)) = times.iter().find(|t| !(0.0..=1e6).contains(&t.1)) {
            return refuse(format!("{name} {value}: give 0 to 1000000 seconds"));
        }
        if self.fsync_every == Some(0) {
            return refuse("--fsync-every 0: give at least 1, or leave it away".into());
        }
        if self.verify && !self.rw.writes() {
            return refuse(format!(
                "--verify checks what this run wrote, and --rw {} writes nothing",
                self.rw.name()
            ));
        }
        Ok(())
    }
}

/// Reads a size such as `512`, `4k`, `1M`, `1.5G` (powers of 1024) as bytes.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let parsed = parse_size::Config::new().with_binary().parse_size(text);
    parsed.map_err(|error| format!("{text:?} is not a size: {error}; use for example 4k, 1M, 10G"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!(parse_size("512"), Ok(512));
        assert_eq!(parse_size("4k"), Ok(4096));
        assert_eq!(parse_size("4KiB"), Ok(4096));
        assert_eq!(parse_size("1M"), Ok(1 << 20));
        assert_eq!(parse_size("10G"), Ok(10 << 30));
        assert_eq!(parse_size("1.5G"), Ok(3 << 29));
        for bad in ["", "k", "4x", "-1", "99999999T"] {
            assert!(parse_size(bad).is_err(), "{bad:?} was taken");
        }
    }
}
