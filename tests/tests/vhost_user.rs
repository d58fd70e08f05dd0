//! vhost-user-blk against real guests and a client that is not ours.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use ringtap_guest::verify::{Filesystem, FioVerify, Verifying, check_filesystem};
use ringtap_guest::{Appliance, Guest, Machine, Qemu, Uml};
use ringtap_tests::{Server, lab, patience, program};

const MIB: u64 = 1 << 20;
const LONG: Duration = Duration::from_secs(400);

struct Disk {
    dir: tempfile::TempDir,
}

impl Disk {
    fn new(size: u64) -> Disk {
        // Not in /tmp, which may be a tmpfs: a disk under O_DIRECT is what is meant.
        let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
        File::create(dir.path().join("disk.raw")).expect("a file").set_len(size).expect("its size");
        Disk { dir }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("disk.raw")
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("vhost.sock")
    }

    fn serve(&self, more: &[&str]) -> Server {
        let (path, socket) = (self.path(), self.socket());
        let args = [path.as_os_str(), "-f".as_ref(), "raw".as_ref(), "--vhost-user".as_ref()];
        let more = more.iter().map(AsRef::as_ref);
        Server::start(args.into_iter().chain([socket.as_os_str()]).chain(more))
    }
}

fn appliance(machine: Machine) -> Appliance {
    Appliance::builder(machine)
        .programs(["fio", "dd", "mke2fs", "e2fsck", "fstrim", "blkdiscard", "blockdev"])
        .build(&Appliance::default_cache())
        .unwrap_or_else(|error| panic!("{error}"))
}

fn uml(socket: &Path) -> Guest {
    let uml = Uml::new(&appliance(Machine::Uml)).vhost_user(socket);
    uml.boot().unwrap_or_else(|error| panic!("{error}"))
}

fn run(guest: &Guest, script: &str) -> String {
    let output = guest.exec(script, patience()).expect("the guest answers");
    output.success().unwrap_or_else(|error| panic!("{error}")).stdout
}

/// The load client, on the blkio crate.
fn load(socket: &Path, args: &[&str]) -> serde_json::Value {
    let socket = socket.as_os_str();
    let args = ["load".as_ref(), "--socket".as_ref(), socket, "--output".as_ref(), "json".as_ref()]
        .into_iter()
        .chain(args.iter().map(AsRef::as_ref));
    let output = program(lab().to_str().expect("a plain path"), "ringtap-lab", args);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}{said}"))
}

#[test]
fn a_real_guest_keeps_its_files() {
    for cache in ["none", "writeback", "directsync"] {
        let disk = Disk::new(256 * MIB);
        let server = disk.serve(&["--cache", cache]);
        let guest = uml(&disk.socket());
        check_filesystem(&guest, "/dev/vda", Filesystem::Ext4, 12, patience())
            .unwrap_or_else(|error| panic!("{cache}: {error}"));
        // 1 MiB scattered over the pages of a program.
        let done = FioVerify::new("/dev/vda").block(1 << 20).depth(4).size(64 * MIB);
        done.run(&guest, patience()).unwrap_or_else(|error| panic!("{cache}: {error}"));
        guest.shutdown(patience()).expect("it goes down");
        server.stop();
    }
}

