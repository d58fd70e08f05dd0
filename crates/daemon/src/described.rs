//! Disks and groups as the files of a folder describe them: what `crates/cli/src/folder.rs` reads.

use std::path::{Path, PathBuf};

use ringtap_image::{CacheMode, RestartChoice};
use ringtap_vbd::{Limits, Rate, Share, ThrottleGroup};
use serde_json::Value as Json;
use toml::{Table, Value};

use crate::QUEUES;
use crate::facts::cache_name;
use crate::{Address, Disk, OnError};

pub(crate) const HEAD: &str = "# Written by ringtap daemon --persist.\n";

/// A disk as a file of its own.
pub(crate) fn of_disk(disk: &Disk) -> Result<String, String> {
    toml::to_string(&table(disk)?).map_err(|error| error.to_string())
}

/// The same, as it stands in the folder.
pub(crate) fn whole_file(disk: &Disk) -> Result<String, String> {
    Ok(format!("{HEAD}{}", of_disk(disk)?))
}

/// A group as a file of its own.
pub(crate) fn of_group(name: &str, group: &ThrottleGroup) -> Result<String, String> {
    let list = Value::Array(vec![group_table(name, group).into()]);
    let table = Table::from_iter([("throttle-group".to_owned(), list)]);
    toml::to_string(&table).map_err(|error| error.to_string())
}

pub(crate) fn group_table(name: &str, group: &ThrottleGroup) -> Table {
    let mut one = Table::from_iter([("name".to_owned(), Value::from(name))]);
    limits(&mut one, &group.limits());
    share(&mut one, &group.share());
    one
}

fn absolute(path: &Path) -> Result<String, String> {
    let null = path.to_str().is_some_and(|text| text.starts_with("null:"));
    let path = match null || ringtap_stores::is_store(path) {
        true => path.to_owned(),
        false => std::path::absolute(path).unwrap_or(path.into()),
    };
    path.to_str()
        .map(str::to_owned)
        .ok_or_else(|| format!("{}: its path is not UTF-8", path.display()))
}

fn address(address: &Address) -> Result<String, String> {
    match address {
        Address::Unix(path) => Ok(format!("unix:{}", absolute(path)?)),
        Address::Tcp { host, port } if host.contains(':') => Ok(format!("tcp:[{host}]:{port}")),
        Address::Tcp { host, port } => Ok(format!("tcp:{host}:{port}")),
        Address::Systemd(None) => Ok("systemd".to_owned()),
        Address::Systemd(Some(name)) => Ok(format!("systemd:{name}")),
    }
}

fn rate(Rate { average, burst, burst_seconds }: Rate) -> String {
    match (burst, burst_seconds) {
        (0, _) => average.to_string(),
        (_, 0) => format!("{average}:{burst}"),
        _ => format!("{average}:{burst}:{burst_seconds}"),
    }
}

fn limits(table: &mut Table, limits: &Limits) {
    for (name, of) in limits.rates().filter(|(_, rate)| rate.average > 0) {
        table.insert(name.trim_end_matches("-total").to_owned(), rate(of).into());
    }
    if limits.iops_size > 0 {
        table.insert("iops-size".into(), limits.iops_size.to_string().into());
    }
}

fn share(table: &mut Table, share: &Share) {
    let Share { weight, floor_iops, floor_bps } = *share;
    for (key, value) in
        [("weight", weight.into()), ("floor-iops", floor_iops), ("floor-bps", floor_bps)]
    {
        if value > 0 {
            table.insert(key.into(), value.to_string().into());
        }
    }
}

