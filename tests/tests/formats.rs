//! Images of every format under one real guest, which outlives its server again and again.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use ringtap_guest::verify::{Filesystem, FioVerify, check_filesystem};
use ringtap_guest::{Appliance, Machine, Qemu};
use ringtap_tests::{Server, program};

const MIB: u64 = 1 << 20;
const LONG: Duration = Duration::from_secs(600);

/// A disk of some format, and how it is named to the server.
struct Disk {
    path: PathBuf,
    format: &'static str,
    socket: PathBuf,
    more: Vec<OsString>,
}

fn qemu_img(args: &[&str]) {
    for tries in (0..60).rev() {
        let output = program("qemu-img", "qemu-utils", args);
        let said = String::from_utf8_lossy(&output.stderr);
        // What it measures for a LUKS key is at times less than a tick of the clock.
        if said.contains("accurate CPU usage") && tries > 0 {
            continue;
        }
        assert!(output.status.success(), "qemu-img {args:?}: {said}");
        break;
    }
}

fn disks(dir: &Path) -> Vec<Disk> {
    let path = |name: &str| dir.join(name);
    let text = |name: &str| path(name).display().to_string();
    let size = (64 * MIB).to_string();
    qemu_img(&["create", "-q", "-f", "qcow2", &text("fresh.qcow2"), &size]);
    // A snapshot just taken, of a disk that is full.
    let mut base = File::create(path("base.raw")).expect("a file");
    let piece: Vec<u8> = (0..MIB).map(|at| (at * 7 + at / 512) as u8).collect();
    for _ in 0..64 {
        base.write_all(&piece).expect("its bytes");
    }
    let options = "extended_l2=on,backing_file=base.raw,backing_fmt=raw";
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", options, &text("overlay.qcow2")]);
    qemu_img(&["create", "-q", "-f", "vpc", &text("fresh.vhd"), &size]);
    fs::write(path("key"), "a secret of the test").expect("a key");
    let secret = format!("secret,id=key,file={}", text("key"));
    let options = "key-secret=key,iter-time=10";
    let words = ["create", "-q", "--object", &secret, "-f", "luks", "-o", options];
    qemu_img(&[&words[..], &[&text("disk.luks"), &size]].concat());
    let key = ["--secret".into(), format!("file:{}", text("key")).into()];
    [
        ("fresh.qcow2", "qcow2", vec![]),
        ("overlay.qcow2", "qcow2", vec![]),
        ("fresh.vhd", "vpc", vec![]),
        ("disk.luks", "luks", key.to_vec()),
    ]
    .into_iter()
    .map(|(name, format, more)| Disk {
        path: path(name),
        format,
        socket: path(&format!("{name}.sock")),
        more,
    })
    .collect()
}

fn serve(disks: &[Disk]) -> Server {
    let mut args: Vec<OsString> = Vec::new();
    for disk in disks {
        let words = [disk.path.as_os_str(), "-f".as_ref(), disk.format.as_ref()];
        args.extend(words.map(OsString::from));
        args.extend(["--vhost-user".into(), disk.socket.clone().into()]);
        args.extend(disk.more.iter().cloned());
    }
    Server::start(args)
}

/// What a killed server had in memory is taken up by the next: the guest never flushes, so nothing else
/// keeps what it wrote.
#[test]
fn a_guest_outlives_its_server_on_every_format() {
    // Not in /tmp, which may be a tmpfs: disks under O_DIRECT are what is meant.
    let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
    let disks = disks(dir.path());
    let mut server = serve(&disks);
    let appliance = Appliance::builder(Machine::Pc)
        .programs(["fio", "dd", "mke2fs", "e2fsck", "fstrim"])
        .build(&Appliance::default_cache())
        .unwrap_or_else(|error| panic!("{error}"));
    let mut qemu = Qemu::new(&appliance);
    for disk in &disks {
        qemu = qemu.vhost_user(&disk.socket, 1);
    }
    let guest = qemu.boot().unwrap_or_else(|error| panic!("{error}"));
    let load = |number: usize| {
        let device = format!("/dev/vd{}", ["a", "b", "c", "d"][number]);
        FioVerify::new(device).size(24 * MIB).depth(8).seed(number as u64 + 1)
    };
    let loads: Vec<_> = (0..disks.len()).map(|number| load(number).loops(2)).collect();
    let running: Vec<_> =
        loads.iter().map(|load| load.start(&guest).expect("fio starts")).collect();
    std::thread::sleep(Duration::from_millis(3000));
    server.kill();
    std::thread::sleep(Duration::from_millis(200));
    server = serve(&disks);
    for (running, disk) in running.into_iter().zip(&disks) {
        let name = disk.path.display();
        running.wait(LONG).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
    // Killed at rest, too, with nothing flushed.
    server.kill();
    server = serve(&disks);
    for (load, disk) in loads.iter().zip(&disks) {
        let name = disk.path.display();
        load.check(&guest, LONG).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
    // And again and again while the guest makes file systems, writes, and reads back.
    let done = AtomicBool::new(false);
    let kills = AtomicUsize::new(0);
    let (found, server) = std::thread::scope(|scope| {
        let killer = scope.spawn(|| {
            let mut server = server;
            while !done.load(SeqCst) {
                server.kill();
                server = serve(&disks);
                kills.fetch_add(1, SeqCst);
                std::thread::sleep(Duration::from_secs(3));
            }
            server
        });
        let check = |(number, disk): (usize, &Disk)| {
            let device = format!("/dev/vd{}", ["a", "b", "c", "d"][number]);
            let checked = check_filesystem(&guest, &device, Filesystem::Ext4, 6, LONG);
            checked.map_err(|error| format!("{}: {error}", disk.path.display()))
        };
        let mut found: Vec<Result<_, String>> = vec![];
        // A fast machine is done before the third.
        while found.is_empty() || (kills.load(SeqCst) < 3 && found.iter().all(Result::is_ok)) {
            found = disks.iter().enumerate().map(check).collect();
        }
        done.store(true, SeqCst);
        (found, killer.join().expect("servers start again"))
    });
    for found in found {
        found.unwrap_or_else(|error| panic!("{error}"));
    }
    println!("{} servers were killed under the file systems", kills.load(SeqCst));
    guest.kill();
    server.stop();
    for name in ["fresh.qcow2", "overlay.qcow2"] {
        let path = dir.path().join(name).display().to_string();
        let output = program("qemu-img", "qemu-utils", ["check", "-q", &path]);
        // 3: a server killed between a discard and the flush of its refcounts leaks clusters, and no more: without
        // them the image is sound.
        if output.status.code() == Some(3) {
            program("qemu-img", "qemu-utils", ["check", "-q", "-r", "leaks", &path]);
        }
        qemu_img(&["check", "-q", &path]);
    }
}
