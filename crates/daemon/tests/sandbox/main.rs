//! Whoever owns a server's process, by any transport, reaches nothing but its disks.
//!
//! The process is this program, run again: there the first request that a queue thread serves runs `attacks.rs`, as if
//! its client had taken the process over. Each attack is refused; with the sandbox off each succeeds, or it would prove
//! nothing. It has no harness, for a server confines itself while it has one thread.

mod attacks;
mod modes;
mod told;
mod ublk;

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use clap::FromArgMatches;
use clap::{Args, Command as Clap};
use ringtap_daemon::{
    Address, Announce, Config, ControlAt, Disk, NbdLimits, Sandbox, report_panics, serve_wrapped,
    start_broker,
};
use ringtap_image::{CacheMode, Format, OpenOptions};
use ringtap_vbd::sabotage::Trapped;

use attacks::{Aims, attack};

/// Tells the program that it is to serve, in this folder.
const FOLDER: &str = "RINGTAP_TEST_SANDBOX_FOLDER";
/// By what.
const TRANSPORT: &str = "RINGTAP_TEST_SANDBOX_TRANSPORT";
/// The TCP port that nobody has allowed.
const PORT: &str = "RINGTAP_TEST_SANDBOX_PORT";
/// Whether it is confined, and whether it is controlled.
const CONFINED: &str = "RINGTAP_TEST_SANDBOX_CONFINED";
const CONTROL: &str = "RINGTAP_TEST_SANDBOX_CONTROL";
/// The user whom it becomes.
const USER: &str = "RINGTAP_TEST_SANDBOX_USER";
/// Whether nobody attacks it.
const NO_ATTACK: &str = "RINGTAP_TEST_SANDBOX_NO_ATTACK";

const TRANSPORTS: [&str; 3] = ["nbd", "vhost-user", "fuse"];

fn main() {
    if let Some(dir) = std::env::var_os(FOLDER) {
        serving(Path::new(&dir));
    }
    let wanted: Vec<String> = std::env::args().skip(1).filter(|it| !it.starts_with('-')).collect();
    let tests: [(&str, fn()); 5] = [
        ("an_owned_server_reaches_nothing_else", an_owned_server_reaches_nothing_else),
        ("of_a_server_of_another_user_nothing_is_roots", of_another_user),
        ("with_a_control_socket_the_system_is_out_of_reach", controlled),
        (
            "an_owned_server_of_block_devices_reaches_nothing_else",
            ublk::an_owned_server_of_block_devices_reaches_nothing_else,
        ),
        ("without_the_sandbox_each_attack_succeeds", without_the_sandbox_each_attack_succeeds),
    ];
    if std::env::args().any(|it| it == "--list") {
        tests.iter().for_each(|(name, _)| println!("{name}: test"));
        return;
    }
    let tests = tests.into_iter();
    let tests =
        tests.filter(|(name, _)| wanted.is_empty() || wanted.iter().any(|it| name.contains(it)));
    let mut passed = 0;
    for (name, test) in tests {
        test();
        passed += 1;
        println!("test {name} ... ok");
    }
    println!("\ntest result: ok. {passed} passed; 0 failed; 0 ignored; 0 measured; 0 filtered out");
}

fn disk(dir: &Path, transport: &str) -> Disk {
    let only = |its: &str| (transport == its).then(|| dir.join("served/at"));
    let options = OpenOptions {
        format: Some(Format::Qcow2),
        cache: CacheMode::Writeback,
        ..OpenOptions::default()
    };
    Disk {
        nbd: only("nbd").map(Address::Unix).into_iter().collect(),
        vhost_user: only("vhost-user").map(Address::Unix).into_iter().collect(),
        fuse: only("fuse").into_iter().collect(),
        ublk: (transport == "ublk").then_some(None),
        queues: 2,
        ..Disk::new(dir.join("served/disk.qcow2"), options)
    }
}