pub(crate) fn table(disk: &Disk) -> Result<Table, String> {
    let mut table = Table::new();
    let mut put = |key: &str, value: Value| _ = table.insert(key.to_owned(), value);
    let list = |all: &[PathBuf]| -> Result<Value, String> {
        let all: Result<Vec<String>, String> = all.iter().map(|path| absolute(path)).collect();
        Ok(all?.into())
    };
    let addresses = |all: &[Address]| -> Result<Value, String> {
        let all: Result<Vec<String>, String> = all.iter().map(address).collect();
        Ok(all?.into())
    };
    let options = &disk.options;
    put("image", absolute(&disk.path)?.into());
    if let Some(format) = options.format {
        put("format", format.name().into());
    }
    if options.cache != CacheMode::None {
        put("cache", cache_name(options.cache).into());
    }
    if options.restart_log == Some(RestartChoice::Optional) {
        put("restart-log", "optional".into());
    }
    for (key, is) in [
        ("read-only", options.read_only),
        ("allow-discards", options.allow_discards),
        ("growable", disk.growable),
        ("incoming", disk.incoming),
    ] {
        if is {
            put(key, true.into());
        }
    }
    for (key, paths) in [
        ("backing", &options.allow_backing),
        ("data-file", &options.data_files),
        ("fuse", &disk.fuse),
    ] {
        if !paths.is_empty() {
            put(key, list(paths)?);
        }
    }
    for (key, all) in [("nbd", &disk.nbd), ("vhost-user", &disk.vhost_user)] {
        if !all.is_empty() {
            put(key, addresses(all)?);
        }
    }
    match (&options.secret, &disk.keeping.secret) {
        (Some(_), None) => return Err("nobody has said where its secret is".into()),
        (_, Some(source)) => put("secret", source.as_str().into()),
        _ => {}
    }
    if let Some(bytes) = options.table_memory {
        put("l2-cache-size", bytes.to_string().into());
    }
    if !options.bitmaps.is_empty() {
        put("bitmap", options.bitmaps.clone().into());
    }
    if !disk.name.is_empty() {
        put("name", disk.name.as_str().into());
    }
    if let Some(number) = disk.ublk {
        put("ublk", number.map_or(true.into(), |number| Value::from(i64::from(number))));
    }
    let has_queues = !disk.vhost_user.is_empty() || !disk.fuse.is_empty() || disk.ublk.is_some();
    if disk.queues != QUEUES && has_queues {
        put("queues", i64::from(disk.queues).into());
    }
    let sectors = disk.logical_block_size;
    if let Some(bytes) = sectors.filter(|_| !disk.vhost_user.is_empty() || disk.ublk.is_some()) {
        put("logical-block-size", i64::from(bytes).into());
    }
    if !disk.serial.is_empty() && !disk.vhost_user.is_empty() && disk.serial != disk.name {
        put("serial", disk.serial.as_str().into());
    }
    if let Some(processors) = &disk.placement.processors {
        put("cpus", processors.to_string().into());
    }
    if let Some(group) = &disk.placement.cgroup {
        put("cgroup", absolute(group)?.into());
    }
    if let Some(on_error) = disk.on_error {
        let word = if on_error == OnError::Hold { "hold" } else { "report" };
        put("on-error", word.into());
    }
    if disk.keeps_space {
        put("discard", "ignore".into());
    }
    if let Some(name) = &disk.node_name {
        put("node-name", name.as_str().into());
    }
    if let Some(group) = &disk.group {
        put("group", group.as_str().into());
    }
    if !disk.keeping.exports.is_empty() {
        let exports = disk.keeping.exports.iter().map(|export: &Json| Value::try_from(export));
        let exports: Result<Vec<Value>, _> = exports.collect();
        put("export", Value::Array(exports.map_err(|error| error.to_string())?));
    }
    limits(&mut table, &disk.limits);
    share(&mut table, &disk.share);
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_mean_the_same_wherever_the_next_server_begins() {
        let folder = std::env::current_dir().expect("a folder");
        let beside = folder.join("a.raw").display().to_string();
        for (name, kept) in [
            ("/srv/a", "/srv/a"),
            ("a.raw", &*beside),
            ("null:1G", "null:1G"),
            ("nbd+unix:///x?socket=/s", "nbd+unix:///x?socket=/s"),
        ] {
            assert_eq!(absolute(Path::new(name)).as_deref(), Ok(kept));
        }
        let all = ["tcp:[::1]:1", "tcp:host:2", "systemd:x"];
        let back = all.map(|text| Address::nbd(text).and_then(|read| address(&read)));
        assert_eq!(back, all.map(|text| Ok(text.to_owned())));
    }
}
