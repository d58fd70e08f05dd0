//! The reactor: operations in flight, in any order that the seed chooses.

use std::io;

use ringtap_io::{File, Key, Mem, Op, Reactor, Time};

use crate::disk::{Disk, State, Thing};
use crate::medium::Piece;
use crate::versions::OpId;
use crate::watched::Watched;

/// How often the disk is awkward without being broken, as odds of one in so many; 0 is never.
#[derive(Clone, Copy, Debug)]
pub struct Chances {
    /// Transfers that stop short.
    pub short: u32,
    /// Operations that give EINTR, having done nothing.
    pub interrupted: u32,
    /// Reads and writes that give EAGAIN, having done nothing.
    pub again: u32,
}

impl Default for Chances {
    fn default() -> Chances {
        Chances { short: 16, interrupted: 64, again: 128 }
    }
}

impl Chances {
    /// A disk that moves all bytes at the first call.
    pub const NEVER: Chances = Chances { short: 0, interrupted: 0, again: 0 };
}

/// A way of being broken that a test must notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lie {
    /// A sync succeeds and makes nothing stable.
    SyncDoesNothing,
    /// A durable write is like any other.
    DurableIsNot,
    /// A write completes before its bytes are anywhere.
    EarlyWrites,
    /// A punched hole or zeroed range completes, and nothing happened.
    ZeroDoesNothing,
}

/// The power went. The tasks of this reactor may only be dropped now.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the power of the simulated disk was cut")]
pub struct PowerCut;

/// Whether a reactor's error is a [`PowerCut`].
pub fn is_power_cut(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|inner| inner.is::<PowerCut>())
}

/// A turn that should wait, and nothing is in flight that could ever complete.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error(
    "tasks wait and nothing is in flight that could wake them; operations that wait for a signal or \
     for bytes: {waiting}"
)]
pub struct Stuck {
    /// Operations that wait for a signal or for bytes that nobody will send.
    pub waiting: usize,
}

/// Whether a reactor's error is [`Stuck`].
pub fn is_stuck(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|inner| inner.is::<Stuck>())
}

/// An operation in flight.
pub(crate) struct Flight {
    /// None where its completion was given already: it may only go on changing the medium.
    pub(crate) key: Option<Key>,
    pub(crate) id: OpId,
    pub(crate) what: What,
    /// Sectors not yet read or changed.
    pub(crate) left: Vec<Piece>,
    /// Sectors changed.
    pub(crate) touched: Vec<u64>,
    pub(crate) result: i32,
}

pub(crate) enum What {
    Read {
        file: File,
        mem: Mem,
    },
    Write {
        file: File,
        data: Data,
        durable: bool,
    },
    Zero {
        file: File,
        keep_space: bool,
    },
    Reserve {
        file: File,
    },
    SetLen {
        file: File,
        len: u64,
    },
    Sync {
        file: File,
        mark: u64,
    },
    Timeout {
        until: Time,
    },
    ReadEvent {
        file: File,
    },
    SignalEvent {
        file: File,
    },
    Recv {
        file: File,
        mem: Mem,
    },
    Send {
        file: File,
        mem: Mem,
    },
    PollIn {
        file: File,
    },
    /// Its result is all there is to it.
    Nothing,
}

pub(crate) enum Data {
    There(Mem),
    Copied(Vec<u8>),
}

impl Data {
    fn piece(&self, piece: &Piece) -> Vec<u8> {
        let len = piece.within.len();
        match self {
            Data::There(mem) => {
                let mut bytes = vec![0; len];
                mem.window(piece.at, len).copy_to(&mut bytes);
                bytes
            }
            Data::Copied(bytes) => bytes[piece.at..piece.at + len].to_vec(),
        }
    }
}

type Hook = Box<dyn FnMut(&Disk)>;

/// A [`Reactor`] on a [`Disk`]: what it does follows from the seed alone. Several may share a disk.
pub struct Sim {
    pub(crate) disk: Disk,
    pub(crate) rng: fastrand::Rng,
    pub(crate) chances: Chances,
    pub(crate) lie: Option<Lie>,
    hook: Option<Hook>,
    pub(crate) flights: Vec<Flight>,
    pub(crate) now: Time,
    told: bool,
    watched: Watched,
}

impl Sim {
    /// A reactor on this disk.
    pub fn new(disk: &Disk, seed: u64) -> Sim {
        Sim {
            disk: disk.clone(),
            rng: fastrand::Rng::with_seed(seed),
            chances: Chances::default(),
            lie: None,
            hook: None,
            flights: Vec::new(),
            now: 0,
            told: false,
            watched: Watched::default(),
        }
    }

    /// How often transfers stop short and the like.
    pub fn chances(mut self, chances: Chances) -> Sim {
        self.chances = chances;
        self
    }

    /// Be broken in this way.
    pub fn lie(mut self, lie: Lie) -> Sim {
        self.lie = Some(lie);
        self
    }

