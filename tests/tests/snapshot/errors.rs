//! What becomes of mirrors and backups that cannot read what they copy, or write the copy.

use std::fs;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use ringtap_tests::{Control, Server, file_system_of, listens, ok, patience, plain, ringtap};
use serde_json::{Value, json};

use crate::bench::{Bench, MIB};
use crate::jobs::{hear, make};

/// An NBD server that refuses to read, or to write, as long as a file is there; it ends with this.
struct Faulty {
    child: Child,
    socket: String,
    fault: std::path::PathBuf,
}

impl Faulty {
    /// One that cannot make stable what it was given, and then loses it all, for as long as the file is there.
    fn losing(bench: &Bench, name: &str) -> Faulty {
        let image = bench.text(name);
        let (fault, socket) = (bench.path("fault"), bench.text(&format!("{name}.nbd")));
        bench.raw(name, MIB);
        let each = "bs=4096 conv=notrunc status=none";
        let flush = format!(
            "flush=if [ -e {} ]; then truncate -s 0 {image}; truncate -s 1M {image}; echo EIO lost >&2; exit 1; fi",
            fault.display()
        );
        let own = [
            "get_size=echo 1M".to_owned(),
            format!("pread=dd if={image} skip=$4 count=$3 iflag=skip_bytes,count_bytes {each}"),
            format!("pwrite=dd of={image} seek=$4 oflag=seek_bytes {each}"),
            "can_write=exit 0".to_owned(),
            "can_flush=exit 0".to_owned(),
            flush,
        ];
        let args = ["-f", "--threads", "1", "-U", &socket, "eval"];
        let child = Command::new("nbdkit").args(args).args(own).stderr(Stdio::null()).spawn();
        Faulty::begun(child.expect("nbdkit begins"), socket, fault)
    }

    fn new(bench: &Bench, name: &str, what: &str) -> Faulty {
        let (image, fault) = (bench.text(name), bench.path("fault"));
        bench.raw(name, 64 * MIB);
        let socket = bench.text(&format!("{name}.nbd"));
        let own = [
            format!("error-{what}=EIO"),
            format!("error-{what}-rate=100%"),
            format!("error-{what}-file={}", fault.display()),
        ];
        // Of several threads of nbdkit 1.32 one may answer where another has closed the connection: it aborts.
        let child = Command::new("nbdkit")
            .args(["-f", "--threads", "1", "-U", &socket, "--filter=error", "file", &image])
            .args(own)
            .stderr(Stdio::null())
            .spawn();
        Faulty::begun(child.expect("nbdkit begins"), socket, fault)
    }

    fn begun(child: Child, socket: String, fault: std::path::PathBuf) -> Faulty {
        let until = Instant::now() + patience();
        while !listens(socket.as_ref()) {
            assert!(Instant::now() < until, "nbdkit does not listen");
            thread::sleep(Duration::from_millis(10));
        }
        Faulty { child, socket, fault }
    }

    fn begins(&self) {
        fs::write(&self.fault, "").expect("a file");
    }

    fn ends(&self) {
        fs::remove_file(&self.fault).expect("removed");
    }

    fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.socket)
    }
}

