//! Real guests in QEMU.

mod common;

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use common::{LONG, SHORT, Server, appliance, empty_disk, members, random_disk, run_directory};
use ringtap_guest::verify::{Filesystem, FioVerify, check_filesystem};
use ringtap_guest::{Appliance, Drive, FORWARD_HOST, FORWARD_PORT, Machine, Qemu, Root};

const MIB: u64 = 1 << 20;

#[test]
fn every_kind_of_disk_carries_data_and_the_server_may_come_back() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    random_disk(&at("virtio"), 8 * MIB);
    empty_disk(&at("vhost"), 64 * MIB);
    for name in ["ide", "ahci", "nvme"] {
        empty_disk(&at(name), 16 * MIB);
    }
    fs::create_dir(at("share")).unwrap();
    let server = Server::start(&at("vhost"), &at("socket"));
    let guest = Qemu::new(&appliance(Machine::Pc))
        .virtio_blk(Drive::raw(at("virtio")))
        .vhost_user(at("socket"), 1)
        .ahci(Drive::raw(at("ahci")))
        .ide(Drive::raw(at("ide")))
        .nvme(Drive::raw(at("nvme")))
        .share(at("share"), "/mnt/out")
        .boot()
        .unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(guest.disks(), ["/dev/vda", "/dev/vdb", "/dev/sdb", "/dev/sda", "/dev/nvme0n1"]);
    let pid = guest.pid();
    let files = run_directory(pid);

    let copy = "set -e
        dd if=/dev/vda of=/dev/vdb bs=1M seek=4 oflag=direct conv=fsync
        for disk in sda sdb nvme0n1; do dd if=/dev/vda of=/dev/$disk bs=1M conv=fsync; done
        dd if=/dev/vdb of=/mnt/out/back bs=1M skip=4 count=8 iflag=direct";
    guest.exec(copy, LONG).unwrap().success().unwrap_or_else(|e| panic!("{e}"));
    let out = guest.exec("echo out; echo err >&2; exit 3", SHORT).unwrap();
    assert_eq!((out.status, &out.stdout[..], &out.stderr[..]), (3, "out\n", "err\n"));

    // qemu-storage-daemon keeps no record of requests in flight, so it may only die at rest.
    let load = FioVerify::new("/dev/vdb").size(8 * MIB);
    let done = load.run(&guest, LONG).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!((done.writes, done.reads), (2048, 2048));
    server.kill();
    std::thread::sleep(Duration::from_millis(500));
    let server = Server::start(&at("vhost"), &at("socket"));
    let checked = load.check(&guest, LONG).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(checked.reads, 2048);
    check_filesystem(&guest, "/dev/vdb", Filesystem::Ext4, 6, LONG)
        .unwrap_or_else(|e| panic!("{e}"));

    let started = Instant::now();
    guest.kill();
    assert!(started.elapsed() < SHORT, "{:?}", started.elapsed());
    assert_eq!(members(pid), Vec::<String>::new());
    assert!(!files.exists());
    drop(server);
    let want = fs::read(at("virtio")).unwrap();
    assert!(fs::read(at("share/back")).unwrap() == want, "what came back differs");
    for name in ["ide", "ahci", "nvme"] {
        assert!(fs::read(at(name)).unwrap()[..8 << 20] == want[..], "the file of {name} differs");
    }
}

#[test]
fn more_disks_than_there_are_letters_come_in_their_order_and_go_before_processors() {
    const DISKS: u64 = 30;
    let dir = tempfile::tempdir().unwrap();
    let mut qemu = Qemu::new(&appliance(Machine::Pc)).memory(512 << 20);
    for n in 0..DISKS {
        let disk = dir.path().join(n.to_string());
        empty_disk(&disk, (n + 1) * MIB);
        qemu = qemu.virtio_blk(Drive::raw(disk));
    }
    let guest = qemu.boot().unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(guest.disks().last().map(String::as_str), Some("/dev/vdad"));
    let nodes = guest.disks().join(" ");
    let pid = guest.pid().to_string();
    assert_eq!(in_real_time(&pid), Vec::<String>::new());
    guest.put_devices_first().unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(in_real_time(&pid), [pid.as_str()]);
    let script = format!("for disk in {nodes}; do cat /sys/block/${{disk#/dev/}}/size; done");
    let out = guest.exec(&script, LONG).unwrap().success().unwrap_or_else(|e| panic!("{e}"));
    let sizes: Vec<u64> = out.stdout.lines().map(|line| line.parse().unwrap()).collect();
    assert_eq!(sizes, (1..=DISKS).map(|mib| mib * MIB / 512).collect::<Vec<_>>());
    guest.shutdown(SHORT).unwrap_or_else(|e| panic!("{e}"));
}

/// Threads of a process that the kernel never has wait for an ordinary one.
fn in_real_time(pid: &str) -> Vec<String> {
    let policy = |thread: &str| {
        let stat = fs::read_to_string(format!("/proc/{pid}/task/{thread}/stat")).ok()?;
        // The name in parentheses may hold anything; behind it state is field 3, the policy 41.
        let field = stat.rsplit_once(')')?.1.split_whitespace().nth(41 - 3)?;
        field.parse::<u32>().ok()
    };
    let threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let threads = threads.map(|thread| thread.unwrap().file_name().into_string().unwrap());
    threads.filter(|thread| policy(thread).is_some_and(|policy| policy != 0)).collect()
}

