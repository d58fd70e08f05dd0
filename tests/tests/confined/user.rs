//! Servers that root starts and that become another user (`--user`): what they serve, keep and make.

use std::fs::{self, File, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use ringtap_tests::{is_well, load, ok, patience, plain, program, ringtap, ringtap_of};
use rustix::process::{Signal, kill_process};

use crate::{MIB, Server, broker_of, lives, pid, until};

const USER: u32 = 65534;

/// A folder of root's, with one of the user's for images, and one of root's alone for sockets.
struct Bench(tempfile::TempDir);

impl Bench {
    fn new() -> Bench {
        let bench = Bench(tempfile::tempdir_in("/var/tmp").expect("a folder"));
        for (folder, mode) in [("", 0o711), ("images", 0o700), ("sockets", 0o700)] {
            fs::create_dir_all(bench.path(folder)).expect("a folder");
            let mode = Permissions::from_mode(mode);
            fs::set_permissions(bench.path(folder), mode).expect("its mode");
        }
        bench.give("images");
        bench
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        plain(&self.path(name)).to_owned()
    }

    fn give(&self, name: &str) {
        chown(self.path(name), Some(USER), Some(USER)).expect("given away");
    }

    fn image(&self, format: &str, name: &str) -> String {
        let name = format!("images/{name}");
        let path = self.text(&name);
        ok("qemu-img", "qemu-utils", &["create", "-q", "-f", format, &path, "16M"]);
        self.give(&name);
        path
    }

    fn command(&self, mut command: Command) -> Command {
        command.env("RINGTAP_STATE_DIR", self.path("logs"));
        command.env("STATE_DIRECTORY", self.path("records"));
        command
    }

    fn serve(&self, words: &str) -> Server {
        self.serve_by(Command::new(ringtap()), words)
    }

    fn serve_by(&self, command: Command, words: &str) -> Server {
        Server::begin(self.command(command), self.0.path(), &self.path("log"), words)
    }

    /// What it says where it does not serve.
    fn refused(&self, command: &[&str], words: &str, status: i32) -> String {
        // Where it serves it would not end.
        let mut whole = Command::new("timeout");
        whole.arg(patience().as_secs().to_string()).args(command).arg(ringtap());
        whole.args(words.split(' ')).current_dir(self.0.path()).stdin(Stdio::null());
        let output = whole.output().expect("timeout of coreutils");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(status), "{words}: {said}");
        said
    }

    /// Have `qemu-io` do that with the export of that name.
    fn io(&self, export: &str, commands: &[&str]) {
        let uri = format!("nbd+unix:///{export}?socket={}", self.text("sockets/n.sock"));
        let commands = commands.iter().flat_map(|it| ["-c", it]);
        let words: Vec<&str> = ["-f", "raw"].into_iter().chain(commands).chain([&*uri]).collect();
        let said = ok("qemu-io", "qemu-utils", &words);
        assert!(!said.contains("failed"), "{said}");
    }

    /// The process that serves from then on.
    fn upgraded(&self, of: &str) -> u32 {
        let output = ringtap_of(&["upgrade", of, "--output", "json"]);
        assert!(output.status.success(), "{output:?}");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let digits: String = text.chars().filter(char::is_ascii_digit).collect();
        digits.parse().expect("a process")
    }

    fn control(&self, words: &str) -> Output {
        let control = format!("unix:{}", self.text("sockets/c.sock"));
        let words: Vec<&str> = words.split(' ').chain(["--control", &control]).collect();
        ringtap_of(&words)
    }

    fn owner(&self, name: &str) -> (u32, u32) {
        let facts = fs::symlink_metadata(self.path(name)).unwrap_or_else(|error| {
            panic!("{name}: {error}");
        });
        (facts.uid(), facts.mode() & 0o7777)
    }

    fn sockets(&self) -> Vec<String> {
        let entries = fs::read_dir(self.path("sockets")).expect("the folder").flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    }
}

fn status_of(process: u32, name: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{process}/status")).expect("its status");
    let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("a line");
    line.trim_start_matches(':').split_whitespace().collect::<Vec<_>>().join(" ")
}

/// It is nothing but the user, and its broker is root still.
#[track_caller]
fn is_the_user(process: u32, broker: Option<u32>) {
    let four = [USER; 4].map(|it| it.to_string()).join(" ");
    for (name, expected) in [("Uid", &*four), ("Gid", &*four), ("Groups", "65534")] {
        assert_eq!(status_of(process, name), expected, "{name}");
    }
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(status_of(process, set), "0".repeat(16), "{set}");
    }
    assert_eq!(status_of(process, "Seccomp"), "2");
    assert_eq!(status_of(broker.expect("a broker"), "Uid"), "0 0 0 0");
    // Nobody of the user looks into it.
    let owner = fs::metadata(format!("/proc/{process}/environ")).expect("it").uid();
    assert_eq!(owner, 0, "it can be dumped");
}

