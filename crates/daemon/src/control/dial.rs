//! A client that listens itself, and is connected to: as by QEMU's chardevs with `server=off` and `reconnect`.

use std::path::Path;
use std::sync::mpsc::Sender;
use std::time::Duration;

use ringtap_export::Stop;
use ringtap_sandbox::ask;
use rustix::event::{PollFd, PollFlags};

use super::client::{Client, wait};
use super::outgoing::Events;
use crate::running::Event;
use crate::threads::contained;

/// How long to wait before the first time that it is tried again, and the longest pause.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// Connect, serve who is there, and connect again, until the server ends.
pub(super) fn dial(path: &Path, stop: &Stop, inbox: &Sender<Event>, events: &Events) {
    let shown = path.display();
    let (mut pause, mut told) = (PAUSES.0, false);
    loop {
        let client = ask::connect(path, false).and_then(|it| Client::new(it, inbox, events));
        match client {
            Ok(client) => {
                client.greet();
                tracing::info!("connected to the control client at {shown}");
                let out = client.out();
                contained(|| client.serve(stop));
                // One that takes connections and says nothing is not to keep a processor busy.
                if out.state().negotiated {
                    pause = PAUSES.0;
                }
                told = false;
            }
            Err(error) if !told => {
                tracing::warn!(
                    "cannot connect to the control client at {shown}: {error}; it is tried again, after {} s at most",
                    PAUSES.1.as_secs()
                );
                told = true;
            }
            Err(_) => {}
        }
        let waited = wait(&mut [PollFd::new(stop, PollFlags::IN)], Some(pause));
        if !waited || stop.is_raised() {
            return;
        }
        pause = (pause * 2).min(PAUSES.1);
    }
}
