//! A device that several disks lie on, and who plans for it.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, Weak};

use ringtap_io::Time;
use ringtap_io::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use ringtap_io::sync::{Mutex, MutexGuard};
use serde::Serialize;

use super::cost;
use super::planner::{Had, Memory, Planner};
use super::tally::Latencies;

/// A device that disks lie on. Cheap to clone; clones are the same.
#[derive(Clone, Debug, Default)]
pub struct BackingDevice(Arc<Device>);

#[derive(Debug, Default)]
struct Device {
    /// Whether anybody's share is set.
    active: AtomicBool,
    /// When the next plan is due.
    next: AtomicU64,
    planned: Mutex<Planned>,
    tenants: Mutex<Vec<Weak<dyn Member>>>,
    /// Tenants whose share is set: a thousand disks that come do not each look at all others.
    set: AtomicU64,
    hears: Hearers,
    /// Held by who looks whether anybody's share is set, so that what was seen last is what is told.
    looks: Mutex<()>,
}

/// What a device sees of its tenants.
pub(super) trait Member: Send + Sync {
    /// What it had since this was asked last.
    fn had(&self, latencies: &mut Latencies) -> (Had, Memory);

    /// What it may have from now on.
    fn give(&self, now: Time, rate: f64, memory: Memory);

    /// It is held no more.
    fn lift(&self);

    /// Its floor, by cost in a second.
    fn floor(&self) -> f64;
}

/// Is told when shares of a device begin or cease to hold.
pub(crate) trait Hears: Send + Sync {
    fn has_changed(&self);
}

#[derive(Default)]
struct Hearers(Mutex<Vec<Weak<dyn Hears>>>);

impl std::fmt::Debug for Hearers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hearers")
    }
}

#[derive(Debug, Default)]
struct Planned {
    planner: Planner,
    last: Time,
}

/// A device and its tenants, for people.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct DeviceShares {
    /// Small requests that it is given to serve in a second; 0 where there is no plan.
    pub rate: u64,
    /// Small requests that it has been seen to serve in a second.
    pub capacity: u64,
    /// How many times as long as at rest requests take.
    pub stretch: f64,
}

/// Those that disks lie on, by their numbers.
static NUMBERED: std::sync::Mutex<BTreeMap<u64, Weak<Device>>> =
    std::sync::Mutex::new(BTreeMap::new());

impl BackingDevice {
    /// The device of that number; one that nobody else has, where it has none.
    pub(crate) fn numbered(number: Option<u64>) -> BackingDevice {
        let Some(number) = number else { return BackingDevice::default() };
        let mut all = NUMBERED.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, device| device.strong_count() > 0);
        if let Some(device) = all.get(&number).and_then(Weak::upgrade) {
            return BackingDevice(device);
        }
        let device = BackingDevice::default();
        all.insert(number, Arc::downgrade(&device.0));
        device
    }

    /// Whether it is that device.
    pub(crate) fn is(&self, other: &BackingDevice) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    pub(crate) fn is_active(&self) -> bool {
        self.0.active.load(SeqCst)
    }

    /// A tenant's share is set from now on, or is not.
    pub(super) fn count(&self, set: bool) {
        if set {
            self.0.set.fetch_add(1, SeqCst);
        } else {
            self.0.set.fetch_sub(1, SeqCst);
        }
    }

    /// A member more.
    pub(super) fn add(&self, member: Weak<dyn Member>) {
        let mut tenants = self.tenants();
        tenants.retain(|other| other.strong_count() > 0);
        tenants.push(member);
    }

    fn tenants(&self) -> MutexGuard<'_, Vec<Weak<dyn Member>>> {
        self.0.tenants.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn members(&self) -> Vec<Arc<dyn Member>> {
        self.tenants().iter().filter_map(Weak::upgrade).collect()
    }

    /// Have somebody told when shares of it begin or cease to hold.
    pub(crate) fn hear(&self, hears: Weak<dyn Hears>) {
        let mut all = self.0.hears.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|other| other.strong_count() > 0 && !other.ptr_eq(&hears));
        all.push(hears);
    }

    /// Somebody's share has changed, or somebody has come or gone: whether anybody's is set, and all are told where that is
    /// otherwise than before.
    pub(crate) fn look_who_has_shares(&self) {
        // Let go of after the lock: the last of a disk looks as well.
        let (members, hears);
        let _looks = self.0.looks.lock().unwrap_or_else(PoisonError::into_inner);
        let active = self.0.set.load(SeqCst) > 0;
        let before = self.0.active.swap(active, SeqCst);
        if before && !active {
            members = self.members();
            members.iter().for_each(|tenant| tenant.lift());
            *self.planned() = Planned::default();
        }
        if before != active {
            hears = self.hearers();
            hears.iter().for_each(|hears| hears.has_changed());
        }
    }

    fn hearers(&self) -> Vec<Arc<dyn Hears>> {
        let all = self.0.hears.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().filter_map(Weak::upgrade).collect()
    }

    /// The most that it has been seen to serve, where that is known.
    pub(super) fn most(&self) -> Option<f64> {
        self.planned().planner.most()
    }

    pub(super) fn rate(&self) -> f64 {
        self.planned().planner.rate()
    }

    fn planned(&self) -> MutexGuard<'_, Planned> {
        self.0.planned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Make a plan, where one is due and nobody else makes it.
    pub(super) fn look(&self, now: Time) {
        if now >= self.0.next.load(SeqCst) {
            self.plan(now);
        }
    }

    #[cold]
    fn plan(&self, now: Time) {
        let Ok(mut planned) = self.0.planned.try_lock() else { return };
        if now < self.0.next.load(SeqCst) {
            return;
        }
        self.0.next.store(now + planned.planner.period(), SeqCst);
        let took = now.saturating_sub(std::mem::replace(&mut planned.last, now));
        if took == 0 {
            return;
        }
        let members = self.members();
        let mut latencies = Latencies::default();
        let mut all: Vec<_> = members.iter().map(|tenant| tenant.had(&mut latencies)).collect();
        let rates = planned.planner.plan(took, &latencies, &mut all);
        for ((tenant, rate), (_, memory)) in members.iter().zip(rates).zip(all) {
            tenant.give(now, rate, memory);
        }
    }

    /// How it is at present.
    pub fn shares(&self) -> DeviceShares {
        let planned = self.planned();
        let requests = |of: f64| (of / cost(4096) as f64) as u64;
        DeviceShares {
            rate: requests(planned.planner.rate()),
            capacity: requests(planned.planner.capacity()),
            stretch: (planned.planner.stretch() * 100.0).round() / 100.0,
        }
    }
}
