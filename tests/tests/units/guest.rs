//! The units under a systemd of their own, in a guest.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use ringtap_guest::{Appliance, Drive, Guest, Kernel, Machine, Qemu};
use ringtap_tests::{program, ringtap};

/// TCG on a busy machine.
const LONG: Duration = Duration::from_secs(600);

/// What is loaded by name only, where the distribution has it.
const LIBRARIES: [&str; 5] =
    ["libseccomp.so.2", "libmount.so.1", "libbpf.so.1", "libblkid.so.1", "libcrypt.so.1"];

/// Names a socket: then this program is the front-end of a vhost-user server in the guest.
const SOCKET: &str = "RINGTAP_TEST_SOCKET";

/// Runs in the guest.
/// Whether the log warns of nothing, but that systemd has a namespace of processes of its own here, as a container's.
fn is_quiet(said: &str) -> bool {
    let warns = |line: &str| line.contains("WARN") && !line.contains("ends with this container");
    !said.lines().any(warns)
}

#[test]
fn front_end() {
    let Some(socket) = std::env::var_os(SOCKET) else { return };
    let mut stream = UnixStream::connect(socket).expect("a connection");
    // GET_FEATURES, version 1, no payload.
    stream.write_all(&[1u32, 1, 0].map(u32::to_ne_bytes).concat()).expect("sent");
    let mut reply = [0; 20];
    stream.read_exact(&mut reply).expect("a reply");
    let features = u64::from_ne_bytes(*reply.last_chunk().expect("eight bytes"));
    assert_ne!(features & 1 << 32, 0, "{features:#x} without VIRTIO_F_VERSION_1");
}

