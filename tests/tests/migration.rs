//! A guest that moves from one QEMU to another while it runs, and its disks with it.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use ringtap_guest::{Appliance, Guest, Job, Machine, Migrated, Output, Qemu};
use ringtap_tests::{Control, Server, lab, ok, patience, program};
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;
const LONG: Duration = Duration::from_secs(400);

struct Bench {
    dir: tempfile::TempDir,
}

impl Bench {
    fn new() -> Bench {
        // Not in /tmp, which may be a tmpfs: a disk under O_DIRECT is what is meant.
        Bench { dir: tempfile::tempdir_in("/var/tmp").expect("a folder") }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_str().expect("a plain path").to_owned()
    }

    fn raw(&self, name: &str, size: u64) -> String {
        let file = File::create(self.path(name)).expect("a file");
        file.set_len(size).expect("its size");
        self.text(name)
    }

    fn qcow2(&self, name: &str, size: u64) -> String {
        let path = self.text(name);
        ok("qemu-img", "qemu-utils", &["create", "-q", "-f", "qcow2", &path, &size.to_string()]);
        path
    }

    /// A server with a control socket of these disks: image, format, vhost-user socket.
    fn serve(&self, control: &str, disks: &[[&str; 3]], more: &[&str]) -> Server {
        let control = format!("unix:{}", self.text(control));
        let mut words: Vec<String> = vec!["--control".into(), control];
        for [image, format, socket] in disks {
            let all = [image, "-f", format, "--vhost-user", &self.text(socket)];
            words.extend(all.map(str::to_owned));
            words.extend(more.iter().map(|word| (*word).to_owned()));
        }
        Server::start(words)
    }

    fn control(&self, name: &str) -> Control {
        Control::open(&self.path(name))
    }
}

/// The load client beside a server; what it found.
fn load(socket: &Path, seconds: &str) -> Value {
    let socket = socket.to_str().expect("a plain path");
    let args = ["load", "--socket", socket, "--output", "json", "--rw", "randwrite", "--verify"];
    let args = args.into_iter().chain(["--seconds", seconds]);
    let output = program(lab().to_str().expect("a plain path"), "ringtap-lab", args);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| {
        panic!("{error}: {}", String::from_utf8_lossy(&output.stderr));
    })
}

fn active(node: &str, active: bool) -> Value {
    json!({ "node-name": node, "active": active })
}

#[test]
fn two_servers_have_one_image_and_only_one_of_them_has_it_open() {
    for format in ["raw", "qcow2"] {
        let bench = Bench::new();
        let image = match format {
            "raw" => bench.raw("disk", 64 * MIB),
            _ => bench.qcow2("disk", 64 * MIB),
        };
        let here = bench.serve("c1", &[[&image, format, "s1"]], &["--node-name", "d"]);
        let there =
            bench.serve("c2", &[[&image, format, "s2"]], &["--incoming", "--node-name", "d"]);
        let (mut first, mut second) = (bench.control("c1"), bench.control("c2"));
        assert_eq!(load(&bench.path("s1"), "0.3")["errors"], 0);
        // It is somebody else's.
        let refused = second.call("blockdev-set-active", active("d", true)).expect_err("locked");
        assert!(refused.contains("has it open for writing"), "{refused}");
        let resize = json!({ "node-name": "d", "size": 128 * MIB });
        let inactive = second.call("block_resize", resize).expect_err("it is not here");
        assert!(inactive.contains("being changed"), "{inactive}");
        for persistent in [false, true] {
            let add = json!({ "node": "d", "name": "since", "persistent": persistent });
            let inactive = second.call("block-dirty-bitmap-add", add).expect_err("not here");
            assert!(inactive.contains("is inactive"), "{inactive}");
        }
        // A guest that begins too early waits, and nothing is written.
        let socket = bench.path("s2");
        let early = thread::spawn(move || load(&socket, "0.3"));
        thread::sleep(Duration::from_millis(500));
        assert!(!early.is_finished(), "two have it");
        let stays = first.call("blockdev-set-active", active("d", false)).expect_err("shown");
        assert!(stays.contains("it has exports"), "{stays}");
        let end = here.stop();
        assert!(!end.contains("ERROR"), "{end}");
        assert_eq!(early.join().expect("it ends")["errors"], 0);
        // From here on it is the second's.
        let here = Server::daemon(["--control", &format!("unix:{}", bench.text("c3"))]);
        let mut third = bench.control("c3");
        let add = json!({ "driver": format, "node-name": "d", "active": false, "file": { "driver": "file", "filename": image } });
        third.ok("blockdev-add", add);
        assert!(third.call("blockdev-set-active", active("d", true)).is_err(), "locked");
        let said = there.stop();
        assert!(said.contains("is not here yet") && said.contains("the disk is here"), "{said}");
        third.ok("blockdev-set-active", active("d", true));
        third.ok("block_resize", json!({ "node-name": "d", "size": 128 * MIB }));
        third.ok("blockdev-set-active", active("d", false));
        ok("qemu-img", "qemu-utils", &["resize", "-q", "-f", format, &image, "160M"]);
        third.ok("blockdev-set-active", active("d", true));
        let nodes = third.ok("query-named-block-nodes", json!({}));
        let sizes: Vec<&Value> = nodes
            .as_array()
            .into_iter()
            .flatten()
            .filter(|node| node["node-name"] == "d")
            .map(|node| &node["image"]["virtual-size"])
            .collect();
        assert_eq!(sizes, [&json!(160 * MIB)], "{nodes}");
        here.stop();
        if format == "qcow2" {
            ok("qemu-img", "qemu-utils", &["check", "-q", &image]);
        }
    }
}

