//! A panic of a ublk queue, in a guest: this host's kernel need not have ublk.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use ringtap_guest::{Appliance, Kernel, Machine, Qemu};

use super::{DISKS, FOLDER, LEN, THREAD_TRAP, TRAP, UBLK, format};

/// A guest without KVM on a busy machine.
const LONG: Duration = Duration::from_secs(600);

/// What the guest does: two disks, a load on the second, a panic of each queue of the first.
const STORY: &str = r#"
set -e
cp /mnt/share/program /mnt/share/a /mnt/share/b /tmp
cd /tmp
serve() {
    rm -f out
    FOLDER=/tmp UBLK=1 DISKS=$1 setsid ./program --exact serving --nocapture >out 2>err &
    pid=$!
    for i in $(seq 600); do
        grep -q 'ready$' out && return
        kill -0 $pid 2>/dev/null || break
        sleep 0.1
    done
    cat err >&2
    exit 1
}
fails() {
    if "$@" 2>said; then echo "this works: $*" >&2; exit 1; fi
    grep 'Input/output error' said >&2 || { cat said >&2; exit 1; }
}
random() { dd if=/dev/urandom of=$1 bs=64k count=1 status=none; }
random first; random other
serve a,b
fio --name=v --filename=/dev/ublkb1 --size=8M --rw=randwrite --bs=4k --iodepth=8 --rate_iops=500 \
    --ioengine=libaio --direct=1 --verify=crc32c --do_verify=1 --verify_fatal=1 \
    --verify_state_save=0 --output=fio.out &
fio=$!
# Acknowledged, and nothing of it is flushed.
dd if=first of=/dev/ublkb0 bs=64k oflag=direct status=none
cp a before
# Held open, it is there without bytes.
exec 3<>/dev/ublkb0
fails taskset PROCESSOR dd if=other of=/dev/ublkb0 bs=64k seek=$((TRAP / 65536)) count=1 oflag=direct conv=notrunc status=none
kill -0 $fio || { echo 'the load was too short' >&2; exit 1; }
[ "$(dd bs=64k count=1 status=none <&3 | wc -c)" = 0 ] || { echo 'it goes on' >&2; exit 1; }
# A write that the kernel had begun may end yet, where nothing in the image points to.
BEGUN || cmp a before
exec 3>&-
for i in $(seq 600); do [ -e /sys/block/ublkb0 ] || break; sleep 0.1; done
[ ! -e /sys/block/ublkb0 ] || { echo 'the device stays' >&2; exit 1; }
wait $fio || { cat fio.out >&2; exit 1; }
dd if=other of=/dev/ublkb1 bs=64k oflag=direct conv=notrunc status=none
dd if=/dev/ublkb1 bs=64k count=1 iflag=direct status=none | cmp - other
kill -TERM $pid
status=0; wait $pid || status=$?
cat err
echo "status $status"
[ ! -e /sys/block/ublkb1 ]
head -c 65536 b | cmp - other
# The next server takes up what was acknowledged.
serve a
dd if=/dev/ublkb0 bs=64k count=1 iflag=direct status=none | cmp - first
kill -TERM $pid
wait $pid
"#;

fn make_image(dir: &Path, name: &str) {
    let mut make = Command::new("qemu-img");
    make.args(["create", "-q", "-f", format(name).1]).arg(dir.join(name)).arg("16M");
    assert!(make.status().expect("qemu-img").success());
}

#[test]
fn a_panic_of_a_queue_of_a_block_device_stops_its_disk_and_no_other() {
    let cache = Appliance::default_cache();
    let kernel = Kernel::pc_since(&cache, &[6, 5]).unwrap_or_else(|error| panic!("{error}"));
    let programs = ["fio", "dd", "cmp"];
    let appliance = Appliance::builder(Machine::Pc).kernel(kernel).programs(programs);
    let appliance = appliance.modules(["ublk_drv"]).build(&cache);
    let appliance = appliance.unwrap_or_else(|error| panic!("{error}"));
    let share = tempfile::tempdir().expect("a folder");
    // What a debugger would want is most of it, and comes slowly into a guest.
    let program = std::env::current_exe().expect("this program");
    let mut strip = Command::new("strip");
    strip.arg("-o").arg(share.path().join("program")).arg(program);
    assert!(strip.status().expect("strip of binutils").success());
    ["a", "b"].into_iter().for_each(|name| make_image(share.path(), name));
    let guest = Qemu::new(&appliance)
        .memory(1024 << 20)
        .share(share.path(), "/mnt/share")
        .boot_timeout(LONG)
        .boot()
        .unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(LEN, 64 << 10, "as the story has it");
    // In a request, on the one queue, and on the other in the thread's own turn.
    for (queue, trap) in [(0, TRAP), (1, THREAD_TRAP)] {
        let story = STORY
            .replace("FOLDER=", &format!("{FOLDER}="))
            .replace("UBLK=", &format!("{UBLK}="))
            .replace("DISKS=", &format!("{DISKS}="))
            .replace("PROCESSOR", &(queue + 1).to_string())
            .replace("BEGUN", &(trap == THREAD_TRAP).to_string())
            .replace("TRAP", &trap.to_string());
        let output = guest.exec(&story, LONG).unwrap_or_else(|error| panic!("{error}"));
        let (said, console) = (format!("{}{}", output.stdout, output.stderr), guest.console());
        assert_eq!(output.status, 0, "queue {queue}: {said}\n{console}");
        assert!(said.contains("status 101"), "{said}");
        let thread = format!("thread a:ub{queue}");
        for words in ["as the test has it", "main.rs:", "/tmp/a", &thread] {
            let line = said.lines().find(|line| line.contains("stopped by a panic: "));
            assert!(line.is_some_and(|line| line.contains(words)), "no {words}: {said}");
        }
        assert!(!console.contains("WARNING:"), "{console}");
    }
}
