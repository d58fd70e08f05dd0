//! Raw images on every file system and on a block device: what is written reads back, what is
//! discarded frees space, zeros cost none where the file system can help it.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use ringtap_tests::{Server, SetUp, file_system, file_system_of, lab, ok, plain, program, ringtap};

const MIB: u64 = 1 << 20;

/// Write, zero, discard and read through the server, by qemu-io's eyes; then random requests that
/// check what they read, over vhost-user.
fn use_disk(disk: &Path, cache: &str, dir: &Path, more: &[&str]) {
    let (nbd, vhost) = (dir.join("nbd.sock"), dir.join("vhost.sock"));
    let address = format!("unix:{}", plain(&nbd));
    let served = ["-f", "raw", "--cache", cache, "--nbd", &address, "--vhost-user", plain(&vhost)];
    let server = Server::start([&[plain(disk)], &served[..], more].concat());
    let uri = format!("nbd+unix:///?socket={}", plain(&nbd));
    let commands = [
        "write -P 5 0 8M",
        "write -P 6 1234567 4321",
        "read -P 6 1234567 4321",
        "read -P 5 1230848 3719",
        "write -z -u 1M 2M",
        "read -P 0 1M 2M",
        "discard 4M 3M",
        "write -z 7M 512k",
        "read -P 0 7M 512k",
        "read -P 5 7864320 500k",
        "flush",
    ];
    let mut args = vec!["-f", "raw", "-d", "unmap"];
    commands.iter().for_each(|command| args.extend(["-c", command]));
    args.push(&uri);
    let said = ok("qemu-io", "qemu-utils", &args);
    assert!(!said.contains("failed") && !said.contains("rror"), "{cache}: {said}");
    let load = ok(
        plain(&lab()),
        "ringtap-lab",
        &[
            "load",
            "--socket",
            plain(&vhost),
            "--rw",
            "randrw",
            "--verify",
            "--depth",
            "16",
            "--seconds",
            "0.4",
            "--fsync-every",
            "50",
            "--output",
            "json",
        ],
    );
    let outcome: serde_json::Value = serde_json::from_str(&load).expect("a report");
    assert_eq!(outcome["errors"], 0, "{cache}: {outcome}");
    // How many a busy disk does in that time is not judged here, only that all of them are right.
    assert!(outcome["ios"].as_u64() > Some(0), "{cache}: {outcome}");
    server.stop();
}

/// Whether a file may be opened with O_DIRECT; tmpfs takes it from Linux 6.6 on.
fn takes_direct(path: &Path) -> bool {
    File::options().read(true).custom_flags(libc::O_DIRECT).open(path).is_ok()
}

fn on_file_system(kind: &str, mkfs: &[&str], package: &str) -> SetUp {
    let set_up = file_system(kind, mkfs, package);
    let mount = set_up.mounted.clone().expect("it is mounted");
    let mut usual = "none";
    for cache in ["none", "writeback", "writethrough", "directsync", "unsafe"] {
        let disk = mount.join(format!("{cache}.raw"));
        File::create(&disk).expect("a file").set_len(32 * MIB).expect("its size");
        if ["none", "directsync"].contains(&cache) && !takes_direct(&disk) {
            assert_eq!(kind, "tmpfs");
            let args = ["serve", plain(&disk), "-f", "raw", "--cache", cache, "--nbd", "unix:s"];
            let refused = program(plain(&ringtap()), "ringtap", args);
            let said = String::from_utf8_lossy(&refused.stderr).into_owned();
            assert!(!refused.status.success() && said.contains("try --cache writeback"), "{said}");
            usual = "writeback";
        } else {
            use_disk(&disk, cache, set_up.dir.path(), &[]);
        }
        fs::remove_file(&disk).expect("it is there");
    }
    // What nobody writes stays a hole, what is zeroed becomes one.
    let disk = mount.join("sparse.raw");
    File::create(&disk).expect("a file").set_len(1 << 30).expect("its size");
    let socket = set_up.dir.path().join("nbd.sock");
    let address = format!("unix:{}", plain(&socket));
    let server = Server::start([plain(&disk), "-f", "raw", "--cache", usual, "--nbd", &address]);
    let uri = format!("nbd+unix:///?socket={}", plain(&socket));
    let used = || fs::metadata(&disk).expect("the disk").blocks() * 512;
    ok("qemu-io", "qemu-utils", &["-f", "raw", "-c", "write -P 1 16M 32M", "-c", "flush", &uri]);
    assert!((32 * MIB..48 * MIB).contains(&used()), "{kind}: {}", used());
    let zero = ["-f", "raw", "-d", "unmap", "-c", "write -z -u 16M 32M", "-c", "flush", &uri];
    ok("qemu-io", "qemu-utils", &zero);
    assert!(used() < 4 * MIB, "{kind}: {} after zeroing", used());
    ok(
        "qemu-io",
        "qemu-utils",
        &["-f", "raw", "-c", "write -z -u 0 1G", "-c", "read -P 0 900M 16M", &uri],
    );
    let map = ok("qemu-img", "qemu-utils", &["map", "--output", "json", "-f", "raw", &uri]);
    assert!(map.contains("\"zero\": true"), "{kind}: {map}");
    server.stop();
    set_up
}

