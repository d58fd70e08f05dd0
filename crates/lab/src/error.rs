//! What can go wrong while the lab runs programs, said so that a person can act on it.

use std::path::{Path, PathBuf};

/// An error of the lab. Every message names what was tried, on which file or program, and what was found.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The user (or a SIGTERM) asked the run to end.
    #[error("interrupted")]
    Interrupted,
    /// The plan asks for something that does not exist or makes no sense.
    #[error("{0}")]
    Plan(String),
    /// A file could not be read, written or made.
    #[error("cannot {tried} {}: {source}{}", path.display(), remedy(source))]
    File {
        /// What was tried, as a verb: "read", "create".
        tried: &'static str,
        /// On which file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file system of the disks or of the run's folder has no room left.
    #[error(
        "{} is full ({} KiB free), so the run ends here: {found}. What was measured until then is kept. Free some space there, \
         or give a smaller --size, or another --dir or --out",
        path.display(),
        free >> 10
    )]
    Full {
        /// The folder.
        path: PathBuf,
        /// Bytes that are free.
        free: u64,
        /// What failed because of it.
        found: String,
    },
    /// A program could not be started, failed, or did not end in time.
    #[error("{program} {what}{}", quote(said))]
    Program {
        /// The program's name.
        program: String,
        /// What it did: "exited with status 1", "did not open /x.sock within 10 s".
        what: String,
        /// The end of what it wrote to stderr.
        said: String,
    },
    /// A program's output is not what it is known to print.
    #[error("cannot read {what}: {found}")]
    Output {
        /// Which output: "fio's JSON", "bonnie++'s CSV line".
        what: &'static str,
        /// What was found instead.
        found: String,
    },
    /// The guest did not do what it was asked.
    #[error("guest: {0}")]
    Guest(String),
}

impl Error {
    /// For `map_err`: what was tried on `path`.
    pub fn file(tried: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Error + use<> {
        let path = path.to_owned();
        move |source| Error::File { tried, path, source }
    }
}

impl From<ringtap_guest::Error> for Error {
    fn from(error: ringtap_guest::Error) -> Error {
        match error {
            ringtap_guest::Error::Interrupted(_) => Error::Interrupted,
            other => Error::Guest(other.to_string()),
        }
    }
}

impl From<ringtap_guest::fio::Unreadable> for Error {
    fn from(why: ringtap_guest::fio::Unreadable) -> Error {
        Error::Output { what: "fio's JSON", found: why.to_string() }
    }
}

/// What to do about some of the system's answers.
fn remedy(source: &std::io::Error) -> &'static str {
    match source.kind() {
        std::io::ErrorKind::StorageFull => {
            "; free some space there, or name another --dir or --out"
        }
        std::io::ErrorKind::ReadOnlyFilesystem => "; name another --dir or --out",
        _ => "",
    }
}

fn quote(said: &str) -> String {
    let said = said.trim();
    if said.is_empty() {
        ", and said nothing on stderr".into()
    } else {
        format!("; stderr: {said}")
    }
}

/// Result with the lab's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;
