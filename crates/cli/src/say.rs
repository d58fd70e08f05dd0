//! Lines for the user. Who reads no more of them (`| head`), or has closed stderr, changes nothing of what a command does, nor of the
//! status that it ends with; what cannot be printed for another reason is its failure.

use std::fmt::Arguments;
use std::io::{self, ErrorKind, Write, stderr, stdout};
use std::sync::OnceLock;

/// Why something could not be printed, the first time.
static FAILED: OnceLock<io::Error> = OnceLock::new();

/// Print a line that was asked for, on stdout.
macro_rules! say {
    ($($text:tt)*) => { $crate::say::out(&format!("{}\n", format_args!($($text)*))) };
}

/// Print a line beside that, on stderr.
macro_rules! tell {
    ($($text:tt)*) => { $crate::say::beside(format_args!($($text)*)) };
}

/// Print what was asked for.
pub(crate) fn out(text: &str) {
    let mut to = stdout().lock();
    note(to.write_all(text.as_bytes()).and_then(|()| to.flush()));
}

/// Note how it went to print what was asked for.
pub(crate) fn note(end: io::Result<()>) {
    match end {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => _ = FAILED.set(error),
        _ => {}
    }
}

pub(crate) fn beside(text: Arguments<'_>) {
    // There is nowhere else to say it.
    let _ = stderr().write_all(format!("{text}\n").as_bytes());
}

/// What of stdout could not be written.
pub(crate) fn failure() -> Option<&'static io::Error> {
    FAILED.get()
}