    /// Call `hook` in every turn, when the submitted operations have begun and none has completed,
    /// with a disk whose outcomes are those of a power cut at that moment: ask it for
    /// [`Disk::each_outcome`] and [`Disk::after_power_cut`]. The run itself goes on.
    pub fn at_every_turn(mut self, hook: impl FnMut(&Disk) + 'static) -> Sim {
        self.hook = Some(Box::new(hook));
        self
    }

    /// Whether nothing is in flight.
    #[cfg(feature = "shuttle")]
    pub(crate) fn is_idle(&self) -> bool {
        self.flights.is_empty()
    }

    /// Give the medium what every operation in flight might still have written.
    fn spill(&self, state: &mut State) {
        for flight in &self.flights {
            for piece in &flight.left {
                apply(state, flight, piece);
            }
        }
    }

    /// End everything in flight without effect; `done` gets it with this result.
    fn abandon(&mut self, done: &mut Vec<(Key, i32)>, result: i32) {
        for flight in self.flights.drain(..) {
            done.extend(flight.key.map(|key| (key, result)));
        }
    }

    /// Carry on with one operation; true when it has done all it does.
    fn advance(&mut self, state: &mut State, flight: &mut Flight, pieces: usize) -> bool {
        for _ in 0..pieces.min(flight.left.len()) {
            let piece = flight.left.swap_remove(self.rng.usize(0..flight.left.len()));
            apply(state, flight, &piece);
            flight.touched.push(piece.sector);
        }
        flight.left.is_empty() && !self.is_blocked(state, flight)
    }

    fn is_blocked(&self, state: &mut State, flight: &Flight) -> bool {
        match &flight.what {
            What::Timeout { until } => *until > self.now,
            What::ReadEvent { file } => match state.thing(*file) {
                Some(Thing::Event(event)) => event.count == 0,
                _ => false,
            },
            What::Recv { mem, .. } if mem.is_empty() => false,
            What::Recv { file, .. } | What::PollIn { file } => match state.thing(*file) {
                Some(Thing::Socket(socket)) => {
                    let incoming = socket.incoming();
                    incoming.bytes.is_empty() && !incoming.closed
                }
                _ => false,
            },
            _ => false,
        }
    }

    /// The operation's last effect, and its completion.
    fn finish(&mut self, state: &mut State, flight: Flight, done: &mut Vec<(Key, i32)>) {
        let mut result = flight.result;
        match flight.what {
            What::Write { file, durable, .. } => {
                let (mark, fails) = (state.completed, state.forgetful && result == -libc::EIO);
                if let Some(medium) = state.medium(file).filter(|_| durable && fails) {
                    // It was told of what all before it have lost.
                    medium.forget(mark);
                }
                let durable = durable && result >= 0 && self.lie != Some(Lie::DurableIsNot);
                settle(state, file, flight.id, &flight.touched, durable);
            }
            What::Zero { file, .. } | What::Reserve { file } => {
                settle(state, file, flight.id, &flight.touched, false);
            }
            What::SetLen { file, len } => {
                let id = flight.id;
                let touched = match state.medium(file) {
                    Some(medium) if result >= 0 => medium.set_len(id, len),
                    _ => Vec::new(),
                };
                settle(state, file, id, &touched, false);
            }
            What::Sync { file, mark } => {
                let forgetful = state.forgetful;
                if let Some(medium) = state.medium(file) {
                    match result {
                        0 if self.lie == Some(Lie::SyncDoesNothing) => {}
                        0 => medium.sync(mark),
                        _ if forgetful && result == -libc::EIO => medium.forget(mark),
                        _ => {}
                    }
                }
            }
            What::ReadEvent { file } => match state.thing(file) {
                Some(Thing::Event(event)) => event.count = 0,
                _ => result = -libc::EBADF,
            },
            What::SignalEvent { file } => match state.thing(file) {
                Some(Thing::Event(event)) => event.count += 1,
                _ => result = -libc::EBADF,
            },
            What::Recv { file, mem } => result = self.receive(state, file, mem),
            What::Send { file, mem } => result = self.send(state, file, mem),
            What::Read { .. } | What::Timeout { .. } | What::PollIn { .. } | What::Nothing => {}
        }
        done.extend(flight.key.map(|key| (key, result)));
    }

    fn receive(&mut self, state: &mut State, file: File, mem: Mem) -> i32 {
        let Some(Thing::Socket(socket)) = state.thing(file) else { return -libc::EBADF };
        let mut incoming = socket.incoming();
        let most = incoming.bytes.len().min(mem.len());
        let len = self.shortened(0, most, 1);
        let bytes: Vec<u8> = incoming.bytes.drain(..len).collect();
        mem.copy_from(&bytes) as i32
    }

    fn send(&mut self, state: &mut State, file: File, mem: Mem) -> i32 {
        let Some(Thing::Socket(socket)) = state.thing(file) else { return -libc::EBADF };
        let mut outgoing = socket.outgoing();
        if outgoing.closed {
            return -libc::EPIPE;
        }
        let mut bytes = vec![0; self.shortened(0, mem.len(), 1)];
        mem.copy_to(&mut bytes);
        outgoing.bytes.extend(&bytes);
        bytes.len() as i32
    }

