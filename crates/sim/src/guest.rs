//! A guest that asks a virtual disk for anything at random and checks what it is told.

use std::cell::{Cell, Ref, RefCell};
use std::collections::VecDeque;
use std::fmt::Debug;
use std::future::Future;
use std::ops::Range;
use std::rc::Rc;

use ringtap_io::{Io, Mem, Tasks};

use crate::{Disk, End, Garbled, Model, SECTOR, Token, Violation, stamp, stamps};

/// A request of a guest. Ranges are sectors of [`SECTOR`] bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ask {
    /// Read the sectors.
    Read(Range<u64>),
    /// Write them; `durable`: with FUA.
    Write {
        /// Which.
        range: Range<u64>,
        /// With FUA.
        durable: bool,
    },
    /// Make them zeros.
    Zero {
        /// Which.
        range: Range<u64>,
        /// Whether their space may be freed.
        unmap: bool,
        /// With FUA.
        durable: bool,
    },
    /// Their content is not needed any more.
    Discard(Range<u64>),
    /// Make stable what was acknowledged.
    Flush,
}

/// A virtual disk under test.
pub trait Device {
    /// Why it failed a request.
    type Error: Debug;

    /// Carry out one request. `mem` is as long as the range of a read or write, else empty.
    fn serve(&self, io: &Io, ask: &Ask, mem: Mem) -> impl Future<Output = Result<(), Self::Error>>;
}

/// What the guest was promised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Promise {
    /// What was acknowledged is stable after a flush, or at once with FUA.
    Flush,
    /// What was acknowledged is stable.
    Writethrough,
    /// Nothing is ever stable.
    Nothing,
}

