//! Facts of the machine for the record.

use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::process;
use crate::stop::Stop;

/// What a reader must know about the machine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Host {
    /// `uname -sr` and the machine's architecture.
    pub kernel: String,
    /// The distribution.
    pub system: String,
    /// The processor's name.
    pub cpu: String,
    /// Logical processors.
    pub cpus: usize,
    /// Bytes of memory.
    pub memory: u64,
    /// Whether a hypervisor is underneath.
    pub virtual_machine: bool,
    /// Type of the file system that the disks lie on.
    pub file_system: String,
    /// The device below it, and its mount options.
    pub mount: String,
    /// One-minute load when the run began: more than a few tenths disturb it.
    pub load: f64,
    /// Versions of the tools, by name.
    pub versions: Vec<(String, String)>,
}

impl Host {
    /// This machine, with the disks in `dir`.
    pub fn gather(dir: &Path, ringtap: &Path) -> Host {
        let uname = rustix::system::uname();
        let cpuinfo = read("/proc/cpuinfo");
        let (file_system, mount) = mount_of(dir);
        Host {
            kernel: format!(
                "{} {} {}",
                uname.sysname().to_string_lossy(),
                uname.release().to_string_lossy(),
                uname.machine().to_string_lossy()
            ),
            system: field(&read("/etc/os-release"), "PRETTY_NAME=").trim_matches('"').to_owned(),
            cpu: field(&cpuinfo, "model name").trim_start_matches([' ', '\t', ':']).to_owned(),
            cpus: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            memory: memory(),
            virtual_machine: field(&cpuinfo, "flags")
                .split_whitespace()
                .any(|flag| flag == "hypervisor"),
            file_system,
            mount,
            load: read("/proc/loadavg")
                .split_whitespace()
                .next()
                .and_then(|l| l.parse().ok())
                .unwrap_or(0.0),
            versions: versions(ringtap),
        }
    }
}

/// Bytes of memory of this machine.
pub fn memory() -> u64 {
    let text = read("/proc/meminfo");
    let kib: u64 = field(&text, "MemTotal:")
        .split_whitespace()
        .next()
        .and_then(|n| n.parse().ok())
        .unwrap_or(0);
    kib * 1024
}

fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

fn field<'a>(text: &'a str, name: &str) -> &'a str {
    text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or("").trim()
}

fn mount_of(dir: &Path) -> (String, String) {
    let dir = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
    let mounts = read("/proc/self/mounts");
    let best = mounts
        .lines()
        .filter_map(|line| {
            let words: Vec<&str> = line.split(' ').collect();
            let [device, at, kind, options, ..] = words[..] else { return None };
            dir.starts_with(at)
                .then(|| (at.len(), kind.to_owned(), format!("{device} on {at} ({options})")))
        })
        .max_by_key(|(len, ..)| *len);
    best.map_or_else(Default::default, |(_, kind, text)| (kind, text))
}

/// The first line that each tool says about its version. bonnie++ has no flag for it; its CSV lines carry it.
fn versions(ringtap: &Path) -> Vec<(String, String)> {
    let tools = [
        (ringtap.to_string_lossy().into_owned(), "ringtap"),
        ("fio".into(), "fio"),
        ("qemu-nbd".into(), "qemu-nbd"),
        ("qemu-storage-daemon".into(), "qemu-storage-daemon"),
        ("dd".into(), "dd"),
        ("losetup".into(), "losetup"),
    ];
    tools
        .iter()
        .map(|(program, name)| {
            let mut command = std::process::Command::new(program);
            command.arg("--version");
            let version = match process::run(command, Duration::from_secs(10), &Stop::default()) {
                Ok(output) => output.stdout.lines().next().unwrap_or("").trim().to_owned(),
                Err(_) => "not here".into(),
            };
            ((*name).to_owned(), version)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_a_kernel_memory_and_a_file_system() {
        let host = Host::gather(Path::new("/proc"), Path::new("/bin/true"));
        assert!(host.kernel.starts_with("Linux "));
        assert!(host.memory > 1 << 20 && host.cpus > 0);
        assert_eq!(host.file_system, "proc");
        assert!(host.versions.iter().any(|(name, _)| name == "fio"));
    }
}