/// Zeros that must keep their space become extents that are not written; a discard frees it.
fn zeros_may_keep_their_space(set_up: &SetUp) {
    let disk = set_up.mounted.as_ref().expect("it is mounted").join("kept.raw");
    File::create(&disk).expect("a file").set_len(64 * MIB).expect("its size");
    let socket = set_up.dir.path().join("nbd.sock");
    let address = format!("unix:{}", plain(&socket));
    let server = Server::start([plain(&disk), "-f", "raw", "--nbd", &address]);
    let uri = format!("nbd+unix:///?socket={}", plain(&socket));
    let order = |orders: &[&str]| {
        let mut args = vec!["-f", "raw", "-d", "unmap"];
        orders.iter().for_each(|order| args.extend(["-c", order]));
        args.push(&uri);
        ok("qemu-io", "qemu-utils", &args);
    };
    let used = || fs::metadata(&disk).expect("the disk").blocks() * 512;
    order(&["write -P 1 0 48M", "flush", "write -z 16M 16M", "flush"]);
    assert_eq!(extents(&disk), [(0, 16, "written"), (16, 32, "unwritten"), (32, 48, "written")]);
    assert!(used() >= 48 * MIB, "{} after zeros that keep their space", used());
    order(&["read -P 1 0 16M", "read -P 0 16M 16M", "read -P 1 32M 16M", "discard 32M 16M"]);
    assert_eq!(extents(&disk), [(0, 16, "written"), (16, 32, "unwritten")]);
    assert!(used() < 34 * MIB, "{} after a discard", used());
    server.stop();
}

/// What lies where in a file, in MiB, neighbours of a kind joined.
fn extents(disk: &Path) -> Vec<(u64, u64, &'static str)> {
    let mut all: Vec<(u64, u64, &str)> = vec![];
    // A line is: number, first and last logical block, physical ones, blocks, perhaps those expected
    // there, flags.
    for line in ok("filefrag", "e2fsprogs", &["-v", "-s", "-b4096", plain(disk)]).lines() {
        let words: Vec<&str> = line.split(':').map(str::trim).collect();
        let [number, logical, .., flags] = words[..] else { continue };
        if number.parse::<u64>().is_err() {
            continue;
        }
        let (first, last) = logical.split_once("..").expect("two blocks");
        let block = |text: &str| text.trim().parse::<u64>().expect("a block");
        let (first, end) = (block(first) * 4096, (block(last) + 1) * 4096);
        let kind = if flags.contains("unwritten") { "unwritten" } else { "written" };
        match all.last_mut() {
            Some((_, before, same)) if *before == first && *same == kind => *before = end,
            _ => all.push((first, end, kind)),
        }
    }
    all.into_iter().map(|(first, end, kind)| (first / MIB, end / MIB, kind)).collect()
}

#[test]
fn ext4() {
    let set_up = on_file_system("ext4", &["mke2fs", "-q", "-F", "-t", "ext4"], "e2fsprogs");
    zeros_may_keep_their_space(&set_up);
}

