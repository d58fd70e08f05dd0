//! Limits and shares of disks and of groups of disks, as they are written on the command line.

use std::str::FromStr;

use clap::Args;
use ringtap_daemon::{Allotment, DiskLimits, Error, MOST_WEIGHT, Rate, Share};
use serde_json::{Map, Value};

use crate::bound::Bound;
use crate::names;

/// How a rate is written.
const FORM: &str = "write so many a second, as 1000, with a burst, as 1000:2000, or with one that lasts, as 1000:2000:60";

fn rate(text: &str, number: impl Fn(&str) -> Option<u64>) -> Result<Rate, String> {
    let wrong = || FORM.to_owned();
    let mut parts = text.split(':');
    let mut next = |of: &dyn Fn(&str) -> Option<u64>| match parts.next() {
        None => Ok(0),
        Some(part) => of(part).ok_or_else(wrong),
    };
    let (average, burst) = (next(&number)?, next(&number)?);
    let burst_seconds = next(&|part| part.parse().ok())?;
    if parts.next().is_some() {
        return Err(wrong());
    }
    let rate = Rate { average, burst, burst_seconds };
    let mut limits = DiskLimits::default();
    limits.iops.total = rate;
    // The option's own name is said beside it.
    let sensible = limits.check().map_err(|why| why.trim_start_matches("iops-total: ").to_owned());
    sensible.map(|()| rate)
}

/// Requests a second: `N[:BURST[:SECONDS]]`.
pub(crate) fn requests(text: &str) -> Result<Rate, String> {
    rate(text, |part| part.parse().ok())
}

/// Bytes a second: the same, of sizes.
pub(crate) fn bytes(text: &str) -> Result<Rate, String> {
    rate(text, |part| names::size(part).ok())
}

/// A weight, as cgroup's `io.weight` has it.
fn weight(text: &str) -> Result<u32, String> {
    let read = text.parse().ok().filter(|weight| (1..=MOST_WEIGHT).contains(weight));
    read.ok_or_else(|| format!("write 1 to {MOST_WEIGHT}"))
}

/// The same, or 0: none is said any more.
fn weight_or_none(text: &str) -> Result<u32, String> {
    if text == "0" { Ok(0) } else { weight(text) }
}

/// What a disk of `ringtap serve` is told of limits: each value belongs to the DISK before it.
#[derive(Debug, Args)]
pub(crate) struct DiskLimitArgs {
    /// Requests that may be served in a second, flushes not counted, and those that a burst may have, for so many
    /// seconds [default: no limit; SECONDS: 1]
    #[arg(long, value_name = "N[:BURST[:SECONDS]]", value_parser = requests)]
    iops: Vec<Rate>,

    /// The same of reads
    #[arg(long, value_name = "N[:BURST[:SECONDS]]", value_parser = requests)]
    iops_read: Vec<Rate>,

    /// The same of writes and discards
    #[arg(long, value_name = "N[:BURST[:SECONDS]]", value_parser = requests)]
    iops_write: Vec<Rate>,

    /// Bytes that may be served in a second, and those that a burst may have: 100M
    #[arg(long, value_name = "SIZE[:BURST[:SECONDS]]", value_parser = bytes)]
    bps: Vec<Rate>,

    /// The same of reads
    #[arg(long, value_name = "SIZE[:BURST[:SECONDS]]", value_parser = bytes)]
    bps_read: Vec<Rate>,

    /// The same of writes
    #[arg(long, value_name = "SIZE[:BURST[:SECONDS]]", value_parser = bytes)]
    bps_write: Vec<Rate>,

    /// Requests of more bytes than this count as so many more [default: each counts as one]
    #[arg(long, value_name = "SIZE", value_parser = names::size)]
    iops_size: Vec<u64>,

    /// What part of the device it has by that of the other disks there, where several want it: 1 to 10000
    /// [default: 100, where any disk there has a weight or a floor]
    #[arg(long, value_name = "N", value_parser = weight)]
    weight: Vec<u32>,

    /// Requests a second that it has of the device before the others have anything
    #[arg(long, value_name = "N")]
    floor_iops: Vec<u64>,

    /// Bytes a second, likewise
    #[arg(long, value_name = "SIZE", value_parser = names::size)]
    floor_bps: Vec<u64>,
}

