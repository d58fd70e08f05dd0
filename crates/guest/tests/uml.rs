//! Real guests in User-Mode Linux.

mod common;

use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{
    SHORT, Server, appliance, empty_disk, members, random_disk, run_directory, wait_until,
};
use ringtap_guest::verify::{Filesystem, FioVerify, check_filesystem};
use ringtap_guest::{Appliance, Error, Machine, Root, Uml, standby};

const MIB: u64 = 1 << 20;

#[test]
fn data_goes_from_a_ubd_disk_to_a_vhost_user_disk_and_out_to_the_host() {
    let dir = tempfile::tempdir().unwrap();
    let (source, target) = (dir.path().join("an odd, name"), dir.path().join("target"));
    random_disk(&source, 8 * MIB);
    empty_disk(&target, 16 * MIB);
    let server = Server::start(&target, &dir.path().join("socket"));
    let share = dir.path().join("share");
    fs::create_dir(&share).unwrap();
    let guest = Uml::new(&appliance(Machine::Uml))
        .ubd(&source)
        .vhost_user(&server.socket)
        .share(&share, "/mnt/out")
        .boot()
        .unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(guest.disks(), ["/dev/ubda", "/dev/vda"]);
    let copy = "set -e
        dd if=/dev/ubda of=/dev/vda bs=1M seek=4 oflag=direct conv=fsync
        dd if=/dev/vda of=/mnt/out/back bs=1M skip=4 count=8 iflag=direct
        uname -r >/etc/only-in-the-guest";
    guest.exec(copy, SHORT).unwrap().success().unwrap_or_else(|e| panic!("{e}"));
    guest.shutdown(SHORT).unwrap();
    drop(server);
    let want = fs::read(&source).unwrap();
    let got = fs::read(&target).unwrap();
    assert!(got[4 * MIB as usize..12 * MIB as usize] == want, "the vhost-user disk's file differs");
    assert!(got[..4 * MIB as usize].iter().all(|&b| b == 0));
    assert!(fs::read(share.join("back")).unwrap() == want, "what came back differs");
    assert!(!fs::exists("/etc/only-in-the-guest").unwrap(), "a guest wrote to the host's root");
}

#[test]
fn commands_have_their_status_output_and_time() {
    let guest = Uml::new(&appliance(Machine::Uml)).boot().unwrap_or_else(|e| panic!("{e}"));
    let out = guest.exec("echo out; echo err >&2; exit 3", SHORT).unwrap();
    assert_eq!((out.status, &out.stdout[..], &out.stderr[..]), (3, "out\n", "err\n"));
    let error = out.success().unwrap_err();
    assert!(matches!(&error, Error::Failed { status: 3, .. }), "{error}");

    let slow = guest.exec("sleep 0.5", SHORT).unwrap();
    assert!(slow.elapsed >= Duration::from_millis(450), "{:?}", slow.elapsed);

    let big = guest.exec("seq 1 100000", SHORT).unwrap();
    assert_eq!(big.stdout.lines().count(), 100_000);
    assert!(big.stdout.ends_with("\n100000\n"));

    let script: String = (0..2000).map(|n| format!("echo {n}\n")).collect();
    assert_eq!(guest.exec(&script, SHORT).unwrap().stdout.lines().count(), 2000);

    let jobs: Vec<_> =
        (0..8).map(|n| guest.start(&format!("sleep 0.2; seq {n}000 {n}999")).unwrap()).collect();
    for (n, job) in jobs.into_iter().enumerate() {
        let (out, first) = (job.wait(SHORT).unwrap().stdout, format!("{n}000"));
        assert_eq!(out.lines().count(), 1000, "job {n}");
        assert_eq!(out.lines().next(), Some(if n == 0 { "0" } else { &first[..] }));
    }

    let started = Instant::now();
    let error = guest.exec("sleep 1000", Duration::from_millis(300)).unwrap_err();
    assert!(matches!(error, Error::Timeout { .. }), "{error}");
    assert!(started.elapsed() < SHORT);
    // It is killed, which takes the guest a moment.
    let still = || guest.exec("cat /proc/[0-9]*/comm | grep -c sleep; true", SHORT).unwrap();
    wait_until("the end of the command that took too long", || still().stdout.trim() == "0");

    let job = guest.start("sleep 1000").unwrap();
    assert!(!job.is_done());
    std::thread::sleep(Duration::from_millis(300));
    job.kill().unwrap();
    assert_eq!(job.wait(SHORT).unwrap().status, 137);
    // Also where the word to kill overtakes the job.
    let job = guest.start("sleep 1000").unwrap();
    job.kill().unwrap();
    assert_eq!(job.wait(SHORT).unwrap().status, 137);
    assert!(guest.cpu_time() > Duration::from_millis(100));
}