/// The bitmaps of a node that are kept.
fn kept(control: &mut Control) -> Value {
    let nodes = control.ok("query-named-block-nodes", json!({}));
    nodes[0]["dirty-bitmaps"].clone()
}

/// What is kept of an image is let go of with it, and is had again when it comes back.
#[test]
fn a_disk_that_has_left_and_come_back_keeps_checkpoints() {
    let bench = Bench::new();
    let image = bench.raw("disk", 64 * MIB);
    let at = format!("unix:{}", bench.text("c"));
    let file = json!({ "driver": "file", "filename": image });
    let add = json!({ "driver": "raw", "node-name": "d", "file": file });
    let bitmap = json!({ "node": "d", "name": "since", "persistent": true });
    let server = Server::daemon(["--control", &at]);
    let mut control = bench.control("c");
    control.ok("blockdev-add", add.clone());
    control.ok("block-dirty-bitmap-add", bitmap.clone());
    control.ok("block-dirty-bitmap-remove", json!({ "node": "d", "name": "since" }));
    control.ok("blockdev-set-active", active("d", false));
    // Its bitmaps would be of another image, or of none.
    assert_eq!(control.ok("query-named-block-nodes", json!({}))[0]["active"], json!(false));
    let refused = control.call("block-dirty-bitmap-add", bitmap.clone()).expect_err("away");
    assert!(refused.contains("inactive"), "{refused}");
    control.ok("blockdev-set-active", active("d", true));
    control.ok("block-dirty-bitmap-add", bitmap);
    let said = server.stop();
    assert!(!said.contains("has lost"), "{said}");
    let server = Server::daemon(["--control", &at]);
    let mut control = bench.control("c");
    control.ok("blockdev-add", add);
    assert_eq!(kept(&mut control)[0]["name"], "since");
    server.stop();
}

fn appliance() -> Appliance {
    Appliance::builder(Machine::Pc)
        .programs(["fio", "dd"])
        .build(&Appliance::default_cache())
        .unwrap_or_else(|error| panic!("{error}"))
}

fn qemu(sockets: &[PathBuf]) -> Qemu {
    qemu_with(sockets, 1)
}

/// With so many processors, and queues of each disk.
fn qemu_with(sockets: &[PathBuf], queues: u16) -> Qemu {
    let qemu = Qemu::new(&appliance()).memory(512 * MIB).cpus(queues);
    sockets.iter().fold(qemu, |qemu, socket| qemu.vhost_user(socket, queues))
}

fn tell(what: &str, migrated: Migrated) {
    let Migrated { downtime, total, transferred } = migrated;
    println!("{what}: {total:?}, {downtime:?} of that at rest, {} MiB", transferred / MIB);
}

/// fio on a disk, over and over, each block written in random order and checked, until it is told to stop.
struct Load<'a> {
    guest: &'a Guest,
    job: Job<'a>,
}

