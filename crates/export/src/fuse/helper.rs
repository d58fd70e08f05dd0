//! Mounting without root: by `fusermount3`, which may, and hands over the descriptor.
//!
//! Source: libfuse, util/fusermount.c: the descriptor comes over the socket that _FUSE_COMMFD names.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::{FdFlags, fcntl_setfd, retry_on_intr};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use super::Error;

const PROGRAM: &str = "fusermount3";
/// It mounts and ends; should it not, waiting longer will not help.
const WITHIN: Duration = Duration::from_secs(20);

/// Mount over `path`; the device's descriptor.
pub(crate) fn mount(path: &Path, options: &str) -> Result<OwnedFd, Error> {
    let failed = |why: String| Error::Helper { path: path.to_owned(), why };
    let (ours, theirs) = UnixStream::pair().map_err(|error| failed(error.to_string()))?;
    ours.set_read_timeout(Some(WITHIN)).map_err(|error| failed(error.to_string()))?;
    let mut command = Command::new(PROGRAM);
    command.args(["-o", options, "--"]).arg(path);
    command.env("_FUSE_COMMFD", theirs.as_raw_fd().to_string());
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let socket = theirs.as_raw_fd();
    // SAFETY: between fork and exec only fcntl is called, on a descriptor that is open there.
    unsafe {
        command.pre_exec(move || {
            let socket = std::os::fd::BorrowedFd::borrow_raw(socket);
            Ok(fcntl_setfd(socket, FdFlags::empty())?)
        });
    }
    let child = command.spawn().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => failed(format!("{PROGRAM} is missing: install fuse3")),
        _ => failed(error.to_string()),
    })?;
    drop(theirs);
    let device = receive(&ours);
    let output = child.wait_with_output().map_err(|error| failed(error.to_string()))?;
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    match device {
        Ok(Some(device)) if output.status.success() => Ok(device),
        Err(error) if said.is_empty() => Err(failed(error.to_string())),
        _ => Err(failed(said)),
    }
}

fn receive(socket: &UnixStream) -> io::Result<Option<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let flags = RecvFlags::CMSG_CLOEXEC;
    // What a ring of this thread has ended interrupts a call that has an end to its time.
    retry_on_intr(|| recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut control, flags))?;
    let device = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut files) => files.next(),
        _ => None,
    });
    if let Some(device) = &device {
        fcntl_setfl(device, fcntl_getfl(device)? | OFlags::NONBLOCK)?;
    }
    Ok(device)
}

/// Unmount; with `lazily` although it is in use.
pub(crate) fn unmount(path: &Path, lazily: bool) -> io::Result<()> {
    let mut command = Command::new(PROGRAM);
    command.args(if lazily { &["-u", "-z", "--"][..] } else { &["-u", "--"][..] }).arg(path);
    let output = command.stdin(Stdio::null()).output()?;
    match output.status.success() {
        true => Ok(()),
        false => Err(io::Error::other(String::from_utf8_lossy(&output.stderr).trim().to_owned())),
    }
}
