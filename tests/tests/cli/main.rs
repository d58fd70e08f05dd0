//! The program as its users meet it: the command line, sockets, signals, locks.
//!
//! Every program that a test runs has a time to end in and dies with the test; where one is missing
//! the test fails with the name of the package that brings it.

mod beside;
mod bitmaps;
mod compare;
mod daily;
mod elsewhere;
mod front_ends;
mod known_format;
mod luks;
mod messages;
mod named_files;
mod nbd;
mod program;
mod ready;
mod served;
mod told;

use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use ringtap_tests::{listens, ringtap};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::program::{Output, Running, program, python};
use crate::served::{Server, command};

fn folder() -> TempDir {
    tempfile::tempdir().expect("a folder")
}

fn disk(folder: &Path, name: &str, size: u64) {
    File::create(folder.join(name)).and_then(|file| file.set_len(size)).expect("a sparse file");
}

fn run(folder: &Path, words: &str) -> Output {
    let mut command = Command::new(ringtap());
    command.current_dir(folder).args(words.split_whitespace());
    Running::start(command).wait()
}

fn nbdinfo(words: &[&str]) -> Output {
    let mut command = program("nbdinfo", "libnbd-bin");
    command.args(words);
    Running::start(command).wait()
}

fn qemu_io(folder: &Path, image: &str, order: &str) -> Running {
    let mut command = program("qemu-io", "qemu-utils");
    command.current_dir(folder).args(["-f", "raw", "-c", order, image]);
    Running::start(command)
}

#[test]
fn nbd_clients_see_the_disk_and_what_they_write_is_in_the_file() {
    let dir = folder();
    disk(dir.path(), "a.raw", 8 << 20);
    let server = Server::start(dir.path(), "a.raw -f raw --nbd unix:a.sock");
    let facts: Value =
        serde_json::from_str(&nbdinfo(&["--json", &server.uri(0)]).ok()).expect("JSON");
    let export = &facts["exports"][0];
    assert_eq!(export["export-size"], 8 << 20);
    assert_eq!(export["is_read_only"], false);
    let wrote = qemu_io(dir.path(), &server.uri(0), "write -P 0x5a 1M 64k").wait().ok();
    assert!(wrote.contains("wrote 65536/65536"), "{wrote}");
    server.stop().ok();
    let bytes = fs::read(dir.path().join("a.raw")).expect("the image");
    assert!(bytes[1 << 20..][..64 << 10].iter().all(|byte| *byte == 0x5a));
    assert!(bytes[..1 << 20].iter().all(|byte| *byte == 0));
}

#[test]
fn two_disks_share_a_port_and_each_has_its_own_options() {
    let dir = folder();
    disk(dir.path(), "a.raw", 1 << 20);
    disk(dir.path(), "b.raw", 2 << 20);
    let server = Server::start(
        dir.path(),
        "a.raw -f raw --name a --nbd unix:ab.sock \
         b.raw -f raw --name b --read-only --nbd unix:ab.sock --nbd tcp:127.0.0.1:0",
    );
    let size = |uri: &str| nbdinfo(&["--size", uri]).ok().trim().to_owned();
    assert_eq!(size(&server.uri(0)), "1048576");
    assert_eq!(size(&server.uri(1)), "2097152");
    let tcp = server.facts["disks"][1]["nbd"][1]["uri"].as_str().expect("a TCP address");
    assert_eq!(size(tcp), "2097152");
    let other = tcp.replace("/b", "/a");
    assert!(!nbdinfo(&["--size", &other]).status.success(), "a is not at that port");
    qemu_io(dir.path(), &server.uri(0), "write 0 4k").wait().ok();
    let refused = qemu_io(dir.path(), &server.uri(1), "write 0 4k").wait();
    assert!(!refused.status.success(), "b is read-only: {}", refused.stdout);
    let list: Value =
        serde_json::from_str(&nbdinfo(&["--json", "--list", tcp]).ok()).expect("JSON");
    assert_eq!(list["exports"].as_array().expect("a list").len(), 1);
    server.stop().ok();
}

