//! Servers that are followed by others while their guests go on.

mod backing;
mod backups;
mod bench;
mod bitmaps;
mod certificates;
mod clients;
mod confined;
mod ended;
mod handshakes;
mod jobs;
mod mirrors;
mod names;
mod older;
mod policies;
mod said;
mod silent;
mod stopped;
mod tls;

use std::fs;
use std::os::unix::net::UnixDatagram;
use std::process::Command;
use std::time::Duration;

use rustix::process::{Signal, kill_process};

use bench::{Bench, READY, ends, image, lives, mounts, pid, said};

#[test]
fn guests_go_on_over_many_upgrades() {
    // What the server is told of the disk, beside its format.
    for (name, more) in [
        ("raw", "-f raw"),
        ("qcow2", "-f qcow2"),
        ("vpc", "-f vpc"),
        ("luks", "-f luks --secret file:key"),
        ("encrypted", "-f qcow2 --secret file:key"),
    ] {
        let mut bench = Bench::new();
        let file = image(&bench, name);
        let line = format!(
            "serve --control unix:c.sock --pid-file pid {file} {more} --vhost-user vu.sock"
        );
        let manager = UnixDatagram::bind(bench.path("notify")).expect("a socket");
        let (mut first, mut server) = bench.serve(&line);
        let load = bench.load("vu.sock", 4);
        std::thread::sleep(Duration::from_secs(1));
        for by_signal in [false, true, false] {
            let of = if by_signal { server.to_string() } else { "unix:c.sock".to_owned() };
            let next = bench.upgrade(&of);
            assert_ne!(next, server);
            if server == first.id() {
                assert!(first.wait().expect("it ends").success(), "{}", bench.log());
            }
            ends(server);
            server = next;
            assert_eq!(
                fs::read_to_string(bench.path("pid")).expect("it is written").trim(),
                server.to_string()
            );
            std::thread::sleep(Duration::from_millis(300));
        }
        bench.verified(load);
        // The service manager is told which process is the unit's.
        manager.set_nonblocking(true).expect("its flags");
        let mut told = String::new();
        let mut message = [0; 4096];
        while let Ok(len) = manager.recv(&mut message) {
            told += &String::from_utf8_lossy(&message[..len]);
            told += "\n";
        }
        assert!(told.contains(&format!("MAINPID={server}\n")), "{told}");
        assert!(told.matches("READY=1").count() == 4 && !told.contains("STOPPING"), "{told}");
        let same = bench.ends_with(&format!("upgrade {server} --if-changed"), 0);
        assert!(same.is_empty() && lives(server), "{same}");
        // What was written after the last of them outlives a kill, as ever.
        let load = bench.load("vu.sock", 1);
        bench.verified(load);
        let _ = kill_process(pid(server), Signal::TERM);
        ends(server);
        assert!(!bench.path("vu.sock").exists() && !bench.path("pid").exists());
        if let "qcow2" | "vpc" | "encrypted" = name {
            bench.ends_with(&format!("check {more} {file}"), 0);
        }
    }
}

