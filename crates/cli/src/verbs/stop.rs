//! Ctrl-C and SIGTERM while an image is written: the copy ends after the pieces under way, so that what
//! is left can be put in order, and then the process ends as the signal would have ended it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use anyhow::Context;
use ringtap_vbd::Progress;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::{flag, low_level};

/// A signal asked for the end before there was one.
#[derive(Debug, thiserror::Error)]
#[error("stopped by {}", low_level::signal_name(*.signal).unwrap_or("a signal"))]
pub(crate) struct Stopped {
    signal: i32,
}

impl Stopped {
    /// End the process by the signal. Returns only where that cannot be.
    pub(crate) fn pass_on(&self) {
        let _ = low_level::emulate_default_handler(self.signal);
    }

    /// The exit status that a shell sees.
    pub(crate) fn status(&self) -> u8 {
        128 + self.signal as u8
    }
}

/// Which signal came, if one did.
pub(crate) struct Signals {
    which: Arc<AtomicUsize>,
}

impl Signals {
    /// From now on the first signal stops the work whose progress this is; the second ends the process.
    pub(crate) fn stop(progress: &Progress) -> anyhow::Result<Signals> {
        let which = Arc::new(AtomicUsize::new(0));
        for signal in [SIGINT, SIGTERM] {
            // In the order in which they are to happen.
            flag::register_conditional_default(signal, progress.stop_flag())
                .and_then(|_| flag::register_usize(signal, which.clone(), signal as usize))
                .and_then(|_| flag::register(signal, progress.stop_flag()))
                .context("cannot watch for signals")?;
        }
        Ok(Signals { which })
    }

    /// That it was one of them.
    pub(crate) fn stopped(&self) -> Stopped {
        Stopped { signal: self.which.load(SeqCst) as i32 }
    }
}