#[test]
fn sigterm_ends_requests_and_removes_what_was_made() {
    let dir = folder();
    disk(dir.path(), "a.raw", 256 << 20);
    let server = Server::start(
        dir.path(),
        "a.raw -f raw --nbd unix:a.sock --vhost-user v.sock --pid-file pid",
    );
    let pid = fs::read_to_string(dir.path().join("pid")).expect("the pid file");
    assert_eq!(server.facts["pid"].to_string(), pid.trim());
    // 64 writes are sent before the first answer is looked at. Each is answered, or the connection
    // ends with an error; one acknowledged must be in the file.
    let text = "import nbd, sys\n\
        h = nbd.NBD(); h.connect_uri(sys.argv[1])\n\
        buffers = [nbd.Buffer.from_bytearray(bytearray([i + 1]) * 65536) for i in range(64)]\n\
        cookies = [h.aio_pwrite(b, i * 65536) for i, b in enumerate(buffers)]\n\
        while not h.aio_command_completed(cookies[0]): h.poll(-1)\n\
        print('sent', flush=True); print(0)\n\
        try:\n\
        \x20   while h.aio_in_flight() > 0: h.poll(-1)\n\
        except nbd.Error: pass\n\
        for i, c in list(enumerate(cookies))[1:]:\n\
        \x20   try:\n\
        \x20       if h.aio_command_completed(c): print(i)\n\
        \x20   except nbd.Error: pass\n";
    let mut client = Running::start(python(text, &[&server.uri(0)]));
    client.until("sent", |it| it.stdout().contains("sent").then_some(()));
    // A client that stays connected and silent must not hold the server up.
    let idle = UnixStream::connect(dir.path().join("a.sock")).expect("a connection");
    server.stop().ok();
    drop(idle);
    let answered = client.wait().ok();
    let image = fs::read(dir.path().join("a.raw")).expect("the image");
    let places: Vec<usize> = answered.lines().filter_map(|line| line.parse().ok()).collect();
    assert_eq!(places.first(), Some(&0), "{answered}");
    for place in places {
        let block = &image[place * 65536..][..65536];
        assert!(block.iter().all(|byte| usize::from(*byte) == place + 1), "block {place}");
    }
    let left: Vec<_> = fs::read_dir(dir.path())
        .expect("the folder")
        .map(|entry| entry.expect("an entry").file_name())
        .collect();
    assert_eq!(left, ["a.raw"]);
}

#[test]
fn stop_returns_once_the_server_has_ended() {
    let dir = folder();
    disk(dir.path(), "a.raw", 1 << 20);
    let mut server = Server::start(dir.path(), "a.raw -f raw --nbd unix:a.sock");
    // Frozen, it cannot end: the signal waits for it.
    server.process().signal(Signal::STOP);
    let mut stop = Command::new(ringtap());
    stop.args(["stop", &server.facts["pid"].to_string()]);
    let mut stop = Running::start(stop);
    let status = format!("/proc/{}/status", server.facts["pid"]);
    stop.until("a signal that waits", |_| {
        let status = fs::read_to_string(&status).expect("a process");
        let waits = status.lines().find_map(|line| line.strip_prefix("ShdPnd:"))?;
        let waits = u64::from_str_radix(waits.trim(), 16).expect("a mask");
        (waits & 1 << (Signal::TERM.as_raw() - 1) != 0).then_some(())
    });
    std::thread::sleep(Duration::from_millis(300));
    assert!(!stop.ended(), "the server is still there");
    server.process().signal(Signal::CONT);
    stop.wait().ok();
    assert!(!dir.path().join("a.sock").exists(), "the server is still there");
    server.wait().ok();
    // This test is a process, and none of Ringtap's.
    let refused = run(dir.path(), &format!("stop {}", std::process::id()));
    assert!(!refused.status.success(), "{}", refused.stderr);
    assert!(refused.stderr.contains("and no ringtap"), "{}", refused.stderr);
}

