//! `__ringtap_upgrade`: the server is followed by another process.

use std::time::Duration;

use super::command::Command;
use super::outgoing::Reply;
use super::refusal::Refusal;
use super::shape::{answer, arguments};
use crate::Error;
use crate::handover::{self, Wish};
use crate::running::Running;

/// Nobody waits for a program to prepare for longer.
const LONGEST: Duration = Duration::from_secs(24 * 3600);

arguments! {
    /// `__ringtap_upgrade`
    struct Upgrade {
        /// The program; else the one at the path that this one was started from.
        "binary" binary: Option<String>,
        /// Seconds that it may take to prepare.
        "timeout" timeout: Option<u64>,
        /// The process that asks for that program and says so in its words, of a server that is confined.
        "asked-by" asked_by: Option<u32>,
        /// Whether NBD clients that speak TLS are closed, to connect again; else it is refused while there are any.
        "close-tls" close_tls: Option<bool>,
    }
}

answer! {
    /// The process that serves from now on.
    struct Upgraded { "pid" pid: u64 }
}

impl Command for Upgrade {
    const NAME: &'static str = "__ringtap_upgrade";
    type Answer = Upgraded;

    fn run(self, running: &mut Running, reply: Reply<Upgraded>) {
        let patience = self.timeout.map(Duration::from_secs);
        if let Some(timeout) = patience.filter(|timeout| *timeout > LONGEST) {
            let (asked, most) = (timeout.as_secs(), LONGEST.as_secs());
            let why = format!("'timeout' is {asked} seconds, and at most {most}: a day");
            return reply.give(Err(Refusal::new(why)));
        }
        let wish = Wish {
            binary: self.binary.map(Into::into),
            asker: self.asked_by,
            patience,
            closes_tls: self.close_tls.unwrap_or(false),
        };
        let told = move |running: &mut Running, end: Result<u32, Error>| {
            running.handed_over = end.as_ref().ok().copied();
            reply.give(end.map(|pid| Upgraded { pid: pid.into() }).map_err(Refusal::from));
        };
        handover::begin(running, wish, Box::new(told));
    }
}