/// A real systemd, as the first process of a namespace, for which the guest's disk is the root.
const LIBRARY: &str = r#"
set -e
manager() {
    mkdir -p /etc/systemd/system /etc/ringtap /usr/local/bin /srv /sys/fs/cgroup
    cp /mnt/share/units/* /etc/systemd/system
    cp /mnt/share/ringtap /mnt/share/front_end /usr/local/bin
    mount -t cgroup2 cgroup2 /sys/fs/cgroup
    mount -t ext4 /dev/vda /srv
    echo 0123456789abcdef0123456789abcdef >/etc/machine-id
    printf 'ID=test\nNAME=test\n' >/etc/os-release
    printf '[Manager]\nLogTarget=kmsg\n' >/etc/systemd/system.conf
    # There is no journal.
    mkdir /etc/systemd/system/service.d
    printf '[Service]\nStandardOutput=append:/srv/%%n.err\nStandardError=append:/srv/%%n.err\n' \
        >/etc/systemd/system/service.d/said.conf
    # What services come after, and end before.
    for target in sysinit basic sockets shutdown umount remote-fs-pre; do
        printf '[Unit]\nDescription=%s\n' $target >/etc/systemd/system/$target.target
    done
    # A container is what it is in, and is to have all it would have outside.
    setsid unshare --pid --fork --mount --mount-proc --propagation private \
        /lib/systemd/systemd --system --unit=basic.target >/tmp/systemd.out 2>&1 </dev/null &
    for i in $(seq 300); do
        for process in /proc/[0-9]*; do
            [ "$(cat $process/comm)" != systemd ] || echo ${process#/proc/} >/tmp/systemd.pid
        done
        if [ -s /tmp/systemd.pid ] && inside systemctl is-active --quiet basic.target; then return; fi
        sleep 0.2
    done
    cat /tmp/systemd.out >&2
    dmesg | tail -n 100 >&2
    exit 1
}
# As a program that this systemd started would run.
inside() {
    nsenter --target $(cat /tmp/systemd.pid) --pid --mount --root --wd=/ "$@"
}
begin() {
    systemctl start $1 || { systemctl status -l $1 >&2 || true; tail -n 20 /srv/*.err >&2; dmesg | tail -n 100 >&2; exit 1; }
    systemctl is-active --quiet $1
}
# The main process of a unit, as this namespace calls it.
pid() {
    for process in /proc/[0-9]*; do
        [ "$(cat $process/comm 2>/dev/null)" != ringtap-broker ] || continue
        grep -qs "/$1\$" $process/cgroup && { echo ${process#/proc/}; return; }
    done
    echo "$1 has no process" >&2
    exit 1
}
sandboxed() {
    grep -q "^Seccomp:[[:space:]]*2" /proc/$(pid $1)/status || { echo "$1 has no filter" >&2; exit 1; }
    grep -q "^NoNewPrivs:[[:space:]]*1" /proc/$(pid $1)/status
    grep " /proc .*subset=pid" /proc/$(pid $1)/mountinfo >/dev/null || { echo "$1 sees all of /proc" >&2; exit 1; }
}
# Kills a unit's server as a crash would, and waits for the next.
crash() {
    old=$(pid $1)
    kill -KILL $old
    for i in $(seq 100); do
        new=$( (pid $1) 2>/dev/null) && [ "$new" != $old ] && systemctl is-active --quiet $1 && return
        sleep 0.2
    done
    systemctl status -l $1 >&2 || true
    tail -n 20 /srv/*.err >&2
    exit 1
}
said() { cat /srv/*.err; rm /srv/*.err; }
"#;

struct Lab {
    guest: Guest,
    _dir: tempfile::TempDir,
}

impl Lab {
    fn boot() -> Lab {
        let cache = Appliance::default_cache();
        // From there on ublk's driver lets go of a device.
        let kernel = Kernel::pc_since(&cache, &[6, 16]).unwrap_or_else(|error| panic!("{error}"));
        let mut programs = vec![
            "/lib/systemd/systemd".to_owned(),
            std::env::current_exe().expect("this test").display().to_string(),
        ];
        let usual =
            ["systemctl", "nsenter", "unshare", "mke2fs", "nbdcopy", "nbdinfo", "cmp", "dd"];
        programs.extend(usual.map(str::to_owned));
        programs.extend(
            LIBRARIES
                .map(|name| format!("/usr/lib/x86_64-linux-gnu/{name}"))
                .into_iter()
                .chain(["/usr/lib/systemd/systemd-executor".to_owned()])
                .filter(|path| Path::new(path).is_file()),
        );
        let appliance = Appliance::builder(Machine::Pc)
            .kernel(kernel)
            .programs(programs)
            .modules(["ublk_drv"])
            .build(&cache)
            .unwrap_or_else(|error| panic!("{error}"));
        let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
        let at = |name: &str| dir.path().join(name);
        File::create(at("disk")).expect("a file").set_len(512 << 20).expect("its size");
        fs::create_dir_all(at("share/units")).expect("a folder");
        for entry in fs::read_dir(super::folder()).expect("the units").flatten() {
            fs::copy(entry.path(), at("share/units").join(entry.file_name())).expect("a copy");
        }
        let own = std::env::current_exe().expect("this test");
        for (from, to) in [(ringtap(), "ringtap"), (own, "front_end")] {
            let copied = program("strip", "binutils", ["-o".into(), at("share").join(to), from]);
            assert!(copied.status.success(), "{}", String::from_utf8_lossy(&copied.stderr));
        }
        let guest = Qemu::new(&appliance)
            .memory(1536 << 20)
            .virtio_blk(Drive::raw(at("disk")))
            .share(at("share"), "/mnt/share")
            .boot_timeout(LONG)
            .boot()
            .unwrap_or_else(|error| panic!("{error}"));
        Lab { guest, _dir: dir }
    }

    fn run(&self, story: &str, script: &str) -> String {
        self.exec(story, &format!("{LIBRARY}\n{script}"))
    }

    /// Where the guest's systemd is the first process.
    fn run_inside(&self, story: &str, script: &str) -> String {
        let script = format!(
            "cat >/tmp/story <<'THE END'\n{LIBRARY}\n{script}\nTHE END\n{LIBRARY}\ninside /bin/sh /tmp/story"
        );
        self.exec(story, &script)
    }

    fn exec(&self, story: &str, script: &str) -> String {
        let output = self.guest.exec(script, LONG);
        let output = output
            .unwrap_or_else(|error| panic!("{error}\nits console:\n{}", self.guest.console()));
        eprintln!("{story}: {:?}", output.elapsed);
        let (said, console) = (output.stdout.clone() + &output.stderr, self.guest.console());
        assert_eq!(output.status, 0, "{story}: {said}\nits console:\n{console}");
        output.stdout
    }
}

#[test]
fn units_start_under_systemd_and_come_back_after_a_crash() {
    let lab = Lab::boot();
    lab.run(
        "systemd",
        "mke2fs -q -t ext4 /dev/vda
         manager
         dd if=/dev/urandom of=/tmp/data bs=1M count=8 status=none
         ringtap=/usr/local/bin/ringtap
         $ringtap create -q -f qcow2 /srv/base.qcow2 64M
         # What it names is recorded, and another user's, so that the record is asked.
         $ringtap create -q -b /srv/base.qcow2 -F qcow2 /srv/late.qcow2
         chown 65534 /srv/late.qcow2
         for name in guest net late host; do
             [ $name = late ] || $ringtap create -q -f qcow2 /srv/$name.qcow2 64M
             printf 'DISK=/srv/%s.qcow2\\nFORMAT=qcow2\\nNUMBER=7\\n' $name >/etc/ringtap/$name.conf
         done",
    );
    let said = lab.run_inside(
        "vhost-user",
        "begin ringtap@guest.service
         sandboxed ringtap@guest.service
         systemctl reload ringtap@guest.service
         RINGTAP_TEST_SOCKET=/run/ringtap/guest.sock front_end --exact guest::front_end
         # Another program in its place.
         old=$(pid ringtap@guest.service)
         cp /usr/local/bin/ringtap /tmp/next && mv /tmp/next /usr/local/bin/ringtap
         systemctl reload ringtap@guest.service
         for i in $(seq 100); do
             [ $(pid ringtap@guest.service) = $old ] || break
             sleep 0.2
         done
         [ $(pid ringtap@guest.service) != $old ]
         sandboxed ringtap@guest.service
         RINGTAP_TEST_SOCKET=/run/ringtap/guest.sock front_end --exact guest::front_end
         crash ringtap@guest.service
         RINGTAP_TEST_SOCKET=/run/ringtap/guest.sock front_end --exact guest::front_end
         # Where it ends by itself nothing has failed, and it is not started again.
         /usr/local/bin/ringtap stop $(pid ringtap@guest.service)
         sleep 1
         state=$(systemctl is-active ringtap@guest.service || true)
         [ $state = inactive ] || { echo \"it is $state\" >&2; exit 1; }
         said",
    );
    assert!(said.contains("serving") && is_quiet(&said), "{said}");
    let said = lab.run_inside(
        "NBD",
        "begin ringtap-nbd@net.socket
         uri='nbd+unix:///?socket=/run/ringtap-nbd/net.sock'
         nbdinfo --size \"$uri\"
         sandboxed ringtap-nbd@net.service
         systemctl reload ringtap-nbd@net.service
         nbdcopy /tmp/data \"$uri\"
         # Nothing was flushed: it is the restart log that tells where the bytes are.
         crash ringtap-nbd@net.service
         nbdcopy \"$uri\" /tmp/back
         cmp -n 8388608 /tmp/data /tmp/back
         systemctl stop ringtap-nbd@net.socket ringtap-nbd@net.service
         ls /run/ringtap
         said",
    );
    assert!(said.contains("67108864"), "{said}");
    assert!(said.contains("serving") && is_quiet(&said), "{said}");
    let said = lab.run_inside(
        "a unit that does not say which boot it is",
        "rm -r /run/ringtap
         mkdir /etc/systemd/system/ringtap-nbd@late.service.d
         printf '[Service]\\nUnsetEnvironment=RINGTAP_BOOT_ID\\n' >/etc/systemd/system/ringtap-nbd@late.service.d/boot.conf
         systemctl daemon-reload
         begin ringtap-nbd@late.socket
         uri='nbd+unix:///?socket=/run/ringtap-nbd/late.sock'
         dd if=/dev/urandom of=/tmp/other bs=1M count=8 status=none
         nbdcopy /tmp/other \"$uri\"
         sandboxed ringtap-nbd@late.service
         ! grep -qz RINGTAP_BOOT_ID /proc/$(pid ringtap-nbd@late.service)/environ
         [ -s /run/ringtap/boot-id ]
         crash ringtap-nbd@late.service
         nbdcopy \"$uri\" /tmp/back
         cmp -n 8388608 /tmp/other /tmp/back
         systemctl stop ringtap-nbd@late.socket ringtap-nbd@late.service
         said",
    );
    assert!(said.contains("serving") && is_quiet(&said), "{said}");
    let said = lab.run_inside(
        "all disks in one server",
        "unit=ringtap-daemon.service
         mkdir -p /etc/ringtap/disks.d
         echo 'OPTIONS=--metrics unix:/run/ringtap/metrics.sock' >/etc/ringtap/ringtap-daemon.conf
         /usr/local/bin/ringtap create -q -f qcow2 /srv/folder.qcow2 64M
         printf 'image = \"/srv/folder.qcow2\"\nformat = \"qcow2\"\nnbd = \"unix:/run/ringtap/folder.nbd\"\n' \
             >/etc/ringtap/disks.d/folder.toml
         begin $unit
         sandboxed $unit
         uri='nbd+unix:///?socket=/run/ringtap/folder.nbd'
         nbdcopy /tmp/data \"$uri\"
         crash $unit
         nbdcopy \"$uri\" /tmp/back
         cmp -n 8388608 /tmp/data /tmp/back
         [ -S /run/ringtap/metrics.sock ]
         /usr/local/bin/ringtap disk list
         systemctl stop $unit
         [ ! -e /run/ringtap/folder.nbd ]
         said",
    );
    assert!(said.contains("folder"), "{said}");
    let said = lab.run_inside(
        "of another user",
        "unit=ringtap@user.service
         mkdir /etc/systemd/system/$unit.d
         printf '[Service]\\nCapabilityBoundingSet=CAP_SETUID CAP_SETGID CAP_KILL\\nSystemCallFilter=@setuid setfsuid setfsgid capset\\n' \
             >/etc/systemd/system/$unit.d/user.conf
         printf 'DISK=/srv/user.qcow2\\nFORMAT=qcow2\\nOPTIONS=%s\\n' \
             '--user 65534:65534 --nbd unix:/run/ringtap/user.nbd' >/etc/ringtap/user.conf
         systemctl daemon-reload
         /usr/local/bin/ringtap create -q -f qcow2 /srv/user.qcow2 64M
         chown 65534 /srv/user.qcow2
         begin $unit
         sandboxed $unit
         is_user() { grep -q '^Uid:[[:space:]]*65534[[:space:]]*65534[[:space:]]*65534' /proc/$(pid $unit)/status; }
         is_user
         systemctl reload $unit
         RINGTAP_TEST_SOCKET=/run/ringtap/user.sock front_end --exact guest::front_end
         uri='nbd+unix:///?socket=/run/ringtap/user.nbd'
         nbdcopy /tmp/data \"$uri\"
         crash $unit
         is_user
         nbdcopy \"$uri\" /tmp/back
         cmp -n 8388608 /tmp/data /tmp/back
         old=$(pid $unit)
         cp /usr/local/bin/ringtap /tmp/next && mv /tmp/next /usr/local/bin/ringtap
         systemctl reload $unit
         for i in $(seq 100); do
             [ $(pid $unit) = $old ] || break
             sleep 0.2
         done
         [ $(pid $unit) != $old ]
         is_user
         [ -d /var/lib/ringtap-65534 ]
         systemctl stop $unit
         [ ! -e /run/ringtap/user.nbd ]
         [ ! -e /run/ringtap/user.sock ]
         said",
    );
    assert!(said.contains("serving") && is_quiet(&said), "{said}");
    let said = lab.run_inside(
        "ublk",
        "begin ringtap-ublk@host.service
         sandboxed ringtap-ublk@host.service
         systemctl reload ringtap-ublk@host.service
         dd if=/tmp/data of=/dev/ublkb7 bs=1M oflag=direct status=none
         crash ringtap-ublk@host.service
         cmp -n 8388608 /tmp/data /dev/ublkb7
         # Another program in its place, while a file system is written to.
         old=$(pid ringtap-ublk@host.service)
         mke2fs -q -t ext4 /dev/ublkb7
         mkdir -p /tmp/on && mount -t ext4 /dev/ublkb7 /tmp/on
         cp /usr/local/bin/ringtap /tmp/next && mv /tmp/next /usr/local/bin/ringtap
         dd if=/tmp/data of=/tmp/on/data bs=64k oflag=direct status=none &
         writer=$!
         systemctl reload ringtap-ublk@host.service
         for i in $(seq 100); do
             [ $(pid ringtap-ublk@host.service) = $old ] || break
             sleep 0.2
         done
         [ $(pid ringtap-ublk@host.service) != $old ]
         sandboxed ringtap-ublk@host.service
         wait $writer
         umount /tmp/on
         mount -t ext4 /dev/ublkb7 /tmp/on
         cmp /tmp/data /tmp/on/data
         # Restarted, while it is written to; what was not flushed is there, too.
         for turn in 1 2 3; do
             old=$(pid ringtap-ublk@host.service)
             dd if=/tmp/data of=/tmp/on/again bs=64k oflag=direct status=none &
             writer=$!
             systemctl restart ringtap-ublk@host.service
             wait $writer
             [ $(pid ringtap-ublk@host.service) != $old ]
             sandboxed ringtap-ublk@host.service
             grep -q '^/dev/ublkb7 /tmp/on ' /proc/mounts
         done
         umount /tmp/on
         mount -t ext4 /dev/ublkb7 /tmp/on
         cmp /tmp/data /tmp/on/data
         cmp /tmp/data /tmp/on/again
         umount /tmp/on
         systemctl stop ringtap-ublk@host.service
         [ ! -e /dev/ublkb7 ]
         said",
    );
    assert!(said.contains("serving") && is_quiet(&said), "{said}");
}

/// Steps of the clock between a crash and the next start are no writes, and hide none.
#[test]
fn a_restart_log_is_told_from_others_whatever_the_clock_says() {
    let lab = Lab::boot();
    let said = lab.exec(
        "the clock stepped",
        r#"
set -e
mke2fs -q -t ext4 /dev/vda
mkdir -p /srv /run
mount -t ext4 /dev/vda /srv
ringtap=/mnt/share/ringtap
uri='nbd+unix:///?socket=/tmp/sock'
serve() {
    rm -f /tmp/sock /tmp/ready
    $ringtap serve /srv/a.qcow2 -f qcow2 --nbd unix:/tmp/sock >/tmp/ready 2>>/tmp/said &
    server=$!
    for i in $(seq 300); do grep -q ready /tmp/ready && return; sleep 0.1; done
    cat /tmp/said >&2
    exit 1
}
crash() { kill -KILL $server; wait $server || true; }
dd if=/dev/urandom of=/tmp/data bs=1M count=8 status=none
for step in 3600 -7200; do
    rm -f /srv/a.qcow2 /tmp/said
    $ringtap create -q -f qcow2 /srv/a.qcow2 64M
    serve
    nbdcopy /tmp/data "$uri"
    crash
    date -s @$(($(date +%s) + step)) >/dev/null
    serve
    nbdcopy "$uri" /tmp/back
    cmp -n 8388608 /tmp/data /tmp/back
    grep -q 'taking up' /tmp/said || { cat /tmp/said >&2; exit 1; }
    # What somebody else wrote is told from it, whenever that says that it was.
    crash
    rm /srv/a.qcow2
    $ringtap create -q -f qcow2 /srv/a.qcow2 64M
    serve
    nbdcopy /tmp/data "$uri"
    crash
    cp /srv/a.qcow2 /srv/copy
    date -s @$(($(date +%s) + step)) >/dev/null
    : >/tmp/said
    dd if=/srv/copy of=/srv/a.qcow2 bs=1M conv=notrunc status=none
    serve
    cat /tmp/said
    crash
done
"#,
    );
    let dropped =
        said.lines().filter(|line| line.contains("not used, of what a killed process left"));
    assert_eq!(dropped.count(), 2, "{said}");
}