#[test]
fn the_second_signal_ends_it_at_once() {
    let dir = folder();
    let mut server = Server::start(dir.path(), "null:64M --nbd unix:a.sock");
    // A client that takes no replies (simple ones, with every zero in them): the server waits for it,
    // for ten seconds at most.
    let text = "import nbd, sys, time\n\
        h = nbd.NBD(); h.set_request_structured_replies(False); h.connect_uri(sys.argv[1])\n\
        buffers = [nbd.Buffer(1 << 20) for i in range(64)]\n\
        for b in buffers: h.aio_pread(b, 0)\n\
        while h.aio_get_direction() & nbd.AIO_DIRECTION_WRITE: h.aio_notify_write()\n\
        print('sent', flush=True); time.sleep(60)\n";
    let mut client = Running::start(python(text, &[&server.uri(0)]));
    client.until("sent", |it| it.stdout().contains("sent").then_some(()));
    server.process().signal(Signal::TERM);
    server.process().until("word of stopping", |it| it.stderr().contains("stopping").then_some(()));
    server.process().signal(Signal::INT);
    let ended = server.wait();
    assert_eq!(ended.status.code(), Some(130), "{}", ended.stderr);
}

#[test]
fn a_second_writer_is_refused_and_told_of_the_first() {
    let dir = folder();
    disk(dir.path(), "a.raw", 1 << 20);
    let mut server = Server::start(dir.path(), "a.raw -f raw --nbd unix:a.sock");
    let who = format!("process {} (ringtap)", server.process().pid());
    let said = run(dir.path(), "serve a.raw -f raw --nbd unix:b.sock").failed(1);
    assert!(said.contains(&who), "{said}");
    let said = run(dir.path(), "serve a.raw -f raw --read-only --nbd unix:b.sock").failed(1);
    assert!(said.contains(&who), "a reader beside a writer: {said}");
    assert!(!dir.path().join("b.sock").exists());
    let info = run(dir.path(), "info a.raw").ok();
    assert!(info.contains(&who), "{info}");

    let said = qemu_io(dir.path(), "a.raw", "write 0 4k").wait().failed(1);
    assert!(said.contains("lock"), "{said}");
    let mut resize = program("qemu-img", "qemu-utils");
    resize.current_dir(dir.path()).args(["resize", "-f", "raw", "a.raw", "2M"]);
    let said = Running::start(resize).wait().failed(1);
    assert!(said.contains("lock"), "{said}");
    let mut nbd = program("qemu-nbd", "qemu-utils");
    nbd.current_dir(dir.path()).args(["-f", "raw", "-k"]).arg(dir.path().join("q.sock"));
    nbd.arg("a.raw");
    let said = Running::start(nbd).wait().failed(1);
    assert!(said.contains("lock"), "{said}");
    server.stop().ok();
    qemu_io(dir.path(), "a.raw", "write 0 4k").wait().ok();
}

#[test]
fn an_image_that_qemu_writes_is_refused_and_qemu_named() {
    let dir = folder();
    disk(dir.path(), "a.raw", 1 << 20);
    let mut nbd = program("qemu-nbd", "qemu-utils");
    nbd.current_dir(dir.path()).args(["-f", "raw", "-t", "-k"]).arg(dir.path().join("q.sock"));
    nbd.arg("a.raw");
    let mut qemu = Running::start(nbd);
    qemu.until("socket", |_| UnixStream::connect(dir.path().join("q.sock")).ok());
    for words in ["", " --read-only"] {
        let line = format!("serve a.raw -f raw --nbd unix:a.sock{words}");
        let said = run(dir.path(), &line).failed(1);
        assert!(said.contains(&format!("process {} (qemu-nbd)", qemu.pid())), "{said}");
    }
    let facts: Value =
        serde_json::from_str(&run(dir.path(), "info a.raw --output json").ok()).expect("JSON");
    assert_eq!(facts["lock"]["state"], "held");
    assert_eq!(facts["virtual-size"], 1 << 20);
    drop(qemu);

    let mut writer = qemu_io(dir.path(), "a.raw", "sleep 60000");
    writer.until("lock", |it| {
        let locks = fs::read_to_string("/proc/locks").unwrap_or_default();
        let inode = fs::metadata(dir.path().join("a.raw")).expect("the image").ino();
        let _ = it;
        locks.contains(&format!(":{inode} ")).then_some(())
    });
    let said = run(dir.path(), "serve a.raw -f raw --nbd unix:a.sock").failed(1);
    assert!(said.contains("(qemu-io)"), "{said}");
}

