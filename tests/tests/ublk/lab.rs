//! The guest in which the stories take place, and the shell functions they are told with.

use std::fs::{self, File};
use std::time::{Duration, Instant};

use ringtap_guest::{Appliance, Drive, Guest, Kernel, Machine, Qemu};
use ringtap_tests::{lab, program, ringtap};

use crate::MIB;

/// TCG on a busy machine.
pub const LONG: Duration = Duration::from_secs(600);

/// Shell functions for the guest: `serve NAME ARGUMENTS` starts a server and waits for its word,
/// `stop NAME` ends it well, `crash NAME` does not.
const LIBRARY: &str = r#"
serve() {
    name=$1; shift
    rm -f /tmp/$name.out
    setsid /tmp/ringtap serve "$@" >/tmp/$name.out 2>/tmp/$name.err &
    echo $! >/tmp/$name.pid
    for i in $(seq 600); do
        grep -q ready /tmp/$name.out && return
        kill -0 $(cat /tmp/$name.pid) 2>/dev/null || break
        sleep 0.1
    done
    cat /tmp/$name.err >&2
    exit 1
}
ended() {
    for i in $(seq 600); do
        kill -0 $(cat /tmp/$1.pid) 2>/dev/null || return 0
        # Ended, and its parent, which may wait for another program, has not been told.
        ! grep -q "^State:.Z" /proc/$(cat /tmp/$1.pid)/status 2>/dev/null || return 0
        sleep 0.1
    done
    echo "$1 does not end" >&2
    cat /tmp/$1.err >&2
    for thread in /proc/$(cat /tmp/$1.pid)/task/*; do
        echo "$(cat $thread/comm) $(cat $thread/wchan 2>/dev/null) $(cat $thread/syscall 2>/dev/null)" >&2
    done
    exit 1
}
stop() {
    kill -TERM $(cat /tmp/$1.pid)
    ended $1
    if grep -q -e ERROR -e 'ringtap:' /tmp/$1.err; then cat /tmp/$1.err >&2; exit 1; fi
}
crash() {
    kill -KILL $(cat /tmp/$1.pid)
    ended $1
}
list() { /tmp/ringtap list; }
# Whether threads of a server whose name begins so are there, and all find memory without waiting for a
# disk: PF_MEMALLOC_NOIO and PF_LOCAL_THROTTLE in the ninth field of proc(5)'s stat.
flushers() {
    seen=
    for thread in /proc/$(cat /tmp/$1.pid)/task/*; do
        case $(cat $thread/comm) in $2*) ;; *) continue ;; esac
        seen=$(awk '{ print $9 }' $thread/stat)
        [ $((seen & 0x180000)) = $((0x180000)) ] || { echo "$2 is no I/O flusher" >&2; exit 1; }
    done
    [ "$seen" ] || { echo "$1 has no threads" >&2; exit 1; }
}
none() {
    list >/tmp/list
    [ ! -s /tmp/list ] && [ -z "$(ls /dev | grep ublk[bc])" ] && [ -z "$(ls /run/ringtap/ublk)" ] && return
    cat /tmp/list >&2; ls /dev /run/ringtap/ublk >&2
    exit 1
}
set -e
"#;

pub struct Lab {
    pub guest: Guest,
    _dir: tempfile::TempDir,
}

impl Lab {
    /// A guest with the binary at /tmp/ringtap, a bare disk at /dev/vda and files at /mnt/files, and a
    /// kernel of that version or later.
    #[allow(dead_code)] // each test target has guests of its own
    pub fn boot(since: &[u64]) -> Lab {
        let kernel = Kernel::pc_since(&Appliance::default_cache(), since);
        let kernel = kernel.unwrap_or_else(|error| panic!("{error}"));
        Lab::with(kernel, &[], &["ublk_drv", "fuse"])
    }

    /// The same with that kernel, more programs of this host, and those modules.
    pub fn with(kernel: Kernel, programs: &[&str], modules: &[&str]) -> Lab {
        let cache = Appliance::default_cache();
        let usual = [
            "bonnie++",
            "fio",
            "dd",
            "mke2fs",
            "e2fsck",
            "mkswap",
            "blkdiscard",
            "blockdev",
            "fallocate",
            "cmp",
            "setpriv",
            "unshare",
        ];
        let appliance = Appliance::builder(Machine::Pc)
            .kernel(kernel)
            .programs(usual.iter().chain(programs).copied())
            .modules(modules.iter().copied())
            .build(&cache)
            .unwrap_or_else(|error| panic!("{error}"));
        let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
        let at = |name: &str| dir.path().join(name);
        for (name, size) in [("bare", 96 * MIB), ("files", 1024 * MIB)] {
            File::create(at(name)).expect("a file").set_len(size).expect("its size");
        }
        fs::create_dir(at("share")).expect("a folder");
        // What a debugger would want is most of it, and comes slowly into a guest.
        for (name, built) in [("ringtap", ringtap()), ("ringtap-lab", lab())] {
            let to = at("share").join(name);
            let copied = program("strip", "binutils", ["-o".into(), to, built]);
            assert!(copied.status.success(), "{}", String::from_utf8_lossy(&copied.stderr));
        }
        fs::write(at("share").join("library"), LIBRARY).expect("a file");
        let guest = Qemu::new(&appliance)
            .memory(1536 << 20)
            .nodes(2)
            .virtio_blk(Drive::raw(at("bare")))
            .virtio_blk(Drive::raw(at("files")))
            .share(at("share"), "/mnt/share")
            .boot_timeout(LONG)
            .boot()
            .unwrap_or_else(|error| panic!("{error}"));
        let lab = Lab { guest, _dir: dir };
        lab.run(
            "the set-up",
            "cp /mnt/share/ringtap /mnt/share/ringtap-lab /mnt/share/library /tmp
             mkdir -p /mnt/files /mnt/disk
             mke2fs -q -t ext4 /dev/vdb
             mount -t ext4 /dev/vdb /mnt/files",
        );
        lab
    }

    /// What a script says that must succeed.
    pub fn run(&self, story: &str, script: &str) -> String {
        let began = Instant::now();
        let script = format!("{LIBRARY}\n{script}");
        let output = self.guest.exec(&script, LONG).unwrap_or_else(|error| panic!("{error}"));
        eprintln!("{story}: {:?}", began.elapsed());
        assert_eq!(
            output.status,
            0,
            "{story}: {}{}\n{}",
            output.stdout,
            output.stderr,
            tail(&self.guest.console())
        );
        output.stdout
    }
}

pub fn tail(text: &str) -> &str {
    let from = text.len().saturating_sub(3000);
    text.get(from..).unwrap_or(text)
}
