//! What of a file may be changed by who cannot open it, or only for reading.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Error};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::told::{Custom, Tell, code};

/// Each leaves the file as it is, but for an attribute.
#[allow(clippy::undocumented_unsafe_blocks)] // each gives the kernel numbers, a path that ends, and bytes
pub fn attack(other: &Path, tell: Tell<'_>) {
    let path = CString::new(other.as_os_str().as_bytes()).expect("a path");
    let (name, here) = (path.as_ptr(), libc::AT_FDCWD);
    let mode = unsafe { libc::fchmodat(here, name, 0o600, 0) };
    tell("change the mode of another's image", code(mode.into()));
    let (user, group) = unsafe { (libc::geteuid(), libc::getegid()) };
    let given = unsafe { libc::fchownat(here, name, user, group, 0) };
    tell("give another's image away", code(given.into()));
    let times = unsafe { libc::utimensat(here, name, std::ptr::null(), 0) };
    tell("change the times of another's image", code(times.into()));
    let key = c"user.ringtap.test".as_ptr();
    let set = unsafe { libc::setxattr(name, key, c"qcow2".as_ptr().cast(), 5, 0) };
    tell("write something down of another's image", code(set.into()));
    let removed = unsafe { libc::removexattr(name, key) };
    tell("have it forgotten", code(removed.into()));
    // Neither for reading nor for writing (3): landlock asks for no right then.
    let neither = libc::O_ACCMODE | libc::O_CLOEXEC;
    let open = |file: i32| match file {
        -1 => Err(Error::last_os_error()),
        file => {
            unsafe { libc::close(file) };
            Ok(())
        }
    };
    tell("open it for neither", open(unsafe { libc::openat(here, name, neither) }));
    let how: [u64; 3] = [neither as u64, 0, 0];
    let number = libc::SYS_openat2;
    let opened = unsafe { libc::syscall(number, here, name, how.as_ptr(), size_of_val(&how)) };
    tell("open it so by another call", open(opened as i32));
    tell("open it so by its handle", by_handle(&path, neither).and_then(open));
    // Of files that may be read the kernel does not ask how they are open, but whose they are.
    let read = File::options().read(true).custom(libc::O_CLOEXEC).open("/sys").expect("a folder");
    let held = read.as_raw_fd();
    let mode = unsafe { libc::fchmod(held, 0o555) };
    tell("change the mode of what it may read", code(mode.into()));
    let set = unsafe { libc::fsetxattr(held, key, c"".as_ptr().cast(), 0, 0) };
    let set = match code(set.into()) {
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(()),
        other => other,
    };
    tell("write something down of what it may read", set);
}

#[repr(C)]
struct Handle {
    bytes: u32,
    kind: i32,
    handle: [u8; 128],
}

#[allow(clippy::undocumented_unsafe_blocks)]
fn by_handle(path: &CString, flags: i32) -> io::Result<i32> {
    let mut handle = Handle { bytes: 128, kind: 0, handle: [0; 128] };
    let (at, mut mount) = ((&raw mut handle).cast(), 0);
    let named =
        unsafe { libc::name_to_handle_at(libc::AT_FDCWD, path.as_ptr(), at, &mut mount, 0) };
    code(named.into())?;
    // Beside any file that it has open there.
    let open = |beside| unsafe { libc::open_by_handle_at(beside, at, flags) };
    let opened = (0..256).map(open).find(|file| *file >= 0).unwrap_or(-1);
    code(opened.into())?;
    Ok(opened)
}
