//! A socket's bytes moved here and now, as far as that goes without waiting.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::Mem;

/// The most pieces of memory that one call is given.
const PIECES: usize = 128;
const NONE: libc::iovec = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };

/// Some of what is sent.
#[derive(Clone, Copy, Debug)]
pub enum Part<'a> {
    /// These bytes.
    Bytes(&'a [u8]),
    /// The memory of an operation in flight.
    Mem(Mem),
}

/// Send the parts one after the other, as much as goes at once; gives the bytes. [`io::ErrorKind::WouldBlock`] where the
/// socket takes none now.
pub fn send_now<'a>(
    socket: BorrowedFd<'_>,
    parts: impl IntoIterator<Item = Part<'a>>,
) -> io::Result<usize> {
    let mut pieces = [NONE; PIECES];
    let mut count = 0;
    for part in parts {
        if count == PIECES {
            break;
        }
        match part {
            Part::Bytes(bytes) => {
                let iov_base = bytes.as_ptr().cast_mut().cast();
                pieces[count] = libc::iovec { iov_base, iov_len: bytes.len() };
                count += 1;
            }
            Part::Mem(mem) => {
                let mut whole = true;
                mem.pieces(|(base, len)| match pieces.get_mut(count) {
                    Some(piece) => {
                        *piece = libc::iovec { iov_base: base.cast(), iov_len: len };
                        count += 1;
                    }
                    None => whole = false,
                });
                if !whole {
                    break;
                }
            }
        }
    }
    message(&mut pieces[..count], |message| {
        // SAFETY: the message names bytes that are lent to this call, or the memory of an operation in flight, which
        // is valid for reads (the promise of `Mem`).
        unsafe {
            libc::sendmsg(socket.as_raw_fd(), message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL)
        }
    })
}

/// Receive what there is into the memory of an operation in flight, and what is more than that into `more`; gives the
/// bytes, 0 at the stream's end. [`io::ErrorKind::WouldBlock`] where there is nothing yet.
pub fn receive_now(socket: BorrowedFd<'_>, mem: Mem, more: &mut [u8]) -> io::Result<usize> {
    let mut pieces = [NONE; PIECES];
    let (mut count, mut whole) = (0, true);
    mem.pieces(|(base, len)| match pieces.get_mut(count) {
        Some(piece) => {
            *piece = libc::iovec { iov_base: base.cast(), iov_len: len };
            count += 1;
        }
        None => whole = false,
    });
    if whole && count < PIECES && !more.is_empty() {
        let (iov_base, iov_len) = (more.as_mut_ptr().cast(), more.len());
        pieces[count] = libc::iovec { iov_base, iov_len };
        count += 1;
    }
    message(&mut pieces[..count], |message| {
        // SAFETY: as in `send_now`, for writes.
        unsafe { libc::recvmsg(socket.as_raw_fd(), message, libc::MSG_DONTWAIT) }
    })
}

fn message(
    pieces: &mut [libc::iovec],
    call: impl FnOnce(*mut libc::msghdr) -> isize,
) -> io::Result<usize> {
    // SAFETY: all zeros is a valid msghdr.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.as_mut_ptr();
    message.msg_iovlen = pieces.len();
    match call(&raw mut message) {
        -1 => Err(io::Error::last_os_error()),
        moved => Ok(moved as usize),
    }
}
