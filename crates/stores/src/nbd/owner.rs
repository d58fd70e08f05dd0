//! The thread whose connection serves several others: where a server allows one connection, or no more.

use std::sync::Arc;
use std::thread;

use ringtap_io::{Errand, Io, Tasks};
use tracing::error;

use super::Nbd;
use super::far::{Message, Owner};
use super::link::{Link, Role};
use super::requests::Who;

impl Owner {
    /// Its thread is there until [`Owner::close`].
    pub(super) fn start(nbd: &Arc<Nbd>) -> Arc<Owner> {
        let owner = Arc::new(Owner::default());
        let (its, nbd) = (owner.clone(), nbd.clone());
        let spawned = thread::Builder::new().name("nbd client".into()).spawn(move || its.run(nbd));
        if let Err(error) = spawned {
            error!("cannot start a thread for an NBD connection: {error}");
            owner.close();
        }
        owner
    }

    fn run(self: Arc<Owner>, nbd: Arc<Nbd>) {
        // Nobody waits for what a panic has ended.
        let _closes = Closes(&self);
        let outcome = ringtap_io::reactor().and_then(|reactor| {
            let mut tasks = Tasks::new(reactor);
            let (io, owner) = (tasks.io().clone(), self.clone());
            tasks.block_on(async move { owner.serve(&io, nbd).await })
        });
        if let Err(error) = outcome {
            error!("the thread of an NBD connection has failed: {error}");
        }
    }

    async fn serve(&self, io: &Io, nbd: Arc<Nbd>) {
        let link = Link::start(nbd, io, Role::Owner);
        loop {
            let more = self.more.listen();
            let messages = {
                let mut inbox = self.inbox();
                if inbox.closed {
                    return;
                }
                std::mem::take(&mut inbox.messages)
            };
            if messages.is_empty() {
                more.await;
                continue;
            }
            for message in messages {
                match message {
                    Message::Begin(number, Errand { op, ender }) => {
                        link.begin(io, Who::There(number, ender), op);
                    }
                    Message::Cancel(number) => {
                        let is_it =
                            |who: &Who| matches!(who, Who::There(other, _) if *other == number);
                        link.cancel(io, is_it);
                    }
                }
            }
        }
    }
}

struct Closes<'a>(&'a Owner);

impl Drop for Closes<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
}
