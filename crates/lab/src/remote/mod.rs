//! `ringtap compare --on ssh://HOST`: the lab on another machine. `ringtap`, the lab and the files that the options name are
//! copied to a folder there, the lab runs in it, and the run's folder comes back; the folder there is removed.

pub mod address;
mod words;

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::error::{Error, Result};
use crate::process::{self, Group};
use crate::run::folder;
use crate::stop::Stop;
use address::Host;
use words::quoted;

/// The lab's binary there.
const LAB: &str = "ringtap-lab";
/// Another ssh, with options of its own: `ssh -i KEY -F CONFIG`.
const SSH: &str = "RINGTAP_SSH";
/// To copy a binary over a slow line.
const COPY: Duration = Duration::from_secs(600);
const SHORT: Duration = Duration::from_secs(60);
/// A lab that was told to end may have guests to end.
const END: Duration = Duration::from_secs(120);
/// An ssh that was told to end may have a terminal to put right.
const GRACE: Duration = Duration::from_secs(2);
const TICK: Duration = Duration::from_millis(50);

/// How it ended there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// The lab's exit code.
    pub code: u8,
    /// Whether a run came back.
    pub came_back: bool,
}

/// What is asked of the other machine.
#[derive(Clone, Copy, Debug)]
pub struct Wish<'a> {
    /// Where.
    pub host: &'a Host,
    /// The binary that is measured there.
    pub ringtap: &'a Path,
    /// The lab's, which runs there.
    pub lab: &'a Path,
    /// The command line here, without the program's name.
    pub args: &'a [OsString],
    /// The folder of the run here; none where there will be no run (`--list`, `--self-test`), and what the lab prints is shown.
    pub out: Option<&'a Path>,
}

/// Whether it makes sense, as far as that can be told here: a new folder, and files that can be read.
pub fn check(wish: Wish<'_>) -> Result<()> {
    if let Some(out) = wish.out.filter(|out| out.join(folder::SAMPLES).exists()) {
        return Err(Error::Plan(format!(
            "{} holds a run already; name another folder with --out",
            out.display()
        )));
    }
    for (file, _) in words::forwarded(wish.args, wish.out.is_some())?.files {
        File::open(&file).map_err(Error::file("open", &file))?;
    }
    Ok(())
}

/// Runs the lab there until it ends, or ends it when `stop` is asked.
pub fn run(wish: Wish<'_>, stop: &Stop) -> Result<Ended> {
    let line = Line::open(wish.host, stop)?;
    let place = Place::make(&line, stop)?;
    for (binary, name) in [(wish.ringtap, "ringtap"), (wish.lab, LAB)] {
        place.copy(binary, name, stop)?;
        let version = line.shell(&format!("{}/{name} --version", place.path), stop);
        version.map_err(|error| does_not_run(wish.host, error))?;
    }
    let words = words::forwarded(wish.args, wish.out.is_some())?;
    for (from, name) in &words.files {
        place.copy(from, name, stop)?;
    }
    for (text, name) in &words.plans {
        let plan = line.folder.path().join("plan");
        fs::write(&plan, text).map_err(Error::file("write", &plan))?;
        place.copy(&plan, name, stop)?;
    }
    let mut args: Vec<String> = words.args.iter().map(|word| quoted(word)).collect();
    if wish.out.is_some() {
        args.push("--out run".into());
    }
    let status = place.lab(&args.join(" "), wish.out.is_none(), stop)?;
    let code = status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1);
    let Some(out) = wish.out else { return Ok(Ended { code, came_back: false }) };
    // To bring back what there is, after Ctrl-C too.
    let stop = &Stop::default();
    let came_back = match place.fetch(out, &words.renamed(&place.path)?, stop) {
        Ok(came_back) => came_back,
        Err(error) => {
            let kept = place.keep();
            return Err(Error::Plan(format!(
                "the run is in {kept} on {}, and could not be brought here: {error}",
                wish.host.name
            )));
        }
    };
    Ok(Ended { code, came_back })
}

fn does_not_run(host: &Host, error: Error) -> Error {
    match error {
        Error::Program { said, .. } => Error::Plan(format!(
            "this ringtap does not run on {} ({}): run a ringtap that was built for it there",
            host.name,
            said.trim()
        )),
        error => error,
    }
}

/// A connection that several commands share; asked for a password once.
struct Line<'a> {
    host: &'a Host,
    ssh: Vec<String>,
    /// Its socket is here.
    folder: tempfile::TempDir,
}

