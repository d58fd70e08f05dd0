//! Disks whose images lie where there is no space left.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::thread;
use std::time::{Duration, Instant};

use ringtap_tests::{Control, Server, SetUp, file_system_of, ok, plain, ringtap};
use serde_json::json;

const MIB: u64 = 1 << 20;

/// A file system with room for 12 MiB of an image, until something else goes.
#[test]
fn requests_that_find_no_room_wait_until_there_is_some() {
    for (format, on) in
        [("raw", "tmpfs"), ("qcow2", "tmpfs"), ("vpc", "tmpfs"), ("raw", "ext4"), ("qcow2", "ext4")]
    {
        let set_up = file_system_of(32, on, &["mkfs.ext4", "-q", "-m", "0"], "e2fsprogs");
        let folder = set_up.folder();
        let (image, ballast) = (folder.join("a.img"), folder.join("ballast"));
        ok(
            ringtap().to_str().expect("plain"),
            "ringtap",
            &["create", "-q", "-f", format, plain(&image), "64M"],
        );
        let free = rustix::fs::statvfs(folder).expect("its space");
        let free = free.f_bavail * free.f_frsize;
        let keep = 12 * MIB;
        assert!(free > keep, "{free}");
        let filler = vec![1; (free - keep) as usize];
        fs::write(&ballast, filler).expect("the ballast");
        // Not in the full one.
        let dir = tempfile::tempdir().expect("a folder");
        let [nbd, control] = ["n", "c"].map(|name| dir.path().join(name));
        let sockets = [format!("unix:{}", nbd.display()), format!("unix:{}", control.display())];
        let args = [plain(&image), "-f", format, "--name", "a", "--cache", "writeback"];
        let server = Server::start(args.iter().copied().chain([
            "--nbd",
            &sockets[0],
            "--control",
            &sockets[1],
        ]));
        let mut client = Control::open(&control);
        let uri = format!("nbd+unix:///a?socket={}", nbd.display());
        let io = |commands: &[&str]| {
            let commands = commands.iter().flat_map(|one| ["-c", one]);
            let args: Vec<&str> =
                ["-f", "raw"].into_iter().chain(commands).chain([&*uri]).collect();
            let said = ok("qemu-io", "qemu-utils", &args);
            assert!(!said.contains("failed") && !said.contains("rror"), "{said}");
        };
        thread::scope(|scope| {
            let writer = scope.spawn(|| io(&["write -P 7 0 20M", "flush", "read -P 7 0 20M"]));
            let (name, told) = client.event();
            assert_eq!((&*name, &told["node-name"]), ("BLOCK_IO_ERROR", &json!("a")), "{told}");
            assert_eq!(
                (&told["nospace"], &told["action"]),
                (&json!(true), &json!("stop")),
                "{told}"
            );
            // Nothing is there yet: it waits again, and says so again.
            client.ok("__ringtap_resume", json!({ "node-name": "a" }));
            assert_eq!(client.event().0, "BLOCK_IO_ERROR");
            thread::sleep(Duration::from_millis(100));
            assert!(!writer.is_finished());
            let state = &client.ok("query-blockstats", json!({}))[0]["__ringtap_state"];
            assert!(state["waiting_for_room"].as_u64() > Some(0), "{state}");
            fs::remove_file(&ballast).expect("removed");
            let control = format!("unix:{}", control.display());
            let verb = ["disk", "resume", "a", "--control", &control];
            ok(ringtap().to_str().expect("plain"), "ringtap", &verb);
            writer.join().expect("it is written");
        });
        server.stop();
        if format == "qcow2" {
            ok("qemu-img", "qemu-utils", &["check", "-q", plain(&image)]);
        }
    }
}

