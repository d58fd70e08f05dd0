//! What is said of a failure, and with which status it ends.

use std::io;
use std::process::ExitCode;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::log;
use crate::verbs::stop::Stopped;

/// The command line makes no sense, which only the verb could find.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Usage(pub(crate) String);

/// The command failed: say why, with its causes, on one line.
pub(crate) fn failed(error: &anyhow::Error) -> ExitCode {
    let closed = |cause: &(dyn std::error::Error + 'static)| {
        cause.downcast_ref::<io::Error>().is_some_and(|it| it.kind() == io::ErrorKind::BrokenPipe)
    };
    // A reader that has enough (`| head`) is no failure; a server that went away is.
    if error.chain().any(closed) && is_unread() {
        return ExitCode::SUCCESS;
    }
    log::say_failure(&chain(error));
    if let Some(stopped) = error.chain().find_map(|cause| cause.downcast_ref::<Stopped>()) {
        stopped.pass_on();
        return ExitCode::from(stopped.status());
    }
    let tools = error.chain().find_map(|cause| cause.downcast_ref::<ringtap_image_tools::Error>());
    if tools.is_some_and(ringtap_image_tools::Error::is_usage) {
        return ExitCode::from(2);
    }
    let usage = error.chain().filter_map(|cause| cause.downcast_ref::<ringtap_daemon::Error>());
    for cause in usage {
        use ringtap_daemon::Error::{Open, Usage};
        use ringtap_image::OpenError::{NoFormat, NullSize};
        if matches!(cause, Usage(_) | Open(NoFormat { .. } | NullSize { .. })) {
            return ExitCode::from(2);
        }
    }
    if error
        .downcast_ref::<ringtap_image::OpenError>()
        .is_some_and(|cause| matches!(cause, ringtap_image::OpenError::NullSize { .. }))
    {
        return ExitCode::from(2);
    }
    ExitCode::FAILURE
}

/// Whether nobody reads any more what is printed.
fn is_unread() -> bool {
    let stdout = io::stdout();
    let mut fds = [PollFd::new(&stdout, PollFlags::OUT)];
    let asked = poll(&mut fds, Some(&Timespec::default()));
    asked.is_ok() && fds[0].revents().intersects(PollFlags::ERR | PollFlags::HUP)
}

/// The message and its causes; a cause that the message quotes already is not said twice.
fn chain(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text.push_str(": ");
            text.push_str(&cause);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::anyhow;

    #[test]
    fn causes_are_told_once() {
        let error = anyhow!("disk on fire").context("cannot read: disk on fire").context("stopped");
        assert_eq!(chain(&error), "stopped: cannot read: disk on fire");
    }
}
