//! Backups whose job pauses while the guest writes: what it overwrites lies in scratch meanwhile.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use ringtap_tests::{Control, file_system_of, ok, patience, plain, ringtap_of};
use serde_json::{Value, json};

use crate::bench::{Bench, MIB, said};
use crate::jobs::{hear, make};

/// Begin a backup of `a`, whose scratch is in a folder, and have it pause.
fn paused(bench: &Bench, control: &mut Control, copy: &str, more: Value) {
    let file = json!({ "driver": "file", "filename": copy });
    control.ok("blockdev-add", json!({ "driver": "raw", "node-name": "copy", "file": file }));
    fs::create_dir_all(bench.path("scratch")).expect("a folder");
    let mut backup = json!({ "device": "a", "target": "copy", "sync": "full", "job-id": "j", "speed": MIB,
                             "__ringtap_scratch": bench.text("scratch") });
    // A machine that is busy with other tests is no reason to give the moment up.
    backup["__ringtap_guest-timeout"] = 60_000.into();
    let own = backup.as_object_mut().expect("an object");
    own.extend(more.as_object().cloned().unwrap_or_default());
    own.retain(|_, value| !value.is_null());
    control.ok("blockdev-backup", backup);
    control.ok("job-pause", json!({ "id": "j" }));
    let until = Instant::now() + patience();
    while control.ok("query-jobs", json!({}))[0]["status"] != "paused" {
        assert!(Instant::now() < until, "the job does not pause");
        thread::sleep(Duration::from_millis(10));
    }
}

fn files(bench: &Bench) -> usize {
    bench.path("scratch").read_dir().expect("a folder").count()
}

/// All of the disk, at random.
fn fio(bench: &Bench) {
    let uri = format!("--uri={}", bench.uri("a"));
    let args = [
        "--name=a",
        "--ioengine=nbd",
        &uri,
        "--rw=randwrite",
        "--bs=64k",
        "--iodepth=16",
        "--size=64M",
        "--verify=crc32c",
        "--verify_state_save=0",
        "--output-format=terse",
    ];
    ok("fio", "fio", &args);
}

fn bytes_of(path: &std::path::Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    fs::metadata(path).expect("a file").blocks() * 512
}

#[test]
fn a_backup_that_pauses_while_the_guest_changes_all_of_the_disk_is_what_it_was() {
    let bench = Bench::new();
    make(&bench, "a.img", "raw", &[]);
    bench.raw("copy", 64 * MIB);
    let server = bench.serve(&["a.img"], &["-f", "raw"]);
    bench.io("a", &["write -P 1 0 16M", "write -P 2 40M 8M", "flush"]);
    // Nobody writes: this is the moment.
    fs::copy(bench.path("a.img"), bench.path("moment")).expect("copied");
    let mut control = bench.control();
    paused(&bench, &mut control, &bench.text("copy"), json!({}));
    let before = bytes_of(&bench.path("copy"));
    fio(&bench);
    // Not to the target, and nothing that a kill would leave.
    assert!(bytes_of(&bench.path("copy")) <= before + 2 * MIB, "it went to the target");
    assert_eq!(files(&bench), 0);
    let jobs = control.ok("query-jobs", json!({}));
    assert_eq!(jobs[0]["status"], "paused", "{jobs}");
    control.ok("block-job-set-speed", json!({ "device": "j", "speed": 0 }));
    control.ok("job-resume", json!({ "id": "j" }));
    let told = hear(&mut control, "BLOCK_JOB_COMPLETED");
    assert!(told.get("error").is_none() && told["offset"] == told["len"], "{told}");
    control.ok("blockdev-del", json!({ "node-name": "copy" }));
    server.stop();
    let (moment, copy) = (bench.text("moment"), bench.text("copy"));
    said(&["compare", "-f", "raw", "-F", "raw", &moment, &copy]);
    ok("qemu-img", "qemu-utils", &["compare", "-f", "raw", "-F", "raw", &moment, &copy]);
    let changed = ["compare", "-f", "raw", "-F", "raw", &moment, &bench.text("a.img")];
    assert_eq!(ringtap_of(&changed).status.code(), Some(1));
}

#[test]
fn scratch_that_has_no_more_room_breaks_the_backup_and_not_the_guest() {
    let bench = Bench::new();
    make(&bench, "a.img", "raw", &[]);
    bench.raw("copy", 64 * MIB);
    let server = bench.serve(&["a.img"], &["-f", "raw"]);
    bench.io("a", &["write -P 1 0 16M"]);
    let mut control = bench.control();
    let limit = json!({ "__ringtap_scratch-limit": 2 * MIB, "__ringtap_guest-timeout": 3000 });
    paused(&bench, &mut control, &bench.text("copy"), limit);
    bench.io("a", &["write -P 3 4M 1M"]);
    let jobs = control.ok("query-jobs", json!({}));
    assert_eq!(jobs[0]["status"], "paused", "{jobs}");
    bench.io("a", &["write -P 3 8M 1M", "write -P 3 10M 1M", "read -P 3 10M 1M"]);
    let told = hear(&mut control, "BLOCK_JOB_COMPLETED");
    let why = told["error"].as_str().unwrap_or_default();
    assert!(why.contains("guests have changed more than was to be saved"), "{told}");
    // One that is not there is not gone without.
    let missing = json!({ "device": "a", "target": "copy", "sync": "full", "job-id": "j",
                          "__ringtap_scratch": bench.text("missing") });
    let refused = control.call("blockdev-backup", missing).expect_err("no folder");
    assert!(refused.contains("missing") && refused.contains("--scratch-limit"), "{refused}");
    bench.io("a", &["write -P 4 0 1M"]);
    assert_eq!(control.ok("query-jobs", json!({})), json!([]));
    server.stop();
}

