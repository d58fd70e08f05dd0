//! What is said of a failure, and with which status it ends.

use std::io::{self, IsTerminal};
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue};

use crate::log;
use crate::verbs::stop::Stopped;

/// The command line was not understood, or only asked for help.
pub(crate) fn refused(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() {
        // A reader that has gone needs no help.
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    let shown = error.render();
    let text =
        if io::stderr().is_terminal() { shown.ansi().to_string() } else { shown.to_string() };
    eprint!("{}", text.replacen("error:", "ringtap:", 1));
    if let Some(hint) = error.get(ContextKind::InvalidArg).and_then(instead) {
        eprintln!("{hint}");
    }
    // To those who ask for a check, 2 says that the image is corrupt.
    let check = std::env::args().nth(1).is_some_and(|verb| verb == "check");
    ExitCode::from(if check { 1 } else { 2 })
}

/// What to write instead of an option that only QEMU's programs have.
fn instead(option: &ContextValue) -> Option<&'static str> {
    let ContextValue::String(option) = option else { return None };
    Some(match option.split(['=', ' ']).next()? {
        "--object" => {
            "  secrets are named with --secret and --target-secret: file:PATH, fd:N or credential:NAME"
        }
        "--image-opts" | "--target-image-opts" => {
            "  images are named by their path, with -f FORMAT (-O for a target); servers are not read from"
        }
        _ => return None,
    })
}

/// The command failed: say why, with its causes, on one line.
pub(crate) fn failed(error: &anyhow::Error) -> ExitCode {
    let closed = |cause: &(dyn std::error::Error + 'static)| {
        cause.downcast_ref::<io::Error>().is_some_and(|it| it.kind() == io::ErrorKind::BrokenPipe)
    };
    if error.chain().any(closed) {
        return ExitCode::SUCCESS;
    }
    log::say_failure(&chain(error));
    if let Some(stopped) = error.chain().find_map(|cause| cause.downcast_ref::<Stopped>()) {
        stopped.pass_on();
        return ExitCode::from(stopped.status());
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