#[test]
fn a_program_that_stands_by_is_run_as_if_it_were_started() {
    let guest = Uml::new(&appliance(Machine::Uml)).boot().unwrap_or_else(|e| panic!("{e}"));
    let run = |script: &str| guest.exec(script, SHORT).unwrap();
    let started = run(&standby::start("fio"));
    assert_eq!(started.status, 0, "{}", started.stderr);
    let loaded = "cat /proc/[0-9]*/comm | grep -c '^fio'";
    assert_eq!(run(loaded).stdout.trim(), "1");

    // Its words, its output between other output, its status; several times.
    for _ in 0..2 {
        let script = format!(
            "echo before; {} >/tmp/to; echo \"status $?\"; {}; echo \"status $?\" >&2; cat /tmp/to",
            standby::call("fio --version"),
            standby::call("fio '--no such option'"),
        );
        let out = run(&script);
        let lines: Vec<&str> = out.stdout.lines().collect();
        assert_eq!(lines[..2], ["before", "status 0"], "{out:?}");
        assert!(out.stdout.trim_end().lines().last().unwrap().starts_with("fio-"), "{out:?}");
        assert!(
            out.stderr.contains("no such option") && out.stderr.contains("status 1"),
            "{out:?}"
        );
    }

    // A call that is killed takes its child with it, and the next one is heard.
    let endless = "fio --name=a --ioengine=null --size=1g --time_based --runtime=600 --thread";
    let job = guest.start(&standby::call(endless)).unwrap();
    let count = || run(loaded).stdout.trim().to_owned();
    wait_until("a child", || count() == "2");
    job.kill().unwrap();
    job.wait(SHORT).unwrap();
    wait_until("the child's end", || count() == "1");
    assert!(run(&standby::call("fio --version")).stdout.starts_with("fio-"));

    // Also where others wait already: each has its own answer.
    let job = guest.start(&standby::call(endless)).unwrap();
    wait_until("a child", || count() == "2");
    let next: Vec<_> = ["fio --version", "fio '--no such option'", "fio --version"]
        .map(|line| guest.start(&standby::call(line)).unwrap())
        .into();
    let waiting = "cat /proc/[0-9]*/comm | grep -c ringtap-standby";
    wait_until("who waits", || run(waiting).stdout.trim() == "4");
    job.kill().unwrap();
    job.wait(SHORT).unwrap();
    let said: Vec<_> = next.into_iter().map(|job| job.wait(SHORT).unwrap()).collect();
    assert_eq!(said.iter().map(|said| said.status).collect::<Vec<_>>(), [0, 1, 0], "{said:?}");
    assert!([0, 2].iter().all(|n| said[*n].stdout.starts_with("fio-")), "{said:?}");

    // The caller's files and directory are the program's, and its words need not be short.
    let long = format!("fio --name={} --parse-only --output=/dev/stdout", "a".repeat(9000));
    for line in [long.clone(), format!("{long} {}", "--name=b ".repeat(200))] {
        assert_eq!(run(&standby::call(&line)).status, 0);
    }
    let here =
        "mkdir -p /tmp/here && cd /tmp/here && printf '[a]\\nioengine=null\\nsize=4k\\n' >job";
    let out =
        run(&format!("{here} && {} <job && {}", standby::call("fio -"), standby::call("fio job")));
    assert_eq!(out.stdout.matches("err= 0").count(), 2, "{out:?}");

    // Who stands by is gone: that is said, or it is started anew.
    let job = guest.start(&standby::call(endless)).unwrap();
    wait_until("a child", || count() == "2");
    run("kill -9 $(grep -l '^fio' /proc/[0-9]*/comm | cut -d/ -f3)");
    assert_eq!(job.wait(SHORT).unwrap().status, 126);
    assert!(run(&standby::call("fio --version")).stdout.starts_with("fio-"));

    // What does not stand by is started.
    assert_eq!(run(&standby::call("echo 'as it is'")).stdout, "as it is\n");
}

#[test]
fn a_killed_guest_leaves_nothing() {
    let guest = Uml::new(&appliance(Machine::Uml)).boot().unwrap_or_else(|e| panic!("{e}"));
    let pid = guest.pid();
    let files = run_directory(pid);
    let _busy = guest.start("while :; do echo x >/tmp/x; done").unwrap();
    assert!(members(pid).len() > 1 && files.is_dir());
    let started = Instant::now();
    drop(guest);
    assert!(started.elapsed() < SHORT, "{:?}", started.elapsed());
    assert_eq!(members(pid), Vec::<String>::new());
    assert!(!files.exists());
}

