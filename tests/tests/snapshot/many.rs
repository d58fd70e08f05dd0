//! An image that is replaced by an overlay on itself over and over, under load, on each way to a disk.
//!
//! `RINGTAP_REPLACEMENTS` sets how often; after every 32 the overlays are merged into the image while the load goes on.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread;
use std::time::Duration;

use ringtap_guest::{Appliance, Guest, Machine, Output, Qemu};
use ringtap_tests::replacements::{LEVELS, Pauses, turn, wanted};
use ringtap_tests::{Control, Server, lab_of, ok, patience, ringtap};
use serde_json::{Value, json};

use crate::bench::Bench;
use crate::jobs::{commit, hear, make};

/// TCG on a busy machine.
const LONG: Duration = Duration::from_secs(600);

/// How a guest comes to the disk.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    VhostUser,
    /// The same, to a guest whose kernel drives the disk.
    Guest,
    Nbd,
    Fuse,
}

impl Way {
    fn serve(self, bench: &Bench) -> Server {
        let file = bench.text("file");
        let fuse = ["-f", "qcow2", "--fuse", &file];
        bench.serve(&["a.img"], if self == Way::Fuse { &fuse } else { &fuse[..2] })
    }

    /// The guest, where there is one.
    fn boot(self, bench: &Bench) -> Option<Guest> {
        let appliance = || Appliance::builder(Machine::Pc).programs(["fio"]);
        let guest = (self == Way::Guest).then(|| {
            let appliance = appliance().build(&Appliance::default_cache());
            let appliance = appliance.unwrap_or_else(|error| panic!("{error}"));
            Qemu::new(&appliance).vhost_user(bench.path("a"), 1).boot_timeout(LONG).boot()
        });
        guest.map(|guest| guest.unwrap_or_else(|error| panic!("{error}")))
    }

    /// fio's words for the disk.
    fn fio(self, bench: &Bench) -> Vec<String> {
        let to = match self {
            Way::Fuse => format!("--filename={}", bench.text("file")),
            _ => format!("--uri={}", bench.uri("a")),
        };
        let own: &[&str] = if self == Way::Fuse {
            &["--ioengine=libaio", "--direct=1", "--overwrite=1"]
        } else {
            &["--ioengine=nbd"]
        };
        own.iter().map(|&word| word.to_owned()).chain([to]).collect()
    }

    /// Write to the disk as no other turn does, and read back what was written.
    fn turn(self, bench: &Bench, guest: Option<&Guest>, number: usize, more: &[&str]) -> bool {
        if let Some(guest) = guest {
            let end = guest.exec(&turn("/dev/vda", &(number + 1).to_string()), LONG);
            end.and_then(Output::success).unwrap_or_else(|error| panic!("{error}"));
            return true;
        }
        if self == Way::VhostUser {
            let socket = bench.text("a");
            let head = ["load", "--socket", &socket, "--rw", "randrw", "--depth", "8"];
            let tail = ["--fsync-every", "64", "--seconds", "4", "--verify", "--output", "json"];
            let output = lab_of(&[&head[..], &tail].concat());
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            let told: Value = serde_json::from_slice(&output.stdout).expect("JSON");
            let found = (&told["verify"]["mismatches"], &told["errors"]);
            assert_eq!(found, (&json!(0), &json!(0)), "{told}");
            return told["verify"]["blocks"].as_u64().is_some_and(|blocks| blocks > 100);
        }
        let mut args = self.fio(bench);
        args.push(format!("--randseed={}", number + 1));
        let same = [
            "--name=v",
            "--size=16M",
            "--rw=randwrite",
            "--bs=4k",
            "--iodepth=8",
            "--fsync=64",
            "--verify=crc32c",
            "--verify_fatal=1",
            "--verify_state_save=0",
        ];
        args.extend(same.iter().chain(more).map(|&word| word.to_owned()));
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let said = ok("fio", "fio", &args);
        assert!(said.contains("err= 0"), "{said}");
        true
    }
}

/// Ends the load, also where the test fails.
struct Enough<'a>(&'a AtomicBool);

impl Drop for Enough<'_> {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

