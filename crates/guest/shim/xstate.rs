//! Lets a User-Mode Linux kernel run on a processor whose register state is larger than it knows.
//!
//! User-Mode Linux before 6.13 reserves 2696 bytes for a process's floating point and vector
//! registers and hands exactly these to `PTRACE_SETREGSET(NT_X86_XSTATE)`. The host's kernel takes
//! nothing but the full size, which is 11008 bytes where the processor has AMX, so every guest
//! process dies before its first instruction. This library, preloaded, stands in for `ptrace` and
//! pads that one request to the size the host wants; reading needs no help, the host cuts it short.

#![no_std]

use core::cell::UnsafeCell;
use core::ffi::{c_char, c_int, c_long, c_void};
use core::ptr;
use core::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

const PTRACE_GETREGSET: c_int = 0x4204;
const PTRACE_SETREGSET: c_int = 0x4205;
const NT_X86_XSTATE: usize = 0x202;
const RTLD_NEXT: *mut c_void = -1isize as *mut c_void;
/// Larger than the state of any x86 processor to date (11008 with AMX).
const ROOM: usize = 16384;
/// Where the XSAVE header's bit mask of the components that follow stands.
const XFEATURES: usize = 512;
/// AMX tiles lie past what User-Mode Linux keeps, so it has none to restore.
const AMX: u64 = 0b11 << 17;

#[repr(C)]
struct Iovec {
    base: *mut u8,
    len: usize,
}

#[link(name = "c")]
unsafe extern "C" {
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
}

type Ptrace = unsafe extern "C" fn(c_int, c_int, *mut c_void, *mut c_void) -> c_long;

/// Static because the stacks of User-Mode Linux are too small for it.
struct State(UnsafeCell<[u8; ROOM]>);

// SAFETY: User-Mode Linux has one processor, and only the thread that runs its kernel traces.
unsafe impl Sync for State {}

static STATE: State = State(UnsafeCell::new([0; ROOM]));
static NEXT: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
static FULL: AtomicUsize = AtomicUsize::new(0);

fn next() -> Option<Ptrace> {
    let mut found = NEXT.load(Ordering::Relaxed);
    if found.is_null() {
        // SAFETY: the name is a C string; RTLD_NEXT asks for the libc's own function.
        found = unsafe { dlsym(RTLD_NEXT, c"ptrace".as_ptr()) };
        NEXT.store(found, Ordering::Relaxed);
    }
    if found.is_null() {
        return None;
    }
    // SAFETY: libc's `ptrace` takes four integer arguments in registers, as `Ptrace` says.
    Some(unsafe { core::mem::transmute::<*mut c_void, Ptrace>(found) })
}

/// Stands in for libc's `ptrace`.
///
/// # Safety
/// As for libc's `ptrace`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ptrace(
    request: c_int,
    pid: c_int,
    addr: *mut c_void,
    data: *mut c_void,
) -> c_long {
    let Some(real) = next() else { return -1 };
    if request != PTRACE_SETREGSET || addr as usize != NT_X86_XSTATE || data.is_null() {
        // SAFETY: the caller's own arguments.
        return unsafe { real(request, pid, addr, data) };
    }
    // SAFETY: only the one thread that runs the guest's kernel traces, so nothing else holds it.
    let state = unsafe { &mut *STATE.0.get() };
    let mut iov = Iovec { base: state.as_mut_ptr(), len: ROOM };
    if FULL.load(Ordering::Relaxed) == 0 {
        // SAFETY: `iov` describes `state`, which outlives the call.
        let got = unsafe { real(PTRACE_GETREGSET, pid, addr, (&raw mut iov).cast()) };
        if got < 0 {
            return got;
        }
        FULL.store(iov.len, Ordering::Relaxed);
        state.fill(0);
    }
    // SAFETY: with this request `data` is an iovec, and the caller owns what it describes.
    let given = unsafe { &*data.cast::<Iovec>() };
    let full = FULL.load(Ordering::Relaxed);
    let len = given.len.min(full);
    // SAFETY: `len` bytes are readable there, and `full` is at most ROOM as the host filled no more.
    unsafe { ptr::copy_nonoverlapping(given.base, state.as_mut_ptr(), len) };
    if let Some(header) = state[XFEATURES..].first_chunk_mut::<8>() {
        *header = (u64::from_ne_bytes(*header) & !AMX).to_ne_bytes();
    }
    iov.base = state.as_mut_ptr();
    iov.len = full;
    // SAFETY: `iov` describes `full` bytes of `state`.
    unsafe { real(request, pid, addr, (&raw mut iov).cast()) }
}
