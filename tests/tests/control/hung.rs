//! Storage that never answers an open: the end of the server does not wait for it for long, and closes all other disks.

use std::fs::{self, File};
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use ringtap_tests::{Control, Server, patience};
use rustix::fs::{Mode, OFlags, open};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
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
    is_whole(&text("a"));
}

/// A disk that was closed in order, and has what was written.
fn is_whole(image: &str) {
    let direct = format!("driver=qcow2,file.driver=file,file.filename={image}");
    let mut read = Command::new("qemu-io");
    let read = read.args(["-r", "--image-opts", &direct, "-c", "read -P 7 0 1M"]).output();
    let read = read.expect("apt-get install qemu-utils");
    let read = String::from_utf8_lossy(&[read.stdout, read.stderr].concat()).into_owned();
    assert!(read.contains("1 MiB") && !read.contains("failed"), "{read}");
    ok(Command::new("qemu-img").args(["check", "-q", image]));
}

const GET_FEATURES: u32 = 1;
const SET_FEATURES: u32 = 2;
const SET_OWNER: u32 = 3;
const SET_MEM_TABLE: u32 = 5;

fn message(request: u32, payload: &[u8]) -> Vec<u8> {
    let head = [request, 1, payload.len() as u32].into_iter().flat_map(u32::to_ne_bytes);
    head.chain(payload.iter().copied()).collect()
}

/// A front-end that shares such a file as its guest's memory.
fn share(socket: &Path, file: impl AsFd) -> UnixStream {
    let mut own = UnixStream::connect(socket).expect("a server");
    own.set_read_timeout(Some(patience())).expect("a time");
    own.write_all(&message(SET_OWNER, &[])).expect("it is taken");
    own.write_all(&message(GET_FEATURES, &[])).expect("it is taken");
    let mut reply = [0; 20];
    own.read_exact(&mut reply).expect("a reply");
    own.write_all(&message(SET_FEATURES, &(1u64 << 32).to_ne_bytes())).expect("it is taken");
    // One region of 1 MiB at 0.
    let table = [1u64, 0, 1 << 20, 1 << 30, 0].into_iter().flat_map(u64::to_ne_bytes);
    let table = message(SET_MEM_TABLE, &table.collect::<Vec<u8>>());
    let (files, parts) = ([file.as_fd()], [IoSlice::new(&table)]);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut more = SendAncillaryBuffer::new(&mut space);
    assert!(more.push(SendAncillaryMessage::ScmRights(&files)));
    assert_eq!(sendmsg(&own, &parts, &mut more, SendFlags::empty()), Ok(table.len()));
    own
}

/// Memory of a guest on a file that answers nothing: who maps it waits for good, and the end does not.
#[test]
fn the_end_waits_for_no_memory_that_never_answers() {
    let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
    let text = |name: &str| dir.path().join(name).display().to_string();
    let late = dir.path().join("late");
    fs::create_dir(&late).expect("a folder");
    for name in ["a", "b"] {
        let mut make = Command::new("qemu-img");
        ok(make.args(["create", "-q", "-f", "qcow2", &text(name), "16M"]));
    }
    let [nbd, guest] = ["nbd", "guest"].map(text);
    let [to_nbd, to_guest] = [&nbd, &guest].map(|socket| format!("unix:{socket}"));
    let disks = [[&text("a"), "--nbd", &to_nbd], [&text("b"), "--vhost-user", &to_guest]];
    let disks = disks.map(|[image, how, socket]| [image, "-f", "qcow2", how, socket]);
    let server = Server::start(disks.concat());
    qemu_io(&format!("nbd+unix:///?socket={nbd}"), &["write -P 7 0 1M"]).expect("it is served");
    let Some(_hung) = Hung::over(&late) else { return };
    // Nothing is asked of the file system for this.
    let file = open(&late, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).expect("its root");
    let _front_end = share(&dir.path().join("guest"), file);
    // Nothing tells that it is being mapped.
    std::thread::sleep(Duration::from_secs(2));
    let said = server.stop_badly();
    assert!(said.contains("a message of its front-end has not been carried out"), "{said}");
    assert!(said.contains(&format!("{} left", text("b"))), "{said}");
    is_whole(&text("a"));
}
