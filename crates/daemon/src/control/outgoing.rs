//! What goes out to clients: replies, each to its command, and events, to all. Nobody waits for a client that
//! does not read.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::event::{EventfdFlags, eventfd};
use serde_json::{Value, json};

use super::refusal::Refusal;
use super::shape::Write;
use super::wire;

/// A client that has so many bytes of events to read is cut off.
const MOST_WAITING: usize = 1 << 20;

/// What is on its way to one client. Its thread sends it.
pub(super) struct Outgoing {
    /// Readable when its thread has something to look at.
    pub(super) wake: OwnedFd,
    state: Mutex<State>,
    /// It is the server's own: what it is told is never held back.
    own: bool,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) bytes: Vec<u8>,
    /// Whether it wants events.
    pub(super) negotiated: bool,
    /// Whether it is to be let go.
    pub(super) cut: bool,
    /// The command that is carried out.
    pub(super) under_way: Option<UnderWay>,
    commands: u64,
}

/// A command whose reply is to come.
pub(super) struct UnderWay {
    number: u64,
    /// What is replied if no reply comes by then.
    pub(super) otherwise: Option<(Instant, Value)>,
}

impl Outgoing {
    pub(super) fn new() -> std::io::Result<Arc<Outgoing>> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Arc::new(Outgoing { wake, state: Mutex::default(), own: false }))
    }

    /// Of commands of the server itself.
    pub(super) fn of_server() -> std::io::Result<Arc<Outgoing>> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Arc::new(Outgoing { wake, state: Mutex::default(), own: true }))
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forget that there was something to look at.
    pub(super) fn awake(&self) {
        // It fails only where nothing was told.
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
    }

    fn ring(&self) {
        // It fails only where the count is full, and then it is readable.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Begin a command; what replies to it.
    pub(super) fn begin(self: &Arc<Self>, id: Option<Value>) -> RawReply {
        let mut state = self.state();
        state.commands += 1;
        let number = state.commands;
        state.under_way = Some(UnderWay { number, otherwise: None });
        RawReply { to: self.clone(), number, id, given: false }
    }

    /// Reply as was said for the case that nobody else does by now.
    pub(super) fn give_up_waiting(&self) {
        let mut state = self.state();
        let due = |under_way: &mut UnderWay| {
            let (at, _) = under_way.otherwise.as_ref()?;
            if *at > Instant::now() { None } else { under_way.otherwise.take() }
        };
        if let Some((_, value)) = state.under_way.as_mut().and_then(due) {
            state.under_way = None;
            state.bytes.extend(wire::line(&value));
        }
    }
}

thread_local! {
    /// What this thread is about to tell, while it holds that back.
    static HELD_BACK: RefCell<Option<Vec<Held>>> = const { RefCell::new(None) };
}

/// Something that clients are told, once what it tells of is written down; or why that could not be.
pub(crate) struct Held(Tell);

type Tell = Box<dyn FnOnce(Option<&str>) + Send>;

impl Held {
    /// Tell it.
    pub(crate) fn tell(self, not_kept: Option<&str>) {
        (self.0)(not_kept);
    }
}

/// Hold back what this thread tells from now on.
pub(crate) fn hold_back() {
    HELD_BACK.set(Some(vec![]));
}

/// Hold back nothing more; what was.
pub(crate) fn let_go() -> Vec<Held> {
    HELD_BACK.take().unwrap_or_default()
}

/// Tell it now, unless this thread holds that back.
fn tell(what: impl FnOnce(Option<&str>) + Send + 'static) {
    let now = HELD_BACK.with_borrow_mut(|held| match held {
        None => Some(what),
        Some(held) => {
            held.push(Held(Box::new(what)));
            None
        }
    });
    if let Some(what) = now {
        what(None);
    }
}

/// Replies to one command, whatever the answer is.
pub(super) struct RawReply {
    to: Arc<Outgoing>,
    number: u64,
    id: Option<Value>,
    given: bool,
}

impl RawReply {
    pub(super) fn give(mut self, result: Result<Value, Refusal>) {
        self.send(result);
    }

    fn send(&mut self, result: Result<Value, Refusal>) {
        self.given = true;
        let (to, number, id) = (self.to.clone(), self.number, self.id.take());
        let own = self.to.own;
        let send = move |not_kept: Option<&str>| {
            let result = match not_kept {
                Some(why) if result.is_ok() => Err(Refusal::new(why)),
                _ => result,
            };
            let value = reply(id.as_ref(), result);
            let mut state = to.state();
            if state.under_way.as_ref().is_some_and(|it| it.number == number) {
                state.under_way = None;
                state.bytes.extend(wire::line(&value));
                drop(state);
                to.ring();
            }
        };
        if own { send(None) } else { tell(send) }
    }
}

