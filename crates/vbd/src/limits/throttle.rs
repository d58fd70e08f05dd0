//! The limits of a disk, its own and those of its group, its share of the device that it lies on, and who is told when they
//! change.

use std::sync::{Arc, PoisonError, Weak};

use ringtap_io::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use ringtap_io::sync::{Mutex, MutexGuard, broken};
use ringtap_io::{Event, Time};
use serde::Serialize;

use super::Limits;
use super::bucket::{Budget, Grant};
use crate::door::Door;
use crate::shares::{BackingDevice, DeviceShares, Hears, Share, Taken, Tenant, TenantState, Who};

/// Disks that share limits. Cheap to clone.
#[derive(Clone, Default)]
pub struct ThrottleGroup(Arc<Mutex<Group>>);

#[derive(Default)]
struct Group {
    limits: Limits,
    budget: Option<Arc<Budget>>,
    members: Vec<Weak<Throttle>>,
    share: Share,
    /// What its disks are together, on each device.
    tenants: Vec<Weak<Tenant>>,
}

impl ThrottleGroup {
    /// A group with no disk yet.
    pub fn new(limits: Limits) -> ThrottleGroup {
        let group = ThrottleGroup::default();
        group.set(limits);
        group
    }

    /// The limits.
    pub fn limits(&self) -> Limits {
        self.lock().limits
    }

    /// Have others hold from now on, for requests that wait, too.
    pub fn set(&self, limits: Limits) {
        let members: Vec<Arc<Throttle>> = {
            let mut group = self.lock();
            group.limits = limits;
            group.budget = Budget::new(&limits).map(Arc::new);
            group.members.iter().filter_map(Weak::upgrade).collect()
        };
        members.iter().for_each(|member| member.has_changed());
    }

    /// What all its disks together have of each device that they lie on.
    pub fn share(&self) -> Share {
        self.lock().share
    }

    /// Have them have this from now on; why not, where it is more than can be had.
    pub fn set_share(&self, share: Share) -> Result<(), String> {
        share.check()?;
        let (members, tenants) = {
            let group = self.lock();
            let members: Vec<_> = group.members.iter().filter_map(Weak::upgrade).collect();
            let tenants: Vec<_> = group.tenants.iter().filter_map(Weak::upgrade).collect();
            (members, tenants)
        };
        if let Some(why) = tenants.iter().find_map(|tenant| tenant.refuses(share)) {
            return Err(why);
        }
        self.lock().share = share;
        tenants.iter().for_each(|tenant| tenant.set_share(share));
        members.iter().for_each(|member| member.settle());
        Ok(())
    }

    /// What its disks are together on a device; none where nothing is said of them.
    fn tenant_on(&self, device: &BackingDevice) -> Option<Arc<Tenant>> {
        let mut group = self.lock();
        if group.share.is_none() {
            return None;
        }
        group.tenants.retain(|tenant| tenant.strong_count() > 0);
        let mut all = group.tenants.iter().filter_map(Weak::upgrade);
        if let Some(tenant) = all.find(|tenant| tenant.is_on(device)) {
            return Some(tenant);
        }
        let tenant = device.join(group.share, Who::Group);
        group.tenants.push(Arc::downgrade(&tenant));
        Some(tenant)
    }

    /// Whether it is that group.
    pub fn is(&self, other: &ThrottleGroup) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    fn join(&self, member: &Arc<Throttle>) {
        let mut group = self.lock();
        group.members.retain(|other| other.strong_count() > 0 && !is(other, member));
        group.members.push(Arc::downgrade(member));
    }

    fn leave(&self, member: &Arc<Throttle>) {
        self.lock().members.retain(|other| !is(other, member));
    }

    fn lock(&self) -> MutexGuard<'_, Group> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is(other: &Weak<Throttle>, member: &Arc<Throttle>) -> bool {
    std::ptr::eq(other.as_ptr(), Arc::as_ptr(member))
}

/// The limits of a disk, as all its queues see them.
pub(crate) struct Throttle {
    door: Arc<Door>,
    own: Mutex<Own>,
    /// How often they have changed.
    changes: AtomicU64,
    changed: Event,
    /// Until when its requests wait for what went before its time, and how many such debts there were.
    owed: AtomicU64,
    debts: AtomicU64,
    /// Those who want nobody to wait.
    lifted: AtomicUsize,
    waiting: AtomicUsize,
    waited: AtomicU64,
}

/// While it lives a disk's requests are counted, and not held.
pub(crate) struct Lifted(Arc<Throttle>);

impl Drop for Lifted {
    fn drop(&mut self) {
        self.0.lifted.fetch_sub(1, SeqCst);
    }
}

