//! Signals, and what the service manager is told.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::Sender;

use sd_notify::NotifyState;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;
use signal_hook::low_level;

use crate::running::Event;
use crate::threads::spawn_vital;
use crate::{Error, handover};

/// Signals that ask to stop; SIGQUIT, to leave block devices of this host for the next server.
const STOPS: [i32; 3] = [SIGTERM, SIGINT, SIGQUIT];
/// What a second of them ends with: 128 + SIGINT, as shells count.
const AT_ONCE: i32 = 130;

/// Signals that are kept until somebody is told of them.
pub(crate) struct Signalled(Signals);

impl Signalled {
    /// From now on they are kept. The second that asks to stop ends the process at once.
    pub(crate) fn listen() -> Result<Signalled, Error> {
        let failed = |source| Error::Process { tried: "set up signals", source };
        let asked = Arc::new(AtomicBool::new(false));
        for signal in STOPS {
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
        let all = STOPS.into_iter().chain([SIGHUP, SIGUSR1, SIGUSR2]);
        Signals::new(all).map_err(failed).map(Signalled)
    }

    /// Have them come as events, those of the past first: by a thread.
    pub(crate) fn tell(self, events: Sender<Event>) -> Result<(), Error> {
        let Signalled(mut signals) = self;
        spawn_vital("signals", move || {
            for signal in signals.forever() {
                if STOPS.contains(&signal) {
                    handover::told_to_end();
                }
                if events.send(Event::Signal(signal)).is_err() {
                    return;
                }
            }
        })?;
        Ok(())
    }
}

/// Have the service manager take what the broker tells it, which is another process (systemd 254; before that the unit says so).
pub(crate) fn prepare_notify() {
    const FROM_ALL: NotifyState<'_> = NotifyState::Custom("NOTIFYACCESS=all");
    if ringtap_sandbox::is_there() {
        // What is wrong with it is told by who tells something.
        let _ = sd_notify::notify(&[FROM_ALL]);
    }
}

/// Tell the service manager.
pub(crate) fn notify(states: &[NotifyState]) {
    if std::env::var_os("NOTIFY_SOCKET").is_none() {
        return;
    }
    let lines: String = states.iter().map(|state| format!("{state}\n")).collect();
    let told = ringtap_sandbox::ask::notify(&lines);
    if let Err(error) = told.unwrap_or_else(|| sd_notify::notify(states)) {
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