#[test]
fn a_program_that_cannot_take_over_leaves_the_old_one_serving() {
    let mut bench = Bench::new();
    let file = image(&bench, "qcow2");
    let line = format!("serve --control unix:c.sock {file} -f qcow2 --vhost-user vu.sock");
    let (_child, server) = bench.serve(&line);
    let load = bench.load("vu.sock", 9);
    let channel = "exec 3>&\"${RINGTAP_HANDOVER#*:}\"";
    // Each in the place of the program; another that is named is refused to a server that is confined.
    for (name, text, timeout, why) in [
        ("crashes", "exit 3".to_owned(), 30, "status 3"),
        ("hangs", "exec sleep 60".to_owned(), 1, "after 1 s"),
        ("is none", String::new(), 30, "cannot start"),
        (
            "refuses",
            format!(
                "{channel}; printf '\\5\\0\\0\\0\\14\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0another kind' >&3; exec sleep 60"
            ),
            30,
            "another kind",
        ),
        // It says that it is ready, and ends when the disks stand still; or hangs then, past the deadline.
        ("ends", format!("{READY}; sleep 0.3; exit 4"), 30, "has ended"),
        ("stalls", format!("{READY}; exec sleep 60"), 1, "after 1 s"),
    ] {
        match text.is_empty() {
            true => fs::remove_file(bench.program()).expect("it is gone"),
            false => bench.install(&text),
        }
        let said = bench.ends_with(&format!("upgrade unix:c.sock --timeout {timeout}"), 1);
        assert!(said.contains(why), "{name}: {said}");
        assert!(lives(server), "{name}: {}", bench.log());
        std::thread::sleep(Duration::from_millis(200));
    }
    bench.verified(load);
    bench.install_again();
    // And then one that can.
    let load = bench.load("vu.sock", 3);
    std::thread::sleep(Duration::from_millis(500));
    let next = bench.upgrade("unix:c.sock");
    bench.verified(load);
    ends(server);
    // It is a server like any other: what it acknowledged is there after a kill.
    let load = bench.load("vu.sock", 30);
    std::thread::sleep(Duration::from_millis(500));
    let _ = kill_process(pid(next), Signal::KILL);
    let mut load = load;
    let _ = load.kill();
    let _ = load.wait();
    ends(next);
    bench.serve(&line);
    let load = bench.load("vu.sock", 1);
    bench.verified(load);
}

#[test]
fn nbd_clients_go_on_over_many_upgrades() {
    let mut bench = Bench::new();
    let (raw, qcow2) = (image(&bench, "raw"), image(&bench, "qcow2"));
    let line = format!(
        "serve --control unix:c.sock {raw} -f raw --name a --nbd unix:nbd.sock {qcow2} -f qcow2 --name b --nbd unix:nbd.sock"
    );
    let (_child, mut server) = bench.serve(&line);
    let loads = [bench.nbd_load("nbd.sock", "a", 4), bench.nbd_load("nbd.sock", "b", 4)];
    std::thread::sleep(Duration::from_secs(1));
    for _ in 0..3 {
        let next = bench.upgrade("unix:c.sock");
        ends(server);
        server = next;
        std::thread::sleep(Duration::from_millis(300));
    }
    bench.install("exit 1");
    let said = bench.ends_with("upgrade unix:c.sock", 1);
    assert!(said.contains("status 1"), "{said}");
    bench.install(&format!("{READY}; sleep 0.3"));
    let said = bench.ends_with("upgrade unix:c.sock", 1);
    assert!(said.contains("has ended"), "{said}");
    for load in loads {
        let output = load.wait_with_output().expect("it ends");
        assert!(output.status.success(), "{}\n{}", self::said(&output), bench.log());
    }
    assert!(lives(server), "{}", bench.log());
}

