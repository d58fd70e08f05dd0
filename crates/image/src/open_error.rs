//! What can go wrong at opening, in a sentence.

use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Path, PathBuf};

use crate::{Format, NameError, Role, luks};

/// Why an image could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// A system call failed on the image's file.
    #[error("cannot {what} {}: {source}{}", path.display(), hint(source))]
    Os {
        /// What was tried.
        what: &'static str,
        /// On which file.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// A store could not be opened.
    #[error(transparent)]
    Store(#[from] ringtap_stores::OpenError),
    /// Neither a regular file nor a block device.
    #[error("{} is a {found}, and an image is a regular file or a block device", path.display())]
    Kind {
        /// The file.
        path: PathBuf,
        /// What it is.
        found: &'static str,
    },
    /// Another program uses the image.
    #[error("cannot open {} {wanted}: {holder} {held}; {advice}", path.display())]
    Locked {
        /// The image.
        path: PathBuf,
        /// What it was to be opened for.
        wanted: &'static str,
        /// What the other does with it.
        held: &'static str,
        /// Who, as far as /proc tells.
        holder: String,
        /// What to do.
        advice: &'static str,
    },
    /// The format has to be named.
    #[error(
        "the format of {} is not named: add -f raw, or what it is \
         (a guest can write any header into a raw disk, so it is never guessed; \
         images that Ringtap made are known where their file system keeps extended attributes)",
        path.display()
    )]
    NoFormat {
        /// The image.
        path: PathBuf,
    },
    /// It is known to be of another format than it was to be written to as.
    #[error("{}", other_format(path, *asked, found, *recorded))]
    OtherFormat {
        /// The image.
        path: PathBuf,
        /// As what it was to be written to.
        asked: Format,
        /// What it is.
        found: &'static str,
        /// Whether that was written down, or only its signature says so.
        recorded: bool,
    },
    /// The image's disk goes on in another.
    #[error(
        "the disk of {} goes on in {} since a snapshot, a commit or a mirror of it, {why}: use that (ringtap serve finds \
         it by itself while both are as they were), or, to go on from this one and give up what was written since: \
         ringtap amend --forget-successor {}",
        path.display(),
        successor.display(),
        path.display()
    )]
    Succeeded {
        /// The image.
        path: PathBuf,
        /// The other.
        successor: PathBuf,
        /// What stands in the way.
        why: &'static str,
    },
    /// The image has no such snapshot.
    #[error("{} has no snapshot {which}: snapshot -l lists those it has", path.display())]
    NoSnapshot {
        /// The image.
        path: PathBuf,
        /// What was asked for.
        which: String,
    },
    /// Something that was writing the image's content did not come to its end.
    #[error(
        "{} is not whole: ringtap {verb} writes to it, or stopped before its end; do that again, \
         or take what is there with: setfattr -x user.ringtap.unfinished FILE",
        path.display()
    )]
    Unfinished {
        /// The image.
        path: PathBuf,
        /// The verb that was at work.
        verb: String,
    },
    /// What a killed server left for the image cannot be read, and may be what its guest was told is
    /// written.
    #[error(
        "cannot open {}: a killed process that had it may have left changes in {}, which cannot be read: \
         {source}; let whom that file belongs to open the image, or, where what was not flushed may \
         be lost, remove that file",
        path.display(),
        log.display()
    )]
    RestartLog {
        /// The image.
        path: PathBuf,
        /// The restart log.
        log: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// It cannot be told whether what a killed server left belongs to the image as it is.
    #[error(
        "cannot open {}: a killed process left {told} not yet written to it, and whether it still is the \
         image that this was noted for cannot be told: {why}; --restart-log use takes that up, \
         --restart-log drop leaves the image as it is (ringtap check does either, too)",
        path.display()
    )]
    RestartLogInDoubt {
        /// The image.
        path: PathBuf,
        /// How many changes.
        told: String,
        /// Why not.
        why: String,
    },
    /// It is a copy of an image that is gone from where it was, and whose server has what is not written to it yet.
    #[error(
        "cannot open {}: it is a copy of an image that is gone from where it was, and whose server still runs: what that has not \
         written to the image yet is in {}, and not in the copy; end that server first, or serve the copy as it is by \
         --restart-log drop, which takes nothing from that server",
        path.display(),
        log.display()
    )]
    RestartLogHeld {
        /// The copy.
        path: PathBuf,
        /// The log of the image that it is a copy of.
        log: PathBuf,
    },
    /// The changes that a killed server left are to be taken up by an image that they do not belong to.
    #[error(
        "cannot open {}: what a killed process left is not of the image as it is: {why}. --restart-log use decides \
         only where that cannot be told: without it the image is served as it is, and what was left is dropped",
        path.display()
    )]
    RestartLogOfAnother {
        /// The image.
        path: PathBuf,
        /// Why not.
        why: String,
    },
    /// The changes that a killed server left are not to be found.
    #[error(
        "cannot open {}: a process that had it, or the image that it is a copy of, was killed since the machine was started, and the \
         restart log is not in {}, or is there of a file system that had another device number: what its guest had not flushed would \
         be lost; open it as the user who served it, with the same /run or --state-dir, mounted from the same device, or give it up with --restart-log drop (ringtap check does that, too)",
        path.display(),
        folder.display()
    )]
    RestartLogMissing {
        /// The image.
        path: PathBuf,
        /// Where logs are looked for.
        folder: PathBuf,
    },
    /// A server of the image needs a restart log, and there cannot be one.
    #[error(
        "cannot open {} to serve it: there is no room in {} for its restart log, or none may be made there: {source}; \
         without it a killed server loses what its guest has not flushed; make room, name another folder on tmpfs with \
         --state-dir, have each write stable before it is acknowledged with --cache writethrough, or do without the log \
         with --restart-log optional",
        path.display(),
        folder.display()
    )]
    NoRestartLog {
        /// The image.
        path: PathBuf,
        /// Where logs are kept.
        folder: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The header of a qcow2 image is wrong, or says what is not supported.
    #[error("cannot open {} as qcow2: {source}", path.display())]
    Qcow2 {
        /// The image.
        path: PathBuf,
        /// What is wrong with it.
        source: crate::qcow2::HeaderError,
    },
    /// The image cannot be used so.
    #[error("cannot open {}: {why}", path.display())]
    Refused {
        /// The image.
        path: PathBuf,
        /// Why not, and what to do.
        why: &'static str,
    },
    /// The image's bitmaps cannot be kept or shown.
    #[error("cannot use the bitmaps of {source}")]
    Bitmaps {
        /// On which image, and why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A file that an image names cannot be used.
    #[error("{} names the file {name:?}: {why}", image.display())]
    Backing {
        /// The image.
        image: PathBuf,
        /// The name in it.
        name: OsString,
        /// Why not, and what to do.
        why: &'static str,
    },
    /// A file that an image names is not there.
    #[error("{}", missing(image, *what, name, path))]
    Missing {
        /// The image.
        image: PathBuf,
        /// What the file is to it.
        what: Role,
        /// The name in it.
        name: OsString,
        /// Where that leads.
        path: PathBuf,
    },
    /// An image names a file that it may not have.
    #[error("{source}")]
    Name {
        /// Which, why not, and what to do.
        source: Box<NameError>,
    },
    /// The image's structures cannot be used.
    #[error(
        "cannot use {} as {format}: at byte {offset}: {found}; {advice}",
        path.display()
    )]
    Malformed {
        /// As what.
        format: &'static str,
        /// The image.
        path: PathBuf,
        /// Where in its file.
        offset: u64,
        /// What is there.
        found: String,
        /// What to do.
        advice: &'static str,
    },
    /// The encrypted container cannot be opened.
    #[error("cannot open {} as LUKS: {source}", path.display())]
    Luks {
        /// The container.
        path: PathBuf,
        /// Why.
        source: luks::Error,
    },
    /// The text after `null:` is not a size.
    #[error("null:{text} does not name a size: write null:10G")]
    NullSize {
        /// The text found.
        text: String,
    },
}