/// As long as a file may be on ext4 with blocks of 4 KiB, and one byte more.
#[test]
fn what_ext4_cannot_hold_is_told_from_want_of_room() {
    let set_up = file_system("ext4", &["mkfs.ext4", "-q", "-F", "-b", "4096"], "e2fsprogs");
    let path = set_up.mounted.as_ref().expect("mounted").join("long.raw");
    let create = |size: &str| {
        let args = ["create", "-q", "-f", "raw", plain(&path), size];
        program(plain(&ringtap()), "ringtap", args)
    };
    assert!(create("17592186040320").status.success(), "the longest");
    let refused = create("20T");
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("files of 17592186040320 bytes"), "{said}");
}

#[test]
fn xfs() {
    let set_up = on_file_system("xfs", &["mkfs.xfs", "-q", "-f"], "xfsprogs");
    zeros_may_keep_their_space(&set_up);
}

#[test]
fn btrfs() {
    on_file_system("btrfs", &["mkfs.btrfs", "-q", "-f"], "btrfs-progs");
}

#[test]
fn tmpfs() {
    on_file_system("tmpfs", &[], "");
}

/// Pages of an image that was copied a moment ago would make its guest's first writes slow; those of an
/// image that others may be reading are left to them.
#[test]
fn who_writes_past_the_page_cache_empties_it_first() {
    let set_up = file_system("ext4", &["mke2fs", "-q", "-F", "-t", "ext4"], "e2fsprogs");
    let disk = set_up.mounted.as_ref().expect("it is mounted").join("disk.raw");
    fs::write(&disk, vec![7; 8 << 20]).expect("written");
    File::open(&disk).and_then(|file| file.sync_all()).expect("on the disk");
    let cached = || {
        let args = ["--bytes", "--noheadings", "--output", "RES", plain(&disk)];
        let said = ok("fincore", "util-linux-extra", &args);
        said.trim().parse::<u64>().expect("bytes")
    };
    let socket = set_up.dir.path().join("nbd.sock");
    let address = format!("unix:{}", plain(&socket));
    let serve = |more: &[&str]| {
        let usual = [plain(&disk), "-f", "raw", "--nbd", &address];
        let server = Server::start([&usual[..], more].concat());
        // The server is ready before they are gone.
        let gone = (0..20).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(50));
            cached() == 0
        });
        server.stop();
        gone
    };
    assert_eq!(cached(), 8 * MIB);
    for kept in [["--cache", "writeback"].as_slice(), &["--cache", "none", "--read-only"]] {
        assert!(!serve(kept), "{kept:?}");
        assert_eq!(cached(), 8 * MIB, "{kept:?}");
    }
    assert!(serve(&["--cache", "none"]));
    let uri = format!("nbd+unix:///?socket={}", plain(&socket));
    let server = Server::start([plain(&disk), "-f", "raw", "--nbd", &address]);
    ok("qemu-io", "qemu-utils", &["-f", "raw", "-r", "-c", "read -P 7 0 8M", &uri]);
    server.stop();
}