/// The disk goes on where there is room: what waits for some is tried there, and nobody has to say so.
#[test]
fn requests_that_wait_for_room_go_on_where_the_disk_does() {
    for way in ["snapshot", "mirror"] {
        let set_up = file_system_of(32, "tmpfs", &[], "");
        let image = set_up.folder().join("a.img");
        fs::File::create(&image).and_then(|file| file.set_len(64 * MIB)).expect("a file");
        fs::write(set_up.folder().join("ballast"), vec![1; 24 << 20]).expect("the ballast");
        let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
        let [nbd, socket, other] = ["n", "c", "b.qcow2"].map(|name| dir.path().join(name));
        let [at, control] = [&nbd, &socket].map(|path| format!("unix:{}", path.display()));
        let args = ["-f", "raw", "--node-name", "a", "--cache", "writeback", "--name", "a"];
        let more = ["--nbd", &at, "--control", &control];
        let server = Server::start([plain(&image)].iter().chain(&args).chain(&more).copied());
        let mut client = Control::open(&socket);
        let uri = format!("nbd+unix:///a?socket={}", nbd.display());
        let writer = thread::spawn(move || {
            let args = ["-f", "raw", "-c", "write -P 5 0 20M", "-c", "read -P 5 0 20M", &uri];
            ringtap_tests::program("qemu-io", "qemu-utils", args)
        });
        let until = |client: &mut Control, wanted: &str| {
            while client.event().0 != wanted {}
        };
        until(&mut client, "BLOCK_IO_ERROR");
        assert!(!writer.is_finished(), "{way}: it waits");
        if way == "snapshot" {
            let overlay = json!({ "node-name": "a", "snapshot-file": plain(&other) });
            client.ok("blockdev-snapshot-sync", overlay);
        } else {
            let name = ringtap();
            let make = ["create", "-q", "-f", "qcow2", plain(&other), "64M"];
            ok(plain(&name), "ringtap", &make);
            let file = json!({ "driver": "file", "filename": plain(&other) });
            let node = json!({ "driver": "qcow2", "node-name": "b", "file": file });
            client.ok("blockdev-add", node);
            let mirror = json!({ "device": "a", "job-id": "j", "target": "b", "sync": "full" });
            client.ok("blockdev-mirror", mirror);
            until(&mut client, "BLOCK_JOB_READY");
            client.ok("job-complete", json!({ "id": "j" }));
            until(&mut client, "BLOCK_JOB_COMPLETED");
        }
        let end = Instant::now() + ringtap_tests::patience();
        while !writer.is_finished() {
            assert!(Instant::now() < end, "{way}: it waits for ever");
            thread::sleep(Duration::from_millis(10));
        }
        let end = writer.join().expect("it ends");
        let said = String::from_utf8_lossy(&end.stdout).into_owned();
        assert!(
            end.status.success() && said.contains("wrote") && !said.contains("failed"),
            "{said}"
        );
        let said = server.stop();
        assert!(said.contains("are tried again where it goes on"), "{way}: {said}");
    }
}

/// A volume that is larger than what it is kept in, as a thin one: a loop device upon a sparse file, whose writes the kernel
/// ends with ENOSPC once there is no room for them.
#[test]
fn a_thin_volume_that_fills_up_is_waited_for() {
    let set_up = file_system_of(32, "tmpfs", &[], "");
    let (pool, ballast) = (set_up.folder().join("pool"), set_up.folder().join("ballast"));
    fs::File::create(&pool).and_then(|file| file.set_len(256 * MIB)).expect("a file");
    let device = ok("losetup", "mount", &["-f", "--show", plain(&pool)]).trim().to_owned();
    let volume = SetUp::attached(tempfile::tempdir().expect("a folder"), device.clone());
    let dir = volume.dir.path();
    let [nbd, control] = ["n", "c"].map(|name| format!("unix:{}", dir.join(name).display()));
    for (format, turn) in [("raw", 0u64), ("qcow2", 1)] {
        if format == "qcow2" {
            let name = ringtap();
            ok(plain(&name), "ringtap", &["create", "-q", "-f", format, &device, "128M"]);
        }
        // Room for 10 MiB more.
        let free = rustix::fs::statvfs(set_up.folder()).expect("its space");
        let free = free.f_bavail * free.f_frsize;
        fs::write(&ballast, vec![1; free.saturating_sub(10 * MIB) as usize]).expect("the ballast");
        let args = [&*device, "-f", format, "--force-format", "--name", "a", "--on-error", "hold"];
        let server =
            Server::start(args.iter().copied().chain(["--nbd", &nbd, "--control", &control]));
        let mut client = Control::open(&dir.join("c"));
        let uri = format!("nbd+unix:///a?socket={}", dir.join("n").display());
        let io = |commands: &[&str]| {
            let commands = commands.iter().flat_map(|one| ["-c", one]);
            let args: Vec<&str> =
                ["-f", "raw"].into_iter().chain(commands).chain([&*uri]).collect();
            let said = ok("qemu-io", "qemu-utils", &args);
            assert!(!said.contains("failed") && !said.contains("rror"), "{said}");
        };
        // Not where the turn before has taken room already.
        let [place, value] = [64 * turn, turn + 3];
        let write = format!("write -P {value} {place}M 14M");
        let read = format!("read -P {value} {place}M 14M");
        thread::scope(|scope| {
            let writer = scope.spawn(|| io(&[&write, "flush", &read]));
            let (name, told) = client.event();
            assert_eq!(
                (&*name, &told["nospace"]),
                ("BLOCK_IO_ERROR", &json!(true)),
                "{format}: {told}"
            );
            thread::sleep(Duration::from_millis(200));
            assert!(!writer.is_finished(), "{format}: it waits");
            fs::remove_file(&ballast).expect("removed");
            let name = ringtap();
            ok(plain(&name), "ringtap", &["disk", "resume", "a", "--control", &control]);
            writer.join().expect("it is written");
        });
        io(&[&read]);
        server.stop();
        if format == "qcow2" {
            ok("qemu-img", "qemu-utils", &["check", "-q", "-f", "qcow2", &device]);
        }
        // Room for the next turn.
        ok("blkdiscard", "util-linux", &["-f", &device]);
    }
    drop(volume);
}