#[test]
fn the_guest_sees_the_disk_as_it_is() {
    let disk = Disk::new(64 * MIB);
    let server = disk.serve(&["--serial", "a-serial-number"]);
    let guest = uml(&disk.socket());
    assert_eq!(run(&guest, "cat /sys/block/vda/serial").trim(), "a-serial-number");
    assert_eq!(run(&guest, "cat /sys/block/vda/size").trim(), (64 * MIB / 512).to_string());
    assert_eq!(block_sizes(&guest), [512, 4096, 4096, 0]);
    assert_eq!(run(&guest, "cat /sys/block/vda/cache_type").trim(), "write back");
    run(&guest, "echo 'write through' > /sys/block/vda/cache_type");
    assert_eq!(run(&guest, "cat /sys/block/vda/cache_type").trim(), "write through");
    run(&guest, "dd if=/dev/urandom of=/dev/vda bs=1M count=64 oflag=direct");
    let blocks = || {
        use std::os::unix::fs::MetadataExt;
        fs::metadata(disk.path()).expect("the disk").blocks() * 512
    };
    assert!(blocks() >= 64 * MIB);
    run(&guest, "blkdiscard -o 16M -l 32M /dev/vda");
    assert!(blocks() < 40 * MIB, "a discard frees no space");
    run(&guest, "blkdiscard -z -o 0 -l 4M /dev/vda");
    let mut start = [1; 4096];
    File::open(disk.path()).expect("the disk").read_exact_at(&mut start, 0).expect("a block");
    assert!(start.iter().all(|byte| *byte == 0), "write-zeroes leaves bytes");
    // It grows while it runs.
    File::options().write(true).open(disk.path()).expect("it").set_len(96 * MIB).expect("a size");
    server.signal(libc::SIGHUP);
    let grown = format!(
        "for i in $(seq 200); do [ $(cat /sys/block/vda/size) = {} ] && exit 0; sleep 0.05; done; exit 1",
        96 * MIB / 512
    );
    run(&guest, &grown);
    guest.kill();
    server.stop();
}

/// What the guest takes for the disk's sectors, physical blocks, smallest and best request.
fn block_sizes(guest: &Guest) -> [u32; 4] {
    let sizes = ["logical_block_size", "physical_block_size", "minimum_io_size", "optimal_io_size"];
    sizes.map(|size| {
        let said = run(guest, &format!("cat /sys/block/vda/queue/{size}"));
        said.trim().parse().unwrap_or_else(|error| panic!("{size}: {error}: {said:?}"))
    })
}

#[test]
fn the_guest_sees_the_sectors_it_is_shown() {
    let disk = Disk::new(64 * MIB);
    let server = disk.serve(&["--logical-block-size", "4096"]);
    let guest = uml(&disk.socket());
    assert_eq!(block_sizes(&guest), [4096, 4096, 4096, 0]);
    assert_eq!(run(&guest, "cat /sys/block/vda/size").trim(), (64 * MIB / 512).to_string());
    let half = "dd if=/dev/zero of=/dev/vda bs=512 count=1 oflag=direct";
    let half = guest.exec(half, patience()).expect("an answer");
    assert_ne!(half.status, 0, "the guest's kernel takes half a sector");
    check_filesystem(&guest, "/dev/vda", Filesystem::Ext4, 8, patience())
        .unwrap_or_else(|error| panic!("{error}"));
    guest.kill();
    server.stop();
}

/// A loop device, detached when dropped.
struct Loop {
    device: String,
}

impl Loop {
    fn new(file: &Path, sector: &str) -> Loop {
        let made = program("losetup", "mount", ["-f", "--show", "-b", sector, plain(file)]);
        assert!(made.status.success(), "a loop device takes root: {made:?}");
        Loop { device: String::from_utf8_lossy(&made.stdout).trim().to_owned() }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        // It goes once the server's last file is closed.
        let _ = std::process::Command::new("losetup").args(["-d", &self.device]).status();
    }
}

/// A device of large sectors shows them; small ones may be shown on it, and written one by one.
#[test]
fn sectors_of_4096_bytes_below_are_shown_or_hidden() {
    let disk = Disk::new(32 * MIB);
    let device = Loop::new(&disk.path(), "4096");
    let socket = disk.socket();
    let start = |more: &[&str]| {
        let words = [&device.device, "-f", "raw", "--vhost-user", plain(&socket)];
        Server::start([&words[..], more].concat())
    };
    let server = start(&[]);
    let guest = uml(&socket);
    assert_eq!(block_sizes(&guest), [4096, 4096, 4096, 0]);
    run(
        &guest,
        "dd if=/dev/zero bs=4k count=8 | tr '\\000' a | dd of=/dev/vda bs=4k iflag=fullblock oflag=direct",
    );
    guest.kill();
    server.stop();
    let server = start(&["--logical-block-size", "512"]);
    let guest = uml(&socket);
    assert_eq!(block_sizes(&guest), [512, 4096, 4096, 0]);
    let write = "dd if=/dev/zero bs=512 count=2 | tr '\\000' b | dd of=/dev/vda bs=512 seek=11 iflag=fullblock oflag=direct";
    run(&guest, write);
    guest.kill();
    server.stop();
    let mut is = vec![0; 8 * 4096];
    File::open(disk.path()).expect("the file").read_exact_at(&mut is, 0).expect("its start");
    let changed = 11 * 512..13 * 512;
    let expected = |at| if changed.contains(&at) { b'b' } else { b'a' };
    assert!((0..is.len()).all(|at| is[at] == expected(at)), "neighbours were changed");
}

