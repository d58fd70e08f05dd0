//! A nested Xen in which `ringtap xen` runs, and guests that have their disks from it.

use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, Instant};

use ringtap_guest::{Appliance, Domain, Drive, Guest, Host, Machine, Xen};
use ringtap_tests::{program, ringtap};

pub(crate) const MIB: u64 = 1 << 20;
/// TCG on a busy machine.
pub(crate) const LONG: Duration = Duration::from_secs(900);

/// A fault of QEMU's (7.2, translated, docs/xen.md): a kernel of two processors meets code that it is just changing.
const CODE_CHANGED: &str = "Oops: int3";
const BOOTS: u32 = 3;

/// What the guests need beside their kernel.
const PROGRAMS: [&str; 4] = ["fio", "dd", "blockdev", "blkdiscard"];

/// Shell functions for the first domain.
const LIBRARY: &str = r#"
serve() {
    rm -f /tmp/served.out
    setsid ringtap xen --allow-backing /srv "$@" >/tmp/served.out 2>>/tmp/served.err &
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
ended() {
    for i in $(seq 600); do
        # Nobody may have fetched its status yet.
        grep -s ^State: /proc/$(cat /tmp/served.pid)/status | grep -qv Z || return 0
        sleep 0.1
    done
    echo 'the server does not end' >&2
    cat /proc/$(cat /tmp/served.pid)/task/*/stack >&2 || true
    exit 1
}
crash() {
    kill -KILL $(cat /tmp/served.pid)
    ended
}
# disk DEVICE ACCESS TARGET: in the words of xl-disk-configuration(5).
disk() {
    echo "format=raw,vdev=$1,access=$2,script=block-ringtap,target=$3"
}
# attached DOMAIN: the devices of a domain that the first one serves.
attached() {
    xenstore-list /local/domain/0/backend/vbd/$(xl domid $1) 2>/dev/null || true
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

pub(crate) struct Lab {
    pub(crate) host: Host,
    _dir: tempfile::TempDir,
}

impl Lab {
    /// A Xen whose first domain has the binary, a bare disk at /dev/vdb and room for images in /srv.
    pub(crate) fn boot() -> Lab {
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
        let other = build(Appliance::builder(Machine::Domain).programs(PROGRAMS));
        // What a debugger would want is most of it.
        let copied = program("strip", "binutils", ["-o".into(), at("ringtap"), ringtap()]);
        assert!(copied.status.success(), "{}", String::from_utf8_lossy(&copied.stderr));
        let size = fs::metadata(at("ringtap")).expect("a file").len();
        File::create(at("bare")).and_then(|file| file.set_len(64 * MIB)).expect("a disk");
        let script =
            fs::read_to_string(root.join("contrib/xen/block-ringtap")).expect("the script");
        let boot = || {
            let xen = Xen::new(&first, &other).cpus(2).memory(1 << 30).domains_memory(800 << 20);
            xen.disk(Drive::raw(at("ringtap"))).disk(Drive::raw(at("bare"))).boot()
        };
        let host = (1..=BOOTS).find_map(|time| match boot() {
            Err(error) if time < BOOTS && error.to_string().contains(CODE_CHANGED) => {
                eprintln!("Xen is booted again: {error}");
                None
            }
            end => Some(end.unwrap_or_else(|error| panic!("{error}"))),
        });
        let host = host.expect("the last boot ends it");
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
    pub(crate) fn first(&self, story: &str, script: &str) -> String {
        let began = Instant::now();
        let said = run(self.host.dom0(), &format!("{LIBRARY}\n{script}"), story);
        eprintln!("{story}: {:?}", began.elapsed());
        said
    }

    pub(crate) fn create(&self, domain: &Domain) -> Guest {
        let guest = self.host.create(domain).unwrap_or_else(|error| {
            let served = self.host.dom0().exec("tail /tmp/served.err", LONG);
            panic!("{error}\n{}", served.map_or_else(|error| error.to_string(), |o| o.stdout))
        });
        eprintln!("a domain booted in {:?}", guest.boot_time());
        guest
    }
}

pub(crate) fn run(guest: &Guest, script: &str, story: &str) -> String {
    let output = guest.exec(script, LONG).unwrap_or_else(|error| panic!("{story}: {error}"));
    let console = guest.console();
    let console = console.get(console.len().saturating_sub(8000)..).unwrap_or(&console);
    assert_eq!(output.status, 0, "{story}: {}{}\n{console}", output.stdout, output.stderr);
    output.stdout
}

/// Waits in a guest until a device is there, or is no longer.
pub(crate) fn device(guest: &Guest, name: &str, there: bool) {
    let wanted = if there { "" } else { "!" };
    run(guest, &format!("until [ {wanted} -b /dev/{name} ]; do sleep 0.1; done"), name);
}
