//! Whether an operator asks for a program to follow a server. The server says which process does, and is not believed:
//! that process says itself what it was started with, and whether it could be a server that somebody else owns.

use std::ffi::OsStr;
use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

/// Why that process does not ask for the program; `server` is not asked itself.
pub(crate) fn asks_for(by: u32, binary: &Path, server: u32) -> Result<(), String> {
    let why =
        |what: &str| format!("process {by}, which is said to ask for {}, {what}", binary.display());
    // Held, so that all that is read is of one process, whoever has its number next.
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let held = rustix::fs::open(format!("/proc/{by}"), flags, Mode::empty())
        .map_err(|_| why("is no other process"))?;
    let process = PathBuf::from(format!("/proc/self/fd/{}", held.as_raw_fd()));
    let status = fs::read_to_string(process.join("status")).unwrap_or_default();
    let fact = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap_or_default().split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    if by == server || fact("Tgid:") != [by.to_string()] {
        return Err(why("is no other process"));
    }
    let own = rustix::process::geteuid().as_raw().to_string();
    let users = fact("Uid:");
    if users.is_empty() || users.iter().any(|user| *user != own && user != "0") {
        return Err(why("is another user's"));
    }
    // A confined server can write over the words that it was started with.
    if fact("Seccomp:") != ["0"] {
        return Err(why("is confined itself (Seccomp in its status is not 0)"));
    }
    let words = fs::read(process.join("cmdline")).unwrap_or_default();
    let folder = fs::read_link(process.join("cwd")).unwrap_or_default();
    match names(&words, &folder, binary) {
        true => Ok(()),
        false => Err(why("was not started as ringtap upgrade --binary with it")),
    }
}

/// Whether these words, each with a zero after it, ask for that program from that folder.
fn names(words: &[u8], folder: &Path, binary: &Path) -> bool {
    let words: Vec<&[u8]> = words.split(|byte| *byte == 0).skip(1).collect();
    let same = |word: &[u8]| {
        let path = std::path::absolute(folder.join(OsStr::from_bytes(word)));
        !word.is_empty() && path.is_ok_and(|path| path.as_os_str() == binary.as_os_str())
    };
    let after = words.windows(2).any(|two| two[0] == b"--binary" && same(two[1]));
    let within = words.iter().any(|word| word.strip_prefix(b"--binary=").is_some_and(same));
    words.contains(&&b"upgrade"[..]) && (after || within)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command, Stdio};

    #[test]
    fn words_name_a_program_or_do_not() {
        let (folder, binary) = (Path::new("/srv"), Path::new("/srv/new"));
        let asks = |words: &str| names(words.replace(' ', "\0").as_bytes(), folder, binary);
        assert!(asks("ringtap upgrade unix:c --binary new "));
        assert!(asks("ringtap upgrade --binary=/srv/new unix:c "));
        assert!(asks("ringtap --io threads upgrade --binary ./new "));
        for words in [
            "",
            "upgrade --binary new ",
            "ringtap upgrade new ",
            "ringtap upgrade --binary newer ",
            "ringtap upgrade --binary= new ",
            "ringtap serve new --binary new ",
            "ringtap upgrade --binary ",
        ] {
            assert!(!asks(words), "{words:?}");
        }
    }

    struct Asker(Child);

    impl Drop for Asker {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    /// A process with these words that waits.
    fn asker(words: &[&str]) -> Asker {
        let mut command = Command::new("sh");
        command.args(["-c", "read line"]).args(words).stdin(Stdio::piped());
        let asker = Asker(command.spawn().expect("sh"));
        // Its words come to be a moment after it has begun.
        let place = format!("/proc/{}/cmdline", asker.0.id());
        while fs::read(&place).is_ok_and(|words| words.is_empty()) {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        asker
    }

    #[test]
    fn a_process_asks_for_itself() {
        let binary = Path::new("/srv/new");
        let good = asker(&["ringtap", "upgrade", "--binary", "/srv/new"]);
        let of = |by: u32| asks_for(by, binary, 1_000_000_000);
        let own = fs::read_to_string("/proc/self/status").expect("its status");
        match own.lines().any(|line| line == "Seccomp:\t0") {
            true => assert_eq!(of(good.0.id()), Ok(())),
            // As in a container: nobody in it can be told from a server.
            false => assert!(of(good.0.id()).is_err_and(|why| why.contains("confined itself"))),
        }
        assert!(asks_for(good.0.id(), binary, good.0.id()).is_err(), "the server itself");
        assert!(asks_for(good.0.id(), Path::new("/srv/other"), 7).is_err());
        let none = asker(&["ringtap", "upgrade"]);
        assert!(of(none.0.id()).is_err() && of(std::process::id()).is_err() && of(0).is_err());
        let gone = none.0.id();
        drop(none);
        assert!(of(gone).is_err());
    }
}
