//! The thread of an image for what librbd has no asynchronous call for.

use std::sync::atomic::Ordering::SeqCst;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};

use ringtap_io::Op;

use crate::holds::{LEAST, List, MOST};
use crate::image::Rbd;
use crate::task::Task;

/// Its thread, until it is told to end.
pub(crate) fn start(image: &Arc<Rbd>, tasks: Receiver<Task>) -> std::io::Result<JoinHandle<()>> {
    let image = Arc::downgrade(image);
    thread::Builder::new().name("rbd".into()).spawn(move || run(&image, &tasks))
}

fn run(image: &Weak<Rbd>, tasks: &Receiver<Task>) {
    let mut known: Option<List> = None;
    while let Ok(task) = tasks.recv() {
        let Some(image) = image.upgrade() else { return };
        match task {
            Task::End => return,
            Task::Look => image.look(),
            Task::Do(request) => match request.op() {
                Some(Op::Status { offset, len, .. }) => {
                    request.end(status(&image, &mut known, offset, len));
                }
                Some(Op::SetLen { len, .. }) => {
                    request.end(image.set_len(len).map_or_else(|errno| -errno, |()| 0));
                }
                // One that makes the image longer.
                Some(Op::Write { offset, mem, .. }) => {
                    let end = offset.saturating_add(mem.len() as u64);
                    match if image.len() < end { image.grow(end) } else { Ok(()) } {
                        Ok(()) => {
                            image.begin(&request);
                            image.changes.fetch_add(1, SeqCst);
                        }
                        Err(errno) => request.end(-errno),
                    }
                }
                Some(_) => request.end(-libc::EOPNOTSUPP),
                None => {}
            },
        }
    }
}

fn status(image: &Rbd, known: &mut Option<List>, offset: u64, len: u64) -> i32 {
    let changes = image.changes.load(SeqCst);
    if let Some(list) = known.as_ref().filter(|list| list.is_of(offset, changes)) {
        return list.holds(offset, len).to_result();
    }
    let size = image.len();
    let end = offset.saturating_add(len.clamp(LEAST, MOST)).min(size);
    if offset >= end {
        return ringtap_io::Holds { len, hole: true, zero: true }.to_result();
    }
    match image.extents(offset, end - offset) {
        Ok(extents) => {
            let list = known.insert(List::new(offset..end, &extents, changes));
            list.holds(offset, len).to_result()
        }
        Err(errno) => -errno,
    }
}
