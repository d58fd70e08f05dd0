//! What a killed server left belongs to one image in one state: an image that was put back, copied over or
//! written to by others reads as it is, one that only its server died on reads as its guest knows it.

mod data_file;
mod devices;
mod full;
mod missing;
mod moved;
mod others;
mod verbs;

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use ringtap_tests::{Server, SetUp, file_system_of, ok, patience, plain, program, ringtap};

const SIZE: usize = 4 << 20;
/// What the image below an overlay is full of.
const BELOW: u8 = 0x11;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Overlay,
    Version2,
    Vpc,
    Differencing,
    DataFile,
}

impl Format {
    fn name(self) -> &'static str {
        if matches!(self, Format::Vpc | Format::Differencing) { "vpc" } else { "qcow2" }
    }
}

/// A client that stays: its end would be a flush.
struct Client {
    child: Child,
    commands: ChildStdin,
    prompts: ChildStdout,
}

impl Client {
    fn start(socket: &Path) -> Client {
        let uri = format!("nbd+unix:///?socket={}", plain(socket));
        let mut child = Command::new("qemu-io")
            .args(["-f", "raw", "-t", "writeback", &uri])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("qemu-io of qemu-utils");
        let (commands, prompts) = (child.stdin.take(), child.stdout.take());
        let (commands, prompts) = (commands.expect("its input"), prompts.expect("its output"));
        let mut client = Client { child, commands, prompts };
        client.prompt();
        client
    }

    /// Wait until it asks for the next command; what it said.
    fn prompt(&mut self) -> String {
        let mut said = Vec::new();
        while !said.ends_with(b"qemu-io> ") {
            let mut byte = [0];
            self.prompts.read_exact(&mut byte).expect("a prompt");
            said.push(byte[0]);
        }
        String::from_utf8_lossy(&said).into_owned()
    }