/// What lies below does not fit beside what lies above, until something else goes.
#[test]
fn a_stream_that_finds_no_room_waits_or_fails_as_it_is_told() {
    let set_up = file_system_of(32, "tmpfs", &[], "");
    let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
    let name = ringtap();
    let make = |args: &[&str]| drop(ok(plain(&name), "ringtap", args));
    let (base, top) = (dir.path().join("base"), set_up.folder().join("top"));
    let ballast = set_up.folder().join("ballast");
    make(&["create", "-q", "-f", "qcow2", plain(&base), "64M"]);
    ok("qemu-io", "qemu-utils", &["-f", "qcow2", "-c", "write -P 1 0 16M", plain(&base)]);
    make(&["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", plain(&base), plain(&top)]);
    fs::write(&ballast, vec![1; 24 << 20]).expect("the ballast");
    let control = format!("unix:{}", dir.path().join("c").display());
    let args = [plain(&top), "-f", "qcow2", "--node-name", "a", "--cache", "writeback"];
    let nbd = format!("unix:{}", dir.path().join("n").display());
    let server = Server::start(args.iter().copied().chain(["--nbd", &nbd, "--control", &control]));
    let mut client = Control::open(&dir.path().join("c"));
    let stream = |on_error: &str| json!({ "device": "a", "job-id": "j", "on-error": on_error });
    let until = |client: &mut Control, wanted: &str| {
        loop {
            let (name, told) = client.event();
            if name == wanted {
                return told;
            }
        }
    };
    for (on_error, action) in [("report", "report"), ("ignore", "ignore")] {
        client.ok("block-stream", stream(on_error));
        let told = until(&mut client, "BLOCK_JOB_ERROR");
        assert_eq!(told, json!({ "device": "j", "operation": "write", "action": action }));
        let told = until(&mut client, "BLOCK_JOB_COMPLETED");
        assert!(told["error"].as_str().is_some_and(|error| error.contains("writing")), "{told}");
    }
    client.ok("block-stream", stream("enospc"));
    assert_eq!(until(&mut client, "BLOCK_JOB_ERROR")["action"], "stop");
    let job = &client.ok("query-block-jobs", json!({}))[0];
    assert_eq!((&job["io-status"], &job["status"]), (&json!("nospace"), &json!("paused")), "{job}");
    // Nothing is there yet: it waits again.
    client.ok("job-resume", json!({ "id": "j" }));
    assert_eq!(until(&mut client, "BLOCK_JOB_ERROR")["action"], "stop");
    fs::remove_file(&ballast).expect("removed");
    client.ok("job-resume", json!({ "id": "j" }));
    let told = until(&mut client, "BLOCK_JOB_COMPLETED");
    assert!(told.get("error").is_none(), "{told}");
    server.stop();
    fs::remove_file(&base).expect("removed");
    ok("qemu-img", "qemu-utils", &["check", "-q", plain(&top)]);
    let read =
        ["-r", "-f", "qcow2", "-c", "read -P 1 0 16M", "-c", "read -P 0 16M 48M", plain(&top)];
    let said = ok("qemu-io", "qemu-utils", &read);
    assert!(!said.contains("failed"), "{said}");
}

