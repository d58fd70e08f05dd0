//! A panic in a serving process stops the disk it belongs to and no other. The process is this test's own
//! program, run again: only there can images be told to panic.

mod ublk;

use std::cell::Cell;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};

use ringtap_daemon::{
    Address, Announce, Config, ControlAt, Disk, NbdLimits, report_panics, serve_wrapped,
};
use ringtap_image::{CacheMode, Format, OpenOptions, open};
use ringtap_io::{Panic, Ring, Tasks};
use ringtap_vbd::sabotage::Trapped;
use ringtap_vbd::{Kind, Request, Vbd};

/// Tells the program that it is to serve, in this folder.
const FOLDER: &str = "RINGTAP_TEST_PANIC_FOLDER";
/// Which disks it is to serve, by their names.
const DISKS: &str = "RINGTAP_TEST_PANIC_DISKS";
/// Where it is to be controlled.
const CONTROL: &str = "RINGTAP_TEST_PANIC_CONTROL";
/// Whether they are block devices by ublk, from number 0 on, and nothing else.
const UBLK: &str = "RINGTAP_TEST_PANIC_UBLK";
/// Who writes there, to a disk whose name begins with `a`, has it panic.
const TRAP: u64 = 1 << 20;
/// And who writes there has the thread panic that serves the queue, outside of the request.
const THREAD_TRAP: u64 = 2 << 20;
const LEN: usize = 64 << 10;

thread_local! {
    /// The thread is to panic in its next turn.
    static TRIPPED: Cell<bool> = const { Cell::new(false) };
}

fn format(name: &str) -> (Format, &'static str) {
    if name.starts_with('a') { (Format::Qcow2, "qcow2") } else { (Format::Raw, "raw") }
}

fn options(name: &str) -> OpenOptions {
    let format = Some(format(name).0);
    OpenOptions { format, cache: CacheMode::Writeback, ..OpenOptions::default() }
}

fn disk(dir: &Path, name: &str, ublk: Option<u32>) -> Disk {
    let other = ublk.is_none();
    Disk {
        name: name.into(),
        nbd: other.then(|| Address::Unix(dir.join("nbd"))).into_iter().collect(),
        fuse: other.then(|| dir.join(format!("{name}.file"))).into_iter().collect(),
        ublk: ublk.map(Some),
        queues: 2,
        ..Disk::new(dir.join(name), options(name))
    }
}

/// The serving process; nothing where the test's own program runs it among others.
#[test]
fn serving() {
    let Some(dir) = std::env::var_os(FOLDER).map(PathBuf::from) else { return };
    let names = std::env::var(DISKS).expect("names");
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).init();
    report_panics();
    ringtap_export::sabotage::at_turns(|| assert!(!TRIPPED.take(), "as the test has it"));
    let ublk = std::env::var_os(UBLK).is_some();
    let disks = (0..).zip(names.split(','));
    let config = Config {
        groups: vec![],
        metrics: None,
        folder: None,
        disks: disks.map(|(number, name)| disk(&dir, name, ublk.then_some(number))).collect(),
        strict: false,
        nbd_limits: NbdLimits::default(),
        nbd_tls: None,
        socket_mode: 0o600,
        pid_file: None,
        control: std::env::var_os(CONTROL)
            .map(|path| ControlAt::Listen(path.into()))
            .into_iter()
            .collect(),
        announce: Announce::Text,
        sandbox: Default::default(),
        xen: None,
    };
    let wrap = |path: &Path, image| {
        let name = path.file_name().expect("a name");
        let trapped = name.as_encoded_bytes().starts_with(b"a");
        let trap = move |step, offset| {
            let trapped = trapped && step == "allocate";
            TRIPPED.set(trapped && offset == THREAD_TRAP || TRIPPED.get());
            assert!(!(trapped && offset == TRAP), "as the test has it");
        };
        Trapped::boxed(image, std::sync::Arc::new(trap))
    };
    let served = serve_wrapped(config, std::sync::Arc::new(wrap));
    if let Err(error) = &served {
        eprintln!("it ended: {error}");
    }
    std::process::exit(if Panic::any() { 101 } else { served.is_err().into() });
}

