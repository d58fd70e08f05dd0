//! Disks on thin volumes (dm-thin) whose pool is smaller than they are, and fills up: in a guest, whose kernel has
//! device-mapper.

#[path = "ublk/lab.rs"]
mod lab;

use lab::Lab;
use ringtap_guest::{Appliance, Kernel};

const MIB: u64 = 1 << 20;

/// Shell functions: `pool FEATURES` makes a pool of 16 MiB with a volume of 64 MiB, `grow` makes the pool as large as that,
/// `serve FORMAT` serves the volume as `a`, beside a disk `b` that lies elsewhere. Lines of `said` are what the control socket tells.
const LIBRARY: &str = r#"
set -e
export DM_DISABLE_UDEV=1 LC_ALL=C
tap=/tmp/ringtap
export PATH=$PATH:/usr/sbin:/sbin
volume=/dev/mapper/thin
uri() { echo "nbd+unix:///$1?socket=/tmp/n"; }
wait_for() {
    for i in $(seq 400); do
        if "$@" >/dev/null 2>&1; then return; fi
        sleep 0.1
    done
    echo "does not come: $*" >&2
    cat /tmp/serve.err /tmp/said /tmp/written >&2
    dmsetup status >&2
    exit 1
}
# LVM writes them so; a kernel adds what is usual to what it is told.
pool() {
    features="$*"
    dmsetup create --noudevsync meta --table "0 8192 linear /dev/vda 0"
    dmsetup create --noudevsync data --table "0 32768 linear /dev/vda 8192"
    dd if=/dev/zero of=/dev/mapper/meta bs=4096 count=1 oflag=direct status=none
    dmsetup create --noudevsync pool --table "0 32768 thin-pool /dev/mapper/meta /dev/mapper/data 128 0 $features"
    dmsetup message /dev/mapper/pool 0 "create_thin 0"
    dmsetup create --noudevsync thin --table "0 131072 thin /dev/mapper/pool 0"
}
grow() {
    printf '%s\n' "0 32768 linear /dev/vda 8192" "32768 98304 linear /dev/vda 65536" | dmsetup reload data
    dmsetup resume --noudevsync data
    dmsetup reload pool --table "0 131072 thin-pool /dev/mapper/meta /dev/mapper/data 128 0 $features"
    dmsetup resume --noudevsync pool
}
gone() {
    for name in thin pool data meta; do dmsetup remove --noudevsync $name; done
}
cat >/tmp/hear.pl <<'END'
# Without modules, which the guest does not have: AF_UNIX, SOCK_STREAM and a sockaddr_un by their numbers.
socket(my $socket, 1, 1, 0) or die "no socket: $!";
connect($socket, pack("S Z108", 1, "/tmp/c")) or die "no control socket: $!";
$| = 1;
syswrite($socket, "{\"execute\": \"qmp_capabilities\"}\n");
print while <$socket>;
END
serve() {
    rm -f /tmp/serve.out /tmp/said /tmp/beside
    truncate -s 16M /tmp/beside
    setsid $tap serve $volume -f $1 --force-format --name a --nbd unix:/tmp/n \
        /tmp/beside -f raw --cache writeback --name b --nbd unix:/tmp/n \
        --control unix:/tmp/c >/tmp/serve.out 2>/tmp/serve.err &
    server=$!
    wait_for grep -q ready /tmp/serve.out
    perl /tmp/hear.pl >/tmp/said &
    wait_for grep -q return /tmp/said
}
stop() {
    kill -TERM $server
    wait $server || { cat /tmp/serve.err >&2; exit 1; }
}
# More than the pool has room for, a MiB at a time; what is said of it is in /tmp/written.
begin() {
    set --
    for mib in $(seq 0 23); do set -- "$@" -c "write -P 7 ${mib}M 1M"; done
    rm -f /tmp/written.code
    (
        qemu-io -f raw "$@" -c flush -c 'read -P 7 0 24M' "$(uri a)" >/tmp/written 2>&1 && code=0 || code=$?
        echo $code >/tmp/written.code
    ) &
}
at_work() {
    [ -e /tmp/written.code ] || return 0
    echo "the writer has ended: $*" >&2
    cat /tmp/written >&2
    exit 1
}
well() { if grep -i -e fail -e error $1 >&2; then exit 1; fi; }
ended() {
    wait_for test -s /tmp/written.code
    well /tmp/written
    if [ $(cat /tmp/written.code) = 0 ] && [ $(grep -c 'wrote 1048576/' /tmp/written) = 24 ]; then return; fi
    cat /tmp/written >&2
    exit 1
}
# Nothing else stands still: another disk, what may be read of this one, who asks the server.
others_go_on() {
    timeout 20 qemu-io -f raw "$(uri b)" -c "write -P $1 0 4M" -c flush -c "read -P $1 0 4M" >/tmp/others 2>&1
    timeout 20 qemu-io -r -f raw "$(uri a)" -c 'read -P 7 0 4M' >>/tmp/others 2>&1
    well /tmp/others
    timeout 20 $tap disk info b --control unix:/tmp/c >/tmp/info-b
    if grep -q 'for space' /tmp/info-b; then cat /tmp/info-b >&2; exit 1; fi
    at_work "others went on"
}
out_of_room() { dmsetup status pool | grep -q out_of_data_space; }
# All of it is on the volume, without the server.
there() {
    if [ $1 = qcow2 ]; then qemu-img check -q -f qcow2 $volume; fi
    qemu-io -r -f $1 $volume -c 'read -P 7 0 24M' >/tmp/there 2>&1
    well /tmp/there
}
"#;

