//! What other threads have of the owner of a connection, and their sessions.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringtap_io::{Errand, Event, Io, Key, Op, Session};

pub(super) enum Message {
    Begin(u64, Errand),
    Cancel(u64),
}

#[derive(Default)]
pub(super) struct Inbox {
    pub(super) messages: Vec<Message>,
    pub(super) closed: bool,
}

/// What other threads have of it.
#[derive(Default)]
pub(super) struct Owner {
    inbox: Mutex<Inbox>,
    pub(super) more: Event,
    numbers: AtomicU64,
}

impl Owner {
    pub(super) fn inbox(&self) -> MutexGuard<'_, Inbox> {
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
