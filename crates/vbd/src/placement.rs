//! Where the threads of a disk run, and which control group their time is charged to.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Processors, written as `taskset --cpu-list` takes them: `0-3,8`.
#[derive(Clone, PartialEq, Eq)]
pub struct Processors {
    text: String,
    set: CpuSet,
}

impl FromStr for Processors {
    type Err = String;

    fn from_str(text: &str) -> Result<Processors, String> {
        let mut set = CpuSet::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let number = |word: &str| {
                word.trim().parse::<usize>().ok().filter(|&number| number < CpuSet::MAX_CPU)
            };
            let range = number(first).zip(number(last)).filter(|(first, last)| first <= last);
            let Some((first, last)) = range else {
                return Err(format!("'{part}' is no processor and no range of them, as in 0-3,8"));
            };
            (first..=last).for_each(|number| set.set(number));
        }
        Ok(Processors { text: text.to_owned(), set })
    }
}

impl fmt::Display for Processors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl fmt::Debug for Processors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Where the threads that serve a disk are to be. Nowhere in particular by default.
#[derive(Debug, Default)]
pub struct Placement {
    processors: Option<Processors>,
    /// A control group, and its file of threads.
    group: Option<(PathBuf, File)>,
    told: AtomicBool,
}

impl Placement {
    /// On these processors, and in that threaded control group (cgroup v2). Else what is wrong with them.
    pub fn new(processors: Option<Processors>, group: Option<&Path>) -> Result<Placement, String> {
        if let Some(wanted) = &processors {
            let own = sched_getaffinity(None).map_err(|error| error.to_string())?;
            if !(0..CpuSet::MAX_CPU).any(|number| wanted.set.is_set(number) && own.is_set(number)) {
                return Err(format!("none of the processors {wanted} may be used here"));
            }
        }
        let group = match group {
            Some(path) => Some((path.to_owned(), threads_of(path)?)),
            None => None,
        };
        Ok(Placement { processors, group, told: AtomicBool::new(false) })
    }

    /// Have the calling thread be there, and those that it starts. What fails is logged, once.
    pub(crate) fn enter(&self) {
        let moved = self.processors.as_ref().map_or(Ok(()), |processors| {
            sched_setaffinity(None, &processors.set)
                .map_err(|error| format!("cannot run on the processors {processors}: {error}"))
        });
        let joined = self.group.as_ref().map_or(Ok(()), |(path, threads)| {
            rustix::io::write(threads, b"0").map(drop).map_err(|error| {
                let advice = match error {
                    rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::INVAL => {
                        ": the server itself must be in its threaded domain, the group above"
                    }
                    _ => "",
                };
                format!("cannot be in the control group {}: {error}{advice}", path.display())
            })
        });
        for failure in [moved, joined].into_iter().filter_map(Result::err) {
            if !self.told.swap(true, Relaxed) {
                tracing::warn!("a thread of the disk {failure}");
            }
        }
    }
}

/// Where threads of a control group are named.
fn threads_of(group: &Path) -> Result<File, String> {
    let failed = |error: io::Error| {
        let advice = match error.kind() {
            io::ErrorKind::NotFound => " (a threaded one of cgroup v2 is wanted: make it first)",
            _ => "",
        };
        format!("cannot use the control group {}: {error}{advice}", group.display())
    };
    let kind = std::fs::read_to_string(group.join("cgroup.type")).map_err(failed)?;
    if kind.trim() != "threaded" {
        let group = group.display();
        return Err(format!(
            "the control group {group} is not threaded ({}): echo threaded > {group}/cgroup.type",
            kind.trim()
        ));
    }
    OpenOptions::new().write(true).open(group.join("cgroup.threads")).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_listed_as_taskset_does() {
        let listed = |text: &str| {
            let processors: Result<Processors, String> = text.parse();
            processors.map(|processors| {
                (0..CpuSet::MAX_CPU).filter(|&one| processors.set.is_set(one)).collect::<Vec<_>>()
            })
        };
        assert_eq!(listed("0-2,8"), Ok(vec![0, 1, 2, 8]));
        assert_eq!(listed("3"), Ok(vec![3]));
        for wrong in ["", "a", "2-1", "1-", "0,,1", "99999", "-1"] {
            assert!(listed(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_is_not_here_is_refused() {
        let none = Placement::new(Some("1023".parse().expect("a number")), None);
        assert!(none.expect_err("so many").contains("may be used here"));
        let none = Placement::new(None, Some(Path::new("/proc")));
        assert!(none.expect_err("no group").contains("cannot use the control group /proc"));
    }
}
