//! `ringtap compare --on ssh://HOST`, with an sshd of the test's own.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;

use ringtap_tests::ringtap;
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::folder;
use crate::program::{Output, Running, program};

/// A machine that is reached by ssh: this one.
struct Other {
    folder: TempDir,
    port: u16,
    _sshd: Running,
}

impl Other {
    fn new() -> Other {
        let folder = folder();
        let home = folder.path().canonicalize().expect("the folder");
        for key in ["host", "user"] {
            let mut command = program("ssh-keygen", "openssh-client");
            command.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(home.join(key));
            Running::start(command).wait().ok();
        }
        fs::create_dir(home.join("there")).expect("a folder");
        fs::create_dir_all("/run/sshd").expect("sshd's folder");
        let free = TcpListener::bind("127.0.0.1:0").and_then(|one| one.local_addr());
        let port = free.expect("a port").port();
        let config = format!(
            "ListenAddress 127.0.0.1\nPort {port}\nHostKey {0}/host\nAuthorizedKeysFile {0}/user.pub\nStrictModes no\n\
             UsePAM no\nPermitRootLogin yes\nPidFile none\nSetEnv TMPDIR={0}/there\n",
            home.display()
        );
        fs::write(home.join("sshd"), config).expect("a configuration");
        // It wants to be called by its whole path.
        let mut sshd = Command::new("/usr/sbin/sshd");
        sshd.args(["-D", "-e", "-f"]).arg(home.join("sshd"));
        let mut sshd = Running::start(sshd);
        sshd.until("port", |_| TcpStream::connect(("127.0.0.1", port)).ok());
        Other { folder, port, _sshd: sshd }
    }

    fn compare(&self, folder: &Path, words: &str) -> Command {
        let mut command = Command::new(ringtap());
        let on = format!("ssh://127.0.0.1:{}", self.port);
        command.current_dir(folder).args(["compare", "--on", &on]).args(words.split_whitespace());
        let ssh = format!(
            "ssh -F none -i {}/user -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR",
            self.folder.path().display()
        );
        command.env("RINGTAP_SSH", ssh);
        command
    }

    fn left_there(&self) -> Vec<String> {
        let entries = fs::read_dir(self.folder.path().join("there")).expect("the folder");
        entries.map(|entry| entry.expect("it").file_name().to_string_lossy().into_owned()).collect()
    }
}

const WORDS: &str = "--stages host --backends native --size 32M --seconds 0.2 --ramp 0 --job my.fio --output json --out here/run";

fn job(folder: &Path) {
    fs::write(folder.join("my.fio"), "[one]\nrw=randread\nbs=4k\niodepth=4\n").expect("a job");
}

fn json(output: Output) -> Value {
    serde_json::from_str(&output.ok()).expect("JSON")
}

#[test]
fn a_run_on_another_machine_comes_back_and_leaves_nothing_there() {
    let (other, dir) = (Other::new(), folder());
    job(dir.path());
    // By its whole path, which is none there.
    let whole = dir.path().join("my.fio").display().to_string();
    let words = WORDS.replace("my.fio", &whole);
    let words = format!("{words} --workloads dd-latency-direct --rounds 1");
    let report = json(Running::start(other.compare(dir.path(), &words)).wait());
    assert_eq!(report["run"]["state"], "complete");
    let loads: Vec<&Value> = report["series"].as_array().expect("series").iter().collect();
    let has =
        |name: &str| loads.iter().any(|s| s["workload"].as_str().is_some_and(|w| w.contains(name)));
    assert!(has("dd-latency-direct") && has(&format!("job:{whole}")), "{loads:?}");
    assert_eq!(other.left_there(), Vec::<String>::new());
    assert!(dir.path().join("here/run/report.html").exists());
    let here: Vec<_> = fs::read_dir(dir.path().join("here")).expect("it").flatten().collect();
    assert_eq!(here.len(), 1, "{here:?}");

    let again = Running::start(other.compare(dir.path(), &words)).wait().failed(2);
    assert!(again.contains("holds a run already"), "{again}");
    // What prints only prints, and what makes no sense there is said here.
    let list = Running::start(other.compare(dir.path(), "--list")).wait().ok();
    assert!(list.contains("native"), "{list}");
    let list = Running::start(other.compare(dir.path(), "--list --output json")).wait().ok();
    assert!(serde_json::from_str::<Value>(&list).is_ok(), "{list}");
    let wrong = Running::start(other.compare(dir.path(), "--stages moon")).wait().failed(2);
    assert!(wrong.contains("moon"), "{wrong}");
    assert_eq!(other.left_there(), Vec::<String>::new());
}

