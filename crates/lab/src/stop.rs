//! Ctrl-C and SIGTERM set a flag; everything that waits looks at it. Cleaning up is the work of `Drop`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Error, Result};

/// The wish that the run should end. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// A wish that SIGINT, SIGTERM and SIGHUP make.
    pub fn on_signals() -> std::io::Result<Stop> {
        let stop = Stop::default();
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
            signal_hook::flag::register(signal, stop.0.clone())?;
        }
        Ok(stop)
    }

    /// Makes the wish.
    pub fn ask(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    /// Whether the wish was made.
    pub fn asked(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }

    /// The flag itself, for who knows no [`Stop`].
    pub fn flag(&self) -> Arc<AtomicBool> {
        self.0.clone()
    }

    /// An error once the wish was made.
    pub fn check(&self) -> Result<()> {
        if self.asked() { Err(Error::Interrupted) } else { Ok(()) }
    }
}
