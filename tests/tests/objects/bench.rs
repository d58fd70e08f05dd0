//! Images, and a Ringtap that serves what lies on a server of HTTP.

use std::fs;
use std::path::PathBuf;

use ringtap_tests::{Server, program, ringtap};
use tempfile::TempDir;

use crate::origin::Origin;

pub const MIB: usize = 1 << 20;

/// A folder with images and sockets.
pub struct Bench {
    pub dir: TempDir,
}

/// Bytes that differ from one place to another: of each 4 KiB all are the same.
pub fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at / 4096 % 251 + 1) as u8).collect()
}

impl Bench {
    pub fn new() -> Bench {
        Bench { dir: tempfile::tempdir_in("/var/tmp").expect("a folder") }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn text(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    /// Serve a disk as `d` over NBD.
    pub fn serve(&self, disk: &str, more: &[&str]) -> Server {
        let nbd = format!("unix:{}", self.text("nbd"));
        let args = [disk, "--name", "d", "--nbd", &nbd];
        Server::start(args.iter().chain(more))
    }

    /// Serve the raw object of an origin for reading.
    pub fn serve_raw(&self, origin: &Origin) -> Server {
        self.serve(&origin.uri(), &["-f", "raw", "--read-only"])
    }

    /// Have qemu-io do that on what Ringtap serves; what it says.
    pub fn io(&self, commands: &[&str]) -> String {
        let uri = format!("nbd+unix:///d?socket={}", self.text("nbd"));
        let mut args = vec!["-f", "raw"];
        if commands.iter().all(|one| one.starts_with("read")) {
            args.push("-r");
        }
        args.extend(commands.iter().flat_map(|one| ["-c", one]));
        args.push(&uri);
        let output = program("qemu-io", "qemu-utils", &args);
        String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
    }

    /// The same, and all goes well.
    pub fn io_well(&self, commands: &[&str]) {
        let said = self.io(commands);
        assert!(!said.contains("failed") && !said.contains("error"), "{said}");
    }

    /// The whole disk as NBD shows it.
    pub fn whole(&self) -> Vec<u8> {
        let uri = format!("nbd+unix:///d?socket={}", self.text("nbd"));
        let copy = self.text("copy");
        let args = ["convert", "-f", "raw", "-O", "raw", &*uri, &*copy];
        let output = program("qemu-img", "qemu-utils", args);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        fs::read(copy).expect("the copy")
    }
}

/// What a verb prints, which goes well.
pub fn said(args: &[&str]) -> String {
    let output = program(ringtap().to_str().expect("a plain path"), "ringtap", args);
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{args:?}: {err}");
    out.into_owned()
}

/// Why a verb fails.
pub fn refusal(args: &[&str]) -> String {
    let output = program(ringtap().to_str().expect("a plain path"), "ringtap", args);
    assert!(!output.status.success(), "{args:?} should have been refused");
    String::from_utf8_lossy(&output.stderr).into_owned()
}
