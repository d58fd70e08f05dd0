//! `ringtap xen` under a real Xen: two guests of `xl` at once, one boot, many stories.

use std::fs::{self, File};
use std::time::{Duration, Instant};

use ringtap_guest::verify::FioVerify;
use ringtap_guest::{Appliance, Domain, Drive, Guest, Machine, Xen};
use ringtap_tests::{program, ringtap};

const MIB: u64 = 1 << 20;
/// TCG below Xen on a busy machine.
const LONG: Duration = Duration::from_secs(600);

/// Shell functions for dom0.
const LIBRARY: &str = r#"
set -e
serve() {
    rm -f /run/xen.out
    setsid ringtap xen "$@" >/run/xen.out 2>>/run/xen.err &
    echo $! >/run/xen.pid
    for i in $(seq 1200); do
        grep -q ready /run/xen.out && return
        kill -0 $(cat /run/xen.pid) 2>/dev/null || break
        sleep 0.1
    done
    cat /run/xen.err >&2
    exit 1
}
ended() {
    for i in $(seq 1200); do
        kill -0 $(cat /run/xen.pid) 2>/dev/null || return 0
        sleep 0.1
    done
    echo "the server does not end" >&2
    exit 1
}
stop() { kill -TERM $(cat /run/xen.pid); ended; }
crash() { kill -KILL $(cat /run/xen.pid); ended; }
"#;

fn disk(device: &str, access: &str, target: &str) -> String {
    format!("format=raw,vdev={device},access={access},script=block-ringtap,target={target}")
}

struct Lab {
    host: ringtap_guest::Host,
    _dir: tempfile::TempDir,
}

impl Lab {
    fn boot() -> Lab {
        let cache = Appliance::default_cache();
        let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
        let at = |name: &str| dir.path().join(name);
        // What a debugger would want is most of it, and takes the guest's memory.
        let binary = at("ringtap");
        let copied = program("strip", "binutils", ["-o".into(), binary.clone(), ringtap()]);
        assert!(copied.status.success(), "{}", String::from_utf8_lossy(&copied.stderr));
        let script =
            fs::canonicalize(concat!(env!("CARGO_MANIFEST_DIR"), "/../contrib/xen/block-ringtap"));
        let first = Appliance::builder(Machine::Xen)
            .programs([binary.to_str().expect("a plain path"), "mke2fs", "cmp", "qemu-img"])
            .file(script.expect("the script"), "/etc/xen/scripts/block-ringtap")
            .modules(["ext4"])
            .build(&cache)
            .unwrap_or_else(|error| panic!("{error}"));
        let other = Appliance::builder(Machine::Domain)
            .programs(["fio", "dd", "mke2fs", "e2fsck", "blkdiscard", "blockdev", "cmp"])
            .modules(["ext4"])
            .build(&cache)
            .unwrap_or_else(|error| panic!("{error}"));
        for (name, size) in [("bare", 64 * MIB), ("files", 512 * MIB)] {
            File::create(at(name)).expect("a file").set_len(size).expect("its size");
        }
        let host = Xen::new(&first, &other)
            .disk(Drive::raw(at("bare")))
            .disk(Drive::raw(at("files")))
            .boot()
            .unwrap_or_else(|error| panic!("{error}"));
        let lab = Lab { host, _dir: dir };
        let link = format!("ln -s {} /usr/bin/ringtap", binary.display());
        lab.run(
            "the set-up",
            &format!(
                "{link}
                 mkdir -p /srv
                 mke2fs -q -t ext4 /dev/vdb
                 mount -t ext4 /dev/vdb /srv
                 ringtap create -f qcow2 /srv/a.qcow2 64M
                 ringtap create -f vpc /srv/b.vhd 64M
                 truncate -s 16M /srv/c.raw
                 echo from-dom0 | dd of=/srv/c.raw conv=notrunc status=none
                 serve"
            ),
        );
        lab
    }

    /// What a script in dom0 says that must succeed.
    fn run(&self, story: &str, script: &str) -> String {
        exec(self.host.dom0(), story, &format!("{LIBRARY}\n{script}"))
    }
}

