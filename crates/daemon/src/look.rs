//! A folder of files, each of which describes a disk: read at the start, and those that have come when somebody asks.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::Keeping;
use crate::folder::{Folder, Looked};
use crate::left_out::LeftOut;
use crate::opened::refuse_twice;
use crate::running::Running;
use crate::{Address, Allotment, Config, Disk, Error, node, sandbox};

/// The files of a folder, in their order.
fn files(folder: &Path) -> Result<Vec<PathBuf>, Error> {
    let failed = |error| Error::File(format!("cannot read {}: {error}", folder.display()));
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(vec![]),
        other => other.map_err(failed)?,
    };
    let mut files = vec![];
    for entry in entries {
        let entry = entry.map_err(failed)?;
        let hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
        if !hidden && entry.path().extension().is_some_and(|end| end == "toml") {
            files.push(entry.path());
        }
    }
    files.sort();
    Ok(files)
}

/// Put the disks and groups of the folder into a configuration.
pub(crate) fn load(config: &mut Config) -> Result<Looked, Error> {
    let mut looked = Looked::default();
    let Some(folder) = config.folder.clone() else { return Ok(looked) };
    let mut disks = vec![];
    for file in files(&folder.path)? {
        match (folder.read)(&file) {
            Err(what) => looked.refuse(config.strict, &file, what)?,
            Ok(described) => {
                for (name, limits) in described.groups {
                    if config.groups.iter().any(|(other, _)| *other == name) {
                        let what = format!("{}: there is a group {name} already", file.display());
                        looked.refuse(config.strict, &file, what)?;
                        continue;
                    }
                    config.groups.push((name.clone(), limits));
                    looked.groups.insert(name, file.clone());
                }
                if let Some(why) = described.disk.as_ref().and_then(without_folder) {
                    looked.refuse(config.strict, &file, format!("{}: {why}", file.display()))?;
                    continue;
                }
                let keeping = |disk: Disk| Keeping { file: Some(file.clone()), ..disk.keeping };
                disks.extend(
                    described.disk.map(|disk| Disk { keeping: keeping(disk.clone()), ..disk }),
                );
            }
        }
    }
    let before = config.disks.len();
    config.disks.extend(disks.iter().cloned());
    if agree(config).is_ok() {
        return Ok(looked);
    }
    // Which of them it is.
    config.disks.truncate(before);
    for disk in disks {
        let file = disk.keeping.file.clone().unwrap_or_default();
        config.disks.push(disk);
        if let Err(error) = agree(config) {
            config.disks.pop();
            looked.refuse(config.strict, &file, format!("{}: {error}", file.display()))?;
        }
    }
    Ok(looked)
}

/// Why a disk cannot be shown where it is to be: the folder of a socket is missing, as one in /run is that nobody has made yet.
fn without_folder(disk: &Disk) -> Option<String> {
    let mut places = disk.nbd.iter().chain(&disk.vhost_user);
    places.find_map(|address| match address {
        Address::Unix(path) => {
            let folder = path.parent().filter(|folder| *folder != Path::new(""))?;
            let why = format!("{address}: its folder is not there: make it, then send SIGHUP");
            (!folder.is_dir()).then_some(why)
        }
        _ => None,
    })
}

/// Whether the disks of a configuration can be served side by side.
fn agree(config: &Config) -> Result<(), Error> {
    config.check()?;
    node::name_all(&mut config.disks.clone())?;
    refuse_twice(&config.disks)
}

/// Read the files that have come, and those that were wrong: their disks are to be tried next.
pub(crate) fn look_again(running: &mut Running) {
    let Some(folder) = running.config.folder.clone() else { return };
    let found = match files(&folder.path) {
        Ok(found) => found,
        Err(error) => return tracing::error!("{}", sandbox::hinted(error.to_string())),
    };
    let disks = running.disks.values().map(|served| &served.disk);
    let disks = disks.chain(running.left_out.iter().map(|left| &left.disk));
    let mut known: BTreeSet<PathBuf> = disks.filter_map(|disk| disk.keeping.file.clone()).collect();
    known.extend(running.looked.groups.values().cloned());
    let gone = known.iter().filter(|file| !found.contains(file));
    gone.for_each(|file| {
        tracing::warn!("{} is gone; what it describes stays until it is removed", file.display());
    });
    running.looked.wrong.clear();
    let mut come: Vec<PathBuf> = found.into_iter().filter(|file| !known.contains(file)).collect();
    loop {
        // One may want a group that a later one describes.
        let groups = running.groups.len();
        let take = |file: PathBuf| take(running, &folder, &file).map_err(|what| (file, what)).err();
        let wrong: Vec<(PathBuf, String)> = come.into_iter().filter_map(take).collect();
        if running.groups.len() == groups {
            for (file, what) in wrong {
                tracing::error!("not served: {what}");
                running.looked.wrong.insert(file, what);
            }
            return;
        }
        come = wrong.into_iter().map(|(file, _)| file).collect();
    }
}

/// Take what a file that has come describes.
fn take(running: &mut Running, folder: &Folder, file: &Path) -> Result<(), String> {
    let described = (folder.read)(file)?;
    let wrong = |why: String| format!("{}: {why}", file.display());
    if let Some((name, _)) =
        described.groups.iter().find(|(name, _)| running.groups.contains_key(name))
    {
        return Err(wrong(format!("there is a group {name} already")));
    }
    if let Some(why) = described.disk.as_ref().and_then(without_folder) {
        return Err(wrong(why));
    }
    let disk = described.disk.map(|disk| fit(running, file, disk, &described.groups));
    let disk = disk.transpose().map_err(wrong)?;
    let groups = described.groups.into_iter().map(|(name, allotment)| {
        let group = allotment.group().map_err(|why| wrong(format!("{name}: {why}")))?;
        Ok((name, group))
    });
    for (name, group) in groups.collect::<Result<Vec<_>, String>>()? {
        running.looked.groups.insert(name.clone(), file.to_owned());
        running.groups.insert(name, group);
    }
    if let Some(disk) = disk {
        let label = disk.node_name.clone().unwrap_or_default();
        running.pending.nodes.insert(label.clone());
        let error = Error::File(format!("{}: it was not tried yet", file.display()));
        running.left_out.push(LeftOut { disk, label, error, opening: None });
    }
    Ok(())
}

/// A disk that has come, named, where it can be served beside the others.
fn fit(
    running: &Running,
    file: &Path,
    mut disk: Disk,
    groups: &[(String, Allotment)],
) -> Result<Disk, String> {
    disk.keeping.file = Some(file.to_owned());
    let known = running.groups.iter().map(|(name, group)| {
        (name.clone(), Allotment { limits: group.limits(), share: group.share() })
    });
    let others = running.disks.values().map(|served| served.disk.clone());
    let others = others.chain(running.left_out.iter().map(|left| left.disk.clone()));
    let mut config = Config {
        disks: others.chain([disk.clone()]).collect(),
        groups: known.chain(groups.iter().cloned()).collect(),
        ..running.config.clone()
    };
    agree(&config).map_err(|error| error.to_string())?;
    node::name_all(&mut config.disks).map_err(|error| error.to_string())?;
    disk.node_name = config.disks.pop().and_then(|disk| disk.node_name);
    match disk.node_name.as_ref().filter(|name| running.pending.nodes.contains(*name)) {
        Some(name) => Err(format!("there is a disk {name} already")),
        None => Ok(disk),
    }
}
