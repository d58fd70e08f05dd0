//! Who may write to an image.

use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use ringtap_tests::{listens, patience, ringtap};

use crate::cluster::cluster;

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn the_lock_of_another_is_left_alone() {
    let Some(cluster) = cluster() else { return };
    cluster.ok("rbd", &["create", "--size", "16M", "l"]);
    let socket = cluster.text("l.qemu");
    let qemu = std::process::Command::new("qemu-nbd")
        .args(["-t", "-f", "raw", "-x", "d", "-k", &socket, &cluster.name("l")])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map(Killed)
        .expect("qemu-nbd");
    let end = Instant::now() + patience();
    while !listens(&cluster.path("l.qemu")) {
        assert!(Instant::now() < end, "qemu-nbd does not listen");
        std::thread::sleep(Duration::from_millis(20));
    }
    // It takes the lock with its first write.
    let uri = format!("nbd+unix:///d?socket={socket}");
    cluster.io_on(&uri, "raw", &["write -P 1 0 1M"]);
    let locks = cluster.ok("rbd", &["lock", "ls", "l"]);
    let owner = locks.split_whitespace().last().expect("an address");
    let listen = format!("unix:{}", cluster.text("l.own"));
    let serve = |more: &[&str]| {
        let name = cluster.name("l");
        cluster.refusal(&[&["serve", &name, "-f", "raw", "--nbd", &listen], more].concat())
    };
    let why = serve(&[]);
    assert!(why.contains(owner) && why.contains("exclusive lock"), "{owner}: {why}");
    cluster.io_on(&uri, "raw", &["write -P 2 1M 1M", "read -P 1 0 1M"]);
    drop(qemu);

    // Ringtap keeps its own, whoever asks; who only reads is let in.
    cluster.ok("rbd", &["create", "--size", "16M", "l2"]);
    let server = cluster.serve("l2", "raw", &[]);
    let name = cluster.name("l2");
    let why = cluster.refusal(&["serve", &name, "-f", "raw", "--nbd", &listen]);
    let process = format!("process {} of", server.pid());
    assert!(why.contains(&process), "{why}");
    let other = cluster.run("qemu-io", &["-f", "raw", "-c", "write -P 9 0 1M", &name]);
    let said = String::from_utf8_lossy(&[other.stdout, other.stderr].concat()).into_owned();
    assert!(said.contains("Read-only file system"), "{said}");
    cluster.said(&["info", "-f", "raw", &name]);
    cluster.io("l2", &["write -P 2 0 1M", "read -P 2 0 1M"]);
    server.stop();
}

/// A service with `ProcSubset=pid`: what the kernel says of itself is not in its /proc.
#[test]
fn a_killed_service_that_sees_little_of_proc_is_followed_at_once() {
    let Some(cluster) = cluster() else { return };
    cluster.ok("rbd", &["create", "--size", "16M", "p"]);
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").expect("a boot");
    let start = || {
        let (nbd, _) = cluster.sockets("p");
        let script = format!(
            "mount -t proc -o subset=pid proc /proc && exec {} serve \"$@\"",
            ringtap().display()
        );
        let mut server = std::process::Command::new("unshare");
        server.args(["--mount", "sh", "-c", &script, "sh", &cluster.name("p"), "-f", "raw"]);
        server.args(["--name", "d", "--nbd", &format!("unix:{nbd}")]);
        server.env("RINGTAP_BOOT_ID", boot.trim().replace('-', "")).stdout(Stdio::null());
        let mut server = server.spawn().map(Killed).expect("unshare");
        let end = Instant::now() + patience();
        while !listens(nbd.as_ref()) {
            assert!(Instant::now() < end, "it does not listen");
            assert!(server.0.try_wait().expect("its state").is_none(), "it ended");
            thread::sleep(Duration::from_millis(20));
        }
        server
    };
    let first = start();
    cluster.io("p", &["write -P 4 1M 1M", "flush"]);
    drop(first);
    let _second = start();
    cluster.io("p", &["read -P 4 1M 1M"]);
}

