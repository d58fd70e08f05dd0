//! The thread whose connection serves several others: where a server allows one connection, or no more.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use ringtap_io::{Errand, Event, Io, Key, Op, Session, Tasks};
use tracing::error;

use super::Nbd;
use super::link::{Link, Role};
use super::requests::Who;

enum Message {
    Begin(u64, Errand),
    Cancel(u64),
}

#[derive(Default)]
struct Inbox {
    messages: Vec<Message>,
    closed: bool,
}

/// What other threads have of it.
#[derive(Default)]
pub(super) struct Owner {
    inbox: Mutex<Inbox>,
    more: Event,
    numbers: AtomicU64,
}

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

    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, message: Message) {
        let mut inbox = self.inbox();
        match message {
            Message::Begin(_, errand) if inbox.closed => errand.ender.end(-libc::EIO),
            message => inbox.messages.push(message),
        }
        drop(inbox);
        self.more.notify();
    }

    /// Nothing is sent to it any more.
    pub(super) fn close(&self) {
        let left = {
            let mut inbox = self.inbox();
            inbox.closed = true;
            std::mem::take(&mut inbox.messages)
        };
        for message in left {
            if let Message::Begin(_, errand) = message {
                errand.ender.end(-libc::EIO);
            }
        }
        self.more.notify();
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

/// The session of a thread whose requests go that way.
pub(super) struct Far {
    owner: Arc<Owner>,
    /// By which numbers its operations go.
    numbers: RefCell<HashMap<Key, u64>>,
}

impl Far {
    pub(super) fn new(owner: Arc<Owner>) -> Rc<Far> {
        Rc::new(Far { owner, numbers: RefCell::default() })
    }
}

impl Session for Far {
    fn begin(&self, io: &Io, key: Key, op: Op) {
        let number = self.owner.numbers.fetch_add(1, Relaxed);
        self.numbers.borrow_mut().insert(key, number);
        self.owner.send(Message::Begin(number, Errand { op, ender: io.ender(key) }));
    }

    fn cancel(&self, _: &Io, key: Key) {
        if let Some(number) = self.numbers.borrow().get(&key) {
            self.owner.send(Message::Cancel(*number));
        }
    }
}
