//! The load generator against a server that is neither ours nor written with it in mind.

use clap::{Args, FromArgMatches};
use ringtap_load::{LoadArgs, Outcome};
use ringtap_tests::listens;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const SIZE: u64 = 8 << 20;

/// qemu-storage-daemon with a vhost-user-blk export; killed when dropped.
struct Server {
    child: Child,
    dir: TempDir,
}

impl Server {
    /// Exports the node `logged` that `blockdevs` end in.
    fn start(blockdevs: &[&str], writable: bool, queues: u32) -> Server {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name).display().to_string();
        fs::File::create(path("disk")).unwrap().set_len(SIZE).unwrap();
        fs::File::create(path("log")).unwrap();
        let export = format!(
            "vhost-user-blk,id=e,node-name=logged,writable={},num-queues={queues},addr.type=unix,addr.path={}",
            if writable { "on" } else { "off" },
            path("socket"),
        );
        let child = Command::new("timeout")
            .args(["--signal=KILL", "60", "qemu-storage-daemon"])
            .args(blockdevs.iter().flat_map(|blockdev| ["--blockdev", blockdev]))
            .args(["--export", &export])
            .current_dir(&dir)
            .spawn()
            .expect("qemu-storage-daemon runs (Debian: qemu-system-common)");
        let server = Server { child, dir };
        let begin = Instant::now();
        while !listens(&server.socket()) {
            assert!(begin.elapsed() < Duration::from_secs(60), "no socket after a minute");
            std::thread::sleep(Duration::from_millis(10));
        }
        server
    }

    /// A file whose every write is also logged.
    fn logging(writable: bool, queues: u32) -> Server {
        let file = "driver=file,node-name=disk,filename=disk";
        let log = "driver=file,node-name=log,filename=log";
        let logged = "driver=blklogwrites,node-name=logged,file=disk,log=log";
        Server::start(&[file, log, logged], writable, queues)
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("socket")
    }

    /// Stops the server and counts the writes in its log (the format of Linux dm-log-writes).
    fn logged_writes(mut self) -> u64 {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
        self.child.wait().unwrap();
        let log = fs::read(self.dir.path().join("log")).unwrap();
        let word = |at: usize| u64::from_le_bytes(log[at..at + 8].try_into().unwrap());
        let (entries, sector) = (word(16), word(24) & 0xffff_ffff);
        let mut at = sector;
        let mut writes = 0;
        for _ in 0..entries {
            let (sectors, flags) = (word(at as usize + 8), word(at as usize + 16));
            let flush_or_discard = flags & 5 != 0;
            writes += u64::from(!flush_or_discard);
            at += sector + sectors * sector;
        }
        writes
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // `timeout` passes TERM on; KILL would orphan the server.
        let pid = self.child.id().to_string();
        let _ =
            Command::new("kill").args(["-TERM", &pid]).stderr(std::process::Stdio::null()).status();
        let _ = self.child.wait();
    }
}

fn load(target: [&str; 2], words: &str) -> anyhow::Result<Outcome> {
    let command = LoadArgs::augment_args(clap::Command::new("load"));
    let words = ["load"].into_iter().chain(target).chain(words.split_whitespace());
    ringtap_load::run(LoadArgs::from_arg_matches(&command.get_matches_from(words))?)
}

fn over(socket: &Path, words: &str) -> anyhow::Result<Outcome> {
    load(["--socket", socket.to_str().unwrap()], words)
}

#[test]
fn verified_load_is_counted_right() {
    let server = Server::logging(true, 2);
    let socket = server.socket();
    let random = over(&socket, "--rw randrw --depth 16 --queues 2 --seconds 0.2 --verify").unwrap();
    let polled =
        over(&socket, "--rw write --bs 64k --segment 4k --depth 4 --seconds 0.1 --poll --verify")
            .unwrap();
    let synced =
        over(&socket, "--rw randwrite --depth 4 --seconds 0.1 --ramp 0.05 --fsync-every 8")
            .unwrap();
    for outcome in [&random, &polled, &synced] {
        assert!(!outcome.failed(), "{outcome}");
        assert!(outcome.ios > 0 && outcome.ios <= outcome.total_ios, "{outcome}");
        assert_eq!(outcome.bytes, outcome.ios * outcome.bs);
        let rate = outcome.ios as f64 / outcome.seconds;
        assert!((rate / outcome.iops - 1.0).abs() < 1e-9);
        let lat = &outcome.lat_ns;
        assert!(0 < lat.p50 && lat.p50 <= lat.p99 && lat.p99 <= lat.p999 && lat.p999 <= lat.max);
        assert!(outcome.cpu_seconds > 0.0);
    }
    assert!(random.total_writes > 0 && random.total_writes < random.total_ios);
    assert!(random.verify.as_ref().unwrap().blocks > 0);
    // One thread writes the whole disk in order: every block of it was read back.
    assert!(polled.verify.as_ref().unwrap().blocks >= polled.total_ios.min(SIZE / polled.bs));
    let flushes = synced.ios / 8;
    assert!(
        synced.flushes.abs_diff(flushes) <= 8,
        "{} flushes, {flushes} expected",
        synced.flushes
    );
    let sent = random.total_writes + polled.total_writes + synced.total_writes;
    assert_eq!(server.logged_writes(), sent);
}

#[test]
fn a_disk_that_forgets_is_found() {
    let forgets = "driver=null-co,node-name=logged,size=8388608,read-zeroes=on";
    let server = Server::start(&[forgets], true, 1);
    let words = "--rw randwrite --size 64k --depth 4 --seconds 0.1 --verify";
    let outcome = over(&server.socket(), words).unwrap();
    let verify = outcome.verify.as_ref().unwrap();
    assert!(outcome.failed() && outcome.errors == 0, "{outcome}");
    assert_eq!((verify.blocks, verify.mismatches), (16, 16), "{outcome}");
    assert!(verify.first_mismatch.unwrap() < 65536);
}

#[test]
fn read_only_and_absent_servers_are_named() {
    let server = Server::logging(false, 1);
    let refused = over(&server.socket(), "--rw randwrite --seconds 0.1").unwrap_err().to_string();
    assert!(refused.contains("read-only"), "{refused}");
    assert!(over(&server.socket(), "--rw randread --seconds 0.1").unwrap().ios > 0);
    let absent = over(Path::new("/nonexistent/socket"), "--seconds 0.1").unwrap_err().to_string();
    assert!(absent.contains("/nonexistent/socket"), "{absent}");
}

#[test]
fn native_load_verifies() {
    // Beside the build, not in /tmp: O_DIRECT must work there.
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("disk");
    fs::write(&path, vec![1; SIZE as usize]).unwrap();
    let target = ["--native", path.to_str().unwrap()];
    let words = "--rw randrw --depth 8 --queues 2 --seconds 0.2 --verify --fsync-every 50";
    let outcome = load(target, words).unwrap();
    assert!(!outcome.failed() && outcome.flushes > 0, "{outcome}");
    assert!(outcome.verify.unwrap().blocks > 0);
    let beyond = load(target, "--size 1G --seconds 0.1").unwrap_err().to_string();
    assert!(beyond.contains("--size"), "{beyond}");
}
