//! Keeps a program loaded and runs it by a fork for each call.
//!
//! Debian's fio brings some sixty shared libraries, and in User-Mode Linux loading them takes as long as a few short
//! measurements. Preloaded into a program, this library stands in for its `main`: it waits for calls at the socket
//! `$RINGTAP_STANDBY` (`message.rs`) and gives each to the program's own `main` in a child, which starts as if it had just
//! been loaded, with the caller's files and directory. One call at a time; the others wait. A caller that ends before its
//! child has it killed. Memory that the program shares with its children (fio's locks, made before `main`) is copied for
//! each of them, or one would find what another has put away. The socket is at its place once calls are heard.
//!
//! fio looks only a tenth of a second after it has started its threads whether they are ready, which takes them a millisecond or
//! two: as long as a fourth of a short measurement. It naps less here, and looks again as often as it takes.

#![no_std]

#[expect(dead_code, reason = "each side has its half of it")]
mod message;

use core::ffi::{c_char, c_int, c_long, c_short, c_void};
use core::ptr;
use core::slice;
use core::sync::atomic::{AtomicPtr, Ordering};
use message::{Address, CANNOT, FILES, LONGEST, MOST, close, packets, read, take};

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

/// The compiled `core` names it where it could unwind; nothing here does.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}

/// fio's nap before it looks whether its threads are ready, and the one that it takes here: microseconds.
const READY: u32 = 100_000;
const SOON: u32 = 2_000;
const RTLD_NEXT: *mut c_void = -1isize as *mut c_void;
const POLLIN: c_short = 1;
const SIGKILL: c_int = 9;
const SIGPIPE: c_int = 13;
const DEFAULT: usize = 0;
const IGNORED: usize = 1;
const PIDFD_OPEN: c_long = 434;
const INTR: c_int = 4;
const PROT_READ_WRITE: c_int = 3;
const MAP_SHARED: c_int = 1;
const MAP_PRIVATE: c_int = 2;
const MAP_FIXED: c_int = 0x10;
const MAP_ANONYMOUS: c_int = 0x20;
const MAP_FAILED: *mut u8 = -1isize as *mut u8;
/// Shared mappings of a program, at most.
const SHARED: usize = 16;
/// Calls that wait, at most.
const WAITING: c_int = 128;

#[repr(C)]
struct PollFd {
    fd: c_int,
    events: c_short,
    revents: c_short,
}

#[repr(C)]
struct Time {
    seconds: i64,
    nanoseconds: i64,
}

#[link(name = "c")]
unsafe extern "C" {
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
    fn getenv(name: *const c_char) -> *const c_char;
    fn strlen(text: *const c_char) -> usize;
    fn unsetenv(name: *const c_char) -> c_int;
    fn open(path: *const c_char, flags: c_int, mode: c_int) -> c_int;
    fn write(fd: c_int, from: *const u8, len: usize) -> isize;
    fn bind(socket: c_int, address: *const Address, len: u32) -> c_int;
    fn listen(socket: c_int, waiting: c_int) -> c_int;
    fn accept(socket: c_int, address: *mut Address, len: *mut u32) -> c_int;
    fn rename(from: *const c_char, to: *const c_char) -> c_int;
    fn fchdir(fd: c_int) -> c_int;
    fn dup2(from: c_int, to: c_int) -> c_int;
    fn fork() -> c_int;
    fn kill(pid: c_int, signal: c_int) -> c_int;
    fn signal(signal: c_int, handler: usize) -> usize;
    fn waitpid(pid: c_int, status: *mut c_int, flags: c_int) -> c_int;
    fn mmap(at: *mut u8, len: usize, rights: c_int, flags: c_int, fd: c_int, from: i64) -> *mut u8;
    fn munmap(at: *mut u8, len: usize) -> c_int;
    fn poll(fds: *mut PollFd, count: u64, timeout: c_int) -> c_int;
    fn nanosleep(time: *const Time, left: *mut Time) -> c_int;
    fn syscall(number: c_long, ...) -> c_long;
    fn _exit(status: c_int) -> !;
    fn __errno_location() -> *mut c_int;
}

type Main = unsafe extern "C" fn(c_int, *mut *mut c_char, *mut *mut c_char) -> c_int;
type Start = unsafe extern "C" fn(
    Main,
    c_int,
    *mut *mut c_char,
    *mut c_void,
    *mut c_void,
    *mut c_void,
    *mut c_void,
) -> c_int;

static MAIN: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