    /// One pass over everything in flight: some of it goes on, some completes.
    fn pass(&mut self, state: &mut State, done: &mut Vec<(Key, i32)>) {
        let mut flights = std::mem::take(&mut self.flights);
        self.rng.shuffle(&mut flights);
        for mut flight in flights {
            let pieces = match self.rng.u8(0..4) {
                0 => 0,
                1 => self.rng.usize(0..=flight.left.len()),
                _ => usize::MAX,
            };
            if pieces > 0 && self.advance(state, &mut flight, pieces) && self.rng.bool() {
                self.finish(state, flight, done);
            } else {
                self.flights.push(flight);
            }
        }
    }

    /// Complete one operation that can; let time pass where all wait for it. False where all that is
    /// in flight waits for something else.
    fn force(&mut self, state: &mut State, done: &mut Vec<(Key, i32)>) -> bool {
        let ready = |flight: &Flight| flight.key.is_some() && !self.is_blocked(state, flight);
        let ready = self.flights.iter().position(ready).or_else(|| {
            let timeouts = self.flights.iter().enumerate().filter_map(|(index, flight)| {
                let What::Timeout { until } = flight.what else { return None };
                Some((until, index))
            });
            let (until, index) = timeouts.min()?;
            self.now = self.now.max(until);
            Some(index)
        });
        let Some(index) = ready else { return false };
        let mut flight = self.flights.swap_remove(index);
        self.advance(state, &mut flight, usize::MAX);
        self.finish(state, flight, done);
        true
    }
}

impl Reactor for Sim {
    fn turn(
        &mut self,
        submit: &mut Vec<(Key, Op)>,
        done: &mut Vec<(Key, i32)>,
        wait: bool,
    ) -> io::Result<()> {
        let disk = self.disk.clone();
        let mut state = disk.lock();
        if state.cut {
            self.spill(&mut state);
            self.abandon(done, -libc::EIO);
            done.extend(submit.drain(..).map(|(key, _)| (key, -libc::EIO)));
            let told = std::mem::replace(&mut self.told, true);
            return if told { Ok(()) } else { Err(io::Error::other(PowerCut)) };
        }
        state.turns += 1;
        self.now += self.rng.u64(1_000..20_000);
        self.watched.begun(&mut state, submit);
        for (key, op) in submit.drain(..) {
            state.stamp(&op);
            self.begin(&mut state, key, op, done);
        }
        if let Some(mut hook) = self.hook.take() {
            let copy = Disk::copy(&state);
            self.spill(&mut copy.lock());
            drop(state);
            hook(&copy);
            self.hook = Some(hook);
            state = disk.lock();
        }
        if state.cut_at.is_some_and(|turn| state.turns >= turn) {
            self.spill(&mut state);
            state.cut = true;
            self.told = true;
            self.abandon(done, -libc::EIO);
            return Err(io::Error::other(PowerCut));
        }
        self.pass(&mut state, done);
        while wait && done.is_empty() {
            if !self.force(&mut state, done) {
                // What waits for nothing is ended, so that the tasks can be dropped.
                let waiting = self.flights.iter().filter(|flight| flight.key.is_some()).count();
                self.abandon(done, -libc::ECANCELED);
                return Err(io::Error::other(Stuck { waiting }));
            }
        }
        self.watched.ended(&state, done);
        Ok(())
    }

    /// What waits ends; transfers are past cancelling.
    fn cancel(&mut self, key: Key, _: &mut Vec<(Key, i32)>) -> io::Result<()> {
        let waits = |what: &What| {
            use What::{PollIn, ReadEvent, Recv, Timeout};
            matches!(what, ReadEvent { .. } | Recv { .. } | PollIn { .. } | Timeout { .. })
        };
        let found = self.flights.iter_mut().find(|flight| flight.key == Some(key));
        if let Some(flight) = found.filter(|flight| waits(&flight.what)) {
            (flight.what, flight.result) = (What::Nothing, -libc::ECANCELED);
        }
        Ok(())
    }

    fn now(&self) -> Time {
        self.now
    }
}

/// Read or change one sector.
fn apply(state: &mut State, flight: &Flight, piece: &Piece) {
    match &flight.what {
        What::Read { file, mem } => {
            if let Some(medium) = state.look(*file) {
                let mut bytes = vec![0; piece.within.len()];
                medium.read(piece, &mut bytes);
                mem.window(piece.at, bytes.len()).copy_from(&bytes);
            }
        }
        What::Write { file, data, .. } => {
            if let Some(medium) = state.medium(*file) {
                medium.write(flight.id, piece, &data.piece(piece));
            }
        }
        What::Zero { file, keep_space } => {
            if let Some(medium) = state.medium(*file) {
                medium.zero(flight.id, piece, *keep_space);
            }
        }
        What::Reserve { file } => {
            if let Some(medium) = state.medium(*file) {
                medium.reserve(flight.id, piece);
            }
        }
        _ => {}
    }
}

fn settle(state: &mut State, file: File, id: OpId, sectors: &[u64], durable: bool) {
    state.completed += 1;
    let at = state.completed;
    if let Some(medium) = state.medium(file) {
        medium.complete(id, sectors, at, durable);
    }
}