/// What is sent to who sent a command of that id.
fn reply(id: Option<&Value>, result: Result<Value, Refusal>) -> Value {
    let mut value = match result {
        Ok(answer) => json!({ "return": answer }),
        Err(refusal) => json!({ "error": refusal.into_value() }),
    };
    if let Some(id) = id {
        value["id"] = id.clone();
    }
    value
}

impl Drop for RawReply {
    fn drop(&mut self) {
        if !self.given {
            self.send(Err(Refusal::new("the server ends, or could not end the command")));
        }
    }
}

/// Replies to one command, from any thread, now or later. Until it does the client's next command waits; where it is
/// dropped the client is told that the command failed.
pub(crate) struct Reply<A> {
    raw: RawReply,
    answer: PhantomData<fn(A)>,
}

impl<A: Write> Reply<A> {
    pub(super) fn new(raw: RawReply) -> Reply<A> {
        Reply { raw, answer: PhantomData }
    }

    /// Reply.
    pub(crate) fn give(self, result: Result<A, Refusal>) {
        self.raw.give(result.map(|answer| answer.write().unwrap_or_default()));
    }

    /// Reply so after a while where nobody has replied by then; what is replied later is for nobody.
    pub(crate) fn give_after(&self, after: Duration, answer: A) {
        let value = reply(self.raw.id.as_ref(), Ok(answer.write().unwrap_or_default()));
        let mut state = self.raw.to.state();
        if let Some(under_way) = &mut state.under_way {
            if under_way.number == self.raw.number {
                under_way.otherwise = Some((Instant::now() + after, value));
            }
        }
        drop(state);
        self.raw.to.ring();
    }
}

/// An event that clients are told of.
pub(crate) trait Told: Write {
    /// Its name.
    const NAME: &'static str;
}

/// Tells all clients of events, from any thread. Cheap to clone.
#[derive(Clone, Default)]
pub(crate) struct Events(Arc<Mutex<Vec<Weak<Outgoing>>>>);

impl Events {
    /// Tell all who have negotiated. Who does not read is cut off.
    pub(crate) fn tell<E: Told>(&self, event: E) {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let line = wire::line(&json!({
            "event": E::NAME,
            "data": event.write().unwrap_or_default(),
            "timestamp": { "seconds": since.as_secs(), "microseconds": since.subsec_micros() },
        }));
        let clients = self.clone();
        tell(move |_| clients.send(&line));
    }

    fn send(&self, line: &[u8]) {
        self.clients().retain(|client| {
            let Some(client) = client.upgrade() else { return false };
            let mut state = client.state();
            if state.negotiated && !state.cut {
                if state.bytes.len() + line.len() > MOST_WAITING {
                    tracing::warn!(
                        "a control client does not read what it is told, and is cut off"
                    );
                    state.bytes = vec![];
                    state.cut = true;
                } else {
                    state.bytes.extend(line);
                }
                drop(state);
                client.ring();
            }
            true
        });
    }

    pub(super) fn add(&self, client: &Arc<Outgoing>) {
        self.clients().push(Arc::downgrade(client));
    }

    fn clients(&self) -> MutexGuard<'_, Vec<Weak<Outgoing>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::shape::{Done, answer};

    answer! {
        /// An event.
        struct Tick { "text" text: String }
    }
    impl Told for Tick {
        const NAME: &'static str = "TICK";
    }

    fn text(client: &Outgoing) -> String {
        String::from_utf8(std::mem::take(&mut client.state().bytes)).expect("ASCII")
    }

    #[test]
    fn a_command_has_one_reply_whoever_gives_it() {
        let client = Outgoing::new().expect("an eventfd");
        client.begin(Some(json!(7))).give(Ok(json!({})));
        assert_eq!(text(&client), "{\"id\":7,\"return\":{}}\r\n");
        drop(client.begin(None));
        assert!(text(&client).starts_with("{\"error\":{\"class\":\"GenericError\""));
        let reply = Reply::<Done>::new(client.begin(Some(json!("a"))));
        reply.give_after(Duration::ZERO, Done {});
        client.give_up_waiting();
        assert_eq!(text(&client), "{\"id\":\"a\",\"return\":{}}\r\n");
        let _next = client.begin(Some(json!("b")));
        reply.give(Ok(Done {}));
        assert_eq!((text(&client), client.state().under_way.is_some()), (String::new(), true));
    }

    #[test]
    fn who_does_not_read_is_cut_off_and_no_other() {
        let (events, clients) =
            (Events::default(), [(); 3].map(|()| Outgoing::new().expect("one")));
        clients.iter().for_each(|client| events.add(client));
        clients[..2].iter().for_each(|client| client.state().negotiated = true);
        for _ in 0..=MOST_WAITING / 1024 {
            events.tell(Tick { text: "x".repeat(1024) });
            assert!(text(&clients[0]).starts_with("{\"data\":{\"text\":\"xx"));
        }
        let cut = clients.each_ref().map(|client| client.state().cut);
        assert_eq!(cut, [false, true, false]);
        assert!(text(&clients[1]).is_empty() && text(&clients[2]).is_empty());
    }
}
