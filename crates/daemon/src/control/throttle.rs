//! Limits of disks, and of groups of disks, as QEMU's throttle groups have them, and their shares of devices.

use std::collections::btree_map::Entry;

use ringtap_vbd::{Limits, MOST_WEIGHT, Rate, Rates, Share, ThrottleGroup};
use serde_json::{Map, Value};

use super::command::Command;
use super::outgoing::Reply;
use super::refusal::Refusal;
use super::shape::{Done, arguments, object};
use crate::node::is_name;
use crate::running::{Running, Served};
use crate::{Allotment, Disk};

arguments! {
    /// Limits; those that are not named stay as they are, and 0 is none.
    struct ThrottleLimits {
        "iops-total" iops_total: Option<u64>,
        "iops-total-max" iops_total_max: Option<u64>,
        "iops-total-max-length" iops_total_max_length: Option<u64>,
        "iops-read" iops_read: Option<u64>,
        "iops-read-max" iops_read_max: Option<u64>,
        "iops-read-max-length" iops_read_max_length: Option<u64>,
        "iops-write" iops_write: Option<u64>,
        "iops-write-max" iops_write_max: Option<u64>,
        "iops-write-max-length" iops_write_max_length: Option<u64>,
        "bps-total" bps_total: Option<u64>,
        "bps-total-max" bps_total_max: Option<u64>,
        "bps-total-max-length" bps_total_max_length: Option<u64>,
        "bps-read" bps_read: Option<u64>,
        "bps-read-max" bps_read_max: Option<u64>,
        "bps-read-max-length" bps_read_max_length: Option<u64>,
        "bps-write" bps_write: Option<u64>,
        "bps-write-max" bps_write_max: Option<u64>,
        "bps-write-max-length" bps_write_max_length: Option<u64>,
        "iops-size" iops_size: Option<u64>,
        /// Of the device that others want, too.
        "__ringtap_weight" weight: Option<u64>,
        "__ringtap_floor-iops" floor_iops: Option<u64>,
        "__ringtap_floor-bps" floor_bps: Option<u64>,
    }
}

impl ThrottleLimits {
    /// What others are with these; refused where that makes no sense.
    fn over(&self, mut limits: Limits) -> Result<Limits, Refusal> {
        let put = |rate: &mut Rate, named: [Option<u64>; 3]| {
            let [average, burst, seconds] = named;
            rate.average = average.unwrap_or(rate.average);
            rate.burst = burst.unwrap_or(rate.burst);
            rate.burst_seconds = seconds.unwrap_or(rate.burst_seconds);
            if rate.average == 0 && burst.is_none() {
                *rate = Rate::default();
            }
        };
        let (iops, bps) = (&mut limits.iops, &mut limits.bps);
        put(&mut iops.total, [self.iops_total, self.iops_total_max, self.iops_total_max_length]);
        put(&mut iops.read, [self.iops_read, self.iops_read_max, self.iops_read_max_length]);
        put(&mut iops.write, [self.iops_write, self.iops_write_max, self.iops_write_max_length]);
        put(&mut bps.total, [self.bps_total, self.bps_total_max, self.bps_total_max_length]);
        put(&mut bps.read, [self.bps_read, self.bps_read_max, self.bps_read_max_length]);
        put(&mut bps.write, [self.bps_write, self.bps_write_max, self.bps_write_max_length]);
        // With the last of them goes what they count by.
        let uncounted = Limits { bps: Rates::default(), ..limits }.is_none();
        let kept = if uncounted { 0 } else { limits.iops_size };
        limits.iops_size = self.iops_size.unwrap_or(kept);
        limits.check().map_err(Refusal::new)?;
        Ok(limits)
    }

    /// What another share is with this one.
    fn over_share(&self, mut share: Share) -> Result<Share, Refusal> {
        if let Some(weight) = self.weight {
            // One that is too large for its type is too large in any case.
            share.weight = u32::try_from(weight).unwrap_or(MOST_WEIGHT + 1);
        }
        share.floor_iops = self.floor_iops.unwrap_or(share.floor_iops);
        share.floor_bps = self.floor_bps.unwrap_or(share.floor_bps);
        share.check().map_err(Refusal::new)?;
        Ok(share)
    }
}