#[test]
fn a_read_only_disk_takes_no_writes() {
    let disk = Disk::new(16 * MIB);
    let server = disk.serve(&["--read-only"]);
    let guest = uml(&disk.socket());
    assert_eq!(run(&guest, "cat /sys/block/vda/ro").trim(), "1");
    let write = guest.exec(
        "blockdev --setrw /dev/vda; dd if=/dev/urandom of=/dev/vda bs=4k count=1 oflag=direct",
        patience(),
    );
    assert_ne!(write.expect("an answer").status, 0);
    run(&guest, "dd if=/dev/vda of=/dev/null bs=1M count=16 iflag=direct");
    guest.kill();
    server.stop();
    assert!(fs::read(disk.path()).expect("the disk").iter().all(|byte| *byte == 0));
}

#[test]
fn a_full_file_system_is_an_error_and_loses_nothing() {
    let disk = Disk::new(1);
    let small = disk.dir.path().join("small");
    fs::create_dir(&small).expect("a folder");
    let mount = program(
        "mount",
        "mount",
        ["-t", "tmpfs", "-o", "size=24M", "none", small.to_str().expect("plain")],
    );
    assert!(mount.status.success(), "mounting a tmpfs takes root: {mount:?}");
    let path = small.join("disk.raw");
    File::create(&path).expect("a file").set_len(64 * MIB).expect("its size");
    let socket = disk.socket();
    let server = Server::start([
        path.as_os_str(),
        "-f".as_ref(),
        "raw".as_ref(),
        "--vhost-user".as_ref(),
        socket.as_os_str(),
        "--cache".as_ref(),
        "writeback".as_ref(), // tmpfs has no O_DIRECT before Linux 6.6
    ]);
    let guest = uml(&socket);
    run(&guest, "head -c 16M /dev/urandom > /tmp/a; dd if=/tmp/a of=/dev/vda bs=1M oflag=direct");
    let full = guest
        .exec("dd if=/dev/urandom of=/dev/vda bs=1M seek=16 count=32 oflag=direct", patience());
    let full = full.expect("an answer");
    assert_ne!(full.status, 0, "a full file system went unnoticed");
    run(&guest, "dd if=/dev/vda of=/tmp/b bs=1M count=16 iflag=direct; cmp /tmp/a /tmp/b");
    // Room again, and the same write goes through.
    run(
        &guest,
        "blkdiscard -o 16M -l 48M /dev/vda; dd if=/dev/urandom of=/dev/vda bs=1M seek=40 count=4 oflag=direct",
    );
    guest.kill();
    server.stop();
    let unmount = || program("umount", "mount", [small.to_str().expect("plain")]).status.success();
    assert!((0..50).any(|_| {
        thread::sleep(Duration::from_millis(100));
        unmount()
    }));
}

#[test]
fn clients_come_go_and_come_again() {
    let disk = Disk::new(64 * MIB);
    let server = disk.serve(&["--queues", "4"]);
    for (queues, rw) in [("1", "randwrite"), ("4", "randrw"), ("2", "read"), ("1", "write")] {
        let args =
            ["--rw", rw, "--bs", "4k", "--depth", "16", "--seconds", "0.5", "--queues", queues];
        let verify = if rw == "read" { &[][..] } else { &["--verify"][..] };
        let outcome = load(&disk.socket(), &[&args, verify].concat());
        assert_eq!(outcome["errors"], 0, "{outcome}");
        assert!(outcome["ios"].as_u64() > Some(0), "{outcome}");
    }
    // The longest queue, full of requests.
    let most = ["--rw", "randrw", "--queue-size", "1024", "--depth", "340", "--seconds", "0.5"];
    let outcome = load(&disk.socket(), &[&most[..], &["--verify"]].concat());
    assert_eq!(outcome["errors"], 0, "{outcome}");
    assert!(outcome["ios"].as_u64() > Some(0), "{outcome}");
    server.stop();
}

