//! `ringtap-standby PROGRAM WORD...` runs a program that stands by in the guest (`standby.rs`) with this process's own
//! files and directory, and one that does not as any shell would. The exit status is the program's, or 126 where the one
//! that stood by is gone.

#![no_std]
#![no_main]

#[expect(dead_code, reason = "each side has its half of it")]
mod message;

use core::ffi::{c_char, c_int};
use core::slice;
use message::{Address, CANNOT, LONGEST, MOST, close, packets, read, send};

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

/// The compiled `core` names it where it could unwind; nothing here does.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}

const O_PATH: c_int = 0o10000000;
const INTR: c_int = 4;
/// What a shell says of a program that is not there.
const NOT_FOUND: c_int = 127;

#[link(name = "c")]
unsafe extern "C" {
    fn strlen(text: *const c_char) -> usize;
    fn open(path: *const c_char, flags: c_int, mode: c_int) -> c_int;
    fn connect(socket: c_int, address: *const Address, len: u32) -> c_int;
    fn execvp(program: *const c_char, words: *const *const c_char) -> c_int;
    fn __errno_location() -> *mut c_int;
}

/// # Safety
/// `argv` holds `argc` C strings and a null, as C says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn main(argc: c_int, argv: *const *const c_char) -> c_int {
    let Some(count) =
        usize::try_from(argc).ok().and_then(|argc| argc.checked_sub(1)).filter(|n| *n > 0)
    else {
        return CANNOT;
    };
    // SAFETY: as the caller promises; `execvp` returns where there is no such program.
    unsafe {
        let words = argv.add(1);
        ask(slice::from_raw_parts(words, count)).unwrap_or_else(|| {
            execvp(*words, words);
            NOT_FOUND
        })
    }
}

/// The exit status of the program that stands by; None where none does or the call is too long for it.
unsafe fn ask(words: &[*const c_char]) -> Option<c_int> {
    let mut text = [0u8; LONGEST];
    let mut len = 0;
    // SAFETY: the words are C strings, each copied with its zero to where there is room for it; the pointers in the calls
    // are to values of this frame.
    unsafe {
        let name = slice::from_raw_parts(words[0].cast::<u8>(), strlen(words[0]));
        let there = Address::new(&[b"/run/standby-", name])?;
        let socket = packets();
        if words.len() > MOST || connect(socket, &raw const there, Address::LEN) < 0 {
            return None;
        }
        for word in words {
            let word = slice::from_raw_parts(word.cast::<u8>(), strlen(*word) + 1);
            text.get_mut(len..len + word.len())?.copy_from_slice(word);
            len += word.len();
        }
        let here = open(c".".as_ptr(), O_PATH, 0);
        if !send(socket, &mut text[..len], [0, 1, 2, here]) {
            return None;
        }
        close(here);
        let mut status = [0; 4];
        loop {
            match read(socket, status.as_mut_ptr(), status.len()) {
                4 => return Some(c_int::from_ne_bytes(status)),
                ..0 if *__errno_location() == INTR => {}
                _ => return Some(CANNOT),
            }
        }
    }
}