#[test]
fn disks_are_served_from_a_folder_of_roots() {
    let bench = Bench::new();
    for format in ["raw", "qcow2"] {
        let image = bench.image(format, format);
        let words = format!(
            "serve {image} -f {format} --nbd unix:sockets/n.sock --vhost-user unix:sockets/v.sock --socket-mode 660 \
             --user nobody"
        );
        let mut server = bench.serve(&words);
        is_the_user(server.child.id(), server.broker());
        for socket in ["sockets/n.sock", "sockets/v.sock"] {
            assert_eq!(bench.owner(socket), (USER, 0o660), "{socket}");
        }
        is_well(load(bench.text("sockets/v.sock"), "1"));
        bench.io("", &["write -P 7 1M 64k", "flush", "read -P 7 1M 64k"]);
        server.signal(Signal::TERM);
        assert!(server.ends().success(), "{}", server.log());
        assert_eq!(bench.sockets(), [""; 0], "{}", server.log());
        assert!(server.log().contains("user 65534"), "{}", server.log());
        let said = ok("qemu-io", "qemu-utils", &["-f", format, "-c", "read -P 7 1M 64k", &image]);
        assert!(!said.contains("failed"), "{said}");
    }
    assert_eq!(bench.owner("records-65534"), (USER, 0o700));
}

/// A client that stays: its end would be a flush.
struct Client(Child);

