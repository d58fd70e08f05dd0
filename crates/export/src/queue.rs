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
}

/// Have a queue's handle of the disk's image be that of its present one, though no request comes.
pub(crate) fn keep_up(io: &Io, vbd: &Rc<Vbd>) {
    let (vbd, theirs) = (vbd.clone(), io.clone());
    io.spawn_beside(async move { vbd.keep_up(&theirs).await });
}

/// One slot: take a request, serve it, answer it.
pub(crate) async fn run_slot<Q: Queue>(queue: Rc<Q>, vbd: Rc<Vbd>, io: Io, tag: u16) {
    while let Some(request) = queue.next(tag).await {
        let end = vbd.serve(&io, request).await;
        queue.reply(tag, end);
    }
}