/// A server that greets whoever connects; the first two are sent away, as by one that has waited too long for a guest
/// that boots.
fn impatient(socket: &Path) -> JoinHandle<()> {
    let server = UnixListener::bind(socket).unwrap();
    thread::spawn(move || {
        for (n, client) in server.incoming().enumerate() {
            let mut client = client.unwrap();
            if n >= 2 {
                client.write_all(b"welcome\n").unwrap();
                let mut said = [0; 4];
                // The guest may be gone before it has said anything: the next connection is QEMU's own.
                if client.read_exact(&mut said).is_ok() {
                    assert_eq!(&said, b"bye\n");
                    return;
                }
            }
        }
    })
}

#[test]
fn the_hosts_programs_run_over_9p_and_a_socket_is_reached_however_late() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    let server = impatient(&socket);
    let builder = Appliance::builder(Machine::Pc).root(Root::Host).modules(["virtio_net"]);
    let appliance = builder.build(&Appliance::default_cache()).unwrap_or_else(|e| panic!("{e}"));
    let guest = Qemu::new(&appliance).memory(512 << 20).forward(&socket).boot();
    let guest = guest.unwrap_or_else(|e| panic!("{e}"));
    let script = format!(
        "set -e; busybox ip link set eth0 up; busybox ip addr add 10.0.2.15/24 dev eth0
        bash -c 'exec 3<>/dev/tcp/{FORWARD_HOST}/{FORWARD_PORT}; read -r line <&3; echo $line; echo bye >&3'"
    );
    let out = guest.exec(&script, LONG).unwrap().success().unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(out.stdout, "welcome\n");
    server.join().unwrap();
    let script = "dd --version | head -1; touch /etc/only-in-the-guest && echo written";
    let out = guest.exec(script, LONG).unwrap().success().unwrap_or_else(|e| panic!("{e}"));
    assert!(out.stdout.contains("coreutils") && out.stdout.ends_with("written\n"), "{out:?}");
    guest.shutdown(SHORT).unwrap_or_else(|e| panic!("{e}"));
    assert!(!fs::exists("/etc/only-in-the-guest").unwrap(), "a guest wrote to the host's root");
}

#[test]
fn a_guest_that_cannot_boot_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    let qemu = Qemu::new(&appliance(Machine::Pc)).accelerator("tcg").vhost_user(&socket, 1);
    let error = qemu.boot_timeout(Duration::from_secs(20)).boot().err().unwrap().to_string();
    assert!(error.contains("Start the vhost-user server before the guest"), "{error}");

    // Something that is no kernel.
    let mut kernel = appliance(Machine::Pc).kernel().clone();
    kernel.image = socket.with_file_name("vmlinuz");
    fs::write(&kernel.image, b"no kernel").unwrap();
    let builder = Appliance::builder(Machine::Pc).kernel(kernel).root(Root::Host);
    let broken = builder.build(dir.path()).unwrap();
    let error = Qemu::new(&broken).accelerator("tcg").boot().err().unwrap().to_string();
    assert!(error.contains("did not boot") && error.contains("kernel"), "{error}");
}

/// Nothing that a translated processor writes while its memory goes is forgotten.
#[test]
#[ignore = "a minute; the host's QEMU is what it tries"]
fn what_a_guest_has_in_memory_goes_with_it() {
    let builder = Appliance::builder(Machine::Pc).programs(["fio"]);
    let appliance = builder.build(&Appliance::default_cache()).unwrap_or_else(|e| panic!("{e}"));
    let qemu = || Qemu::new(&appliance).memory(512 * MIB).cpus(2);
    let guest = qemu().boot().unwrap_or_else(|e| panic!("{e}"));
    let load = guest.start(
        "cd /tmp; n=0
        while [ ! -e stop ]; do
            fio --name=v --directory=/tmp --rw=randwrite --size=32m --bs=4k --ioengine=psync --numjobs=2 \
                --verify=crc32c --verify_fatal=1 --do_verify=1 --verify_state_save=0 --randseed=$n >out 2>&1 || { cat out >&2; exit 1; }
            n=$((n + 1))
        done",
    );
    let load = load.unwrap();
    for n in 0..8 {
        thread::sleep(Duration::from_secs(1));
        let migrated = guest.migrate(qemu(), LONG).unwrap_or_else(|e| panic!("{e}"));
        println!("{n}: {migrated:?}");
        assert!(!load.is_done(), "the load has failed");
    }
    guest.exec("touch /tmp/stop", LONG).unwrap_or_else(|e| panic!("{e}"));
    load.wait(LONG).and_then(|out| out.success()).unwrap_or_else(|e| panic!("{e}"));
    guest.shutdown(SHORT).unwrap_or_else(|e| panic!("{e}"));
}
