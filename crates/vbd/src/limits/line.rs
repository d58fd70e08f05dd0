//! The requests of one queue that limits hold: two lines, in each of which the first alone waits for the time to come.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Poll, Waker};

use ringtap_io::sync::broken;
use ringtap_io::{Io, Time, probes};

use super::bucket::Way;
use super::throttle::{Grants, Throttle};
use crate::in_flight::number;
use crate::shares::{Tally, Tenant, Wait};
use crate::{Kind, Request};

/// The lines of one queue.
#[derive(Default)]
pub(crate) struct Lines {
    reads: Line,
    writes: Line,
    /// Those who want nobody to wait.
    hurries: Cell<u32>,
    /// Those who want nobody to wait for long.
    leaves: Cell<u32>,
    /// Whether nobody waits at all while there are any; not known before it is asked.
    spared: Cell<Option<bool>>,
    /// Which debt of its disk was the last when this queue's first request came.
    debts: Cell<Option<u64>>,
    /// Whether nobody is left who waits for an answer: what has not begun is not to begin.
    lost: Cell<bool>,
    /// Whether what is served is charged to a tenant, and what of it has not been brought to it yet.
    charged: Cell<bool>,
    tally: RefCell<Tally>,
}

/// What a discard counts as, as Linux counts it: no byte is moved.
const SECTOR: u64 = 512;

/// How long before its time a request of a queue that its user ends may go. Who ends one queue after the other gets no more than his
/// limits by it, and leaves to the others of his group no more than this to pay for.
const AHEAD: Time = 1_000_000_000;

/// While it lives the queue's requests are not held, or not for long: it is about to end.
pub(crate) struct Hurry<'a>(&'a Cell<u32>);

impl<'a> Hurry<'a> {
    fn begin(of: &'a Cell<u32>, throttle: &Throttle) -> Hurry<'a> {
        of.set(of.get() + 1);
        throttle.changed().notify();
        Hurry(of)
    }
}

impl Drop for Hurry<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

impl Lines {
    /// Have nobody wait for now: they are counted all the same.
    pub(crate) fn hurry(&self, throttle: &Throttle) -> Hurry<'_> {
        Hurry::begin(&self.hurries, throttle)
    }

    /// Have nobody wait, where the disk can still pay for that: whose guest stops its queues is not to stand still with them. Where
    /// it has not paid yet for a queue that was ended before this one began, nobody waits for longer than until [`AHEAD`] of his
    /// time.
    pub(crate) fn leave(&self, throttle: &Throttle) -> Leave<'_> {
        self.spared.set(None);
        Leave { _hurry: Hurry::begin(&self.leaves, throttle), lines: self }
    }

    fn is_spared(&self, now: Time, throttle: &Throttle) -> bool {
        if self.leaves.get() == 0 {
            return false;
        }
        self.spared.get().unwrap_or_else(|| {
            let is_older = self.debts.get() != Some(throttle.debts());
            // Who has been at the limits since owes a little all the time.
            let has_paid = throttle.owed().saturating_sub(AHEAD) <= now;
            if has_paid {
                throttle.begin_debt();
            }
            let spared = has_paid || is_older;
            self.spared.set(Some(spared));
            spared
        })
    }

    /// Have nothing begin any more that stands in a line or comes to it.
    pub(crate) fn lose(&self, throttle: &Throttle) {
        self.lost.set(true);
        throttle.changed().notify();
    }

    /// Whether what has not begun is not to begin.
    pub(crate) fn are_lost(&self) -> bool {
        self.lost.get()
    }

    /// How long before its time a request may go.
    fn ahead(&self) -> Time {
        if self.leaves.get() > 0 { AHEAD } else { 0 }
    }

    /// Wait as long as the limits want a request to.
    pub(crate) async fn pass(&self, io: &Io, throttle: &Throttle, request: &Request) {
        let (line, way) = match request.kind {
            Kind::Flush => return,
            Kind::Read => (&self.reads, Way::Read),
            _ => (&self.writes, Way::Write),
        };
        let standing = Standing { throttle, io, since: io.now(), request };
        throttle.waits();
        if self.debts.get().is_none() {
            self.debts.set(Some(throttle.debts()));
        }
        let _place = line.stand().await;
        let in_haste = || {
            let hurried = self.hurries.get() > 0 || self.lost.get() || throttle.is_lifted();
            hurried || self.is_spared(io.now(), throttle)
        };
        while !self.lost.get() {
            if self.hurries.get() == 0 && self.is_spared(io.now(), throttle) {
                line.borrow(io.now(), throttle, way, request, &mut self.tally.borrow_mut());
                self.charged.set(line.is_charged());
                break;
            }
            let Due { due, share, changes } = {
                let mut tally = self.tally.borrow_mut();
                line.take(io.now(), throttle, way, request, &mut tally)
            };
            self.charged.set(line.is_charged());
            let over = || in_haste() || throttle.changes() != changes;
            let ahead = || self.ahead();
            if until(io, throttle, due, over, ahead).await
                && paid(io, throttle, share, over, ahead).await
            {
                break;
            }
            if in_haste() {
                break;
            }
            // What it took is of limits that hold no more.
        }
        drop(standing);
    }

    /// A request that has passed has ended, so long after that.
    pub(crate) fn served(&self, request: &Request, took: Time) {
        if self.charged.get() && request.kind != Kind::Flush {
            let change = request.kind != Kind::Read;
            self.tally.borrow_mut().add(change, length(request), took);
        }
    }
}