#[test]
fn a_killed_server_is_followed_at_once() {
    let Some(cluster) = cluster() else { return };
    cluster.ok("rbd", &["create", "--size", "64M", "k"]);
    let server = cluster.serve("k", "raw", &[]);
    cluster.io("k", &["write -P 4 32M 1M", "flush"]);
    let before = cluster.ok("rbd", &["lock", "ls", "k"]);
    let former = before.split_whitespace().last().expect("an address").to_owned();
    server.kill();
    let second = cluster.serve("k", "raw", &[]);
    cluster.io("k", &["read -P 4 32M 1M"]);
    // With requests in flight.
    let guest = std::process::Command::new("qemu-img")
        .args([
            "bench",
            "-w",
            "-t",
            "none",
            "-c",
            "1000000",
            "-d",
            "8",
            "-f",
            "raw",
            &cluster.nbd("k"),
        ])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map(Killed)
        .expect("qemu-img");
    std::thread::sleep(Duration::from_millis(300));
    second.kill();
    drop(guest);
    let begun = Instant::now();
    let next = cluster.serve("k", "raw", &[]);
    let took = begun.elapsed();
    println!("the next server was ready after {took:.2?}");
    // Without it the cluster waits for 30 s before it takes the former for dead.
    assert!(took < Duration::from_secs(15), "{took:?}");
    cluster.io("k", &["write -P 5 33M 1M", "read -P 5 33M 1M"]);
    let shut_out = cluster.ok("ceph", &["osd", "blacklist", "ls"]);
    assert!(shut_out.contains(&former), "{former}: {shut_out}");
    let said = next.stop();
    assert!(said.contains("is gone"), "{said}");
}

#[test]
fn who_was_shut_out_and_asks_where_data_is_or_grows_the_disk_has_an_error_and_ends() {
    let Some(cluster) = cluster() else { return };
    for asks in ["status", "resize"] {
        cluster.ok("rbd", &["create", "--size", "16M", asks]);
        let control = format!("unix:{}", cluster.text("control"));
        let server = cluster.serve(asks, "raw", &["--control", &control]);
        cluster.io(asks, &["write -P 1 0 4M", "flush"]);
        let locks = cluster.ok("rbd", &["lock", "ls", asks]);
        let owner = locks.split_whitespace().last().expect("an address").to_owned();
        cluster.ok("ceph", &["osd", "blacklist", "add", &owner]);
        let (nbd, program) = (cluster.nbd(asks), ringtap());
        let ask = || match asks {
            "status" => cluster.run("nbdinfo", &["--map", &nbd]),
            _ => {
                let resize = ["disk", "resize", "d", "32M", "--control", &control];
                cluster.run(program.to_str().expect("plain"), &resize)
            }
        };
        // Behind a write that librbd never ends.
        let write = ["-f", "raw", "-c", "write -P 2 0 1M", &nbd];
        let (write, end) = thread::scope(|scope| {
            let write = scope.spawn(|| cluster.run("qemu-io", &write));
            thread::sleep(Duration::from_millis(500));
            let end = ask();
            (write.join().expect("it ends"), end)
        });
        let said = String::from_utf8_lossy(&[write.stdout, write.stderr].concat()).into_owned();
        assert!(said.contains("write failed"), "{asks}: {said}");
        assert!(!end.status.success(), "{asks}: {}", String::from_utf8_lossy(&end.stdout));
        let said = server.stop_badly();
        let told = ["shut out of the cluster", "shut this one out"];
        assert!(told.iter().any(|words| said.contains(words)), "{asks}: {said}");
        cluster.io_on(&cluster.name(asks), "raw", &["read -P 1 0 4M"]);
    }
}

#[test]
fn who_was_shut_out_has_errors_and_ends() {
    let Some(cluster) = cluster() else { return };
    cluster.ok("rbd", &["create", "--size", "16M", "o"]);
    let server = cluster.serve("o", "raw", &[]);
    cluster.io("o", &["write -P 1 0 4M", "flush"]);
    let locks = cluster.ok("rbd", &["lock", "ls", "o"]);
    let owner = locks.split_whitespace().last().expect("an address").to_owned();
    cluster.ok("ceph", &["osd", "blacklist", "add", &owner]);
    // librbd of Ceph 16 never ends such a write.
    let output = cluster.run("qemu-io", &["-f", "raw", "-c", "write -P 2 0 1M", &cluster.nbd("o")]);
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(said.contains("write failed"), "{said}");
    let said = server.stop_badly();
    assert!(said.contains("shut out of the cluster"), "{said}");
    cluster.io_on(&cluster.name("o"), "raw", &["read -P 1 0 4M", "write -P 3 0 1M"]);
}