/// What came back wrong.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Wrong {
    /// A sector holds what it may not hold.
    #[error(transparent)]
    Violation(#[from] Violation),
    /// A sector holds what nobody wrote.
    #[error(transparent)]
    Garbled(#[from] Garbled),
}

/// A request that failed.
#[derive(Clone, Debug)]
pub struct Failure {
    /// What was asked.
    pub ask: Ask,
    /// The device's error.
    pub error: String,
}

struct Inner {
    model: RefCell<Model>,
    promise: Promise,
    asks: RefCell<VecDeque<Ask>>,
    next_value: Cell<u64>,
    wrong: RefCell<Option<Wrong>>,
    failures: RefCell<Vec<Failure>>,
}

/// A guest: it keeps several requests in flight, tells its [`Model`] of them and checks every read.
/// Clones are the same guest.
#[derive(Clone)]
pub struct Guest {
    inner: Rc<Inner>,
}

impl Guest {
    /// A guest of a disk of so many sectors, all zeros.
    pub fn new(sectors: u64, promise: Promise) -> Guest {
        Guest::of(Model::new(sectors), promise, 1)
    }

    fn of(model: Model, promise: Promise, next_value: u64) -> Guest {
        Guest {
            inner: Rc::new(Inner {
                model: RefCell::new(model),
                promise,
                asks: RefCell::default(),
                next_value: Cell::new(next_value),
                wrong: RefCell::default(),
                failures: RefCell::default(),
            }),
        }
    }

    /// The guest as it boots again on what a power cut has left, which must be allowed.
    pub fn after_power_cut(&self, found: &[u8]) -> Result<Guest, Wrong> {
        let values = stamps(found, 0)?;
        self.inner.model.borrow().check_disk_after_cut(&values)?;
        Ok(Guest::of(Model::holding(&values), self.inner.promise, self.inner.next_value.get()))
    }

    /// A guest that boots on whatever disk this is, all of it stable. It writes values from `next_value` on.
    pub fn holding(found: &[u8], promise: Promise, next_value: u64) -> Result<Guest, Wrong> {
        Ok(Guest::of(Model::holding(&stamps(found, 0)?), promise, next_value))
    }

    /// As [`Guest::after_power_cut`], on a disk that has been made larger meanwhile: by zeros.
    pub fn on_larger_disk(&self, found: &[u8], sectors: u64) -> Result<Guest, Wrong> {
        let mut values = stamps(found, 0)?;
        self.inner.model.borrow().check_disk_after_cut(&values)?;
        values.resize(sectors as usize, 0);
        Ok(Guest::of(Model::holding(&values), self.inner.promise, self.inner.next_value.get()))
    }

    /// The guest as it lives on after its server was killed: it remembers what was acknowledged.
    pub fn after_kill(&self) -> Guest {
        let mut model = self.inner.model.borrow().clone();
        model.fail_all();
        Guest::of(model, self.inner.promise, self.inner.next_value.get())
    }

    /// Whether this is what a guest that lives on may find on its disk.
    pub fn may_find(&self, found: &[u8]) -> Result<(), Wrong> {
        Ok(self.inner.model.borrow().check_disk_alive(&stamps(found, 0)?)?)
    }

    /// The guest as it goes on after such an end, on what was found then, which must be allowed.
    pub fn after(&self, end: End, found: &[u8]) -> Result<Guest, Wrong> {
        match end {
            End::PowerCut => self.after_power_cut(found),
            End::Kill => {
                let guest = self.after_kill();
                guest.may_find(found)?;
                Ok(guest)
            }
        }
    }

    /// What it knows of its disk.
    pub fn model(&self) -> Ref<'_, Model> {
        self.inner.model.borrow()
    }

    /// What came back wrong first, if anything did.
    pub fn wrong(&self) -> Option<Wrong> {
        self.inner.wrong.borrow().clone()
    }

    /// The requests that failed so far.
    pub fn failures(&self) -> Vec<Failure> {
        self.inner.failures.borrow().clone()
    }

    /// Add `asks` to what is to be asked, and `slots` tasks that ask it side by side.
    pub fn spawn<D: Device + 'static>(
        &self,
        tasks: &mut Tasks,
        device: &Rc<D>,
        slots: usize,
        asks: impl IntoIterator<Item = Ask>,
    ) {
        self.inner.asks.borrow_mut().extend(asks);
        for _ in 0..slots {
            let (guest, io, device) = (self.clone(), tasks.io().clone(), device.clone());
            tasks.spawn(async move {
                while guest.inner.wrong.borrow().is_none() {
                    let Some(ask) = guest.inner.asks.borrow_mut().pop_front() else { break };
                    guest.serve(&io, &*device, ask).await;
                }
            });
        }
    }

    /// The same on several queues, with `slots` tasks on each, and a device for each.
    pub fn spawn_on<D: Device + 'static>(
        &self,
        all: &mut [Tasks],
        mut device: impl FnMut() -> D,
        slots: usize,
        asks: Vec<Ask>,
    ) {
        self.inner.asks.borrow_mut().extend(asks);
        for tasks in all {
            self.spawn(tasks, &Rc::new(device()), slots, []);
        }
    }

    async fn serve<D: Device>(&self, io: &Io, device: &D, ask: Ask) {
        let (first, sectors) = match &ask {
            Ask::Read(range) | Ask::Write { range, .. } => (range.start, range.end - range.start),
            _ => (0, 0),
        };
        let value = self.inner.next_value.get();
        self.inner.next_value.set(value + 1);
        // Every third request's memory is not aligned to pages, every other third's not to sectors.
        let skip = [0, SECTOR, 8][(value % 3) as usize];
        let Ok(mut buffer) = io.buffer(skip + sectors as usize * SECTOR) else { return };
        match &ask {
            Ask::Write { .. } => stamp(&mut buffer.bytes_mut()[skip..], first, value),
            _ => buffer.bytes_mut().fill(0xa5),
        }
        let token = self.begins(&ask, value);
        let end = device.serve(io, &ask, buffer.mem().window(skip, usize::MAX)).await;
        match end {
            Ok(()) => {
                let read = &buffer.bytes()[skip..];
                if let Err(wrong) = self.ends(token, &ask, read) {
                    self.inner.wrong.borrow_mut().get_or_insert(wrong);
                }
            }
            Err(error) => {
                self.inner.model.borrow_mut().fail(token);
                let error = format!("{error:?}");
                self.inner.failures.borrow_mut().push(Failure { ask, error });
            }
        }
    }

    fn begins(&self, ask: &Ask, value: u64) -> Token {
        let mut model = self.inner.model.borrow_mut();
        let stable = |durable: bool| match self.inner.promise {
            Promise::Flush => durable,
            Promise::Writethrough => true,
            Promise::Nothing => false,
        };
        match ask {
            Ask::Read(range) => model.begin_read(range.clone()),
            Ask::Write { range, durable } => {
                model.begin_write(range.clone(), value, stable(*durable))
            }
            Ask::Zero { range, durable, .. } => {
                model.begin_write(range.clone(), 0, stable(*durable))
            }
            Ask::Discard(range) => model.begin_discard(range.clone()),
            Ask::Flush => model.begin_flush(),
        }
    }

    fn ends(&self, token: Token, ask: &Ask, read: &[u8]) -> Result<(), Wrong> {
        let mut model = self.inner.model.borrow_mut();
        match ask {
            Ask::Read(range) => model.read_returned(token, &stamps(read, range.start)?)?,
            Ask::Flush if self.inner.promise == Promise::Nothing => model.fail(token),
            _ => model.acknowledge(token),
        }
        Ok(())
    }

    /// Whether all that a power cut now may leave of `file` is allowed, where the disk's sectors lie
    /// in it as they are. For [`crate::Sim::at_every_turn`]; what is wrong is kept.
    pub fn check_raw_outcomes(&self, disk: &Disk, file: ringtap_io::File) {
        let inner = &*self.inner;
        let model = inner.model.borrow();
        let mut wrong = None;
        disk.each_outcome(file, |sector, bytes| {
            let Some(bytes) = bytes else {
                let per = disk.sector() / SECTOR as u64;
                for sector in sector * per..((sector + 1) * per).min(model.sectors()) {
                    let check = model.check_after_cut(sector, 0);
                    wrong = wrong.take().or(check.err().map(Wrong::from));
                }
                return;
            };
            let first = sector * disk.sector() / SECTOR as u64;
            let check = stamps(bytes, first).map_err(Wrong::from).and_then(|values| {
                let inside = (first..model.sectors()).zip(values);
                for (sector, value) in inside {
                    model.check_after_cut(sector, value)?;
                }
                Ok(())
            });
            wrong = wrong.take().or(check.err());
        });
        if let Some(wrong) = wrong {
            inner.wrong.borrow_mut().get_or_insert(wrong);
        }
    }
}

/// Requests at random on a disk of so many sectors: many overlap, about half are aligned to 8.
pub fn random_asks(rng: &mut fastrand::Rng, sectors: u64, count: usize) -> Vec<Ask> {
    (0..count)
        .map(|_| {
            let range = random_range(rng, sectors);
            let durable = rng.u8(0..5) == 0;
            match rng.u8(0..20) {
                0..4 => Ask::Read(range),
                4..13 => Ask::Write { range, durable },
                13..15 => Ask::Zero { range, unmap: rng.bool(), durable },
                15..17 => Ask::Discard(range),
                _ => Ask::Flush,
            }
        })
        .collect()
}

fn random_range(rng: &mut fastrand::Rng, sectors: u64) -> Range<u64> {
    let len = match rng.u8(0..4) {
        0 => rng.u64(1..=24),
        1 => rng.u64(1..=8),
        _ => 8 * rng.u64(1..=3),
    };
    let len = len.min(sectors);
    let start = rng.u64(0..=sectors - len);
    let start = if len % 8 == 0 && rng.u8(0..8) > 0 { start - start % 8 } else { start };
    start..start + len
}
