//! Other programs that know LUKS, and Ringtap's side of the comparison.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use ringtap_image::luks::{CreateOptions, create};
use ringtap_image::{
    CacheMode, Container, Format, OpenError, OpenOptions, Secret, on_a_ring, open,
};
use ringtap_vbd::{Error, Kind, Request, Vbd};

pub const PASS: &str = "correct horse battery staple";

/// A folder for one test, with the key file.
pub struct Bench {
    dir: tempfile::TempDir,
    pub disk: PathBuf,
    pub key: PathBuf,
}

impl Bench {
    pub fn new() -> Bench {
        let dir = tempfile::tempdir().expect("a folder");
        let (disk, key) = (dir.path().join("disk"), dir.path().join("key"));
        fs::write(&key, PASS).expect("a key file");
        Bench { dir, disk, key }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn empty_disk(&self, len: u64) {
        let file = fs::File::create(&self.disk).expect("a file");
        file.set_len(len).expect("a length");
    }

    pub fn options(&self) -> OpenOptions {
        OpenOptions {
            format: Some(Format::Luks),
            secret: Some(Secret::new(PASS.as_bytes()).expect("memory")),
            ..OpenOptions::default()
        }
    }

    pub fn open(&self, options: OpenOptions) -> Result<Opened, OpenError> {
        let cache = options.cache;
        let vbd = Vbd::new(open(&self.disk, &options)?, cache);
        Ok(Opened { vbd, path: self.disk.clone() })
    }

    /// Make a container by Ringtap.
    pub fn create(&self, size: u64, options: CreateOptions) {
        self.empty_disk(0);
        let disk = self.disk.clone();
        let secret = Secret::new(PASS.as_bytes()).expect("memory");
        let made = on_a_ring(&self.disk, |io| async move {
            let container = Container::open(&disk, &OpenOptions::default()).expect("a file");
            create(&io, &container, size, &options, &secret).await
        });
        made.expect("a ring").expect("a container");
    }

    /// Run cryptsetup on the disk with the key file; options follow.
    pub fn cryptsetup(&self, action: &[&str], options: &[&str]) -> Output {
        let mut command = limited("cryptsetup");
        command.args(action).arg("-q").args(options).arg("--key-file").arg(&self.key);
        command.arg(&self.disk).output().expect("cryptsetup runs")
    }

    pub fn luks_format(&self, options: &[&str]) {
        good(&self.cryptsetup(&["luksFormat"], options), "luksFormat");
    }

    /// The payload as Python's `cryptography` deciphers it, with the key that cryptsetup tells.
    pub fn by_python(&self, offset: u64, sector: u64) -> Vec<u8> {
        let volume_key = self.path("volume-key");
        let _none_yet = fs::remove_file(&volume_key);
        let mut dump = limited("cryptsetup");
        dump.args(["luksDump", "-q", "--dump-volume-key", "--volume-key-file"]).arg(&volume_key);
        let dumped = dump.arg("--key-file").arg(&self.key).arg(&self.disk).output();
        good(&dumped.expect("cryptsetup runs"), "luksDump --dump-volume-key");
        let clear = self.path("clear");
        let mut python = limited("/usr/bin/python3");
        python.arg("-c").arg(DECIPHER).arg(&self.disk).arg(&volume_key).arg(&clear);
        let done = python.arg(offset.to_string()).arg(sector.to_string()).output();
        good(&done.expect("python runs"), "python");
        fs::read(&clear).expect("the payload")
    }

    /// The payload as QEMU deciphers it.
    pub fn by_qemu(&self) -> Vec<u8> {
        let clear = self.path("clear");
        let mut convert = limited("qemu-img");
        convert.args(["convert", "-O", "raw", "--object"]).arg(self.qemu_secret());
        convert.arg("--image-opts").arg(self.qemu_disk()).arg(&clear);
        good(&convert.output().expect("qemu-img runs"), "qemu-img convert");
        fs::read(&clear).expect("the payload")
    }

    pub fn qemu_secret(&self) -> String {
        format!("secret,id=s,file={}", self.key.display())
    }

    pub fn qemu_disk(&self) -> String {
        format!("driver=luks,key-secret=s,file.driver=file,file.filename={}", self.disk.display())
    }

    pub fn qemu_io(&self, command: &str) {
        let mut io = limited("qemu-io");
        io.args(["-c", command, "--object"]).arg(self.qemu_secret());
        let output = io.arg("--image-opts").arg(self.qemu_disk()).output().expect("qemu-io runs");
        good(&output, command);
        // A pattern that does not fit is told on stdout only.
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(!said.contains("failed") && !said.contains("error"), "{command}: {said}");
    }
}

/// Sector numbers count in 512 bytes whatever the sectors' size, as under dm-crypt.
const DECIPHER: &str = r#"
import sys
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
disk, key, clear = (open(name, mode) for name, mode in zip(sys.argv[1:4], ("rb", "rb", "wb")))
offset, size = int(sys.argv[4]), int(sys.argv[5])
key = key.read()
disk.seek(offset)
number = 0
while len(sector := disk.read(size)) == size:
    mode = modes.XTS((number * size // 512).to_bytes(16, "little"))
    clear.write(Cipher(algorithms.AES(key), mode).decryptor().update(sector))
    number += 1
"#;

/// A program with an end to its time. scripts/setup.sh test installs those that these tests take.
pub fn limited(program: &str) -> Command {
    let mut command = Command::new("timeout");
    command.args(["-k", "5", "120", program]);
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{path}:/usr/sbin:/sbin"));
    command
}

pub fn good(output: &Output, what: &str) {
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{what}: {}: {told}", output.status);
}

/// Let qemu-img make a container. What it measures for the key is at times less than a tick of the
/// clock, which it takes for an error.
pub fn make(command: &mut Command) {
    for tries in (0..60).rev() {
        let output = command.output().expect("qemu-img runs");
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        if !told.contains("accurate CPU usage") || tries == 0 {
            return good(&output, "qemu-img");
        }
    }
}

/// An image open in Ringtap.
pub struct Opened {
    pub vbd: Vbd,
    path: PathBuf,
}

impl Opened {
    fn serve(&self, kind: Kind, offset: u64, bytes: &mut [u8], len: u64) -> Result<(), Error> {
        let (vbd, path): (Vbd, &Path) = (self.vbd.fork(), &self.path);
        let given = bytes.to_vec();
        let filled = on_a_ring(path, |io| async move {
            let mut buffer = io.buffer(given.len()).map_err(Error::Os)?;
            buffer.bytes_mut().copy_from_slice(&given);
            let request = Request { kind, offset, len, mem: buffer.mem(), fua: false };
            vbd.serve(&io, request).await?;
            Ok(buffer.bytes().to_vec())
        });
        bytes.copy_from_slice(&filled.expect("a ring")?);
        Ok(())
    }

    pub fn read(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.serve(Kind::Read, offset, &mut bytes, len as u64).expect("a read");
        bytes
    }

    pub fn write(&self, offset: u64, bytes: &[u8]) {
        self.serve(Kind::Write, offset, &mut bytes.to_vec(), bytes.len() as u64).expect("a write");
    }

    pub fn ask(&self, kind: Kind, offset: u64, len: u64) -> Result<(), Error> {
        self.serve(kind, offset, &mut [], len)
    }

    /// Leave the image as other programs expect it.
    pub fn close(self) {
        let (vbd, path) = (self.vbd, self.path);
        let closed = on_a_ring(&path, |io| async move { vbd.close(&io).await });
        closed.expect("a ring").expect("closed");
    }

    pub fn read_all(&self) -> Vec<u8> {
        self.read(0, self.vbd.size() as usize)
    }

    /// Fill it, write here and there over it, and give what it must hold now. Offsets and lengths are
    /// multiples of the logical sector, as a guest's are.
    pub fn scribble(&self, seed: u64) -> Vec<u8> {
        let mut rng = fastrand::Rng::with_seed(seed);
        let sector = u64::from(self.vbd.info().logical_block_size);
        let size = self.vbd.size();
        let mut model = vec![0; size as usize];
        rng.fill(&mut model);
        self.write(0, &model);
        for _ in 0..30 {
            let from = rng.u64(0..size / sector);
            let to = rng.u64(from + 1..=(from + 40).min(size / sector));
            let (from, to) = ((from * sector) as usize, (to * sector) as usize);
            if rng.u8(0..4) == 0 {
                let zero = Kind::WriteZeroes { unmap: rng.bool(), fast: false };
                self.ask(zero, from as u64, (to - from) as u64).expect("zeros");
                model[from..to].fill(0);
            } else {
                rng.fill(&mut model[from..to]);
                self.write(from as u64, &model[from..to]);
            }
            assert!(self.read(from as u64, to - from) == model[from..to], "bytes {from} to {to}");
        }
        self.ask(Kind::Flush, 0, 0).expect("a flush");
        model
    }
}

pub fn cached(cache: CacheMode, options: OpenOptions) -> OpenOptions {
    OpenOptions { cache, ..options }
}