/// Takes root, as whom it starts a server of somebody else.
#[test]
fn a_holder_that_cannot_be_seen_is_told_how_to_find() {
    let dir = folder();
    disk(dir.path(), "a.raw", 1 << 20);
    // Where the binary lies others may have no access.
    fs::copy(ringtap(), dir.path().join("ringtap")).expect("a copy");
    let all = fs::Permissions::from_mode(0o777);
    fs::set_permissions(dir.path(), all.clone()).expect("it is ours");
    fs::set_permissions(dir.path().join("a.raw"), all).expect("it is ours");
    let server = Server::start(dir.path(), "a.raw -f raw --nbd unix:a.sock");
    let mut nobody = program("setpriv", "util-linux");
    nobody.current_dir(dir.path()).args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
    nobody.args("./ringtap serve a.raw -f raw --nbd unix:b.sock".split_whitespace());
    let said = Running::start(nobody).wait().failed(1);
    assert!(said.contains("not visible here") && said.contains("lsof a.raw"), "{said}");
    assert!(said.contains("waiting up to 15s"), "{said}");
    server.stop().ok();
}

#[test]
fn readers_share_an_image_and_keep_writers_off() {
    let dir = folder();
    disk(dir.path(), "a.raw", 1 << 20);
    let first = Server::start(dir.path(), "a.raw -f raw --read-only --nbd unix:a.sock");
    let second = Server::start(dir.path(), "a.raw -f raw --read-only --nbd unix:b.sock");
    let said = run(dir.path(), "serve a.raw -f raw --nbd unix:c.sock").failed(1);
    assert!(said.contains("(ringtap)"), "{said}");
    let said = qemu_io(dir.path(), "a.raw", "write 0 4k").wait().failed(1);
    assert!(said.contains("lock"), "{said}");
    first.stop().ok();
    second.stop().ok();
}

#[test]
fn the_socket_of_a_killed_server_is_replaced_and_that_of_a_live_one_left() {
    let dir = folder();
    let words = "null:1M --nbd unix:a.sock --vhost-user v.sock";
    Server::start(dir.path(), words).kill();
    assert!(dir.path().join("a.sock").exists(), "a killed server removes nothing");
    let mut server = Server::start(dir.path(), words);
    let said = run(dir.path(), "serve null:1M --nbd unix:a.sock").failed(1);
    assert!(said.contains(&format!("process {}", server.process().pid())), "{said}");
    assert_eq!(nbdinfo(&["--size", &server.uri(0)]).ok().trim(), "1048576");
    server.stop().ok();
    fs::write(dir.path().join("a.sock"), "precious").expect("a file");
    let said = run(dir.path(), "serve null:1M --nbd unix:a.sock").failed(1);
    assert!(said.contains("not a socket"), "{said}");
    assert!(dir.path().join("a.sock").exists());
}

#[test]
fn sockets_are_private_unless_asked_otherwise() {
    let dir = folder();
    let mode = |name: &str| {
        fs::metadata(dir.path().join(name)).expect("the socket").permissions().mode() & 0o777
    };
    let server = Server::start(dir.path(), "null:1M --nbd unix:a.sock --vhost-user v.sock");
    assert_eq!((mode("a.sock"), mode("v.sock")), (0o600, 0o600));
    server.stop().ok();
    let server = Server::start(dir.path(), "null:1M --nbd unix:a.sock --socket-mode 666");
    assert_eq!(mode("a.sock"), 0o666, "whatever the umask");
    server.stop().ok();
}

