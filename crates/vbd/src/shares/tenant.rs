//! A tenant of a device: a disk, the disks of a group together, or a job.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, PoisonError};

use ringtap_io::sync::atomic::{AtomicU64, Ordering::Relaxed};
use ringtap_io::sync::{Mutex, MutexGuard};
use ringtap_io::{Io, Time};
use serde::Serialize;

use super::allowance::{Allowance, at_rate};
use super::device::{BackingDevice, DeviceShares, Member};
use super::planner::{Had, Memory};
use super::tally::{Ended, Latencies, Sums, Tally};
use super::{JOB_WEIGHT, Share, WEIGHT, cost};

/// How long who waits sleeps at most until he sees whether a plan is due, or has changed what he waits for.
const LOOK: Time = 5_000_000;

/// What a tenant is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs)] // their names say it
pub enum Who {
    Disk,
    Group,
    Job,
}

/// Who has a share of a device.
#[derive(Debug)]
pub(crate) struct Tenant {
    device: BackingDevice,
    who: Who,
    share: Mutex<Said>,
    allowance: Allowance,
    /// Somebody has waited since the last plan.
    short: AtomicBool,
    sums: Sums,
    kept: Mutex<Kept>,
    /// Cost that it was served, all in all.
    served: AtomicU64,
}

#[derive(Debug)]
struct Said {
    share: Share,
    /// Its device counts it among those whose share is set.
    counted: bool,
}

impl Drop for Tenant {
    fn drop(&mut self) {
        self.set_share(Share::default());
    }
}

/// What the planner keeps of it.
#[derive(Debug, Default)]
struct Kept {
    memory: Memory,
    /// What its requests cost lately, and how many bytes they had: by that a floor is known in cost.
    cost: f64,
    bytes: f64,
}

/// What a tenant has, for people.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct TenantState {
    /// What was said of it.
    pub share: Share,
    /// Its weight, be it said or not.
    pub weight: u32,
    /// A disk by itself, those of its group together, or a job.
    pub who: Who,
    /// What part of the device's rate it may have at present.
    pub part: f64,
    /// What it was served, by cost in bytes, all in all.
    pub served: u64,
}

impl Tenant {
    fn new(device: BackingDevice, share: Share, who: Who) -> Tenant {
        Tenant {
            device,
            who,
            share: Mutex::new(Said { share, counted: false }),
            allowance: Allowance::default(),
            short: AtomicBool::new(false),
            sums: Sums::default(),
            kept: Mutex::default(),
            served: AtomicU64::new(0),
        }
    }

    fn share(&self) -> Share {
        self.lock().share
    }