impl DiskLimitArgs {
    /// What is said of each disk.
    pub(crate) fn bind(self, bound: &Bound<'_>) -> Result<Vec<Allotment>, Error> {
        let mut all = vec![Allotment::default(); bound.disks.len()];
        type Of = fn(&mut DiskLimits) -> &mut Rate;
        let rates: [(&str, Vec<Rate>, Of); 6] = [
            ("iops", self.iops, |limits| &mut limits.iops.total),
            ("iops_read", self.iops_read, |limits| &mut limits.iops.read),
            ("iops_write", self.iops_write, |limits| &mut limits.iops.write),
            ("bps", self.bps, |limits| &mut limits.bps.total),
            ("bps_read", self.bps_read, |limits| &mut limits.bps.read),
            ("bps_write", self.bps_write, |limits| &mut limits.bps.write),
        ];
        for (id, values, of) in rates {
            for (limits, rate) in all.iter_mut().zip(bound.single(id, values)?) {
                *of(&mut limits.limits) = rate.unwrap_or_default();
            }
        }
        for (limits, size) in all.iter_mut().zip(bound.single("iops_size", self.iops_size)?) {
            limits.limits.iops_size = size.unwrap_or(0);
        }
        for (one, weight) in all.iter_mut().zip(bound.single("weight", self.weight)?) {
            one.share.weight = weight.unwrap_or(0);
        }
        for (one, floor) in all.iter_mut().zip(bound.single("floor_iops", self.floor_iops)?) {
            one.share.floor_iops = floor.unwrap_or(0);
        }
        for (one, floor) in all.iter_mut().zip(bound.single("floor_bps", self.floor_bps)?) {
            one.share.floor_bps = floor.unwrap_or(0);
        }
        for (limits, disk) in all.iter().zip(bound.disks) {
            let wrong = |why| Error::Usage(format!("{}: {why}", disk.display()));
            limits.check().map_err(wrong)?;
        }
        Ok(all)
    }
}

/// What `ringtap disk` is told of limits.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct LimitArgs {
    /// Requests a second, flushes not counted; with those that a burst may have, for so many seconds
    #[arg(long, value_name = "N[:BURST[:SECONDS]]", value_parser = requests)]
    iops: Option<Rate>,
    /// The same of reads
    #[arg(long, value_name = "N[:BURST[:SECONDS]]", value_parser = requests)]
    iops_read: Option<Rate>,
    /// The same of writes and discards
    #[arg(long, value_name = "N[:BURST[:SECONDS]]", value_parser = requests)]
    iops_write: Option<Rate>,
    /// Bytes a second: 100M
    #[arg(long, value_name = "SIZE[:BURST[:SECONDS]]", value_parser = bytes)]
    bps: Option<Rate>,
    /// The same of reads
    #[arg(long, value_name = "SIZE[:BURST[:SECONDS]]", value_parser = bytes)]
    bps_read: Option<Rate>,
    /// The same of writes
    #[arg(long, value_name = "SIZE[:BURST[:SECONDS]]", value_parser = bytes)]
    bps_write: Option<Rate>,
    /// Requests of more bytes than this count as so many more; 0: each counts as one
    #[arg(long, value_name = "SIZE", value_parser = names::size)]
    iops_size: Option<u64>,
    /// What part of the device it has by that of the other disks there, where several want it: 1 to 10000; 0: none is said
    #[arg(long, value_name = "N", value_parser = weight_or_none)]
    weight: Option<u32>,
    /// Requests a second that it has of the device before the others have anything
    #[arg(long, value_name = "N")]
    floor_iops: Option<u64>,
    /// Bytes a second, likewise
    #[arg(long, value_name = "SIZE", value_parser = names::size)]
    floor_bps: Option<u64>,
}

