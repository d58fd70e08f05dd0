//! Every job that copies a disk, into a target of some kind, while a guest writes.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::{Control, Server, ok, patience, program};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 16 * MIB;

/// What is copied to: an image as large as the disk.
pub struct Target {
    /// How a client of the control socket opens it.
    pub node: Value,
    /// How QEMU's programs do.
    pub opened: String,
    /// The file of the secret `s`, where it takes one.
    pub secret: Option<PathBuf>,
}

/// The server of one disk, `a`, which guests see by NBD.
pub struct Source {
    server: Option<Server>,
    control: Control,
    folder: PathBuf,
}

/// One that writes, and reads what it has written, until it is told to stop.
struct Guest {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<u32, String>>,
}

/// A program of QEMU's that ends well.
fn qemu_io(options: &str, commands: &[String]) -> Result<(), String> {
    let commands = commands.iter().flat_map(|command| ["-c", command]);
    let args = ["--image-opts", options].into_iter().chain(commands);
    let output = program("qemu-io", "qemu-utils", args);
    let said = [&output.stdout[..], &output.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    let is_well = output.status.success() && !said.contains("failed") && !said.contains("rror");
    if is_well { Ok(()) } else { Err(said) }
}

impl Guest {
    fn begin(source: &Source) -> Guest {
        let (stop, options) = (Arc::new(AtomicBool::new(false)), source.options());
        let told = stop.clone();
        let thread = thread::spawn(move || {
            let mut rounds = 0;
            while !told.load(SeqCst) {
                let round = |turn: u32| {
                    let (pattern, at) = (fastrand::u32(1..250), fastrand::u64(0..2900) * 4096);
                    let len = fastrand::u64(1..32) * 4096;
                    let write = format!("write -P {pattern} {at} {len}");
                    let read = format!("read -P {pattern} {at} {len}");
                    match turn % 5 {
                        4 => {
                            vec![format!("write -z -u {at} {len}"), format!("read -P 0 {at} {len}")]
                        }
                        _ => vec![write, read],
                    }
                };
                let mut all: Vec<String> = (0..20).flat_map(round).collect();
                all.push("flush".into());
                qemu_io(&options, &all)?;
                rounds += 1;
            }
            Ok(rounds)
        });
        Guest { stop, thread }
    }

    /// Nothing that it did has failed, and it has come on.
    fn ends_well(self) {
        self.stop.store(true, SeqCst);
        let rounds = self.thread.join().expect("a guest").expect("a guest that was not harmed");
        assert!(rounds > 0);
    }
}

impl Source {
    /// A disk of 16 MiB in `folder`.
    pub fn new(folder: &Path, more: &[&str]) -> Source {
        let disk = folder.join("a").display().to_string();
        drop(ok("qemu-img", "qemu-utils", &["create", "-q", "-f", "qcow2", &disk, "16M"]));
        let (server, control) = Source::serve(folder, more);
        let mut source = Source { server: Some(server), control, folder: folder.to_owned() };
        source.open();
        source
    }

    fn serve(folder: &Path, more: &[&str]) -> (Server, Control) {
        let at = folder.join("control");
        let control = format!("unix:{}", at.display());
        let server = Server::daemon(["--control", &*control].iter().chain(more));
        (server, Control::open(&at))
    }

    fn open(&mut self) {
        let file = json!({ "driver": "file", "filename": self.folder.join("a"), "cache": { "direct": true } });
        self.control.ok(
            "blockdev-add",
            json!({ "driver": "qcow2", "node-name": "a", "file": file, "backing": null }),
        );
        let addr = json!({ "type": "unix", "data": { "path": self.folder.join("nbd") } });
        self.control.ok("nbd-server-start", json!({ "addr": addr }));
        let export =
            json!({ "type": "nbd", "id": "e", "node-name": "a", "name": "a", "writable": true });
        self.control.ok("block-export-add", export);
    }

    fn options(&self) -> String {
        let socket = self.folder.join("nbd");
        format!("driver=nbd,server.type=unix,server.path={},export=a", socket.display())
    }

    fn add(&mut self, target: &Target) {
        if let Some(file) = &target.secret {
            let object = json!({ "qom-type": "secret", "id": "s", "file": file });
            self.control.ok("object-add", object);
        }
        let mut node = target.node.clone();
        node["node-name"] = "t".into();
        node["__ringtap_on-error"] = "report".into();
        self.control.ok("blockdev-add", node);
    }

    fn remove(&mut self, target: &Target) {
        self.control.ok("blockdev-del", json!({ "node-name": "t" }));
        if target.secret.is_some() {
            self.control.ok("object-del", json!({ "id": "s" }));
        }
    }

    fn begin(&mut self, command: &str, sync: &str, more: Value) {
        let mut job = json!({ "job-id": "j", "device": "a", "target": "t", "sync": sync, "auto-dismiss": false });
        for (key, value) in more.as_object().expect("options") {
            job[key] = value.clone();
        }
        self.control.ok(command, job);
    }

    fn until(&mut self, wanted: &str) {
        while self.control.event().0 != wanted {}
    }

    /// Why the job failed, once it has ended.
    fn ended(&mut self) -> Value {
        loop {
            let (name, told) = self.control.event();
            if name == "JOB_STATUS_CHANGE" && told["id"] == "j" && told["status"] == "concluded" {
                break;
            }
        }
        let jobs = self.control.ok("query-jobs", json!({}));
        let error = jobs[0]["error"].clone();
        self.control.ok("job-dismiss", json!({ "id": "j" }));
        error
    }

    /// The target holds what the disk does, for QEMU too.
    fn is_copied(&mut self, target: &Target) {
        self.remove(target);
        let options = self.options();
        let mut words = vec!["compare".to_owned()];
        if let Some(file) = &target.secret {
            words.extend(["--object".into(), format!("secret,id=s,file={}", file.display())]);
        }
        words.extend(["--image-opts".into(), options, target.opened.clone()]);
        let words: Vec<&str> = words.iter().map(|word| &**word).collect();
        ok("qemu-img", "qemu-utils", &words);
    }

    /// A full backup and, of what has changed since, an incremental one; then a mirror.
    pub fn is_copied_by_all(&mut self, target: &Target) {
        let guest = Guest::begin(self);
        self.add(target);
        let bitmap = json!({ "node": "a", "name": "b" });
        // The machine may be busy with other tests: no write is too slow here.
        let patience = 60_000;
        let backup = json!({ "job-id": "j", "device": "a", "target": "t", "sync": "full", "auto-dismiss": false, "__ringtap_guest-timeout": patience });
        let actions = [
            json!({ "type": "block-dirty-bitmap-add", "data": bitmap }),
            json!({ "type": "blockdev-backup", "data": backup }),
        ];
        self.control.ok("transaction", json!({ "actions": actions }));
        assert_eq!(self.ended(), Value::Null);
        thread::sleep(Duration::from_millis(300));
        guest.ends_well();
        let more = json!({ "bitmap": "b", "__ringtap_guest-timeout": patience });
        self.begin("blockdev-backup", "incremental", more);
        assert_eq!(self.ended(), Value::Null);
        self.control.ok("block-dirty-bitmap-remove", bitmap);
        self.is_copied(target);
        for mode in ["background", "write-blocking"] {
            let guest = Guest::begin(self);
            self.add(target);
            let more = json!({ "__ringtap_copy": true, "copy-mode": mode });
            self.begin("blockdev-mirror", "full", more);
            self.until("BLOCK_JOB_READY");
            thread::sleep(Duration::from_millis(300));
            guest.ends_well();
            self.control.ok("job-complete", json!({ "id": "j" }));
            assert_eq!(self.ended(), Value::Null);
            self.is_copied(target);
        }
    }

    /// Jobs that are cancelled at work are no harm.
    pub fn may_be_cancelled(&mut self, target: &Target) {
        for command in ["blockdev-mirror", "blockdev-backup"] {
            let guest = Guest::begin(self);
            self.add(target);
            self.begin(command, "full", json!({ "speed": MIB }));
            thread::sleep(Duration::from_millis(700));
            self.control.ok("block-job-cancel", json!({ "device": "j", "force": true }));
            self.ended();
            self.remove(target);
            guest.ends_well();
        }
    }

    /// Jobs whose target fails are no harm: `fails` has it fail, and `mends` has it be there again, after the job has ended.
    pub fn outlives_it(&mut self, target: &Target, fails: impl Fn(), mends: impl Fn()) {
        let both = [("blockdev-mirror", json!({ "copy-mode": "write-blocking" }), true)];
        let slow = json!({ "speed": MIB });
        let both = both.into_iter().chain([("blockdev-backup", slow, false)]);
        for (command, more, is_ready) in both {
            let guest = Guest::begin(self);
            self.add(target);
            self.begin(command, "full", more);
            match is_ready {
                true => self.until("BLOCK_JOB_READY"),
                false => thread::sleep(Duration::from_millis(500)),
            }
            fails();
            let error = self.ended();
            assert_ne!(error, Value::Null, "{command}");
            guest.ends_well();
            mends();
            self.remove(target);
        }
        self.is_copied_by_all(target);
    }

    /// It has met an error of its target, and stands still, or ends, as it was told.
    fn meets_no_room(&mut self, action: &str) {
        loop {
            let (name, told) = self.control.event();
            if name == "BLOCK_JOB_ERROR" {
                assert_eq!(
                    (&told["operation"], &told["action"]),
                    (&json!("write"), &json!(action))
                );
                return;
            }
        }
    }

    fn waits_for_room(&mut self) {
        let until = Instant::now() + patience();
        loop {
            let job = &self.control.ok("query-block-jobs", json!({}))[0];
            if (&job["io-status"], &job["status"]) == (&json!("nospace"), &json!("paused")) {
                return;
            }
            assert!(Instant::now() < until, "{job}");
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Jobs whose target has no room end, or wait and go on where they were once there is, as they are told; `ballast` takes the
    /// room as long as it is there, and `make` makes the target anew. The guest notices nothing.
    pub fn runs_full(&mut self, make: impl Fn() -> Target, ballast: &Path) {
        qemu_io(&self.options(), &["write -P 77 0 16M".to_owned()]).expect("written");
        let [begun, blocking] = ["background", "write-blocking"]
            .map(|mode| json!({ "__ringtap_copy": true, "copy-mode": mode }));
        for (command, more) in [
            ("blockdev-backup", json!({})),
            ("blockdev-mirror", begun),
            ("blockdev-mirror", blocking),
        ] {
            let is_backup = command == "blockdev-backup";
            let no_room = || {
                let target = make();
                fs::write(ballast, vec![1; SIZE as usize]).expect("the ballast");
                target
            };
            let target = &no_room();
            let guest = Guest::begin(self);
            self.add(target);
            self.begin(command, "full", more.clone());
            self.meets_no_room("report");
            let error = self.ended().as_str().map(str::to_owned).expect("it fails");
            assert!(error.contains("no space"), "{command}: {error}");
            // What its own tables still wanted to write is said to be lost, and it is closed all the same.
            let end = self.control.call("blockdev-del", json!({ "node-name": "t" }));
            assert!(end.as_ref().err().is_none_or(|why| why.contains("cannot flush")), "{end:?}");
            self.control.ok("object-del", json!({ "id": "s" }));
            guest.ends_well();

            fs::remove_file(ballast).expect("removed");
            let target = &no_room();
            let bitmap = json!({ "node": "a", "name": "b" });
            self.add(target);
            self.control.ok("block-dirty-bitmap-add", bitmap.clone());
            let guest = Guest::begin(self);
            let mut more = more;
            more["on-target-error"] = "enospc".into();
            self.begin(command, "full", more);
            self.meets_no_room("stop");
            self.waits_for_room();
            self.control.ok("block-job-resume", json!({ "device": "j" }));
            self.meets_no_room("stop");
            self.waits_for_room();
            thread::sleep(Duration::from_millis(300));
            fs::remove_file(ballast).expect("removed");
            self.control.ok("block-job-resume", json!({ "device": "j" }));
            if !is_backup {
                self.until("BLOCK_JOB_READY");
            }
            guest.ends_well();
            if !is_backup {
                self.control.ok("job-complete", json!({ "id": "j" }));
            }
            assert_eq!(self.ended(), Value::Null, "{command}");
            if is_backup {
                self.begin(command, "incremental", json!({ "bitmap": "b" }));
                assert_eq!(self.ended(), Value::Null);
            }
            self.control.ok("block-dirty-bitmap-remove", bitmap);
            self.is_copied(target);
        }
    }

    /// Jobs are cancelled whose target stands still, as `stands` has it do and go on: guests are held for a moment at most.
    pub fn stands(&mut self, target: &Target, stands: impl Fn(bool)) {
        for command in ["blockdev-mirror", "blockdev-backup"] {
            let guest = Guest::begin(self);
            self.add(target);
            self.begin(command, "full", json!({ "speed": 4 * MIB }));
            thread::sleep(Duration::from_millis(500));
            stands(true);
            thread::sleep(Duration::from_secs(2));
            let cancel = json!({ "device": "j", "force": true });
            // Whether it has failed by itself meanwhile or not.
            let _end = self.control.call("block-job-cancel", cancel);
            guest.ends_well();
            stands(false);
            self.ended();
            self.remove(target);
        }
        self.is_copied_by_all(target);
    }

    /// The server is killed at work: the disk is what it was, and the target is taken anew.
    pub fn is_killed(mut self, target: &Target, more: &[&str]) {
        let is_there = ["write -P 200 12M 4M".to_owned(), "flush".into()];
        for command in ["blockdev-mirror", "blockdev-backup"] {
            qemu_io(&self.options(), &is_there).expect("written");
            let guest = Guest::begin(&self);
            self.add(target);
            self.begin(command, "full", json!({ "speed": 4 * MIB }));
            thread::sleep(Duration::from_millis(700));
            self.server.take().expect("a server").kill();
            guest.stop.store(true, SeqCst);
            // It has lost its disk.
            let _end = guest.thread.join().expect("a guest");
            let (server, control) = Source::serve(&self.folder, more);
            (self.server, self.control) = (Some(server), control);
            self.open();
            qemu_io(&self.options(), &["read -P 200 12M 4M".into()]).expect("as it was");
            self.is_copied_by_all(target);
        }
        self.server.take().expect("a server").stop();
        let disk = self.folder.join("a").display().to_string();
        let end = program("qemu-img", "qemu-utils", ["check", "-f", "qcow2", &disk]);
        // Clusters may be leaked.
        assert!(matches!(end.status.code(), Some(0 | 3)), "{end:?}");
    }
}

/// An image of the disk's size that QEMU makes.
pub fn image_for(folder: &Path, name: &str, format: &str, options: &[&str]) -> String {
    let path = folder.join(name).display().to_string();
    let words = ["create", "-q", "-f", format];
    let size = SIZE.to_string();
    ok("qemu-img", "qemu-utils", &[&words[..], options, &[&path, &size]].concat());
    path
}
