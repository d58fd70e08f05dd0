//! What one thread has of an image: its operations, each a request of librbd's.

use std::rc::Rc;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, PoisonError};

use ringtap_io::{Errand, Io, Key, Op, Session};

use crate::ffi::Free;
use crate::image::Rbd;
use crate::task::Task;
use crate::waits::InFlight;
use crate::watch;

pub(crate) struct Near {
    image: Arc<Rbd>,
    free: Arc<Free>,
    /// By the keys of operations; what has ended is in the way of nothing.
    requests: Arc<InFlight>,
}

/// Who carries an operation out.
enum Way {
    Librbd,
    Helper,
}

impl Near {
    pub(crate) fn start(image: Arc<Rbd>) -> Rc<Near> {
        let requests = image.waits.know();
        Rc::new(Near { image, free: Arc::default(), requests })
    }

    /// The operation as it is asked for, and by whom; or its end.
    fn way(&self, op: Op) -> Result<(Way, Op), i32> {
        let read_only = self.image.read_only;
        match op {
            Op::Read { mem, .. } | Op::Write { mem, .. } if mem.is_kernels() => {
                Err(-libc::EOPNOTSUPP)
            }
            Op::Read { file, offset, mem } => {
                let len = (mem.len() as u64).min(self.image.len().saturating_sub(offset));
                match len {
                    0 => Err(0),
                    len => Ok((
                        Way::Librbd,
                        Op::Read { file, offset, mem: mem.window(0, len as usize) },
                    )),
                }
            }
            Op::Status { .. } => Ok((Way::Helper, op)),
            Op::Sync { .. } if read_only => Err(0),
            Op::Sync { .. } => Ok((Way::Librbd, op)),
            _ if read_only => Err(-libc::EROFS),
            Op::Write { mem, .. } if mem.is_empty() => Err(0),
            Op::Write { offset, mem, .. } => {
                match offset.saturating_add(mem.len() as u64) > self.image.len() {
                    true => Ok((Way::Helper, op)),
                    false => Ok((Way::Librbd, op)),
                }
            }
            Op::PunchHole { len: 0, .. }
            | Op::ZeroRange { len: 0, .. }
            | Op::Forget { len: 0, .. } => Err(0),
            // Nothing is behind the end, and nothing becomes of it there.
            Op::PunchHole { file, offset, len } => {
                self.within(offset, len, |len| Op::PunchHole { file, offset, len })
            }
            Op::ZeroRange { file, offset, len } => {
                self.within(offset, len, |len| Op::ZeroRange { file, offset, len })
            }
            Op::Forget { file, offset, len } => {
                self.within(offset, len, |len| Op::Forget { file, offset, len })
            }
            Op::SetLen { .. } => Ok((Way::Helper, op)),
            _ => Err(-libc::EOPNOTSUPP),
        }
    }

    /// Without librbd. What had this key before may serve another by now, and is not to be given up with this one.
    fn ended(&self, io: &Io, key: Key, result: i32) {
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(former) = requests.get_mut(key as usize) {
            *former = None;
        }
        drop(requests);
        io.ended(key, result);
    }

    fn within(&self, offset: u64, len: u64, op: impl FnOnce(u64) -> Op) -> Result<(Way, Op), i32> {
        match self.image.len().saturating_sub(offset).min(len) {
            0 => Err(0),
            len => Ok((Way::Librbd, op(len))),
        }
    }
}

impl Session for Near {
    fn begin(&self, io: &Io, key: Key, op: Op) {
        let (way, op) = match self.way(op) {
            Ok(way) => way,
            Err(result) => return self.ended(io, key, result),
        };
        let shut_out = self.image.waits.is_shut_out() && !matches!(op, Op::Read { .. });
        if shut_out {
            return self.ended(io, key, -libc::ESHUTDOWN);
        }
        let changes = !matches!(op, Op::Read { .. } | Op::Status { .. } | Op::Sync { .. });
        // What the image or its pool says of librbd's cache goes before what its connection says.
        let settles = matches!(op, Op::Write { durable: true, .. });
        let errand = Errand { op, ender: io.ender(key) };
        let Some(request) = self.image.request(&self.free, errand, settles) else { return };
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        if requests.len() <= key as usize {
            requests.resize(key as usize + 1, None);
        }
        requests[key as usize] = Some(request.clone());
        drop(requests);
        watch::there_is_one();
        match way {
            Way::Librbd => self.image.begin(&request),
            Way::Helper => self.image.ask(Task::Do(request)),
        }
        if changes {
            // From here on librbd knows of it: who asks later where something is waits for it.
            self.image.changes.fetch_add(1, SeqCst);
        }
    }

    fn cancel(&self, _: &Io, key: Key) {
        let requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(request) = requests.get(key as usize).and_then(Option::as_ref) {
            request.give_up(libc::ECANCELED);
        }
    }
}
