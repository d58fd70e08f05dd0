//! What a serving process waits for: signals, and servers that end by themselves.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::Sender;
use std::thread::{self, JoinHandle};

use ringtap_io::Panic;
use sd_notify::NotifyState;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;
use signal_hook::low_level;

use crate::Error;

/// Our threads wait and log; they need no more.
const STACK: usize = 256 << 10;
/// What a second SIGINT or SIGTERM ends with: 128 + SIGINT, as shells count.
const AT_ONCE: i32 = 130;

/// What a serving process waits for.
pub(crate) enum Event {
    Signal(i32),
    /// A server ended, of disks at these places of the configuration.
    Ended {
        server: String,
        disks: Vec<usize>,
        result: Result<(), Box<dyn std::error::Error + Send + Sync>>,
    },
    /// A panic has stopped a disk.
    Failed,
}

impl Event {
    pub(crate) fn failure(self) -> Option<Error> {
        match self {
            Event::Ended { server, result: Err(source), .. } => {
                Some(Error::Server { server, source })
            }
            _ => None,
        }
    }
}

/// Have signals come as events. The second that asks to stop ends the process at once.
pub(crate) fn listen_for_signals(events: Sender<Event>) -> Result<(), Error> {
    let failed = |source| Error::Process { tried: "set up signals", source };
    let asked = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT] {
        let asked = asked.clone();
        // The first sets the flag, the second finds it set, also where two threads take one each at
        // the same moment.
        let action = move || {
            if asked.swap(true, SeqCst) {
                low_level::exit(AT_ONCE);
            }
        };
        // SAFETY: an atomic swap and `_exit` are all it does: both may be done in a signal handler.
        unsafe { low_level::register(signal, action) }.map_err(failed)?;
    }
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP, SIGUSR1]).map_err(failed)?;
    spawn("signals", move || {
        for signal in signals.forever() {
            if events.send(Event::Signal(signal)).is_err() {
                return;
            }
        }
    })?;
    Ok(())
}

/// Start a thread.
pub(crate) fn spawn(
    name: &str,
    run: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>, Error> {
    thread::Builder::new()
        .name(name.to_owned())
        .stack_size(STACK)
        .spawn(|| {
            // What serves a disk has seen to its panics. Without this thread the process is of no use.
            if Panic::catch(run).is_err() {
                std::process::abort();
            }
        })
        .map_err(|source| Error::Process { tried: "start a thread", source })
}

/// Tell the service manager.
pub(crate) fn notify(states: &[NotifyState]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!("cannot tell the service manager: {error}");
    }
}

/// Tell the service manager that the images are looked at again.
pub(crate) fn notify_reloading() {
    match NotifyState::monotonic_usec_now() {
        Ok(now) => notify(&[NotifyState::Reloading, now]),
        Err(error) => tracing::warn!("cannot read the clock: {error}"),
    }
}