impl Load<'_> {
    fn start<'a>(guest: &'a Guest, disk: &str) -> Load<'a> {
        Load::start_jobs(guest, disk, 1)
    }

    /// So many at once, each on a part of the disk.
    fn start_jobs<'a>(guest: &'a Guest, disk: &str, jobs: u16) -> Load<'a> {
        let script = format!(
            "cd /tmp; n=0
            while [ ! -e stop ]; do
                fio --name=v --filename=/dev/{disk} --rw=randwrite --direct=1 --size=8m --bs=4k --iodepth=8 \
                    --numjobs={jobs} --offset_increment=8m --ioengine=libaio --fsync=100 --verify=crc32c --verify_fatal=1 --do_verify=1 \
                    --verify_state_save=0 --randseed=$n >out.{disk} 2>&1 || {{ cat out.{disk} >&2; exit 1; }}
                n=$((n + 1))
            done
            echo $n"
        );
        Load { guest, job: guest.start(&script).expect("the guest takes it") }
    }

    /// How often all of it was written and checked.
    fn stop(self) -> u32 {
        self.guest.exec("touch /tmp/stop", LONG).expect("it is told");
        let end = self.job.wait(LONG).and_then(Output::success);
        let end = end.unwrap_or_else(|error| panic!("{error}"));
        end.stdout.trim().parse().expect("a number")
    }
}

/// Both ends on one image each: a raw one and a qcow2 one, of one guest, there and back.
#[test]
fn a_guest_under_a_verified_load_goes_to_another_server_and_back() {
    let bench = Bench::new();
    let (raw, qcow2) = (bench.raw("a.raw", 64 * MIB), bench.qcow2("b.qcow2", 64 * MIB));
    let sockets = |end: &str| ["a", "b"].map(|disk| format!("{disk}{end}"));
    let serve = |end: &str, more: &[&str]| {
        let [a, b] = sockets(end);
        bench.serve(&format!("c{end}"), &[[&raw, "raw", &a], [&qcow2, "qcow2", &b]], more)
    };
    let (one, other) = (serve("1", &[]), serve("2", &["--incoming"]));
    let of = |end: &str| qemu(&sockets(end).map(|socket| bench.path(&socket)));
    let guest = of("1").boot().unwrap_or_else(|error| panic!("{error}"));
    let loads = ["vda", "vdb"].map(|disk| Load::start(&guest, disk));
    for end in ["2", "1"] {
        thread::sleep(Duration::from_secs(3));
        let migrated = guest.migrate(of(end), LONG).unwrap_or_else(|error| panic!("{error}"));
        tell("both ends on one image", migrated);
        assert!(loads.iter().all(|load| !load.job.is_done()), "a load has failed");
    }
    thread::sleep(Duration::from_secs(3));
    for load in loads {
        assert!(load.stop() > 0);
    }
    guest.shutdown(patience()).expect("it goes down");
    for (server, arrived) in [(one, 2), (other, 2)] {
        let said = server.stop();
        assert_eq!(said.matches("the disk has left").count(), 2, "{said}");
        assert_eq!(said.matches("the disk is here").count(), arrived, "{said}");
        assert!(!said.contains("ERROR"), "{said}");
    }
    ok("qemu-img", "qemu-utils", &["check", "-q", &qcow2]);
}

/// Storage, too: each end has an image of its own, and the first is mirrored to the other end's NBD export.
#[test]
fn a_guest_goes_with_its_storage() {
    let bench = Bench::new();
    let (from, to) = (bench.raw("from.raw", 64 * MIB), bench.qcow2("to.qcow2", 64 * MIB));
    let nbd = format!("unix:{}", bench.text("nbd"));
    let here = bench.serve("c1", &[[&from, "raw", "s1"]], &["--node-name", "d"]);
    let there = bench.serve("c2", &[[&to, "qcow2", "s2"]], &["--node-name", "d", "--nbd", &nbd]);
    let guest = qemu(&[bench.path("s1")]).boot().unwrap_or_else(|error| panic!("{error}"));
    let load = Load::start(&guest, "vda");
    let mut control = bench.control("c1");
    let server = json!({ "type": "unix", "path": bench.text("nbd") });
    let file = json!({ "driver": "nbd", "server": server, "export": "" });
    control.ok("blockdev-add", json!({ "driver": "raw", "node-name": "far", "file": file }));
    let mirror = json!({ "job-id": "m", "device": "d", "target": "far", "sync": "full" });
    control.ok("blockdev-mirror", mirror);
    while control.event().0 != "BLOCK_JOB_READY" {}
    let migrated = guest.migrate_and(qemu(&[bench.path("s2")]), LONG, || {
        // The guest stands still, and so does its disk: what the mirror has is all there is.
        control.ok("block-job-cancel", json!({ "device": "m" }));
        loop {
            let (name, data) = control.event();
            if name == "BLOCK_JOB_COMPLETED" {
                break assert!(data.get("error").is_none(), "{data}");
            }
        }
        control.ok("blockdev-del", json!({ "node-name": "far" }));
    });
    tell("with its storage", migrated.unwrap_or_else(|error| panic!("{error}")));
    assert!(!load.job.is_done(), "the load has failed");
    here.stop();
    thread::sleep(Duration::from_secs(3));
    assert!(load.stop() > 0);
    guest.shutdown(patience()).expect("it goes down");
    let said = there.stop();
    assert!(!said.contains("ERROR"), "{said}");
    ok("qemu-img", "qemu-utils", &["check", "-q", &to]);
}

