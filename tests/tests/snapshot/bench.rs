//! Images that are served, each over NBD and vhost-user, and controlled.

use std::fs;
use std::path::PathBuf;

use ringtap_tests::{Control, Server, ok, ringtap_of};
use serde_json::{Value, json};
use tempfile::TempDir;

pub const MIB: u64 = 1 << 20;

/// A folder with images, their sockets and the server's.
pub struct Bench {
    pub dir: TempDir,
}

impl Bench {
    pub fn new() -> Bench {
        // Not in /tmp, which may be a tmpfs: a disk under O_DIRECT is what is meant.
        Bench { dir: tempfile::tempdir_in("/var/tmp").expect("a folder") }
    }

    /// Where a sync costs nothing, for hundreds of images.
    pub fn in_memory() -> Bench {
        Bench { dir: tempfile::tempdir_in("/dev/shm").expect("a folder") }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn text(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    pub fn raw(&self, name: &str, size: u64) {
        fs::File::create(self.path(name)).and_then(|file| file.set_len(size)).expect("a file");
    }

    /// Serve images, each by NBD and vhost-user at sockets of its name's first letter.
    pub fn serve(&self, images: &[&str], more: &[&str]) -> Server {
        Server::start(self.args(images, more))
    }

    pub fn args(&self, images: &[&str], more: &[&str]) -> Vec<String> {
        let mut args: Vec<String> = vec![];
        for image in images {
            let letter = &image[..1];
            let (nbd, vhost) = (format!("unix:{}.nbd", self.text(letter)), self.text(letter));
            args.push(self.text(image));
            args.extend(more.iter().map(|&word| word.to_owned()));
            args.extend(
                ["--name", letter, "--nbd", &nbd, "--vhost-user", &vhost].map(str::to_owned),
            );
        }
        args.extend(["--control".to_owned(), format!("unix:{}", self.text("control"))]);
        args
    }

    /// Serve one image by the name of another's disk.
    pub fn serve_as(&self, letter: &str, image: &str, more: &[&str]) -> Server {
        let nbd = format!("unix:{}.nbd", self.text(letter));
        let image = self.text(image);
        let args = [&*image, "--name", letter, "--nbd", &nbd];
        Server::start(args.iter().chain(more))
    }

    pub fn control(&self) -> Control {
        Control::open(&self.path("control"))
    }

    pub fn uri(&self, letter: &str) -> String {
        format!("nbd+unix:///{letter}?socket={}.nbd", self.text(letter))
    }

    /// Have qemu-io do that on a disk.
    pub fn io(&self, letter: &str, commands: &[&str]) {
        let uri = self.uri(letter);
        let reads = commands.iter().all(|one| one.starts_with("read"));
        let mut args = vec!["-f", "raw"];
        args.extend(reads.then_some("-r"));
        args.extend(commands.iter().flat_map(|one| ["-c", one]));
        args.push(&uri);
        let said = ok("qemu-io", "qemu-utils", &args);
        assert!(!said.contains("failed"), "{said}");
    }

    /// A file's content, as qemu-io reads it.
    pub fn holds(&self, image: &str, format: &str, commands: &[&str]) {
        let path = self.text(image);
        let mut args = vec!["-r", "-f", format];
        args.extend(commands.iter().flat_map(|one| ["-c", one]));
        args.push(&path);
        let said = ok("qemu-io", "qemu-utils", &args);
        assert!(!said.contains("failed"), "{said}");
    }
}

/// What a verb prints, which goes well.
pub fn said(args: &[&str]) -> String {
    let output = ringtap_of(args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub fn refusal(args: &[&str]) -> String {
    let output = ringtap_of(args);
    assert!(!output.status.success(), "{args:?} should have been refused");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

pub fn snapshot(control: &mut Control, node: &str, file: &str) -> Value {
    control.ok("blockdev-snapshot-sync", json!({ "node-name": node, "snapshot-file": file }));
    let (name, data) = control.event();
    assert_eq!(name, "__ringtap_SNAPSHOT");
    data
}
