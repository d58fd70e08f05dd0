//! What the program says: warnings, messages, the log.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use ringtap_tests::ringtap;
use rustix::process::Signal;
use serde_json::Value;

use crate::program::{Running, python};
use crate::served::{Server, command};
use crate::{disk, folder, nbdinfo, run};

#[test]
fn warnings_are_shown_in_every_verb() {
    let dir = folder();
    run(dir.path(), "create -f qcow2 a.qcow2 8M").ok();
    for verb in [
        "info a.qcow2",
        "map -f qcow2 a.qcow2",
        "measure -f qcow2 -O raw a.qcow2",
        "check -f qcow2 a.qcow2",
        "convert -q -f qcow2 a.qcow2 -O raw a.raw",
        "compare -f qcow2 a.qcow2 -F qcow2 a.qcow2",
    ] {
        let mut command = Command::new(ringtap());
        command.current_dir(dir.path()).args(verb.split_whitespace()).env("RUST_LOG", "inof");
        let end = Running::start(command).wait();
        assert!(end.status.success(), "{verb}: {}", end.stderr);
        assert!(end.stderr.starts_with("ringtap: warning: RUST_LOG is not heeded: "), "{verb}");
    }
}

/// A qcow2 image whose first cluster is said to lie where none can.
fn contradicting(folder: &Path, name: &str) {
    run(folder, &format!("create -f qcow2 {name} 8M")).ok();
    let server = Server::start(folder, &format!("{name} -f qcow2 --nbd unix:made.sock"));
    let write = "import nbd, sys; h = nbd.NBD(); h.connect_uri(sys.argv[1]); \
                 h.pwrite(b'x' * 65536, 0); h.flush(); h.shutdown()";
    Running::start(python(write, &[&server.uri(0)])).wait().ok();
    server.stop().ok();
    let image = File::options().read(true).write(true).open(folder.join(name)).expect("the image");
    let word = |at: u64| {
        let mut bytes = [0; 8];
        image.read_exact_at(&mut bytes, at).expect("a word");
        u64::from_be_bytes(bytes)
    };
    // Bits 9 to 55 of an L1 entry are the place of the L2 table, bit 63 says that nobody shares it.
    let l2 = word(word(40)) & 0x00ff_ffff_ffff_fe00;
    image.write_all_at(&(1 << 63 | 0x200u64).to_be_bytes(), l2).expect("an entry");
}

const READ_40_TIMES: &str = "import nbd, sys
h = nbd.NBD(); h.connect_uri(sys.argv[1])
for i in range(40):
    try: h.pread(4096, 8192); sys.exit('it was read')
    except nbd.Error: pass
h.shutdown()";

#[test]
fn failed_requests_are_told_with_disk_operation_place_and_cause_and_not_too_often() {
    let dir = folder();
    contradicting(dir.path(), "a.qcow2");
    disk(dir.path(), "b.raw", 1 << 20);
    let words = "b.raw -f raw --name b --nbd unix:s a.qcow2 -f qcow2 --name a --nbd unix:s";
    let server = Server::start(dir.path(), words);
    Running::start(python(READ_40_TIMES, &[&server.uri(1)])).wait().ok();
    let said = server.stop().stderr;
    let told: Vec<&str> = said.lines().filter(|line| line.contains("request failed")).collect();
    assert_eq!(told.len(), 10, "{said}");
    for line in told {
        assert!(line.contains(" ERROR a.qcow2: request failed: the image contradicts"), "{line}");
        assert!(line.contains("operation=\"read\" offset=8192 length=4096"), "{line}");
    }
    let rest = said.lines().find(|line| line.contains("more requests failed"));
    assert!(rest.is_some_and(|line| line.contains("a.qcow2: ") && line.contains("=30")), "{said}");
}

const REFUSED: &str = "import nbd, sys
h = nbd.NBD(); h.set_strict_mode(0); h.connect_uri(sys.argv[1])
for act in [lambda: h.pread(4096, 1 << 30), lambda: h.pwrite(b'x' * 512, 0), lambda: h.trim(512, 0)]:
    try: act(); sys.exit('it was done')
    except nbd.Error: pass
h.shutdown()";

#[test]
fn requests_refused_before_the_disk_are_told_too() {
    let dir = folder();
    disk(dir.path(), "a.raw", 1 << 20);
    let server = Server::start(dir.path(), "a.raw -f raw --read-only --nbd unix:s");
    Running::start(python(REFUSED, &[&server.uri(0)])).wait().ok();
    let said = server.stop().stderr;
    for wanted in [
        "past the end of the export operation=\"read\" offset=1073741824 length=4096",
        "the export is read-only operation=\"write\" offset=0 length=512",
        "the export is read-only operation=\"discard\" offset=0 length=512",
    ] {
        let line = said.lines().find(|line| line.contains(wanted));
        assert!(line.is_some_and(|line| line.contains("WARN a.raw: request refused: ")), "{said}");
    }
}