#[test]
fn wrong_command_lines_say_what_to_write() {
    let dir = folder();
    disk(dir.path(), "a.raw", 1 << 20);
    for (words, said) in [
        ("", "Usage"),
        ("serve", "DISK"),
        ("serve a.raw", "--nbd unix:PATH, --vhost-user PATH"),
        ("serve a.raw --nbd unix:a.sock", "-f raw"),
        ("serve a.raw -f raw --nbd a.sock", "unix:PATH"),
        ("serve a.raw -f raw --nbd unix:a.sock --cache none --cache unsafe", "given twice"),
        ("serve a.raw -f raw --cache fast --nbd unix:a.sock", "writethrough"),
        ("serve a.raw -f raw --nbd unix:a.sock --log ringtap=loud", "known are off"),
        ("serve null:much --nbd unix:a.sock", "null:10G"),
        ("serve null:1M --nbd unix:a null:2M --nbd unix:a", "its own --name"),
        ("serve null:1M --vhost-user v --serial 123456789012345678901", "at most 20"),
        ("serve null:1M --nbd unix:a.sock --queues 2", "--vhost-user"),
        ("serve null:1M --vhost-user v --bitmap b", "--bitmap is for NBD"),
        ("serve null:1M --nbd unix:a --logical-block-size 4096", "is for --vhost-user and --ublk"),
        ("serve null:1M --vhost-user v --logical-block-size 4k", "--logical-block-size"),
        ("serve null:1M --vhost-user v --logical-block-size 8192", "2048 or 4096"),
        ("serve null:4608 --vhost-user v --logical-block-size 4096", "not whole sectors"),
        ("info", "DISK"),
        ("compare --rounds none", "--rounds"),
    ] {
        let said_ = run(dir.path(), words).failed(2);
        assert!(said_.contains(said), "{words}: {said_}");
        assert!(!said_.starts_with("error:"), "{said_}");
    }
    for (words, said) in [
        ("serve b.raw -f raw --nbd unix:a.sock", "ringtap create -f"),
        ("serve . -f raw --nbd unix:a.sock", "is a directory"),
        ("serve a.raw -f raw --nbd unix:no/a.sock", "create its folder"),
        ("serve null:1M --nbd tcp:192.0.2.1:1", "no interface"),
        ("serve null:1M --nbd systemd", "nothing at all"),
        ("info b.raw", "No such file"),
        ("create -f qcow2 no/b.qcow2 1M", "cannot create no/b.qcow2"),
        ("convert -f raw a.raw -O qcow2 no/b.qcow2", "cannot create no/b.qcow2"),
    ] {
        let lines = run(dir.path(), words).failed(1);
        let reason = lines.lines().find(|line| line.starts_with("ringtap: "));
        assert!(reason.is_some_and(|line| line.contains(said)), "{words}: {lines}");
    }
    assert_eq!(fs::read_dir(dir.path()).expect("the folder").count(), 1, "nothing is left");
}

#[test]
fn info_tells_the_facts() {
    let dir = folder();
    disk(dir.path(), "a.raw", (1 << 30) + 100);
    let facts: Value =
        serde_json::from_str(&run(dir.path(), "info a.raw --output json").ok()).expect("JSON");
    assert_eq!(facts["format"], "raw");
    assert_eq!(facts["virtual-size"], (1 << 30) + 512);
    assert!(facts["actual-size"].as_u64().expect("a size") < 1 << 20);
    assert_eq!(facts["lock"]["state"], "free");
    assert_eq!(facts["looks-like"], Value::Null);
    let mut create = program("qemu-img", "qemu-utils");
    create.current_dir(dir.path()).args(["create", "-q", "-f", "qcow2", "b.qcow2", "1M"]);
    Running::start(create).wait().ok();
    let text = run(dir.path(), "info b.qcow2").ok();
    assert!(text.contains("file format: qcow2"), "{text}");
    let text = run(dir.path(), "info null:10G").ok();
    assert!(text.contains("10 GiB (10737418240 bytes)"), "{text}");
}

