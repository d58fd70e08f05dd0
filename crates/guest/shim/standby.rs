//! Keeps a program loaded and runs it by a fork for each call.
//!
//! Debian's fio brings some sixty shared libraries, and in User-Mode Linux loading them takes as long as a few short
//! measurements. Preloaded into a program, this library stands in for its `main`: it waits for calls in the FIFO
//! `$RINGTAP_STANDBY.ask` and gives each to the program's own `main` in a child, which starts as if it had just been
//! loaded. A call is lines, the last of them empty: the process id of the caller, whose stdout and stderr the child
//! writes to (appending), then the arguments. The exit status goes to the caller's own FIFO, `$RINGTAP_STANDBY.` and its
//! process id, as a line; a caller that ends before its child has it killed. Memory that the program shares with its
//! children (fio's locks, made before `main`) is copied for each of them, or one would find what another has put away. The
//! file `$RINGTAP_STANDBY.ready` says that calls are heard.

#![no_std]

use core::ffi::{c_char, c_int, c_long, c_short, c_void};
use core::ptr;
use core::sync::atomic::{AtomicPtr, Ordering};

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

/// The compiled `core` names it where it could unwind; nothing here does.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}

const RTLD_NEXT: *mut c_void = -1isize as *mut c_void;
const O_WRONLY: c_int = 0o1;
const O_RDWR: c_int = 0o2;
const O_CREAT: c_int = 0o100;
const O_APPEND: c_int = 0o2000;
const O_NONBLOCK: c_int = 0o4000;
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
/// A pipe takes a call of this length as a whole.
const LONGEST: usize = 4096;
/// Arguments of a call, at most.
const MOST: usize = 128;
/// What a shell says of a program that cannot be run.
const CANNOT: c_int = 126;

#[repr(C)]
struct PollFd {
    fd: c_int,
    events: c_short,
    revents: c_short,
}