    fn run(&mut self, command: &str) {
        writeln!(self.commands, "{command}").expect("it listens");
        let said = self.prompt();
        assert!(!said.contains("failed") && !said.contains("rror"), "{command}: {said}");
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An image that is served, written to and whose server is killed; with a guest's view of it.
struct Case {
    folder: tempfile::TempDir,
    format: Format,
    cache: &'static str,
    disk: Vec<u8>,
}

/// No two cases of this program have the same.
fn next() -> usize {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    NUMBER.fetch_add(1, SeqCst)
}

impl Case {
    fn new(within: &Path, format: Format, cache: &'static str) -> Case {
        let folder = tempfile::tempdir_in(within).expect("a folder");
        let case = Case { folder, format, cache, disk: vec![] };
        let image = case.image();
        // Nothing else tells a lost image of this version from those of other tests with as much in them.
        let more =
            if format == Format::Version2 { std::process::id() as usize + next() } else { 0 };
        let size = SIZE + more % 1500 * 512;
        let create = |args: &[&str]| {
            ok(plain(&ringtap()), "", &[&["create", "-q"], args].concat());
        };
        match format {
            Format::Overlay => {
                fs::write(case.path("below"), vec![BELOW; SIZE]).expect("a file");
                create(&[
                    "-f",
                    "qcow2",
                    "-b",
                    plain(&case.path("below")),
                    "-F",
                    "raw",
                    plain(&image),
                ]);
            }
            Format::DataFile => {
                let data = format!("data_file={}", plain(&case.path("data")));
                create(&["-f", "qcow2", "-o", &data, plain(&image), "4M"]);
            }
            Format::Version2 => {
                let size = size.to_string();
                create(&["-f", "qcow2", "-o", "compat=0.10", plain(&image), &size]);
            }
            Format::Vpc => {
                create(&["-f", "vpc", "-o", "force_size=on", plain(&image), "4M"]);
            }
            Format::Differencing => {
                let below = case.path("below");
                create(&["-f", "vpc", "-o", "force_size=on", plain(&below), "4M"]);
                create(&["-f", "vpc", "-b", plain(&below), "-F", "vpc", plain(&image)]);
            }
        }
        let below = if format == Format::Overlay { BELOW } else { 0 };
        Case { disk: vec![below; size], ..case }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn image(&self) -> PathBuf {
        self.path("image")
    }

    fn socket(&self) -> PathBuf {
        self.path("nbd.sock")
    }

    fn serve(&self, more: &[&str]) -> Server {
        let (image, socket) = (self.image(), format!("unix:{}", plain(&self.socket())));
        let own = ["-f", self.format.name(), "--cache", self.cache, "--nbd", &socket];
        Server::start([&[plain(&image)], &own[..], more].concat())
    }

    /// Write 64 KiB at each of these places, in units of that; nothing is flushed unless asked.
    fn write(
        &mut self,
        client: &mut Client,
        places: std::ops::Range<usize>,
        pattern: u8,
        flush: bool,
    ) {
        for place in places {
            client.run(&format!("write -P {pattern} {} 64k", place << 16));
            self.disk[place << 16..(place + 1) << 16].fill(pattern);
        }
        if flush {
            client.run("flush");
        }
    }

    /// The whole disk as a client finds it.
    fn read(&self, server: Server) -> (Vec<u8>, String) {
        let (uri, to) =
            (format!("nbd+unix:///?socket={}", plain(&self.socket())), self.path("read"));
        ok("qemu-img", "qemu-utils", &["convert", "-f", "raw", "-O", "raw", &uri, plain(&to)]);
        let said = server.stop();
        (fs::read(to).expect("a file"), said)
    }

    /// The disk in an image as QEMU finds it.
    fn by_qemu(&self, image: &Path) -> Vec<u8> {
        let to = self.path("by-qemu");
        let from = ["convert", "-f", self.format.name(), "-O", "raw", plain(image), plain(&to)];
        ok("qemu-img", "qemu-utils", &from);
        fs::read(to).expect("a file")
    }

    fn ringtap(&self, args: &[&str]) -> Output {
        program(plain(&ringtap()), "", args)
    }

    /// Serve it, write, take a copy of it, write more, and kill the server.
    fn killed(&mut self, flush_before: bool, flush_after: bool, keep: &[&str]) {
        let server = self.serve(&[]);
        let client = &mut Client::start(&self.socket());
        self.write(client, 0..4, 0xa1, flush_before);
        let (image, to) = (self.image(), self.path("copy"));
        let copy = [keep, &[plain(&image), plain(&to)]].concat();
        ok(copy[0], "coreutils", &copy[1..]);
        tick();
        self.write(client, 2..10, 0xb2, flush_after);
        self.write(client, 40..44, 0xc3, false);
        self.kill(server);
    }

    /// Kill its server, which has another file than that of the image's name.
    fn kill_it_alone(&self, server: Server) {
        server.kill();
        tick();
    }

    /// Kill its server, and wait until the kernel has closed the image.
    fn kill(&self, server: Server) {
        server.kill();
        // What it has in flight ends first, on a disk that may stand still for a while.
        let end = std::time::Instant::now() + patience();
        while std::time::Instant::now() < end {
            let file = fs::File::options().read(true).write(true).open(self.image());
            let file = file.expect("the image");
            // QEMU's lock of who writes.
            let taken =
                rustix::fs::fcntl_lock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive);
            if taken.is_ok() {
                return tick();
            }
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        panic!("the dead server has its image still");
    }
}

/// Let the clock go on that file systems take their time stamps from: two states within a tick of it (10 ms at
/// HZ=100) have the same time and are not told apart.
fn tick() {
    std::thread::sleep(std::time::Duration::from_millis(25));
}

fn warnings(said: &str) -> Vec<&str> {
    // That logs end with the container is said in a container.
    let of_image = |line: &&str| line.contains("WARN") && !line.contains("--state-dir");
    said.lines().filter(of_image).collect()
}

/// A way of putting the copy in the image's place, or of writing to the image.
#[derive(Clone, Copy, Debug)]
enum Back {
    Shell(&'static str),
    QemuIo,
    QemuImg,
}

/// Commands with the copy and the image to be put in.
const WAYS: [(&str, Back); 13] = [
    ("cp", Back::Shell("cp copy image")),
    ("cp -p", Back::Shell("cp -p copy image")),
    ("cp --reflink", Back::Shell("cp --reflink=auto copy image")),
    ("rsync --inplace", Back::Shell("rsync --inplace --no-whole-file -I copy image")),
    ("rsync --inplace -t", Back::Shell("rsync --inplace --no-whole-file -I -t copy image")),
    (
        "dd",
        Back::Shell("dd if=copy of=image conv=notrunc bs=64k status=none; truncate -r copy image"),
    ),
    ("mv", Back::Shell("mv copy image")),
    ("mv of a copy with its times", Back::Shell("cp -p copy other && mv other image")),
    ("a clock set back", Back::Shell("cp copy image && touch -d '1 hour ago' image")),
    ("a clock set forward", Back::Shell("cp copy image && touch -d '1 hour' image")),
    ("qemu-io", Back::QemuIo),
    ("qemu-img", Back::QemuImg),
    ("scp -p", Back::Shell("cp copy image; touch -d @$(stat -c %Y copy) image")),
];

fn put_back(case: &Case, back: Back) {
    let image = case.image();
    match back {
        Back::Shell(script) => {
            let folder = case.folder.path();
            ok("sh", "", &["-ec", &format!("cd {}; {script}", plain(folder))]);
        }
        Back::QemuIo => {
            let write = ["-f", case.format.name(), "-c", "write -P 77 3M 64k", plain(&image)];
            ok("qemu-io", "qemu-utils", &write);
        }
        Back::QemuImg if case.format == Format::Vpc => {
            let (copy, vpc) = (case.path("copy"), ["-f", "vpc", "-O", "vpc"]);
            let words = [&["convert", "-n"], &vpc[..], &[plain(&copy), plain(&image)]].concat();
            ok("qemu-img", "qemu-utils", &words);
        }
        Back::QemuImg => {
            ok("qemu-img", "qemu-utils", &["snapshot", "-c", "between", plain(&image)]);
        }
    }
}

/// The image reads as it is, by QEMU's eyes, with one warning at most, and is whole.
fn reads_as_it_is(case: &Case, context: &str) {
    let expected = case.by_qemu(&case.image());
    let info = case.ringtap(&["info", "-f", case.format.name(), plain(&case.image())]);
    assert!(info.status.success(), "{context}: {info:?}");
    let server = case.serve(&[]);
    let (found, said) = case.read(server);
    let differs = found.iter().zip(&expected).position(|(one, other)| one != other);
    assert!(differs.is_none(), "{context}: byte {differs:?} is not as it was put there: {said}");
    let warned = warnings(&said);
    assert!(warned.len() == 1, "{context}: {said}");
    let (image, words) = (case.image(), ["check", "-f", case.format.name()]);
    let words = [&words[..], &[plain(&image)]].concat();
    let check = match case.format {
        Format::Vpc => case.ringtap(&words),
        _ => program("qemu-img", "qemu-utils", words),
    };
    assert!(matches!(check.status.code(), Some(0 | 3)), "{context}: {check:?}");
}

/// A new file system of that kind.
fn file_system(kind: &str) -> SetUp {
    let (mkfs, package): (&[&str], _) = match kind {
        "ext4" => (&["mke2fs", "-q", "-F", "-t", "ext4"], "e2fsprogs"),
        "xfs" => (&["mkfs.xfs", "-q", "-f"], "xfsprogs"),
        "btrfs" => (&["mkfs.btrfs", "-q", "-f"], "btrfs-progs"),
        _ => (&[], ""),
    };
    file_system_of(400, kind, mkfs, package)
}

fn on(kind: &str) {
    let set_up = file_system(kind);
    for format in [Format::Overlay, Format::Version2, Format::Vpc] {
        for (number, (name, back)) in WAYS.into_iter().enumerate() {
            // Each format meets another mixture of them.
            let mixed = number + format as usize;
            let (before, after) = (mixed % 2 == 0, mixed % 3 == 0);
            let cache = if mixed % 4 < 2 { "writeback" } else { "none" };
            let cache = if kind == "tmpfs" { "writeback" } else { cache };
            let mut case = Case::new(set_up.folder(), format, cache);
            case.killed(before, after, &["cp", "-p"]);
            put_back(&case, back);
            // Another file under the name: a format without a place for a stamp has nothing to warn of.
            let context = format!("{kind}, {format:?}, {cache}, {name}");
            if name.starts_with("mv") && format != Format::Overlay {
                let expected = case.by_qemu(&case.image());
                let (found, said) = case.read(case.serve(&[]));
                assert!(found == expected, "{context}: {said}");
                continue;
            }
            reads_as_it_is(&case, &context);
        }
        taken_up(&set_up, format, kind);
        during_a_write(&set_up, format, kind);
    }
    if kind == "btrfs" {
        rolled_back(&set_up);
    }
}

/// What is no change of the image's content keeps nobody from taking up what its server left.
fn taken_up(set_up: &SetUp, format: Format, kind: &str) {
    for script in [
        "true",
        "sleep 1.2",
        "chmod 600 image",
        "chown 1:1 image",
        "setfacl -m u:1:r image",
        "mv image other && mv other image",
        "ln image link",
        "cat image > backup; cp image backup",
    ] {
        let cache = if kind == "tmpfs" || script.len() % 2 == 0 { "writeback" } else { "none" };
        let mut case = Case::new(set_up.folder(), format, cache);
        case.killed(true, false, &["cp", "-p"]);
        ok("sh", "", &["-ec", &format!("cd {}; {script}", plain(case.folder.path()))]);
        // Who only reads sees it, too.
        let raw = case.path("raw");
        let image = case.image();
        let convert = ["convert", "-f", format.name(), "-O", "raw", plain(&image), plain(&raw)];
        let end = case.ringtap(&convert);
        assert!(end.status.success(), "{kind}, {format:?}, {script}: {end:?}");
        let read = fs::read(&raw).expect("a file");
        assert!(read == case.disk, "{kind}, {format:?}, {script}: convert: {end:?}");
        // Killed again and again while it is taken up.
        for micros in [0, 300, 3000] {
            let mut child = Command::new(ringtap())
                .args(["serve", plain(&case.image()), "-f", format.name(), "--cache", cache])
                .args(["--nbd", &format!("unix:{}", plain(&case.path("other.sock")))])
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .expect("ringtap");
            std::thread::sleep(std::time::Duration::from_micros(20_000 + micros));
            child.kill().expect("killed");
            child.wait().expect("its end");
        }
        let (found, said) = case.read(case.serve(&[]));
        let differs = found.iter().zip(&case.disk).position(|(one, other)| one != other);
        assert!(differs.is_none(), "{kind}, {format:?}, {script}: byte {differs:?}: {said}");
        assert!(warnings(&said).is_empty(), "{kind}, {format:?}, {script}: {said}");
    }
}

/// A copy that was taken while the guest wrote, and a server that was killed with writes in flight.
fn during_a_write(set_up: &SetUp, format: Format, kind: &str) {
    let mut case = Case::new(set_up.folder(), format, "writeback");
    let server = case.serve(&[]);
    case.write(&mut Client::start(&case.socket()), 0..4, 0xa1, true);
    let uri = format!("nbd+unix:///?socket={}", plain(&case.socket()));
    let mut load = Command::new("fio")
        .args(["--name=load", "--ioengine=nbd", "--uri", &uri, "--rw=randwrite", "--bs=64k"])
        .args(["--size=4M", "--iodepth=4", "--time_based", "--runtime=60"])
        .current_dir(case.folder.path())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("fio");
    let written = || fs::metadata(case.image()).expect("the image").modified().expect("a time");
    let begun = written();
    let waited = |since| {
        for _ in 0..1000 {
            if written() > since {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        panic!("fio does not write");
    };
    waited(begun);
    let (image, copy) = (case.image(), case.path("copy"));
    ok("cp", "coreutils", &["-p", plain(&image), plain(&copy)]);
    let copied = written();
    std::thread::sleep(std::time::Duration::from_millis(500));
    waited(copied);
    case.kill(server);
    let _ = load.kill();
    let _ = load.wait();
    ok("cp", "coreutils", &["-p", plain(&copy), plain(&image)]);
    let expected = case.by_qemu(&image);
    let (found, said) = case.read(case.serve(&[]));
    let differs = found.iter().zip(&expected).position(|(one, other)| one != other);
    assert!(differs.is_none(), "{kind}, {format:?}, during a write: byte {differs:?}: {said}");
}

/// A snapshot of the folder takes its place: the image has the same inode number there.
fn rolled_back(set_up: &SetUp) {
    for (format, deleted) in [
        (Format::Overlay, false),
        (Format::Overlay, true),
        (Format::Version2, false),
        (Format::Version2, true),
        (Format::Vpc, false),
        (Format::Vpc, true),
    ] {
        let volume = set_up.folder().join("volume");
        ok("btrfs", "btrfs-progs", &["subvolume", "create", plain(&volume)]);
        let mut case = Case::new(&volume, format, "writeback");
        let server = case.serve(&[]);
        let client = &mut Client::start(&case.socket());
        case.write(client, 0..4, 0xa1, false);
        let (kept, old) = (set_up.folder().join("kept"), set_up.folder().join("old"));
        ok("btrfs", "btrfs-progs", &["subvolume", "snapshot", plain(&volume), plain(&kept)]);
        case.write(client, 2..10, 0xb2, false);
        let inode = |path: &Path| fs::metadata(path).expect("a file").ino();
        let before = inode(&case.image());
        case.kill(server);
        fs::rename(&volume, &old).expect("moved");
        fs::rename(&kept, &volume).expect("moved");
        assert_eq!(inode(&case.image()), before);
        if deleted {
            ok("btrfs", "btrfs-progs", &["subvolume", "delete", plain(&old)]);
        }
        reads_as_it_is(&case, &format!("btrfs, {format:?}, rolled back, deleted: {deleted}"));
        drop(case);
        for volume in [&volume, &old].into_iter().filter(|volume| volume.exists()) {
            ok("btrfs", "btrfs-progs", &["subvolume", "delete", plain(volume)]);
        }
    }
}

#[test]
fn on_ext4() {
    on("ext4");
}

#[test]
fn on_xfs() {
    on("xfs");
}

#[test]
fn on_btrfs() {
    on("btrfs");
}

#[test]
fn on_tmpfs() {
    on("tmpfs");
}
