//! A disk as a file by FUSE, on this host: by loop devices, and by programs that know files only.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use ringtap_tests::{Control, Server, patience, program, ringtap};
use rustix::fs::{FallocateFlags, fallocate};
use serde_json::json;

const MIB: u64 = 1 << 20;

/// A folder with a disk and the file it is shown as; what was mounted or attached goes at the end.
struct Place {
    dir: tempfile::TempDir,
    undo: Vec<[String; 2]>,
}

impl Drop for Place {
    fn drop(&mut self) {
        for [name, argument] in self.undo.iter().rev() {
            let option = if name == "losetup" { "-d" } else { "-l" };
            let _ = Command::new(name).args([option, argument]).output();
        }
        // A failed test leaves the file mounted: what is killed cannot unmount.
        let _ = Command::new("umount").arg("-lq").arg(self.file()).output();
    }
}

impl Place {
    fn new(size: u64) -> Place {
        // Not in /tmp, which may be a tmpfs: a disk under O_DIRECT is what is meant.
        let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
        let place = Place { dir, undo: vec![] };
        File::create(place.disk()).expect("a file").set_len(size).expect("its size");
        place
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn disk(&self) -> PathBuf {
        self.at("disk.raw")
    }

    fn file(&self) -> PathBuf {
        self.at("file")
    }

    fn serve(&self, more: &[&str]) -> Server {
        Server::start(self.arguments(more))
    }

    fn arguments(&self, more: &[&str]) -> Vec<String> {
        let (disk, file) = (self.disk(), self.file());
        let mut all = vec![plain(&disk), "-f", "raw", "--fuse", plain(&file)];
        all.extend(more);
        all.into_iter().map(str::to_owned).collect()
    }

    /// What a server that cannot start says.
    fn refused(&self, file: &Path) -> String {
        let disk = self.disk();
        let args = ["serve", plain(&disk), "-f", "raw", "--fuse", plain(file)];
        let output = program(plain(&ringtap()), "ringtap", args);
        assert!(!output.status.success(), "{} was taken", file.display());
        String::from_utf8_lossy(&output.stderr).into_owned()
    }

    fn loop_device(&mut self, options: &[&str]) -> String {
        let file = self.file();
        let args = [&["-f", "--show"][..], options, &[plain(&file)]].concat();
        let device = ok("losetup", "mount", &args).trim().to_owned();
        self.undo.push(["losetup".into(), device.clone()]);
        device
    }

    fn detach(&mut self) {
        let [name, device] = self.undo.pop().expect("a device");
        ok(&name, "mount", &["-d", &device]);
        // The kernel lets go of the file a moment later.
        let end = Instant::now() + patience();
        let held = |device: &str| ok("losetup", "mount", &["-a"]).contains(&format!("{device}:"));
        while held(&device) {
            assert!(Instant::now() < end, "{device} is not let go");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// A process that does not outlive its test.
struct Killed(std::process::Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn plain(path: &Path) -> &str {
    path.to_str().expect("a plain path")
}

fn ok(name: &str, package: &str, args: &[&str]) -> String {
    let output = program(name, package, args);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name} {args:?}: {text}{said}");
    text
}

fn writable(path: &Path) -> File {
    File::options().read(true).write(true).open(path).expect("the file")
}

fn errno(result: io::Result<impl Sized>) -> i32 {
    result.err().and_then(|error| error.raw_os_error()).expect("an error")
}

fn is_mounted(path: &Path) -> bool {
    let table = fs::read_to_string("/proc/self/mountinfo").expect("the mounts");
    table.contains(&format!(" {} ", path.display()))
}

#[test]
fn a_loop_device_on_it_carries_a_file_system() {
    for (cache, direct) in [("none", "on"), ("writeback", "off")] {
        let mut place = Place::new(192 * MIB);
        let server = place.serve(&["--cache", cache]);
        let device = place.loop_device(&[&format!("--direct-io={direct}")]);
        ok("mkfs.ext4", "e2fsprogs", &["-q", &device]);
        let mount = place.at("mnt");
        fs::create_dir(&mount).expect("a folder");
        ok("mount", "mount", &[&device, plain(&mount)]);
        place.undo.push(["umount".into(), plain(&mount).into()]);
        let folder = format!("--directory={}", mount.display());
        let fio = [
            "--name=v",
            &folder,
            "--size=16M",
            "--rw=randwrite",
            "--bsrange=4k-256k",
            "--iodepth=16",
            "--ioengine=libaio",
            "--direct=1",
            "--verify=crc32c",
            "--fsync=64",
            "--verify_state_save=0",
        ];
        ok("fio", "fio", &fio);
        place.undo.pop();
        ok("umount", "mount", &[plain(&mount)]);
        ok("e2fsck", "e2fsprogs", &["-fn", &device]);
        ok("blkdiscard", "util-linux", &["-f", &device]);
        let left = fs::metadata(place.disk()).expect("the disk").blocks() * 512;
        assert!(left < MIB, "{left} bytes are left after a discard ({cache})");
        place.detach();
        let said = server.stop();
        assert!(!said.contains("in use"), "{said}");
        assert!(!is_mounted(&place.file()) && !place.file().exists(), "something is left");
    }
}

#[test]
fn it_behaves_as_a_file_of_a_fixed_size() {
    let place = Place::new(8 * MIB + 512);
    let size = 8 * MIB + 512;
    // A file that is there stays there.
    fs::write(place.file(), "mine").expect("a file");
    let server = place.serve(&[]);
    let meta = fs::metadata(place.file()).expect("the file");
    assert_eq!((meta.len(), meta.mode() & 0o7777), (size, 0o600));
    let file = writable(&place.file());

    // Unaligned, across blocks, at the end, past it.
    let bytes: Vec<u8> = (0..100_003u32).map(|n| (n * 31 >> 3) as u8).collect();
    file.write_all_at(&bytes, 12_345).expect("a write");
    let mut back = vec![0; bytes.len()];
    file.read_exact_at(&mut back, 12_345).expect("a read");
    assert!(back == bytes, "what was written reads back otherwise");
    assert_eq!(file.write_at(&bytes, size - 700).expect("what fits"), 700);
    assert_eq!(errno(file.write_at(&bytes, size)), libc::ENOSPC);
    assert_eq!(errno(file.write_at(&bytes, size + MIB)), libc::ENOSPC);
    assert_eq!(file.read_at(&mut back, size - 5).expect("what there is"), 5);
    assert_eq!(file.read_at(&mut back, size + 5).expect("nothing"), 0);
    assert_eq!(errno(file.set_len(MIB)), libc::EPERM);
    file.set_len(size).expect("the size it has");
    assert_eq!(errno(File::create(place.file())), libc::EPERM, "O_TRUNC");
    assert_eq!(errno(fs::set_permissions(place.file(), meta.permissions())), libc::EPERM);
    assert!(rustix::fs::statfs(place.file()).expect("statfs").f_blocks >= 2048);
    file.sync_all().expect("fsync");
    let durable = File::options().write(true).custom_flags(libc::O_DSYNC).open(place.file());
    durable.expect("the file").write_all_at(b"stable", 7).expect("a write");

    // Zeros, holes, and where they are.
    fallocate(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, MIB).expect("hole");
    file.write_all_at(&[7; 8192], 2 * MIB).expect("a write");
    let zero = FallocateFlags::ZERO_RANGE;
    fallocate(&file, zero, 2 * MIB + 100, 200).expect("zeros");
    assert_eq!(errno(fallocate(&file, zero, size - 512, 1024).map_err(Into::into)), libc::ENOSPC);
    let far = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(&file, far, size + MIB, MIB).expect("nothing to do");
    let grow = fallocate(&file, FallocateFlags::empty(), 0, 16 * MIB).map_err(Into::into);
    assert_eq!(errno(grow), libc::EOPNOTSUPP);
    let collapse = fallocate(&file, FallocateFlags::COLLAPSE_RANGE, 0, MIB).map_err(Into::into);
    assert_eq!(errno(collapse), libc::EOPNOTSUPP);
    let mut back = vec![1; 8192];
    file.read_exact_at(&mut back, 2 * MIB).expect("a read");
    assert!(
        back.iter().enumerate().all(|(i, b)| *b == if (100..300).contains(&i) { 0 } else { 7 })
    );
    file.read_exact_at(&mut back, 12_288).expect("a read");
    assert!(back.iter().all(|byte| *byte == 0), "a punched hole has bytes");
    let seek = |whence: i32, from: u64| {
        // SAFETY: lseek touches no memory.
        let at = unsafe { libc::lseek(file.as_raw_fd(), from as i64, whence) };
        u64::try_from(at).map_err(|_| io::Error::last_os_error().raw_os_error())
    };
    assert_eq!(seek(libc::SEEK_DATA, 0), Ok(2 * MIB));
    assert_eq!(seek(libc::SEEK_HOLE, 2 * MIB), Ok(2 * MIB + 8192));
    assert_eq!(seek(libc::SEEK_HOLE, 5), Ok(5));
    assert_eq!(seek(libc::SEEK_DATA, size + 1), Err(Some(libc::ENXIO)));
    assert_eq!(seek(libc::SEEK_HOLE, size - 512), Ok(size));

    // Who copies it sees when it changed, and that it has holes.
    let shown = || fs::metadata(place.file()).expect("the file");
    let before = shown().modified().expect("a time");
    assert_eq!(shown().modified().expect("a time"), before, "nothing has changed");
    file.write_all_at(b"later", MIB).expect("a write");
    let after = shown().modified().expect("a time");
    assert!(after > before, "{before:?}, then {after:?}");
    let earlier = std::time::UNIX_EPOCH + Duration::new(1_000_000_000, 5_000_000);
    file.set_modified(earlier).expect("a time");
    assert_eq!(shown().modified().expect("a time"), earlier);
    let blocks = fs::metadata(place.disk()).expect("the disk").blocks();
    assert_eq!(shown().blocks(), blocks);
    assert!(blocks < size / 512 / 2, "{blocks}");

    // It is resized from outside.
    writable(&place.disk()).set_len(16 * MIB).expect("a size");
    server.signal(libc::SIGHUP);
    let end = Instant::now() + patience();
    while fs::metadata(place.file()).expect("the file").len() != 16 * MIB {
        assert!(Instant::now() < end, "the new size is not seen");
        std::thread::sleep(Duration::from_millis(10));
    }
    file.write_all_at(b"new", 16 * MIB - 3).expect("a write");
    drop(file);
    server.stop();
    assert_eq!(fs::read(place.file()).expect("the file under it"), b"mine");
    let mut last = [0; 3];
    File::open(place.disk()).expect("the disk").read_exact_at(&mut last, 16 * MIB - 3).expect("it");
    assert_eq!(&last, b"new");
}

#[test]
fn it_grows_only_where_that_was_asked_for() {
    let place = Place::new(MIB);
    let server = place.serve(&["--growable"]);
    let file = writable(&place.file());
    let len = || fs::metadata(place.file()).expect("the file").len();
    file.write_all_at(&[5; 8192], MIB - 4096).expect("a write across the end");
    assert_eq!(len(), MIB + 4096);
    file.write_all_at(b"far", 3 * MIB + 5).expect("a write past the end");
    assert_eq!(len(), 3 * MIB + 512, "whole sectors");
    file.set_len(4 * MIB).expect("a larger size");
    assert_eq!(errno(file.set_len(MIB)), libc::EPERM);
    fallocate(&file, FallocateFlags::ZERO_RANGE, 4 * MIB, MIB).expect("zeros past the end");
    let farther = errno(file.write_at(b"x", 1 << 60));
    assert!([libc::EFBIG, libc::EINVAL, libc::ENOSPC].contains(&farther), "{farther}");
    assert_eq!(len(), 5 * MIB);
    // Many at once, each a piece of its own, in no order: none is cut off by another.
    let threads: Vec<_> = (0..8u64)
        .map(|thread| {
            let file = file.try_clone().expect("a descriptor");
            std::thread::spawn(move || {
                for n in 0..16 {
                    let at = 5 * MIB + (n * 8 + thread) * 4096;
                    file.write_all_at(&[thread as u8 + 1; 4096], at).expect("a write");
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().expect("a thread"));
    drop(file);
    server.stop();
    let all = fs::read(place.disk()).expect("the disk");
    assert_eq!(all.len() as u64, 5 * MIB + 128 * 4096);
    assert_eq!(&all[3 * MIB as usize + 5..][..3], b"far");
    for (n, piece) in all[5 * MIB as usize..].chunks(4096).enumerate() {
        assert!(piece.iter().all(|byte| *byte == (n % 8) as u8 + 1), "piece {n}");
    }
    // What cannot grow says so at the start.
    let (disk, file) = (place.at("other.qcow2"), place.file());
    ok(plain(&ringtap()), "ringtap", &["create", "-f", "qcow2", plain(&disk), "1M"]);
    let args = ["serve", plain(&disk), "-f", "qcow2", "--fuse", plain(&file), "--growable"];
    let output = program(plain(&ringtap()), "ringtap", args);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("--growable takes a raw image"), "{said}");
}

#[test]
fn it_hides_no_image_of_its_disk() {
    let place = Place::new(MIB);
    let (top, middle) = (place.at("top.qcow2"), place.at("middle.qcow2"));
    for (name, below, format) in
        [(&middle, place.disk(), "raw"), (&top, place.at("middle.qcow2"), "qcow2")]
    {
        let args = ["create", "-q", "-f", "qcow2", "-b", plain(&below), "-F", format, plain(name)];
        ok(plain(&ringtap()), "ringtap", &args);
    }
    for file in [&top, &middle, &place.disk()] {
        let args = ["serve", plain(&top), "-f", "qcow2", "--fuse", plain(file)];
        let output =
            program("timeout", "coreutils", [&["10", plain(&ringtap())][..], &args].concat());
        let said = String::from_utf8_lossy(&output.stderr);
        let _ = Command::new("umount").arg("-lq").arg(file).output();
        assert_eq!(output.status.code(), Some(1), "{}: {said}", file.display());
        assert!(said.contains("mount over another file"), "{said}");
    }
    let control = format!("unix:{}", place.at("c").display());
    let server =
        Server::start([plain(&top), "-f", "qcow2", "--node-name", "t", "--control", &control]);
    let mut client = Control::open(&place.at("c"));
    let export =
        |file: &Path| json!({"id": "e", "type": "fuse", "node-name": "t", "mountpoint": file});
    for file in [&middle, &place.disk()] {
        let refused = client.call("block-export-add", export(file)).expect_err("refused");
        assert!(refused.to_string().contains("mount over another file"), "{refused}");
    }
    client.ok("block-export-add", export(&place.file()));
    drop(client);
    server.stop();
}

#[test]
fn a_read_only_file_takes_no_writes() {
    let mut place = Place::new(4 * MIB);
    let server = place.serve(&["--read-only"]);
    let opened = File::options().write(true).open(place.file());
    assert_eq!(opened.err().map(|error| error.kind()), Some(ErrorKind::ReadOnlyFilesystem));
    let device = place.loop_device(&[]);
    let shown = fs::read_to_string(format!("/sys/block/{}/ro", &device[5..])).expect("its state");
    assert_eq!(shown.trim(), "1");
    let mut all = vec![];
    File::open(&device).expect("the device").read_to_end(&mut all).expect("its bytes");
    assert_eq!(all.len() as u64, 4 * MIB);
    place.detach();
    server.stop();
}

#[test]
fn a_killed_servers_mount_is_cleaned_up_by_the_next() {
    let mut place = Place::new(4 * MIB);
    let server = place.serve(&[]);
    let device = File::open(place.loop_device(&[])).expect("a loop device");
    server.kill();
    // Aborted while the kernel closes the server's files, not connected afterwards.
    let dead = errno(fs::metadata(place.file()));
    assert!([libc::ENOTCONN, libc::ECONNABORTED].contains(&dead), "{dead}");
    let server = place.serve(&[]);
    // Who used the dead one gets errors as before, and can let go of it.
    assert_eq!(errno(device.read_at(&mut [0; 512], MIB)), libc::EIO);
    drop(device);
    place.detach();
    let mut file = writable(&place.file());
    file.write_all(b"after").expect("a write");
    file.seek(SeekFrom::Start(0)).expect("a seek");
    let mut back = [0; 5];
    file.read_exact(&mut back).expect("a read");
    assert_eq!(&back, b"after");
    drop(file);

    // Where another serves, the next does not.
    let other = place.at("other.raw");
    File::create(&other).expect("a file").set_len(MIB).expect("its size");
    let file = place.file();
    let args = ["serve", plain(&other), "-f", "raw", "--fuse", plain(&file)];
    let output = program(plain(&ringtap()), "ringtap", args);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("is mounted on it"), "{said}");
    server.stop();
    assert!(!is_mounted(&place.file()), "a mount is left");
}

#[test]
fn places_where_nothing_can_be_mounted_are_refused() {
    let place = Place::new(MIB);
    let folder = place.at("folder");
    fs::create_dir(&folder).expect("a folder");
    for (path, said) in [
        (folder.clone(), "regular file"),
        (PathBuf::from("/"), "regular file"),
        (PathBuf::from("/dev/null"), "special file"),
        (place.disk(), "the image itself"),
        (folder.join("no/such"), "make it first"),
    ] {
        let message = place.refused(&path);
        assert!(message.contains(said), "{}: {message}", path.display());
        assert!(!is_mounted(&path) || path == Path::new("/"));
    }
    // One place by two names.
    let (disk, file) = (place.disk(), place.file());
    let linked = place.at("linked");
    std::os::unix::fs::symlink(place.dir.path(), &linked).expect("a link");
    for other in [linked.join("file"), folder.join("../file")] {
        let args =
            ["serve", plain(&disk), "-f", "raw", "--fuse", plain(&file), "--fuse", plain(&other)];
        let output = program(plain(&ringtap()), "ringtap", args);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains("two disks ask for the file"), "{said}");
        assert!(!is_mounted(&file) && !file.exists(), "something is left");
    }
    // A second file fails: the first does not stay mounted.
    let (disk, file) = (place.disk(), place.file());
    let args =
        ["serve", plain(&disk), "-f", "raw", "--fuse", plain(&file), "--fuse", plain(&folder)];
    assert!(!program(plain(&ringtap()), "ringtap", args).status.success());
    assert!(!is_mounted(&file) && !file.exists(), "something is left");
}

#[test]
fn a_full_file_system_below_is_an_error_and_no_more() {
    let mut place = Place::new(MIB);
    let mount = place.at("small");
    fs::create_dir(&mount).expect("a folder");
    ok("mount", "mount", &["-t", "tmpfs", "-o", "size=4M", "none", plain(&mount)]);
    place.undo.push(["umount".into(), plain(&mount).into()]);
    let disk = mount.join("disk.raw");
    File::create(&disk).expect("a file").set_len(64 * MIB).expect("its size");
    let file = place.file();
    let server =
        Server::start([plain(&disk), "-f", "raw", "--cache", "writeback", "--fuse", plain(&file)]);
    let open = writable(&file);
    let full =
        (0..64u64).find_map(|n| open.write_all_at(&vec![n as u8 + 1; MIB as usize], n * MIB).err());
    assert_eq!(full.and_then(|error| error.raw_os_error()), Some(libc::ENOSPC));
    let mut back = vec![0; MIB as usize];
    open.read_exact_at(&mut back, MIB).expect("what was written");
    assert!(back.iter().all(|byte| *byte == 2));
    // Room comes back.
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(&open, hole, 0, 2 * MIB).expect("a hole");
    open.write_all_at(&back, 60 * MIB).expect("a write");
    drop(open);
    server.stop();
}

#[test]
fn a_server_that_is_stopped_does_not_wait_for_those_who_use_the_file() {
    let place = Place::new(4 * MIB);
    let server = place.serve(&[]);
    let open = writable(&place.file());
    open.write_all_at(b"kept", 4096).expect("a write");
    let said = server.stop();
    assert!(said.contains("was in use"), "{said}");
    assert!(!is_mounted(&place.file()));
    assert!(open.write_all_at(b"late", 4096).is_err());
    let mut back = [0; 4];
    File::open(place.disk()).expect("the disk").read_exact_at(&mut back, 4096).expect("a read");
    assert_eq!(&back, b"kept");
}

/// As many requests wait as one program may have in flight there: whoever only looks at the file does not wait with them.
#[test]
fn what_needs_no_disk_is_answered_though_requests_wait() {
    let place = Place::new(16 * MIB);
    let control = format!("unix:{}", plain(&place.at("control")));
    let server = place.serve(&["--node-name", "a", "--control", &control]);
    let file = place.file();
    let mut client = ringtap_tests::Control::open(&place.at("control"));
    client.ok("__ringtap_pause", serde_json::json!({ "node-name": "a" }));
    let name = format!("--filename={}", plain(&file));
    let mut fio = Command::new("fio");
    fio.args(["--name=r", &name, "--size=16M", "--rw=randread", "--bs=4k", "--iodepth=900"]);
    fio.args(["--ioengine=libaio", "--direct=1", "--number_ios=2000", "--norandommap"]);
    let mut fio = fio.stdout(std::process::Stdio::null()).spawn().expect("apt-get install fio");
    let held = |client: &mut ringtap_tests::Control| {
        let stats = client.ok("query-blockstats", serde_json::json!({}));
        stats[0]["__ringtap_state"]["held_by_pause"].as_u64().expect("a number")
    };
    let (end, mut before) = (Instant::now() + patience(), 0);
    // Until no more come.
    loop {
        let now = held(&mut client);
        if now >= 128 && now == before {
            break;
        }
        assert!(Instant::now() < end, "{now} requests wait");
        before = now;
        std::thread::sleep(Duration::from_millis(500));
    }
    let mut looks = Killed(Command::new("stat").arg(&file).spawn().expect("coreutils"));
    let end = Instant::now() + patience() / 4;
    let answered = loop {
        match looks.0.try_wait().expect("its status") {
            Some(status) => break status.success(),
            None if Instant::now() > end => break false,
            None => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    client.ok("__ringtap_resume", serde_json::json!({ "node-name": "a" }));
    assert!(answered, "stat waits for the disk, of which {before} requests wait");
    assert!(fio.wait().expect("it ends").success());
    server.stop();
}

#[test]
fn a_server_whose_file_is_unmounted_by_others_says_so() {
    let place = Place::new(MIB);
    let (disk, file) = (place.disk(), place.file());
    let child = Command::new("timeout")
        .args(["60", plain(&ringtap()), "serve", plain(&disk), "-f", "raw", "--fuse", plain(&file)])
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("timeout of coreutils");
    let end = Instant::now() + patience();
    while !is_mounted(&file) {
        assert!(Instant::now() < end, "it is not mounted");
        std::thread::sleep(Duration::from_millis(10));
    }
    ok("umount", "mount", &[plain(&file)]);
    let output = child.wait_with_output().expect("its end");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("unmounted by somebody else"), "{said}");
}

#[test]
fn an_ordinary_user_may_serve_a_file() {
    use std::os::unix::fs::PermissionsExt;
    let place = Place::new(4 * MIB);
    let (disk, file) = (place.disk(), place.file());
    File::create(&file).expect("a file");
    let nobody = 65534;
    fs::set_permissions(place.dir.path(), fs::Permissions::from_mode(0o755)).expect("a mode");
    for path in [place.dir.path(), &disk, &file] {
        std::os::unix::fs::chown(path, Some(nobody), Some(nobody)).expect("an owner");
    }
    // The binary may lie where only root can go. Another process copies it: a descriptor to write it
    // by, handed down to what another test starts, would make it "busy".
    let binary = place.at("ringtap");
    ok("cp", "coreutils", &[plain(&ringtap()), plain(&binary)]);
    // The second finds what the first, killed, has left.
    for end in [rustix::process::Signal::KILL, rustix::process::Signal::TERM] {
        let child = Command::new("setpriv")
            .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
            .args([plain(&binary), "serve", plain(&disk), "-f", "raw", "--fuse", plain(&file)])
            .stderr(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .expect("setpriv of util-linux");
        let Killed(child) = &mut Killed(child);
        let mut first = [0; 5];
        let ready = child.stdout.take().expect("its output").read_exact(&mut first);
        let mut said = String::new();
        if ready.is_err() {
            child.stderr.take().expect("its errors").read_to_string(&mut said).expect("text");
        }
        assert!(ready.is_ok() && &first == b"ready", "{said}");
        let text = "printf hello | dd of=\"$0\" conv=notrunc status=none && head -c 5 \"$0\"";
        let user =
            ["--reuid=65534", "--regid=65534", "--clear-groups", "sh", "-c", text, plain(&file)];
        assert_eq!(ok("setpriv", "util-linux", &user), "hello");
        let pid = rustix::process::Pid::from_raw(child.id() as i32).expect("a process");
        rustix::process::kill_process(pid, end).expect("it is there");
        let _ = child.wait();
    }
    let end = Instant::now() + patience();
    while is_mounted(&file) {
        assert!(Instant::now() < end, "it is not unmounted");
        std::thread::sleep(Duration::from_millis(10));
    }
}