/// Whether a write reaches the overlay soon: none does while the load only reads back.
fn is_written_to(overlay: &Path) -> bool {
    let len = || fs::metadata(overlay).expect("the overlay").len();
    let empty = len();
    (0..50).any(|_| {
        thread::sleep(Duration::from_millis(2));
        len() > empty
    })
}

/// Replace the image so many times, and merge; gives how many overlays held something.
fn replace(bench: &Bench, control: &mut Control, pauses: &mut Pauses, times: usize) -> usize {
    let mut overlays: Vec<PathBuf> = vec![];
    let mut held = 0;
    for _ in 0..times {
        let name = format!("{}.qcow2", pauses.count());
        let to = json!({ "node-name": "a", "snapshot-file": bench.text(&name) });
        control.ok("blockdev-snapshot-sync", to);
        // Of the merge before it there may be more to hear.
        pauses.add(&hear(control, "__ringtap_SNAPSHOT"));
        let overlay = bench.path(&name);
        held += usize::from(is_written_to(&overlay));
        overlays.push(overlay);
    }
    commit(control, json!({ "device": "a", "job-id": "j" }));
    let node = control.ok("query-named-block-nodes", json!({}));
    assert_eq!(node[0]["file"], bench.text("a.img"), "{node}");
    for overlay in overlays {
        fs::remove_file(overlay).expect("removed");
    }
    held
}

fn is_replaced_over_and_over(way: Way) {
    let wanted = wanted(LEVELS + LEVELS / 4);
    let bench = Bench::new();
    make(&bench, "a.img", "qcow2", &[]);
    let server = way.serve(&bench);
    let guest = way.boot(&bench);
    let mut pauses = Pauses::default();
    let enough = AtomicBool::new(false);
    let (mut held, mut last) = (0, 0);
    thread::scope(|scope| {
        let load = scope.spawn(|| {
            let mut turns = 0;
            while !enough.load(SeqCst) {
                assert!(way.turn(&bench, guest.as_ref(), turns, &[]), "little was written");
                turns += 1;
            }
            turns - 1
        });
        let over = Enough(&enough);
        let mut control = bench.control();
        while pauses.count() < wanted && !load.is_finished() {
            let times = LEVELS.min(wanted - pauses.count());
            held += replace(&bench, &mut control, &mut pauses, times);
        }
        drop(over);
        last = load.join().expect("the load finds what it wrote");
    });
    if let Some(guest) = guest {
        guest.shutdown(patience()).expect("it goes down");
    }
    pauses.print(&format!("{way:?}"));
    println!("{way:?}: {} turns of the load, {held} overlays held something", last + 1);
    assert_eq!(pauses.count(), wanted);
    assert!(held > wanted / 4, "of {wanted} overlays {held} were written to");
    // Closed, opened anew by its old name, all is as it was.
    let (copy, uri) = (bench.text("copy"), bench.uri("a"));
    let copied = ["convert", "-f", "raw", "-O", "raw", &uri, &copy];
    ok("qemu-img", "qemu-utils", &copied);
    server.stop();
    let image = bench.text("a.img");
    ok("qemu-img", "qemu-utils", &["check", "-q", &image]);
    ok("qemu-img", "qemu-utils", &["compare", "-q", "-f", "raw", "-F", "qcow2", &copy, &image]);
    let info = ok(ringtap().to_str().expect("plain"), "ringtap", &["info", &image]);
    assert!(!info.contains(".qcow2"), "{info}");
    if matches!(way, Way::Nbd | Way::Fuse) {
        let server = way.serve(&bench);
        way.turn(&bench, None, last, &["--verify_only"]);
        server.stop();
    }
}

#[test]
fn over_vhost_user_an_image_is_replaced_over_and_over() {
    is_replaced_over_and_over(Way::VhostUser);
}

#[test]
#[ignore = "one more boot, and minutes of load under TCG"]
fn under_a_guest_an_image_is_replaced_over_and_over() {
    is_replaced_over_and_over(Way::Guest);
}

#[test]
fn over_nbd_an_image_is_replaced_over_and_over() {
    is_replaced_over_and_over(Way::Nbd);
}

#[test]
fn over_fuse_an_image_is_replaced_over_and_over() {
    is_replaced_over_and_over(Way::Fuse);
}
