//! Servers of ordinary users that have keys in their memory: no other process of the same user reads it, and they are served and
//! followed like any other.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use ringtap_tests::{ok, plain, program, ringtap};
use rustix::process::{Signal, kill_process};

use super::{Server, lives, pid, until};

/// A process that is not to outlive a failed test.
struct Killed(u32);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = kill_process(pid(self.0), Signal::KILL);
    }
}

fn said(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    text(&output.stdout) + &text(&output.stderr)
}

fn nobody(folder: &Path, words: &[&str]) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).args(words);
    command.current_dir(folder).env("RINGTAP_STATE_DIR", folder.join("state"));
    command
}

/// Whether another process of that user reads a process's memory.
fn is_read(folder: &Path, process: u32) -> bool {
    let open = format!("exec 3< /proc/{process}/mem");
    let output = nobody(folder, &["sh", "-c", &open]).output().expect("setpriv");
    let said = said(&output);
    assert!(output.status.success() || said.contains("Permission denied"), "{said}");
    output.status.success()
}

fn followed(folder: &Path, process: u32, more: &[&str]) -> Option<u32> {
    let (binary, process) = (folder.join("ringtap"), process.to_string());
    let words = [&[plain(&binary), "upgrade", &process, "--output", "json"], more].concat();
    let output = nobody(folder, &words).output().expect("setpriv");
    let said = said(&output);
    assert!(output.status.success(), "{said}");
    let digits: String = said.chars().filter(char::is_ascii_digit).collect();
    (!digits.is_empty()).then(|| digits.parse().expect("a process"))
}

#[test]
fn no_process_of_the_same_user_reads_a_servers_keys() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root is an ordinary user where it wants to");
        return;
    }
    for sandbox in ["off", "auto"] {
        let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
        let folder = dir.path();
        let binary = folder.join("ringtap");
        ok("cp", "coreutils", &[plain(&ringtap()), plain(&binary)]);
        fs::create_dir(folder.join("state")).expect("a folder");
        fs::write(folder.join("key"), "a secret").expect("a file");
        ok("chown", "coreutils", &["-R", "65534:65534", plain(folder)]);
        let create = [plain(&binary), "create", "-q", "-f", "luks", "--secret", "file:key"];
        let create = [&create[..], &["-o", "iter-time=10", "a.luks", "4M"]].concat();
        let made = nobody(folder, &create).output().expect("setpriv");
        assert!(made.status.success(), "{}", said(&made));
        let words =
            format!("serve --sandbox {sandbox} a.luks -f luks --secret file:key --nbd unix:n.sock");
        let log = folder.join("log");
        let mut server = Server::begin(nobody(folder, &[plain(&binary)]), folder, &log, &words);
        let uri = format!("nbd+unix:///?socket={}", folder.join("n.sock").display());
        let asked = |command: &str| {
            let output = program("qemu-io", "qemu-utils", ["-f", "raw", "-c", command, &uri]);
            let said = said(&output);
            assert!(output.status.success() && !said.contains("failed"), "{sandbox}: {said}");
        };
        asked("write -P 7 1M 1M");
        assert!(!is_read(folder, server.child.id()), "{sandbox}: its memory is read");
        let began = Instant::now();
        let info = nobody(folder, &[plain(&binary), "info", "a.luks"]).output().expect("setpriv");
        let told = said(&info);
        assert!(info.status.success() && told.contains("it has secrets in its memory"), "{told}");
        assert!(began.elapsed() < Duration::from_secs(10), "{sandbox}: it waited for nobody");
        let second = followed(folder, server.child.id(), &[]).expect("another serves");
        let _second = Killed(second);
        assert!(server.ends().success(), "{}", server.log());
        asked("read -P 7 1M 1M");
        assert!(!is_read(folder, second), "{sandbox}: its memory is read after an upgrade");
        // Without a broker nobody of that user sees which program it runs.
        let third = followed(folder, second, &["--if-changed"]);
        let _third = third.map(Killed);
        assert_eq!(third.is_some(), sandbox == "off", "{}", server.log());
        asked("read -P 7 1M 1M");
        let last = third.unwrap_or(second);
        kill_process(pid(last), Signal::TERM).expect("told");
        until("the last server ends", || !lives(last));
        assert!(!folder.join("n.sock").exists(), "{}", server.log());
    }
}