/// The server.
fn serving(dir: &Path) -> ! {
    let transport = std::env::var(TRANSPORT).expect("a transport");
    let confined = std::env::var_os(CONFINED).is_some();
    attacks::prepare();
    if confined {
        start_broker().expect("a broker");
    }
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).init();
    report_panics();
    let control = std::env::var_os(CONTROL).map(|_| ControlAt::Listen(dir.join("served/control")));
    let aims = Aims {
        other: dir.join("served/other.qcow2"),
        outside: dir.join("outside"),
        port: std::env::var(PORT).expect("a port").parse().expect("a number"),
        parent: std::os::unix::process::parent_id(),
        confined,
        user: std::env::var_os(USER).is_some(),
        device: (transport == "ublk").then(|| dir.join("served/disk.qcow2")),
    };
    let config = Config {
        groups: vec![],
        metrics: None,
        folder: None,
        disks: vec![disk(dir, &transport)],
        strict: true,
        nbd_limits: NbdLimits::default(),
        nbd_tls: None,
        socket_mode: 0o600,
        pid_file: None,
        control: control.into_iter().collect(),
        announce: Announce::Text,
        xen: None,
        sandbox: match confined {
            true => {
                let user = std::env::var(USER).ok().map(|it| it.parse().expect("a user"));
                Sandbox::On { allow: vec![], must: true, user }
            }
            false => Sandbox::Off,
        },
    };
    let aims = Arc::new(aims);
    let wrap = move |_: &Path, image| {
        let spared = std::env::var_os(NO_ATTACK).is_some();
        let (aims, done) = (aims.clone(), AtomicBool::new(spared));
        let main = std::thread::current().id();
        let trap = move |step: &str, _| {
            let here = step == "map" && std::thread::current().id() != main;
            if here && !done.swap(true, SeqCst) {
                attack(&aims);
            }
        };
        Trapped::boxed(image, Arc::new(trap))
    };
    let served = serve_wrapped(config, Arc::new(wrap));
    if let Err(error) = &served {
        eprintln!("it ended: {error}");
    }
    std::process::exit(served.is_err().into());
}

/// A server, and what is around it that it shall not reach.
struct Server {
    dir: tempfile::TempDir,
    child: Child,
    _tcp: TcpListener,
    _unix: UnixListener,
    _datagrams: UnixDatagram,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    fn start(transport: &str, confined: bool, control: bool) -> Server {
        Server::start_as(transport, confined, control, None)
    }

    /// The folder and the disk are that user's then, and the images of others are root's alone.
    fn start_as(transport: &str, confined: bool, control: bool, user: Option<&str>) -> Server {
        let dir = tempfile::tempdir().expect("a folder");
        for folder in ["served", "outside"] {
            fs::create_dir(dir.path().join(folder)).expect("a folder");
        }
        for name in ["served/disk.qcow2", "served/other.qcow2", "outside/other.qcow2"] {
            let mut make = Command::new("qemu-img");
            make.args(["create", "-q", "-f", "qcow2"]).arg(dir.path().join(name)).arg("16M");
            assert!(make.status().expect("qemu-img").success());
        }
        if user.is_some() {
            let of = |name: &str, mode| {
                let mode = fs::Permissions::from_mode(mode);
                fs::set_permissions(dir.path().join(name), mode).expect("its mode");
            };
            of("", 0o711);
            of("outside", 0o755);
            of("served/other.qcow2", 0o600);
            of("outside/other.qcow2", 0o600);
            for name in ["served", "served/disk.qcow2"] {
                chown(dir.path().join(name), Some(65534), Some(65534)).expect("given away");
            }
        }
        let tcp = TcpListener::bind("127.0.0.1:0").expect("a port");
        let unix = UnixListener::bind(dir.path().join("outside/socket")).expect("a socket");
        let datagrams = dir.path().join("outside/datagrams");
        let received = UnixDatagram::bind(&datagrams).expect("a socket");
        let mut program = Command::new(std::env::current_exe().expect("this program"));
        // The service manager, which it may tell only what a server has to say.
        program.env("NOTIFY_SOCKET", &datagrams);
        program.env(FOLDER, dir.path()).env(TRANSPORT, transport);
        program.env(PORT, tcp.local_addr().expect("it").port().to_string());
        for (name, on) in [(CONFINED, confined), (CONTROL, control)] {
            if on {
                program.env(name, "1");
            }
        }
        if let Some(user) = user {
            program.env(USER, user).env("STATE_DIRECTORY", dir.path().join("kept"));
        }
        let mut child = program
            .env("RINGTAP_STATE_DIR", dir.path().join("state"))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("this program again");
        let said = BufReader::new(child.stdout.take().expect("its words")).lines();
        let mut lines = said.map(|line| line.expect("a line"));
        if !lines.any(|line| line.ends_with("ready")) {
            let mut text = String::new();
            let _ = child.stderr.take().expect("its log").read_to_string(&mut text);
            panic!("it is not ready: {text}");
        }
        Server { dir, child, _tcp: tcp, _unix: unix, _datagrams: received }
    }

