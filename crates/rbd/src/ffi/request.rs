//! Requests that librbd carries out.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use ringtap_io::{Errand, Op};

use super::{Api, Handle};

/// The most that a request without data is about at a time: librbd makes one of each object's before it begins.
const MOST: u64 = 16 << 30;
/// Memory for copies that requests keep for the next.
const KEPT: usize = 1 << 20;
/// RBD_WRITE_ZEROES_FLAG_THICK_PROVISION.
const THICK: c_int = 1;

/// Those that nothing is in flight of, to be used again.
pub(crate) type Free = Mutex<Vec<Arc<Request>>>;

/// An operation and what librbd is asked for it.
pub(crate) struct Request {
    api: &'static Api,
    /// Open for as long as requests of it are in flight.
    image: Handle,
    state: Mutex<State>,
    free: Weak<Free>,
    /// Its image was taken by another: said once.
    shut_out: Arc<AtomicBool>,
}

struct State {
    /// None where nobody waits for its end any more.
    errand: Option<Errand>,
    /// What librbd reads from or writes to: there until its end.
    pieces: Vec<libc::iovec>,
    copy: Vec<u8>,
    /// Bytes of the range that are done with.
    done: u64,
    /// A write is to be made stable yet.
    settles: bool,
    begun: Instant,
}

// SAFETY: the memory that an operation and its iovecs name may be used until its end is told; see `Errand`.
unsafe impl Send for Request {}
// SAFETY: all of it is behind a lock.
unsafe impl Sync for Request {}

/// What follows the end of what librbd was asked.
enum Next {
    Ask,
    End(i32),
}

extern "C" fn ended(completion: Handle, request: *mut c_void) {
    // SAFETY: it is the pointer that `ask` has made of an `Arc`, and librbd gives it back once.
    let request = unsafe { Arc::from_raw(request.cast::<Request>()) };
    // SAFETY: librbd lends the completion for this call, and it is released once.
    let result = unsafe {
        let result = (request.api.rbd_aio_get_return_value)(completion);
        (request.api.rbd_aio_release)(completion);
        result
    };
    request.ended(result as i64);
}

