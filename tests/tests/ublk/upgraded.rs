//! A server that is followed by another process under load: the block device, what is mounted on it and what is under way
//! go on.

use crate::lab::Lab;

/// A program that says it is ready, and ends when the disks stand still.
const ENDS: &str = r#"
exec 3>&"${RINGTAP_HANDOVER#*:}"
printf '\2\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0' >&3
sleep 0.3
exit 4
"#;

/// The first device has more requests than its queues have room for, the second has a file system: both are written to, and
/// read back, until /tmp/enough is there.
const STORY: &str = r#"
rm -f /tmp/enough /tmp/turns.* /tmp/up.pid
truncate -s 48M /mnt/files/bare /mnt/files/system
serve a --control unix:/tmp/control --pid-file /tmp/up.pid $more \
    /mnt/files/bare -f raw --ublk --queues 2 /mnt/files/system -f raw --ublk=7 --queues 1
mke2fs -q -t ext4 -F /dev/ublkb7
mount -t ext4 /dev/ublkb7 /mnt/disk
dd if=/dev/urandom of=/tmp/data bs=1M count=4 status=none
cp /tmp/data /mnt/disk/data
errors() { dmesg | grep -c -e 'I/O error' -e 'EXT4-fs error' || true; }
before=$(errors)
load() {
    turn=0
    while [ ! -e /tmp/enough ]; do
        turn=$((turn + 1))
        fio --name=$1 --filename=$2 --size=6M --rw=randwrite --bs=4k --iodepth=$3 --ioengine=libaio --direct=1 \
            --overwrite=1 --randseed=$turn --verify=crc32c --do_verify=1 --verify_fatal=1 \
            --verify_state_save=0 --output=/tmp/fio.$1 || { cat /tmp/fio.$1 >&2; exit 1; }
    done
    echo $turn >/tmp/turns.$1
}
load bare /dev/ublkb0 160 & bare=$!
load system /mnt/disk/file 16 & system=$!
goes_on() {
    sleep 1
    kill -0 $bare
    kill -0 $system
    list | grep -c -e "/dev/ublkb0: live.* process $1," -e "/dev/ublkb7: live.* process $1," | grep -q '^2$' || { list >&2; exit 1; }
}
server() { [ "$more" ] && list | sed -n 's/^.dev.ublkb0.* process \([0-9]*\),.*/\1/p' || cat /tmp/up.pid; }
for round in $rounds; do
    old=$(cat /tmp/up.pid)
    case $round in
    fails)
        mv /tmp/ringtap /tmp/ringtap.good
        cp /tmp/ends /tmp/ringtap
        if /tmp/ringtap.good upgrade unix:/tmp/control >/tmp/said 2>&1; then exit 1; fi
        mv /tmp/ringtap.good /tmp/ringtap
        cat /tmp/said
        grep -q 'has ended: status 4' /tmp/said
        [ $(cat /tmp/up.pid) = $old ]
        ;;
    *)
        /tmp/ringtap upgrade --timeout 150 unix:/tmp/control
        [ $(cat /tmp/up.pid) != $old ]
        ;;
    esac
    goes_on $(server)
    [ $round != fails ] || grep -q '/dev/ublkb7 goes on' /tmp/a.err
done
touch /tmp/enough
wait $bare
wait $system
echo "turns of the loads: $(cat /tmp/turns.bare) $(cat /tmp/turns.system)"
sed -n 's/.*stood still for \([^ ]*\)$/stood still for \1/p' /tmp/a.err
[ $(errors) = $before ] || { dmesg | tail >&2; exit 1; }
umount /mnt/disk
e2fsck -fn /dev/ublkb7 >/dev/null
mount -t ext4 /dev/ublkb7 /mnt/disk
cmp /tmp/data /mnt/disk/data
umount /mnt/disk
# Killed, it is a killed server like any other.
cp /tmp/up.pid /tmp/a.pid
crash a
rm -f /tmp/up.pid
serve a /mnt/files/bare -f raw --ublk /mnt/files/system -f raw --ublk=7
e2fsck -fn /dev/ublkb7 >/dev/null
stop a
none
rm /mnt/files/bare /mnt/files/system
"#;

pub fn goes_on_in_other_processes(lab: &Lab) {
    followed(lab, "", "well fails well");
}

/// The same where each server has a broker, which has the driver.
pub fn goes_on_in_confined_ones(lab: &Lab) {
    followed(lab, "--sandbox on", "well fails");
}

fn followed(lab: &Lab, more: &str, rounds: &str) {
    // A shell that takes descriptors of two digits.
    let shell = "echo \"#!$(command -v ash)\" >/tmp/ends";
    let ends = format!("{shell}\ncat >>/tmp/ends <<'END'{ENDS}END\nchmod +x /tmp/ends\n");
    let script = format!("{ends}more='{more}'\nrounds='{rounds}'\n{STORY}");
    let said = lab.run(&format!("upgrades: {more}"), &script);
    eprint!("{said}");
    let followed = rounds.matches("well").count();
    assert_eq!(said.matches("stood still for ").count(), followed, "{said}");
}

pub fn is_refused_where_the_driver_loses_requests(lab: &Lab) {
    let said = lab.run(
        "an upgrade with an older driver",
        "serve a --control unix:/tmp/control /dev/vda -f raw --ublk
         uname -r
         /tmp/ringtap upgrade unix:/tmp/control 2>&1 || echo no
         dd if=/dev/ublkb0 of=/dev/null bs=1M count=4 iflag=direct status=none
         stop a
         none",
    );
    let newer = ["6.16", "6.17", "6.18", "6.19", "7."].iter().any(|since| said.starts_with(since));
    assert!(newer || (said.contains("loses requests") && said.ends_with("no\n")), "{said}");
}