/// Only the write that finds no room fails: what was written before stays, what has its room is
/// written, and room that is freed is used again.
#[test]
fn a_full_file_system_is_an_error_to_nbd_clients_and_loses_nothing() {
    let set_up = file_system_of(24, "tmpfs", &[], "");
    let disk = set_up.mounted.as_ref().expect("it is mounted").join("disk.raw");
    File::create(&disk).expect("a file").set_len(64 * MIB).expect("its size");
    let socket = set_up.dir.path().join("nbd.sock");
    let address = format!("unix:{}", plain(&socket));
    let args = [plain(&disk), "-f", "raw", "--cache", "writeback", "--nbd", &address];
    let server = Server::start(args);
    let uri = format!("nbd+unix:///?socket={}", plain(&socket));
    let ask = |orders: &[&str]| {
        let mut args = vec!["-f", "raw", "-d", "unmap"];
        orders.iter().for_each(|order| args.extend(["-c", order]));
        args.push(&uri);
        let output = program("qemu-io", "qemu-utils", args);
        format!("{output:?}")
    };
    // All by one client, on one connection.
    let said = ask(&[
        "write -P 1 0 16M",
        "flush",
        "write -P 2 16M 32M",
        "read -P 1 0 16M",
        "write -P 3 4M 1M",
        "write -P 2 60M 2M",
        "flush",
        "read -P 3 4M 1M",
    ]);
    assert_eq!(said.matches("No space left on device").count(), 2, "{said}");
    let did = ["wrote 16777216/", "wrote 1048576/", "read 16777216/", "read 1048576/"];
    assert!(did.iter().all(|done| said.contains(done)), "{said}");
    let said = ask(&["discard 16M 48M", "write -P 4 40M 4M", "flush", "read -P 4 40M 4M"]);
    assert!(said.contains("wrote 4194304/") && said.contains("read 4194304/"), "{said}");
    assert!(!said.contains("failed"), "{said}");
    server.stop();
    let is = fs::read(&disk).expect("the disk");
    let holds = |from: u64, to: u64, byte: u8| {
        is[(from * MIB) as usize..(to * MIB) as usize].iter().all(|found| *found == byte)
    };
    assert!(holds(0, 4, 1) && holds(4, 5, 3) && holds(5, 16, 1) && holds(40, 44, 4));
    assert!(holds(16, 40, 0) && holds(44, 64, 0), "what was discarded is back");
}

#[test]
fn a_block_device() {
    let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
    let file = dir.path().join("device");
    for sector in ["512", "4096"] {
        File::create(&file).expect("a file").set_len(32 * MIB).expect("its size");
        let device = ok("losetup", "mount", &["-f", "--show", "-b", sector, plain(&file)]);
        let device = device.trim().to_owned();
        let set_up = SetUp {
            dir: tempfile::tempdir().expect("a folder"),
            mounted: None,
            device: Some(device.clone()),
        };
        for cache in ["none", "writeback"] {
            if sector == "512" {
                use_disk(Path::new(&device), cache, set_up.dir.path(), &[]);
            } else {
                // The load client asks for sectors of 512 bytes, as a guest does that is shown them.
                let shown = ["--logical-block-size", "512"];
                use_disk(Path::new(&device), cache, set_up.dir.path(), &shown);
                let socket = set_up.dir.path().join("nbd.sock");
                let address = format!("unix:{}", plain(&socket));
                let server =
                    Server::start([&device, "-f", "raw", "--cache", cache, "--nbd", &address]);
                let uri = format!("nbd+unix:///?socket={}", plain(&socket));
                ok(
                    "qemu-io",
                    "qemu-utils",
                    &[
                        "-f",
                        "raw",
                        "-c",
                        "write -P 3 0 64k",
                        "-c",
                        "write -P 4 512 1024",
                        "-c",
                        "read -P 3 0 512",
                        "-c",
                        "read -P 4 512 1024",
                        "-c",
                        "read -P 3 1536 2560",
                        &uri,
                    ],
                );
                server.stop();
            }
        }
    }
}

#[test]
fn a_block_device_takes_one_writer() {
    let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
    let (file, socket) = (dir.path().join("device"), dir.path().join("nbd.sock"));
    File::create(&file).expect("a file").set_len(MIB).expect("its size");
    let device = ok("losetup", "mount", &["-f", "--show", plain(&file)]).trim().to_owned();
    let _attached = SetUp::attached(dir, device.clone());
    let address = format!("unix:{}", plain(&socket));
    let args = [&device, "-f", "raw", "--nbd", &address];
    let server = Server::start(args);
    let second = program(plain(&ringtap()), "ringtap", [&["serve"][..], &args].concat());
    let said = String::from_utf8_lossy(&second.stderr).into_owned();
    assert_eq!(second.status.code(), Some(1), "{said}");
    assert!(said.contains(&format!("process {} (ringtap)", server.pid())), "{said}");
    server.stop();
}

