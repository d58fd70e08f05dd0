//! A client's thread: a ring, a clock, the handshake, and then its connection.

use std::cell::{Cell, OnceCell, RefCell};
use std::ffi::CString;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

use ringtap_io::{File, Io, Op, OpenFile, Panic, Tasks};
use ringtap_vbd::Vbd;
use rustix::net::Shutdown;

use super::alarm::Alarm;
use super::budget::Share;
use super::connection::{Accepted, Connection, REST, close};
use super::credentials::Tls;
use super::exports::{Exports, Offered};
use super::handover::{Counted, Handover, Session, ShakingHands, copy};
use super::handshake::{Choice, Handshake, Refusal, Security, Step};
use super::input::Input;
use super::limits::Limits;
use super::peer::Peer;
use super::tls::{self, Sealer};
use crate::driver::{self, Source, Turn};

/// A client that has just come.
pub(super) struct Client {
    pub(super) socket: OwnedFd,
    pub(super) peer: Peer,
    pub(super) alarm: Arc<Alarm>,
    pub(super) exports: Arc<Exports>,
    /// Why it may not go on.
    pub(super) refusal: Option<Refusal>,
    pub(super) limits: Limits,
    pub(super) share: Share,
    pub(super) tls: Tls,
    pub(super) handover: Arc<Handover>,
    /// It has not chosen yet.
    pub(super) shaking_hands: ShakingHands,
    /// What was agreed on with another server.
    pub(super) session: Option<Session>,
}

/// Serve one client on the calling thread, from the greeting to the last reply.
pub(super) fn run(client: Client) -> io::Result<()> {
    let Client { socket, peer, alarm, exports, refusal, limits, share, tls, .. } = client;
    let (handover, session) = (client.handover, client.session);
    let shaking_hands = client.shaking_hands;
    // Left last: whoever waits for that may close the image.
    let user = Rc::new(OnceCell::new());
    let mut tasks = Tasks::new(ringtap_io::reactor()?);
    let socket = Arc::new(OpenFile::new(socket));
    let io = tasks.io().clone();
    let current = Rc::new(Current::default());
    tasks.spawn(watch(io.clone(), alarm.clone(), socket.clone(), current.clone()));
    alarm.set_unless_stopped(limits.handshake);
    let outcome = Rc::new(RefCell::new(None));
    let (keep, used) = (outcome.clone(), user.clone());
    let (watched, ringing, asked) = (current.clone(), alarm.clone(), socket.clone());
    tasks.spawn(async move {
        let end = async {
            let mut input = Input::new(&io).map_err(io::Error::from_raw_os_error)?;
            let shaking_hands = shaking_hands;
            let begun = session.as_ref().map(|session| session.choice(&exports));
            if let Some(session) = &session {
                let begins = input.begin_with(&session.input);
                begins.map_err(|_| io::Error::other("too much has come of its requests"))?;
            }
            // Its descriptor is another now.
            drop(session);
            // No disk is kept open by one who has not chosen it.
            let (facts, users): (Vec<_>, Vec<_>) = exports
                .all()
                .iter()
                .map(|one| (exports.facts(&one.export), one.users.clone()))
                .unzip();
            let security = match tls {
                Tls::Off => Security::Plain,
                Tls::On(_) => Security::Offered,
                Tls::Require(_) => Security::Required,
            };
            let handshake = Handshake::new(facts, refusal).with_security(security);
            let line = Line { io: &io, socket: socket.handle(), sealer: None };
            let chosen = match begun {
                Some(begun) => begun.map(|(choice, offered)| (choice, None, Some(offered))),
                None => {
                    let chosen = shake_hands(handshake, line, &mut input, &tls, peer).await;
                    // It may have been withdrawn while the client chose it.
                    chosen.map(|(choice, sealer)| {
                        let of = users.get(choice.export).and_then(|users| exports.of(users));
                        (choice, sealer, of)
                    })
                }
            };
            let Some((choice, sealer, offered)) = chosen else { return Ok(()) };
            drop(shaking_hands);
            let _sealed = sealer.as_ref().map(|_| Counted::new(&handover.sealed));
            let Some(Offered { export, users }) = offered else { return Ok(()) };
            let Some(counted) = users.enter(&alarm) else { return Ok(()) };
            let _ = used.set(counted);
            // Every task of the thread serves this one disk from now on.
            let _disk = export.vbd.span().clone().entered();
            name_thread(&export.vbd.thread_name("nbd"));
            export.vbd.place_thread();
            tracing::debug!(export = export.name, "an NBD client has its export");
            let (socket, vbd) = (socket.clone(), export.vbd.fork());
            vbd.serves("nbd", peer.to_string(), 0);
            let kept = socket.clone();
            let accepted = Accepted { vbd, choice, socket, peer, alarm, limits, share, sealer };
            let left = serve(io.clone(), accepted, input, &current).await?;
            let Some(input) = left else { return Ok(()) };
            let Choice { structured, extended, contexts, .. } = choice;
            let (export, contexts) = (export.name, contexts.bits());
            let socket = copy(&*kept)?;
            handover.leave(Session { socket, export, structured, extended, contexts, input });
            Ok(())
        };
        let end = end.await;
        if !current.goes_on.get() {
            close(&socket, Shutdown::Both);
        }
        keep.replace(Some(end));
    });
    let driven = Panic::catch(|| {
        let io = tasks.io().clone();
        driver::run(&Received { io, outcome: &outcome, current: &watched }, &mut tasks)?;
        watched.over.set(true);
        ringing.ring();
        tasks.run()
    });
    match driven {
        Ok(end) => end.and_then(|()| outcome.take().unwrap_or(Ok(()))),
        Err(panic) => {
            refuse(&mut tasks, &watched, panic);
            close(&asked, Shutdown::Both);
            Err(io::Error::other("its thread panicked"))
        }
    }
}

