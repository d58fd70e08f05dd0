//! A writer of `newc` cpio archives, the form of an initramfs: no root, no device nodes on disk.

use std::collections::BTreeMap;
use std::io::{self, Write};

/// One entry's content; numbers are a device's major and minor.
enum Node {
    Directory,
    File { mode: u32, data: Vec<u8> },
    Symlink { target: String },
    Character { major: u32, minor: u32 },
}

/// An archive in memory, keyed by path without a leading slash; parents come before children.
#[derive(Default)]
pub(crate) struct Archive {
    nodes: BTreeMap<String, Node>,
}

impl Archive {
    /// Adds a directory and those above it.
    pub(crate) fn directory(&mut self, path: &str) {
        let path = path.trim_matches('/');
        for (end, _) in path.match_indices('/').chain([(path.len(), "")]) {
            if end > 0 {
                self.nodes.entry(path[..end].to_owned()).or_insert(Node::Directory);
            }
        }
    }

    /// Adds a regular file; `mode` is its permission bits.
    pub(crate) fn file(&mut self, path: &str, mode: u32, data: Vec<u8>) {
        self.put(path, Node::File { mode, data });
    }

    /// Adds a symbolic link.
    pub(crate) fn symlink(&mut self, path: &str, target: &str) {
        self.put(path, Node::Symlink { target: target.to_owned() });
    }

    /// Adds a character device.
    pub(crate) fn character(&mut self, path: &str, major: u32, minor: u32) {
        self.put(path, Node::Character { major, minor });
    }

    fn put(&mut self, path: &str, node: Node) {
        let path = path.trim_matches('/');
        if let Some((parent, _)) = path.rsplit_once('/') {
            self.directory(parent);
        }
        self.nodes.insert(path.to_owned(), node);
    }

    /// Writes the archive, uncompressed: a compressed one costs the guest more than it saves.
    pub(crate) fn write(&self, mut out: impl Write) -> io::Result<()> {
        for (ino, (path, node)) in (1u32..).zip(&self.nodes) {
            let (mode, data, major, minor) = match node {
                Node::Directory => (0o040_755, &[][..], 0, 0),
                Node::File { mode, data } => (0o100_000 | mode, &data[..], 0, 0),
                Node::Symlink { target } => (0o120_777, target.as_bytes(), 0, 0),
                Node::Character { major, minor } => (0o020_600, &[][..], *major, *minor),
            };
            entry(&mut out, ino, mode, path, data, (major, minor))?;
        }
        entry(&mut out, 0, 0, "TRAILER!!!", &[], (0, 0))
    }
}

/// One header of thirteen hexadecimal fields, the name and the data, each padded to 4 bytes.
fn entry(
    out: &mut impl Write,
    ino: u32,
    mode: u32,
    path: &str,
    data: &[u8],
    device: (u32, u32),
) -> io::Result<()> {
    let size = u32::try_from(data.len()).map_err(|_| {
        io::Error::new(io::ErrorKind::InvalidInput, format!("{path}: 4 GiB is the most in a cpio"))
    })?;
    let name_len = path.len() as u32 + 1;
    let (uid, gid, links, mtime, checksum) = (0, 0, 1, 0, 0);
    write!(out, "070701")?;
    for field in
        [ino, mode, uid, gid, links, mtime, size, 0, 0, device.0, device.1, name_len, checksum]
    {
        write!(out, "{field:08x}")?;
    }
    const HEADER: usize = 6 + 13 * 8;
    out.write_all(path.as_bytes())?;
    out.write_all(&[0; 4][..1 + pad(HEADER + path.len() + 1)])?;
    out.write_all(data)?;
    out.write_all(&[0; 4][..pad(data.len())])
}

fn pad(len: usize) -> usize {
    len.next_multiple_of(4) - len
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn busybox_unpacks_what_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let mut archive = Archive::default();
        archive.file("/a/b/three", 0o644, b"abc".to_vec());
        archive.file("a/b/four", 0o755, b"abcd".to_vec());
        archive.file("empty", 0o600, Vec::new());
        archive.symlink("a/link", "b/three");
        let mut child = Command::new("busybox")
            .args(["cpio", "-i", "-d"])
            .current_dir(dir.path())
            .stdin(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("busybox is missing: apt-get install busybox-static");
        archive.write(child.stdin.take().unwrap()).unwrap();
        assert!(child.wait().unwrap().success());
        let read = |p: &str| std::fs::read(dir.path().join(p)).unwrap();
        assert_eq!(read("a/link"), b"abc");
        assert_eq!(read("a/b/four"), b"abcd");
        assert_eq!(read("empty"), b"");
    }
}
