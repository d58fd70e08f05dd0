//! Images on block devices, which keep no times: the kernel's count of what was written tells.

use std::fs;
use std::path::Path;

use ringtap_tests::{Server, SetUp, ok, plain, program, ringtap};

use crate::Client;

const SIZE: u64 = 16 << 20;

struct Device {
    set_up: SetUp,
    path: String,
}

impl Device {
    fn new() -> Device {
        Device::with(&[])
    }

    fn with(options: &[&str]) -> Device {
        let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
        let file = dir.path().join("device");
        fs::File::create(&file).expect("a file").set_len(SIZE).expect("its size");
        let attach = ["-f", "--show", "--direct-io=on", plain(&file)];
        let path = ok("losetup", "mount", &attach).trim().to_owned();
        let device = Device { set_up: SetUp::attached(dir, path.clone()), path };
        let create = [&["create", "-q", "-f", "qcow2"], options, &[&device.path, "8M"]].concat();
        ok(plain(&ringtap()), "", &create);
        device
    }

    fn folder(&self) -> &Path {
        self.set_up.dir.path()
    }

    fn serve(&self, cache: &str, more: &[&str]) -> Server {
        let address = format!("unix:{}", plain(&self.folder().join("nbd.sock")));
        let own = [&self.path, "-f", "qcow2", "--cache", cache, "--nbd", &address];
        Server::start([&own[..], more].concat())
    }

    /// Write without a flush, keep a copy of what the device held before the last of it, and kill.
    fn killed(&self, cache: &str) {
        self.killed_with(cache, &[]);
    }

    fn killed_with(&self, cache: &str, more: &[&str]) {
        let server = self.serve(cache, more);
        let client = &mut Client::start(&self.folder().join("nbd.sock"));
        client.run("write -P 1 0 256k");
        let copy = self.folder().join("copy");
        let (from, to) = (format!("if={}", self.path), format!("of={}", plain(&copy)));
        ok("dd", "coreutils", &[&from, &to, "bs=1M", "iflag=direct", "status=none"]);
        client.run("write -P 2 1M 256k");
        server.kill();
        // The kernel closes the dead server's files in its own time.
        std::thread::sleep(std::time::Duration::from_millis(200));
    }

    /// What a client finds at the beginning and at 1 MiB.
    fn found(&self, server: Server) -> ((u8, u8), String) {
        let uri = format!("nbd+unix:///?socket={}", plain(&self.folder().join("nbd.sock")));
        let to = self.folder().join("read");
        ok("qemu-img", "qemu-utils", &["convert", "-f", "raw", "-O", "raw", &uri, plain(&to)]);
        let said = server.stop();
        let bytes = fs::read(to).expect("a file");
        ((bytes[0], bytes[1 << 20]), said)
    }

    fn refused(&self, cache: &str) -> String {
        let address = format!("unix:{}", plain(&self.folder().join("nbd.sock")));
        let own = ["serve", &self.path, "-f", "qcow2", "--cache", cache, "--nbd", &address];
        let end = program(plain(&ringtap()), "", own);
        assert!(!end.status.success(), "{end:?}");
        String::from_utf8_lossy(&end.stderr).into_owned()
    }
}

#[test]
fn what_was_written_is_counted() {
    let device = Device::new();
    device.killed("none");
    let (found, said) = device.found(device.serve("none", &[]));
    assert_eq!(found, (1, 2), "{said}");
    assert!(said.contains("taking up"), "{said}");
}

#[test]
fn a_device_that_was_put_back_reads_as_it_is() {
    let device = Device::new();
    device.killed("none");
    let copy = device.folder().join("copy");
    let (from, to) = (format!("if={}", plain(&copy)), format!("of={}", device.path));
    ok("dd", "coreutils", &[&from, &to, "bs=1M", "oflag=direct", "status=none"]);
    let (found, said) = device.found(device.serve("none", &[]));
    assert_eq!(found, (0, 0), "{said}");
    assert!(said.contains("written to the device by something else"), "{said}");
}

/// Through the page cache nobody can count; the operator says.
#[test]
fn through_the_page_cache_the_operator_says() {
    for (choice, expected) in [("use", (1, 2)), ("drop", (0, 0))] {
        let device = Device::new();
        device.killed("writeback");
        let said = device.refused("writeback");
        assert!(said.contains("--restart-log use") && said.contains("page cache"), "{said}");
        let (found, said) = device.found(device.serve("writeback", &["--restart-log", choice]));
        assert_eq!(found, expected, "{said}");
    }
}

/// A device bears no attribute: the state folder has the note that version 2 has no place for.
#[test]
fn a_log_of_version_2_on_a_device_is_missed() {
    let device = Device::with(&["-o", "compat=0.10"]);
    let logs = tempfile::tempdir_in("/dev/shm").expect("a folder on tmpfs");
    let here = ["--state-dir", plain(logs.path())];
    device.killed_with("none", &here);
    let said = device.refused("none");
    assert!(said.contains("--restart-log drop") && said.contains("is not in"), "{said}");
    let (found, said) = device.found(device.serve("none", &here));
    assert_eq!(found, (1, 2), "{said}");
    let (found, said) = device.found(device.serve("none", &[]));
    assert_eq!(found, (1, 2), "{said}");
}
