//! Facts of the machine for the record.

use std::path::{Path, PathBuf};
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
    /// What else may move the numbers: the processors' governor, huge pages, the device's scheduler and cache.
    #[serde(default)]
    pub state: Vec<(String, String)>,
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
            state: state(dir),
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

/// Where something is mounted; what lies on another comes after it.
pub fn mount_points() -> Vec<PathBuf> {
    let point = |line: &str| line.split(' ').nth(1).map(|at| PathBuf::from(unescaped(at)));
    read("/proc/self/mounts").lines().filter_map(point).collect()
}

fn unescaped(word: &str) -> String {
    String::from_utf8_lossy(&ringtap_sandbox::unescaped(word.as_bytes())).into_owned()
}

fn mount_of(dir: &Path) -> (String, String) {
    let dir = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
    let mounts = read("/proc/self/mounts");
    let best = mounts
        .lines()
        .filter_map(|line| {
            let words: Vec<&str> = line.split(' ').collect();
            let [device, at, kind, options, ..] = words[..] else { return None };
            let at = unescaped(at);
            dir.starts_with(&at)
                .then(|| (at.len(), kind.to_owned(), format!("{device} on {at} ({options})")))
        })
        .max_by_key(|(len, ..)| *len);
    best.map_or_else(Default::default, |(_, kind, text)| (kind, text))
}

/// Settings of the kernel; those that it has.
fn state(dir: &Path) -> Vec<(String, String)> {
    let device = crate::run::meter::device_below(dir).and_then(|file| file.canonicalize().ok());
    // A partition's queue is the whole device's.
    let queue = device.and_then(|stat| {
        stat.ancestors().skip(1).take(2).map(|at| at.join("queue")).find(|queue| queue.is_dir())
    });
    let of_queue = |name: &str| queue.as_ref().map(|queue| queue.join(name));
    let fixed = |path: &str| Some(Path::new(path).to_owned());
    [
        ("frequency governor", fixed("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")),
        ("transparent huge pages", fixed("/sys/kernel/mm/transparent_hugepage/enabled")),
        ("device's scheduler", of_queue("scheduler")),
        ("device's cache", of_queue("write_cache")),
    ]
    .into_iter()
    .filter_map(|(name, file)| {
        let text = std::fs::read_to_string(file?).ok()?;
        Some((name.to_owned(), chosen(text.trim()).to_owned()))
    })
    .collect()
}

/// Of `none [mq-deadline] kyber` what is chosen.
fn chosen(text: &str) -> &str {
    let inside = text.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
    inside.map_or(text, |(chosen, _)| chosen)
}

/// The first line that each tool says about its version. bonnie++ has no flag for it; its CSV lines carry it.
fn versions(ringtap: &Path) -> Vec<(String, String)> {
    let tools = [
        (ringtap.to_string_lossy().into_owned(), "ringtap"),
        ("fio".into(), "fio"),
        ("qemu-nbd".into(), "qemu-nbd"),
        ("qemu-storage-daemon".into(), "qemu-storage-daemon"),
        ("qemu-system-x86_64".into(), "qemu-system-x86_64"),
        ("nbdkit".into(), "nbdkit"),
        ("nbd-client".into(), "nbd-client"),
        ("dd".into(), "dd"),
        ("cpio".into(), "cpio"),
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
    fn what_is_chosen_stands_in_brackets() {
        assert_eq!(chosen("none [mq-deadline] kyber"), "mq-deadline");
        assert_eq!(chosen("write back"), "write back");
    }

    #[test]
    fn this_machine_has_a_kernel_memory_and_a_file_system() {
        let host = Host::gather(Path::new("/proc"), Path::new("/bin/true"));
        assert!(host.kernel.starts_with("Linux "));
        assert!(host.memory > 1 << 20 && host.cpus > 0);
        assert_eq!(host.file_system, "proc");
        assert!(host.versions.iter().any(|(name, _)| name == "fio"));
    }
}