/// A panic of this thread's own stops the disk that the client has chosen. What slots were given fails: they
/// answer when their operations have ended, as far as the client takes that at once.
fn refuse(tasks: &mut Tasks, current: &Current, panic: Panic) {
    let connection = current.connection.take();
    let Some(connection) = connection else {
        tracing::error!("an NBD handshake ended in a panic: {panic}");
        return;
    };
    connection.vbd.health().fail(panic);
    let answered = Panic::catch(|| {
        tasks.cancel_all()?;
        tasks.run_ready();
        tasks.turn(false)
    });
    if let Ok(Err(error)) = answered {
        tracing::error!("requests in flight have no answer: {error}");
    }
}

/// What a client says is received by a task of its own.
struct Received<'a> {
    io: Io,
    outcome: &'a RefCell<Option<io::Result<()>>>,
    current: &'a Current,
}

impl Source for Received<'_> {
    const ASKS: bool = true;

    fn turn(&self, tasks: &mut Tasks) -> io::Result<Turn> {
        tasks.run_ready();
        Ok(if self.outcome.borrow().is_some() { Turn::Over } else { Turn::Done })
    }

    /// The alarm and the next request are always waited for; what is more is in flight on the disk.
    fn in_flight(&self) -> usize {
        self.io.in_flight().saturating_sub(2)
    }

    fn may_sleep(&self, _: &mut Tasks) -> bool {
        true
    }

    fn with_vbd(&self, look: impl FnOnce(&Vbd)) {
        if let Some(connection) = &*self.current.connection.borrow() {
            look(&connection.vbd);
        }
    }
}

/// What the alarm rings for.
#[derive(Default)]
struct Current {
    connection: RefCell<Option<Rc<Connection>>>,
    over: Cell<bool>,
    /// Whether the client goes on elsewhere.
    goes_on: Cell<bool>,
}

/// Whenever the alarm rings, see what for.
async fn watch(io: Io, alarm: Arc<Alarm>, socket: Arc<OpenFile>, current: Rc<Current>) {
    loop {
        io.run(Op::ReadEvent { file: alarm.file() }).await;
        if current.over.get() {
            return;
        }
        let connection = current.connection.borrow().clone();
        match connection {
            Some(connection) => connection.alarm_rang(),
            None if current.goes_on.get() => {}
            None => {
                let told = alarm.is_stopped() || alarm.is_leaving();
                let why = if told { "the server stops" } else { "it takes too long" };
                tracing::debug!("an NBD handshake ended: {why}");
                close(&socket, Shutdown::Both);
            }
        }
    }
}

async fn serve(
    io: Io,
    accepted: Accepted,
    input: Input,
    current: &Current,
) -> io::Result<Option<Vec<u8>>> {
    let alarm = accepted.alarm.clone();
    let at_failure = alarm.clone();
    let _listening = accepted.vbd.health().when_failed(move |_| at_failure.stop());
    let connection = Connection::new(io, accepted, &input)?;
    *current.connection.borrow_mut() = Some(connection.clone());
    alarm.set_unless_stopped(REST);
    let left = connection.serve(input).await;
    current.goes_on.set(left.is_some());
    current.connection.borrow_mut().take();
    Ok(left)
}

/// Name the calling thread, which began before it was known what it is for.
fn name_thread(name: &str) {
    if let Ok(name) = CString::new(name) {
        // What it is called is of no consequence to its work.
        let _ = rustix::thread::set_name(&name);
    }
}

/// How answers to options go to the client.
struct Line<'a> {
    io: &'a Io,
    socket: File,
    sealer: Option<Sealer>,
}

impl Line<'_> {
    async fn send(&mut self, bytes: &[u8]) -> Option<()> {
        let Some(sealer) = &mut self.sealer else {
            return tls::send_plain(self.io, self.socket, bytes).await.ok();
        };
        let since = Cell::new(None);
        sealer.push(self.io, self.socket, bytes, &since).await.ok()?;
        sealer.flush(self.io, self.socket, &since).await.ok()
    }
}

async fn shake_hands(
    mut handshake: Handshake,
    mut line: Line<'_>,
    input: &mut Input,
    tls: &Tls,
    peer: Peer,
) -> Option<(Choice, Option<Sealer>)> {
    let mut output = handshake.greeting().to_vec();
    loop {
        if !output.is_empty() {
            line.send(&output).await?;
            output.clear();
        }
        let (used, step) = handshake.advance(input.bytes(), &mut output);
        input.consume(used);
        match step {
            Step::Again => {}
            Step::More => input.fill(line.io, line.socket).await.ok()?,
            Step::StartTls => {
                line.send(&output).await?;
                output.clear();
                let (Tls::On(credentials) | Tls::Require(credentials)) = tls else { return None };
                // Whatever came with the option is part of TLS, and never taken for an option.
                let bytes = input.bytes();
                let agreed = tls::agree(line.io, line.socket, credentials, peer, bytes).await;
                let ((opener, sealer), len) = (agreed?, bytes.len());
                input.consume(len);
                (input.opener, line.sealer) = (Some(opener), Some(sealer));
            }
            Step::Transmission(choice) => {
                line.send(&output).await?;
                return Some((choice, line.sealer));
            }
            Step::Close(why) => {
                tracing::debug!("an NBD handshake ended: {why}");
                line.send(&output).await?;
                return None;
            }
        }
    }
}