/// Two clients wait, each by an export of its own: one export is taken away, whoever uses it, and the other waits on.
#[test]
fn an_export_that_is_taken_away_lets_those_go_that_wait() {
    let set_up = file_system_of(32, "tmpfs", &[], "");
    let (image, ballast) = (set_up.folder().join("a.img"), set_up.folder().join("ballast"));
    fs::File::create(&image).and_then(|file| file.set_len(64 * MIB)).expect("a file");
    fs::write(&ballast, vec![1; 24 << 20]).expect("the ballast");
    let dir = tempfile::tempdir().expect("a folder");
    let socket = dir.path().join("c");
    let control = format!("unix:{}", socket.display());
    let args = ["-f", "raw", "--node-name", "a", "--cache", "writeback", "--control", &control];
    let server = Server::start([plain(&image)].iter().chain(&args).copied());
    let mut client = Control::open(&socket);
    let nbd = dir.path().join("n");
    let address = json!({ "type": "unix", "data": { "path": plain(&nbd) } });
    client.ok("nbd-server-start", json!({ "addr": address }));
    let waiting = |client: &mut Control| {
        let state = &client.ok("query-blockstats", json!({}))[0]["__ringtap_state"];
        state["waiting_for_room"].as_u64().expect("a number")
    };
    let (mut writers, names) = (vec![], ["goes", "stays"]);
    for (count, name) in (1..).zip(names) {
        let export = json!({
            "type": "nbd", "id": name, "name": name, "node-name": "a", "writable": true,
        });
        client.ok("block-export-add", export);
        let uri = format!("nbd+unix:///{name}?socket={}", nbd.display());
        let write = format!("write -P 5 {}M 16M", 16 * count);
        writers.push(thread::spawn(move || {
            let args = ["-f", "raw", "-c", &write, &uri];
            ringtap_tests::program("qemu-io", "qemu-utils", args)
        }));
        let until = Instant::now() + ringtap_tests::patience();
        while waiting(&mut client) < count {
            assert!(Instant::now() < until, "{name}: nobody waits");
            thread::sleep(Duration::from_millis(10));
        }
    }
    let stays = writers.pop().expect("two");
    let goes = writers.pop().expect("two");
    let safe = json!({ "id": "goes" });
    let said = client.call("block-export-del", safe).expect_err("it is used");
    assert!(said.contains("still in use"), "{said}");
    client.ok("block-export-del", json!({ "id": "goes", "mode": "hard" }));
    loop {
        let (name, told) = client.event();
        if name == "BLOCK_EXPORT_DELETED" {
            assert_eq!(told["id"], "goes");
            break;
        }
        assert_eq!(name, "BLOCK_IO_ERROR");
    }
    let end = goes.join().expect("it ends");
    let said = String::from_utf8_lossy(&end.stdout).into_owned();
    assert!(said.contains("write failed"), "{said}");
    assert!(waiting(&mut client) > 0 && !stays.is_finished());
    fs::remove_file(&ballast).expect("removed");
    client.ok("__ringtap_resume", json!({ "node-name": "a" }));
    let end = stays.join().expect("it ends");
    assert!(end.status.success() && String::from_utf8_lossy(&end.stdout).contains("wrote"));
    server.stop();
}

#[test]
fn a_server_that_ends_lets_those_go_that_wait() {
    let set_up = file_system_of(32, "tmpfs", &[], "");
    let image = set_up.folder().join("a.img");
    fs::File::create(&image).and_then(|file| file.set_len(64 * MIB)).expect("a file");
    let dir = tempfile::tempdir().expect("a folder");
    let [nbd, control] = ["n", "c"].map(|name| format!("unix:{}", dir.path().join(name).display()));
    for (more, waits) in
        [(&["--control", &control][..], true), (&[], false), (&["--on-error", "hold"], true)]
    {
        let args =
            [plain(&image), "-f", "raw", "--name", "a", "--cache", "writeback", "--nbd", &nbd];
        let server = Server::start(args.iter().chain(more).copied());
        let uri = format!("nbd+unix:///a?socket={}", dir.path().join("n").display());
        let writer = thread::spawn(move || {
            let args = ["-f", "raw", "-c", "write 0 48M", &uri];
            ringtap_tests::program("qemu-io", "qemu-utils", args)
        });
        let until = Instant::now() + ringtap_tests::patience();
        // All the room there is, but for what the file system keeps of its own.
        let is_full = || fs::metadata(&image).is_ok_and(|facts| facts.blocks() * 512 > 30 * MIB);
        while !(is_full() || writer.is_finished()) || !(waits || writer.is_finished()) {
            assert!(Instant::now() < until, "{more:?}: it is not full, or its writer does not end");
            thread::sleep(Duration::from_millis(10));
        }
        thread::sleep(Duration::from_millis(500));
        assert_eq!(writer.is_finished(), !waits, "{more:?}");
        let said = server.stop();
        assert_eq!(said.contains("its requests wait"), waits, "{said}");
        writer.join().expect("it ends");
    }
}