#[test]
fn a_front_end_that_talks_nonsense_harms_itself_alone() {
    let disk = Disk::new(16 * MIB);
    let server = disk.serve(&[]);
    let message = |request: u32, flags: u32, payload: &[u8]| {
        let mut bytes = Vec::new();
        bytes.extend(request.to_ne_bytes());
        bytes.extend(flags.to_ne_bytes());
        bytes.extend((payload.len() as u32).to_ne_bytes());
        bytes.extend(payload);
        bytes
    };
    let vring = |index: u32, number: u32| [index.to_ne_bytes(), number.to_ne_bytes()].concat();
    let nonsense: Vec<Vec<u8>> = vec![
        vec![0xff; 4096],
        message(1, 1, &[0; 64]),
        message(999, 1, &[]),
        message(8, 1, &vring(0, 3)),
        message(8, 1, &vring(77, 256)),
        message(5, 1, &[0xff; 40]),
        message(24, 1, &[0xff; 12]),
        message(11, 1, &vring(0, 0)),
        message(18, 1, &vring(0, 1)),
        message(8, 1, &vring(0, 256))[..15].to_vec(),
    ];
    for bytes in &nonsense {
        let mut stream = UnixStream::connect(disk.socket()).expect("it listens");
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
        let _ = stream.write_all(bytes);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
    }
    let outcome = load(&disk.socket(), &["--rw", "randwrite", "--seconds", "0.3", "--verify"]);
    assert_eq!(outcome["errors"], 0, "{outcome}");
    server.stop();
}

/// Interrupts that the guest has taken from each of a virtio disk's queues.
fn interrupts(guest: &Guest, queues: usize) -> Vec<u64> {
    let table = run(guest, "cat /proc/interrupts");
    let of_queue = |queue: usize| {
        let name = format!("-req.{queue}");
        let line = table.lines().find(|line| line.ends_with(&name));
        let line = line.unwrap_or_else(|| panic!("no interrupt of queue {queue}: {table}"));
        line.split_whitespace().skip(1).map_while(|word| word.parse::<u64>().ok()).sum()
    };
    (0..queues).map(of_queue).collect()
}

/// The server dies again and again under a load on several queues that checks every block; the guest
/// carries on with each of them.
#[test]
fn a_killed_server_loses_nothing_and_answers_everything_once() {
    let disk = Disk::new(128 * MIB);
    let mut server = disk.serve(&[]);
    let qemu = Qemu::new(&appliance(Machine::Pc)).cpus(2).vhost_user(disk.socket(), 2);
    let guest = qemu.boot().unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(run(&guest, "ls /sys/block/vda/mq | wc -l").trim(), "2");
    let load =
        FioVerify::new("/dev/vda").size(96 * MIB).jobs(2).depth(32).flush_every(200).loops(2);
    let all_right = |running: Verifying| {
        let done = running.wait(LONG).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!((done.writes, done.reads), (2 * 24_576, 2 * 24_576));
    };
    // Both queues answer, or the load is through.
    let both_go_on = |running: &Verifying| {
        let (before, end) = (interrupts(&guest, 2), Instant::now() + LONG);
        while !running.is_done() {
            let now = interrupts(&guest, 2);
            if before.iter().zip(&now).all(|(before, now)| before < now) {
                return;
            }
            assert!(Instant::now() < end, "a queue stands still: {before:?}, then {now:?}");
        }
    };
    let mut running = load.start(&guest).expect("fio starts");
    let mut kills = 0;
    while kills < 4 {
        both_go_on(&running);
        thread::sleep(Duration::from_millis(500 + 300 * kills));
        server.kill();
        thread::sleep(Duration::from_millis(200));
        // A load that goes on cannot have ended before the server did. A quick machine may have
        // been through with it, and begins again.
        let was_running = !running.is_done();
        server = disk.serve(&[]);
        if was_running {
            kills += 1;
        } else {
            all_right(running);
            running = load.start(&guest).expect("fio starts again");
        }
    }
    all_right(running);
    // Everything is on the disk, by another reader's eyes too.
    load.check(&guest, LONG).unwrap_or_else(|error| panic!("{error}"));
    guest.kill();
    server.stop();
}

