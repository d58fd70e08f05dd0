//! Ctrl-C and SIGTERM while an image is written: the copy ends after the pieces under way, so that what
//! is left can be put in order, and then the process ends as the signal would have ended it.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use anyhow::Context;
use ringtap_image::is_store;
use ringtap_vbd::Progress;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::exfiltrator::SignalOnly;
use signal_hook::iterator::{Handle, SignalsInfo};
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
        Signals::watch(progress, &[SIGINT, SIGTERM])
    }

    /// As [`Signals::stop`], also by a terminal that hangs up, and by SIGQUIT: something is to be done whatever comes.
    pub(crate) fn stop_by_any(progress: &Progress) -> anyhow::Result<Signals> {
        // What `nohup` has the process ignore stays so.
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
        let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
        let is_heeded = |signal: &i32| ignored.unwrap_or(0) >> (signal - 1) & 1 == 0;
        let all = [SIGINT, SIGTERM, SIGHUP, SIGQUIT];
        Signals::watch(progress, &all.into_iter().filter(is_heeded).collect::<Vec<_>>())
    }

    fn watch(progress: &Progress, signals: &[i32]) -> anyhow::Result<Signals> {
        let which = Arc::new(AtomicUsize::new(0));
        for &signal in signals {
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

/// Files of which those that are new go where a signal ends the process while they are made.
pub(crate) struct Unmade {
    signals: Handle,
}

impl Unmade {
    /// From now on, until this is dropped.
    pub(crate) fn watch(files: Vec<PathBuf>) -> anyhow::Result<Unmade> {
        let (new, old): (Vec<_>, Vec<_>) =
            files.into_iter().partition(|file| !is_store(file) && file.symlink_metadata().is_err());
        let mut come = SignalsInfo::<SignalOnly>::new([SIGINT, SIGTERM])
            .context("cannot watch for signals")?;
        let signals = come.handle();
        std::thread::Builder::new()
            .name("signals".into())
            .spawn(move || {
                let Some(signal) = come.forever().next() else { return };
                new.iter().for_each(|file| _ = std::fs::remove_file(file));
                let stopped = Stopped { signal };
                tell!("ringtap: {stopped}");
                old.iter().for_each(|file| {
                    tell!("ringtap: {} is not whole: make it again", file.display())
                });
                stopped.pass_on();
            })
            .context("cannot watch for signals")?;
        Ok(Unmade { signals })
    }
}

impl Drop for Unmade {
    fn drop(&mut self) {
        self.signals.close();
    }
}
