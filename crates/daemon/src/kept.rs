//! What the files of a folder of disks are to say.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use toml::{Table, Value};

use crate::described::{HEAD, group_table, table};
use crate::graph::Ties;
use crate::running::{Running, Served};

/// What each file is to say, or why it cannot.
pub(crate) fn texts(running: &Running) -> BTreeMap<PathBuf, Result<String, String>> {
    let mut tables: BTreeMap<&Path, Result<Table, String>> = BTreeMap::new();
    for served in running.disks.values().filter(|served| stands_alone(served)) {
        let Some(file) = &served.disk.keeping.file else { continue };
        tables.insert(file, table(&served.disk));
    }
    for (name, group) in &running.groups {
        let Some(file) = running.looked.groups.get(name) else { continue };
        if let Ok(table) = tables.entry(file).or_insert_with(|| Ok(Table::new())) {
            let one = group_table(name, group);
            let list = table.entry("throttle-group").or_insert_with(|| Value::Array(vec![]));
            list.as_array_mut().into_iter().for_each(|list| list.push(one.clone().into()));
        }
    }
    let text = |table: Result<Table, String>| {
        let text = toml::to_string(&table?).map_err(|error| error.to_string())?;
        Ok(format!("{HEAD}{text}"))
    };
    tables.into_iter().map(|(file, table)| (file.to_owned(), text(table))).collect()
}

/// An overlay that waits to take a disk's place could not be opened beside it, a moment ends with the server, and so does a job
/// with its target.
pub(crate) fn stands_alone(served: &Served) -> bool {
    let Ties { upon, alone, within, shows, .. } = &served.ties;
    upon.is_none() && !alone && !within && shows.is_none() && !served.disk.keeping.passes
}