#[test]
fn a_run_that_is_stopped_comes_back_as_far_as_it_came() {
    let (other, dir) = (Other::new(), folder());
    job(dir.path());
    let words = format!("{WORDS} --workloads dd-latency-direct --rounds 500");
    let mut running = Running::start(other.compare(dir.path(), &words));
    let there = other.folder.path().join("there");
    running.until("sample", |_| {
        let mut places = fs::read_dir(&there).ok()?.flatten();
        let samples =
            places.find_map(|one| fs::read_to_string(one.path().join("run/samples.jsonl")).ok())?;
        (samples.lines().count() > 2).then_some(())
    });
    running.signal(Signal::INT);
    let end = running.wait();
    assert_eq!(end.status.code(), Some(3), "{}", end.stderr);
    let report: Value = serde_json::from_str(&end.stdout).expect("JSON");
    assert_eq!(report["run"]["state"], "interrupted");
    assert_eq!(other.left_there(), Vec::<String>::new());
}

#[test]
fn ctrl_c_ends_a_login_that_does_not_come() {
    let dir = folder();
    // A machine that never answers, or a question for a password.
    let mark = dir.path().join("asked");
    let mut command = Command::new(ringtap());
    command.current_dir(dir.path()).args(["compare", "--on", "ssh://nobody", "--list"]);
    let ssh = format!("sh -c 'echo $$ >{0}.new; mv {0}.new {0}; exec sleep 600'", mark.display());
    command.env("RINGTAP_SSH", ssh);
    let mut running = Running::start(command);
    let pid = running.until("login", |_| fs::read_to_string(&mark).ok());
    running.signal(Signal::INT);
    let end = running.wait();
    assert_eq!(end.status.code(), Some(3), "{}", end.stderr);
    assert!(!Path::new(&format!("/proc/{}", pid.trim())).exists(), "ssh goes on");
}

#[test]
fn a_machine_that_is_not_reached_is_named() {
    let (other, dir) = (Other::new(), folder());
    let mut nobody = Command::new(ringtap());
    nobody.args(["compare", "--on", "ssh://127.0.0.1:1", "--list"]).current_dir(dir.path());
    let said = Running::start(nobody).wait().failed(1);
    assert!(said.contains("no connection to 127.0.0.1"), "{said}");
    let mut wrong = other.compare(dir.path(), "--list --plan missing.toml");
    wrong.current_dir(dir.path());
    let said = Running::start(wrong).wait().failed(2);
    assert!(said.contains("missing.toml"), "{said}");
    assert_eq!(other.left_there(), Vec::<String>::new());
}

#[test]
fn a_lab_that_is_not_installed_is_told() {
    let dir = tempfile::tempdir().expect("a folder");
    let alone = dir.path().join("ringtap");
    // By another process: a file that this one has open for writing is not run.
    let copied = Command::new("cp").arg(ringtap()).arg(&alone).status();
    assert!(copied.is_ok_and(|status| status.success()));
    for verb in ["compare", "report"] {
        let mut command = Command::new(&alone);
        command.arg(verb).env("PATH", dir.path()).current_dir(dir.path());
        let output = command.output().expect("ringtap runs");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{verb}: {said}");
        assert!(said.contains("install the package ringtap-lab"), "{said}");
    }
    // Two images are compared all the same.
    std::fs::write(dir.path().join("a"), [0; 512]).expect("a file");
    let mut command = Command::new(&alone);
    command.args(["compare", "-U", "-f", "raw", "-F", "raw", "a", "a"]).current_dir(dir.path());
    let output = command.env("PATH", "").output().expect("ringtap runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
