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