/// An ext4 of its own on a loop device, unmounted when dropped.
struct Mounted {
    path: PathBuf,
}

impl Mounted {
    fn ext4(dir: &Path, size: u64) -> Mounted {
        let (image, path) = (dir.join("ext4"), dir.join("mounted"));
        File::create(&image).and_then(|file| file.set_len(size)).expect("a file");
        fs::create_dir(&path).expect("a folder");
        let words = ["-q", "-F", "-t", "ext4", "-b", "4096", plain(&image)];
        let made = program("mke2fs", "e2fsprogs", words);
        assert!(made.status.success(), "{made:?}");
        let mount = program("mount", "mount", ["-o", "loop", plain(&image), plain(&path)]);
        assert!(mount.status.success(), "mounting takes root: {mount:?}");
        Mounted { path }
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // The kernel may close a killed server's files a moment after its end.
        for _ in 0..100 {
            let umount = std::process::Command::new("umount").arg(&self.path).status();
            if umount.is_ok_and(|status| status.success()) {
                return;
            }
            thread::sleep(Duration::from_millis(50));
        }
    }
}

fn plain(path: &Path) -> &str {
    path.to_str().expect("a plain path")
}

/// Whether the file system has yet to find a place for some of these blocks of 4 KiB: they are in
/// the page cache alone.
fn only_in_memory(file: &Path, blocks: std::ops::Range<u64>) -> bool {
    let said = program("filefrag", "e2fsprogs", ["-v", plain(file)]);
    assert!(said.status.success(), "{said:?}");
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    let number = |word: &str| word.trim().parse::<u64>().ok();
    // Number: first.. last: place: length: expected: flags
    said.lines().filter(|line| line.contains("delalloc")).any(|line| {
        let extent = line.split(':').nth(1).and_then(|range| range.split_once(".."));
        let (first, last) = extent.unwrap_or_else(|| panic!("an extent in {line:?}"));
        let (first, last) = (number(first).expect("a block"), number(last).expect("a block"));
        first < blocks.end && last >= blocks.start
    })
}

/// A guest that turned its write cache off sends no flushes: what it is told is written must be
/// stable, also by the next server.
#[test]
fn a_write_cache_turned_off_stays_off_over_a_killed_server() {
    let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
    let mounted = Mounted::ext4(dir.path(), 256 * MIB);
    let (disk, socket) = (mounted.path.join("disk.raw"), dir.path().join("vhost.sock"));
    File::create(&disk).and_then(|file| file.set_len(64 * MIB)).expect("a disk");
    let args = [plain(&disk), "-f", "raw", "--cache", "writeback", "--vhost-user", plain(&socket)];
    let server = Server::start(args);
    let qemu = Qemu::new(&appliance(Machine::Pc)).vhost_user(&socket, 1);
    let guest = qemu.boot().unwrap_or_else(|error| panic!("{error}"));
    let write = |mib: u64| {
        let dd = "dd if=/dev/urandom of=/dev/vda bs=64k count=16 oflag=direct";
        run(&guest, &format!("{dd} seek={}", mib * 16));
        only_in_memory(&disk, mib * 256..(mib + 1) * 256)
    };
    assert_eq!(run(&guest, "cat /sys/block/vda/cache_type").trim(), "write back");
    // The kernel writes back by itself in the end; not every time within a moment.
    assert!((0..5).any(|turn| write(8 * turn)), "no write is ever only in memory");
    run(&guest, "echo 'write through' > /sys/block/vda/cache_type");
    assert!(!write(48), "acknowledged, and only in memory");
    server.kill();
    let server = Server::start(args);
    assert!(!write(52), "the next server does not know that the cache is off");
    // And back on.
    run(&guest, "echo 'write back' > /sys/block/vda/cache_type");
    assert!((0..5).any(|turn| write(56 + turn)), "every write is stable with the cache on");
    guest.kill();
    server.stop();
}