#[test]
fn sighup_takes_up_a_new_size() {
    let dir = folder();
    disk(dir.path(), "a.raw", 1 << 20);
    let mut server = Server::start(dir.path(), "a.raw -f raw --nbd unix:a.sock");
    let uri = server.uri(0);
    let size = || nbdinfo(&["--size", &uri]).ok().trim().to_owned();
    let file = File::options().write(true).open(dir.path().join("a.raw")).expect("the image");
    file.set_len(3 << 20).expect("grown");
    assert_eq!(size(), "1048576", "only when told");
    server.process().signal(Signal::HUP);
    server.process().until("word of the new size", |it| {
        it.stderr().contains("now 3145728 bytes").then_some(())
    });
    assert_eq!(size(), "3145728");
    qemu_io(dir.path(), &uri, "write 2M 1M").wait().ok();
    server.stop().ok();
}

#[test]
fn sigusr1_prints_what_was_served() {
    let dir = folder();
    let mut server = Server::start(dir.path(), "null:1M --name a --nbd unix:a.sock --log off");
    for order in ["write 0 4k", "write 8k 4k", "read 0 64k"] {
        qemu_io(dir.path(), &server.uri(0), order).wait().ok();
    }
    server.process().signal(Signal::USR1);
    let all: Value =
        server.process().until("statistics", |it| serde_json::from_str(&it.stderr()).ok());
    let disk = &all["stats"][0];
    assert_eq!(disk["name"], "a");
    assert_eq!(disk["write"]["ended"], 2);
    assert_eq!(disk["write"]["bytes"], 8192);
    assert!(disk["read"]["bytes"].as_u64().expect("bytes") >= 65536);
    assert_eq!(disk["read"]["failed"], 0);
    assert_eq!(disk["bounced_bytes"], 0);
    server.stop().ok();
}

#[test]
fn the_service_manager_is_told() {
    let dir = folder();
    let manager = UnixDatagram::bind(dir.path().join("notify")).expect("a socket");
    manager.set_read_timeout(Some(Duration::from_secs(30))).expect("a timeout");
    let next = || {
        let mut buffer = [0; 4096];
        let len = manager.recv(&mut buffer).expect("a message");
        String::from_utf8_lossy(&buffer[..len]).into_owned()
    };
    let mut serve = command(dir.path(), "null:1M --nbd unix:a.sock");
    serve.env("NOTIFY_SOCKET", dir.path().join("notify"));
    let mut server = Server::started(serve);
    // The broker tells all else.
    assert_eq!(next().trim(), "NOTIFYACCESS=all");
    assert!(next().contains("READY=1\n"));
    server.process().signal(Signal::HUP);
    let reloading = next();
    assert!(reloading.contains("RELOADING=1\n") && reloading.contains("MONOTONIC_USEC="));
    assert!(next().contains("READY=1\n"));
    server.stop().ok();
    assert!(next().contains("STOPPING=1\n"));
}

#[test]
fn a_socket_handed_over_by_systemd_is_served() {
    let dir = folder();
    let socket = dir.path().join("a.sock");
    let mut activate = program("systemd-socket-activate", "systemd");
    activate.current_dir(dir.path()).arg("-l").arg(&socket).arg(ringtap());
    activate.args(["serve", "null:3M", "--nbd", "systemd", "--output", "json"]);
    let mut server = Running::start(activate);
    server.until("socket", |_| listens(&socket).then_some(()));
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    assert_eq!(nbdinfo(&["--size", &uri]).ok().trim(), "3145728");
    let facts: Value = server.until("ready line", |it| serde_json::from_str(&it.stdout()).ok());
    assert_eq!(facts["disks"][0]["nbd"][0]["uri"], uri.as_str());
    server.signal(Signal::TERM);
    server.wait().ok();
    assert!(socket.exists(), "systemd made it, systemd removes it");
}