fn exec(guest: &Guest, story: &str, script: &str) -> String {
    let began = Instant::now();
    let output = guest.exec(script, LONG).unwrap_or_else(|error| panic!("{error}"));
    eprintln!("{story}: {:?}", began.elapsed());
    assert_eq!(output.status, 0, "{story}: {}{}", output.stdout, output.stderr);
    output.stdout
}

#[test]
fn guests_of_xen_have_disks() {
    let lab = Lab::boot();
    refuses_what_cannot_be_served(&lab);
    let one = Domain::new("one")
        .cpus(2)
        .disk(disk("xvda", "w", "/dev/vda"))
        .disk(disk("xvdb", "w", "qcow2:/srv/a.qcow2"))
        .disk(disk("xvdc", "r", "/srv/c.raw"));
    let one = lab.host.create(&one).unwrap_or_else(|error| panic!("{error}"));
    let two = Domain::new("two").disk(disk("xvda", "w", "vhd:/srv/b.vhd"));
    let two = lab.host.create(&two).unwrap_or_else(|error| panic!("{error}"));
    carry_file_systems(&lab, &one, &two);
    survive_their_server(&lab, &one, &two);
    look_as_they_are(&lab, &one);
    come_and_go(&lab, &one);
    drop((one, two));
    leave_nothing_behind(&lab);
}

fn refuses_what_cannot_be_served(lab: &Lab) {
    let said = lab.run(
        "refusals",
        &format!(
            "if ringtap xen 2>&1; then exit 1; fi
             printf '%s\\n' 'name=\"bad\"' 'type=\"pv\"' 'kernel=\"/boot/kernel\"' 'memory=128' \
                 'disk=[\"{}\"]' >/run/bad.cfg
             if xl create /run/bad.cfg 2>&1; then exit 1; fi",
            disk("xvda", "w", "qcow2:/srv/none.qcow2")
        ),
    );
    assert!(said.contains("another ringtap xen runs"), "{said}");
    assert!(said.contains("/srv/none.qcow2"), "{said}");
}

/// Both guests at once, on all three formats.
fn carry_file_systems(lab: &Lab, one: &Guest, two: &Guest) {
    let began = Instant::now();
    let raw = FioVerify::new("/dev/xvda").size(8 * MIB).block(16 << 10).flush_every(64);
    let vhd = FioVerify::new("/dev/xvda").size(8 * MIB);
    let raw = raw.start(one).unwrap_or_else(|error| panic!("{error}"));
    let vhd = vhd.start(two).unwrap_or_else(|error| panic!("{error}"));
    raw.wait(LONG).unwrap_or_else(|error| panic!("{error}"));
    vhd.wait(LONG).unwrap_or_else(|error| panic!("{error}"));
    eprintln!("two guests: {:?}", began.elapsed());
    exec(
        one,
        "a file system",
        "set -e
         mke2fs -q -t ext4 /dev/xvdb
         mkdir -p /mnt/disk
         mount -t ext4 /dev/xvdb /mnt/disk
         dd if=/dev/urandom of=/tmp/data bs=1M count=6 status=none
         dd if=/tmp/data of=/mnt/disk/data bs=1M conv=fsync status=none
         umount /mnt/disk
         e2fsck -fn /dev/xvdb >/dev/null
         mount -t ext4 /dev/xvdb /mnt/disk
         cmp /tmp/data /mnt/disk/data
         umount /mnt/disk
         # Large requests are indirect ones.
         dd if=/tmp/data of=/dev/xvda bs=1M seek=20 oflag=direct status=none
         dd if=/dev/xvda of=/tmp/back bs=1M skip=20 count=6 iflag=direct status=none
         cmp /tmp/data /tmp/back
         echo from-domain-one | dd of=/dev/xvda bs=512 seek=60000 conv=sync,fsync status=none",
    );
    let said = lab.run("seen from dom0", "dd if=/dev/vda bs=512 skip=60000 count=1 status=none");
    assert!(said.starts_with("from-domain-one\n"), "{said}");
}

