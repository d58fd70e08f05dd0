//! Rings that another process makes: disabled, and restricted to what is done here.
//!
//! A sandboxed server makes none itself, for no filter of system calls sees what a ring does. Its io_uring_setup is
//! answered with a ring of [`restricted`], which it enables and which says nothing of its layout: that is as in a ring
//! that was made before in the same way.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Once, OnceLock};

use io_uring::register::Restriction;
use io_uring::{IoUring, Parameters, opcode};

use super::{Ring, SUBMISSIONS};

/// How rings are laid out, once they are another's to make, and whether completions wait in the kernel.
static GIVEN: OnceLock<(Parameters, bool)> = OnceLock::new();
/// Told once that nobody makes any more.
static LOST: OnceLock<fn()> = OnceLock::new();

/// Codes of io_uring_register. Source: linux/io_uring.h.
const REGISTERED: [u8; 7] = [
    3,  // IORING_UNREGISTER_FILES
    6,  // IORING_REGISTER_FILES_UPDATE
    8,  // IORING_REGISTER_PROBE
    13, // IORING_REGISTER_FILES2
    14, // IORING_REGISTER_FILES_UPDATE2
    15, // IORING_REGISTER_BUFFERS2
    16, // IORING_REGISTER_BUFFERS_UPDATE
];

/// All that a ring is told to do. Nothing of it opens a file, makes a socket or connects one.
const SUBMITTED: [u8; 18] = [
    opcode::Nop::CODE,
    opcode::Read::CODE,
    opcode::Write::CODE,
    opcode::Readv::CODE,
    opcode::Writev::CODE,
    opcode::ReadFixed::CODE,
    opcode::WriteFixed::CODE,
    opcode::Fsync::CODE,
    opcode::Fallocate::CODE,
    opcode::Timeout::CODE,
    opcode::AsyncCancel::CODE,
    opcode::PollAdd::CODE,
    opcode::PollRemove::CODE,
    opcode::Recv::CODE,
    opcode::RecvMsg::CODE,
    opcode::Send::CODE,
    opcode::SendMsg::CODE,
    opcode::Splice::CODE,
];

/// A ring as [`Ring::new`] makes them, that does nothing before it is enabled, and nothing but this then; `commands`: and
/// commands of drivers, to descriptors that are open.
pub fn restricted(commands: bool) -> io::Result<OwnedFd> {
    let (ring, _) = Ring::newest(true)?;
    let registered = REGISTERED.into_iter().map(Restriction::register_op);
    let commands = commands.then_some(opcode::UringCmd16::CODE);
    let submitted = SUBMITTED.into_iter().chain(commands).map(Restriction::sqe_op);
    // Any file, and a worker of the kernel's for what would wait.
    let flags = std::iter::once(Restriction::sqe_flags_allowed(0b01_0001));
    let mut all: Vec<_> = registered.chain(submitted).chain(flags).collect();
    ring.submitter().register_restrictions(&mut all)?;
    // SAFETY: the ring has it open, and the copy is ours.
    unsafe { std::os::fd::BorrowedFd::borrow_raw(ring.as_raw_fd()) }.try_clone_to_owned()
}

/// Find out how rings are laid out, while this process may still make one; what it gives is called once it may not. `lost`
/// is called should the other process be gone then.
pub fn rings_to_be_given(lost: fn()) -> io::Result<impl FnOnce()> {
    let (ring, deferred) = Ring::newest(false)?;
    let known = (ring.params().clone(), deferred);
    Ok(move || {
        let _first = (GIVEN.set(known), LOST.set(lost));
    })
}

impl Ring {
    /// Make room for `count` buffers that a driver registers (Linux 6.15). Before the first turn.
    pub fn register_buffers(&self, count: u16) -> io::Result<()> {
        self.ring.submitter().register_buffers_sparse(count.into())
    }

    /// A ring that another process has made for us; nothing where they are ours to make.
    pub(super) fn given() -> Option<io::Result<(IoUring, bool)>> {
        let (params, deferred) = GIVEN.get()?;
        Some(take(params).map(|ring| (ring, *deferred)))
    }

    /// Whether rings are another process's to make, and that is gone: the kernel says then that it has none.
    pub(crate) fn givers_are_gone(error: &io::Error) -> bool {
        let gone = GIVEN.get().is_some() && error.raw_os_error() == Some(libc::ENOSYS);
        if let Some(lost) = LOST.get().filter(|_| gone) {
            static TOLD: Once = Once::new();
            TOLD.call_once(lost);
        }
        gone
    }
}

fn take(params: &Parameters) -> io::Result<IoUring> {
    // The other process looks at nothing that is said here, and writes nothing there.
    let mut unused = [0u32; 30];
    let number = loop {
        // SAFETY: the second argument is as large as the structure that a kernel without a filter would fill.
        let number =
            unsafe { libc::syscall(libc::SYS_io_uring_setup, SUBMISSIONS, unused.as_mut_ptr()) };
        match number {
            -1 => match io::Error::last_os_error() {
                error if error.raw_os_error() == Some(libc::EINTR) => {}
                error => return Err(error),
            },
            number => break number as i32,
        }
    };
    // SAFETY: the call made this descriptor for us.
    let ring = unsafe { OwnedFd::from_raw_fd(number) };
    // SAFETY: a ring that was made with the same parameters by the same kernel is laid out alike.
    let ring =
        unsafe { IoUring::from_fd(std::os::fd::IntoRawFd::into_raw_fd(ring), params.clone()) }?;
    ring.submitter().register_enable_rings()?;
    Ok(ring)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restricted_ring_does_what_is_listed_and_nothing_else() {
        let params = Ring::newest(false).expect("io_uring").0.params().clone();
        let file = restricted(false).expect("a ring");
        // SAFETY: as in `take`.
        let mut ring =
            unsafe { IoUring::from_fd(std::os::fd::IntoRawFd::into_raw_fd(file), params) }
                .expect("mapped");
        ring.submitter().register_enable_rings().expect("enabled");
        ring.submitter().register_files_sparse(4).expect("a table of files");
        let mut does = |entry: io_uring::squeue::Entry| {
            // SAFETY: what the entries name is static.
            unsafe { ring.submission().push(&entry) }.expect("room");
            ring.submit_and_wait(1).expect("told");
            ring.completion().next().expect("an answer").result()
        };
        assert_eq!(does(opcode::Nop::new().build()), 0);
        assert_eq!(
            does(opcode::Socket::new(libc::AF_UNIX, libc::SOCK_STREAM, 0).build()),
            -libc::EACCES
        );
        let open = opcode::OpenAt::new(io_uring::types::Fd(libc::AT_FDCWD), c"/dev/null".as_ptr());
        assert_eq!(does(open.build()), -libc::EACCES);
        let again = ring.submitter().register_eventfd(0).expect_err("not listed");
        assert_eq!(again.raw_os_error(), Some(libc::EACCES));
    }
}
