//! Descriptors that this process was started with.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};

/// A duplicate of an open descriptor named by number, as a user names one on the command line. EBADF
/// where none is open.
pub fn duplicate_fd(fd: RawFd) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::from_raw_os_error(libc::EBADF));
    }
    // SAFETY: it is not -1, and is lent to one fcntl(F_DUPFD_CLOEXEC), which looks for itself whether
    // it is open; whoever owns it keeps it.
    unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    #[test]
    fn only_what_is_open_is_duplicated() {
        let file = std::fs::File::open("/dev/null").expect("a file");
        let copy = duplicate_fd(file.as_raw_fd()).expect("a copy");
        assert_ne!(copy.as_raw_fd(), file.as_raw_fd());
        for wrong in [-1, -100, 1 << 30] {
            let error = duplicate_fd(wrong).expect_err("nothing is open there");
            assert_eq!(error.raw_os_error(), Some(libc::EBADF));
        }
    }
}