impl LimitArgs {
    fn rates(&self) -> [(&'static str, Option<Rate>); 6] {
        [
            ("iops-total", self.iops),
            ("iops-read", self.iops_read),
            ("iops-write", self.iops_write),
            ("bps-total", self.bps),
            ("bps-read", self.bps_read),
            ("bps-write", self.bps_write),
        ]
    }

    /// As the control socket has them; nothing where none is named.
    pub(crate) fn named(&self) -> Option<Value> {
        let mut limits = Map::new();
        for (name, rate) in self.rates() {
            let Some(Rate { average, burst, burst_seconds }) = rate else { continue };
            limits.insert(name.to_owned(), average.into());
            limits.insert(format!("{name}-max"), burst.into());
            limits.insert(format!("{name}-max-length"), burst_seconds.into());
        }
        limits.extend(self.iops_size.map(|size| ("iops-size".to_owned(), size.into())));
        for (name, value) in [
            ("__ringtap_weight", self.weight.map(u64::from)),
            ("__ringtap_floor-iops", self.floor_iops),
            ("__ringtap_floor-bps", self.floor_bps),
        ] {
            limits.extend(value.map(|value| (name.to_owned(), value.into())));
        }
        (!limits.is_empty()).then(|| limits.into())
    }

    /// The same of one who wants no others than those that are named.
    pub(crate) fn alone(self) -> LimitArgs {
        let none = Some(Rate::default());
        LimitArgs {
            iops: self.iops.or(none),
            iops_read: self.iops_read.or(none),
            iops_write: self.iops_write.or(none),
            bps: self.bps.or(none),
            bps_read: self.bps_read.or(none),
            bps_write: self.bps_write.or(none),
            iops_size: self.iops_size.or(Some(0)),
            weight: self.weight.or(Some(0)),
            floor_iops: self.floor_iops.or(Some(0)),
            floor_bps: self.floor_bps.or(Some(0)),
        }
    }
}

/// What is told of limits, for people.
pub(crate) fn line(told: &Value) -> String {
    let shown = |(name, value): (&String, &Value)| {
        format!("{} {value}", name.trim_start_matches("__ringtap_"))
    };
    let all = told.as_object().map(|limits| limits.iter().map(shown).collect::<Vec<_>>());
    all.filter(|all| !all.is_empty()).map_or("no limits".to_owned(), |all| all.join(", "))
}

/// A group and its limits: `NAME[,iops=N][,bps=SIZE]` and so on.
#[derive(Clone, Debug)]
pub(crate) struct NamedGroup(pub(crate) String, pub(crate) Allotment);

impl FromStr for NamedGroup {
    type Err = String;

    fn from_str(text: &str) -> Result<NamedGroup, String> {
        let (name, rest) = text.split_once(',').unwrap_or((text, ""));
        let (mut limits, mut share) = (DiskLimits::default(), Share::default());
        let lists = if rest.is_empty() { vec![] } else { vec![rest.to_owned()] };
        for (key, value) in names::pairs(&lists)? {
            let (iops, bps) = (&mut limits.iops, &mut limits.bps);
            let of = |why: String| format!("{key}={value}: {why}");
            match key.as_str() {
                "iops" => iops.total = requests(&value).map_err(of)?,
                "iops-read" => iops.read = requests(&value).map_err(of)?,
                "iops-write" => iops.write = requests(&value).map_err(of)?,
                "bps" => bps.total = bytes(&value).map_err(of)?,
                "bps-read" => bps.read = bytes(&value).map_err(of)?,
                "bps-write" => bps.write = bytes(&value).map_err(of)?,
                "iops-size" => limits.iops_size = names::size(&value).map_err(of)?,
                "weight" => share.weight = weight(&value).map_err(of)?,
                "floor-iops" => {
                    let floor = value.parse().map_err(|_| of("write so many a second".into()))?;
                    share.floor_iops = floor;
                }
                "floor-bps" => share.floor_bps = names::size(&value).map_err(of)?,
                _ => {
                    return Err(format!(
                        "{key}: write iops, iops-read, iops-write, bps, bps-read, bps-write, iops-size, weight, floor-iops or floor-bps"
                    ));
                }
            }
        }
        let allotment = Allotment { limits, share };
        allotment.check()?;
        Ok(NamedGroup(name.to_owned(), allotment))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_read() {
        let of = |average, burst, burst_seconds| Rate { average, burst, burst_seconds };
        assert_eq!(requests("1000"), Ok(of(1000, 0, 0)));
        assert_eq!(requests("1000:2000:60"), Ok(of(1000, 2000, 60)));
        assert_eq!(bytes("100M:1G"), Ok(of(100 << 20, 1 << 30, 0)));
        for (wrong, said) in [
            ("", "write so many"),
            ("x", "write so many"),
            ("1:2:3:4", "write so many"),
            ("2:1", "less than"),
        ] {
            assert!(requests(wrong).expect_err(wrong).contains(said), "{wrong}");
        }
        let text = "vm1,iops=500:900,bps-write=1M,weight=300,floor-bps=2M";
        let NamedGroup(name, Allotment { limits, share }) = text.parse().expect("a group");
        assert_eq!((&*name, limits.iops.total), ("vm1", of(500, 900, 0)));
        assert_eq!(share, Share { weight: 300, floor_iops: 0, floor_bps: 2 << 20 });
        assert!(weight("0").is_err() && weight("10001").is_err() && weight("x").is_err());
        assert_eq!(limits.bps.write, of(1 << 20, 0, 0));
        assert!("vm1,iop=5".parse::<NamedGroup>().expect_err("no key").contains("iops-read"));
    }
}