#[test]
fn sockets_handed_over_go_by_their_names() {
    let dir = folder();
    let (a, b, v) = (dir.path().join("a"), dir.path().join("b"), dir.path().join("v"));
    let mut activate = program("systemd-socket-activate", "systemd");
    activate.arg("-l").arg(&a).arg("-l").arg(&b).arg("-l").arg(&v).arg("--fdname=one:two:guest");
    activate.arg(ringtap()).args(["serve", "--output", "json"]);
    activate.args([
        "null:1M",
        "--name",
        "two",
        "--nbd",
        "systemd",
        "--vhost-user",
        "systemd:guest",
    ]);
    activate.args(["null:2M", "--name", "one", "--nbd", "systemd"]);
    let mut server = Running::start(activate);
    server.until("sockets", |_| [&a, &b, &v].iter().all(|path| listens(path)).then_some(()));
    let size = |socket: &Path, name: &str| {
        let uri = format!("nbd+unix:///{name}?socket={}", socket.display());
        nbdinfo(&["--size", &uri]).ok().trim().to_owned()
    };
    assert_eq!(size(&a, "one"), "2097152");
    assert_eq!(size(&b, "two"), "1048576");
    let facts: Value = server.until("ready line", |it| serde_json::from_str(&it.stdout()).ok());
    assert_eq!(facts["disks"][0]["vhost_user"][0], v.to_str().expect("UTF-8"));
    server.signal(Signal::TERM);
    server.wait().ok();
}

#[test]
fn what_systemd_hands_over_must_be_what_was_asked_for() {
    let dir = folder();
    let (socket, _listener) = (dir.path().join("a"), UnixListener::bind(dir.path().join("x")));
    let mut activate = program("systemd-socket-activate", "systemd");
    activate.arg("-l").arg(&socket).arg("--fdname=one").arg(ringtap());
    activate.args(["serve", "null:1M", "--nbd", "systemd:two"]);
    let mut server = Running::start(activate);
    server.until("socket", |_| listens(&socket).then_some(()));
    let _knock = UnixStream::connect(&socket).expect("a connection starts it");
    let said = server.wait().failed(1);
    assert!(said.contains("no socket named \"two\"") && said.contains("\"one\""), "{said}");
}

#[test]
fn vhost_user_serves_a_driver_written_elsewhere() {
    let dir = folder();
    disk(dir.path(), "a.raw", 16 << 20);
    let server = Server::start(dir.path(), "a.raw -f raw --vhost-user v.sock --queues 1");
    let socket = dir.path().join("v.sock");
    let load = ["--rw", "randwrite", "--verify", "--seconds", "0.3", "--output", "json"];
    let load = [&["load", "--socket", socket.to_str().expect("plain")], &load[..]].concat();
    for turn in 0..2 {
        let told = ringtap_tests::lab_of(&load).stdout;
        let outcome: Value = serde_json::from_slice(&told).expect("JSON");
        assert_eq!(outcome["errors"], 0, "turn {turn}");
        assert_eq!(outcome["verify"]["mismatches"], 0);
        assert!(outcome["ios"].as_u64() > Some(0), "{outcome}");
    }
    server.stop().ok();
}

#[test]
fn an_idle_disk_takes_little_memory() {
    let dir = folder();
    disk(dir.path(), "a.raw", 1 << 30);
    let mut server =
        Server::start(dir.path(), "a.raw -f raw --nbd unix:a.sock --vhost-user v.sock");
    let status = format!("/proc/{}/status", server.process().pid());
    let status = fs::read_to_string(status).expect("its status");
    let kib = |key: &str| -> u64 {
        let line = status.lines().find(|line| line.starts_with(key)).expect("a line");
        line.split_whitespace().nth(1).and_then(|word| word.parse().ok()).expect("a number")
    };
    // Text of the binary comes and goes with the page cache, and is large without optimisation.
    let own = kib("RssAnon:") + kib("RssShmem:");
    assert!(own < 4096, "{own} KiB");
    server.stop().ok();
}
