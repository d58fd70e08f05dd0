//! Disks described by files: read at the start and on SIGHUP, and written where `--persist` says so.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use ringtap_tests::{Control, Server, lab_of, patience, program, ringtap};
use rustix::fs::inotify;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{nbd_size, node, ok, vhost};

struct Place(TempDir);

impl Place {
    fn new() -> Place {
        let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
        fs::create_dir(dir.path().join("disks")).expect("a folder");
        Place(dir)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    fn make(&self, name: &str, format: &str) -> PathBuf {
        let path = self.path(name);
        ok(Command::new("qemu-img").args(["create", "-q", "-f", format]).arg(&path).arg("1M"));
        path
    }

    /// Describe a disk.
    fn write(&self, name: &str, text: &str) {
        fs::write(self.path("disks").join(name), text).expect("a file");
    }

    fn read(&self, name: &str) -> Option<String> {
        fs::read_to_string(self.path("disks").join(name)).ok()
    }

    fn begin(&self, more: &[&str]) -> (Server, Control) {
        let (control, disks) = (format!("unix:{}", self.text("control")), self.text("disks"));
        let args = ["--control", &control, "--disks", &disks];
        let server = Server::daemon(args.iter().chain(more));
        (server, Control::open(&self.path("control")))
    }

    fn refused(&self, more: &[&str]) -> (Option<i32>, String) {
        let (control, disks) = (format!("unix:{}", self.text("control")), self.text("disks"));
        let args = ["daemon", "--control", &control, "--disks", &disks];
        let args = args.iter().chain(more);
        let output = program(ringtap().to_str().expect("a path"), "ringtap", args);
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    }
}

/// The names of the disks, and of their exports.
fn served(control: &mut Control) -> Vec<String> {
    let names = |all: Value, key: &str| -> Vec<String> {
        let all = all.as_array().expect("a list").iter();
        all.map(|one| one[key].as_str().expect("a name").to_owned()).collect()
    };
    let mut all = names(control.ok("query-named-block-nodes", json!({})), "node-name");
    all.extend(names(control.ok("query-block-exports", json!({})), "id"));
    all.sort();
    all
}

#[test]
fn a_file_that_is_wrong_leaves_out_its_disk_alone() {
    let place = Place::new();
    let (a, b) = (place.make("a", "raw"), place.make("b", "qcow2"));
    let (a, b) = (a.display(), b.display());
    let nbd = place.text("nbd");
    place.write(
        "a.toml",
        &format!("image = '{a}'\nformat = 'raw'\nnbd = 'unix:{nbd}'\nname = 'a'\n"),
    );
    place.write("b.toml", &format!("image = '{b}'\nformat = 'qcow2'\nvhost-usr = '/x'\n"));
    // The same image once more, and one that is not there.
    place.write("c.toml", &format!("image = '{a}'\nformat = 'raw'\n"));
    place.write("d.toml", &format!("image = '{}'\nformat = 'raw'\n", place.text("d")));
    place.write("e.toml.bak", "nonsense");
    // Nobody can bind a socket in a folder that is not there.
    let (k, deep) = (place.make("k", "raw"), place.text("none/v"));
    let k = k.display();
    place.write("k.toml", &format!("image = '{k}'\nformat = 'raw'\nvhost-user = '{deep}'\n"));
    let (server, mut control) = place.begin(&[]);
    assert_eq!(served(&mut control), ["a", "a-nbd0"]);
    assert_eq!(nbd_size(&format!("nbd+unix:///a?socket={nbd}")), Ok(1 << 20));
    // All come when they can.
    place.make("d", "raw");
    fs::create_dir(place.path("none")).expect("a folder");
    let vhost = place.text("v");
    place.write("b.toml", &format!("image = '{b}'\nformat = 'qcow2'\nvhost-user = '{vhost}'\n"));
    fs::remove_file(place.path("disks/c.toml")).expect("removed");
    place.write(
        "f.toml",
        "image = 'null:1M'\nnode-name = 'g'\n[[throttle-group]]\nname = 'x'\niops = 7\n",
    );
    server.signal(libc::SIGHUP);
    let began = Instant::now();
    while served(&mut control).len() < 8 {
        assert!(began.elapsed() < patience(), "{:?}", served(&mut control));
    }
    let all = ["a", "a-nbd0", "b", "b-vhost0", "d", "g", "k", "k-vhost0"];
    assert_eq!(served(&mut control), all);
    let limits = control.ok("qom-get", json!({"path": "x", "property": "limits"}));
    assert_eq!(limits, json!({"iops-total": 7}));
    let said = server.stop();
    let file = |name: &str| place.path("disks").join(name).display().to_string();
    let key = format!("{}:3: there is no key vhost-usr: did you mean vhost-user?", file("b.toml"));
    assert!(said.contains(&key), "{said}");
    assert!(said.contains(&file("c.toml")) && said.contains("are one image"), "{said}");
    assert!(said.contains(&format!("{}: ", place.text("d"))), "{said}");
}

/// Files come in any order; what was promised of limits and shares holds, or the disk is not served.
#[test]
fn no_disk_is_served_without_its_limits() {
    let place = Place::new();
    let (server, mut control) = place.begin(&[]);
    let [a, b, c] = ["a", "b", "c"].map(|name| place.make(name, "raw").display().to_string());
    let described =
        |image: &str, more: &str| format!("image = {image:?}\nformat = \"raw\"\n{more}");
    fs::File::options()
        .write(true)
        .open(&a)
        .and_then(|file| file.set_len(64 << 20))
        .expect("larger");
    let names = |control: &mut Control| served(control).join(" ");
    let until = |control: &mut Control, wanted: &str| {
        let began = Instant::now();
        while names(control) != wanted {
            assert!(began.elapsed() < patience(), "{}, not {wanted}", names(control));
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    };
    place.write("a.toml", &described(&a, "node-name = \"a\"\ngroup = \"g\"\nweight = \"50\"\n"));
    server.signal(libc::SIGHUP);
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert_eq!(names(&mut control), "");
    place.write("z.toml", "[[throttle-group]]\nname = \"g\"\niops = \"100000\"\n");
    server.signal(libc::SIGHUP);
    until(&mut control, "a");
    let nodes = control.ok("query-named-block-nodes", json!({}));
    assert_eq!(nodes[0]["group"], "g");
    // A floor that is more than the device has been seen to serve is no promise to be made.
    control.ok("block-export-add", {
        let mut export = vhost(&place.path("vu"));
        export["id"] = json!("x");
        export["node-name"] = json!("a");
        export["type"] = json!("vhost-user-blk");
        export["writable"] = json!(true);
        export
    });
    let floor = "floor-iops = \"900000000\"\n";
    let seen = |control: &mut Control, floor: u64| {
        let limits = json!({"__ringtap_floor-iops": floor});
        control.call("__ringtap_throttle", json!({"node-name": "a", "limits": limits})).is_err()
    };
    // Until it has been seen to be busy.
    let began = Instant::now();
    while !seen(&mut control, 900_000_000) {
        assert!(began.elapsed() < patience(), "it has more to do than it can");
        assert!(!seen(&mut control, 0));
        let args = [
            "load",
            "--socket",
            &place.text("vu"),
            "--rw",
            "randread",
            "--bs",
            "256k",
            "--depth",
            "64",
            "--seconds",
            "2",
        ];
        let output = lab_of(&args);
        assert!(output.status.success(), "{output:?}");
    }
    place.write("b.toml", &described(&b, &format!("node-name = \"b\"\n{floor}")));
    place.write("c.toml", &described(&c, "node-name = \"c\"\n"));
    server.signal(libc::SIGHUP);
    until(&mut control, "a c x");
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert_eq!(names(&mut control), "a c x");
    let said = server.stop_badly();
    assert!(said.contains("still not served") && said.contains("more than the device"), "{said}");
}

#[test]
fn strict_leaves_out_nothing() {
    let place = Place::new();
    let a = place.make("a", "raw");
    let good = format!("image = '{}'\nformat = 'raw'\n", a.display());
    for (wrong, said) in [
        (
            "image = 'null:1M'\n\nquues = 1\n",
            "b.toml:3: there is no key quues: did you mean queues?",
        ),
        ("image = '/nonexistent/x'\nformat = 'raw'\n", "/nonexistent/x"),
        ("image = 'null:1M'\n[[export]]\ntype = 'nbd'\nid = 'x'\n", "NBD server not running"),
    ] {
        place.write("a.toml", &good);
        place.write("b.toml", wrong);
        let (code, text) = place.refused(&["--strict"]);
        assert!(code == Some(1) && text.contains(said), "{code:?} {text}");
    }
}

/// What a client has changed is there when the next server begins, however this one ends.
#[test]
fn what_is_changed_is_kept() {
    let place = Place::new();
    let (a, b) = (place.make("a", "raw"), place.make("b", "qcow2"));
    let (server, mut control) = place.begin(&["--persist"]);
    control.ok(
        "object-add",
        json!({"qom-type": "throttle-group", "id": "g", "limits": {"bps-read": 5000}}),
    );
    control.ok("blockdev-add", node("a", "raw", &a));
    let mut of_b = node("b", "qcow2", &b);
    of_b["__ringtap_on-error"] = "report".into();
    of_b["__ringtap_limits"] =
        json!({"iops-total": 100, "iops-total-max": 300, "iops-total-max-length": 2});
    control.ok("blockdev-add", of_b);
    let export = |id: &str, node: &str, kind: &str, more: Value| {
        let mut export = json!({"id": id, "node-name": node, "type": kind, "writable": true});
        for (key, value) in more.as_object().expect("options") {
            export[key] = value.clone();
        }
        export
    };
    control.ok("block-export-add", export("mine", "a", "vhost-user-blk", vhost(&place.path("v"))));
    let addr = json!({"type": "unix", "data": {"path": place.text("nbd")}});
    control.ok("nbd-server-start", json!({"addr": addr}));
    control.ok("block-export-add", export("n", "b", "nbd", json!({"name": "bee"})));
    control.ok("__ringtap_throttle", json!({"node-name": "a", "throttle-group": "g"}));
    control.ok("qom-set", json!({"path": "g", "property": "limits", "value": {"iops-total": 9}}));
    // At the moment at which it was answered.
    server.kill();

    let (server, mut control) = place.begin(&["--persist"]);
    assert_eq!(served(&mut control), ["a", "b", "mine", "n"]);
    let all = |control: &mut Control| {
        let nodes = control.ok("query-named-block-nodes", json!({}));
        let of = |at: usize, key: &str| nodes[at][key].clone();
        json!([of(0, "group"), of(1, "__ringtap_limits"), of(1, "file")])
    };
    let limits = json!({"iops-total": 100, "iops-total-max": 300, "iops-total-max-length": 2});
    assert_eq!(all(&mut control), json!(["g", limits, b]));
    let group =
        |control: &mut Control| control.ok("qom-get", json!({"path": "g", "property": "limits"}));
    assert_eq!(group(&mut control), json!({"bps-read": 5000, "iops-total": 9}));
    assert_eq!(nbd_size(&format!("nbd+unix:///bee?socket={}", place.text("nbd"))), Ok(1 << 20));
    assert!(place.read("b.toml").expect("a file").contains("on-error = \"report\""));
    // The disk goes on in another image, and its export is another.
    let snapshot =
        json!({"node-name": "b", "snapshot-file": place.path("over"), "format": "qcow2"});
    control.ok("blockdev-snapshot-sync", snapshot);
    control.ok("block-export-del", json!({"id": "n"}));
    control.ok("block-export-add", export("m", "b", "nbd", json!({"name": "other"})));
    control.ok("block_resize", json!({"node-name": "a", "size": 2 << 20}));
    control.ok("block-export-del", json!({"id": "mine"}));
    server.kill();

    let (server, mut control) = place.begin(&["--persist"]);
    assert_eq!(served(&mut control), ["a", "b", "m"]);
    assert_eq!(all(&mut control), json!(["g", limits, place.path("over")]));
    let text = place.read("b.toml").expect("a file");
    assert!(text.contains(&format!("image = \"{}\"", place.text("over"))), "{text}");
    control.ok("blockdev-del", json!({"node-name": "a"}));
    control.ok("object-del", json!({"id": "g"}));
    assert!(place.read("a.toml").is_none() && place.read("group-g.toml").is_none());
    server.stop();
    let (server, mut control) = place.begin(&[]);
    assert_eq!(served(&mut control), ["b", "m"]);
    // Without the option nothing is written.
    control.ok("blockdev-add", json!({"driver": "null-co", "node-name": "n"}));
    assert!(place.read("n.toml").is_none());
    server.stop();
}

/// A file that somebody has written stays as it is until what it describes is changed.
#[test]
fn what_is_not_changed_is_not_written() {
    let place = Place::new();
    let a = place.make("a", "raw");
    let text = format!(
        "# Mine.\nimage = '{}'\nformat = 'raw'\nvhost-user = '{}'\n",
        a.display(),
        place.text("v")
    );
    place.write("a.toml", &text);
    place.write(".b.toml.unfinished", "half");
    let (server, mut control) = place.begin(&["--persist"]);
    control.ok("blockdev-add", json!({"driver": "null-co", "size": 4096, "node-name": "n"}));
    assert_eq!(place.read("a.toml"), Some(text));
    assert!(place.read("n.toml").expect("a file").contains("image = \"null:4096\""));
    assert!(place.read(".b.toml.unfinished").is_none());
    control.ok("block-export-del", json!({"id": "a-vhost0"}));
    let text = place.read("a.toml").expect("a file");
    assert!(!text.contains("vhost-user") && text.contains("Written by"), "{text}");
    server.stop();
}

/// A server that ends while a disk is opened anew has it again the next time.
#[test]
fn a_disk_that_is_reopened_has_its_file_all_the_time() {
    let place = Place::new();
    let a = place.make("a", "raw");
    let (server, mut control) = place.begin(&["--persist"]);
    control.ok("blockdev-add", node("a", "raw", &a));
    let watch = inotify::init(inotify::CreateFlags::NONBLOCK).expect("inotify");
    let gone = inotify::WatchFlags::DELETE;
    inotify::add_watch(&watch, place.path("disks"), gone).expect("watched");
    let mut of_a = node("a", "raw", &a);
    of_a["read-only"] = true.into();
    control.ok("blockdev-reopen", json!({ "options": [of_a] }));
    let mut room = [std::mem::MaybeUninit::uninit(); 512];
    let mut events = inotify::Reader::new(&watch, &mut room);
    let names: Vec<_> = std::iter::from_fn(|| {
        let event = events.next().ok()?;
        event.file_name().map(std::ffi::CStr::to_owned)
    })
    .collect();
    assert!(names.is_empty(), "removed meanwhile: {names:?}");
    assert!(place.read("a.toml").expect("kept").contains("read-only = true"));
    control.ok("blockdev-del", json!({ "node-name": "a" }));
    assert_eq!(place.read("a.toml"), None);
    server.stop();
}

#[test]
fn a_disk_that_is_reopened_keeps_all_that_is_not_said_anew() {
    let place = Place::new();
    let a = place.make("a", "raw");
    let path = a.display();
    place.write(
        "a.toml",
        &format!("image = \"{path}\"\nformat = \"raw\"\nweight = \"500\"\non-error = \"report\"\niops = 70\n"),
    );
    let (server, mut control) = place.begin(&["--persist"]);
    let mut of_a = node("a", "raw", &a);
    of_a["file"]["cache"] = json!({ "direct": false });
    // Its file is not where it was: nothing is closed that could not be opened again.
    fs::rename(&a, place.path("away")).expect("moved");
    let why = control.call("blockdev-reopen", json!({ "options": [of_a.clone()] }));
    assert!(why.expect_err("refused").contains("would be lost"));
    assert_eq!(served(&mut control), ["a"]);
    fs::rename(place.path("away"), &a).expect("moved back");
    control.ok("blockdev-reopen", json!({ "options": [of_a] }));
    let text = place.read("a.toml").expect("kept");
    for line in ["weight = \"500\"", "on-error = \"report\"", "iops = "] {
        assert!(text.contains(line), "{line}: {text}");
    }
    server.stop();
}

#[test]
fn what_clients_know_an_export_by_is_kept() {
    let place = Place::new();
    let a = place.make("a", "raw");
    fs::write(place.path("mounted"), "").expect("a file");
    let (server, mut control) = place.begin(&["--persist", "--socket-mode", "666"]);
    control.ok("blockdev-add", node("a", "raw", &a));
    let addr = json!({"type": "unix", "data": {"path": place.text("nbd")}});
    control.ok("nbd-server-start", json!({"addr": addr}));
    control.ok("block-export-add", json!({"id": "n", "node-name": "a", "type": "nbd"}));
    let mut guest = vhost(&place.path("v"));
    (guest["id"], guest["node-name"], guest["type"]) =
        ("v".into(), "a".into(), "vhost-user-blk".into());
    control.ok("block-export-add", guest);
    let file = json!({"id": "f", "node-name": "a", "type": "fuse", "mountpoint": place.text("mounted"), "allow-other": "off"});
    control.ok("block-export-add", file);
    let over = json!({"node-name": "a", "snapshot-file": place.path("over"), "snapshot-node-name": "other", "format": "qcow2"});
    control.ok("blockdev-snapshot-sync", over);
    server.stop();
    let (server, mut control) = place.begin(&["--persist", "--socket-mode", "666"]);
    assert_eq!(served(&mut control), ["f", "n", "other", "v"]);
    assert_eq!(nbd_size(&format!("nbd+unix:///a?socket={}", place.text("nbd"))), Ok(1 << 20));
    let mode =
        std::os::unix::fs::MetadataExt::mode(&fs::metadata(place.path("mounted")).expect("a file"));
    assert_eq!(mode & 0o777, 0o400);
    let files = fs::read_dir(place.path("disks")).expect("a folder").flatten();
    let kept: String = files.filter_map(|file| fs::read_to_string(file.path()).ok()).collect();
    assert!(kept.contains("__ringtap_serial = \"a\""), "{kept}");
    server.stop();
}

#[test]
fn what_cannot_be_kept_is_said_to_who_asked() {
    let place = Place::new();
    let (server, mut control) = place.begin(&["--persist"]);
    fs::rename(place.path("disks"), place.path("elsewhere")).expect("moved");
    let add = json!({"driver": "null-co", "node-name": "n"});
    let refusal = control.call("blockdev-add", add).expect_err("it is not kept");
    assert!(refusal.contains("it is done, and not kept"), "{refusal}");
    assert_eq!(served(&mut control), ["n"]);
    // With the next change it is tried again.
    fs::rename(place.path("elsewhere"), place.path("disks")).expect("moved back");
    control.ok("blockdev-add", json!({"driver": "null-co", "node-name": "m"}));
    assert!(place.read("m.toml").is_some() && place.read("n.toml").is_some());
    let said = server.stop();
    // Nobody waits for the folder to be back.
    let told = said.matches("it is done, and not kept").count();
    assert!(told <= 3, "{told} times: {said}");
}

#[test]
fn encrypted_disks_are_kept_with_the_place_of_their_secret() {
    let place = Place::new();
    let (key, image) = (place.text("key"), place.path("l"));
    fs::write(&key, "secret").expect("a file");
    let make =
        ["create", "-q", "-f", "luks", "--secret", &format!("file:{key}"), "-o", "iter-time=10"];
    ok(Command::new(ringtap()).args(make).arg(&image).arg("1M"));
    let (server, mut control) = place.begin(&["--persist"]);
    control.ok("object-add", json!({"qom-type": "secret", "id": "s", "file": key}));
    let mut luks = node("l", "luks", Path::new(&image));
    luks["key-secret"] = "s".into();
    control.ok("blockdev-add", luks);
    let text = place.read("l.toml").expect("a file");
    assert!(
        text.contains(&format!("secret = \"file:{key}\"")) && !text.contains("= \"secret\""),
        "{text}"
    );
    server.kill();
    let (server, mut control) = place.begin(&["--persist"]);
    assert_eq!(served(&mut control), ["l"]);
    server.stop();
}

/// Wait for an event; its data.
fn event(control: &mut Control, wanted: &str) -> Value {
    loop {
        let (name, data) = control.event();
        if name == wanted {
            return data;
        }
    }
}

/// A disk that has gone on in another image does so with the next server, and the image that it went to is no disk any more.
#[test]
fn where_disks_go_on_is_kept() {
    let place = Place::new();
    let (a, b) = (place.make("a", "raw"), place.make("b", "raw"));
    let (server, mut control) = place.begin(&["--persist"]);
    control.ok("blockdev-add", node("a", "raw", &a));
    control.ok("blockdev-add", node("b", "raw", &b));
    let mirror = json!({"job-id": "j", "device": "a", "target": "b", "sync": "full"});
    control.ok("blockdev-mirror", mirror);
    event(&mut control, "BLOCK_JOB_READY");
    control.ok("block-job-complete", json!({"device": "j"}));
    event(&mut control, "BLOCK_JOB_COMPLETED");
    // Whoever is told finds it written.
    server.kill();
    let text = place.read("a.toml").expect("a file");
    assert!(text.contains(&format!("image = \"{}\"", b.display())), "{text}");
    assert!(place.read("b.toml").is_none());

    let (server, mut control) = place.begin(&["--persist"]);
    assert_eq!(served(&mut control), ["a"]);
    let over = json!({"node-name": "a", "snapshot-file": place.path("over"), "format": "qcow2"});
    control.ok("blockdev-snapshot-sync", over);
    assert!(place.read("a.toml").expect("a file").contains(&place.text("over")));
    control.ok("block-commit", json!({"job-id": "c", "device": "a"}));
    event(&mut control, "BLOCK_JOB_READY");
    control.ok("block-job-complete", json!({"device": "c"}));
    event(&mut control, "BLOCK_JOB_COMPLETED");
    server.kill();
    let text = place.read("a.toml").expect("a file");
    assert!(text.contains(&format!("image = \"{}\"", b.display())), "{text}");
    let (server, mut control) = place.begin(&["--persist"]);
    let nodes = control.ok("query-named-block-nodes", json!({}));
    assert_eq!(nodes[0]["file"], b.display().to_string());
    server.stop();
}

/// The image that a disk has gone to is opened as it is, and by its own secret.
#[test]
fn a_disk_that_goes_on_in_an_encrypted_image_is_kept_with_its_secret() {
    let place = Place::new();
    let (key, a, b) = (place.text("key"), place.make("a", "raw"), place.path("b"));
    fs::write(&key, "secret").expect("a file");
    let secret = format!("file:{key}");
    let make = ["create", "-q", "-f", "luks", "--secret", &secret, "-o", "iter-time=10"];
    ok(Command::new(ringtap()).args(make).arg(&b).arg("1M"));
    let (server, mut control) = place.begin(&["--persist"]);
    control.ok("blockdev-add", node("a", "raw", &a));
    control.ok("object-add", json!({"qom-type": "secret", "id": "s", "file": key}));
    let mut luks = node("b", "luks", &b);
    luks["key-secret"] = "s".into();
    control.ok("blockdev-add", luks);
    let mirror = json!({"job-id": "j", "device": "a", "target": "b", "sync": "full"});
    control.ok("blockdev-mirror", mirror);
    event(&mut control, "BLOCK_JOB_READY");
    control.ok("block-job-complete", json!({"device": "j"}));
    event(&mut control, "BLOCK_JOB_COMPLETED");
    server.kill();
    let text = place.read("a.toml").expect("a file");
    assert!(text.contains(&format!("secret = \"{secret}\"")), "{text}");
    let (server, mut control) = place.begin(&["--persist"]);
    assert_eq!(served(&mut control), ["a"]);
    let nodes = control.ok("query-named-block-nodes", json!({}));
    assert_eq!((&nodes[0]["drv"], &nodes[0]["file"]), (&json!("luks"), &json!(b)));
    server.stop();
}

#[test]
fn files_that_describe_nothing_are_told_of_as_json() {
    let place = Place::new();
    let image = place.make("a", "raw");
    place.write("good.toml", &format!("image = {image:?}\nformat = \"raw\"\n"));
    place.write("bad.toml", "nonsense = 1\n");
    let (control, disks) = (format!("unix:{}", place.text("control")), place.text("disks"));
    let mut server = Command::new(ringtap());
    server.args(["daemon", "--control", &control, "--disks", &disks, "--output", "json"]);
    let mut server = server.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("ringtap");
    let mut line = String::new();
    BufReader::new(server.stdout.take().expect("its words")).read_line(&mut line).expect("a line");
    let _ = server.kill();
    let _ = server.wait();
    let told: Value = serde_json::from_str(&line).expect("JSON");
    let left = told["not_served"].as_array().expect("a list");
    assert_eq!(left.len(), 1, "{told}");
    assert!(left[0]["file"].as_str().is_some_and(|file| file.ends_with("bad.toml")), "{told}");
    assert!(left[0]["error"].as_str().is_some_and(|why| why.contains("nonsense")), "{told}");
}
