//! Disks of Xen guests: a real Xen with its first domain in QEMU, `ringtap xen` there, and domains
//! whose kernel knows nothing of it. One boot, two domains, many stories.

use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, Instant};

use ringtap_guest::{Appliance, Domain, Drive, Guest, Host, Machine, Xen};
use ringtap_tests::{program, ringtap};

const MIB: u64 = 1 << 20;
/// TCG on a busy machine.
const LONG: Duration = Duration::from_secs(900);

/// Shell functions for the first domain.
const LIBRARY: &str = r#"
serve() {
    rm -f /tmp/served.out
    setsid ringtap xen --allow-backing /srv >/tmp/served.out 2>>/tmp/served.err &
    echo $! >/tmp/served.pid
    for i in $(seq 600); do
        grep -q ready /tmp/served.out && return
        kill -0 $(cat /tmp/served.pid) || break
        sleep 0.1
    done
    echo 'the server is not ready' >&2
    tail -30 /tmp/served.err >&2
    exit 1
}
# disk DEVICE ACCESS TARGET: in the words of xl-disk-configuration(5).
disk() {
    echo "format=raw,vdev=$1,access=$2,script=block-ringtap,target=$3"
}
set -e
"#;

/// Xen's own script starts dozens of programs, and a busy machine needs longer for these than `xl` waits.
const BLOCK_NODE: &str = r#"#!/bin/sh
[ "$1" = add ] || exit 0
node=$(xenstore-read $XENBUS_PATH/params)
exec xenstore-write $XENBUS_PATH/physical-device $(stat -L -c %t:%T $node) \
    $XENBUS_PATH/hotplug-status connected
"#;

struct Lab {
    host: Host,
    _dir: tempfile::TempDir,
}

impl Lab {
    /// A Xen whose first domain has the binary, a bare disk at /dev/vdb and room for images in /srv.
    fn boot() -> Lab {
        let cache = Appliance::default_cache();
        let build = |builder: ringtap_guest::Builder| {
            builder.build(&cache).unwrap_or_else(|error| panic!("{error}"))
        };
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
        let at = |name: &str| dir.path().join(name);
        let first = build(
            Appliance::builder(Machine::Xen)
                .programs(["dd", "qemu-img"])
                .spare_modules(["xen-blkback"]),
        );
        let other = build(Appliance::builder(Machine::Domain).programs(["fio", "dd", "blockdev"]));
        // What a debugger would want is most of it.
        let copied = program("strip", "binutils", ["-o".into(), at("ringtap"), ringtap()]);
        assert!(copied.status.success(), "{}", String::from_utf8_lossy(&copied.stderr));
        let size = fs::metadata(at("ringtap")).expect("a file").len();
        File::create(at("bare")).and_then(|file| file.set_len(64 * MIB)).expect("a disk");
        let script =
            fs::read_to_string(root.join("contrib/xen/block-ringtap")).expect("the script");
        let host = Xen::new(&first, &other)
            .cpus(1)
            .memory(1 << 30)
            .domains_memory(800 << 20)
            .disk(Drive::raw(at("ringtap")))
            .disk(Drive::raw(at("bare")))
            .boot()
            .unwrap_or_else(|error| panic!("{error}"));
        eprintln!("Xen booted in {:?}", host.dom0().boot_time());
        let lab = Lab { host, _dir: dir };
        lab.first(
            "the set-up",
            &format!(
                "head -c {size} /dev/vda >/usr/bin/ringtap
                 cat >/etc/xen/scripts/block-ringtap <<'END'\n{script}END
                 cat >/etc/xen/scripts/block-node <<'END'\n{BLOCK_NODE}END
                 chmod 755 /usr/bin/ringtap /etc/xen/scripts/block-*
                 mkdir /srv"
            ),
        );
        lab
    }

    /// What a script says that must succeed in the first domain.
    fn first(&self, story: &str, script: &str) -> String {
        let began = Instant::now();
        let said = run(self.host.dom0(), &format!("{LIBRARY}\n{script}"), story);
        eprintln!("{story}: {:?}", began.elapsed());
        said
    }

    fn create(&self, domain: &Domain) -> Guest {
        let guest = self.host.create(domain).unwrap_or_else(|error| {
            let served = self.host.dom0().exec("tail /tmp/served.err", LONG);
            panic!("{error}\n{}", served.map_or_else(|error| error.to_string(), |o| o.stdout))
        });
        eprintln!("a domain booted in {:?}", guest.boot_time());
        guest
    }
}

fn run(guest: &Guest, script: &str, story: &str) -> String {
    let output = guest.exec(script, LONG).unwrap_or_else(|error| panic!("{story}: {error}"));
    let console = guest.console();
    let console = console.get(console.len().saturating_sub(2000)..).unwrap_or(&console);
    assert_eq!(output.status, 0, "{story}: {}{}\n{console}", output.stdout, output.stderr);
    output.stdout
}

/// Waits in a guest until a device is there, or is no longer.
fn device(guest: &Guest, name: &str, there: bool) {
    let wanted = if there { "" } else { "!" };
    run(guest, &format!("until [ {wanted} -b /dev/{name} ]; do sleep 0.1; done"), name);
}

#[test]
fn guests_of_xen_have_their_disks_from_ringtap() {
    let lab = Lab::boot();
    let one = lab.create(&Domain::new("one").memory(320 << 20));
    the_guests_are_real(&lab, &one);
    the_server_serves_three_formats(&lab);
}

/// The same guest and tools with the kernel's own back end, which then makes way.
fn the_guests_are_real(lab: &Lab, one: &Guest) {
    lab.first(
        "xen-blkback",
        "modprobe xen-blkback
         xl block-attach one format=raw,vdev=xvda,access=w,script=block-node,target=/dev/vdb",
    );
    device(one, "xvda", true);
    run(one, "echo from the guest | dd of=/dev/xvda conv=fsync status=none", "a write");
    let said = lab.first(
        "its end",
        "head -c 14 /dev/vdb
         xl block-detach one xvda
         rmmod xen-blkback",
    );
    assert_eq!(said, "from the guest");
}

/// Disks are attached to a running guest and given to a new one, on images of three formats.
fn the_server_serves_three_formats(lab: &Lab) {
    lab.first(
        "three images",
        "truncate -s 48M /srv/raw
         ringtap create -q -f qcow2 /srv/vm.qcow2 48M
         ringtap create -q -f vpc /srv/vm.vhd 48M
         serve
         xl block-attach one $(disk xvda w /srv/raw)
         xl block-attach one $(disk xvdb w vhd:/srv/vm.vhd)",
    );
    let target = "format=raw,vdev=xvda,access=w,script=block-ringtap,target=qcow2:/srv/vm.qcow2";
    let two = lab.create(&Domain::new("two").memory(320 << 20).disk(target));
    drop(two);
}
