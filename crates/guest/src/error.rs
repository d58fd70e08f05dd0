//! What can go wrong between a program on this machine and a command inside a guest.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The result of everything in this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a guest could not be built, booted or used; each message ends with what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A program or file of the host is not there.
    #[error("{what} is not on this machine (looked in {looked}): {remedy}")]
    Missing {
        /// What was wanted.
        what: String,
        /// Where it was looked for.
        looked: String,
        /// Which package brings it.
        remedy: String,
    },
    /// A file or socket of the host could not be read, written or made.
    #[error("cannot {what} {}: {source}", path.display())]
    Io {
        /// The verb.
        what: &'static str,
        /// The object.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// A file is not what it should be.
    #[error("{} is {found}: {remedy}", path.display())]
    Unusable {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        found: String,
        /// What to do.
        remedy: String,
    },
    /// A program of the host failed or took too long.
    #[error("`{command}` {outcome}: {stderr}")]
    Tool {
        /// The command line.
        command: String,
        /// The exit status or the time it was given.
        outcome: String,
        /// What it printed on stderr, the end of it.
        stderr: String,
    },
    /// The guest could not be moved.
    #[error("the guest was not migrated: {why}")]
    Migration {
        /// What stood in the way.
        why: String,
    },
    /// The guest did not come up.
    #[error("{machine} did not boot: {why}. {remedy}\n{console}")]
    Boot {
        /// Which kind of guest, and its command line's first word.
        machine: String,
        /// What was waited for.
        why: String,
        /// What to do.
        remedy: String,
        /// The last lines of the console.
        console: String,
    },
    /// The guest ended while it was needed.
    #[error("the guest ended during `{command}`; its console's last lines:\n{console}")]
    Ended {
        /// The first line of the command that ran.
        command: String,
        /// The last lines of the console.
        console: String,
    },
    /// A command took longer than it was given; it has been killed, the guest goes on.
    #[error(
        "`{command}` did not end within {} s in the guest; its console's last lines:\n{console}",
        given.as_secs_f32()
    )]
    Timeout {
        /// The first line of the command.
        command: String,
        /// How long it had.
        given: Duration,
        /// The last lines of the console.
        console: String,
    },
    /// A command ended with a status other than 0 where success was asked for.
    #[error("`{command}` ended with status {status} in the guest: {stderr}\n{stdout}")]
    Failed {
        /// The first line of the command.
        command: String,
        /// Its exit status; 128 + N after signal N.
        status: i32,
        /// The end of its stdout.
        stdout: String,
        /// The end of its stderr.
        stderr: String,
    },
    /// The flag of `interrupt` was set while a guest was waited for.
    #[error("{0} was interrupted")]
    Interrupted(String),
    /// A program in the guest printed what could not be understood.
    #[error("{program} in the guest printed {found}: {output}")]
    Output {
        /// The program.
        program: &'static str,
        /// What is wrong.
        found: String,
        /// The beginning of what it printed.
        output: String,
    },
}

/// Turns an `io::Error` into [`Error::Io`] with its verb and path.
pub(crate) fn io(what: &'static str, path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> Error {
    let path = path.as_ref().to_path_buf();
    move |source| Error::Io { what, path, source }
}

/// The first line of a script, for messages.
pub(crate) fn first_line(script: &str) -> String {
    let line = script.lines().map(str::trim).find(|l| !l.is_empty()).unwrap_or("");
    let mut short: String = line.chars().take(100).collect();
    if short.len() < line.len() {
        short.push('…');
    }
    short
}

/// The last `lines` lines of a text.
pub(crate) fn tail(text: &str, lines: usize) -> String {
    let all = lines_of(text);
    all[all.len().saturating_sub(lines)..].join("\n")
}

/// The last lines of a console, or what its kernel began to say when it died.
pub(crate) fn last_words(console: &str) -> String {
    const LINES: usize = 25;
    let all = lines_of(console);
    let dying = |line: &&str| {
        // Behind the time, where there is one.
        let said = line.split_once("] ").map_or(*line, |(_, said)| said);
        ["Oops: ", "BUG: ", "kernel BUG at "].iter().any(|word| said.starts_with(word))
    };
    let panic = |line: &&str| line.contains("Kernel panic - not syncing");
    let end = all.iter().position(panic).map_or(all.len(), |at| at + 1);
    let begin = all[..end].iter().position(dying);
    let begin = begin.unwrap_or(end.saturating_sub(1)).min(all.len().saturating_sub(LINES));
    all[begin..].iter().take(2 * LINES).copied().collect::<Vec<_>>().join("\n")
}

fn lines_of(text: &str) -> Vec<&str> {
    text.lines().filter(|line| !line.trim().is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dying_kernel_is_heard_from_its_first_word() {
        let filler = |word: &str, count| format!("{word}\n\n").repeat(count);
        let quiet = filler("DEBUG: up", 60);
        assert_eq!(last_words(&quiet), tail(&quiet, 25));
        assert_eq!(last_words("up"), "up");
        let story =
            filler("up", 60) + "[6.6] Oops: int3: 0000\nRIP: e030:here\n" + &filler("trace", 90);
        let said = last_words(&(story + "Kernel panic - not syncing: Fatal\n"));
        assert!(said.starts_with("[6.6] Oops: int3"), "{said}");
        assert_eq!(said.lines().count(), 50);
        let said =
            last_words(&("Kernel panic - not syncing: why\n".to_owned() + &filler("at", 30)));
        assert!(said.starts_with("Kernel panic - not syncing: why\nat"), "{said}");
    }
}