#[test]
fn what_has_come_at_run_time_goes_on() {
    let mut bench = Bench::new();
    for (name, format) in
        [("a.qcow2", "qcow2"), ("b.raw", "raw"), ("c.qcow2", "qcow2"), ("late.raw", "raw")]
    {
        bench.ends_with(&format!("create -q -f {format} {name} 64M"), 0);
    }
    fs::create_dir(bench.path("d")).expect("a folder");
    let (_child, mut server) = bench.serve("daemon --control unix:c.sock --disks d --persist");
    let own = |words: &str| format!("disk {words} --control unix:c.sock");
    bench.ends_with(&own("add a.qcow2 -f qcow2 --node-name a --vhost-user a.sock"), 0);
    bench.ends_with(&own("add b.raw -f raw --node-name b --nbd b --nbd-server unix:n.sock"), 0);
    let fuse = mounts();
    if fuse {
        bench.ends_with(&own("add c.qcow2 -f qcow2 --node-name c --fuse c.img"), 0);
    }
    bench.ends_with(&own("limit b --iops 4000"), 0);
    bench.ends_with(&own("checkpoint add a monday"), 0);
    bench.ends_with(&own("snapshot b b.qcow2"), 0);
    let loads = [bench.load("a.sock", 3), bench.nbd_load("n.sock", "b", 3)];
    std::thread::sleep(Duration::from_secs(1));
    let listed = |bench: &Bench| bench.ends_with(&own("list"), 0);
    let before = listed(&bench);
    // One that fails when all stand still has the same server go on with all of it.
    bench.install(&format!("{READY}; sleep 0.3"));
    bench.ends_with("upgrade unix:c.sock", 1);
    bench.install_again();
    for round in 0..2 {
        let next = bench.upgrade("unix:c.sock");
        ends(server);
        server = next;
        assert_eq!(listed(&bench), before, "{}", bench.log());
        assert!(bench.ends_with(&own("limit b"), 0).contains("iops-total 4000"));
        let noted = bench.ends_with(&own("checkpoint list a"), 0);
        assert!(noted.starts_with("monday: ") && noted.lines().count() == 1, "{noted}");
        assert!(!noted.contains(": 0 bytes") && !noted.contains("lost"), "{noted}");
        if fuse {
            let part = [round + 1; 4096];
            let file = fs::File::options().read(true).write(true).open(bench.path("c.img"));
            std::os::unix::fs::FileExt::write_all_at(&file.expect("the disk"), &part, 4096)
                .expect("written");
        }
    }
    bench.ends_with(&own("add late.raw -f raw --node-name late --vhost-user late.sock"), 0);
    for load in loads {
        let output = load.wait_with_output().expect("it ends");
        assert!(output.status.success(), "{}\n{}", said(&output), bench.log());
    }
    // Another program would end by the signal.
    let refused = Command::new(bench::RINGTAP).args(["upgrade", "1"]).output().expect("it runs");
    assert!(
        !refused.status.success() && said(&refused).contains("no ringtap"),
        "{}",
        said(&refused)
    );
    let _ = kill_process(pid(server), Signal::TERM);
    ends(server);
    let left = ["a.sock", "n.sock", "c.sock", "late.sock"].map(|name| bench.path(name).exists());
    assert_eq!(left, [false; 4], "{}", bench.log());
    if fuse {
        assert!(!bench.path("c.img").exists(), "it was made for the mount");
        bench.ends_with("check -f qcow2 c.qcow2", 0);
    }
    bench.ends_with("check -f qcow2 a.qcow2", 0);
}

#[test]
fn what_would_be_another_disk_is_not_passed_on() {
    let mut bench = Bench::new();
    for name in ["a.raw", "b.raw"] {
        fs::File::create(bench.path(name)).and_then(|file| file.set_len(1 << 20)).expect("a file");
    }
    let shown = if mounts() { "--growable --fuse file" } else { "--nbd unix:n" };
    let (_child, first) = bench.serve(&format!("serve a.raw -f raw --control unix:c {shown}"));
    // One that is made larger by who writes is as good as any.
    let second = bench.upgrade("unix:c");
    ends(first);
    fs::rename(bench.path("b.raw"), bench.path("a.raw")).expect("another file is there");
    let why = bench.ends_with("upgrade unix:c", 1);
    assert!(why.contains("another file now"), "{why}");
    assert!(lives(second));
    // A program that has nothing to do at the signal would end by it.
    let sleeper = bench.path("ringtap");
    fs::copy("/bin/sleep", &sleeper).expect("a program");
    let mut other = Command::new(&sleeper).arg("60").spawn().expect("it begins");
    let why = bench.ends_with(&format!("upgrade {}", other.id()), 1);
    assert!(why.contains("restart it") && lives(other.id()), "{why}");
    other.kill().and_then(|()| other.wait()).expect("its end");
}