impl Drop for Faulty {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn begin(control: &mut Control, command: &str, more: Value) {
    let mut arguments = json!({ "device": "a", "job-id": "j", "target": "copy", "sync": "full" });
    let own = arguments.as_object_mut().expect("an object");
    own.extend(more.as_object().cloned().unwrap_or_default());
    control.ok(command, arguments);
}

fn met(control: &mut Control, operation: &str, action: &str) {
    met_by(control, "j", operation, action);
}

fn met_by(control: &mut Control, id: &str, operation: &str, action: &str) {
    let told = hear(control, "BLOCK_JOB_ERROR");
    assert_eq!(told, json!({ "device": id, "operation": operation, "action": action }));
}

/// It pauses for that reason.
fn stands(control: &mut Control, why: &str) {
    let until = Instant::now() + patience();
    loop {
        let job = &control.ok("query-block-jobs", json!({}))[0];
        if (&job["io-status"], &job["status"]) == (&json!(why), &json!("paused")) {
            return;
        }
        assert!(Instant::now() < until, "{job}");
        thread::sleep(Duration::from_millis(10));
    }
}

fn ended(control: &mut Control) -> Option<String> {
    hear(control, "BLOCK_JOB_COMPLETED")["error"].as_str().map(str::to_owned)
}

/// As QEMU does it, with a target that is full until something else goes; the guest notices nothing.
#[test]
fn a_copy_whose_target_is_full_waits_or_fails_as_it_is_told() {
    for command in ["blockdev-mirror", "blockdev-backup"] {
        let bench = Bench::new();
        let set_up = file_system_of(32, "tmpfs", &[], "");
        let (copy, ballast) = (set_up.folder().join("copy"), set_up.folder().join("ballast"));
        make(&bench, "a.img", "raw", &[]);
        let name = ringtap();
        ok(plain(&name), "ringtap", &["create", "-q", "-f", "qcow2", plain(&copy), "64M"]);
        let server = bench.serve(&["a.img"], &["-f", "raw"]);
        let mut control = bench.control();
        bench.io("a", &["write -P 1 0 16M"]);
        fs::write(&ballast, vec![1; 24 << 20]).expect("the ballast");
        let file = json!({ "driver": "file", "filename": copy });
        // Its requests would wait for room, but for the job.
        let node = json!({ "driver": "qcow2", "node-name": "copy", "file": file });
        control.ok("blockdev-add", node);
        begin(&mut control, command, json!({}));
        met(&mut control, "write", "report");
        let why = ended(&mut control).expect("it fails");
        assert!(why.contains("no space"), "{why}");
        begin(&mut control, command, json!({ "on-target-error": "enospc" }));
        met(&mut control, "write", "stop");
        stands(&mut control, "nospace");
        bench.io("a", &["write -P 2 0 64k", "read -P 1 64k 1M"]);
        control.ok("block-job-resume", json!({ "device": "j" }));
        met(&mut control, "write", "stop");
        // Where nobody resumes it, it is cancelled as any other.
        control.ok("block-job-cancel", json!({ "device": "j" }));
        hear(&mut control, "BLOCK_JOB_CANCELLED");
        begin(&mut control, command, json!({ "on-target-error": "ignore" }));
        met(&mut control, "write", "ignore");
        met(&mut control, "write", "ignore");
        fs::remove_file(&ballast).expect("removed");
        if command == "blockdev-mirror" {
            hear(&mut control, "BLOCK_JOB_READY");
            control.ok("block-job-complete", json!({ "device": "j" }));
        }
        assert_eq!(ended(&mut control), None);
        let held = ["read -P 2 0 64k", "read -P 1 64k 16320k", "read -P 0 16M 48M"];
        bench.io("a", &held);
        server.stop();
        let shown = copy.display().to_string();
        let reads = held.iter().flat_map(|read| ["-c", read]);
        let args: Vec<&str> =
            ["-r", "-f", "qcow2"].into_iter().chain(reads).chain([&*shown]).collect();
        let said = ok("qemu-io", "qemu-utils", &args);
        assert!(!said.contains("failed"), "{command}: {said}");
        ok("qemu-img", "qemu-utils", &["check", "-q", &shown]);
    }
}

/// A target that refuses writes, and a disk that refuses reads, for a while.
#[test]
fn a_copy_that_meets_errors_waits_or_fails_as_it_is_told() {
    for (side, command) in [
        ("target", "blockdev-mirror"),
        ("target", "blockdev-backup"),
        ("source", "blockdev-mirror"),
        ("source", "blockdev-backup"),
    ] {
        let bench = Bench::new();
        let (name, what, operation) =
            if side == "source" { ("a.img", "pread", "read") } else { ("copy", "pwrite", "write") };
        let faulty = Faulty::new(&bench, name, what);
        bench.raw(if side == "source" { "copy" } else { "a.img" }, 64 * MIB);
        let (disk, copy) = match side {
            "source" => (faulty.uri(), bench.text("copy")),
            _ => (bench.text("a.img"), faulty.uri()),
        };
        let (nbd, socket) =
            (format!("unix:{}.nbd", bench.text("a")), format!("unix:{}", bench.text("control")));
        let args = [&*disk, "-f", "raw", "--name", "a", "--node-name", "a", "--nbd", &nbd];
        let server = Server::start(args.iter().chain(&["--control", &socket]));
        let mut control = bench.control();
        bench.io("a", &["write -P 1 0 16M"]);
        let file = match side {
            "source" => json!({ "driver": "file", "filename": copy }),
            _ => json!({ "driver": "nbd", "server": { "type": "unix", "path": faulty.socket } }),
        };
        control.ok("blockdev-add", json!({ "driver": "raw", "node-name": "copy", "file": file }));
        let policy = format!("on-{side}-error");
        faulty.begins();
        for (own, action) in [("report", "report"), ("enospc", "report")] {
            begin(&mut control, command, json!({ &*policy: own }));
            met(&mut control, operation, action);
            let why = ended(&mut control).expect("it fails");
            assert!(why.contains("failed"), "{side}, {command}: {why}");
        }
        begin(&mut control, command, json!({ &*policy: "stop" }));
        met(&mut control, operation, "stop");
        stands(&mut control, "failed");
        control.ok("block-job-resume", json!({ "device": "j" }));
        met(&mut control, operation, "stop");
        faulty.ends();
        control.ok("block-job-resume", json!({ "device": "j" }));
        if command == "blockdev-mirror" {
            hear(&mut control, "BLOCK_JOB_READY");
            // Ready, and in step with the guest: what fails now is tried again, too, and the guest notices nothing.
            if side == "target" {
                faulty.begins();
                bench.io("a", &["write -P 3 20M 1M", "read -P 3 20M 1M"]);
                met(&mut control, operation, "stop");
                faulty.ends();
                control.ok("block-job-resume", json!({ "device": "j" }));
            }
            control.ok("block-job-cancel", json!({ "device": "j" }));
        }
        assert_eq!(ended(&mut control), None, "{side}, {command}");
        let end = if command == "blockdev-mirror" && side == "target" { 3 } else { 0 };
        let last = format!("read -P {end} 20M 1M");
        let held = ["read -P 1 0 16M", "read -P 0 16M 4M", &last];
        bench.io("a", &held);
        control.ok("blockdev-del", json!({ "node-name": "copy" }));
        server.stop();
        bench.holds("copy", "raw", &held);
    }
}

/// What was written since the last good flush may be lost, and is, here: it is written again, or the job ends.
#[test]
fn a_copy_whose_target_cannot_be_made_stable_waits_or_fails_as_it_is_told() {
    let bench = Bench::new();
    let losing = Faulty::losing(&bench, "copy");
    bench.raw("a.img", MIB);
    let server = bench.serve(&["a.img"], &["-f", "raw"]);
    let mut control = bench.control();
    bench.io("a", &["write -P 1 0 1M"]);
    let file = json!({ "driver": "nbd", "server": { "type": "unix", "path": losing.socket } });
    control.ok("blockdev-add", json!({ "driver": "raw", "node-name": "copy", "file": file }));
    losing.begins();
    let begin_ready = |control: &mut Control, policy: &str| {
        begin(control, "blockdev-mirror", json!({ "on-target-error": policy }));
        hear(control, "BLOCK_JOB_READY");
        // Nothing of the disk changes at the end.
        control.ok("block-job-cancel", json!({ "device": "j" }));
    };
    for policy in ["report", "enospc"] {
        begin_ready(&mut control, policy);
        met(&mut control, "write", "report");
        let why = ended(&mut control).expect("it fails");
        assert!(why.contains("stable"), "{why}");
    }
    begin_ready(&mut control, "stop");
    met(&mut control, "write", "stop");
    stands(&mut control, "failed");
    control.ok("block-job-resume", json!({ "device": "j" }));
    met(&mut control, "write", "stop");
    stands(&mut control, "failed");
    bench.io("a", &["write -P 2 64k 64k"]);
    losing.ends();
    control.ok("block-job-resume", json!({ "device": "j" }));
    assert_eq!(ended(&mut control), None);
    control.ok("blockdev-del", json!({ "node-name": "copy" }));
    server.stop();
    bench.holds("copy", "raw", &["read -P 1 0 64k", "read -P 2 64k 64k", "read -P 1 128k 896k"]);
}

/// Of what guests have changed since, the disk does not hold any more what is to be saved again: scratch does.
#[test]
fn a_backup_whose_target_cannot_be_made_stable_is_saved_again_as_far_as_that_can_be() {
    let bench = Bench::new();
    let losing = Faulty::losing(&bench, "copy");
    bench.raw("a.img", MIB);
    let server = bench.serve(&["a.img"], &["-f", "raw"]);
    let mut control = bench.control();
    bench.io("a", &["write -P 1 0 1M"]);
    let file = json!({ "driver": "nbd", "server": { "type": "unix", "path": losing.socket } });
    control.ok("blockdev-add", json!({ "driver": "raw", "node-name": "copy", "file": file }));
    losing.begins();
    for policy in ["report", "enospc"] {
        begin(&mut control, "blockdev-backup", json!({ "on-target-error": policy }));
        met(&mut control, "write", "report");
        let why = ended(&mut control).expect("it fails");
        assert!(why.contains("stable"), "{why}");
    }
    let stop = |control: &mut Control, scratch: u64| {
        let more = json!({ "on-target-error": "stop", "__ringtap_scratch-limit": scratch });
        begin(control, "blockdev-backup", more);
        met(control, "write", "stop");
        stands(control, "failed");
        bench.io("a", &["write -P 2 64k 64k"]);
    };
    stop(&mut control, 0);
    control.ok("block-job-resume", json!({ "device": "j" }));
    met(&mut control, "write", "report");
    let why = ended(&mut control).expect("it fails");
    assert!(why.contains("guests have changed 65536 bytes"), "{why}");
    bench.io("a", &["write -P 1 0 1M"]);
    stop(&mut control, 1 << 20);
    for _ in 0..2 {
        control.ok("block-job-resume", json!({ "device": "j" }));
        met(&mut control, "write", "stop");
        stands(&mut control, "failed");
        bench.io("a", &["write -P 2 64k 64k"]);
    }
    losing.ends();
    control.ok("block-job-resume", json!({ "device": "j" }));
    assert_eq!(ended(&mut control), None);
    control.ok("blockdev-del", json!({ "node-name": "copy" }));
    bench.io("a", &["read -P 1 0 64k", "read -P 2 64k 64k"]);
    server.stop();
    bench.holds("copy", "raw", &["read -P 1 0 1M"]);
}

/// Through the page cache no flush is believed after one that failed, but for one of what was written anew.
#[test]
fn a_copy_in_the_page_cache_that_cannot_be_made_stable_waits_as_it_is_told() {
    for command in ["blockdev-mirror", "blockdev-backup"] {
        let bench = Bench::new();
        let losing = Faulty::losing(&bench, "far");
        let (uri, file) = (losing.uri(), bench.text("copy"));
        let between = Server::start([&uri, "-f", "raw", "--fuse", &file]);
        bench.raw("a.img", MIB);
        let server = bench.serve(&["a.img"], &["-f", "raw"]);
        let mut control = bench.control();
        bench.io("a", &["write -P 1 0 1M"]);
        let cache = json!({ "direct": false });
        let file = json!({ "driver": "file", "filename": file, "cache": cache });
        control.ok("blockdev-add", json!({ "driver": "raw", "node-name": "copy", "file": file }));
        losing.begins();
        begin(&mut control, command, json!({ "on-target-error": "stop" }));
        if command == "blockdev-mirror" {
            hear(&mut control, "BLOCK_JOB_READY");
            control.ok("block-job-cancel", json!({ "device": "j" }));
        }
        met(&mut control, "write", "stop");
        stands(&mut control, "failed");
        losing.ends();
        control.ok("block-job-resume", json!({ "device": "j" }));
        assert_eq!(ended(&mut control), None, "{command}");
        // The next one is told again, and what was copied is of no use.
        losing.begins();
        begin(&mut control, command, json!({}));
        if command == "blockdev-mirror" {
            hear(&mut control, "BLOCK_JOB_READY");
            control.ok("block-job-cancel", json!({ "device": "j" }));
        }
        met(&mut control, "write", "report");
        assert!(ended(&mut control).is_some(), "{command}");
        losing.ends();
        begin(&mut control, command, json!({ "on-target-error": "ignore" }));
        if command == "blockdev-mirror" {
            hear(&mut control, "BLOCK_JOB_READY");
            control.ok("block-job-cancel", json!({ "device": "j" }));
        }
        met(&mut control, "write", "ignore");
        assert_eq!(ended(&mut control), None, "{command}");
        control.ok("blockdev-del", json!({ "node-name": "copy" }));
        server.stop();
        between.stop();
        bench.holds("far", "raw", &["read -P 1 0 1M"]);
    }
}

#[test]
fn people_have_a_backup_wait_for_room() {
    let bench = Bench::new();
    let set_up = file_system_of(32, "tmpfs", &[], "");
    let (copy, ballast) = (set_up.folder().join("copy"), set_up.folder().join("ballast"));
    make(&bench, "a.img", "raw", &[]);
    let name = ringtap();
    ok(plain(&name), "ringtap", &["create", "-q", "-f", "raw", plain(&copy), "64M"]);
    let server = bench.serve(&["a.img"], &["-f", "raw"]);
    let mut control = bench.control();
    bench.io("a", &["write -P 1 0 16M"]);
    fs::write(&ballast, vec![1; 24 << 20]).expect("the ballast");
    let socket = format!("unix:{}", bench.text("control"));
    thread::scope(|scope| {
        let backup = scope.spawn(|| {
            let args = ["disk", "backup", "a", plain(&copy), "-f", "raw", "--on-error", "enospc"];
            ok(plain(&name), "ringtap", &[&args[..], &["--control", &socket]].concat())
        });
        met_by(&mut control, "backup-a", "write", "stop");
        assert!(!backup.is_finished());
        fs::remove_file(&ballast).expect("removed");
        let resume = ["job", "resume", "backup-a", "--control", &socket];
        ok(plain(&name), "ringtap", &resume);
        backup.join().expect("it ends well");
    });
    server.stop();
    let shown = copy.display().to_string();
    let read = ["-r", "-f", "raw", "-c", "read -P 1 0 16M", "-c", "read -P 0 16M 48M", &shown];
    let said = ok("qemu-io", "qemu-utils", &read);
    assert!(!said.contains("failed"), "{said}");
}