/// While it lives the queue's requests go before their time, at the cost of those that its disk asks for later.
pub(crate) struct Leave<'a> {
    _hurry: Hurry<'a>,
    lines: &'a Lines,
}

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        // A queue that goes on is one that has begun after that.
        self.lines.debts.set(None);
    }
}

impl Grants {
    /// In what time what a request needs comes in, by the slowest of them; nothing is taken.
    fn cost(&self, way: Way, request: &Request) -> Time {
        let discard = request.kind == Kind::Discard;
        let costs = self.all.iter().map(|grant| grant.cost(way, discard, request.len));
        costs.max().unwrap_or(0)
    }
}

/// The bytes that a request moves.
fn length(request: &Request) -> u64 {
    if request.kind == Kind::Discard { request.len.min(SECTOR) } else { request.len }
}

/// Wait for a time, or so long `ahead` of it; false where something else was `over` before that came.
async fn until(
    io: &Io,
    throttle: &Throttle,
    due: Time,
    over: impl Fn() -> bool,
    ahead: impl Fn() -> Time,
) -> bool {
    loop {
        let changed = throttle.changed().listen();
        let left = due.saturating_sub(io.now()).saturating_sub(ahead());
        if left == 0 {
            return true;
        }
        if over() {
            return false;
        }
        if due == Time::MAX {
            // Nobody lives to see that.
            changed.await;
            continue;
        }
        either(changed, io.sleep(left)).await;
    }
}

/// Wait until what was taken of a share of the device may be used, which each plan may bring forward or put off; false where
/// something else was `over` before.
async fn paid(
    io: &Io,
    throttle: &Throttle,
    share: Option<(Arc<Tenant>, Wait)>,
    over: impl Fn() -> bool,
    ahead: impl Fn() -> Time,
) -> bool {
    let Some((tenant, mut wait)) = share else { return true };
    loop {
        let changed = throttle.changed().listen();
        let Some(nanos) = tenant.still(io.now(), &mut wait) else { return true };
        let nanos = nanos.saturating_sub(ahead());
        if nanos == 0 {
            return true;
        }
        if over() {
            return false;
        }
        either(changed, io.sleep(nanos)).await;
    }
}

async fn either(one: impl Future<Output = ()>, other: impl Future<Output = ()>) {
    let (mut one, mut other) = (pin!(one), pin!(other));
    poll_fn(|context| match one.as_mut().poll(context) {
        Poll::Ready(()) => Poll::Ready(()),
        Poll::Pending => other.as_mut().poll(context),
    })
    .await;
}

/// When a request may go.
struct Due {
    due: Time,
    /// And when its tenant has paid for it.
    share: Option<(Arc<Tenant>, Wait)>,
    /// By which of the limits.
    changes: u64,
}

