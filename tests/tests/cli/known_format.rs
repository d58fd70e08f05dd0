//! An image is written to as the format it is known to be, and as no other.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use crate::program::{Output, Running, program, python};
use crate::served::{Server, command};
use crate::{disk, folder, run};

const ATTRIBUTE: &str = "user.ringtap.format";

/// What is written down, as whoever looks at the file sees it.
fn attribute(path: &Path) -> Option<String> {
    let mut text = [0; 64];
    let len = rustix::fs::getxattr(path, ATTRIBUTE, &mut text[..]).ok()?;
    Some(String::from_utf8_lossy(&text[..len]).into_owned())
}

fn serve(folder: &Path, words: &str) -> Output {
    Running::start(command(folder, words)).wait()
}

/// What a guest or a program may put at the beginning of its disk.
fn sign(path: &Path, signature: &[u8]) {
    let file = fs::File::options().write(true).open(path).expect("open");
    file.write_all_at(signature, 0).expect("written");
}

const SIGNATURES: [(&str, &[u8]); 4] = [
    ("luks", b"LUKS\xba\xbe\0\x01"),
    ("qcow2", b"QFI\xfb\0\0\0\x03"),
    ("vpc", b"conectix"),
    ("vdi", b"<<< Oracle VM VirtualBox Disk Image >>>\n\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x7f\x10\xda\xbe"),
];

#[test]
fn one_wrong_letter_destroys_no_image_that_was_made_here() {
    let dir = folder();
    run(dir.path(), "create -q -f qcow2 x 8M").ok();
    let path = dir.path().join("x");
    let before = (fs::read(&path).expect("it"), attribute(&path));
    for words in [
        "serve x -f raw --nbd unix:s",
        "resize -q -f raw x +1M",
        "convert -q -n -f raw null.raw -O raw x",
    ] {
        disk(dir.path(), "null.raw", 1 << 20);
        let said = run(dir.path(), words).failed(1);
        assert!(said.contains("qcow2") && said.contains("--force-format"), "{words}: {said}");
        assert_eq!((fs::read(&path).expect("it"), attribute(&path)), before, "{words}");
    }
    // Who only reads may look at it as at anything.
    run(dir.path(), "convert -q -f raw x -O raw copy").ok();
    assert_eq!(fs::read(dir.path().join("copy")).expect("it"), before.0);
    // A serve that fails leaves the record, forced or not.
    serve(dir.path(), "x -f raw --force-format --nbd unix:/nonexistent/s").failed(1);
    assert_eq!(attribute(&path), before.1);
    let server = Server::start(dir.path(), "x -f raw --force-format --nbd unix:s");
    server.stop().ok();
    if before.1.is_some() {
        assert_eq!(attribute(&path).as_deref(), Some("raw"));
    }
}

#[test]
fn a_signature_is_heeded_where_nothing_is_written_down() {
    let dir = folder();
    for (name, signature) in SIGNATURES {
        let path = dir.path().join("x");
        disk(dir.path(), "x", 1 << 20);
        sign(&path, signature);
        let bytes = fs::read(&path).expect("it");
        for words in ["serve x -f raw --nbd unix:s", "resize -q -f raw x +1M"] {
            let said = run(dir.path(), words).failed(1);
            assert!(said.contains("signature") && said.contains(name), "{words}: {said}");
            assert!(said.contains("amend --record-format raw"), "{said}");
        }
        // Nor is any of it taken for raw where no format is named.
        assert!(serve(dir.path(), "x --nbd unix:s").failed(2).contains("-f raw"));
        assert_eq!(fs::read(&path).expect("it"), bytes);
        run(dir.path(), "resize -q -f raw --force-format x +1M").ok();
        fs::remove_file(&path).expect("removed");
    }
}