impl<'a> Line<'a> {
    fn open(host: &'a Host, stop: &Stop) -> Result<Line<'a>> {
        stop.check()?;
        let ssh = std::env::var(SSH).unwrap_or_else(|_| "ssh".into());
        let ssh = shlex::split(&ssh).filter(|words| !words.is_empty());
        let ssh = ssh.ok_or_else(|| Error::Plan(format!("{SSH} is no command line")))?;
        // A socket's path is short.
        let folder = tempfile::Builder::new().prefix("ringtap-on-").tempdir_in("/tmp");
        let folder = folder.map_err(Error::file("make a folder in", Path::new("/tmp")))?;
        let line = Line { host, ssh, folder };
        let mut command = line.command();
        // In the foreground: it may ask for a password.
        command.args(["-o", "ControlMaster=yes", "-o", "ControlPersist=60", "-N", "-f"]);
        command.arg("--").arg(&host.name).stdout(Stdio::null());
        let status = login(command, stop)?;
        match status.success() {
            true => Ok(line),
            false => Err(Error::Plan(format!("no connection to {}: ssh {status}", host.name))),
        }
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("line")
    }

    fn command(&self) -> Command {
        let (program, options) = self.ssh.split_first().expect("a program");
        let mut command = Command::new(program);
        command.args(options).args([
            "-o",
            "ConnectTimeout=20",
            "-o",
            "ServerAliveInterval=15",
            "-S",
        ]);
        command.arg(self.socket());
        if let Some(port) = self.host.port {
            command.args(["-p", &port.to_string()]);
        }
        command
    }

    fn remote(&self, line: &str) -> Command {
        let mut command = self.command();
        command.args(["-T", "--", &self.host.name, line]);
        command
    }

    /// What a short command prints there.
    fn shell(&self, line: &str, stop: &Stop) -> Result<String> {
        Ok(process::run(self.remote(line), SHORT, stop)?.stdout)
    }
}

/// Waits for ssh to have the connection, or for the wish to end: it may wait for a password, or for a machine that does not
/// answer.
fn login(mut command: Command, stop: &Stop) -> Result<ExitStatus> {
    let mut ssh = command.spawn().map_err(|error| {
        Error::Plan(format!("ssh cannot be started: {error}; apt-get install openssh-client"))
    })?;
    loop {
        match ssh.try_wait() {
            // The same Ctrl-C may have ended it.
            Ok(Some(status)) => return stop.check().map(|()| status),
            Ok(None) => {}
            Err(error) => return Err(Error::Plan(format!("cannot wait for ssh: {error}"))),
        }
        if let Err(interrupted) = stop.check() {
            // First SIGTERM, so that it gives the terminal its echo back.
            if let Some(pid) = i32::try_from(ssh.id()).ok().and_then(Pid::from_raw) {
                let _ = kill_process(pid, Signal::TERM);
            }
            let until = Instant::now() + GRACE;
            while matches!(ssh.try_wait(), Ok(None)) && Instant::now() < until {
                std::thread::sleep(TICK);
            }
            let _ = ssh.kill();
            let _ = ssh.wait();
            return Err(interrupted);
        }
        std::thread::sleep(TICK);
    }
}

impl Drop for Line<'_> {
    fn drop(&mut self) {
        // Where nobody came to be logged in there is nothing to end.
        if !self.socket().exists() {
            return;
        }
        let mut command = self.command();
        command.args(["-O", "exit", "--", &self.host.name]);
        let _ = process::run(command, SHORT, &Stop::default());
    }
}

/// A folder there, removed at the end.
struct Place<'a> {
    line: &'a Line<'a>,
    path: String,
    keep: std::cell::Cell<bool>,
}