    pub(crate) fn set_share(&self, share: Share) {
        let mut said = self.lock();
        said.share = share;
        let counts = !share.is_none();
        if std::mem::replace(&mut said.counted, counts) != counts {
            self.device.count(counts);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Said> {
        self.share.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is(&self, who: Who) -> bool {
        self.who == who
    }

    pub(crate) fn is_on(&self, device: &BackingDevice) -> bool {
        self.device.is(device)
    }

    /// Its device, for people.
    pub(crate) fn device_shares(&self) -> DeviceShares {
        self.device.shares()
    }

    /// Why it cannot be given a share.
    pub(crate) fn refuses(&self, share: Share) -> Option<String> {
        self.device.refuse(Some(self), share)
    }

    fn weight(&self) -> u32 {
        match self.share().weight {
            0 if self.is(Who::Job) => JOB_WEIGHT,
            0 => WEIGHT,
            weight => weight,
        }
    }

    /// Its floor, by cost in a second: so many of such requests as it had lately.
    fn floor_by(&self, share: Share, kept: &Kept) -> f64 {
        let (mut each, mut bytes) = (kept.cost, kept.bytes);
        if each <= 0.0 {
            (each, bytes) = (cost(4096) as f64, 4096.0);
        }
        let of_requests = share.floor_iops as f64 * each;
        let of_bytes = share.floor_bps as f64 / bytes.max(512.0) * each;
        of_requests.max(of_bytes)
    }

    /// The floor of a share that it may be given.
    fn floor_of(&self, share: Share) -> f64 {
        self.floor_by(share, &self.kept())
    }

    #[cfg(all(test, feature = "shuttle"))]
    pub(crate) fn owe(&self) {
        self.allowance.set(0, 1);
        self.allowance.take(0, u64::MAX);
    }

    pub(crate) fn state(&self) -> TenantState {
        let rate = self.device.rate();
        let own = self.allowance.rate() as f64;
        let part = if rate > 0.0 && !self.allowance.is_unlimited() { own / rate } else { 1.0 };
        let (share, weight) = (self.share(), self.weight());
        let served = self.served.load(Relaxed);
        TenantState { share, weight, who: self.who, part: part.min(1.0), served }
    }

    /// Bring what a queue has counted.
    pub(crate) fn bring(&self, tally: &mut Tally) {
        self.sums.bring(tally);
    }

    /// Whether anybody's share is set on its device.
    pub(crate) fn is_active(&self) -> bool {
        self.device.is_active()
    }

    /// Of a job: wait until it may move so many bytes, or until it is `over`.
    pub(crate) async fn wait_to_move(&self, io: &Io, bytes: u64, over: impl Fn() -> bool) {
        self.device.look(io.now());
        let (due, rate) = self.allowance.take(io.now(), cost(bytes));
        self.sums.moved(bytes);
        let mut wait = Wait { due, rate };
        while let Some(nanos) = self.still(io.now(), &mut wait) {
            if over() || !self.is_active() {
                return;
            }
            io.sleep(nanos).await;
        }
    }

    /// How long to sleep at most before this is asked again; none where the time has come.
    pub(crate) fn still(&self, now: Time, wait: &mut Wait) -> Option<Time> {
        if wait.due <= now {
            return None;
        }
        self.short.store(true, Relaxed);
        self.device.look(now);
        let rate = self.allowance.rate();
        if rate != wait.rate {
            *wait = Wait { due: at_rate(wait.due, now, wait.rate, rate), rate };
        }
        let left = wait.due.saturating_sub(now);
        (left > 0).then(|| left.min(LOOK))
    }
}

impl Member for Tenant {
    fn had(&self, latencies: &mut Latencies) -> (Had, Memory) {
        let ended: Ended = self.sums.take(latencies);
        let mut kept = self.kept();
        if ended.requests > 0 {
            let mean = |of: u64| of as f64 / ended.requests as f64;
            let blend =
                |before: f64, now: f64| if before > 0.0 { before * 0.9 + now * 0.1 } else { now };
            kept.cost = blend(kept.cost, mean(ended.cost()));
            kept.bytes = blend(kept.bytes, mean(ended.bytes));
        }
        self.served.fetch_add(ended.cost(), Relaxed);
        let had = Had {
            weight: self.weight(),
            floor: self.floor_by(self.share(), &kept),
            served: ended.cost(),
            queued: ended.nanos,
            short: self.short.swap(false, Relaxed),
            is_job: self.is(Who::Job),
        };
        (had, kept.memory)
    }

    fn give(&self, now: Time, rate: f64, memory: Memory) {
        self.kept().memory = memory;
        // A tenth of a small request in a second is nobody's share; nobody waits longer than for that.
        self.allowance.set(now, (rate as u64).max(cost(0)));
    }

    fn lift(&self) {
        self.allowance.lift();
    }

    fn floor(&self) -> f64 {
        self.floor_of(self.share())
    }
}

impl BackingDevice {
    /// A tenant more.
    pub(crate) fn join(&self, share: Share, who: Who) -> Arc<Tenant> {
        let tenant = Arc::new(Tenant::new(self.clone(), share, who));
        tenant.set_share(share);
        let member: Arc<dyn Member> = tenant.clone();
        self.add(Arc::downgrade(&member));
        tenant
    }

    /// Why the floors of a share that a tenant may be given are more than the device can do, where that is known.
    pub(crate) fn refuse(&self, who: Option<&Tenant>, share: Share) -> Option<String> {
        let capacity = self.most()?;
        let own = who.map_or_else(
            || Tenant::new(self.clone(), share, Who::Disk).floor_of(share),
            |who| who.floor_of(share),
        );
        let others = self.members();
        let others =
            others.iter().filter(|other| !who.is_some_and(|who| std::ptr::addr_eq(&***other, who)));
        let others: f64 = others.map(|other| other.floor()).sum();
        // One that it has, or a lower one, is no news.
        let is_more = who.is_none_or(|who| own > who.floor_of(who.share()));
        (own > 0.0 && is_more && own + others > capacity).then(|| {
            let requests = |of: f64| (of / cost(4096) as f64) as u64;
            format!(
                "floors of {} requests of 4 KiB in a second, {} of them other disks', are more than the device has been seen to serve, {}: name less",
                requests(own + others),
                requests(others),
                requests(capacity)
            )
        })
    }
}

/// Somebody waits for what he took of an allowance.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wait {
    due: Time,
    rate: u64,
}

/// What one line of a queue has taken of its tenant's allowance, and not used yet.
#[derive(Debug)]
pub(crate) struct Taken {
    pub(crate) tenant: Arc<Tenant>,
    left: u64,
    when: Time,
}

impl Taken {
    pub(crate) fn new(tenant: Arc<Tenant>) -> Taken {
        Taken { tenant, left: 0, when: 0 }
    }

    /// Take what a request needs. None where it may go at once.
    pub(crate) fn take(&mut self, now: Time, len: u64, tally: &mut Tally) -> Option<Wait> {
        let needed = cost(len);
        // It would have run over meanwhile.
        if now.saturating_sub(self.when) > super::allowance::DEPTH {
            self.left = 0;
        }
        if self.left >= needed {
            self.left -= needed;
            return None;
        }
        let tenant = &*self.tenant;
        tenant.bring(tally);
        tenant.device.look(now);
        if tenant.allowance.is_unlimited() {
            return None;
        }
        let more = tenant.allowance.chunk().max(needed - self.left);
        let (due, rate) = tenant.allowance.take(now, more);
        (self.left, self.when) = (self.left + more - needed, due.max(now));
        (due > now).then_some(Wait { due, rate })
    }
}
