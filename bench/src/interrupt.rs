//! Ctrl-C: stop at the next step, so that everything started is also stopped.

use anyhow::Result;
use ringtap_lab::stop::Stop;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

static ASKED: OnceLock<Stop> = OnceLock::new();

/// The wish that the program should end.
pub fn stop() -> &'static Stop {
    ASKED.get_or_init(Stop::default)
}

/// Takes over SIGINT and SIGTERM. A second one ends the program at once.
pub fn install() -> Result<()> {
    for signal in [libc::SIGINT, libc::SIGTERM] {
        signal_hook::flag::register_conditional_shutdown(signal, 130, stop().flag())?;
        signal_hook::flag::register(signal, stop().flag())?;
    }
    Ok(())
}

/// Fails once the user has asked to stop.
pub fn check() -> Result<()> {
    Ok(stop().check()?)
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
