//! Servers of raw images, and a Ringtap that serves what they show.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ringtap_tests::{Server, listens, load, ok, patience, program, ringtap, ringtap_of};
use serde_json::Value;
use tempfile::TempDir;

pub const MIB: u64 = 1 << 20;

/// Servers that speak the protocol in different ways.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Structured replies; several connections.
    Qemu,
    /// One connection only.
    QemuOne,
    /// Read only, for one client; it ends with that.
    QemuOnce,
    /// Structured replies; several connections.
    Nbdkit,
    /// Simple replies.
    NbdkitSimple,
    /// One connection only.
    NbdkitOne,
    /// Extended headers.
    Ringtap,
}

pub const ALL: [Kind; 6] =
    [Kind::Qemu, Kind::QemuOne, Kind::Nbdkit, Kind::NbdkitSimple, Kind::NbdkitOne, Kind::Ringtap];

/// A folder with images and sockets.
pub struct Bench {
    pub dir: TempDir,
}

/// A server; killed when dropped.
pub struct Source(Child);

impl Drop for Source {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Source {
    /// From now on it is there, and answers nothing.
    pub fn pause(&self) {
        self.signal(rustix::process::Signal::STOP);
    }

    /// It answers again.
    pub fn resume(&self) {
        self.signal(rustix::process::Signal::CONT);
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_raw(self.0.id() as i32).expect("a process");
        rustix::process::kill_process(pid, signal).expect("it is there");
    }

    /// As the operator ends it.
    pub fn stop(mut self) {
        self.signal(rustix::process::Signal::TERM);
        let _ = self.0.wait();
    }
}

impl Bench {
    pub fn new() -> Bench {
        // Not in /tmp, which may be a tmpfs: a disk under O_DIRECT is what is meant.
        Bench { dir: tempfile::tempdir_in("/var/tmp").expect("a folder") }
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

    /// What the server shows, as `ringtap` takes it.
    pub fn uri(&self) -> String {
        format!("nbd+unix:///e?socket={}", self.text("source"))
    }

    /// Serve an image's bytes as the export `e`.
    pub fn source(&self, kind: Kind, image: &str) -> Source {
        let (socket, image) = (self.text("source"), self.text(image));
        let _ = fs::remove_file(&socket);
        let address = format!("unix:{socket}");
        let ringtap = ringtap();
        let (name, args): (&str, Vec<&str>) = match kind {
            Kind::Qemu => {
                ("qemu-nbd", vec!["-t", "-f", "raw", "-x", "e", "-e", "9", "-k", &socket, &image])
            }
            Kind::QemuOne => {
                ("qemu-nbd", vec!["-t", "-f", "raw", "-x", "e", "-k", &socket, &image])
            }
            Kind::QemuOnce => {
                ("qemu-nbd", vec!["-r", "-f", "raw", "-x", "e", "-k", &socket, &image])
            }
            Kind::Nbdkit => ("nbdkit", vec!["-f", "-U", &socket, "file", &image]),
            Kind::NbdkitSimple => ("nbdkit", vec!["-f", "--no-sr", "-U", &socket, "file", &image]),
            Kind::NbdkitOne => {
                let filter = ["-f", "--filter=multi-conn", "-U", &socket, "file", &image];
                ("nbdkit", [&filter[..], &["multi-conn-mode=disable"]].concat())
            }
            Kind::Ringtap => (
                ringtap.to_str().expect("plain"),
                vec![
                    "serve",
                    &image,
                    "-f",
                    "raw",
                    "--force-format",
                    "--name",
                    "e",
                    "--nbd",
                    &address,
                ],
            ),
        };
        self.begun(name, &args)
    }

    /// nbdkit with that plugin and what it takes; its exports have any name.
    pub fn nbdkit(&self, args: &[&str]) -> Source {
        let socket = self.text("source");
        self.begun("nbdkit", &[&["-f", "-U", &*socket][..], args].concat())
    }

    fn begun(&self, name: &str, args: &[&str]) -> Source {
        let child =
            Command::new(name).args(args).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let source = Source(child.unwrap_or_else(|error| panic!("{name}: {error}")));
        let until = Instant::now() + patience();
        while !listens(&self.path("source")) {
            assert!(Instant::now() < until, "{name} does not listen");
            thread::sleep(Duration::from_millis(10));
        }
        source
    }

    /// The same, by one whose flushes end once there is no file `held` any more; the file `flushing` says that one has begun.
    pub fn source_that_flushes_slowly(&self, image: &str, size: u64) -> Source {
        let (image, size) = (self.text(image), format!("get_size=echo {size}"));
        let flush = format!(
            "flush=touch {}; while [ -e {} ]; do sleep 0.05; done",
            self.text("flushing"),
            self.text("held")
        );
        let pread = format!(
            "pread=dd if={image} iflag=count_bytes,skip_bytes skip=$4 count=$3 2>/dev/null"
        );
        let pwrite =
            format!("pwrite=dd of={image} conv=notrunc oflag=seek_bytes seek=$4 2>/dev/null");
        let model = "thread_model=echo parallel";
        let args =
            ["-f", "-U", &self.text("source"), "eval", model, &size, &pread, &pwrite, &flush];
        self.begun("nbdkit", &args)
    }

    /// Serve a disk as `d` over NBD and, with two queues, vhost-user.
    pub fn serve(&self, disk: &str, more: &[&str]) -> Server {
        let (nbd, vhost) = (format!("unix:{}", self.text("nbd")), self.text("vhost"));
        let args = [disk, "--name", "d", "--nbd", &nbd, "--vhost-user", &vhost];
        Server::start(args.iter().chain(more))
    }

    /// Have qemu-io do that on what Ringtap serves; what it says.
    pub fn io(&self, commands: &[&str]) -> String {
        let uri = format!("nbd+unix:///d?socket={}", self.text("nbd"));
        let mut args = vec!["-f", "raw"];
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

    /// What an image holds, as qemu-io reads it.
    pub fn holds(&self, image: &str, format: &str, commands: &[&str]) {
        let path = self.text(image);
        let mut args = vec!["-r", "-U", "-f", format];
        args.extend(commands.iter().flat_map(|one| ["-c", one]));
        args.push(&path);
        let said = ok("qemu-io", "qemu-utils", &args);
        assert!(!said.contains("failed"), "{said}");
    }

    /// A guest on its vhost-user socket.
    pub fn load(&self, seconds: &'static str) -> JoinHandle<Value> {
        load(self.text("vhost"), seconds)
    }
}

/// What a verb prints, which goes well.
pub fn said(args: &[&str]) -> String {
    let output = ringtap_of(args);
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{args:?}: {err}");
    out.into_owned()
}

/// Why a verb fails.
pub fn refusal(args: &[&str]) -> String {
    let output = ringtap_of(args);
    assert!(!output.status.success(), "{args:?} should have been refused");
    String::from_utf8_lossy(&output.stderr).into_owned()
}