#[test]
fn a_thin_volume_whose_pool_is_full_is_waited_for() {
    let kernel = Kernel::pc(&Appliance::default_cache()).unwrap_or_else(|error| panic!("{error}"));
    let programs = ["dmsetup", "perl", "qemu-img", "qemu-io"];
    let lab = Lab::with(kernel, &programs, &["dm_mod", "dm_thin_pool"]);
    let run = |story: &str, script: &str| lab.run(story, &format!("{LIBRARY}\n{script}"));
    for format in ["raw", "qcow2"] {
        let said = run(
            &format!("{format}, the pool fails writes"),
            &format!(
                "pool 1 error_if_no_space
                 [ {format} = raw ] || $tap create -q -f qcow2 $volume 48M
                 serve {format}
                 begin
                 wait_for grep -q BLOCK_IO_ERROR /tmp/said
                 wait_for out_of_room
                 others_go_on 3
                 $tap disk info a --control unix:/tmp/c
                 # Nothing is there yet: it waits again, and says so again.
                 $tap disk resume a --control unix:/tmp/c
                 wait_for eval '[ $(grep -c BLOCK_IO_ERROR /tmp/said) = 2 ]'
                 at_work resumed too early
                 grow
                 at_work 'it waits for a word'
                 $tap disk resume a --control unix:/tmp/c
                 ended
                 if $tap disk info a --control unix:/tmp/c | grep 'for space' >&2; then exit 1; fi
                 grep BLOCK_IO_ERROR /tmp/said
                 stop
                 there {format}
                 gone"
            ),
        );
        assert!(said.contains("\nspace: 1 request waits for space\n"), "{said}");
        let told: Vec<&str> = said.lines().filter(|line| line.contains("IO_ERROR")).collect();
        assert_eq!(told.len(), 2, "{said}");
        for line in told {
            let told: serde_json::Value = serde_json::from_str(line).expect("JSON");
            let told = &told["data"];
            assert_eq!(
                (&told["node-name"], &told["nospace"], &told["action"]),
                (&"a".into(), &true.into(), &"stop".into()),
                "{line}"
            );
        }
    }
    run(
        "a pool that has writes wait itself",
        "pool 0
         serve raw
         begin
         wait_for out_of_room
         others_go_on 4
         if grep BLOCK_IO_ERROR /tmp/said >&2; then exit 1; fi
         grow
         # By themselves.
         ended
         if grep BLOCK_IO_ERROR /tmp/said >&2; then exit 1; fi
         stop
         there raw
         gone",
    );
    run(
        "one that has them wait for a while",
        "echo 2 >/sys/module/dm_thin_pool/parameters/no_space_timeout
         pool 0
         serve raw
         begin
         wait_for grep -q BLOCK_IO_ERROR /tmp/said
         others_go_on 5
         grow
         at_work 'it waits for a word'
         $tap disk resume a --control unix:/tmp/c
         ended
         stop
         there raw
         gone",
    );
}
