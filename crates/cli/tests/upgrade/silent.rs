//! Disks whose storage does not answer while a server is to be followed by another.

use std::fs;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};

use crate::bench::{Bench, READY, ends, lives, pid, said};

/// An NBD server of a file; it ends with this.
pub struct Source(Child);

impl Drop for Source {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Source {
    pub fn of(bench: &Bench, file: &str, socket: &str) -> Source {
        Source::serving(bench, socket, &["file", file])
    }

    fn serving(bench: &Bench, socket: &str, what: &[&str]) -> Source {
        let mut command = Command::new("nbdkit");
        command.args(["-f", "-U", socket]).args(what).current_dir(bench.dir.path());
        let source = Source(command.spawn().expect("nbdkit begins"));
        let until = Instant::now() + Duration::from_secs(30);
        while std::os::unix::net::UnixStream::connect(bench.path(socket)).is_err() {
            assert!(Instant::now() < until, "nbdkit does not listen");
            std::thread::sleep(Duration::from_millis(10));
        }
        source
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(pid(self.0.id()), signal).expect("it is there");
    }
}

/// It says that it is ready, and takes nothing over.
pub fn stalls(bench: &Bench) -> String {
    bench.script("stalls", &format!("{READY}; exec sleep 60"))
}

/// How a program ends, which it must soon.
fn end_of(mut program: Child, bench: &Bench) -> Output {
    let until = Instant::now() + Duration::from_secs(45);
    while program.try_wait().expect("its status").is_none() {
        if Instant::now() > until {
            let _ = program.kill();
            panic!("it hangs: {}", bench.log());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    program.wait_with_output().expect("it has ended")
}

#[test]
fn storage_that_is_silent_holds_up_no_other_disk() {
    let mut bench = Bench::new();
    for name in ["a.raw", "b.raw", "d.raw"] {
        bench.ends_with(&format!("create -q -f raw {name} 64M"), 0);
    }
    let sources = ["b", "d"].map(|of| Source::of(&bench, &format!("{of}.raw"), of));
    let [b, d] = ["b", "d"].map(|of| format!("nbd+unix:///?socket={}", bench.path(of).display()));
    let line = format!(
        "serve --sandbox off --control unix:c.sock a.raw -f raw --vhost-user vu.sock {b} -f raw --name b --nbd unix:b.sock {d} -f raw --read-only --name d --node-name d --nbd unix:d.sock"
    );
    let (_child, server) = bench.serve(&line);
    let line = format!("upgrade unix:c.sock --binary {} --timeout 3", stalls(&bench));
    // There is something to make stable; there are only reads; and limits may be why these take long.
    for (disk, limited, of_it) in
        [(0, false, "is not stable"), (1, false, "in flight"), (1, true, "not ended")]
    {
        if limited {
            bench.ends_with("disk limit d --iops 1000000 --control unix:c.sock", 0);
        }
        let source = &sources[disk];
        let load = match disk {
            0 => bench.nbd_load("b.sock", "b", 3),
            _ => bench.nbd_reads("d.sock", "d", 3),
        };
        std::thread::sleep(Duration::from_secs(1));
        source.signal(Signal::STOP);
        let near = bench.load("vu.sock", 12);
        let upgrade = bench.command(&line).stderr(Stdio::piped()).spawn().expect("it begins");
        let output = end_of(upgrade, &bench);
        let why = said(&output);
        assert!(!output.status.success() && why.contains(of_it), "{of_it}: {why}");
        assert!(why.contains("see to"), "{why}");
        assert!(lives(server), "{}", bench.log());
        // The storage of the other is silent still.
        bench.verified(near);
        source.signal(Signal::CONT);
        let output = load.wait_with_output().expect("it ends");
        assert!(output.status.success(), "{}\n{}", said(&output), bench.log());
    }
    // Once it answers there is nothing in the way.
    let next = bench.upgrade("unix:c.sock");
    ends(server);
    bench.verified(bench.load("vu.sock", 1));
    assert!(lives(next));
}

/// Those that are connected when the upgrade is given up, and those that come.
#[test]
fn clients_of_one_address_go_on_though_the_storage_of_another_is_silent() {
    let mut bench = Bench::new();
    for name in ["a.raw", "d.raw"] {
        bench.ends_with(&format!("create -q -f raw {name} 64M"), 0);
    }
    let source = Source::of(&bench, "d.raw", "d");
    let far = format!("nbd+unix:///?socket={}", bench.path("d").display());
    let line = format!(
        "serve --sandbox off --control unix:c.sock a.raw -f raw --name a --nbd unix:n.sock {far} -f raw --read-only --name d --node-name d --nbd unix:n.sock"
    );
    let (_child, server) = bench.serve(&line);
    let line = format!("upgrade unix:c.sock --binary {} --timeout 3", stalls(&bench));
    // So that its requests are not looked at before.
    bench.ends_with("disk limit d --iops 1000000 --control unix:c.sock", 0);
    let reads = bench.nbd_reads("n.sock", "d", 3);
    std::thread::sleep(Duration::from_secs(1));
    source.signal(Signal::STOP);
    let near = bench.nbd_load("n.sock", "a", 6);
    std::thread::sleep(Duration::from_millis(500));
    let why = bench.ends_with(&line, 1);
    assert!(why.contains("not ended"), "{why}");
    let goes_on = |client| {
        let output = end_of(client, &bench);
        assert!(output.status.success(), "{}\n{}", said(&output), bench.log());
    };
    // One after the other: each would find the other's writes.
    goes_on(near);
    goes_on(bench.nbd_load("n.sock", "a", 1));
    source.signal(Signal::CONT);
    let output = end_of(reads, &bench);
    assert!(output.status.success(), "{}\n{}", said(&output), bench.log());
    let next = bench.upgrade("unix:c.sock");
    ends(server);
    assert!(lives(next));
}

/// All that it was given is stable, and then it falls silent.
#[test]
fn an_image_that_cannot_be_closed_holds_up_no_other_disk() {
    let mut bench = Bench::new();
    for name in ["a.raw", "d.raw"] {
        bench.ends_with(&format!("create -q -f raw {name} 64M"), 0);
    }
    let file = bench.path("d.raw").display().to_string();
    let [armed, passed] = ["armed", "passed"].map(|name| bench.path(name).display().to_string());
    let reads =
        format!("pread=dd if={file} skip=$4 count=$3 iflag=count_bytes,skip_bytes status=none");
    let writes = format!("pwrite=dd of={file} conv=notrunc seek=$4 oflag=seek_bytes status=none");
    // While it is armed one flush comes to its end, and no other.
    let flushes = format!(
        "flush=[ ! -e {armed} ] || mkdir {passed} 2>/dev/null || while [ -e {armed} ]; do sleep 0.1; done"
    );
    let _source = Source::serving(
        &bench,
        "d",
        &["eval", "get_size=echo 67108864", &reads, &writes, &flushes],
    );
    let far = format!("nbd+unix:///?socket={}", bench.path("d").display());
    let line = format!(
        "serve --sandbox off --control unix:c.sock a.raw -f raw --vhost-user vu.sock {far} -f raw --name d --node-name far --nbd unix:d.sock"
    );
    let (_child, server) = bench.serve(&line);
    let (near, reads) = (bench.load("vu.sock", 16), bench.nbd_reads("d.sock", "d", 3));
    std::thread::sleep(Duration::from_secs(1));
    fs::write(&armed, "").expect("a file");
    let line = format!("upgrade unix:c.sock --binary {} --timeout 3", stalls(&bench));
    let upgrade = bench.command(&line).stderr(Stdio::piped()).spawn().expect("it begins");
    let output = end_of(upgrade, &bench);
    let why = said(&output);
    assert!(
        why.contains("the image of the disk far is not closed") && !output.status.success(),
        "{why}"
    );
    let again = bench.ends_with(&line, 1);
    assert!(again.contains("the disk far is being changed"), "{again}");
    // Its image is not closed yet.
    bench.verified(near);
    fs::remove_file(&armed).expect("it is there");
    let output = end_of(reads, &bench);
    assert!(output.status.success(), "{}\n{}", said(&output), bench.log());
    let output = end_of(bench.nbd_load("d.sock", "d", 1), &bench);
    assert!(output.status.success(), "{}\n{}", said(&output), bench.log());
    let next = bench.upgrade("unix:c.sock");
    ends(server);
    bench.verified(bench.load("vu.sock", 1));
    assert!(lives(next));
}