#[test]
// Clippy of Rust 1.85: whoever panics before the wait ends the whole process.
#[allow(clippy::zombie_processes)]
fn a_guest_dies_with_the_process_that_booted_it() {
    const OWNER: &str = "RINGTAP_TEST_OWNS_A_GUEST";
    const NAME: &str = "a_guest_dies_with_the_process_that_booted_it";
    if std::env::var_os(OWNER).is_some() {
        let guest = Uml::new(&appliance(Machine::Uml)).boot().unwrap();
        let _job = guest.start("sleep 600").unwrap();
        // User-Mode Linux may miss the end of a stream that comes together with its last words.
        guest.exec("true", common::LONG).unwrap();
        println!("pid {}", guest.pid());
        std::thread::sleep(common::LONG);
        return;
    }
    let marker = tempfile::NamedTempFile::new().unwrap();
    let mut owner = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", NAME, "--nocapture"])
        .env(OWNER, "1")
        .stdout(marker.reopen().unwrap())
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let pid = || {
        let text = fs::read_to_string(marker.path()).unwrap();
        let line = text.lines().find(|line| line.contains("pid "))?;
        line.split("pid ").nth(1)?.trim().parse::<u32>().ok()
    };
    wait_until("the guest", || pid().is_some());
    let pid = pid().unwrap();
    let files = run_directory(pid);
    assert!(!members(pid).is_empty());
    owner.kill().unwrap();
    owner.wait().unwrap();
    wait_until("the guest's end", || members(pid).is_empty());
    // Nobody was left to remove it.
    let _ = fs::remove_dir_all(files);
}

#[test]
fn what_is_written_under_load_reads_back() {
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("disk");
    empty_disk(&disk, 64 * MIB);
    let server = Server::start(&disk, &dir.path().join("socket"));
    let boot = || {
        let uml = Uml::new(&appliance(Machine::Uml)).vhost_user(&server.socket);
        uml.boot().unwrap_or_else(|e| panic!("{e}"))
    };
    let load = FioVerify::new("/dev/vda").size(32 * MIB).flush_every(64);
    let guest = boot();
    let done = load.run(&guest, SHORT).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!((done.writes, done.reads), (8192, 8192));
    guest.shutdown(SHORT).unwrap();

    // A new guest, and one broken block.
    let guest = boot();
    let checked = load.check(&guest, SHORT).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(checked.reads, 8192);
    let harm = "dd if=/dev/urandom of=/dev/vda bs=4k seek=1000 count=1 oflag=direct";
    guest.exec(harm, SHORT).unwrap().success().unwrap();
    let error = load.check(&guest, SHORT).unwrap_err();
    assert!(error.to_string().contains("verify"), "{error}");

    check_filesystem(&guest, "/dev/vda", Filesystem::Ext4, 12, SHORT)
        .unwrap_or_else(|e| panic!("{e}"));
}

/// User-Mode Linux has no way back to a vhost-user server; the crate's documentation says so.
#[test]
fn a_dead_server_takes_its_disk_with_it_and_the_guest_lives_on() {
    let dir = tempfile::tempdir().unwrap();
    let (disk, socket) = (dir.path().join("disk"), dir.path().join("socket"));
    empty_disk(&disk, 16 * MIB);
    let server = Server::start(&disk, &socket);
    let uml = Uml::new(&appliance(Machine::Uml)).vhost_user(&socket);
    let guest = uml.boot().unwrap_or_else(|e| panic!("{e}"));
    server.kill();
    let gone = || guest.exec("[ ! -e /dev/vda ]", SHORT).unwrap().status == 0;
    wait_until("the removal of the disk", gone);
    let _again = Server::start(&disk, &socket);
    std::thread::sleep(Duration::from_secs(1));
    assert!(gone(), "this User-Mode Linux does connect again: correct the documentation");
}

#[test]
fn a_packed_root_holds_only_what_was_named() {
    let appliance = Appliance::builder(Machine::Uml)
        .root(Root::Packed)
        .programs(["mke2fs"])
        .file("/etc/hostname", "/etc/given")
        .build(&Appliance::default_cache())
        .unwrap();
    let guest = Uml::new(&appliance).boot().unwrap_or_else(|e| panic!("{e}"));
    let script = "mke2fs -V 2>&1; cat /etc/given; command -v fio || echo no fio; seq 3";
    let out = guest.exec(script, SHORT).unwrap().success().unwrap().stdout;
    let given = fs::read_to_string("/etc/hostname").unwrap();
    assert!(out.contains("mke2fs 1."), "{out}");
    assert!(out.ends_with(&format!("{given}no fio\n1\n2\n3\n")), "{out}");
}

#[test]
fn a_guest_that_cannot_boot_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("nobody listens");
    let error = Uml::new(&appliance(Machine::Uml)).vhost_user(&missing).boot().err().unwrap();
    assert!(error.to_string().contains("nobody listens"), "{error}");

    // A socket whose server has died.
    drop(std::os::unix::net::UnixListener::bind(&missing).unwrap());
    let error = Uml::new(&appliance(Machine::Uml)).vhost_user(&missing).boot().err().unwrap();
    let text = error.to_string();
    assert!(text.contains("no /dev/vda") && text.contains("start it before the guest"), "{text}");
}
