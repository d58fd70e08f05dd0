//! What the guest tests share: an appliance each, disks and a vhost-user server not our own.
#![allow(dead_code)]

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use ringtap_guest::{Appliance, Machine};
use ringtap_tests::listens;

pub const SHORT: Duration = Duration::from_secs(60);
pub const LONG: Duration = Duration::from_secs(300);

pub fn appliance(machine: Machine) -> Appliance {
    let modules: &[&str] = if machine == Machine::Pc { &["ahci", "nvme"] } else { &[] };
    Appliance::builder(machine)
        .modules(modules.iter().copied())
        .programs(["fio", "dd", "mke2fs", "e2fsck", "fstrim"])
        .build(&Appliance::default_cache())
        .unwrap_or_else(|e| panic!("{e}"))
}

/// A file of random bytes.
pub fn random_disk(path: &Path, len: u64) {
    let mut random = File::open("/dev/urandom").unwrap().take(len);
    let mut file = File::create(path).unwrap();
    std::io::copy(&mut random, &mut file).unwrap();
}

pub fn empty_disk(path: &Path, len: u64) {
    File::create(path).unwrap().set_len(len).unwrap();
}

/// qemu-storage-daemon serving one raw file over vhost-user-blk; killed when dropped.
pub struct Server {
    child: Child,
    pub socket: PathBuf,
}

impl Server {
    pub fn start(disk: &Path, socket: &Path) -> Self {
        let _ = fs::remove_file(socket);
        let blockdev = format!("driver=file,filename={},node-name=f,discard=unmap", disk.display());
        let export = format!(
            "type=vhost-user-blk,id=e,node-name=f,writable=on,addr.type=unix,addr.path={}",
            socket.display()
        );
        let child = Command::new("qemu-storage-daemon")
            .args(["--blockdev", &blockdev, "--export", &export])
            .stdin(Stdio::null())
            .spawn()
            .expect("qemu-storage-daemon is missing: apt-get install qemu-utils");
        let server = Self { child, socket: socket.to_path_buf() };
        let end = Instant::now() + SHORT;
        while !listens(socket) {
            assert!(Instant::now() < end, "qemu-storage-daemon made no {}", socket.display());
            thread::sleep(Duration::from_millis(10));
        }
        server
    }

    /// As `kill -9`.
    pub fn kill(self) {
        drop(self);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The processes whose process group is `group`, zombies left out.
pub fn members(group: u32) -> Vec<String> {
    fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|entry| fs::read_to_string(entry.path().join("stat")).ok())
        .filter(|stat| {
            let Some((_, rest)) = stat.rsplit_once(')') else { return false };
            let fields: Vec<&str> = rest.split_whitespace().collect();
            fields.first() != Some(&"Z") && fields.get(2) == Some(&group.to_string().as_str())
        })
        .collect()
}

/// What a process has open.
pub fn open_files(pid: u32) -> Vec<PathBuf> {
    let dir = format!("/proc/{pid}/fd");
    fs::read_dir(dir).unwrap().flatten().filter_map(|e| fs::read_link(e.path()).ok()).collect()
}

/// The directory with the console log of a running guest.
pub fn run_directory(pid: u32) -> PathBuf {
    open_files(pid)
        .into_iter()
        .find(|p| p.ends_with("console"))
        .and_then(|p| p.parent().map(Path::to_path_buf))
        .expect("a running guest has its console open")
}

pub fn wait_until(what: &str, mut ready: impl FnMut() -> bool) {
    let end = Instant::now() + SHORT;
    while !ready() {
        assert!(Instant::now() < end, "{what} did not come within {SHORT:?}");
        thread::sleep(Duration::from_millis(20));
    }
}