impl Request {
    /// One of those, or a new one, that is about an operation on an open image.
    pub(crate) fn new(
        (api, image): (&'static Api, Handle),
        free: &Arc<Free>,
        shut_out: &Arc<AtomicBool>,
        errand: Errand,
        settles: bool,
    ) -> Arc<Request> {
        let known = free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let request = known.unwrap_or_else(|| {
            let (pieces, copy) = (vec![], vec![]);
            let state = State {
                errand: None,
                pieces,
                copy,
                done: 0,
                settles: false,
                begun: Instant::now(),
            };
            Arc::new(Request {
                api,
                image,
                state: Mutex::new(state),
                free: Arc::downgrade(free),
                shut_out: shut_out.clone(),
            })
        });
        let mut state = request.state();
        (state.errand, state.done, state.settles) = (Some(errand), 0, settles);
        state.begun = Instant::now();
        drop(state);
        request
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The operation, while somebody waits for it.
    pub(crate) fn op(&self) -> Option<Op> {
        self.state().errand.as_ref().map(|errand| errand.op)
    }

    /// It has ended, if it has not yet.
    pub(crate) fn end(&self, result: i32) {
        if let Some(Errand { ender, .. }) = self.state().errand.take() {
            ender.end(result);
        }
    }

    /// For how long it has been waited for, while it is.
    pub(crate) fn age(&self) -> Option<Duration> {
        let state = self.state();
        state.errand.as_ref().map(|_| state.begun.elapsed())
    }

    /// Nobody waits for it any more. A read goes on until librbd uses its memory no more.
    pub(crate) fn give_up(&self, errno: i32) {
        let mut state = self.state();
        match &state.errand {
            Some(Errand { op: Op::Read { .. }, .. }) | None => {}
            Some(_) => {
                if let Some(Errand { ender, .. }) = state.errand.take() {
                    ender.end(-errno);
                }
            }
        }
    }

    /// Have librbd carry it out. It is told its end, also where it could not begin.
    pub(super) fn begin(self: &Arc<Self>) {
        let mut state = self.state();
        let Some(op) = state.errand.as_ref().map(|errand| errand.op) else { return };
        match op {
            Op::Read { mem, .. } => {
                let pieces = &mut state.pieces;
                pieces.clear();
                mem.pieces(|(base, len)| {
                    pieces.push(libc::iovec { iov_base: base.cast(), iov_len: len });
                });
            }
            Op::Write { mem, .. } => {
                state.copy.resize(mem.len(), 0);
                mem.copy_to(&mut state.copy);
            }
            _ => {}
        }
        self.ask(state, op);
    }

    /// Have librbd do it, or what is left of it.
    fn ask(self: &Arc<Self>, state: MutexGuard<'_, State>, op: Op) {
        let (api, image) = (self.api, self.image);
        let arg = Arc::into_raw(self.clone()).cast_mut().cast::<c_void>();
        let mut completion = ptr::null_mut();
        // SAFETY: a callback, and what it is to be given, once.
        let made = unsafe { (api.rbd_aio_create_completion)(arg, ended, &mut completion) };
        if made < 0 {
            drop(state);
            // SAFETY: nobody else has it.
            drop(unsafe { Arc::from_raw(arg.cast::<Request>()) });
            return self.end(made);
        }
        let State { pieces, copy, done, .. } = &*state;
        let (at, count) = (pieces.as_ptr(), pieces.len() as c_int);
        let (from, bytes, done) = (copy.as_ptr().cast(), copy.len(), *done);
        let left = |len: u64| (len - done).min(MOST);
        // Its end may come before librbd returns.
        drop(state);
        // SAFETY: the image is open while something is in flight. Reads go to memory that their operation has lent until
        // its end, by iovecs that stay as they are until then; what is written is this request's own until then.
        let began = unsafe {
            match op {
                Op::Read { offset, .. } => {
                    (api.rbd_aio_readv)(image, at, count, offset, completion)
                }
                Op::Write { .. } if done > 0 => (api.rbd_aio_flush)(image, completion),
                Op::Write { offset, .. } => {
                    (api.rbd_aio_write)(image, offset, bytes, from, completion)
                }
                Op::Sync { .. } => (api.rbd_aio_flush)(image, completion),
                Op::Forget { offset, len, .. } => {
                    (api.rbd_aio_discard)(image, offset + done, left(len), completion)
                }
                Op::PunchHole { offset, len, .. } | Op::ZeroRange { offset, len, .. } => {
                    let how = if matches!(op, Op::ZeroRange { .. }) { THICK } else { 0 };
                    let (at, len) = (offset + done, left(len) as usize);
                    (api.rbd_aio_write_zeroes)(image, at, len, completion, how, 0)
                }
                _ => -libc::EOPNOTSUPP,
            }
        };
        if began < 0 {
            // SAFETY: librbd has not taken it, and calls nobody.
            unsafe {
                (api.rbd_aio_release)(completion);
                drop(Arc::from_raw(arg.cast::<Request>()));
            }
            self.end(began);
        }
    }

    fn ended(self: &Arc<Self>, result: i64) {
        let mut state = self.state();
        let op = state.errand.as_ref().map(|errand| errand.op);
        if result == -i64::from(libc::ESHUTDOWN) && !self.shut_out.swap(true, SeqCst) {
            tracing::error!(
                "another client has taken this image's lock and shut this one out: its requests fail"
            );
        }
        if let (Some(op), true) = (op, result >= 0) {
            match state.after(op, result) {
                Next::Ask => return self.ask(state, op),
                Next::End(result) => {
                    if let Some(Errand { ender, .. }) = state.errand.take() {
                        ender.end(result);
                    }
                }
            }
        } else if let Some(Errand { ender, .. }) = state.errand.take() {
            ender.end(result as i32);
        }
        if state.copy.capacity() > KEPT {
            state.copy = vec![];
        }
        drop(state);
        if let Some(free) = self.free.upgrade() {
            free.lock().unwrap_or_else(PoisonError::into_inner).push(self.clone());
        }
    }
}

impl State {
    fn after(&mut self, op: Op, result: i64) -> Next {
        match op {
            Op::Read { .. } => Next::End(result as i32),
            Op::Write { mem, .. } => {
                let first = self.done == 0;
                self.done = mem.len() as u64;
                if self.settles && first { Next::Ask } else { Next::End(mem.len() as i32) }
            }
            Op::Forget { len, .. } | Op::PunchHole { len, .. } | Op::ZeroRange { len, .. } => {
                self.done += (len - self.done).min(MOST);
                if self.done < len { Next::Ask } else { Next::End(0) }
            }
            _ => Next::End(0),
        }
    }
}