/// Images made on a block device itself; the footer of a fixed VHD is at the device's end, wherever a new
/// size would have it.
#[test]
fn images_are_made_on_a_block_device() {
    let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
    let file = dir.path().join("device");
    fs::write(&file, vec![0x55; 4 << 20]).expect("a file");
    let device = ok("losetup", "mount", &["-f", "--show", plain(&file)]).trim().to_owned();
    let attached = SetUp::attached(dir, device.clone());
    let raw = attached.dir.path().join("raw");
    // The second half is zeros, which a device does not hold by itself.
    let mut content: Vec<u8> = (0..MIB / 2).map(|at| (at / 512) as u8).collect();
    content.resize(1 << 20, 0);
    fs::write(&raw, &content).expect("a disk");
    let own = ringtap();
    let run = |words: &[&str], code: i32| {
        let output = program(plain(&own), "ringtap", words);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{words:?}: {said}");
        said
    };
    let fixed = "subformat=fixed,force_size=on";
    for (format, options) in
        [("qcow2", "cluster_size=4k"), ("vpc", "force_size=on"), ("vpc", fixed)]
    {
        for more in [&["-o", options][..], &["-n"]] {
            let words = ["convert", "-f", "raw", plain(&raw), "-O", format, &device];
            run(&[&words[..], more].concat(), 0);
            run(&["compare", "-f", "raw", plain(&raw), "-F", format, &device], 0);
            // QEMU takes no notice of which sectors of a dynamic VHD's blocks were written.
            if options != "force_size=on" {
                let words = ["compare", "-f", "raw", "-F", format, plain(&raw), &device];
                ok("qemu-img", "qemu-utils", &words);
            }
        }
    }
    for (size, option) in [("2M", "--quiet"), ("512k", "--shrink")] {
        let said = run(&["resize", "-f", "vpc", option, &device, size], 1);
        assert!(said.contains("block device, at whose end its footer is"), "{said}");
        run(&["compare", "-f", "raw", plain(&raw), "-F", "vpc", &device], 0);
    }
    let words = ["convert", "-f", "raw", plain(&raw), "-O", "raw", "-n", &device];
    let said = run(&words, 1);
    assert!(said.contains("is recorded as vpc"), "{said}");
    run(&[&words[..], &["--force-format"]].concat(), 0);
    // What lies behind the disk's end is the device's.
    let mut there = vec![0; content.len()];
    File::open(&device).and_then(|mut file| file.read_exact(&mut there)).expect("read");
    assert!(there == content);
}

/// What an NBD client is told of a disk that seeks.
fn told_rotational(disk: &Path, dir: &Path) -> serde_json::Value {
    let socket = dir.join("nbd.sock");
    let address = format!("unix:{}", plain(&socket));
    let server = Server::start([plain(disk), "-f", "raw", "--nbd", &address]);
    let uri = format!("nbd+unix:///?socket={}", plain(&socket));
    let told = ok("nbdinfo", "libnbd-bin", &["--json", &uri]);
    server.stop();
    let told: serde_json::Value = serde_json::from_str(&told).expect("JSON");
    told["exports"][0]["is_rotational"].clone()
}

#[test]
fn nbd_clients_are_told_whether_the_disk_seeks() {
    let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
    let file = dir.path().join("device");
    File::create(&file).expect("a file").set_len(32 * MIB).expect("its size");
    let device = ok("losetup", "mount", &["-f", "--show", plain(&file)]).trim().to_owned();
    let attached = SetUp::attached(dir, device.clone());
    let mount = attached.dir.path().join("mnt");
    fs::create_dir(&mount).expect("a folder");
    let device = Path::new(&device);
    let name = device.file_name().expect("a name").to_str().expect("a plain name");
    let queue = format!("/sys/block/{name}/queue/rotational");
    for (word, seeks) in [("1", true), ("0", false)] {
        fs::write(&queue, word).expect("root may say how a loop device is to be taken");
        assert_eq!(told_rotational(device, attached.dir.path()), seeks);
        ok("mke2fs", "e2fsprogs", &["-q", "-F", "-t", "ext4", plain(device)]);
        ok("mount", "mount", &[plain(device), plain(&mount)]);
        let mounted = tempfile::tempdir().expect("a folder");
        let mounted = SetUp { dir: mounted, mounted: Some(mount.clone()), device: None };
        let disk = mount.join("disk");
        File::create(&disk).expect("a file").set_len(MIB).expect("its size");
        assert_eq!(told_rotational(&disk, mounted.dir.path()), seeks, "a file on it");
    }
}