#[test]
fn every_line_about_a_disk_names_it_in_json_too() {
    let dir = folder();
    contradicting(dir.path(), "a.qcow2");
    let words = "a.qcow2 -f qcow2 --nbd unix:s --vhost-user v --log debug --log-format json";
    let server = Server::start(dir.path(), words);
    Running::start(python(READ_40_TIMES, &[&server.uri(0)])).wait().ok();
    let said = server.stop().stderr;
    let lines: Vec<Value> =
        said.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    let failed = lines.iter().find(|line| line["operation"] == "read").expect("a failure");
    assert_eq!((&failed["level"], &failed["offset"]), (&"ERROR".into(), &8192.into()));
    for line in &lines {
        let message = line["message"].as_str().expect("a message");
        let of_disk = line["span"]["disk"] == "a.qcow2";
        assert!(of_disk || !message.contains("a.qcow2"), "{line}");
    }
    disk(dir.path(), "b.raw", 1 << 20);
    let refused = run(dir.path(), "serve b.raw -f raw --nbd unix:/nowhere/s --log-format json");
    let said = refused.failed(1);
    let last = said.lines().last().expect("why");
    let line: Value = serde_json::from_str(last).expect("one object");
    assert!(line["message"].as_str().is_some_and(|text| text.contains("/nowhere/s")), "{line}");
}

#[test]
fn lines_for_the_journal_have_priorities() {
    let dir = folder();
    let log = File::create_new(dir.path().join("log")).expect("a log");
    let facts = log.metadata().expect("its inode");
    let said = || fs::read_to_string(dir.path().join("log")).expect("what it said");
    let serve = |stream: String, words: &str| {
        let mut command = command(dir.path(), words);
        command.env("JOURNAL_STREAM", stream).stdout(Stdio::null());
        command.stderr(File::create(dir.path().join("log")).expect("the log"));
        command.spawn().expect("ringtap")
    };
    let ours = format!("{}:{}", facts.dev(), facts.ino());
    serve(ours.clone(), "none.raw -f raw --nbd unix:s").wait().expect("its end");
    assert!(said().lines().any(|line| line.starts_with("<3>ringtap: ")), "{}", said());
    let mut server = serve(ours, "null:1M --nbd unix:s");
    let until = Instant::now() + Duration::from_secs(60);
    while !said().contains("<6>null:1M: ") {
        assert!(Instant::now() < until, "{}", said());
        std::thread::sleep(Duration::from_millis(5));
    }
    server.kill().and_then(|()| server.wait()).expect("its end");
    // It was passed on by another program, whose stderr was the journal.
    serve("1:1".into(), "none.raw -f raw --nbd unix:s").wait().expect("its end");
    assert!(said().lines().all(|line| !line.starts_with('<')), "{}", said());
}

#[test]
fn unknown_levels_of_the_log_are_refused_with_those_known() {
    let dir = folder();
    disk(dir.path(), "a.raw", 1 << 20);
    for wish in ["inof", "ringtap_export=loud", "ringtap_exprot=debug", "ringtap_export"] {
        let said = run(dir.path(), &format!("serve a.raw -f raw --nbd unix:s --log {wish}"));
        let said = said.failed(2);
        assert!(said.contains("known are") && said.contains(wish.rsplit('=').next().unwrap_or("")));
    }
}

/// The names of a process's threads.
fn threads(process: u32) -> Vec<String> {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).expect("its threads");
    let name = |task: fs::DirEntry| fs::read_to_string(task.path().join("comm")).ok();
    tasks.flatten().filter_map(name).map(|name| name.trim().to_owned()).collect()
}

#[test]
fn threads_are_named_by_their_disk() {
    let dir = folder();
    disk(dir.path(), "web01-root.raw", 1 << 20);
    disk(dir.path(), "other.raw", 1 << 20);
    let words = "web01-root.raw -f raw --nbd unix:s --vhost-user v \
                 other.raw -f raw --name data --nbd unix:s";
    let mut server = Server::start(dir.path(), words);
    let wait = "import nbd, sys; h = nbd.NBD(); h.connect_uri(sys.argv[1]); \
                print('here', flush=True); sys.stdin.read(); import time; time.sleep(60)";
    let clients: Vec<Running> = [0, 1]
        .map(|disk| Running::start(python(wait, &[&server.uri(disk)])))
        .map(|mut client| {
            client.until("connection", |client| client.stdout().contains("here").then_some(()));
            client
        })
        .into();
    // A connection's thread has its name a moment after its client has its export.
    for name in ["web01-root:vu", "web01-root:nbd", "data:nbd"] {
        server.process().until(name, |server| {
            threads(server.pid()).iter().any(|found| found == name).then_some(())
        });
    }
    drop(clients);
    server.stop().ok();
}