/// Killed again and again under load, it loses nothing, flushed or not.
fn survive_their_server(lab: &Lab, one: &Guest, two: &Guest) {
    let began = Instant::now();
    let qcow2 = FioVerify::new("/dev/xvdb").size(12 * MIB).loops(2).seed(5);
    let vhd = FioVerify::new("/dev/xvda").size(12 * MIB).loops(2).seed(6);
    let qcow2 = qcow2.start(one).unwrap_or_else(|error| panic!("{error}"));
    let vhd = vhd.start(two).unwrap_or_else(|error| panic!("{error}"));
    let mut under_load = 0;
    for _ in 0..3 {
        std::thread::sleep(Duration::from_secs(1));
        under_load += u32::from(!qcow2.is_done()) + u32::from(!vhd.is_done());
        lab.run("kill -9", "crash; serve");
    }
    qcow2.wait(LONG).unwrap_or_else(|error| panic!("{error}"));
    vhd.wait(LONG).unwrap_or_else(|error| panic!("{error}"));
    eprintln!("killed under {under_load} of 6 loads: {:?}", began.elapsed());
    assert!(under_load > 0, "the loads were too short to be killed under");
    let said =
        lab.run("a stop and a start", "stop; serve --persistent-grants false; cat /run/xen.err");
    assert!(said.contains("taking over") && !said.contains(" ERROR "), "{said}");
    FioVerify::new("/dev/xvda")
        .size(4 * MIB)
        .seed(7)
        .run(two, LONG)
        .unwrap_or_else(|error| panic!("{error}"));
}

fn look_as_they_are(lab: &Lab, one: &Guest) {
    let said = exec(
        one,
        "their looks",
        "set -e
         for disk in xvda xvdb xvdc; do
             cd /sys/block/$disk
             echo $disk $(cat size ro queue/write_cache queue/max_segments) $(ls mq | wc -l)
         done
         head -c 9 /dev/xvdc; echo
         if dd if=/dev/zero of=/dev/xvdc bs=4k count=1 oflag=direct status=none 2>/dev/null; then exit 1; fi
         dd if=/dev/urandom of=/dev/xvdb bs=1M seek=40 count=4 oflag=direct status=none
         blkdiscard -o 40M -l 4M /dev/xvdb
         dd if=/dev/zero of=/tmp/zeros bs=1M count=4 status=none
         dd if=/dev/xvdb of=/tmp/back bs=1M skip=40 count=4 iflag=direct status=none
         cmp /tmp/zeros /tmp/back",
    );
    let sectors = 64 * MIB / 512;
    assert!(said.contains(&format!("xvda {sectors} 0 write back 32 2\n")), "{said}");
    assert!(said.contains(&format!("xvdc {} 1 write back", 16 * MIB / 512)), "{said}");
    assert!(said.contains("from-dom0\n"), "{said}");
    lab.run("more room", "truncate -s 24M /srv/c.raw; kill -HUP $(cat /run/xen.pid)");
    let said = exec(
        one,
        "the new size",
        "for i in $(seq 600); do
             [ $(blockdev --getsize64 /dev/xvdc) != 16777216 ] && break
             sleep 0.1
         done
         blockdev --getsize64 /dev/xvdc",
    );
    assert_eq!(said.trim(), (24 * MIB).to_string());
}

/// Detached, a disk is anybody's; attached again, the guest's.
fn come_and_go(lab: &Lab, one: &Guest) {
    exec(one, "a last write", "echo stays | dd of=/dev/xvdb bs=512 conv=sync,fsync status=none");
    lab.run(
        "detach and attach",
        &format!(
            "xl block-detach one xvdb
             qemu-img check /srv/a.qcow2
             ringtap check -f qcow2 /srv/a.qcow2
             xl block-attach one '{}'",
            disk("xvdb", "w", "qcow2:/srv/a.qcow2")
        ),
    );
    let said = exec(
        one,
        "attached again",
        "for i in $(seq 600); do [ -b /dev/xvdb ] && break; sleep 0.1; done
         head -c 6 /dev/xvdb",
    );
    assert_eq!(said, "stays\n");
}

fn leave_nothing_behind(lab: &Lab) {
    let said = lab.run(
        "what is left",
        "for i in $(seq 600); do
             [ -z \"$(xenstore-list backend/vbd 2>/dev/null)\" ] && break
             sleep 0.1
         done
         qemu-img check /srv/a.qcow2 >/dev/null
         ls /run/ringtap/xen
         stop
         cat /run/xen.err",
    );
    assert!(!said.contains(" ERROR ") || said.matches(" ERROR ").count() == 1, "{said}");
}