    /// Have it serve a request, and what its attacks came to then.
    fn attacked(mut self, transport: &str) -> BTreeMap<String, String> {
        let at = self.dir.path().join("served/at");
        match transport {
            "nbd" => {
                let uri = format!("nbd+unix:///?socket={}", at.display());
                let mut read = Command::new("qemu-io");
                read.args(["-f", "raw", "-c", "read 0 4k", &uri]);
                assert!(read.output().expect("qemu-io").status.success(), "the disk is served");
            }
            "vhost-user" => load(&at),
            _ => {
                let mut bytes = [0; 4096];
                let mut file = fs::File::open(&at).expect("the file");
                file.read_exact(&mut bytes).expect("the disk is served");
            }
        }
        let id = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(id, rustix::process::Signal::TERM).expect("told");
        let mut text = String::new();
        self.child.stderr.take().expect("its log").read_to_string(&mut text).expect("text");
        assert!(self.child.wait().expect("its end").success(), "it ends as told: {text}");
        let lines = text.lines().filter_map(|line| line.strip_prefix("attack: "));
        let found: BTreeMap<String, String> = lines
            .filter_map(|line| line.split_once(": "))
            .map(|(name, end)| (name.to_owned(), end.to_owned()))
            .collect();
        assert!(found.contains_key("the end"), "they were all tried: {text}");
        assert!(!text.contains("cannot be had here"), "{text}");
        found
    }
}

/// A few requests by vhost-user.
fn load(socket: &Path) {
    let words = ["load", "--seconds", "0.2", "--depth", "1", "--socket"].map(PathBuf::from);
    let matches = ringtap_load::LoadArgs::augment_args(Clap::new("load"))
        .get_matches_from(words.into_iter().chain([socket.to_owned()]));
    let args = ringtap_load::LoadArgs::from_arg_matches(&matches).expect("arguments");
    assert!(!ringtap_load::run(args).expect("the disk is served").failed());
}

fn refused(found: &BTreeMap<String, String>, transport: &str, but: &[&str]) {
    for (name, end) in found {
        let expected = match name.as_str() {
            "the end" => continue,
            name if but.contains(&name) => "succeeded",
            _ => "refused",
        };
        assert!(end.starts_with(expected), "{transport}: {name}: {end}");
    }
    println!("{transport}: {} attacks refused", found.len() - 1 - but.len());
}

fn an_owned_server_reaches_nothing_else() {
    for transport in TRANSPORTS {
        let found = Server::start(transport, true, false).attacked(transport);
        refused(&found, transport, &[]);
    }
}

/// With a control socket, too, files are those that this user may open. The broker makes what it made before.
fn of_another_user() {
    let asked = [
        "ask for a socket elsewhere",
        "ask for a connection elsewhere",
        "ask for a mount elsewhere",
        "ask for a connection by TCP",
    ];
    for (transports, control, but) in [(&TRANSPORTS[..], false, &[][..]), (&["nbd"], true, &asked)]
    {
        for transport in transports {
            let server = Server::start_as(transport, true, control, Some("65534:65534"));
            let found = server.attacked(transport);
            for attack in ["be root", "become root again", "have root's group again"] {
                assert!(found.contains_key(attack), "{attack}: {found:?}");
            }
            let numbers = "[65534, 65534, 65534, 65534, 65534, 65534]";
            assert!(found["be root"].contains(numbers), "{found:?}");
            refused(&found, &format!("{transport} of another user"), but);
        }
    }
}

/// Disks that are to come may lie anywhere, and be shown at any socket; but not in what is the system's.
fn controlled() {
    let anywhere = [
        "open another tenant's image",
        "open it by a descriptor",
        "open an image elsewhere",
        "ask for a socket elsewhere",
        "ask for a connection elsewhere",
        "ask for a mount elsewhere",
        "ask for a connection by TCP",
        "make a file elsewhere",
    ];
    let found = Server::start("nbd", true, true).attacked("nbd");
    refused(&found, "nbd with a control socket", &anywhere);
}

fn without_the_sandbox_each_attack_succeeds() {
    for transport in TRANSPORTS {
        let found = Server::start(transport, false, false).attacked(transport);
        let refused: Vec<_> =
            found.iter().filter(|(_, end)| !end.starts_with("succeeded")).collect();
        assert_eq!(refused.len(), 1, "{refused:?}");
        assert_eq!(refused[0].0, "the end");
    }
}