#[derive(Default)]
struct Own {
    limits: Limits,
    budget: Option<Arc<Budget>>,
    group: Option<ThrottleGroup>,
    share: Share,
    device: Option<BackingDevice>,
    /// Whether that is wherever its image lies.
    follows_image: bool,
    /// What it is there, by itself or with its group.
    tenant: Option<Arc<Tenant>>,
}

/// What a disk has of the device that it lies on.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Fairness {
    /// Itself, or its group.
    #[serde(flatten)]
    pub tenant: TenantState,
    /// The device.
    pub device: DeviceShares,
}

/// What limits have cost a disk's requests.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Waited {
    /// Requests that limits hold at present.
    pub waiting: usize,
    /// How long requests were held, all together.
    pub held_ns: u64,
}

/// What a line of a queue has of the limits.
pub(super) struct Grants {
    pub(super) changes: u64,
    pub(super) all: Vec<Grant<Arc<Budget>>>,
    pub(super) share: Option<Taken>,
}

impl Hears for Throttle {
    fn has_changed(&self) {
        self.has_changed();
    }
}

impl Drop for Throttle {
    fn drop(&mut self) {
        let own = self.own.get_mut().unwrap_or_else(PoisonError::into_inner);
        own.tenant = None;
        if let Some(device) = own.device.take() {
            device.look_who_has_shares();
        }
    }
}

impl Throttle {
    pub(crate) fn new(door: Arc<Door>) -> Throttle {
        Throttle {
            door,
            own: Mutex::default(),
            changes: AtomicU64::new(0),
            changed: Event::default(),
            owed: AtomicU64::new(0),
            debts: AtomicU64::new(0),
            lifted: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
            waited: AtomicU64::new(0),
        }
    }

    pub(crate) fn limits(&self) -> Limits {
        self.lock().limits
    }

    pub(crate) fn set(&self, limits: Limits) {
        {
            let mut own = self.lock();
            own.limits = limits;
            own.budget = Budget::new(&limits).map(Arc::new);
        }
        self.has_changed();
    }

    pub(crate) fn set_group(self: &Arc<Throttle>, group: Option<ThrottleGroup>) {
        // It hears of changes before it looks at what they change.
        group.iter().for_each(|group| group.join(self));
        let former = std::mem::replace(&mut self.lock().group, group.clone());
        let left = former.filter(|former| !group.is_some_and(|group| group.is(former)));
        left.iter().for_each(|group| group.leave(self));
        self.settle();
    }

    /// It lies on that device from now on, be it because its image does.
    pub(crate) fn lies_on(self: &Arc<Throttle>, device: BackingDevice, follows_image: bool) {
        let hears: Weak<Throttle> = Arc::downgrade(self);
        device.hear(hears);
        let former = {
            let mut own = self.lock();
            own.follows_image = follows_image;
            own.device.replace(device)
        };
        self.settle();
        if let Some(former) = former {
            former.look_who_has_shares();
        }
    }

    pub(crate) fn follows_image(&self) -> bool {
        self.lock().follows_image
    }

    /// The device that it lies on, where that is known.
    pub(crate) fn device(&self) -> Option<BackingDevice> {
        self.lock().device.clone()
    }

    pub(crate) fn share(&self) -> Share {
        self.lock().share
    }

    /// Have it have this part of its device from now on; why not, where it is more than can be had.
    pub(crate) fn set_share(&self, share: Share) -> Result<(), String> {
        share.check()?;
        let device = self.device();
        if let Some(why) =
            device.and_then(|device| device.refuse(self.own_tenant().as_deref(), share))
        {
            return Err(why);
        }
        self.lock().share = share;
        self.settle();
        Ok(())
    }

    /// What it is by itself on its device, where it is there by itself.
    fn own_tenant(&self) -> Option<Arc<Tenant>> {
        let own = self.lock();
        own.tenant.clone().filter(|_| !own.is_with_group())
    }

    /// What it is on its device follows from its group, its share and the device.
    fn settle(&self) {
        let device = {
            let mut own = self.lock();
            let tenant = own.tenant_to_be();
            own.tenant = tenant;
            own.device.clone()
        };
        if let Some(device) = device {
            device.look_who_has_shares();
        }
        self.has_changed();
    }

    /// What it has of its device; none where that is not known, or nobody's share of it is set.
    pub(crate) fn fairness(&self) -> Option<Fairness> {
        let tenant = self.lock().active_tenant()?;
        Some(Fairness { tenant: tenant.state(), device: tenant.device_shares() })
    }

    /// For a model: it owes its device more than anybody lives to pay.
    #[cfg(all(test, feature = "shuttle"))]
    pub(crate) fn owe(&self) {
        if let Some(tenant) = self.own_tenant() {
            tenant.owe();
        }
    }