#[test]
fn a_raw_disk_stays_one_whatever_its_guest_makes_of_it() {
    let dir = folder();
    for (name, signature) in SIGNATURES {
        let path = dir.path().join("x");
        disk(dir.path(), "x", 1 << 20);
        // Made elsewhere, and first served as raw.
        let server = Server::start(dir.path(), "x -f raw --nbd unix:s");
        let write = "import nbd, sys; h = nbd.NBD(); h.connect_uri(sys.argv[1]); \
                     h.pwrite(bytes.fromhex(sys.argv[2]) + bytes(512 - len(sys.argv[2]) // 2), 0)";
        let hex: String = signature.iter().map(|byte| format!("{byte:02x}")).collect();
        Running::start(python(write, &[&server.uri(0), &hex])).wait().ok();
        server.stop().ok();
        if attribute(&path).is_none() {
            eprintln!("skipped: no extended attributes here");
            return;
        }
        for words in ["x -f raw --nbd unix:s", "x --nbd unix:s"] {
            let server = Server::start(dir.path(), words);
            assert_eq!(server.facts["disks"][0]["format"], "raw", "{name}");
            let said = server.stop();
            assert!(!said.stderr.contains("signature"), "{name}: {}", said.stderr);
            said.ok();
        }
        let said = serve(dir.path(), "x -f qcow2 --nbd unix:s").failed(1);
        assert!(said.contains("recorded as raw"), "{name}: {said}");
        fs::remove_file(&path).expect("removed");
    }
}

#[test]
fn a_record_lost_by_a_copy_is_made_again() {
    let dir = folder();
    run(dir.path(), "create -q -f qcow2 a 8M").ok();
    let copied = Command::new("cp").current_dir(dir.path()).args(["a", "b"]).status();
    assert!(copied.expect("cp").success());
    assert!(serve(dir.path(), "b --nbd unix:s").failed(2).contains("not named"));
    let said = run(dir.path(), "amend --record-format vpc b").failed(2);
    assert!(said.contains("looks like qcow2"), "{said}");
    run(dir.path(), "amend --record-format qcow2 b").ok();
    let server = Server::start(dir.path(), "b --nbd unix:s");
    assert_eq!(server.facts["disks"][0]["format"], "qcow2");
    // Nobody has it written down otherwise meanwhile.
    let said = run(dir.path(), "amend --record-format raw b").failed(1);
    assert!(said.contains("process"), "{said}");
    server.stop().ok();
    let said = run(dir.path(), "amend --record-format raw b");
    assert!(said.stderr.contains("bears the signature of qcow2"), "{}", said.stderr);
    said.ok();
    let server = Server::start(dir.path(), "b -f raw --nbd unix:s");
    server.stop().ok();
}

/// Every verb that writes, on an image recorded as something else.
#[test]
fn no_verb_writes_to_an_image_as_another_format() {
    let dir = folder();
    disk(dir.path(), "raw", 4 << 20);
    run(dir.path(), "amend --record-format raw raw").ok();
    run(dir.path(), "create -q -f qcow2 base 4M").ok();
    run(dir.path(), "create -q -b base -F qcow2 over").ok();
    // Its guest has written a qcow2 image onto it.
    let image = fs::read(dir.path().join("base")).expect("an image");
    sign(&dir.path().join("raw"), &image);
    let before = fs::read(dir.path().join("raw")).expect("it");
    for words in [
        "serve raw -f qcow2 --nbd unix:s",
        "resize -q -f qcow2 raw +1M",
        "amend -q -f qcow2 -o lazy_refcounts=on raw",
        "snapshot -f qcow2 -c one raw",
        "bitmap -f qcow2 --add raw one",
        "check -f qcow2 --repair all raw",
        "rebase -f qcow2 -u -b base -F qcow2 raw",
        "convert -q -n -f qcow2 base -O qcow2 raw",
    ] {
        let said = run(dir.path(), words).failed(1);
        assert!(said.contains("recorded as raw"), "{words}: {said}");
        assert!(fs::read(dir.path().join("raw")).expect("it") == before, "{words}");
    }
    // An overlay that calls the image below it something else.
    run(dir.path(), "rebase -u -b raw -F qcow2 over").ok();
    let said = run(dir.path(), "commit over").failed(1);
    assert!(said.contains("recorded as raw"), "{said}");
    assert!(fs::read(dir.path().join("raw")).expect("it") == before);
}