struct Server {
    dir: tempfile::TempDir,
    child: Child,
}

impl Server {
    fn start(names: &[&str]) -> Server {
        Server::start_with(names, false)
    }

    /// Start it, perhaps with a control socket.
    fn start_with(names: &[&str], control: bool) -> Server {
        let dir = tempfile::tempdir().expect("a folder");
        for name in names {
            let mut make = Command::new("qemu-img");
            make.args(["create", "-q", "-f", format(name).1]).arg(dir.path().join(name)).arg("16M");
            assert!(make.status().expect("qemu-img").success());
        }
        let mut program = Command::new(std::env::current_exe().expect("this program"));
        if control {
            program.env(CONTROL, dir.path().join("control"));
        }
        let mut child = program
            .args(["--exact", "serving", "--nocapture"])
            .env(FOLDER, dir.path())
            .env(DISKS, names.join(","))
            .env_remove("RUST_BACKTRACE")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("this program again");
        let said = BufReader::new(child.stdout.take().expect("its words")).lines();
        let mut lines = said.map(|line| line.expect("a line"));
        assert!(lines.any(|line| line.ends_with("ready")), "it is not ready");
        Server { dir, child }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn file(&self, name: &str) -> File {
        let path = self.path(&format!("{name}.file"));
        File::options().read(true).write(true).open(path).expect("the disk as a file")
    }

    /// Ask for something over NBD.
    fn ask(&self, name: &str, what: &str) -> Output {
        let uri = format!("nbd+unix:///{name}?socket={}", self.path("nbd").display());
        Command::new("timeout")
            .args(["60", "qemu-io", "-f", "raw", "-c", what, &uri])
            .output()
            .expect("qemu-io")
    }

    fn works(&self, name: &str, what: &str) -> bool {
        let output = self.ask(name, what);
        let said = String::from_utf8_lossy(&output.stdout);
        output.status.success() && said.contains("65536/65536 bytes")
    }

    /// Have commands carried out, and give their replies.
    fn control(&self, commands: &[&str]) -> Vec<String> {
        let mut socket = UnixStream::connect(self.path("control")).expect("the control socket");
        let negotiate = std::iter::once(&r#"{"execute": "qmp_capabilities"}"#);
        negotiate.chain(commands).for_each(|one| socket.write_all(one.as_bytes()).expect("sent"));
        socket.shutdown(Shutdown::Write).expect("the other half stays");
        let lines = BufReader::new(socket).lines().map(|line| line.expect("a line"));
        let replies = lines.filter(|line| !line.contains("\"event\""));
        replies.skip(2).collect()
    }

    /// Wait for its end; what it said in the log.
    fn end(mut self) -> (tempfile::TempDir, ExitStatus, String) {
        let mut said = String::new();
        self.child.stderr.take().expect("its log").read_to_string(&mut said).expect("its log");
        (self.dir, self.child.wait().expect("its end"), said)
    }

    fn stop(self) -> (tempfile::TempDir, ExitStatus, String) {
        let kill = ["-TERM".to_owned(), self.child.id().to_string()];
        assert!(Command::new("kill").args(kill).status().expect("kill").success());
        self.end()
    }
}

/// What the next server of the image finds.
fn found(path: &Path, name: &str) -> Vec<u8> {
    let image = open(path, &options(name)).expect("the image opens");
    let vbd = Vbd::new(image, CacheMode::Writeback);
    let mut tasks = Tasks::new(Box::new(Ring::new().expect("io_uring")));
    let io = tasks.io().clone();
    let all = tasks.block_on(async move {
        let buffer = io.buffer(LEN).expect("memory");
        let (len, mem) = (LEN as u64, buffer.mem());
        let request = Request { kind: Kind::Read, offset: 0, len, mem, fua: false };
        vbd.serve(&io, request).await.expect("read");
        vbd.close(&io).await.expect("closed");
        buffer.bytes().to_vec()
    });
    all.expect("the ring")
}

#[test]
fn a_panic_stops_the_disk_it_belongs_to_and_no_other() {
    let server = Server::start(&["a", "b"]);
    let (a, b) = (server.file("a"), server.file("b"));
    // Acknowledged, and nothing of it is flushed.
    a.write_all_at(&[7; LEN], 0).expect("it works");
    let before = fs::read(server.path("a")).expect("the image");
    let error = a.write_all_at(&[8; LEN], TRAP).expect_err("it panics");
    assert_eq!(error.raw_os_error(), Some(5), "{error}");
    assert!(a.read_exact_at(&mut [0; 512], 0).is_err(), "it goes on");
    assert!(!server.works("a", "read 0 64k"), "it goes on over NBD");
    let uri = format!("nbd+unix:///?socket={}", server.path("nbd").display());
    let list = Command::new("nbdinfo").arg("--list").arg(uri).output().expect("nbdinfo");
    let list = String::from_utf8(list.stdout).expect("text");
    assert!(list.contains("export=\"b\"") && !list.contains("export=\"a\""), "{list}");
    // The other does not notice.
    b.write_all_at(&[9; LEN], 0).expect("it works");
    assert!(server.works("b", "read -P 9 0 64k") && server.works("b", "write -P 6 1M 64k"));
    drop((a, b));
    let (dir, status, said) = server.stop();
    assert_eq!(status.code(), Some(101), "{said}");
    let path = dir.path().join("a");
    for words in ["as the test has it", "main.rs:", "thread a:", path.to_str().expect("text")] {
        let line = said.lines().find(|line| line.contains("stopped by a panic: "));
        assert!(line.is_some_and(|line| line.contains(words)), "no {words}: {said}");
    }
    assert!(fs::read(&path).expect("the image") == before, "it wrote metadata");
    assert!(found(&path, "a") == [7; LEN], "what was acknowledged is lost");
    let other = fs::read(dir.path().join("b")).expect("the image");
    assert!(other[..LEN] == [9; LEN] && other[1 << 20..][..LEN] == [6; LEN]);
}

/// With a control socket the stopped disk goes, and comes again with what was acknowledged.
#[test]
fn a_stopped_disk_is_taken_away_and_comes_again() {
    let server = Server::start_with(&["a"], true);
    let a = server.file("a");
    a.write_all_at(&[7; LEN], 0).expect("it works");
    a.write_all_at(&[8; LEN], TRAP).expect_err("it panics");
    drop(a);
    // Its exports end by themselves, and the server does not.
    let exports = || server.control(&[r#"{"execute": "query-block-exports"}"#]);
    while exports() != ["{\"return\":[]}"] {}
    let delete = r#"{"execute": "blockdev-del", "arguments": {"node-name": "a"}}"#;
    assert_eq!(server.control(&[delete]), ["{\"return\":{}}"]);
    assert!(found(&server.path("a"), "a") == [7; LEN], "what was acknowledged is lost");
    let add = format!(
        r#"{{"execute": "blockdev-add", "arguments": {{"node-name": "a", "driver": "qcow2",
            "file": {{"driver": "file", "filename": "{}", "cache": {{"direct": false}}}}}}}}"#,
        server.path("a").display()
    );
    assert_eq!(server.control(&[&add]), ["{\"return\":{}}"]);
    let quit = server.control(&[r#"{"execute": "quit"}"#]);
    assert_eq!(quit, ["{\"return\":{}}"]);
    let (_dir, status, said) = server.end();
    // There was a panic, whatever became of its disk.
    assert_eq!(status.code(), Some(101), "{said}");
}

#[test]
fn a_process_whose_disks_are_all_stopped_ends() {
    let server = Server::start(&["a", "a2"]);
    for name in ["a", "a2"] {
        assert!(server.works(name, "write -P 7 0 64k"));
        let failed = server.ask(name, "write -P 8 1M 64k");
        let said = String::from_utf8_lossy(&failed.stdout).into_owned()
            + &String::from_utf8_lossy(&failed.stderr);
        assert!(said.contains("write failed: Input/output error"), "{said}");
    }
    let (dir, status, said) = server.end();
    assert_eq!(status.code(), Some(101), "{said}");
    assert!(!dir.path().join("nbd").exists() && !dir.path().join("a.file").exists(), "{said}");
    assert!(said.contains("it ended: "), "{said}");
    for name in ["a", "a2"] {
        assert!(found(&dir.path().join(name), name) == [7; LEN]);
    }
}