    /// A job more on its device, where that is known.
    pub(crate) fn job(&self) -> Option<Arc<Tenant>> {
        Some(self.device()?.join(Share::default(), Who::Job))
    }

    /// From now on requests go by what is so now, those that wait, too.
    fn has_changed(&self) {
        {
            let own = self.lock();
            let any = own.budgets().next().is_some() || own.active_tenant().is_some();
            self.changes.fetch_add(1, SeqCst);
            self.owed.store(0, SeqCst);
            self.door.limit(any);
        }
        if !broken("limits changed in silence") {
            self.changed.notify();
        }
    }

    /// How often they have changed.
    pub(super) fn changes(&self) -> u64 {
        self.changes.load(SeqCst)
    }

    pub(super) fn changed(&self) -> &Event {
        &self.changed
    }

    /// Until when its requests are to wait.
    pub(super) fn owed(&self) -> Time {
        self.owed.load(SeqCst)
    }

    /// How many debts it has had.
    pub(super) fn debts(&self) -> u64 {
        self.debts.load(SeqCst)
    }

    /// It is to have one more. Queues that begin from now on are those that came after it.
    pub(super) fn begin_debt(&self) {
        self.debts.fetch_add(1, SeqCst);
    }

    /// Have its own requests, and nobody else's of its group, wait for so much longer than until `from`.
    pub(super) fn borrow(&self, now: Time, from: Time, cost: Time) {
        let next = |owed: u64| Some(owed.max(from).max(now).saturating_add(cost));
        let _ = self.owed.fetch_update(SeqCst, SeqCst, next);
    }

    /// When a request of the disk's own may go that is due then: not before what went ahead of its time is paid for.
    pub(super) fn repay(&self, due: Time, cost: impl Fn() -> Time) -> Time {
        if self.owed() <= due {
            return due;
        }
        let cost = cost();
        let next = |owed: u64| (owed > due).then_some(owed.saturating_add(cost));
        self.owed.fetch_update(SeqCst, SeqCst, next).unwrap_or(due)
    }

    /// What is to be taken from, with nothing taken yet.
    pub(super) fn grants(&self) -> Grants {
        let own = self.lock();
        let changes = self.changes();
        let share = own.active_tenant().map(Taken::new);
        Grants { changes, all: own.budgets().map(Grant::new).collect(), share }
    }

    /// Have all who wait go, and nobody wait from now on.
    pub(crate) fn lift(&self) {
        self.lifted.fetch_add(1, SeqCst);
        self.changed.notify();
    }

    /// The same until what this gives is dropped.
    pub(crate) fn hurry(self: &Arc<Throttle>) -> Lifted {
        self.lift();
        Lifted(self.clone())
    }

    pub(super) fn is_lifted(&self) -> bool {
        self.lifted.load(SeqCst) > 0
    }

    /// The disk is stopped: who waits is to look at that.
    pub(crate) fn abandon(&self) {
        self.lifted.fetch_add(1, SeqCst);
        self.changed.close();
    }

    pub(super) fn waits(&self) {
        self.waiting.fetch_add(1, SeqCst);
    }

    pub(super) fn has_waited(&self, nanos: Time) {
        self.waiting.fetch_sub(1, SeqCst);
        self.waited.fetch_add(nanos, SeqCst);
    }

    pub(crate) fn waited(&self) -> Waited {
        Waited { waiting: self.waiting.load(SeqCst), held_ns: self.waited.load(SeqCst) }
    }

    fn lock(&self) -> MutexGuard<'_, Own> {
        self.own.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Own {
    fn budgets(&self) -> impl Iterator<Item = Arc<Budget>> {
        let of_group = self.group.as_ref().and_then(|group| group.lock().budget.clone());
        self.budget.clone().into_iter().chain(of_group)
    }

    fn active_tenant(&self) -> Option<Arc<Tenant>> {
        self.tenant.clone().filter(|tenant| tenant.is_active())
    }

    /// Whether it is on its device what its group is.
    fn is_with_group(&self) -> bool {
        self.share.is_none() && self.group.as_ref().is_some_and(|group| !group.share().is_none())
    }

    fn tenant_to_be(&self) -> Option<Arc<Tenant>> {
        let device = self.device.as_ref()?;
        let with_group = self.group.as_ref().filter(|_| self.share.is_none());
        if let Some(tenant) = with_group.and_then(|group| group.tenant_on(device)) {
            return Some(tenant);
        }
        let own = self.tenant.as_ref().filter(|own| own.is_on(device) && own.is(Who::Disk));
        let own = own.cloned().unwrap_or_else(|| device.join(self.share, Who::Disk));
        own.set_share(self.share);
        Some(own)
    }
}
