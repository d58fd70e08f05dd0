//! An xenstored in memory, at the other end of a socket: for tests of those who talk to one.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard};

use super::{
    DIRECTORY, ERROR, Message, READ, Store, TRANSACTION_END, TRANSACTION_START, WATCH, WATCH_EVENT,
    WRITE, message, receive, strings,
};

/// All connections to it see the same nodes. A transaction is carried out at its end, or refused where anything has changed
/// since its beginning.
#[derive(Clone, Default)]
pub(crate) struct Fake(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    nodes: BTreeMap<String, String>,
    watches: Vec<(String, UnixStream)>,
    /// How often anything was changed.
    changes: u64,
}

/// What a client's transaction has seen and will write.
struct Transaction {
    began: u64,
    writes: Vec<(String, String)>,
}

fn is_below(path: &str, node: &str) -> bool {
    path.strip_prefix(node).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

impl State {
    fn tell(&self, path: &str) {
        for (_, client) in self.watches.iter().filter(|(node, _)| is_below(path, node)) {
            send(client, WATCH_EVENT, format!("{path}\0w\0").as_bytes());
        }
    }

    fn set(&mut self, path: &str, value: &str) {
        self.changes += 1;
        self.nodes.insert(path.to_owned(), value.to_owned());
        self.tell(path);
    }

    /// Whether the transaction could be carried out.
    fn commit(&mut self, transaction: Transaction) -> bool {
        if transaction.began != self.changes {
            return false;
        }
        transaction.writes.iter().for_each(|(path, value)| self.set(path, value));
        true
    }

    fn names_below(&self, path: &str) -> BTreeSet<String> {
        let below = |node: &String| Some(node.strip_prefix(path)?.strip_prefix('/')?.to_owned());
        let first = |rest: String| rest.split('/').next().unwrap_or_default().to_owned();
        self.nodes.keys().filter_map(below).map(first).collect()
    }
}

/// A client that has gone needs no answer.
fn send(mut client: &UnixStream, kind: u32, payload: &[u8]) {
    let _ = client.write_all(&message(kind, 0, payload));
}

impl Fake {
    pub(crate) fn connect(&self) -> Store {
        let (ours, theirs) = UnixStream::pair().expect("a socket");
        let fake = self.clone();
        std::thread::spawn(move || {
            let mut transaction = None;
            while let Ok(message) = receive(&mut &theirs) {
                fake.answer(&theirs, message, &mut transaction);
            }
        });
        Fake::store(ours)
    }

    /// A connection to one that is no longer there.
    pub(crate) fn gone() -> Store {
        Fake::store(UnixStream::pair().expect("a socket").0)
    }

    fn store(client: UnixStream) -> Store {
        Store::of(File::from(OwnedFd::from(client)))
    }

    pub(crate) fn get(&self, path: &str) -> Option<String> {
        self.lock().nodes.get(path).cloned()
    }

    pub(crate) fn set(&self, path: &str, value: &str) {
        self.lock().set(path, value);
    }

    /// Remove a node and all below it.
    pub(crate) fn remove(&self, path: &str) {
        let mut state = self.lock();
        state.changes += 1;
        state.nodes.retain(|node, _| !is_below(node, path));
        state.tell(path);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("a state")
    }

    fn answer(
        &self,
        client: &UnixStream,
        Message { kind, payload }: Message,
        transaction: &mut Option<Transaction>,
    ) {
        let text = String::from_utf8(payload).expect("text");
        let (path, value) = text.split_once('\0').expect("a path");
        let mut state = self.lock();
        match (kind, &mut *transaction) {
            (WRITE, Some(transaction)) => transaction.writes.push((path.into(), value.into())),
            (WRITE, None) => state.set(path, value),
            (TRANSACTION_START, _) => {
                *transaction = Some(Transaction { began: state.changes, writes: Vec::new() });
            }
            _ => {}
        }
        let names = state.names_below(path);
        let there = state.nodes.get(path).map(|value| value.as_bytes().to_vec());
        let ended = transaction.take_if(|_| kind == TRANSACTION_END);
        if ended.is_some_and(|ended| path == "T" && !state.commit(ended)) {
            return send(client, ERROR, b"EAGAIN\0");
        }
        let answer = match kind {
            READ => there,
            DIRECTORY if there.is_none() && names.is_empty() => None,
            DIRECTORY => {
                Some(names.into_iter().flat_map(|name| (name + "\0").into_bytes()).collect())
            }
            TRANSACTION_START => Some(b"1\0".to_vec()),
            WRITE | WATCH | TRANSACTION_END => Some(b"OK\0".to_vec()),
            _ => panic!("a request of kind {kind}"),
        };
        match answer {
            Some(payload) => send(client, kind, &payload),
            None => send(client, ERROR, b"ENOENT\0"),
        }
        if kind == WATCH {
            state.watches.push((path.to_owned(), client.try_clone().expect("a descriptor")));
            send(client, WATCH_EVENT, format!("{path}\0w\0").as_bytes());
        }
    }
}

#[test]
fn a_client_has_its_answers_and_its_events() {
    let fake = Fake::default();
    let mut store = fake.connect();
    store.write("a/b/c", "1").expect("a write");
    assert_eq!(store.read("a/b/c").expect("a read").as_deref(), Some("1"));
    assert_eq!(store.read("a/b/x").expect("a read"), None);
    assert_eq!(strings(b"b\0"), store.list("a").expect("a list"));
    store.watch("a/b").expect("a watch");
    fake.set("a/bc", "none of its business");
    fake.set("a/b/d", "2");
    let events: Vec<_> = std::iter::from_fn(|| store.event().expect("an event")).collect();
    assert_eq!(events, ["a/b", "a/b/d"]);
    fake.remove("a/b");
    assert_eq!(store.list("a").expect("a list"), ["bc"]);
}
