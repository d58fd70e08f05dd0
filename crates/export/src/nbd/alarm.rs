//! The one clock of a connection: it ends a handshake that takes too long, gives memory back when
//! the client rests, and carries the word to stop from the server's thread, and the word that there is
//! memory from the threads of other connections.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use ringtap_io::{File, OpenFile};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

/// A timer that the connection's task waits for as for any other operation.
pub(super) struct Alarm {
    timer: OpenFile,
    stop: AtomicBool,
    leave: AtomicBool,
    called: AtomicBool,
}

impl Alarm {
    pub(super) fn new() -> io::Result<Alarm> {
        let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC)?;
        let [stop, leave, called] = [false; 3].map(AtomicBool::new);
        Ok(Alarm { timer: OpenFile::new(timer), stop, leave, called })
    }

    pub(super) fn file(&self) -> File {
        self.timer.handle()
    }

    /// Ring once, so much later; what was set before is forgotten.
    pub(super) fn set(&self, after: Duration) {
        let nanos = after.as_nanos().max(1);
        let spec = Itimerspec {
            it_interval: Timespec { tv_sec: 0, tv_nsec: 0 },
            it_value: Timespec {
                tv_sec: (nanos / 1_000_000_000) as i64,
                tv_nsec: (nanos % 1_000_000_000) as i64,
            },
        };
        if let Err(error) = timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &spec) {
            tracing::error!("cannot set the timer of an NBD connection: {error}");
        }
    }

    /// As [`Alarm::set`], where the word to stop may come at the same time from another thread and
    /// must not be lost.
    pub(super) fn set_unless_stopped(&self, after: Duration) {
        self.set_unless_called(after);
        if self.is_stopped() || self.is_leaving() {
            self.ring();
        }
    }

    /// As [`Alarm::set`], where [`Alarm::call`] may come at the same time and must not be lost.
    pub(super) fn set_unless_called(&self, after: Duration) {
        self.set(after);
        if self.called.load(SeqCst) {
            self.ring();
        }
    }

    /// Let the connection look again whether there is memory; from any thread.
    pub(super) fn call(&self) {
        self.called.store(true, SeqCst);
        self.ring();
    }

    /// Whether it was called since the last time.
    pub(super) fn was_called(&self) -> bool {
        self.called.swap(false, SeqCst)
    }

    /// Ring now.
    pub(super) fn ring(&self) {
        self.set(Duration::ZERO);
    }

    /// Tell the connection to end; from any thread.
    pub(super) fn stop(&self) {
        self.stop.store(true, SeqCst);
        self.ring();
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stop.load(SeqCst)
    }

    /// Tell the connection to stand still, for another server is to have it; from any thread.
    pub(super) fn leave(&self) {
        self.leave.store(true, SeqCst);
        self.ring();
    }

    pub(super) fn is_leaving(&self) -> bool {
        self.leave.load(SeqCst)
    }
}
