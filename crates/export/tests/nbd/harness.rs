//! A server in this process, and other programs run against it.

use std::fs;
use std::io::Write;
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread::JoinHandle;

use ringtap_export::Stop;
use ringtap_export::nbd::{Error, Limits, Listener, NamedExport, Server, Tls};
use ringtap_image::{CacheMode, Format, Image, OpenOptions};
use ringtap_vbd::Vbd;
use tempfile::TempDir;

/// A server on a UNIX socket, stopped when it is dropped.
pub struct Served {
    pub dir: TempDir,
    pub socket: PathBuf,
    /// The same over TCP, on this port.
    pub port: u16,
    /// The image of the first export, where there is one.
    pub disk: PathBuf,
    pub vbd: ringtap_vbd::Disk,
    pub stop: Stop,
    thread: Option<JoinHandle<Result<(), Error>>>,
}

/// How to serve.
#[derive(Clone, Copy)]
pub struct How {
    pub cache: CacheMode,
    pub read_only: bool,
    pub limits: Limits,
    /// What the log calls the disk; nothing where it is told of none.
    pub name: &'static str,
}

impl Default for How {
    fn default() -> How {
        let limits = Limits::default();
        How { cache: CacheMode::Writeback, read_only: false, limits, name: "" }
    }
}

pub fn direct() -> How {
    How { cache: CacheMode::None, ..How::default() }
}

pub fn open(disk: &Path, how: &How) -> Box<dyn Image> {
    let format = Some(Format::Raw);
    let options = OpenOptions {
        format,
        cache: how.cache,
        read_only: how.read_only,
        ..OpenOptions::default()
    };
    ringtap_image::open(disk, &options).expect("the image opens")
}

/// Serve a file with this content, twice: as "disk" and as "same".
pub fn file(content: &[u8], how: How) -> Served {
    on_file(how, |mut file| file.write_all(content))
}

/// Serve a sparse file of zeros.
pub fn sparse(len: u64, how: How) -> Served {
    secured(len, how, Tls::Off)
}

/// The same at sockets that have TLS.
pub fn secured(len: u64, how: How, tls: Tls) -> Served {
    on_secured_file(how, tls, |file| file.set_len(len))
}

fn on_file(how: How, make: impl FnOnce(fs::File) -> std::io::Result<()>) -> Served {
    on_secured_file(how, Tls::Off, make)
}

fn on_secured_file(
    how: How,
    tls: Tls,
    make: impl FnOnce(fs::File) -> std::io::Result<()>,
) -> Served {
    // Cargo's own folder lies on a file system that does O_DIRECT; /tmp may not.
    let dir = TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
    let disk = dir.path().join("disk");
    fs::File::create(&disk).and_then(make).expect("the image");
    let image = open(&disk, &how);
    let mut served = image_in(dir, image, how, tls);
    served.disk = disk;
    served
}

/// Serve any image.
pub fn image(image: Box<dyn Image>, how: How) -> Served {
    image_in(TempDir::new().expect("a folder"), image, how, Tls::Off)
}

fn image_in(dir: TempDir, image: Box<dyn Image>, how: How, tls: Tls) -> Served {
    // A socket's path has room for 107 bytes only, so it does not go below Cargo's folder.
    let sockets = TempDir::new().expect("a folder");
    let socket = sockets.path().join("nbd");
    let listener = Listener::Unix(UnixListener::bind(&socket).expect("a socket"));
    let tcp = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = tcp.local_addr().expect("its address").port();
    let vbd = Vbd::new(image, how.cache);
    let vbd = if how.name.is_empty() { vbd } else { vbd.named(how.name, how.name) };
    let vbd = ringtap_vbd::Disk::from(vbd);
    let export = |name: &str| NamedExport {
        name: name.into(),
        description: format!("the export {name}"),
        vbd: vbd.clone(),
    };
    let server =
        Server::new(vec![listener, Listener::Tcp(tcp)], vec![export("disk"), export("same")]);
    let server = server.with_limits(how.limits).with_tls(vec![tls; 2]);
    let stop = Stop::new().expect("an eventfd");
    let theirs = stop.clone();
    let thread = std::thread::spawn(move || {
        let _sockets = sockets;
        server.serve(&theirs)
    });
    Served { dir, socket, port, disk: PathBuf::new(), vbd, stop, thread: Some(thread) }
}

impl Served {
    pub fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.socket.display())
    }

    pub fn content(&self) -> Vec<u8> {
        fs::read(&self.disk).expect("the image")
    }

    /// Stop, and wait until it has.
    pub fn stop(&mut self) {
        self.stop.raise();
        if let Some(thread) = self.thread.take() {
            thread.join().expect("the server's thread").expect("the server");
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.stop.raise();
        if let Some(thread) = self.thread.take() {
            let end = thread.join();
            if !std::thread::panicking() {
                end.expect("the server's thread").expect("the server");
            }
        }
    }
}

/// Run a program of the distribution to its end, a minute at most; it must succeed.
pub fn run(program: &str, args: &[&str]) -> String {
    let output = try_run(program, args, "");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{program} {args:?}: {}\n{text}{errors}", output.status);
    text
}

/// Run a program with something to read; `timeout` ends it and what it started.
pub fn try_run(program: &str, args: &[&str], input: &str) -> Output {
    let mut child = Command::new("timeout")
        .args(["--kill-after=5", "60", program])
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("timeout of coreutils");
    let mut stdin = child.stdin.take().expect("a pipe");
    stdin.write_all(input.as_bytes()).expect("written");
    drop(stdin);
    let output = child.wait_with_output().expect("its end");
    let code = output.status.code();
    assert_ne!(code, Some(127), "{program} is not installed; run make test, which installs it");
    assert_ne!(code, Some(124), "{program} {args:?} did not end within a minute");
    output
}

/// Bytes that differ from page to page, with runs of zeros in between.
pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut bytes = vec![0; len];
    for (i, page) in bytes.chunks_mut(4096).enumerate() {
        if (i / 24) % 3 == 1 {
            continue;
        }
        for word in page.chunks_mut(8) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            word.copy_from_slice(&state.to_le_bytes()[..word.len()]);
        }
    }
    bytes
}

/// Compare without printing megabytes.
pub fn assert_same(left: &[u8], right: &[u8]) {
    assert_eq!(left.len(), right.len());
    let differs = left.iter().zip(right).position(|(left, right)| left != right);
    assert_eq!(differs, None, "differs from there");
}