/// Limits and a share as the wire has them, those that there are.
pub(crate) fn told(limits: &Limits, share: &Share) -> Value {
    let mut told = Map::new();
    for (name, Rate { average, burst, burst_seconds }) in limits.rates() {
        for (key, value) in [
            (name.to_owned(), average),
            (format!("{name}-max"), burst),
            (format!("{name}-max-length"), burst_seconds),
        ] {
            if value > 0 {
                told.insert(key, value.into());
            }
        }
    }
    if limits.iops_size > 0 {
        told.insert("iops-size".into(), limits.iops_size.into());
    }
    for (key, value) in [
        ("__ringtap_weight", share.weight.into()),
        ("__ringtap_floor-iops", share.floor_iops),
        ("__ringtap_floor-bps", share.floor_bps),
    ] {
        if value > 0 {
            told.insert(key.into(), value.into());
        }
    }
    told.into()
}

arguments! {
    /// A throttle group.
    struct GroupOptions { "limits" limits: Option<Box<ThrottleLimits>> }
}

impl Running {
    /// Make a group.
    pub(super) fn add_group(&mut self, id: String, of: &GroupOptions) -> Result<Done, Refusal> {
        let none = Limits::default();
        let limits = of.limits.as_ref().map_or(Ok(none), |limits| limits.over(none))?;
        let share = Share::default();
        let share = of.limits.as_ref().map_or(Ok(share), |limits| limits.over_share(share))?;
        if self.has_object(&id) {
            return Err(duplicate(&id));
        }
        if !is_name(&id) {
            return Err(Refusal::new(format!(
                "Parameter 'id' expects an identifier: a letter, then up to 30 letters, digits, '-', '.' and '_', not '{id}'"
            )));
        }
        match self.groups.entry(id) {
            Entry::Vacant(place) => {
                place.insert(Allotment { limits, share }.group().map_err(Refusal::new)?);
                Ok(Done {})
            }
            Entry::Occupied(taken) => Err(duplicate(taken.key())),
        }
    }

    /// Take away a group of no disk, be it left out or about to come; nothing where there is none of that name.
    pub(super) fn remove_group(&mut self, id: &str) -> Option<Result<Done, Refusal>> {
        self.groups.get(id)?;
        let served = self.disks.values().map(|served| &served.disk);
        let mut disks = served.chain(self.left_out.iter().map(|left| &left.disk));
        if disks.any(|disk| disk.group.as_deref() == Some(id))
            || self.pending.groups.iter().any(|group| group == id)
        {
            let text = format!("object '{id}' is in use, can not be deleted");
            return Some(Err(Refusal::new(text)));
        }
        self.groups.remove(id);
        Some(Ok(Done {}))
    }

    /// The group of that name.
    pub(super) fn group(&self, id: &str) -> Result<&ThrottleGroup, Refusal> {
        let found = self.groups.get(id);
        found.ok_or_else(|| Refusal::new(format!("Throttle group '{id}' does not exist")))
    }

    /// What a disk that is to come says of limits makes sense.
    pub(super) fn check_limits(
        &self,
        disk: &mut Disk,
        limits: Option<&ThrottleLimits>,
        group: Option<String>,
    ) -> Result<(), Refusal> {
        if let Some(limits) = limits {
            disk.limits = limits.over(disk.limits)?;
            disk.share = limits.over_share(disk.share)?;
        }
        if let Some(group) = group {
            self.group(&group)?;
            disk.group = Some(group);
        }
        Ok(())
    }
}

pub(super) fn duplicate(id: &str) -> Refusal {
    Refusal::new(format!("attempt to add duplicate object '{id}'"))
}

/// The id of an object, of which QEMU's clients may say the path.
fn object_of<'a>(path: &'a str, property: &str) -> Result<&'a str, Refusal> {
    let id = path.strip_prefix("/objects/").unwrap_or(path);
    match property {
        "limits" => Ok(id),
        other => Err(Refusal::new(format!("Property 'throttle-group.{other}' not found"))),
    }
}

arguments! {
    /// `qom-set`
    struct SetProperty { "path" path: String, "property" property: String, "value" value: Value }
}

impl Command for SetProperty {
    const NAME: &'static str = "qom-set";
    type Answer = Done;

