//! What format an image looks like, and whether it is whole.
//!
//! A guest decides every byte of a raw disk, so its bytes may look like any format; they are asked
//! only by what reads an image and tells the user what it took it for, and to keep it from being written
//! to as something else. What is believed is what was written down ([`crate::record`]).

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use ringtap_sandbox::ask;
use ringtap_stores::Store;

use crate::{OpenError, OpenOptions};

/// Where signatures are looked for.
const HEAD: u64 = 1024;
const VHD: &[u8; 8] = b"conectix";

/// Holds what is at work on the file, while it is: its content is not whole.
const UNFINISHED: &str = "user.ringtap.unfinished";

/// Write down that `verb` is at work on the file, so that nobody takes it for whole before
/// [`finished`]. False where the file system keeps no notes.
pub fn unfinished(path: &Path, verb: &str) -> bool {
    !ringtap_stores::is_store(path)
        && ask::set_attribute(path, UNFINISHED, Some(verb.as_bytes())).is_ok()
}

/// The work has ended well.
pub fn finished(path: &Path) -> io::Result<()> {
    if ringtap_stores::is_store(path) {
        return Ok(());
    }
    match ask::set_attribute(path, UNFINISHED, None) {
        // Device nodes take none, and some file systems.
        Err(error)
            if error.kind() == io::ErrorKind::NotFound || unfinished_work(path).is_some() =>
        {
            Err(error)
        }
        _ => Ok(()),
    }
}

/// What was at work on the file and has not finished, if anything.
pub fn unfinished_work(path: &Path) -> Option<String> {
    note(path, UNFINISHED)
}

fn note(path: &Path, name: &str) -> Option<String> {
    if ringtap_stores::is_store(path) {
        return None;
    }
    let mut text = [0; 64];
    let len = rustix::fs::getxattr(path, name, &mut text[..]).ok()?;
    String::from_utf8(text.get(..len)?.to_vec()).ok()
}

/// As [`signature`], of an image that is opened next for reading, with the same connection where it lies on a server.
pub fn signature_before_opening(path: &Path) -> io::Result<Option<&'static str>> {
    if !ringtap_stores::is_store(path) {
        return signature(path);
    }
    let (name, options) = (path.to_string_lossy(), ringtap_stores::Options { read_only: true });
    let store = Store::open(&name, &options).map_err(io::Error::other)?;
    let found = signature_of_store(path, &store);
    store.leave(&name);
    found
}

/// The format whose signature the image bears, by its name; none where it bears none, and is raw. May name
/// formats that are not read here (qed, vdi).
pub fn signature(path: &Path) -> io::Result<Option<&'static str>> {
    if ringtap_stores::is_store(path) {
        let options = ringtap_stores::Options { read_only: true };
        let store = Store::open(&path.to_string_lossy(), &options).map_err(io::Error::other)?;
        return signature_of_store(path, &store);
    }
    let mut file = open_without_waiting(path)?;
    let mut head = vec![];
    file.by_ref().take(HEAD).read_to_end(&mut head)?;
    let mut tail = [0; 8];
    Ok(signature_of(&head, || {
        let read = file.seek(SeekFrom::End(-512)).is_ok() && file.read_exact(&mut tail).is_ok();
        read && &tail == VHD
    }))
}

/// Open what an image may lie in; what is none, as a pipe, is not waited for.
fn open_without_waiting(path: &Path) -> io::Result<File> {
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    let kind = file.metadata()?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        let why = "it is neither a file nor a block device";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    }
    Ok(file)
}

/// The same of a store.
fn signature_of_store(path: &Path, store: &Store) -> io::Result<Option<&'static str>> {
    let (file, facts) = (store.file(), *store.facts());
    let block = u64::from(facts.block).max(512);
    let last = facts.len.saturating_sub(512) / block * block;
    let (first, second) = ((HEAD as usize).next_multiple_of(block as usize), 2 * block as usize);
    let (head, tail) = crate::on_a_ring(path, |io| async move {
        let buffer = io.buffer(first.max(second))?;
        let read = io.read_blocks(file, 0, buffer.mem().window(0, first), block as usize).await?;
        let head = buffer.bytes()[..read].to_vec();
        let read =
            io.read_blocks(file, last, buffer.mem().window(0, second), block as usize).await?;
        Ok::<_, i32>((head, buffer.bytes()[..read].to_vec()))
    })
    .map_err(io::Error::other)?
    .map_err(io::Error::from_raw_os_error)?;
    let at = (facts.len.saturating_sub(512) - last) as usize;
    Ok(signature_of(&head, || tail.get(at..).is_some_and(|tail| tail.starts_with(VHD))))
}

/// Whether a store may be written to as the format of `options`: not where it bears the signature of another. What a
/// guest has written there looks the same, for nothing is recorded of it.
pub(crate) fn may_write_store(
    path: &Path,
    store: &Store,
    options: &OpenOptions,
) -> Result<(), OpenError> {
    let Some(asked) = options.format.filter(|_| !options.force_format) else { return Ok(()) };
    let failed =
        |source| OpenError::Os { what: "read the start of", path: path.to_owned(), source };
    match signature_of_store(path, store).map_err(failed)? {
        Some(found) if found.parse::<crate::Format>().ok() != Some(asked) => {
            Err(OpenError::OtherFormat { path: path.to_owned(), asked, found, recorded: false })
        }
        _ => Ok(()),
    }
}

fn signature_of(head: &[u8], ends_as_vhd: impl FnOnce() -> bool) -> Option<&'static str> {
    let begins =
        |bytes: &[u8], at: usize| head.get(at..).is_some_and(|rest| rest.starts_with(bytes));
    let signatures: [(&[u8], usize, &str); 7] = [
        (b"QFI\xfb", 0, "qcow2"),
        (b"QED\0", 0, "qed"),
        (b"KDMV", 0, "vmdk"),
        (b"vhdxfile", 0, "vhdx"),
        (b"conectix", 0, "vpc"),
        (b"LUKS\xba\xbe", 0, "luks"),
        (b"\x7f\x10\xda\xbe", 64, "vdi"),
    ];
    if let Some((.., name)) = signatures.iter().find(|(bytes, at, _)| begins(bytes, *at)) {
        // QEMU's first format bears the same signature.
        return Some(if *name == "qcow2" && begins(&[0, 0, 0, 1], 4) { "qcow" } else { name });
    }
    if is_descriptor(head) {
        return Some("vmdk");
    }
    ends_as_vhd().then_some("vpc")
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
    fn signatures_are_seen_wherever_a_format_has_them() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("disk");
        let found = |bytes: &[u8]| {
            std::fs::write(&path, bytes).expect("a file");
            signature(&path).expect("read")
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
