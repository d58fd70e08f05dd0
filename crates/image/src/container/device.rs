//! Which file it is, and the device that it is or lies on.

use std::fs;

use super::Container;

impl Container {
    /// The numbers of the device that it lies on, and of itself, as it was opened: of a regular file alone. Nothing is asked for it.
    pub fn numbers(&self) -> Option<(u64, u64)> {
        self.numbers
    }

    /// The number of the device that it is or lies on, of a partition that of its disk; none of a store, or of what a simulation
    /// provides.
    pub fn device(&self) -> Option<u64> {
        let facts = rustix::fs::fstat(self.open_file()?).ok()?;
        let is_device = rustix::fs::FileType::from_raw_mode(facts.st_mode).is_block_device();
        let device = if is_device { facts.st_rdev } else { facts.st_dev };
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        let sys = format!("/sys/dev/block/{major}:{minor}");
        let whole = fs::read_to_string(format!("{sys}/partition"))
            .and_then(|_| fs::read_to_string(format!("{sys}/../dev")));
        let parsed = whole.ok().and_then(|text| {
            let (major, minor) = text.trim().split_once(':')?;
            Some(rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?))
        });
        Some(parsed.unwrap_or(device))
    }
}
