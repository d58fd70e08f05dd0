//! The same by ublk, in a guest: this host's kernel need not have it.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::Duration;

use ringtap_guest::{Appliance, Kernel, Machine, Qemu};

use crate::{CONFINED, FOLDER, PORT, TRANSPORT, refused};

/// A guest without KVM on a busy machine.
const LONG: Duration = Duration::from_secs(600);

/// What the guest does: another's device waits for its server; then a server is attacked from its queue, which has the
/// driver read the disk's first sectors. Both disks are well afterwards.
const STORY: &str = r#"
set -e
cd /tmp
cp /mnt/share/program .
for name in theirs ours; do
    mkdir -p $name/served $name/outside $name/state
    for image in served/disk.qcow2 served/other.qcow2 outside/other.qcow2; do
        cp /mnt/share/image $name/$image
    done
done
echo root:secret >/etc/shadow
serve() {
    rm -f out
    env FOLDER=/tmp/$1 TRANSPORT=ublk ELSEWHERE=9 $2 RINGTAP_STATE_DIR=/tmp/$1/state setsid ./program >out 2>$1.err &
    pid=$!
    for i in $(seq 600); do
        grep -q 'ready$' out && return
        kill -0 $pid 2>/dev/null || break
        sleep 0.1
    done
    cat $1.err >&2
    exit 1
}
serve theirs ATTACK=no
dd if=/dev/urandom of=random bs=64k count=1 status=none
dd if=random of=/dev/ublkb0 bs=64k oflag=direct status=none
kill -KILL $pid
wait $pid || true
serve ours CONFINED=yes
dd if=random of=/dev/ublkb1 bs=64k seek=1 oflag=direct status=none
dd if=/dev/ublkb1 bs=64k skip=1 count=1 iflag=direct status=none | cmp - random
grep -e CapEff -e NoNewPrivs -e Seccomp: /proc/$pid/status
echo "broker $(pidof ringtap-broker || grep -l '^ringtap-broker$' /proc/[0-9]*/comm)"
kill -TERM $pid
wait $pid
[ ! -e /dev/ublkb1 ]
cat ours.err
serve theirs ATTACK=no
dd if=/dev/ublkb0 bs=64k count=1 iflag=direct status=none | cmp - random
kill -TERM $pid
wait $pid
"#;

pub fn an_owned_server_of_block_devices_reaches_nothing_else() {
    let cache = Appliance::default_cache();
    let kernel = Kernel::pc_since(&cache, &[6, 5]).unwrap_or_else(|error| panic!("{error}"));
    // fio brings the libraries that this program is linked with.
    let appliance = Appliance::builder(Machine::Pc).kernel(kernel).programs(["fio", "dd", "cmp"]);
    let appliance = appliance.modules(["ublk_drv"]).build(&cache);
    let appliance = appliance.unwrap_or_else(|error| panic!("{error}"));
    let share = tempfile::tempdir().expect("a folder");
    // What a debugger would want is most of it, and comes slowly into a guest.
    let mut strip = Command::new("strip");
    strip.arg("-o").arg(share.path().join("program"));
    strip.arg(std::env::current_exe().expect("this program"));
    assert!(strip.status().expect("strip of binutils").success());
    let mut make = Command::new("qemu-img");
    make.args(["create", "-q", "-f", "qcow2"]).arg(share.path().join("image")).arg("16M");
    assert!(make.status().expect("qemu-img").success());
    let guest = Qemu::new(&appliance)
        .memory(1024 << 20)
        .share(share.path(), "/mnt/share")
        .boot_timeout(LONG)
        .boot()
        .unwrap_or_else(|error| panic!("{error}"));
    let story = STORY
        .replace("FOLDER=", &format!("{FOLDER}="))
        .replace("TRANSPORT=", &format!("{TRANSPORT}="))
        .replace("ELSEWHERE=", &format!("{PORT}="))
        .replace("ATTACK=", &format!("{}=", crate::NO_ATTACK))
        .replace("CONFINED=", &format!("{CONFINED}="));
    let output = guest.exec(&story, LONG).unwrap_or_else(|error| panic!("{error}"));
    let (text, console) = (format!("{}{}", output.stdout, output.stderr), guest.console());
    assert_eq!(output.status, 0, "{text}\n{console}");
    let lines = text.lines().filter_map(|line| line.strip_prefix("attack: "));
    let found: BTreeMap<String, String> = lines
        .filter_map(|line| line.split_once(": "))
        .map(|(name, end)| (name.to_owned(), end.to_owned()))
        .collect();
    assert!(found.contains_key("the end"), "they were all tried: {text}");
    assert!(found.contains_key("take over another's device"), "{text}");
    // What it may look at shows that the broker does speak with the driver.
    refused(&found, "ublk", &["look at another's device"]);
    // Bit 21 is CAP_SYS_ADMIN.
    let caps = text.lines().find_map(|line| line.strip_prefix("CapEff:")).expect("its rights");
    let caps = u64::from_str_radix(caps.trim(), 16).expect("a number");
    assert_eq!(caps & (1 << 21), 0, "{text}");
    assert!(text.contains("NoNewPrivs:\t1") && text.contains("Seccomp:\t2"), "{text}");
    assert!(!console.contains("WARNING:"), "{console}");
}
