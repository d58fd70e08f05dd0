//! A load generator for block devices: `ringtap-lab load`.
//!
//! It plays the guest. The virtio driver is the `blkio` crate (libblkio, the driver that QEMU's
//! `virtio-blk-vhost-user` and fio's `libblkio` engine use), so the server is judged by code that
//! was written elsewhere. `virtio-driver`, which `blkio` stands on, offers the bare virtqueue; it
//! leaves the kick, the wait and the re-arming of notifications to its caller, and those are
//! exactly what a server and its client must agree on, so they had better not be ours.
//!
//! The same loop also runs straight on a file by io_uring (`--native`): the reference that a
//! server's numbers are divided by.

mod args;
mod buffers;
mod engine;
mod native;
mod outcome;
mod pattern;
mod verify;
mod vhost_user;
mod worker;

pub use args::{LoadArgs, Output, Rw, parse_size};
pub use outcome::{Latency, Outcome};
pub use verify::Verified;

use engine::Engine;
use std::path::PathBuf;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use worker::{Plan, Tally};

/// Why a load could not be run to its end.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The arguments contradict each other or the device.
    #[error("{0}")]
    Arguments(String),
    /// The vhost-user server refused or broke off.
    #[error("{what} on vhost-user socket {}: {source}", socket.display())]
    Blkio {
        /// The step that failed.
        what: &'static str,
        /// The server's socket.
        socket: PathBuf,
        /// What blkio reports.
        source: blkio::Error,
    },
    /// The file of a native run cannot be used.
    #[error("{what} {}: {source}", file.display())]
    Native {
        /// The step that failed.
        what: &'static str,
        /// The file named by `--native`.
        file: PathBuf,
        /// What the kernel reports.
        source: std::io::Error,
    },
    /// Nothing was answered for a long time.
    #[error(
        "{in_flight} requests unanswered for {seconds} s: is the server of {target} still alive?"
    )]
    Stalled {
        /// The socket or file.
        target: String,
        /// Requests sent and not answered.
        in_flight: usize,
        /// How long was waited, in seconds.
        seconds: u64,
    },
}

/// Runs one load to its end and returns what was measured.
///
/// I/O errors of single requests do not end the run; they are counted in [`Outcome::errors`].
/// Fails when the device cannot be reached, the arguments do not fit it, or it stops answering.
pub fn run(args: LoadArgs) -> anyhow::Result<Outcome> {
    args.check()?;
    match (&args.socket, &args.native) {
        (Some(socket), None) => vhost_user::run(&args, socket),
        (None, Some(file)) => native::run(&args, file),
        _ => Err(Error::Arguments("name either --socket PATH or --native FILE".into()).into()),
    }
}

/// Sleeps until a moment in milliseconds since 1970; one that is over is now.
fn sleep_until(at: Option<u64>) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let left = Duration::from_millis(at.unwrap_or(0)).saturating_sub(now);
    thread::sleep(left.min(Duration::from_secs(60)));
}

/// Drives one engine per thread, all starting at the same moment, and adds up what they did.
///
/// The engines are built in their own threads: an io_uring with `SINGLE_ISSUER` belongs to the
/// thread that made it.
fn drive<E, B>(args: &LoadArgs, capacity: u64, builders: Vec<B>) -> anyhow::Result<Tally>
where
    E: Engine,
    B: FnOnce() -> Result<E, Error> + Send,
{
    let plans = Plan::split(args, capacity, builders.len())?;
    let start = Barrier::new(builders.len());
    let broken = AtomicBool::new(false);
    let tallies: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = builders
            .into_iter()
            .zip(plans)
            .map(|(build, plan)| {
                let (start, broken) = (&start, &broken);
                scope.spawn(move || {
                    let engine = build();
                    broken.fetch_or(engine.is_err(), Ordering::SeqCst);
                    start.wait();
                    let engine = engine?;
                    sleep_until(args.begin_at);
                    if broken.load(Ordering::SeqCst) {
                        return Ok(None);
                    }
                    worker::work(engine, plan).map(Some)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join()).collect()
    });

    let mut sum = Tally::new();
    for tally in tallies {
        let tally = tally.map_err(|_| Error::Arguments("a load thread panicked".into()))?;
        if let Some(tally) = tally? {
            sum.add(tally);
        }
    }
    Ok(sum)
}
