//! Storage that never answers an open: the end of the server does not wait for it for long, and closes all other disks.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use ringtap_tests::{Control, Server, patience};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use serde_json::json;

use crate::{ok, qemu_io};

/// A file system that answers nothing, of no name. It ends with this.
struct Hung {
    folder: PathBuf,
    _device: File,
}

impl Hung {
    /// None where nobody may mount.
    fn over(folder: &Path) -> Option<Hung> {
        let device = File::options().read(true).write(true).open("/dev/fuse").ok()?;
        let data = format!("fd={},rootmode=40000,user_id=0,group_id=0", device.as_raw_fd());
        let data = std::ffi::CString::new(data).expect("words");
        mount("hung", folder, "fuse.hung", MountFlags::empty(), Some(&*data)).ok()?;
        Some(Hung { folder: folder.to_owned(), _device: device })
    }
}

impl Drop for Hung {
    fn drop(&mut self) {
        // What waits there goes on with an error once the connection is aborted.
        let _ = unmount(&self.folder, UnmountFlags::FORCE);
        let _ = unmount(&self.folder, UnmountFlags::DETACH);
    }
}

/// The server says what it left, and its other disk is as if it had been alone.
#[test]
fn the_end_waits_for_no_open_that_never_returns() {
    let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
    let text = |name: &str| dir.path().join(name).display().to_string();
    let late = dir.path().join("late");
    fs::create_dir(&late).expect("a folder");
    let mut make = Command::new("qemu-img");
    ok(make.args(["create", "-q", "-f", "qcow2", &text("a"), "16M"]));
    let (control, nbd, missing) =
        (format!("unix:{}", text("control")), text("nbd"), text("late/b"));
    let address = format!("unix:{nbd}");
    let server = Server::start([
        "--control",
        &control,
        &text("a"),
        "-f",
        "qcow2",
        "--nbd",
        &address,
        &missing,
        "-f",
        "raw",
        "--node-name",
        "b",
    ]);
    let mut client = Control::open(&dir.path().join("control"));
    let Some(_hung) = Hung::over(&late) else { return };
    qemu_io(&format!("nbd+unix:///?socket={nbd}"), &["write -P 7 0 1M"]).expect("it is served");
    // One that was left out is tried again, and one comes.
    server.signal(libc::SIGHUP);
    let file = json!({"driver": "file", "filename": text("late/c")});
    let add = json!({
        "execute": "blockdev-add",
        "arguments": {"driver": "raw", "node-name": "c", "file": file},
    });
    client.send(format!("{add}\n"));
    let mut other = Control::open(&dir.path().join("control"));
    let end = Instant::now() + patience();
    let busy = json!({"driver": "null-co", "node-name": "c", "size": 512});
    while other.call("blockdev-add", busy.clone()).is_ok() {
        assert!(Instant::now() < end, "it does not begin");
        other.ok("blockdev-del", json!({"node-name": "c"}));
        // This one came first.
        client.send(format!("{add}\n"));
    }
    let said = server.stop_badly();
    for name in [&missing, &text("late/c")] {
        assert!(said.contains(&format!("{name}: it is not opened")), "{said}");
    }
    let direct = format!("driver=qcow2,file.driver=file,file.filename={}", text("a"));
    let mut read = Command::new("qemu-io");
    let read = read.args(["-r", "--image-opts", &direct, "-c", "read -P 7 0 1M"]).output();
    let read = read.expect("apt-get install qemu-utils");
    let read = String::from_utf8_lossy(&[read.stdout, read.stderr].concat()).into_owned();
    assert!(read.contains("1 MiB") && !read.contains("failed"), "{read}");
    ok(Command::new("qemu-img").args(["check", "-q", &text("a")]));
}