impl Client {
    fn wrote(uri: &str, command: &str) -> Client {
        let mut child = Command::new("qemu-io")
            .args(["-f", "raw", "-t", "writeback", uri])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("qemu-io of qemu-utils");
        writeln!(child.stdin.as_mut().expect("its input"), "{command}").expect("it listens");
        let (mut said, out) = (String::new(), child.stdout.as_mut().expect("its words"));
        while !said.contains("ops/sec") {
            let mut byte = [0];
            out.read_exact(&mut byte).expect("it says what it did");
            said.push(byte[0].into());
        }
        assert!(said.contains("wrote"), "{said}");
        Client(child)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn what_a_killed_server_had_not_flushed_is_the_next_ones() {
    let bench = Bench::new();
    let image = bench.image("qcow2", "a");
    let words = format!(
        "serve {image} -f qcow2 --cache writeback --nbd unix:sockets/n.sock --user 65534:65534"
    );
    let mut server = bench.serve(&words);
    let uri = format!("nbd+unix:///?socket={}", bench.text("sockets/n.sock"));
    let client = Client::wrote(&uri, "write -P 9 2M 256k");
    let broker = server.broker().expect("a broker");
    server.signal(Signal::KILL);
    server.ends();
    until("the broker is still there", || !lives(broker));
    drop(client);
    assert_eq!(bench.sockets(), ["n.sock"], "a dead socket, in a folder of root's");
    assert_eq!(bench.owner("logs-65534"), (USER, 0o700));
    let logs = fs::read_dir(bench.path("logs-65534")).expect("its logs").flatten();
    assert!(logs.count() > 0);
    assert_eq!(fs::read_dir(bench.path("logs")).expect("root's").count(), 0);
    let mut next = bench.serve(&words);
    bench.io("", &["read -P 9 2M 256k"]);
    next.signal(Signal::TERM);
    assert!(next.ends().success(), "{}", next.log());
    ok("qemu-img", "qemu-utils", &["check", "-q", &image]);
    let said = ok("qemu-io", "qemu-utils", &["-c", "read -P 9 2M 256k", &image]);
    assert!(!said.contains("failed"), "{said}");
}

#[test]
fn a_daemon_makes_overlays_of_the_users_and_is_followed_by_one_of_the_users() {
    let bench = Bench::new();
    let image = bench.image("raw", "a.raw");
    let others = bench.path("images/roots.raw");
    File::create(&others).and_then(|it| it.set_len(MIB)).expect("a file");
    fs::set_permissions(&others, Permissions::from_mode(0o600)).expect("its mode");
    let words = "daemon --control unix:sockets/c.sock --disks disks.d --persist --user nobody";
    fs::create_dir(bench.path("disks.d")).expect("a folder");
    let said = bench.refused(&[], words, 2);
    assert!(said.contains("--persist: user 65534") && said.contains("chown"), "{said}");
    bench.give("disks.d");
    let mut server = bench.serve(words);
    let done = |words: &str| {
        let output = bench.control(words);
        assert!(output.status.success(), "{words}: {output:?}");
    };
    done(&format!(
        "disk add {image} -f raw --node-name a --nbd a --nbd-server unix:{}",
        bench.text("sockets/n.sock")
    ));
    assert_eq!(bench.owner("disks.d/a.toml").0, USER);
    bench.io("a", &["write -P 3 0 64k"]);
    done(&format!("disk snapshot a {}", bench.text("images/over.qcow2")));
    assert_eq!(bench.owner("images/over.qcow2").0, USER);
    bench.io("a", &["write -P 4 64k 64k", "read -P 3 0 64k"]);
    let refused = bench.control(&format!("disk add {} -f raw --node-name b", plain(&others)));
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("user 65534 (--user)"), "{said}");

    let second = bench.upgraded(&format!("unix:{}", bench.text("sockets/c.sock")));
    assert!(server.ends().success(), "{}", server.log());
    is_the_user(second, broker_of(second));
    let third = bench.upgraded(&second.to_string());
    until("the second is still there", || !lives(second));
    is_the_user(third, broker_of(third));
    bench.io("a", &["read -P 3 0 64k", "read -P 4 64k 64k"]);
    kill_process(pid(third), Signal::TERM).expect("told");
    until("the third is still there", || !lives(third));
    assert_eq!(bench.sockets(), [""; 0], "{}", server.log());
}

#[test]
fn rights_of_a_unit_are_enough() {
    let bench = Bench::new();
    let image = bench.image("qcow2", "a");
    let mut command = Command::new("setpriv");
    // What docs/security.md has a drop-in add to the units.
    command.args(["--bounding-set", "-all,+dac_override,+setuid,+setgid,+kill", "--no-new-privs"]);
    command.arg(ringtap());
    let words = format!("serve {image} -f qcow2 --nbd unix:sockets/n.sock --user nobody");
    let mut server = bench.serve_by(command, &words);
    let broker = server.broker().expect("a broker");
    // As systemctl reload does, that unit's processes look and tell with these rights alone.
    let as_unit = |words: &str| {
        let rights = ["--bounding-set", "-all,+dac_override,+setuid,+setgid,+kill"];
        let own = plain(&ringtap()).to_owned();
        program(
            "setpriv",
            "util-linux",
            [&rights[..], &[&*own], &words.split(' ').collect::<Vec<_>>()].concat(),
        )
    };
    let process = server.child.id();
    for words in [format!("reload {process}"), format!("upgrade --if-changed {process}")] {
        let output = as_unit(&words);
        assert!(output.status.success(), "{words}: {output:?}");
    }
    assert!(lives(broker));
    assert_eq!(status_of(process, "Uid"), "65534 65534 65534 65534");
    assert!(!server.log().contains("cannot"), "{}", server.log());
    bench.io("", &["write -P 7 1M 64k", "read -P 7 1M 64k"]);
    server.signal(Signal::TERM);
    assert!(server.ends().success(), "{}", server.log());
    // Without them it serves nothing.
    let less = ["setpriv", "--bounding-set", "-all,+dac_override"];
    let said = bench.refused(&less, &words, 1);
    assert!(said.contains("cannot become user 65534") && said.contains("CAP_SETUID"), "{said}");
    assert_eq!(bench.sockets(), [""; 0]);
}

#[test]
fn what_does_not_go_with_another_user_is_refused() {
    let bench = Bench::new();
    let image = bench.image("raw", "a");
    let serve = format!("serve {image} -f raw --nbd unix:sockets/n.sock");
    for (more, said, status) in [
        ("--user nobody --sandbox off", "leave out --sandbox off", 2),
        ("--user nobody --ublk", "--user does not go with --ublk", 2),
        ("--user nobody --ublk --sandbox on", "--user does not go with --ublk", 2),
        ("--user 0", "name another", 2),
        ("--user no-such-user", "this host has no user no-such-user", 2),
    ] {
        let told = bench.refused(&[], &format!("{serve} {more}"), status);
        assert!(told.contains(said), "{more}: {told}");
    }
    let nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
    let binary = bench.text("images/ringtap");
    ok("cp", "coreutils", &[plain(&ringtap()), &binary]);
    let words: Vec<&str> = serve.split(' ').chain(["--user", "nobody"]).collect();
    let output = program(nobody[0], "util-linux", [&nobody[1..], &[&*binary], &words].concat());
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(2) && told.contains("--user is for root"), "{told}");
    // An image of root's, and a folder where the user makes nothing.
    fs::set_permissions(bench.path("images"), Permissions::from_mode(0o755)).expect("its mode");
    let roots = bench.path("roots.raw");
    File::create(&roots).and_then(|it| it.set_len(MIB)).expect("a file");
    fs::set_permissions(&roots, Permissions::from_mode(0o600)).expect("its mode");
    let words = "serve roots.raw -f raw --nbd unix:sockets/n.sock --user nobody";
    let told = bench.refused(&[], words, 1);
    assert!(told.contains("Permission denied") && told.contains("user 65534 (--user)"), "{told}");
    assert_eq!(Path::new(&roots).metadata().expect("it").uid(), 0);
}
