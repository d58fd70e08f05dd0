//! What a caller and the program that stands by say to each other on a Unix socket of packets: the caller one message, its
//! words, each ended by a zero, with [`FILES`] open files (stdin, stdout, stderr and its directory); the other an exit
//! status of four bytes.

use core::ffi::{c_char, c_int, c_void};
use core::mem::size_of;
use core::ptr;

pub const SOCK_SEQPACKET: c_int = 5;
const AF_UNIX: u16 = 1;
const SOL_SOCKET: c_int = 1;
const SCM_RIGHTS: c_int = 1;
/// Files that come with a call.
pub const FILES: usize = 4;
/// Bytes of a call, at most.
pub const LONGEST: usize = 16 << 10;
/// Words of a call, at most.
pub const MOST: usize = 128;
/// What a shell says of a program that cannot be run.
pub const CANNOT: c_int = 126;

#[link(name = "c")]
unsafe extern "C" {
    pub fn close(fd: c_int) -> c_int;
    pub fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int;
    pub fn read(fd: c_int, to: *mut u8, len: usize) -> isize;
    fn sendmsg(socket: c_int, message: *const Message, flags: c_int) -> isize;
    fn recvmsg(socket: c_int, message: *mut Message, flags: c_int) -> isize;
}

/// `struct msghdr`.
#[repr(C)]
struct Message {
    name: *mut c_void,
    name_len: u32,
    pieces: *mut Piece,
    count: usize,
    control: *mut Control,
    control_len: usize,
    flags: c_int,
}

/// `struct iovec`.
#[repr(C)]
struct Piece {
    base: *mut u8,
    len: usize,
}

/// `struct cmsghdr` and what it is the head of.
#[repr(C)]
struct Control {
    len: usize,
    level: c_int,
    kind: c_int,
    files: [c_int; FILES],
}

/// `struct sockaddr_un`.
#[repr(C)]
pub struct Address {
    family: u16,
    path: [c_char; 108],
}

impl Address {
    pub const LEN: u32 = size_of::<Self>() as u32;

    /// Of the socket at a path, which is made of these pieces; None where it is too long.
    pub fn new(pieces: &[&[u8]]) -> Option<Self> {
        let mut address = Self { family: AF_UNIX, path: [0; 108] };
        let len = address.path.len() - 1;
        let mut places = address.path[..len].iter_mut();
        for byte in pieces.iter().copied().flatten() {
            *places.next()? = *byte as c_char;
        }
        Some(address)
    }

    /// The path as a C string.
    pub fn path(&self) -> *const c_char {
        self.path.as_ptr()
    }
}

/// A new socket.
///
/// # Safety
/// As for any system call that makes a file.
pub unsafe fn packets() -> c_int {
    // SAFETY: no pointers.
    unsafe { socket(c_int::from(AF_UNIX), SOCK_SEQPACKET, 0) }
}

/// Sends a call; whether it went.
///
/// # Safety
/// The files are the caller's.
pub unsafe fn send(socket: c_int, words: &mut [u8], files: [c_int; FILES]) -> bool {
    let mut control =
        Control { len: size_of::<Control>(), level: SOL_SOCKET, kind: SCM_RIGHTS, files };
    let mut piece = Piece { base: words.as_mut_ptr(), len: words.len() };
    let message = envelope(&mut piece, &mut control);
    // SAFETY: the message's parts are of this frame and of the lengths it says.
    unsafe { sendmsg(socket, &raw const message, 0) == words.len() as isize }
}

/// Takes a call: its length and its files. None where there is none.
///
/// # Safety
/// As for any system call that makes files.
pub unsafe fn take(socket: c_int, words: &mut [u8]) -> Option<(usize, [c_int; FILES])> {
    let mut control = Control { len: 0, level: 0, kind: 0, files: [-1; FILES] };
    let mut piece = Piece { base: words.as_mut_ptr(), len: words.len() };
    let mut message = envelope(&mut piece, &mut control);
    // SAFETY: as above.
    let len = unsafe { recvmsg(socket, &raw mut message, 0) };
    let whole = control.len == size_of::<Control>() && control.kind == SCM_RIGHTS;
    (len > 0 && whole).then_some((len as usize, control.files))
}

fn envelope(piece: &mut Piece, control: &mut Control) -> Message {
    Message {
        name: ptr::null_mut(),
        name_len: 0,
        pieces: piece,
        count: 1,
        control,
        control_len: size_of::<Control>(),
        flags: 0,
    }
}