impl<'a> Place<'a> {
    fn make(line: &'a Line<'a>, stop: &Stop) -> Result<Place<'a>> {
        let made = line.shell("mktemp -d \"${TMPDIR:-/var/tmp}/ringtap-on-XXXXXX\"", stop)?;
        let path = made.trim().to_owned();
        let plain = |c: char| c.is_ascii_alphanumeric() || "/-_.".contains(c);
        // It goes into command lines, and is removed with all in it.
        if !path.starts_with('/') || !path.contains("/ringtap-on-") || !path.chars().all(plain) {
            return Err(Error::Output { what: "the folder that mktemp made there", found: made });
        }
        Ok(Place { line, path, keep: false.into() })
    }

    fn keep(&self) -> String {
        self.keep.set(true);
        format!("{}/run", self.path)
    }

    fn copy(&self, from: &Path, name: &str, stop: &Stop) -> Result<()> {
        let file = File::open(from).map_err(Error::file("open", from))?;
        let to = format!("{}/{name}", self.path);
        let mut command = self.line.remote(&format!("cat >{to} && chmod 700 {to}"));
        command.stdin(file).stdout(Stdio::null()).stderr(Stdio::inherit());
        let status = wait(process::spawn(command)?, COPY, stop)?;
        if !status.success() {
            return Err(Error::Plan(format!(
                "cannot copy {} to {to} on {}: ssh {status}",
                from.display(),
                self.line.host.name
            )));
        }
        Ok(())
    }

    /// The lab there. It hears of Ctrl-C here, and of a line that breaks, by the end of its shell's stdin: then the shell
    /// interrupts it, and it stops all that it started.
    fn lab(&self, args: &str, shown: bool, stop: &Stop) -> Result<ExitStatus> {
        let shell = format!(
            "cd {0} && exec 3<&0 </dev/null && lab=$$ && \
             {{ (cat <&3; [ /proc/$lab/exe -ef {0}/{LAB} ] && kill -INT $lab) >/dev/null 2>&1 & }} && \
             exec ./{LAB} {args} 3<&-",
            self.path
        );
        let mut command = self.line.remote(&shell);
        command.stdin(Stdio::piped()).stderr(Stdio::inherit());
        command.stdout(if shown { Stdio::inherit() } else { Stdio::null() });
        let mut group = process::spawn(command)?;
        let mut stdin: Option<ChildStdin> = group.stdin();
        loop {
            if let Some(status) = group.ended() {
                return match status.code() {
                    Some(255) | None => Err(self.broken(status)),
                    _ => Ok(status),
                };
            }
            if stop.asked() {
                drop(stdin.take());
                return group.wait(END).ok_or_else(|| {
                    self.keep.set(true);
                    Error::Plan(format!(
                        "the lab on {} was told to end and did not within {} s; its folder there is {}",
                        self.line.host.name,
                        END.as_secs(),
                        self.path
                    ))
                });
            }
            std::thread::sleep(TICK);
        }
    }

    fn broken(&self, status: ExitStatus) -> Error {
        let kept = self.keep();
        Error::Plan(format!(
            "the connection to {} broke (ssh {status}); what was measured until then is in {kept} there",
            self.line.host.name
        ))
    }

    /// Bring the run here, if there is one, with loads named as they are here.
    fn fetch(&self, out: &Path, names: &[(String, String)], stop: &Stop) -> Result<bool> {
        let there = self.line.shell(&format!("ls -d {}/run/run.json || true", self.path), stop)?;
        if there.trim().is_empty() {
            return Ok(false);
        }
        let parent = out.parent().filter(|parent| !parent.as_os_str().is_empty());
        let parent = parent.unwrap_or(Path::new("."));
        fs::create_dir_all(parent).map_err(Error::file("create", parent))?;
        let beside = tempfile::Builder::new().prefix(".ringtap-on-").tempdir_in(parent);
        let beside = beside.map_err(Error::file("make a folder in", parent))?;
        let archive = beside.path().join("run.tar");
        let file = File::create(&archive).map_err(Error::file("create", &archive))?;
        let mut command = self.line.remote(&format!("tar -C {} -cf - run", self.path));
        command.stdin(Stdio::null()).stdout(file).stderr(Stdio::inherit());
        let status = wait(process::spawn(command)?, COPY, stop)?;
        if !status.success() {
            return Err(Error::Plan(format!("tar there: {status}")));
        }
        let tar =
            ["-C".as_ref(), beside.path().as_os_str(), "--no-same-owner".as_ref(), "-xf".as_ref()];
        process::run_short("tar", tar.into_iter().chain([archive.as_os_str()]), stop)?;
        for name in [folder::RECORD, folder::SAMPLES] {
            let file = beside.path().join("run").join(name);
            let text = fs::read_to_string(&file).map_err(Error::file("read", &file))?;
            fs::write(&file, words::changed(&text, names)).map_err(Error::file("write", &file))?;
        }
        if out.exists() {
            // An empty one, or one whose files have nothing of a run.
            for entry in
                fs::read_dir(beside.path().join("run")).map_err(Error::file("read", out))?
            {
                let entry = entry.map_err(Error::file("read", out))?;
                let to: PathBuf = out.join(entry.file_name());
                fs::rename(entry.path(), &to).map_err(Error::file("create", &to))?;
            }
        } else {
            fs::rename(beside.path().join("run"), out).map_err(Error::file("create", out))?;
        }
        Ok(true)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if !self.keep.get() {
            let removed = self.line.shell(&format!("rm -rf {}", self.path), &Stop::default());
            if let Err(error) = removed {
                let _ = writeln!(
                    std::io::stderr(),
                    "ringtap compare: {} stays on {}: {error}",
                    self.path,
                    self.line.host.name
                );
            }
        }
    }
}

fn wait(mut group: Group, limit: Duration, stop: &Stop) -> Result<ExitStatus> {
    let until = Instant::now() + limit;
    loop {
        if let Some(status) = group.ended() {
            return Ok(status);
        }
        stop.check()?;
        if Instant::now() >= until {
            return Err(Error::Plan(format!("ssh did not end within {} s", limit.as_secs())));
        }
        std::thread::sleep(TICK);
    }
}
