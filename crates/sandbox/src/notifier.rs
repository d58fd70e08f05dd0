//! Rings for who may not make any: io_uring_setup of the server is carried out by the broker.
//!
//! What a ring does, no filter of system calls sees; so a ring must be restricted before its owner has it. A filter
//! has the kernel tell the broker of each io_uring_setup, which the broker answers with a ring of its own making.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// `_IOWR('!', 0, struct seccomp_notif)` and so on. Source: linux/seccomp.h.
const RECEIVE: libc::Ioctl = 0xc050_2100_u32 as libc::Ioctl;
const ANSWER: libc::Ioctl = 0xc018_2101_u32 as libc::Ioctl;
const ADD: libc::Ioctl = 0x4018_2103_u32 as libc::Ioctl;

/// `SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV`.
const WAITS_ON: libc::c_ulong = 1 << 5;

/// The broker's end.
pub(crate) struct Notifier(OwnedFd);

impl AsFd for Notifier {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Notifier {
    pub(crate) fn new(file: OwnedFd) -> Notifier {
        Notifier(file)
    }

    /// Answer one call. False where there will be no more.
    pub(crate) fn answer(&self, make: impl FnOnce() -> io::Result<OwnedFd>) -> bool {
        // SAFETY: all zeros is a valid value, and the one that the kernel asks for.
        let mut asked: libc::seccomp_notif = unsafe { std::mem::zeroed() };
        // SAFETY: the request takes a pointer to just that structure, which lives here.
        let heard = unsafe { libc::ioctl(self.0.as_raw_fd(), RECEIVE, &raw mut asked) };
        if heard != 0 {
            // ENOENT: who called was interrupted meanwhile. Whatever else is no notifier, or of nobody.
            return io::Error::last_os_error().raw_os_error() == Some(libc::ENOENT)
                && !self.is_over();
        }
        let made = match i64::from(asked.data.nr) == libc::SYS_io_uring_setup {
            true => make(),
            false => Err(io::Error::from_raw_os_error(libc::EPERM)),
        };
        let (val, error) = match made.and_then(|ring| self.give(asked.id, &ring)) {
            Ok(number) => (number, 0),
            Err(error) => (0, -error.raw_os_error().unwrap_or(libc::EIO)),
        };
        let said = libc::seccomp_notif_resp { id: asked.id, val, error, flags: 0 };
        // SAFETY: as above; where nobody waits for it any more nothing happens.
        unsafe { libc::ioctl(self.0.as_raw_fd(), ANSWER, &raw const said) };
        true
    }

    fn is_over(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let mut waited = [PollFd::new(self, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut waited, Some(&now)).is_err() || waited[0].revents().contains(PollFlags::HUP)
    }

    /// Put it among the caller's descriptors; its number there. To do that and answer in one step
    /// (`SECCOMP_ADDFD_FLAG_SEND`) has the call end with 0 now and then where the caller's ring has work for it (6.18).
    fn give(&self, id: u64, ring: &OwnedFd) -> io::Result<i64> {
        let add = libc::seccomp_notif_addfd {
            id,
            flags: 0,
            srcfd: ring.as_raw_fd() as u32,
            newfd: 0,
            newfd_flags: libc::O_CLOEXEC as u32,
        };
        // SAFETY: as in `answer`.
        match unsafe { libc::ioctl(self.0.as_raw_fd(), ADD, &raw const add) } {
            -1 => Err(io::Error::last_os_error()),
            number => Ok(number.into()),
        }
    }
}

/// From now on this process's io_uring_setup waits for who has what this gives. Before there is a second thread.
pub(crate) fn install() -> io::Result<OwnedFd> {
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const IS: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const END: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let line = |code, jt, k| libc::sock_filter { code, jt, jf: 0, k };
    // The architecture is the other filter's to look at.
    let mut program = [
        line(LOAD, 0, 0),
        line(IS, 1, libc::SYS_io_uring_setup as u32),
        line(END, 0, libc::SECCOMP_RET_ALLOW),
        line(END, 0, libc::SECCOMP_RET_USER_NOTIF),
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    let load = |flags: libc::c_ulong| {
        let set = libc::SECCOMP_SET_MODE_FILTER;
        // SAFETY: the program is copied during the call.
        unsafe { libc::syscall(libc::SYS_seccomp, set, flags, &raw const filter) }
    };
    // Between question and answer only a deadly signal ends the wait (Linux 5.19): no descriptor is left behind.
    let mut made = load(libc::SECCOMP_FILTER_FLAG_NEW_LISTENER | WAITS_ON);
    if made == -1 && io::Error::last_os_error().raw_os_error() == Some(libc::EINVAL) {
        made = load(libc::SECCOMP_FILTER_FLAG_NEW_LISTENER);
    }
    match made {
        -1 => Err(io::Error::last_os_error()),
        // SAFETY: the call made this descriptor for us.
        made => Ok(unsafe { OwnedFd::from_raw_fd(made as i32) }),
    }
}
