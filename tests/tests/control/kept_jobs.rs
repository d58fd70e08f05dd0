//! What a server that keeps its disks finds of the jobs of one that was killed: no targets among its disks, no checkpoints
//! of copies that are none.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use ringtap_tests::{Control, Server, patience, ringtap};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{node, ok, qemu_io};

struct Place(TempDir);

impl Place {
    fn new() -> Place {
        Place(tempfile::tempdir_in("/var/tmp").expect("a folder"))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    fn make(&self, name: &str, format: &str) -> PathBuf {
        let path = self.path(name);
        ok(Command::new("qemu-img").args(["create", "-q", "-f", format]).arg(&path).arg("8M"));
        path
    }

    fn begin(&self, more: &[&str]) -> (Server, Control) {
        let (control, disks) = (format!("unix:{}", self.text("control")), self.text("disks"));
        let args = ["--control", &control, "--disks", &disks];
        let server = Server::daemon(args.iter().chain(more));
        (server, Control::open(&self.path("control")))
    }

    fn persist(&self) -> (Server, Control) {
        self.begin(&["--persist"])
    }

    /// A verb of a running server: its status, and what it said.
    fn verb(&self, words: &str) -> (Option<i32>, String) {
        let mut command = Command::new(ringtap());
        command.args(words.split(' ')).current_dir(self.0.path());
        let output =
            command.args(["--control", &format!("unix:{}", self.text("control"))]).output();
        let output = output.expect("ringtap");
        let said =
            [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned());
        (output.status.code(), said.concat())
    }

    /// The names of what is described there.
    fn described(&self) -> Vec<String> {
        let all = fs::read_dir(self.path("disks")).expect("a folder").flatten();
        let mut all: Vec<_> =
            all.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        all.sort();
        all
    }

    /// A disk with an export, full of data.
    fn fill(&self, control: &mut Control) {
        let image = self.make("a", "raw");
        control.ok("blockdev-add", node("vm", "raw", &image));
        let addr = json!({"type": "unix", "data": {"path": self.text("nbd")}});
        control.ok("nbd-server-start", json!({"addr": addr}));
        let export = json!({"id": "x", "node-name": "vm", "type": "nbd", "writable": true});
        control.ok("block-export-add", export);
        let uri = format!("nbd+unix:///vm?socket={}", self.text("nbd"));
        qemu_io(&uri, &["write -P 1 0 8M"]).expect("written");
    }
}

fn names(control: &mut Control) -> Vec<String> {
    let nodes = control.ok("query-named-block-nodes", json!({}));
    let nodes = nodes.as_array().expect("a list").iter();
    nodes.map(|node| node["node-name"].as_str().expect("a name").to_owned()).collect()
}

fn exports(control: &mut Control) -> Vec<(Value, Value)> {
    let all = control.ok("query-block-exports", json!({}));
    let all = all.as_array().expect("a list").iter();
    all.map(|one| (one["id"].clone(), one["node-name"].clone())).collect()
}

/// Until a job has begun to copy.
fn copies(control: &mut Control, id: &str) {
    let end = Instant::now() + patience();
    loop {
        let jobs = control.ok("query-jobs", json!({}));
        let mut jobs = jobs.as_array().expect("a list").iter();
        if jobs.any(|job| job["id"] == id && job["current-progress"].as_u64() > Some(0)) {
            return;
        }
        assert!(Instant::now() < end, "{id} does not begin");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn the_target_of_a_killed_server_s_backup_is_no_disk_of_the_next() {
    let place = Place::new();
    let (server, mut control) = place.persist();
    place.fill(&mut control);
    place.make("b", "qcow2");
    let words = "disk backup vm b -f qcow2 --zeroed";
    let (status, said) = place.verb(&format!("{words} --rate 1M --no-wait"));
    assert_eq!(status, Some(0), "{said}");
    copies(&mut control, "backup-vm");
    // While it is at work there is no second one.
    let (status, said) = place.verb(words);
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains("ringtap job wait backup-vm"), "{said}");
    server.kill();
    let (server, mut control) = place.persist();
    assert_eq!(names(&mut control), ["vm"]);
    assert_eq!(place.described(), ["vm.toml"]);
    let words = "disk backup vm b -f qcow2";
    let (status, said) = place.verb(words);
    assert_eq!(status, Some(0), "{said}");
    // What an older server kept is named, with what to do.
    let image = place.make("c", "qcow2");
    control.ok("blockdev-add", node("vm-backup", "qcow2", &image));
    assert_eq!(place.described(), ["vm-backup.toml", "vm.toml"]);
    let (status, said) = place.verb(words);
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains("ringtap disk remove vm-backup"), "{said}");
    server.stop();
}

/// It is none of the files of a server that has taken over, either.
#[test]
fn the_target_of_a_backup_stays_one_where_another_server_takes_over() {
    let place = Place::new();
    let (server, mut control) = place.persist();
    place.fill(&mut control);
    place.make("b", "qcow2");
    let (status, said) = place.verb("disk backup vm b -f qcow2 --zeroed --rate 1M --no-wait");
    assert_eq!(status, Some(0), "{said}");
    copies(&mut control, "backup-vm");
    let socket = format!("unix:{}", place.text("control"));
    let told = Command::new(ringtap()).args(["upgrade", &socket, "--output", "json"]).output();
    let told = told.expect("ringtap");
    assert!(told.status.success(), "{told:?}");
    let told: Value = serde_json::from_slice(&told.stdout).expect("JSON");
    let pid = told["pid"].as_i64().expect("a process") as i32;
    server.ends();
    let mut control = Control::open(&place.path("control"));
    // What has changed is written.
    control.ok("blockdev-add", json!({"driver": "null-co", "size": 4096, "node-name": "n"}));
    assert_eq!(names(&mut control), ["vm", "vm-backup", "n"]);
    assert_eq!(place.described(), ["n.toml", "vm.toml"]);
    let next = rustix::process::Pid::from_raw(pid).expect("one");
    rustix::process::kill_process(next, rustix::process::Signal::TERM).expect("it is there");
    let end = Instant::now() + patience();
    while PathBuf::from(format!("/proc/{pid}")).exists() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn the_checkpoint_of_a_backup_goes_that_was_cut_short() {
    for persists in [true, false] {
        let place = Place::new();
        let more: &[&str] = if persists { &["--persist"] } else { &[] };
        let (server, mut control) = place.begin(more);
        place.fill(&mut control);
        place.make("b", "qcow2");
        let words = "disk backup vm b -f qcow2 --zeroed --checkpoint nightly --rate 1M --no-wait";
        let (status, said) = place.verb(words);
        assert_eq!(status, Some(0), "{said}");
        copies(&mut control, "backup-vm");
        server.kill();
        let (server, mut control) = place.begin(more);
        if !persists {
            control.ok("blockdev-add", node("vm", "raw", &place.path("a")));
        }
        let (status, said) = place.verb("disk backup vm b -f qcow2 --since nightly");
        assert_eq!(status, Some(1), "{said}");
        assert!(said.contains("nightly"), "{said}");
        let log = server.stop();
        assert!(log.contains("its checkpoint nightly is removed"), "{log}");
    }
}

/// Killed when the image says that the disk goes on in the other one, and before their files do.
#[test]
fn a_disk_whose_server_is_killed_as_it_goes_on_elsewhere_is_that_disk_there() {
    for name in ["new", "zz"] {
        let place = Place::new();
        let (server, mut control) = place.persist();
        place.fill(&mut control);
        let image = place.make("b", "qcow2");
        control.ok("blockdev-add", node(name, "qcow2", &image));
        let before: Vec<_> = place
            .described()
            .into_iter()
            .map(|file| place.path("disks").join(file))
            .map(|file| (fs::read(&file).expect("a file"), file))
            .collect();
        assert_eq!(before.len(), 2);
        let mirror = json!({"job-id": "m", "device": "vm", "target": name, "sync": "full"});
        control.ok("blockdev-mirror", mirror);
        while control.event().0 != "BLOCK_JOB_READY" {}
        control.ok("job-complete", json!({"id": "m"}));
        while control.event().0 != "BLOCK_JOB_COMPLETED" {}
        server.kill();
        for (text, file) in before {
            fs::write(file, text).expect("a file");
        }
        for _ in 0..2 {
            let (server, mut control) = place.begin(&["--persist", "--strict"]);
            assert_eq!(names(&mut control), ["vm"]);
            assert_eq!(exports(&mut control), [(json!("x"), json!("vm"))]);
            assert_eq!(place.described(), ["vm.toml"]);
            let nodes = control.ok("query-named-block-nodes", json!({}));
            assert_eq!((&nodes[0]["drv"], &nodes[0]["file"]), (&json!("qcow2"), &json!(image)));
            server.kill();
        }
    }
}
