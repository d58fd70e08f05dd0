//! A queue of requests, whatever transport it comes by, and the loop of one slot.

use std::rc::Rc;

use ringtap_io::Io;
use ringtap_vbd::{Error, Request, Vbd};

/// Where requests come from and answers go.
pub(crate) trait Queue {
    /// The next request for slot `tag`; none when the queue stops.
    async fn next(&self, tag: u16) -> Option<Request>;

    /// Answer the request that slot `tag` was given.
    fn reply(&self, tag: u16, end: Result<(), Error>);

    /// The same request with other memory, where the disk could not serve it with this; else its end.
    async fn instead(&self, _: u16, _: Request, error: Error) -> Result<Request, Error> {
        Err(error)
    }

    /// A panic has ended the task of slot `tag`.
    fn panicked(&self, _: u16) {}
}

/// Says it to the queue where a panic ends the task of a slot.
struct Slot<'a, Q: Queue>(&'a Q, u16);

impl<Q: Queue> Drop for Slot<'_, Q> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.panicked(self.1);
        }
    }
}

/// Have a queue's handle of the disk's image be that of its present one, though no request comes.
pub(crate) fn keep_up(io: &Io, vbd: &Rc<Vbd>) {
    let (vbd, theirs) = (vbd.clone(), io.clone());
    io.spawn_beside(async move { vbd.keep_up(&theirs).await });
}

/// One slot: take a request, serve it, answer it.
pub(crate) async fn run_slot<Q: Queue>(queue: Rc<Q>, vbd: Rc<Vbd>, io: Io, tag: u16) {
    let _slot = Slot(&*queue, tag);
    while let Some(mut request) = queue.next(tag).await {
        let end = loop {
            let Err(error) = vbd.serve(&io, request).await else { break Ok(()) };
            match queue.instead(tag, request, error).await {
                Ok(other) => request = other,
                Err(error) => break Err(error),
            }
        };
        queue.reply(tag, end);
    }
}
