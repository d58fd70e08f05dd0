//! Ctrl-C: stop at the next step, so that everything started is also stopped.

use anyhow::{Result, bail};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

static ASKED: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// Takes over SIGINT and SIGTERM. A second one ends the program at once.
pub fn install() -> Result<()> {
    let asked = ASKED.get_or_init(Default::default);
    for signal in [libc::SIGINT, libc::SIGTERM] {
        signal_hook::flag::register_conditional_shutdown(signal, 130, Arc::clone(asked))?;
        signal_hook::flag::register(signal, Arc::clone(asked))?;
    }
    Ok(())
}

/// Fails once the user has asked to stop.
pub fn check() -> Result<()> {
    if ASKED.get().is_some_and(|asked| asked.load(Ordering::Relaxed)) {
        bail!("interrupted");
    }
    Ok(())
}

/// Sleeps, or fails when asked to stop meanwhile.
pub fn sleep(duration: Duration) -> Result<()> {
    let end = Instant::now() + duration;
    loop {
        check()?;
        match end.checked_duration_since(Instant::now()) {
            Some(left) if !left.is_zero() => {
                std::thread::sleep(left.min(Duration::from_millis(20)));
            }
            _ => return Ok(()),
        }
    }
}
