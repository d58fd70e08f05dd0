//! Confined servers, and those that follow them.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};

use crate::bench::{Bench, RINGTAP, ends, image, mounts, pid, said};

fn fact(of: u32, name: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{of}/status")).expect("its status");
    let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("a line");
    line.trim_start_matches(':').trim().to_owned()
}

fn is_confined(of: u32) -> bool {
    let found = (fact(of, "NoNewPrivs"), fact(of, "Seccomp"));
    assert!(found == ("1".into(), "2".into()) || found == ("0".into(), "0".into()), "{found:?}");
    found.0 == "1"
}

#[test]
fn who_follows_a_confined_server_is_confined() {
    let mut bench = Bench::new();
    let file = image(&bench, "qcow2");
    let outside = tempfile::tempdir_in("/var/tmp").expect("a folder");
    let other = outside.path().join("other.raw");
    fs::File::create(&other).and_then(|file| file.set_len(1 << 20)).expect("a file");
    let line = format!(
        "serve --control unix:c.sock --allow . {file} -f qcow2 --node-name a --vhost-user vu.sock"
    );
    let (_child, mut server) = bench.serve(&line);
    let add = format!("disk add {} -f raw --node-name o --control unix:c.sock", other.display());
    for by_signal in [false, true] {
        assert!(is_confined(server), "{}", bench.log());
        let why = bench.ends_with(&add, 1);
        assert!(why.contains("--allow"), "{why}");
        let of = if by_signal { server.to_string() } else { "unix:c.sock".to_owned() };
        let next = bench.upgrade(&of);
        ends(server);
        server = next;
    }
    let load = bench.load("vu.sock", 1);
    bench.verified(load);
    assert!(is_confined(server));
    // Its broker has gone with the first, and the next has one of its own.
    let brokers = || {
        let mut all = Command::new("pgrep");
        all.args(["-c", "-P", &server.to_string(), "ringtap-broker"]);
        String::from_utf8_lossy(&all.output().expect("pgrep").stdout).trim().to_owned()
    };
    assert_eq!(brokers(), "1");
    let _ = kill_process(pid(server), Signal::TERM);
    ends(server);
    assert!(!bench.path("vu.sock").exists() && !bench.path("c.sock").exists());
    bench.ends_with(&format!("check -f qcow2 {file}"), 0);
}

