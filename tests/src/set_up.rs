//! File systems and block devices made for a test.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::program;

const MIB: u64 = 1 << 20;

/// A mounted file system or an attached loop device, taken down when dropped.
pub struct SetUp {
    /// A folder of the test's own.
    pub dir: tempfile::TempDir,
    /// Where it is mounted.
    pub mounted: Option<PathBuf>,
    /// The loop device.
    pub device: Option<String>,
}

impl Drop for SetUp {
    fn drop(&mut self) {
        // The kernel may close the server's files a moment after its end.
        for _ in 0..100 {
            let done = match (&self.mounted, &self.device) {
                (Some(path), _) => Command::new("umount").arg(path).status(),
                (None, Some(device)) => Command::new("losetup").args(["-d", device]).status(),
                (None, None) => return,
            };
            if done.is_ok_and(|status| status.success()) {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    }
}

impl SetUp {
    /// A loop device that is attached.
    pub fn attached(dir: tempfile::TempDir, device: String) -> SetUp {
        SetUp { dir, mounted: None, device: Some(device) }
    }

    /// Where the file system is mounted.
    pub fn folder(&self) -> &Path {
        self.mounted.as_deref().expect("a file system")
    }
}

/// What a program prints that must end well.
pub fn ok(name: &str, package: &str, args: &[&str]) -> String {
    // What qemu-img measures for a LUKS key is at times less than a tick of the clock.
    let unmeasured =
        |told: &Output| String::from_utf8_lossy(&told.stderr).contains("accurate CPU usage");
    let mut tries = (0..60).map(|_| program(name, package, args));
    let output =
        tries.find(|told| !unmeasured(told)).expect("qemu-img measures CPU time in the end");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{name} {args:?}: {text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    text
}

/// A path as text.
pub fn plain(path: &Path) -> &str {
    path.to_str().expect("a plain path")
}

/// A file system of 256 MiB.
pub fn file_system(kind: &str, mkfs: &[&str], package: &str) -> SetUp {
    file_system_of(256, kind, mkfs, package)
}

/// Of so many MiB, where it lies in memory.
pub fn file_system_of(mib: u32, kind: &str, mkfs: &[&str], package: &str) -> SetUp {
    let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
    let mount = dir.path().join("mnt");
    fs::create_dir(&mount).expect("a folder");
    if kind == "tmpfs" {
        let size = format!("size={mib}M");
        ok("mount", "mount", &["-t", "tmpfs", "-o", &size, "none", plain(&mount)]);
    } else {
        let image = dir.path().join("fs");
        File::create(&image).expect("a file").set_len(400 * MIB).expect("its size");
        ok(mkfs[0], package, &[&mkfs[1..], &[plain(&image)]].concat());
        ok("mount", "mount", &["-o", "loop", plain(&image), plain(&mount)]);
    }
    SetUp { dir, mounted: Some(mount), device: None }
}
