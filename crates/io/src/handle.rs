//! What a file system itself calls a file: a name that stays with it wherever it is moved, ends with
//! it, and is never given again.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

/// Bytes that a handle may have here: those of ext4, btrfs and tmpfs have 8 to 20.
const MOST: usize = 24;

/// As the kernel wants it, with room behind.
#[repr(C)]
struct Raw {
    bytes: libc::c_uint,
    kind: libc::c_int,
    handle: [u8; MOST],
}

/// The handle of a file, in words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileHandle([u64; 1 + MOST / 8]);

impl FileHandle {
    /// Words that it takes.
    pub const WORDS: usize = 1 + MOST / 8;

    /// That of an open file; an error where its file system has none, or a longer one.
    pub fn of(file: impl AsFd) -> io::Result<FileHandle> {
        let mut raw = Raw { bytes: MOST as libc::c_uint, kind: 0, handle: [0; MOST] };
        let mut mount = 0;
        // SAFETY: the path is a string, `raw` has room for as many bytes as it says behind its head, as
        // `file_handle` is laid out, and both outlive the call.
        let end = unsafe {
            libc::name_to_handle_at(
                file.as_fd().as_raw_fd(),
                c"".as_ptr(),
                (&raw mut raw).cast(),
                &raw mut mount,
                libc::AT_EMPTY_PATH,
            )
        };
        if end != 0 {
            return Err(io::Error::last_os_error());
        }
        let mut words = [0; FileHandle::WORDS];
        words[0] = u64::from(raw.bytes) << 32 | u64::from(raw.kind as u32);
        for (word, bytes) in words[1..].iter_mut().zip(raw.handle.chunks_exact(8)) {
            *word = u64::from_ne_bytes(bytes.try_into().unwrap_or_default());
        }
        Ok(FileHandle(words))
    }

    /// One that was kept as words.
    pub fn from_words(words: [u64; FileHandle::WORDS]) -> FileHandle {
        FileHandle(words)
    }

    /// To be kept.
    pub fn words(&self) -> [u64; FileHandle::WORDS] {
        self.0
    }

    /// Whether the file is no more, under whatever name: its file system, on which `beside` is another
    /// file, says so. An error where it does not tell, or the caller may not ask (it takes
    /// CAP_DAC_READ_SEARCH).
    pub fn is_gone(&self, beside: impl AsFd) -> io::Result<bool> {
        self.open(beside).map(|file| file.is_none())
    }

    /// How many names the file has: none where it is gone, or was deleted and is open yet. Errors as of
    /// [`FileHandle::is_gone`].
    pub fn names(&self, beside: impl AsFd) -> io::Result<u64> {
        let file = self.open(beside)?;
        Ok(file.map(rustix::fs::fstat).transpose()?.map_or(0, |facts| facts.st_nlink))
    }

    fn open(&self, beside: impl AsFd) -> io::Result<Option<OwnedFd>> {
        let bytes = (self.0[0] >> 32) as libc::c_uint;
        if bytes == 0 || bytes as usize > MOST {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut handle = [0; MOST];
        for (bytes, word) in handle.chunks_exact_mut(8).zip(&self.0[1..]) {
            bytes.copy_from_slice(&word.to_ne_bytes());
        }
        let mut raw = Raw { bytes, kind: self.0[0] as u32 as libc::c_int, handle };
        let (mount, flags) = (beside.as_fd().as_raw_fd(), libc::O_PATH | libc::O_CLOEXEC);
        // SAFETY: `raw` is laid out as `file_handle` with `bytes` bytes behind its head, and outlives
        // the call.
        let fd = unsafe { libc::open_by_handle_at(mount, (&raw mut raw).cast(), flags) };
        if fd < 0 {
            let error = io::Error::last_os_error();
            return if error.raw_os_error() == Some(libc::ESTALE) { Ok(None) } else { Err(error) };
        }
        // SAFETY: the kernel has just opened it for us.
        Ok(Some(unsafe { OwnedFd::from_raw_fd(fd) }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// Needs root, and a file system that has handles.
    fn may_ask(folder: &std::path::Path) -> bool {
        let file = fs::File::open(folder).expect("the folder");
        match FileHandle::of(&file).and_then(|handle| handle.is_gone(&file)) {
            Ok(gone) => !gone,
            Err(error) => {
                eprintln!("skipped: {error}");
                false
            }
        }
    }

    #[test]
    fn a_file_is_gone_when_it_was_deleted_and_not_when_it_was_moved() {
        let folder = tempfile::tempdir().expect("a folder");
        if !may_ask(folder.path()) {
            return;
        }
        let beside = fs::File::open(folder.path()).expect("the folder");
        let (path, moved) = (folder.path().join("one"), folder.path().join("two"));
        let file = fs::File::create(&path).expect("a file");
        let handle = FileHandle::of(&file).expect("a handle");
        let handle = FileHandle::from_words(handle.words());
        assert!(!handle.is_gone(&beside).expect("an answer"));
        fs::rename(&path, &moved).expect("moved");
        drop(file);
        assert!(!handle.is_gone(&beside).expect("an answer"));
        fs::remove_file(&moved).expect("deleted");
        // Another that has its inode is another.
        let again = fs::File::create(&path).expect("a file");
        assert!(handle.is_gone(&beside).expect("an answer"));
        assert_ne!(FileHandle::of(&again).expect("a handle"), handle);
    }
}
