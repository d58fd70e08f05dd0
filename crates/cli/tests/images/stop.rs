//! What Ctrl-C and SIGTERM leave of an image that was being written.

use std::io::{BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::bench::Bench;

/// So slow that nothing of it ends by itself.
const RATE: &str = "--rate 1k -p";

/// Begin what takes hours; it has begun once it shows how far it is.
fn begun(bench: &Bench, line: &str) -> (Child, BufReader<std::process::ChildStderr>) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringtap"));
    command.args(line.split_whitespace()).current_dir(bench.path(""));
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("begun");
    let said = BufReader::new(child.stderr.take().expect("its errors"));
    let progress = child.stdout.as_mut().expect("its progress");
    let mut shown = vec![];
    while !shown.ends_with(b"100%)") {
        let mut byte = [0];
        progress.read_exact(&mut byte).expect("it goes on");
        shown.extend(byte);
    }
    (child, said)
}

/// Send the signal, which must be what ends it; what was said then.
fn stop(mut begun: (Child, BufReader<std::process::ChildStderr>), signal: Signal) -> String {
    let pid = Pid::from_child(&begun.0);
    kill_process(pid, signal).expect("it is there");
    let end = Instant::now() + Duration::from_secs(60);
    let status = loop {
        if let Some(status) = begun.0.try_wait().expect("its status") {
            break status;
        }
        if Instant::now() > end {
            let _ = begun.0.kill();
            panic!("it does not stop");
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let mut said = String::new();
    begun.1.read_to_string(&mut said).expect("text");
    assert_eq!(status.signal(), Some(signal.as_raw()), "{said}");
    said
}

#[test]
fn a_conversion_that_is_stopped_leaves_nothing_that_looks_whole() {
    let bench = Bench::new();
    bench.ok("ringtap create -q a.raw 8M");
    bench.qemu_io("-f raw a.raw", &["write -q -P 5 0 8M".into()]);
    for (line, signal) in [
        ("-O qcow2 b.qcow2", Signal::INT),
        ("b.raw", Signal::TERM),
        ("-c -O qcow2 b", Signal::INT),
        ("-O qcow2 -o data_file=d.raw b", Signal::INT),
    ] {
        let line = format!("convert {RATE} -f raw a.raw {line}");
        let said = stop(begun(&bench, &line), signal);
        let target = line.split(' ').next_back().expect("a target");
        assert!(said.contains(&format!("{target} is removed")), "{said}");
        assert!(said.contains(if signal == Signal::INT { "SIGINT" } else { "SIGTERM" }), "{said}");
        assert!(!bench.path(target).exists() && !bench.path("d.raw").exists());
    }
    // What was there before is not ours to remove.
    bench.ok("ringtap create -q -f qcow2 b.qcow2 8M");
    let said = stop(begun(&bench, &format!("convert {RATE} a.raw -O qcow2 b.qcow2")), Signal::INT);
    if said.contains("ringtap refuses it") {
        let said = bench.ends("ringtap compare a.raw b.qcow2", 2);
        assert!(said.contains("not whole"), "{said}");
    } else {
        assert!(said.contains("b.qcow2 is empty"), "{said}");
        bench.ends("qemu-img info -f qcow2 b.qcow2", 1);
    }
    bench.ok("ringtap convert a.raw -O qcow2 b.qcow2");
    bench.same("a.raw", "b.qcow2");
}

/// Killed at every note on the target: what opens then is whole.
#[test]
fn a_conversion_that_is_killed_leaves_nothing_that_looks_whole() {
    let bench = Bench::new();
    bench.ok("ringtap create -q a.raw 1M");
    bench.qemu_io("-f raw a.raw", &["write -q -P 5 0 1M".into()]);
    let flags = rustix::fs::XattrFlags::empty();
    if rustix::fs::setxattr(bench.path("a.raw"), "user.test", b"1", flags).is_err() {
        println!("skipped: the file system of {} takes no notes", bench.path("").display());
        return;
    }
    let own = env!("CARGO_BIN_EXE_ringtap");
    for call in ["setxattr", "removexattr"] {
        let mut kills = 0;
        loop {
            let inject = format!("inject={call}:signal=KILL:when={}", kills + 1);
            let mut command = Command::new("timeout");
            command.args(["60", "strace", "-f", "-qq", "-o", "/dev/null", "-e", &inject, own]);
            command.args(["convert", "-f", "raw", "a.raw", "-O", "qcow2", "b.qcow2"]);
            let output = command.current_dir(bench.path("")).output().expect("timeout");
            if output.status.success() {
                bench.same("a.raw", "b.qcow2");
                break;
            }
            assert_ne!(
                output.status.code(),
                Some(127),
                "strace is missing: apt-get install strace"
            );
            kills += 1;
            assert!(kills < 100, "{output:?}");
            let what = || format!("killed at {call} {kills}: {output:?}");
            if bench.path("b.qcow2").exists() {
                let read = bench.run("ringtap compare -q -f raw -F qcow2 a.raw b.qcow2");
                assert!(matches!(read.status.code(), Some(0 | 2)), "{}: {read:?}", what());
                std::fs::remove_file(bench.path("b.qcow2")).expect("removed");
            }
        }
        assert!(kills > 0, "{call} is not called");
        std::fs::remove_file(bench.path("b.qcow2")).expect("removed");
    }
}

/// A file system without O_DIRECT: the target is made there, and cannot be opened as was asked for.
#[test]
fn a_target_that_cannot_be_opened_is_removed() {
    let bench = Bench::new();
    bench.ok("ringtap create -q a.raw 1M");
    std::fs::create_dir(bench.path("memory")).expect("a folder");
    let own = env!("CARGO_BIN_EXE_ringtap");
    let script = format!(
        "mount -t ramfs none memory || exit 9; {own} convert -t none a.raw -O qcow2 memory/b.qcow2; \
         echo ended with $?; ls memory"
    );
    let mut command = Command::new("timeout");
    command.args(["60", "unshare", "-m", "sh", "-c", &script]).current_dir(bench.path(""));
    let output = command.output().expect("timeout");
    let [out, err] = [&output.stdout, &output.stderr].map(|it| String::from_utf8_lossy(it));
    assert_eq!(out, "ended with 1\n", "{err}");
    assert!(err.contains("O_DIRECT") && err.contains("b.qcow2 is removed"), "{err}");
}

#[test]
fn a_commit_that_is_stopped_loses_nothing() {
    let bench = Bench::new();
    bench.ok("ringtap create -q -f qcow2 base.qcow2 8M");
    bench.ok("ringtap create -q -b base.qcow2 -F qcow2 over.qcow2");
    bench.qemu_io("-f qcow2 over.qcow2", &["write -q -P 5 1M 6M".into()]);
    bench.ok("ringtap convert over.qcow2 was.raw");
    for signal in [Signal::TERM, Signal::INT] {
        let said = stop(begun(&bench, &format!("commit {RATE} over.qcow2")), signal);
        assert!(said.contains("which is as it was: commit again"), "{said}");
        bench.same("was.raw", "over.qcow2");
        bench.ok("qemu-img check -q base.qcow2");
    }
    bench.ok("ringtap commit -q over.qcow2");
    bench.same("was.raw", "base.qcow2");
}

#[test]
fn making_an_image_that_is_stopped_leaves_nothing_that_was_not_there() {
    let bench = Bench::new();
    bench.ok("ringtap create -q -f raw old.raw 1M");
    for (line, file, signal) in [
        ("-f raw -o preallocation=full new.raw 8G", "new.raw", Signal::INT),
        ("-f qcow2 -o preallocation=full new.qcow2 8G", "new.qcow2", Signal::TERM),
        (
            "-f qcow2 -o preallocation=full,data_file=data.raw new.qcow2 8G",
            "new.qcow2",
            Signal::INT,
        ),
        ("-f raw -o preallocation=full old.raw 8G", "old.raw", Signal::INT),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringtap"));
        command.arg("create").args(line.split(' ')).current_dir(bench.path(""));
        let mut child =
            command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("begun");
        let said = BufReader::new(child.stderr.take().expect("its errors"));
        // Until something of it is there.
        let end = Instant::now() + Duration::from_secs(60);
        let place = bench.path(if line.contains("data.raw") { "data.raw" } else { file });
        while !place.metadata().is_ok_and(|facts| facts.len() > 2 << 20) {
            assert!(Instant::now() < end, "{line}: it does not begin");
            std::thread::sleep(Duration::from_millis(2));
        }
        let said = stop((child, said), signal);
        assert!(said.contains("stopped by SIG"), "{said}");
        assert_eq!(bench.path(file).exists(), file == "old.raw", "{line}: {said}");
        assert!(!bench.path("data.raw").exists(), "{said}");
    }
    let said = bench.ends("ringtap compare -f raw old.raw old.raw", 2);
    assert!(said.contains("not whole"), "{said}");
}

/// It writes zeros, which takes hours; until then the disk has its new size, and once it is stopped its former one.
#[test]
fn a_disk_whose_growth_is_stopped_has_its_former_size() {
    use std::os::unix::fs::MetadataExt;
    let bench = Bench::new();
    bench.ok("ringtap create -q -f raw a.raw 1M");
    bench.ok("ringtap create -q -f qcow2 a.qcow2 1M");
    std::fs::write(bench.path("key"), "secret").expect("a key");
    bench.ok(
        "qemu-img create -q -f luks --object secret,id=s,file=key -o key-secret=s,iter-time=10 a.luks 1M",
    );
    for image in ["raw a.raw", "qcow2 a.qcow2"] {
        bench.qemu_io(&format!("-f {image}"), &["write -q -P 5 64k 512k".into()]);
        bench.ok(&format!("ringtap convert -f {image} -O raw was.raw"));
    }
    for (format, file, signal) in [
        ("raw", "a.raw", Signal::INT),
        ("qcow2", "a.qcow2", Signal::TERM),
        ("luks", "a.luks", Signal::INT),
    ] {
        let size = |bench: &Bench| {
            bench.json(&format!("ringtap info -f {format} --output json {file}"))["virtual-size"]
                .clone()
        };
        let (before, len) = (size(&bench), bench.path(file).metadata().expect("a file").len());
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringtap"));
        command.args(["resize", "-f", format, "--preallocation", "full", file, "+64G"]);
        command.current_dir(bench.path("")).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("begun");
        let said = BufReader::new(child.stderr.take().expect("its errors"));
        let end = Instant::now() + Duration::from_secs(60);
        while bench.path(file).metadata().expect("a file").blocks() * 512 < len + (2 << 20) {
            assert!(Instant::now() < end, "{file}: it does not begin");
            std::thread::sleep(Duration::from_millis(2));
        }
        let said = stop((child, said), signal);
        assert!(said.contains(&format!("{file} has its former size")), "{said}");
        assert!(said.contains(if signal == Signal::INT { "SIGINT" } else { "SIGTERM" }), "{said}");
        assert_eq!(size(&bench), before, "{file}");
        if format != "qcow2" {
            assert_eq!(bench.path(file).metadata().expect("a file").len(), len, "{file}");
        }
    }
    bench.ok("qemu-img check -q -f qcow2 a.qcow2");
    for image in ["raw -F raw a.raw", "qcow2 -F raw a.qcow2"] {
        let [format, _, _, file] = image.split(' ').collect::<Vec<_>>()[..] else { unreachable!() };
        bench.ok(&format!("qemu-img compare -f {format} -F raw {file} was.raw"));
    }
    // And can grow as before.
    bench.ok("ringtap resize -q -f qcow2 --preallocation full a.qcow2 +1M");
    bench.ok("qemu-img check -q -f qcow2 a.qcow2");
}