#[link(name = "c")]
unsafe extern "C" {
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
    fn getenv(name: *const c_char) -> *const c_char;
    fn unsetenv(name: *const c_char) -> c_int;
    fn open(path: *const c_char, flags: c_int, mode: c_int) -> c_int;
    fn read(fd: c_int, to: *mut u8, len: usize) -> isize;
    fn write(fd: c_int, from: *const u8, len: usize) -> isize;
    fn close(fd: c_int) -> c_int;
    fn dup2(from: c_int, to: c_int) -> c_int;
    fn fork() -> c_int;
    fn kill(pid: c_int, signal: c_int) -> c_int;
    fn signal(signal: c_int, handler: usize) -> usize;
    fn waitpid(pid: c_int, status: *mut c_int, flags: c_int) -> c_int;
    fn mmap(at: *mut u8, len: usize, rights: c_int, flags: c_int, fd: c_int, from: i64) -> *mut u8;
    fn munmap(at: *mut u8, len: usize) -> c_int;
    fn poll(fds: *mut PollFd, count: u64, timeout: c_int) -> c_int;
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

/// A path: `$RINGTAP_STANDBY` with an ending, which holds the closing zero.
fn path(ending: &[u8]) -> Option<[c_char; 256]> {
    let mut path = [0; 256];
    // SAFETY: the name is a C string.
    let base = unsafe { getenv(c"RINGTAP_STANDBY".as_ptr()) };
    if base.is_null() {
        return None;
    }
    let mut len = 0;
    // SAFETY: the base is a C string, and is read up to its closing zero at most.
    while unsafe { *base.add(len) } != 0 {
        if len + ending.len() >= path.len() {
            return None;
        }
        // SAFETY: as above.
        path[len] = unsafe { *base.add(len) };
        len += 1;
    }
    for (to, from) in path[len..].iter_mut().zip(ending) {
        *to = *from as c_char;
    }
    Some(path)
}

/// The program's `main` as long as it stands by; in a child it goes on as the program's own.
unsafe extern "C" fn stand_by(
    _argc: c_int,
    argv: *mut *mut c_char,
    environment: *mut *mut c_char,
) -> c_int {
    let (Some(ask), Some(ready)) = (path(b".ask\0"), path(b".ready\0")) else { return CANNOT };
    let mut call = [0u8; LONGEST];
    let mut words = [ptr::null_mut::<c_char>(); MOST + 2];
    // SAFETY: all pointers are to C strings and to buffers of this frame with their lengths, which outlive the calls; in
    // the child the program's `main` gets an array of C strings in `call` that ends with a null, as any `main` does.
    unsafe {
        unsetenv(c"LD_PRELOAD".as_ptr());
        // A caller may stop reading at any time.
        signal(SIGPIPE, IGNORED);
        // For writing too, so that its end is never seen.
        let ask = open(ask.as_ptr(), O_RDWR, 0);
        if ask < 0 || open(ready.as_ptr(), O_WRONLY | O_CREAT, 0o644) < 0 {
            return CANNOT;
        }
        let Some(shared) = shared_memory() else { return CANNOT };
        loop {
            let Some(len) = hear(ask, &mut call) else { return CANNOT };
            let Some(caller) = parse(&mut call[..len], *argv, &mut words) else { continue };
            let mut name = *b".0000000000\0";
            let Some(done) = path(decimal(&mut name, 1, caller)) else { return CANNOT };
            let reply = open(done.as_ptr(), O_WRONLY | O_NONBLOCK, 0);
            // Where the caller has gone, nobody reads it.
            let alive = syscall(PIDFD_OPEN, caller, 0) as c_int;
            if reply < 0 || alive < 0 {
                close(reply);
                close(alive);
                continue;
            }
            let child = fork();
            if child == 0 {
                signal(SIGPIPE, DEFAULT);
                close(ask);
                close(reply);
                close(alive);
                if !copy(&shared) {
                    _exit(CANNOT);
                }
                write_like(caller);
                let count = words.iter().take_while(|word| !word.is_null()).count();
                let main = core::mem::transmute::<*mut c_void, Main>(MAIN.load(Ordering::Relaxed));
                return main(count as c_int, words.as_mut_ptr(), environment);
            }
            let status = if child < 0 { CANNOT } else { wait(child, alive) };
            close(alive);
            answer(reply, status);
        }
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

/// Reads a call; its length.
unsafe fn hear(ask: c_int, call: &mut [u8; LONGEST]) -> Option<usize> {
    let mut len = 0;
    loop {
        // SAFETY: what is left of the buffer is writable.
        let got = unsafe { read(ask, call.as_mut_ptr().add(len), LONGEST - len) };
        // SAFETY: the calling thread's own variable.
        if got < 0 && unsafe { *__errno_location() } == INTR {
            continue;
        }
        if got <= 0 {
            return None;
        }
        len += got as usize;
        if call[..len].ends_with(b"\n\n") {
            return Some(len - 1);
        }
        if len == LONGEST {
            len = 0;
        }
    }
}

/// Cuts a call into words; the caller's process id.
fn parse(call: &mut [u8], name: *mut c_char, words: &mut [*mut c_char; MOST + 2]) -> Option<c_int> {
    let mut lines = call.split_mut(|byte| *byte == b'\n');
    let mut caller: c_int = 0;
    for digit in lines.next()? {
        let digit = c_int::from(digit.wrapping_sub(b'0'));
        if digit > 9 {
            return None;
        }
        caller = caller.checked_mul(10)?.checked_add(digit)?;
    }
    *words = [ptr::null_mut(); MOST + 2];
    words[0] = name;
    let mut count = 1;
    for line in lines.filter(|line| !line.is_empty()) {
        if count > MOST {
            return None;
        }
        words[count] = line.as_mut_ptr().cast();
        count += 1;
    }
    // Each newline is the end of a C string.
    for byte in call.iter_mut().filter(|byte| **byte == b'\n') {
        *byte = 0;
    }
    (caller > 0).then_some(caller)
}

/// Makes stdout and stderr those of another process.
unsafe fn write_like(caller: c_int) {
    for fd in [1, 2] {
        let mut path = *b"/proc/0000000000/fd/0\0";
        path[20] = b'0' + fd as u8;
        let path = decimal(&mut path, 6, caller);
        // SAFETY: a C string, and files that are this process's own.
        unsafe {
            let there = open(path.as_ptr().cast(), O_WRONLY | O_APPEND, 0);
            if there < 0 {
                _exit(CANNOT);
            }
            dup2(there, fd);
            close(there);
        }
    }
}

/// Waits for a child's end; its status as a shell gives it. Kills it when the caller, a pidfd, ends first.
unsafe fn wait(child: c_int, caller: c_int) -> c_int {
    let mut status = 0;
    // SAFETY: `watched` and `status` are of this frame, and so many as said.
    unsafe {
        let ended = syscall(PIDFD_OPEN, child, 0) as c_int;
        let mut watched = [
            PollFd { fd: ended, events: POLLIN, revents: 0 },
            PollFd { fd: caller, events: POLLIN, revents: 0 },
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

/// Writes a status to the reply and closes it.
unsafe fn answer(reply: c_int, status: c_int) {
    let text = [
        b'0' + (status / 100) as u8,
        b'0' + (status / 10 % 10) as u8,
        b'0' + (status % 10) as u8,
        b'\n',
    ];
    // SAFETY: the buffer is of this frame. A reader that has gone is no loss.
    unsafe {
        write(reply, text.as_ptr(), text.len());
        close(reply);
    }
}

/// Puts a number's digits in the place of the ten from `at`, and what follows them behind it; the whole up to its zero.
fn decimal<const N: usize>(text: &mut [u8; N], at: usize, number: c_int) -> &[u8] {
    let mut rest = number;
    for digit in text[at..at + 10].iter_mut().rev() {
        *digit = b'0' + (rest % 10) as u8;
        rest /= 10;
    }
    let zeros = text[at..at + 9].iter().take_while(|digit| **digit == b'0').count();
    text.copy_within(at + zeros.., at);
    &text[..N - zeros]
}
