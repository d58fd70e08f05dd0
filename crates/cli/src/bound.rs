//! Options that each belong to a disk: the one before them on the command line.

use std::path::PathBuf;

use clap::ArgMatches;
use ringtap_daemon::Error;

/// Which options belong to which disk, by their places on the command line.
pub(crate) struct Bound<'a> {
    pub(crate) matches: &'a ArgMatches,
    pub(crate) disks: &'a [PathBuf],
    pub(crate) places: &'a [usize],
}

impl Bound<'_> {
    /// The values of an option, disk by disk.
    pub(crate) fn all<T>(&self, id: &str, values: Vec<T>) -> Vec<Vec<T>> {
        let mut bound: Vec<Vec<T>> = self.disks.iter().map(|_| vec![]).collect();
        let places = self.matches.indices_of(id).into_iter().flatten();
        for (value, place) in values.into_iter().zip(places) {
            let before = self.places.iter().take_while(|disk| **disk < place).count();
            bound[before.saturating_sub(1)].push(value);
        }
        bound
    }

    /// The value of an option that a disk has once at most.
    pub(crate) fn single<T>(&self, id: &str, values: Vec<T>) -> Result<Vec<Option<T>>, Error> {
        let bound = self.all(id, values).into_iter().zip(self.disks);
        bound
            .map(|(mut values, disk)| match values.len() {
                0 | 1 => Ok(values.pop()),
                _ => Err(Error::Usage(format!(
                    "--{} is given twice for {}; options bind to the DISK before them \
                     (those before the first DISK bind to the first)",
                    id.replace('_', "-"),
                    disk.display()
                ))),
            })
            .collect()
    }
}