/// Counts how long a request was held.
struct Standing<'a> {
    throttle: &'a Throttle,
    io: &'a Io,
    since: Time,
    request: &'a Request,
}

impl Drop for Standing<'_> {
    fn drop(&mut self) {
        let held = self.io.now().saturating_sub(self.since);
        probes::throttled(number(self.request.kind), self.request.len, held);
        self.throttle.has_waited(held);
    }
}

/// Requests in the order in which they came.
#[derive(Default)]
struct Line {
    places: RefCell<VecDeque<Place>>,
    /// The number of the first place.
    first: Cell<u64>,
    grants: RefCell<Option<Grants>>,
    /// When what was taken last may be used.
    due: Cell<Time>,
}

enum Place {
    Taken(Option<Waker>),
    /// Whoever stood there did not wait for his turn.
    Left,
}

/// A place in a line, until it is dropped.
struct Placed<'a> {
    line: &'a Line,
    number: u64,
}

impl Drop for Placed<'_> {
    fn drop(&mut self) {
        self.line.leave(self.number);
    }
}

impl Line {
    /// Wait for one's turn.
    async fn stand(&self) -> Placed<'_> {
        let number = {
            let mut places = self.places.borrow_mut();
            places.push_back(Place::Taken(None));
            self.first.get() + places.len() as u64 - 1
        };
        let placed = Placed { line: self, number };
        poll_fn(|context| {
            let before = number - self.first.get();
            if before == 0 {
                return Poll::Ready(());
            }
            if let Some(place) = self.places.borrow_mut().get_mut(before as usize) {
                *place = Place::Taken(Some(context.waker().clone()));
            }
            Poll::Pending
        })
        .await;
        placed
    }

    fn leave(&self, number: u64) {
        let mut places = self.places.borrow_mut();
        let before = number - self.first.get();
        if let Some(place) = places.get_mut(before as usize) {
            *place = Place::Left;
        }
        while let Some(Place::Left) = places.front() {
            places.pop_front();
            self.first.set(self.first.get() + 1);
        }
        if before == 0 && !broken("line left in silence") {
            if let Some(Place::Taken(Some(next))) = places.front() {
                next.wake_by_ref();
            }
        }
    }

    /// Whether what passes is charged to a tenant.
    fn is_charged(&self) -> bool {
        self.grants.borrow().as_ref().is_some_and(|grants| grants.share.is_some())
    }

    /// Of the limits that hold now.
    fn grants<'a>(kept: &'a mut Option<Grants>, throttle: &Throttle) -> &'a mut Grants {
        let changes = throttle.changes();
        match kept.take().filter(|grants| grants.changes == changes) {
            Some(grants) => kept.insert(grants),
            None => kept.insert(throttle.grants()),
        }
    }

    /// Have the disk owe what the first needs.
    fn borrow(
        &self,
        now: Time,
        throttle: &Throttle,
        way: Way,
        request: &Request,
        tally: &mut Tally,
    ) {
        let mut kept = self.grants.borrow_mut();
        let grants = Line::grants(&mut kept, throttle);
        let cost = grants.cost(way, request);
        let of_share = grants.share.as_mut().and_then(|taken| {
            let mut wait = taken.take(now, length(request), tally)?;
            taken.tenant.still(now, &mut wait)
        });
        throttle.borrow(now, self.due.get(), cost.max(of_share.unwrap_or(0)));
    }

    /// Take what the first needs.
    fn take(
        &self,
        now: Time,
        throttle: &Throttle,
        way: Way,
        request: &Request,
        tally: &mut Tally,
    ) -> Due {
        let mut kept = self.grants.borrow_mut();
        let grants = Line::grants(&mut kept, throttle);
        let discard = request.kind == Kind::Discard;
        let due = grants.all.iter_mut().map(|grant| grant.take(now, way, discard, request.len));
        let due = due.max().unwrap_or(0);
        let due = throttle.repay(due, || grants.cost(way, request));
        self.due.set(due);
        let share = grants.share.as_mut().and_then(|taken| {
            let wait = taken.take(now, length(request), tally)?;
            Some((taken.tenant.clone(), wait))
        });
        Due { due, share, changes: grants.changes }
    }
}