/// What a server says of who asks is not believed: whoever owns it would have any program started.
#[test]
fn another_program_follows_a_confined_server_where_an_operator_asks_for_it() {
    let mut bench = Bench::new();
    let file = image(&bench, "raw");
    let (_child, first) =
        bench.serve(&format!("serve --control unix:c {file} -f raw --nbd unix:n"));
    assert!(is_confined(first));
    fs::copy(RINGTAP, bench.path("other")).expect("the program");
    let other = bench.path("other").display().to_string();
    let own = std::process::id();
    for by in ["".to_owned(), format!(r#","asked-by":{first}"#), format!(r#","asked-by":{own}"#)] {
        let words = format!(r#"{{"binary":{other:?}{by}}}"#);
        let said = qmp(&bench.path("c"), "__ringtap_upgrade", &words);
        assert!(said.contains("\"error\"") && said.contains("ask for"), "{said}");
    }
    let next = bench.upgrade("unix:c --binary other");
    ends(first);
    assert!(is_confined(next));
    let runs = fs::read_link(format!("/proc/{next}/exe")).expect("its program");
    assert_eq!(runs, bench.path("other").canonicalize().expect("it"));
    let why = bench.ends_with("upgrade unix:c --binary /bin/false", 1);
    assert!(why.contains("status 1"), "{why}");
    let _ = kill_process(pid(next), Signal::TERM);
    ends(next);
}

/// One command of a client, and the answer to it.
fn qmp(socket: &Path, command: &str, arguments: &str) -> String {
    let mut stream = UnixStream::connect(socket).expect("the control socket");
    let begin = r#"{"execute":"qmp_capabilities"}"#;
    let line = format!(r#"{begin}{{"execute":"{command}","arguments":{arguments},"id":7}}"#);
    stream.write_all(line.as_bytes()).expect("told");
    let lines = BufReader::new(stream).lines().map_while(Result::ok);
    lines.into_iter().find(|line| line.contains("\"id\"")).expect("an answer")
}

#[test]
fn without_a_control_socket_there_is_a_second_wall_after_an_upgrade_too() {
    let mut bench = Bench::new();
    let file = image(&bench, "raw");
    let (_child, first) = bench.serve(&format!("serve {file} -f raw --vhost-user vu.sock"));
    let next = bench.upgrade(&first.to_string());
    ends(first);
    assert!(is_confined(next));
    let load = bench.load("vu.sock", 1);
    bench.verified(load);
    // Where another thread had been there by then this would be said.
    assert!(!bench.log().contains("threads were there before"), "{}", bench.log());
    let last = bench.upgrade(&next.to_string());
    ends(next);
    let _ = kill_process(pid(last), Signal::TERM);
    ends(last);
}

/// As in a unit, where nobody may trace another: who asks for the upgrade has no more than the server.
#[test]
fn whoever_may_not_trace_the_server_sees_which_program_it_runs() {
    let mut bench = Bench::new();
    let file = image(&bench, "raw");
    let few = ["--bounding-set", "-all,+dac_override"];
    let line = format!("serve --sandbox auto {file} -f raw --nbd unix:n");
    let mut server = Command::new("setpriv");
    server.args(few).arg(bench.program()).args(line.split(' ')).current_dir(bench.dir.path());
    server.env("RINGTAP_STATE_DIR", bench.path("state")).stdout(Stdio::piped());
    fs::create_dir_all(bench.path("state")).expect("a folder");
    let mut child = server.spawn().expect("it begins");
    bench.pids.push(child.id());
    let mut ready = String::new();
    let out = child.stdout.take().expect("its output");
    BufReader::new(out).read_line(&mut ready).expect("a line");
    assert_eq!(ready.trim(), "ready");
    let upgrade = |pid: u32| {
        let mut upgrade = Command::new("setpriv");
        upgrade.args(few).arg(RINGTAP).args(["upgrade", "--if-changed", &pid.to_string()]);
        let end = upgrade.output().expect("it runs");
        assert!(end.status.success(), "{}", said(&end));
        said(&end)
    };
    assert_eq!(upgrade(child.id()), "");
    bench.install_a_copy();
    let told = upgrade(child.id());
    assert!(told.contains("serves from now on"), "{told}");
    ends(child.id());
    child.wait().expect("its end");
    let next = told.split(' ').nth(1).and_then(|word| word.parse().ok()).expect("a process");
    bench.pids.push(next);
    assert!(is_confined(next));
}

#[test]
fn a_server_that_is_told_so_is_not_confined() {
    let mut bench = Bench::new();
    let file = image(&bench, "raw");
    let line = format!("serve --sandbox off --control unix:c {file} -f raw --nbd unix:n");
    let (_child, first) = bench.serve(&line);
    assert!(!is_confined(first));
    // Another program may be named, too.
    let program = bench.program().display().to_string();
    let next = bench.upgrade(&format!("unix:c --binary {program}"));
    ends(first);
    assert!(!is_confined(next));
}

#[test]
fn what_allow_leaves_out_is_refused_in_words_that_name_it() {
    let mut bench = Bench::new();
    for folder in ["in", "out"] {
        fs::create_dir(bench.path(folder)).expect("a folder");
    }
    bench.ends_with("create -q -f raw out/base.raw 1M", 0);
    bench.ends_with("create -q -f qcow2 -b ../out/base.raw -F raw in/top.qcow2", 0);
    bench.ends_with("create -q -f qcow2 -b top.qcow2 -F qcow2 in/late.qcow2", 0);
    bench.ends_with("create -q -f raw out/other.raw 1M", 0);
    fs::write(bench.path("out/key"), "secret").expect("a key");
    // What lies below a disk of the command line is known by its record.
    let (child, server) = bench
        .serve("serve --sandbox on --allow in --control unix:c in/top.qcow2 -f qcow2 --nbd unix:n");
    assert!(is_confined(server));
    let own = |words: &str| format!("disk add {words} --control unix:c");
    let why = bench.ends_with(&own("out/other.raw -f raw --node-name b"), 1);
    assert!(why.contains("Permission denied") && why.contains("--allow"), "{why}");
    let why = bench.ends_with(&own("in/x.luks -f luks --secret file:out/key --node-name l"), 1);
    assert!(why.contains("Permission denied") && why.contains("--allow"), "{why}");
    let _ = kill_process(pid(server), Signal::TERM);
    ends(server);
    drop(child);
    // Both are there where they are named.
    let (_child, server) = bench
        .serve("serve --sandbox on --allow in --allow out --control unix:c null:1M --node-name z");
    bench.ends_with(&own("in/late.qcow2 -f qcow2 --node-name t --nbd t --nbd-server unix:n"), 0);
    let _ = kill_process(pid(server), Signal::TERM);
    ends(server);
}

#[test]
fn a_link_at_the_mount_point_is_followed_where_the_operator_says_so() {
    if !mounts() {
        eprintln!("skipped: nothing can be mounted here");
        return;
    }
    let mut bench = Bench::new();
    let file = image(&bench, "raw");
    fs::create_dir(bench.path("there")).expect("a folder");
    fs::write(bench.path("there/shown"), "").expect("a file");
    std::os::unix::fs::symlink("there/shown", bench.path("link")).expect("a link");
    let (_child, server) = bench.serve(&format!("serve --sandbox on {file} -f raw --fuse link"));
    let shown = fs::metadata(bench.path("there/shown")).expect("the disk");
    assert_eq!(shown.len(), 64 << 20, "{}", bench.log());
    let _ = kill_process(pid(server), Signal::TERM);
    ends(server);
    assert_eq!(fs::metadata(bench.path("there/shown")).expect("the file").len(), 0);
}

#[test]
fn what_a_block_device_needs_is_said_in_one_line() {
    let bench = Bench::new();
    let file = image(&bench, "raw");
    let mut child = bench
        .command(&format!("serve --sandbox auto {file} -f raw --ublk"))
        .stderr(fs::File::create(bench.path("log")).expect("a log"))
        .stdout(Stdio::null())
        .spawn()
        .expect("it begins");
    let until = Instant::now() + Duration::from_secs(60);
    while !bench.log().contains("not confined: block devices") {
        assert!(Instant::now() < until, "{}", bench.log());
        std::thread::sleep(Duration::from_millis(5));
    }
    let _ = kill_process(pid(child.id()), Signal::TERM);
    child.wait().expect("its end");
    assert_eq!(bench.log().matches("confined").count(), 1, "{}", bench.log());
}