#[test]
fn nothing_of_scratch_stays_after_a_kill() {
    let bench = Bench::new();
    make(&bench, "a.img", "raw", &[]);
    bench.raw("copy", 64 * MIB);
    let server = bench.serve(&["a.img"], &["-f", "raw"]);
    bench.io("a", &["write -P 1 0 16M", "flush"]);
    let mut control = bench.control();
    paused(&bench, &mut control, &bench.text("copy"), json!({}));
    bench.io("a", &["write -P 3 4M 4M", "flush"]);
    server.kill();
    assert_eq!(files(&bench), 0);
    let server = bench.serve(&["a.img"], &["-f", "raw"]);
    bench.io("a", &["read -P 1 0 4M", "read -P 3 4M 4M"]);
    assert_eq!(bench.control().ok("query-jobs", json!({})), json!([]));
    assert!(server.stop().contains("is no copy of the disk"));
}

/// It would lie there as the guest wrote it.
#[test]
fn an_encrypted_disk_has_scratch_only_where_its_folder_is_named() {
    for (named, set_aside) in [(true, true), (false, false)] {
        let bench = Bench::new();
        let (image, key) = (bench.text("a.img"), bench.text("key"));
        fs::write(&key, "a secret").expect("a key");
        let (object, secret) = (format!("secret,id=s,file={key}"), format!("file:{key}"));
        let options = ["--object", &*object, "-o", "key-secret=s,iter-time=10", &image, "64M"];
        let create = [&["create", "-q", "-f", "luks"][..], &options].concat();
        ok("qemu-img", "qemu-utils", &create);
        bench.raw("copy", 64 * MIB);
        let server = bench.serve(&["a.img"], &["-f", "luks", "--secret", &secret]);
        bench.io("a", &["write -P 1 0 32M", "flush"]);
        let mut control = bench.control();
        let folder = if named { json!(bench.path("scratch")) } else { json!(null) };
        paused(&bench, &mut control, &bench.text("copy"), json!({ "__ringtap_scratch": folder }));
        bench.io("a", &["write -P 3 16M 8M", "flush"]);
        assert_eq!(bytes_of(&bench.path("copy")) < 4 * MIB, set_aside, "{named}");
        control.ok("block-job-set-speed", json!({ "device": "j", "speed": 0 }));
        control.ok("job-resume", json!({ "id": "j" }));
        let told = hear(&mut control, "BLOCK_JOB_COMPLETED");
        assert!(told.get("error").is_none(), "{told}");
        control.ok("blockdev-del", json!({ "node-name": "copy" }));
        server.stop();
        bench.holds("copy", "raw", &["read -P 1 0 32M"]);
    }
}

/// What lies there has to come to the target first, whether the job pauses or not.
#[test]
fn no_other_server_takes_over_while_the_target_does_not_take_what_is_set_aside() {
    let bench = Bench::new();
    let set_up = file_system_of(32, "tmpfs", &[], "");
    let (copy, ballast) = (set_up.folder().join("copy"), set_up.folder().join("ballast"));
    make(&bench, "a.img", "raw", &[]);
    fs::File::create(&copy).and_then(|file| file.set_len(64 * MIB)).expect("a file");
    let server = bench.serve(&["a.img"], &["-f", "raw"]);
    bench.io("a", &["write -P 1 0 16M", "flush"]);
    fs::copy(bench.path("a.img"), bench.path("moment")).expect("copied");
    let mut control = bench.control();
    let more = json!({ "on-target-error": "enospc", "__ringtap_target-is-zero": true });
    paused(&bench, &mut control, plain(&copy), more);
    fs::write(&ballast, vec![1; 31 << 20]).expect("the ballast");
    bench.io("a", &["write -P 3 8M 4M", "write -P 4 60M 1M"]);
    let socket = format!("unix:{}", bench.text("control"));
    let output = ringtap_of(&["upgrade", &socket]);
    let refused = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "it was taken over");
    assert!(refused.contains("does not take what guests have changed"), "{refused}");
    // It goes on here, and waits as before.
    let mut control = bench.control();
    bench.io("a", &["write -P 5 12M 1M"]);
    fs::remove_file(&ballast).expect("removed");
    control.ok("block-job-set-speed", json!({ "device": "j", "speed": 0 }));
    control.ok("job-resume", json!({ "id": "j" }));
    let told = hear(&mut control, "BLOCK_JOB_COMPLETED");
    assert!(told.get("error").is_none(), "{told}");
    control.ok("blockdev-del", json!({ "node-name": "copy" }));
    server.stop();
    said(&["compare", "-f", "raw", "-F", "raw", &bench.text("moment"), plain(&copy)]);
}