    fn run(self, running: &mut Running, reply: Reply<Done>) {
        let set = || {
            let group = running.group(object_of(&self.path, &self.property)?)?;
            let limits: ThrottleLimits = object(self.value, "value")?;
            let (new, share) = (limits.over(group.limits())?, limits.over_share(group.share())?);
            if share != group.share() {
                group.set_share(share).map_err(Refusal::new)?;
            }
            group.set(new);
            Ok(Done {})
        };
        reply.give(set());
    }
}

arguments! {
    /// `qom-get`
    struct GetProperty { "path" path: String, "property" property: String }
}

impl Command for GetProperty {
    const NAME: &'static str = "qom-get";
    type Answer = Value;

    fn run(self, running: &mut Running, reply: Reply<Value>) {
        let group = object_of(&self.path, &self.property).and_then(|id| running.group(id));
        reply.give(group.map(|group| told(&group.limits(), &group.share())));
    }
}

arguments! {
    /// `__ringtap_throttle`
    struct Throttle {
        "node-name" node_name: String,
        /// Of the disk by itself.
        "limits" limits: Option<ThrottleLimits>,
        /// The group whose limits hold, too; the empty name is none.
        "throttle-group" group: Option<String>,
    }
}

impl Throttle {
    fn carry_out(self, running: &mut Running) -> Result<Done, Refusal> {
        let id = running.named_node(&self.node_name)?;
        let group = match self.group.as_deref() {
            None => None,
            Some("") => Some(None),
            Some(id) => Some(Some(running.group(id)?.clone())),
        };
        let Some(Served { disk, vbd, .. }) = running.disks.get_mut(&id) else {
            return Err(Refusal::new("the disk is gone"));
        };
        if let Some(limits) = self.limits {
            let (new, share) = (limits.over(disk.limits)?, limits.over_share(disk.share)?);
            if share != disk.share {
                vbd.set_share(share).map_err(Refusal::new)?;
            }
            (disk.limits, disk.share) = (new, share);
            vbd.set_limits(disk.limits);
        }
        if let Some(group) = group {
            disk.group = self.group.filter(|id| !id.is_empty());
            vbd.set_group(group);
        }
        Ok(Done {})
    }
}

impl Command for Throttle {
    const NAME: &'static str = "__ringtap_throttle";
    type Answer = Done;

    fn run(self, running: &mut Running, reply: Reply<Done>) {
        reply.give(self.carry_out(running));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_is_not_named_stays() {
        let over = |limits, value| {
            let named: ThrottleLimits = object(value, "limits")?;
            named.over(limits)
        };
        let all = json!({
            "iops-total": 100, "iops-total-max": 200, "iops-total-max-length": 3, "bps-write": 5,
            "iops-size": 4096,
        });
        let limits = over(Limits::default(), all.clone()).expect("limits");
        let none = Share::default();
        assert_eq!(told(&limits, &none), all);
        let fewer = over(limits, json!({"iops-total": 0, "bps-write": 7})).expect("limits");
        assert_eq!(told(&fewer, &none), json!({"bps-write": 7}));
        for (wrong, said) in [
            (json!({"iops-total-max": 50}), "less than"),
            (json!({"iops-total": -1}), "integer of 0 to"),
            (json!({"iops": 1}), "unexpected"),
        ] {
            let refusal = over(limits, wrong).expect_err(said);
            assert!(refusal.text.contains(said), "{refusal:?}");
        }
    }

    #[test]
    fn a_share_is_said_beside_limits() {
        let over = |share, value| {
            let named: ThrottleLimits = object(value, "limits")?;
            named.over_share(share)
        };
        let all = json!({"__ringtap_weight": 200, "__ringtap_floor-iops": 500});
        let share = over(Share::default(), all.clone()).expect("a share");
        assert_eq!(told(&Limits::default(), &share), all);
        let other = over(share, json!({"__ringtap_weight": 0, "iops-total": 5})).expect("a share");
        assert_eq!(other, Share { floor_iops: 500, ..Share::default() });
        for weight in [10_001_u64, 1 << 40] {
            let wrong = over(share, json!({"__ringtap_weight": weight})).expect_err("too much");
            assert!(wrong.text.contains("1 to 10000"), "{wrong:?}");
        }
    }
}
