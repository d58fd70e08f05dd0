//! Guest memory whose file its front-end cuts short while it is mapped here.
//!
//! Whoever touches a page behind the file's new end is sent SIGBUS, which would end the server and
//! with it the disks of every other guest. The kernel's own accesses (O_DIRECT, `readv`) end in
//! EFAULT instead, an I/O error to the guest. For ours a handler puts zeros in the place of the whole
//! mapping, and the queues that use it stop: nothing in that guest's memory can be trusted any more, and what
//! was put there now would be memory of ours. Other guests do not notice. Elsewhere SIGBUS does what it did before.

use std::ffi::{c_int, c_void};
use std::io;
use std::iter;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering::Acquire, Ordering::Release};
use std::sync::{Mutex, OnceLock, PoisonError};

/// A guarded mapping, for the handler.
struct Place {
    /// 0 where the place is free.
    start: AtomicUsize,
    end: AtomicUsize,
    /// Whether zeros are in the mapping's place.
    cut: AtomicBool,
}

/// Places come by the block and stay: the handler may look at any of them at any time.
const PLACES: usize = 512;

struct Block {
    places: [Place; PLACES],
    next: AtomicPtr<Block>,
}

/// The newest block.
static BLOCKS: AtomicPtr<Block> = AtomicPtr::new(ptr::null_mut());
/// Those that no mapping has.
static FREE: Mutex<Vec<&'static Place>> = Mutex::new(Vec::new());

/// How often a mapping was cut short.
static CUTS: AtomicUsize = AtomicUsize::new(0);

/// How often a mapping of this process was cut short so far.
#[inline]
pub(crate) fn cuts() -> usize {
    CUTS.load(Acquire)
}

fn free() -> std::sync::MutexGuard<'static, Vec<&'static Place>> {
    FREE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A free place; there are as many as there are mappings.
fn take_place() -> &'static Place {
    let mut free = free();
    if let Some(place) = free.pop() {
        return place;
    }
    let place = || Place {
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        cut: AtomicBool::new(false),
    };
    let next = AtomicPtr::new(BLOCKS.load(Acquire));
    let block: &'static mut Block =
        Box::leak(Box::new(Block { places: std::array::from_fn(|_| place()), next }));
    BLOCKS.store(block, Release);
    let (first, rest) = block.places.split_first().expect("a block has places");
    free.extend(rest);
    first
}

fn blocks() -> impl Iterator<Item = &'static Block> {
    // SAFETY: what is in the list was leaked, whole, before it came there.
    let block = |at: &AtomicPtr<Block>| unsafe { at.load(Acquire).as_ref() };
    iter::successors(block(&BLOCKS), move |last| block(&last.next))
}

/// What was done about SIGBUS before.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// While it lives, the mapping may lose its file without harm to this process.
pub(crate) struct Guard(&'static Place);

impl std::fmt::Debug for Guard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Guard").finish_non_exhaustive()
    }
}

impl Guard {
    /// Guard `len` bytes from `base`, which are a mapping of whole pages and stay one for as long.
    pub(crate) fn new(base: *mut u8, len: usize) -> io::Result<Guard> {
        install()?;
        let (place, start) = (take_place(), base as usize);
        place.cut.store(false, Release);
        place.end.store(start.saturating_add(len), Release);
        place.start.store(start, Release);
        Ok(Guard(place))
    }

    /// Whether it was cut short.
    pub(crate) fn is_cut(&self) -> bool {
        self.0.cut.load(Acquire)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.start.store(0, Release);
        free().push(self.0);
    }
}

/// The guarded mapping that an address lies in: from, to, and its place.
fn guarded(address: usize) -> Option<(usize, usize, &'static Place)> {
    blocks().flat_map(|block| &block.places).find_map(|place| {
        let (start, end) = (place.start.load(Acquire), place.end.load(Acquire));
        // Where the place was given away meanwhile, they are not of one mapping.
        let same = place.start.load(Acquire) == start && start != 0;
        (same && address >= start && address < end).then_some((start, end, place))
    })
}

/// Once in this process.
fn install() -> io::Result<()> {
    static INSTALLED: Mutex<bool> = Mutex::new(false);
    let mut installed = INSTALLED.lock().unwrap_or_else(PoisonError::into_inner);
    if *installed {
        return Ok(());
    }
    let checked = |done: c_int| if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) };
    // SAFETY: all zeros is a valid sigaction.
    let (mut action, mut before): (libc::sigaction, libc::sigaction) =
        unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
    // SAFETY: it writes to `before` alone.
    checked(unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), &raw mut before) })?;
    // First, for the handler asks for it.
    BEFORE.get_or_init(|| before);
    action.sa_sigaction = handle as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER | libc::SA_ONSTACK;
    // SAFETY: `handle` has the signature that SA_SIGINFO asks for and does only what a handler may.
    checked(unsafe { libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()) })?;
    *installed = true;
    Ok(())
}

/// The handler: system calls that are safe in one, atomics, and nothing that allocates or locks.
extern "C" fn handle(signal: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
    // SAFETY: the kernel gives a handler with SA_SIGINFO a valid siginfo. Its address is only
    // compared unless it lies in a mapping of ours.
    let address = unsafe { (*info).si_addr() } as usize;
    if let Some((start, end, place)) = guarded(address) {
        let (readable, zeros) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED,
        );
        let base = start as *mut c_void;
        // SAFETY: a `Guard` promised that this is a mapping and stays one. Its bytes are a guest's,
        // which may change at any time, and are read by nobody as anything else.
        if unsafe { libc::mmap(base, end - start, readable, zeros, -1, 0) } != libc::MAP_FAILED {
            place.cut.store(true, Release);
            CUTS.fetch_add(1, Release);
            const WORDS: &[u8] = b"ringtap: a front-end cut the memory of its guest short\n";
            // SAFETY: it reads constant memory. What becomes of the words matters to nobody.
            unsafe { libc::write(2, WORDS.as_ptr().cast(), WORDS.len()) };
            return;
        }
    }
    // Not ours: as it was before, and again at once.
    if let Some(before) = BEFORE.get() {
        // SAFETY: `before` came from the kernel; sigaction may be called in a handler.
        unsafe { libc::sigaction(signal, before, std::ptr::null_mut()) };
    }
}