/// Until a front-end has connected to that socket.
fn until_taken(socket: &Path) {
    let name = socket.to_str().expect("a plain path");
    let end = Instant::now() + patience();
    let taken = || {
        let sockets = fs::read_to_string("/proc/net/unix").expect("the sockets");
        sockets.lines().any(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            words.get(5) == Some(&"03") && words.get(7) == Some(&name)
        })
    };
    while !taken() {
        assert!(Instant::now() < end, "nobody comes to {name}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// Servers that are killed in the middle: the one that the guest leaves while its memory goes, and the one that it comes to
/// just before it does; on the way back the one that it leaves once it has stopped, and the one that it came to. Each that has
/// a guest, or is to have one, is started again at once, as a supervisor does. Two queues.
#[test]
fn servers_that_are_killed_while_a_guest_goes_lose_nothing_of_its_disks() {
    let bench = Bench::new();
    let (raw, qcow2) = (bench.raw("a.raw", 64 * MIB), bench.qcow2("b.qcow2", 64 * MIB));
    let sockets = |end: &str| ["a", "b"].map(|disk| format!("{disk}{end}"));
    let serve = |end: &str, more: &[&str]| {
        let [a, b] = sockets(end);
        bench.serve(&format!("c{end}"), &[[&raw, "raw", &a], [&qcow2, "qcow2", &b]], more)
    };
    let of = |end: &str| qemu_with(&sockets(end).map(|socket| bench.path(&socket)), 2);
    let (mut one, mut other) = (serve("1", &[]), serve("2", &["--incoming"]));
    let guest = of("1").boot().unwrap_or_else(|error| panic!("{error}"));
    let loads = ["vda", "vdb"].map(|disk| Load::start_jobs(&guest, disk, 2));
    let are_well = |when: &str| {
        assert!(loads.iter().all(|load| !load.job.is_done()), "a load has failed {when}");
    };
    thread::sleep(Duration::from_secs(3));
    let again = |server: &mut Server, end: &str, more: &[&str]| {
        // Its image is free before the next comes.
        server.kill_now();
        *server = serve(end, more);
    };
    let there = guest.migrate_between(
        of("2"),
        LONG,
        || {
            again(&mut one, "1", &[]);
            // It lets go of its images when the guest stops here, so the guest is to be here by then.
            sockets("1").iter().for_each(|socket| until_taken(&bench.path(socket)));
        },
        || again(&mut other, "2", &["--incoming"]),
    );
    tell("with servers killed, there", there.unwrap_or_else(|error| panic!("{error}")));
    are_well("there");
    thread::sleep(Duration::from_secs(3));
    // The guest is there: what it has written is there after a kill.
    again(&mut other, "2", &[]);
    thread::sleep(Duration::from_secs(3));
    are_well("after a kill");
    // The one that it comes back to waits for it as before.
    let back = guest.migrate_and(of("1"), LONG, || other.kill_now());
    tell("with servers killed, back", back.unwrap_or_else(|error| panic!("{error}")));
    thread::sleep(Duration::from_secs(3));
    again(&mut one, "1", &[]);
    thread::sleep(Duration::from_secs(3));
    are_well("back");
    for load in loads {
        assert!(load.stop() > 0);
    }
    guest.shutdown(patience()).expect("it goes down");
    let said = one.stop();
    assert!(!said.contains("ERROR"), "{said}");
    ok("qemu-img", "qemu-utils", &["check", "-q", &qcow2]);
}