/// Stands in for what a program's first instructions call, to give it another `main`.
///
/// # Safety
/// As for libc's `__libc_start_main`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __libc_start_main(
    main: Main,
    argc: c_int,
    argv: *mut *mut c_char,
    init: *mut c_void,
    fini: *mut c_void,
    rtld_fini: *mut c_void,
    stack_end: *mut c_void,
) -> c_int {
    // SAFETY: the name is a C string; RTLD_NEXT asks for the libc's own function.
    let real = unsafe { dlsym(RTLD_NEXT, c"__libc_start_main".as_ptr()) };
    if real.is_null() {
        // SAFETY: ends the process.
        unsafe { _exit(CANNOT) };
    }
    MAIN.store(main as *mut c_void, Ordering::Relaxed);
    // SAFETY: libc's own function, which has this signature, with the caller's own arguments but for `main`.
    unsafe {
        let real = core::mem::transmute::<*mut c_void, Start>(real);
        real(stand_by, argc, argv, init, fini, rtld_fini, stack_end)
    }
}

/// Stands in for libc's.
#[unsafe(no_mangle)]
pub extern "C" fn usleep(time: u32) -> c_int {
    let time = i64::from(if time == READY { SOON } else { time });
    let time = Time { seconds: time / 1_000_000, nanoseconds: time % 1_000_000 * 1000 };
    // SAFETY: a time of this frame; what is left of it is not asked for.
    unsafe { nanosleep(&raw const time, ptr::null_mut()) }
}

/// The program's `main` as long as it stands by; in a child it goes on as the program's own.
unsafe extern "C" fn stand_by(
    _argc: c_int,
    argv: *mut *mut c_char,
    environment: *mut *mut c_char,
) -> c_int {
    let mut call = [0u8; LONGEST];
    let mut words = [ptr::null_mut::<c_char>(); MOST + 1];
    // SAFETY: all pointers are to C strings and to buffers of this frame with their lengths, which outlive the calls; in
    // the child the program's `main` gets an array of C strings in `call` that ends with a null, as any `main` does.
    unsafe {
        unsetenv(c"LD_PRELOAD".as_ptr());
        let Some(calls) = listener() else { return CANNOT };
        // A caller may go at any time.
        signal(SIGPIPE, IGNORED);
        let Some(shared) = shared_memory() else { return CANNOT };
        loop {
            let caller = accept(calls, ptr::null_mut(), ptr::null_mut());
            let Some((len, files)) = take(caller, &mut call) else {
                close(caller);
                continue;
            };
            let count = cut(&mut call[..len], *argv, &mut words);
            let child = fork();
            if child == 0 {
                signal(SIGPIPE, DEFAULT);
                close(calls);
                close(caller);
                if !copy(&shared) || !stand_in(files) {
                    _exit(CANNOT);
                }
                let main = core::mem::transmute::<*mut c_void, Main>(MAIN.load(Ordering::Relaxed));
                return main(count, words.as_mut_ptr(), environment);
            }
            files.into_iter().for_each(|file| {
                close(file);
            });
            let status = if child < 0 { CANNOT } else { wait(child, caller) }.to_ne_bytes();
            write(caller, status.as_ptr(), status.len());
            close(caller);
        }
    }
}

/// The socket at `$RINGTAP_STANDBY`, which hears calls by the time it has this name.
unsafe fn listener() -> Option<c_int> {
    // SAFETY: the name is a C string, and so is what it gives; the addresses are of this frame.
    unsafe {
        let path = getenv(c"RINGTAP_STANDBY".as_ptr());
        if path.is_null() {
            return None;
        }
        let path = slice::from_raw_parts(path.cast::<u8>(), strlen(path));
        let (there, new) = (Address::new(&[path])?, Address::new(&[path, b".new"])?);
        let socket = packets();
        let heard = bind(socket, &raw const new, Address::LEN) == 0
            && listen(socket, WAITING) == 0
            && rename(new.path(), there.path()) == 0;
        heard.then_some(socket)
    }
}

