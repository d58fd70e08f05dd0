//! The server's side: what is on its way there, what it works at, and what is on its way back.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use ringtap_io::{File, Io, Op, Tasks};

use super::client::{Parcel, Work};

/// A request that travels.
struct Travels {
    parcel: Parcel,
    connection: u64,
    due: u64,
}

/// An answer that travels.
pub(super) struct Answer {
    pub(super) number: u64,
    pub(super) connection: u64,
    pub(super) result: i32,
    pub(super) data: Vec<u8>,
    /// None where it has just been given.
    due: Option<u64>,
}

/// What one process of the server has to do.
#[derive(Default)]
pub(super) struct Desk {
    incoming: RefCell<Vec<Travels>>,
    at_work: Cell<usize>,
    outgoing: RefCell<Vec<Answer>>,
}

/// One that has arrived.
pub(super) struct Arrived {
    parcel: Parcel,
    connection: u64,
}

impl Desk {
    pub(super) fn send(&self, parcel: Parcel, connection: u64, due: u64) {
        self.incoming.borrow_mut().push(Travels { parcel, connection, due });
    }

    pub(super) fn arrived(&self, now: u64) -> Vec<Arrived> {
        let (there, left) = self.incoming.take().into_iter().partition(|one| one.due <= now);
        self.incoming.replace(left);
        let there: Vec<Travels> = there;
        let arrived = |one: Travels| Arrived { parcel: one.parcel, connection: one.connection };
        there.into_iter().map(arrived).collect()
    }

    /// The connection is gone: of what was on its way by it some is lost.
    pub(super) fn lose_some(&self, rng: &mut fastrand::Rng) {
        self.incoming.borrow_mut().retain(|_| rng.bool());
    }

    /// Whether all that came has been carried out.
    pub(super) fn is_idle(&self) -> bool {
        self.at_work.get() == 0 && self.incoming.borrow().is_empty()
    }

    pub(super) fn answers(&self, now: u64, rng: &mut fastrand::Rng) -> Vec<Answer> {
        let mut all = self.outgoing.take();
        for answer in &mut all {
            // Some are late.
            let most = if rng.u8(0..16) == 0 { 300 } else { 12 };
            answer.due.get_or_insert_with(|| now + rng.u64(0..most));
        }
        let is_there = |answer: &Answer| answer.due.is_some_and(|due| due <= now);
        let (there, left) = all.into_iter().partition(is_there);
        self.outgoing.replace(left);
        there
    }

    fn answer(&self, number: u64, connection: u64, result: i32, data: Vec<u8>) {
        self.outgoing.borrow_mut().push(Answer { number, connection, result, data, due: None });
    }

    /// Begin with one.
    pub(super) fn take(
        self: &Rc<Desk>,
        tasks: &Tasks,
        file: File,
        arrived: Arrived,
        fails: bool,
        early: bool,
        seed: u64,
    ) {
        let Arrived { parcel, connection } = arrived;
        let (desk, io) = (self.clone(), tasks.io().clone());
        let early = early && !matches!(parcel.work, Work::Read { .. });
        if early {
            self.answer(parcel.number, connection, in_full(&parcel.work), vec![]);
        }
        self.at_work.set(self.at_work.get() + 1);
        tasks.io().spawn(async move {
            let mut rng = fastrand::Rng::with_seed(seed);
            let most = if rng.u8(0..8) == 0 { 3_000_000 } else { 100_000 };
            io.sleep(rng.u64(0..most)).await;
            let (mut result, mut data) = (-libc::EIO, vec![]);
            // One that fails was carried out or not.
            if !fails || rng.bool() {
                let end = carry_out(&io, file, &parcel.work, &mut rng).await;
                if !fails {
                    (result, data) = end;
                }
            }
            if !early {
                desk.answer(parcel.number, connection, result, data);
            }
            desk.at_work.set(desk.at_work.get() - 1);
        });
    }
}

fn in_full(work: &Work) -> i32 {
    match work {
        Work::Write { data, .. } => data.len() as i32,
        _ => 0,
    }
}

/// Transfers may stop short, at a multiple of this.
const GRAIN: usize = 4096;

fn some_of(rng: &mut fastrand::Rng, len: usize) -> usize {
    match rng.u8(0..16) {
        0 if len > GRAIN => rng.usize(1..=len / GRAIN) * GRAIN,
        _ => len,
    }
}

async fn carry_out(io: &Io, file: File, work: &Work, rng: &mut fastrand::Rng) -> (i32, Vec<u8>) {
    let error = |errno: i32| (-errno, vec![]);
    let op = match work {
        Work::Read { offset, len } => {
            let len = some_of(rng, *len);
            let bytes = match io.buffer(len) {
                Ok(bytes) => bytes,
                Err(errno) => return error(errno),
            };
            return match io.read(file, *offset, bytes.mem()).await {
                Ok(read) => (read as i32, bytes.bytes()[..read].to_vec()),
                Err(errno) => error(errno),
            };
        }
        Work::Write { offset, data, durable } => {
            let len = some_of(rng, data.len());
            let mut bytes = match io.buffer(len) {
                Ok(bytes) => bytes,
                Err(errno) => return error(errno),
            };
            bytes.bytes_mut().copy_from_slice(&data[..len]);
            return match io.write(file, *offset, bytes.mem(), *durable).await {
                Ok(()) => (len as i32, vec![]),
                Err(errno) => error(errno),
            };
        }
        Work::Sync => Op::Sync { file },
        Work::Forget { .. } if rng.bool() => return (0, vec![]),
        Work::Zero { offset, len, keep_space: true } => {
            Op::ZeroRange { file, offset: *offset, len: *len }
        }
        Work::Zero { offset, len, .. } | Work::Forget { offset, len } => {
            Op::PunchHole { file, offset: *offset, len: *len }
        }
    };
    match io.to_the_end(op).await {
        Ok(()) => (0, vec![]),
        Err(errno) => error(errno),
    }
}
