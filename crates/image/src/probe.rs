//! What format an image looks like, and whether it is whole.
//!
//! A guest decides every byte of a raw disk, so its bytes may look like any format; they are asked
//! only by what reads an image and tells the user what it took it for, and to keep it from being written
//! to as something else. What is believed is what was written down ([`crate::record`]).

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

use rustix::fs::XattrFlags;
use rustix::io::Errno;

/// Holds what is at work on the file, while it is: its content is not whole.
const UNFINISHED: &str = "user.ringtap.unfinished";

/// Write down that `verb` is at work on the file, so that nobody takes it for whole before
/// [`finished`]. False where the file system keeps no notes.
pub fn unfinished(path: &Path, verb: &str) -> bool {
    rustix::fs::setxattr(path, UNFINISHED, verb.as_bytes(), XattrFlags::empty()).is_ok()
}

/// The work has ended well.
pub fn finished(path: &Path) -> io::Result<()> {
    match rustix::fs::removexattr(path, UNFINISHED) {
        Ok(()) | Err(Errno::NODATA | Errno::NOTSUP) => Ok(()),
        // Device nodes take none.
        Err(Errno::PERM) if unfinished_work(path).is_none() => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// What was at work on the file and has not finished, if anything.
pub fn unfinished_work(path: &Path) -> Option<String> {
    note(path, UNFINISHED)
}

fn note(path: &Path, name: &str) -> Option<String> {
    let mut text = [0; 64];
    let len = rustix::fs::getxattr(path, name, &mut text[..]).ok()?;
    String::from_utf8(text.get(..len)?.to_vec()).ok()
}

/// The format whose mark the image bears, by its name; none where it bears none, and is raw. May name
/// formats that are not read here (qed, vdi).
pub fn mark(path: &Path) -> io::Result<Option<&'static str>> {
    let mut file = File::open(path)?;
    let mut head = vec![];
    file.by_ref().take(1024).read_to_end(&mut head)?;
    let begins = |mark: &[u8], at: usize| head.get(at..).is_some_and(|rest| rest.starts_with(mark));
    let marks: [(&[u8], usize, &str); 7] = [
        (b"QFI\xfb", 0, "qcow2"),
        (b"QED\0", 0, "qed"),
        (b"KDMV", 0, "vmdk"),
        (b"vhdxfile", 0, "vhdx"),
        (b"conectix", 0, "vpc"),
        (b"LUKS\xba\xbe", 0, "luks"),
        (b"\x7f\x10\xda\xbe", 64, "vdi"),
    ];
    if let Some((.., name)) = marks.iter().find(|(mark, at, _)| begins(mark, *at)) {
        // QEMU's first format bears the same mark.
        return Ok(Some(if *name == "qcow2" && begins(&[0, 0, 0, 1], 4) { "qcow" } else { name }));
    }
    if is_descriptor(&head) {
        return Ok(Some("vmdk"));
    }
    let mut tail = [0; 8];
    if file.seek(SeekFrom::End(-512)).is_ok() && file.read_exact(&mut tail).is_ok() {
        return Ok((&tail == b"conectix").then_some("vpc"));
    }
    Ok(None)
}

/// Whether this begins a VMDK's descriptor in a file of its own: comments, then its version.
fn is_descriptor(head: &[u8]) -> bool {
    let text = String::from_utf8_lossy(head);
    let mut lines = text.lines().map(str::trim);
    lines.next().is_some_and(|line| line.eq_ignore_ascii_case("# disk descriptorfile"))
        || (text.starts_with('#')
            && lines
                .find(|line| !line.is_empty() && !line.starts_with('#'))
                .is_some_and(|line| line.to_ascii_lowercase().starts_with("version=")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_seen_wherever_a_format_has_them() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("disk");
        let found = |bytes: &[u8]| {
            std::fs::write(&path, bytes).expect("a file");
            mark(&path).expect("read")
        };
        assert_eq!(found(b""), None);
        assert_eq!(found(&[0; 4096]), None);
        assert_eq!(found(b"QFI\xfb\0\0\0\x03"), Some("qcow2"));
        assert_eq!(found(b"QFI\xfb\0\0\0\x01"), Some("qcow"));
        assert_eq!(found(b"# Disk DescriptorFile\nversion=1\n"), Some("vmdk"));
        assert_eq!(found(b"# notes\nversion 1\n"), None);
        let mut vhd = [0; 2048];
        vhd[1536..1544].copy_from_slice(b"conectix");
        assert_eq!(found(&vhd), Some("vpc"));
        let mut vdi = [0; 512];
        vdi[64..68].copy_from_slice(b"\x7f\x10\xda\xbe");
        assert_eq!(found(&vdi), Some("vdi"));
    }

    #[test]
    fn what_is_written_down_is_found_until_it_is_forgotten() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let path = file.path();
        if !unfinished(path, "convert") {
            eprintln!("skipped: no extended attributes on this file system");
            return;
        }
        assert_eq!(unfinished_work(path).as_deref(), Some("convert"));
        finished(path).expect("removed");
        finished(path).expect("nothing to remove");
        assert_eq!(unfinished_work(path), None);
    }
}