#[test]
fn an_image_that_cannot_be_opened_stops_its_own_disk_only() {
    let dir = folder();
    disk(dir.path(), "a.raw", 1 << 20);
    disk(dir.path(), "locked.raw", 1 << 20);
    fs::write(dir.path().join("corrupt.qcow2"), [0; 4096]).expect("no image");
    let other = Server::start(dir.path(), "locked.raw -f raw --nbd unix:other.sock");
    let words = "missing.raw -f raw --name m --nbd unix:s --nbd unix:m.sock --vhost-user m.vu \
                 a.raw -f raw --name a --nbd unix:s locked.raw -f raw --name l --nbd unix:s \
                 corrupt.qcow2 -f qcow2 --name c --nbd unix:s";
    let server = Server::start(dir.path(), words);
    assert_eq!(server.facts["disks"].as_array().map(Vec::len), Some(1), "{}", server.facts);
    let not_served = server.facts["not_served"].as_array().expect("a list").clone();
    let of = |key: &str| -> Vec<&str> {
        not_served.iter().map(|disk| disk[key].as_str().expect("a string")).collect()
    };
    assert_eq!(of("disk"), ["missing.raw", "locked.raw", "corrupt.qcow2"]);
    assert_eq!(of("name"), ["m", "l", "c"]);
    for (error, said) in of("error").into_iter().zip(["No such file", "process", "qcow2"]) {
        assert!(error.contains(said), "{error}");
    }
    assert!(nbdinfo(&["--size", &server.uri(0)]).ok().trim() == "1048576");
    assert!(!dir.path().join("m.sock").exists() && !dir.path().join("m.vu").exists());
    let end = server.stop();
    let said = end.failed(1);
    for path in ["missing.raw", "locked.raw", "corrupt.qcow2"] {
        let line = said.lines().find(|line| line.contains(&format!("ERROR {path}: not served: ")));
        assert!(line.is_some(), "{path}: {said}");
    }
    assert!(said.contains("ringtap: 3 of 4 disks could not be served: "), "{said}");

    let strict = run(dir.path(), &format!("serve --strict {words}")).failed(1);
    assert!(strict.contains("missing.raw") && !strict.contains("corrupt"), "{strict}");
    let none = "serve missing.raw -f raw --nbd unix:s gone.raw -f raw --name b --nbd unix:s";
    let none = run(dir.path(), none);
    assert_eq!(none.stdout, "");
    assert!(none.failed(1).contains("2 of 2 disks could not be served"));
    let wrong = "serve a.raw -f raw --nbd unix:s missing.raw --name b --nbd unix:s";
    assert!(run(dir.path(), wrong).failed(2).contains("-f raw"));
    other.stop().ok();
}

#[test]
fn one_image_named_for_two_disks_is_a_mistake_of_the_command_line() {
    let dir = folder();
    disk(dir.path(), "a.raw", 1 << 20);
    fs::hard_link(dir.path().join("a.raw"), dir.path().join("b.raw")).expect("a link");
    for second in ["a.raw", "./a.raw", "b.raw"] {
        let words =
            format!("serve a.raw -f raw --nbd unix:s {second} -f raw --name b --nbd unix:s");
        let said = run(dir.path(), &words).failed(2);
        assert!(said.contains(&format!("a.raw and {second} are one image")), "{said}");
    }
    let words =
        "a.raw -f raw --read-only --nbd unix:s a.raw -f raw --read-only --name b --nbd unix:s";
    Server::start(dir.path(), words).stop().ok();
}

#[test]
fn a_disk_left_out_at_the_start_is_tried_again_on_sighup() {
    let dir = folder();
    disk(dir.path(), "a.raw", 1 << 20);
    let words = "b.raw -f raw --name b --nbd unix:s --nbd unix:b.sock --vhost-user b.vu \
                 a.raw -f raw --name a --nbd unix:s";
    let mut server = Server::start(dir.path(), words);
    let reload = |server: &mut Server, said: &str| {
        server.process().signal(Signal::HUP);
        server.process().until(said, |server| server.stderr().contains(said).then_some(()));
    };
    reload(&mut server, "ERROR b.raw: still not served: ");
    assert!(!dir.path().join("b.sock").exists());
    disk(dir.path(), "b.raw", 2 << 20);
    reload(&mut server, "INFO b.raw: served from now on: ");
    let folder = dir.path().display();
    for uri in [
        format!("nbd+unix:///b?socket={folder}/s"),
        format!("nbd+unix:///b?socket={folder}/b.sock"),
    ] {
        assert_eq!(nbdinfo(&["--size", &uri]).ok().trim(), "2097152");
    }
    assert_eq!(nbdinfo(&["--size", &server.uri(0)]).ok().trim(), "1048576", "a stays the first");
    assert!(dir.path().join("b.vu").exists());
    // Once: it is served, and no more left out.
    reload(&mut server, "b.raw: still 2097152 bytes");
    server.stop().ok();
    assert!(!dir.path().join("b.sock").exists() && !dir.path().join("b.vu").exists());
}