/// A loop device, detached at the end.
struct Loop(String);

impl Loop {
    fn of(file: &Path) -> Option<Loop> {
        let mut attach = program("losetup", "mount");
        attach.args(["-f", "--show"]).arg(file);
        let told = Running::start(attach).wait();
        told.status.success().then(|| Loop(told.stdout.trim().to_owned()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["-d", &self.0]).status();
    }
}

#[test]
fn what_has_no_attributes_has_its_record_in_the_state_folder() {
    let dir = folder();
    let state = dir.path().join("state");
    let own = |words: &str| {
        let mut command = command(dir.path(), words);
        command.env("STATE_DIRECTORY", &state);
        command
    };
    disk(dir.path(), "one", 4 << 20);
    disk(dir.path(), "two", 4 << 20);
    let Some(device) = Loop::of(&dir.path().join("one")) else {
        eprintln!("skipped: no loop devices here");
        return;
    };
    let words = format!("{} -f raw --nbd unix:s", device.0);
    Server::started(own(&words)).stop().ok();
    sign(Path::new(&device.0), SIGNATURES[1].1);
    let server = Server::started(own(&format!("{} --nbd unix:s", device.0)));
    assert_eq!(server.facts["disks"][0]["format"], "raw");
    server.stop().ok();
    let said = Running::start(own(&format!("{} -f qcow2 --nbd unix:s", device.0))).wait().failed(1);
    assert!(said.contains("recorded as raw"), "{said}");
    // What has its number next is another disk, of which nothing is known.
    let number = device.0.clone();
    drop(device);
    let mut attach = program("losetup", "mount");
    attach.args([&number]).arg(dir.path().join("two"));
    Running::start(attach).wait().ok();
    let device = Loop(number);
    sign(Path::new(&device.0), SIGNATURES[1].1);
    let said = Running::start(own(&words)).wait().failed(1);
    assert!(said.contains("bears the signature of qcow2"), "{said}");
    drop(device);
    // And the first is known again, at whatever number.
    let device = Loop::of(&dir.path().join("one")).expect("a loop device");
    Server::started(own(&format!("{} --nbd unix:s", device.0))).stop().ok();
}

/// As units give it, where FORMAT= is not set.
#[test]
fn an_empty_format_is_the_one_written_down() {
    let dir = folder();
    run(dir.path(), "create -q -f qcow2 a 1M").ok();
    let mut words = command(dir.path(), "a --nbd unix:s");
    words.args(["-f", ""]);
    let server = Server::started(words);
    assert_eq!(server.facts["disks"][0]["format"], "qcow2");
    server.stop().ok();
}

/// Scripts have stderr and JSON in one pipe.
#[test]
fn a_format_told_by_its_signature_is_said_once_and_not_beside_json() {
    let dir = folder();
    for name in ["x", "y"] {
        let create = ["create", "-q", "-f", "qcow2", name, "1M"];
        let made = program("qemu-img", "qemu-utils").current_dir(dir.path()).args(create).status();
        assert!(made.expect("qemu-img").success());
    }
    for words in ["map --output json x", "measure -O raw --output json x"] {
        let said = run(dir.path(), words);
        assert!(said.stderr.is_empty(), "{words}: {}", said.stderr);
        said.ok();
    }
    for (words, notes) in [("map x", 1), ("compare x x", 1), ("compare x y", 2)] {
        let said = run(dir.path(), words);
        assert_eq!(said.stderr.matches("note:").count(), notes, "{words}: {}", said.stderr);
        said.ok();
    }
}