/// The anonymous memory that children share, as /proc/self/maps tells: beginnings and lengths. None where that does not read.
unsafe fn shared_memory() -> Option<[(usize, usize); SHARED]> {
    let mut found = [(0, 0); SHARED];
    let mut count = 0;
    let mut text = [0u8; 4096];
    let mut line = [0u8; 256];
    let mut len = 0;
    // SAFETY: a C string, and a buffer of this frame with its length.
    unsafe {
        let maps = open(c"/proc/self/maps".as_ptr(), 0, 0);
        if maps < 0 {
            return None;
        }
        loop {
            let got = read(maps, text.as_mut_ptr(), text.len());
            if got <= 0 {
                close(maps);
                return (got == 0).then_some(found);
            }
            for byte in &text[..got as usize] {
                if *byte != b'\n' {
                    if len < line.len() {
                        line[len] = *byte;
                        len += 1;
                    }
                    continue;
                }
                if let Some(range) = anonymous(&line[..len]) {
                    *found.get_mut(count)? = range;
                    count += 1;
                }
                len = 0;
            }
        }
    }
}

/// Of `7f00-7f10 rw-s 00000000 00:01 7 /dev/zero (deleted)` the beginning and the length, where it is such a line.
fn anonymous(line: &[u8]) -> Option<(usize, usize)> {
    if !line.ends_with(b"/dev/zero (deleted)") {
        return None;
    }
    let mut words = line.split(|byte| *byte == b' ');
    let mut ends = words.next()?.split(|byte| *byte == b'-');
    let number = |digits: &[u8]| {
        digits.iter().try_fold(0usize, |sum, digit| {
            let digit = char::from(*digit).to_digit(16)?;
            sum.checked_mul(16)?.checked_add(digit as usize)
        })
    };
    let (from, to) = (number(ends.next()?)?, number(ends.next()?)?);
    words.next()?.starts_with(b"rw-s").then_some((from, to.checked_sub(from)?))
}

/// Puts memory of this process's own in the place of what it shares, with what is in there.
unsafe fn copy(shared: &[(usize, usize); SHARED]) -> bool {
    for (from, len) in shared.iter().copied().take_while(|(_, len)| *len > 0) {
        let place = from as *mut u8;
        // SAFETY: /proc/self/maps said that so many bytes are mapped there and may be read and written; the process has
        // one thread, and what the new mapping replaces is in `kept` meanwhile.
        unsafe {
            let anonymous = MAP_ANONYMOUS | MAP_PRIVATE;
            let kept = mmap(ptr::null_mut(), len, PROT_READ_WRITE, anonymous, -1, 0);
            if kept == MAP_FAILED {
                return false;
            }
            ptr::copy_nonoverlapping(place, kept, len);
            let flags = MAP_ANONYMOUS | MAP_SHARED | MAP_FIXED;
            if mmap(place, len, PROT_READ_WRITE, flags, -1, 0) == MAP_FAILED {
                return false;
            }
            ptr::copy_nonoverlapping(kept, place, len);
            munmap(kept, len);
        }
    }
    true
}

/// Cuts a call into words, the first of them this program's own name; their number.
fn cut(call: &mut [u8], name: *mut c_char, words: &mut [*mut c_char; MOST + 1]) -> c_int {
    *words = [ptr::null_mut(); MOST + 1];
    let mut count = 0;
    for (place, word) in words[..MOST].iter_mut().zip(call.split_inclusive_mut(|byte| *byte == 0)) {
        *place = if count == 0 { name } else { word.as_mut_ptr().cast() };
        count += 1;
    }
    count
}

/// Makes stdin, stdout, stderr and the directory those of the caller.
unsafe fn stand_in(files: [c_int; FILES]) -> bool {
    let [stdin, stdout, stderr, here] = files;
    // SAFETY: files that came for this process.
    unsafe {
        let standard = [stdin, stdout, stderr];
        let there = fchdir(here) == 0
            && (0..).zip(standard).all(|(place, file)| dup2(file, place) == place);
        files.into_iter().for_each(|file| {
            close(file);
        });
        there
    }
}

/// Waits for a child's end; its status as a shell gives it. Kills it when the caller goes first.
unsafe fn wait(child: c_int, caller: c_int) -> c_int {
    let mut status = 0;
    // SAFETY: `watched` and `status` are of this frame, and so many as said.
    unsafe {
        let ended = syscall(PIDFD_OPEN, child, 0) as c_int;
        let mut watched = [
            PollFd { fd: ended, events: POLLIN, revents: 0 },
            PollFd { fd: caller, events: 0, revents: 0 },
        ];
        while poll(watched.as_mut_ptr(), watched.len() as u64, -1) < 0
            && *__errno_location() == INTR
        {}
        if watched[1].revents != 0 {
            kill(child, SIGKILL);
        }
        close(ended);
        while waitpid(child, &raw mut status, 0) < 0 && *__errno_location() == INTR {}
    }
    if status & 0x7f == 0 { status >> 8 & 0xff } else { 128 + (status & 0x7f) }
}