fn other_format(path: &Path, asked: Format, found: &str, recorded: bool) -> String {
    let file = path.display();
    let (how, instead) = match recorded {
        true => ("is recorded as", "; leave -f out, or, if the record is wrong: "),
        false => ("bears the signature of", "; name that with -f, or, if a guest made it: "),
    };
    format!(
        "{file} {how} {found}, and writing to it as {asked} would destroy it{instead}\
         ringtap amend --record-format {asked} {file} (once, --force-format does it too)"
    )
}

fn missing(image: &Path, what: Role, name: &OsStr, path: &Path) -> String {
    let (image, path) = (image.display(), path.display());
    match what {
        Role::DataFile => format!(
            "the external data file {name:?} of {image} is not there: {path} does not exist, and \
             with it all that the disk holds; put it back, or name where it is with --data-file FILE"
        ),
        Role::Backing => format!(
            "the backing file {name:?} of {image} is not there: {path} does not exist; put it back, or, \
             if it has moved, name it anew: ringtap rebase -u -b FILE -F FORMAT {image}"
        ),
        Role::Parent | Role::Extent => format!(
            "the {what} {name:?} of {image} is not there: {path} does not exist; put it beside the \
             image, or name where it is with --backing FILE"
        ),
    }
}

fn hint(source: &io::Error) -> &'static str {
    match source.raw_os_error() {
        Some(libc::ENOENT) => {
            "; create it first, for example with: ringtap create -f FORMAT FILE 10G"
        }
        Some(libc::EACCES | libc::EPERM) => {
            "; run as a user who may (ringtap serve takes --read-only)"
        }
        Some(libc::EROFS) => "; nothing can be written there (ringtap serve takes --read-only)",
        Some(libc::EINVAL) => "; this file system may not do O_DIRECT: try --cache writeback",
        _ => "",
    }
}
