//! A folder in which qemu-img and ringtap work on the same images.

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

/// A folder with images, in which programs run.
pub(crate) struct Bench {
    dir: tempfile::TempDir,
}

impl Bench {
    pub(crate) fn new() -> Bench {
        Bench { dir: tempfile::tempdir().expect("a folder") }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Run a line of words; `ringtap` is the one under test.
    pub(crate) fn run(&self, line: &str) -> Output {
        // What qemu-img measures for a LUKS key is at times less than a tick of the clock.
        let mut tries = (0..60).map(|_| self.run_once(line));
        let unmeasured = |told: &Output| contains(&told.stderr, "accurate CPU usage");
        tries.find(|told| !unmeasured(told)).expect("qemu-img measures CPU time in the end")
    }

    fn run_once(&self, line: &str) -> Output {
        let mut words = line.split_whitespace();
        let name = words.next().expect("a program");
        let program = if name == "ringtap" { env!("CARGO_BIN_EXE_ringtap") } else { name };
        let mut command = Command::new("timeout");
        command.arg("60").arg(program).args(words).current_dir(self.dir.path());
        let output = command.stdin(Stdio::null()).output().expect("timeout of coreutils");
        assert_ne!(
            output.status.code(),
            Some(127),
            "{name} is missing: apt-get install qemu-utils"
        );
        output
    }

    /// What it prints, once it has ended with 0.
    pub(crate) fn ok(&self, line: &str) -> String {
        self.ends(line, 0)
    }

    /// What it prints, once it has ended so.
    pub(crate) fn ends(&self, line: &str, code: i32) -> String {
        let output = self.run(line);
        let [out, err] = [&output.stdout, &output.stderr].map(|it| String::from_utf8_lossy(it));
        assert_eq!(output.status.code(), Some(code), "{line}\n{out}{err}");
        format!("{out}{err}")
    }

    pub(crate) fn json(&self, line: &str) -> Value {
        serde_json::from_slice(&self.run(line).stdout).expect("JSON")
    }

    /// Write to an image with qemu-io: all operations in one process.
    pub(crate) fn qemu_io(&self, image: &str, operations: &[String]) {
        let mut command = Command::new("timeout");
        command.arg("60").arg("qemu-io").current_dir(self.dir.path());
        for operation in operations {
            command.arg("-c").arg(operation);
        }
        let output = command.args(image.split_whitespace()).output().expect("timeout");
        assert!(output.status.success(), "{output:?}");
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(!said.contains("failed"), "{said}");
    }

    /// QEMU reads the same from both and finds nothing wrong with the second.
    pub(crate) fn same(&self, one: &str, other: &str) {
        self.ok(&format!("qemu-img compare {one} {other}"));
        self.ok(&format!("ringtap compare -q {one} {other}"));
        if other.ends_with(".qcow2") {
            self.ok(&format!("qemu-img check -q {other}"));
            self.ok(&format!("ringtap check -q {other}"));
        }
    }
}

fn contains(said: &[u8], what: &str) -> bool {
    String::from_utf8_lossy(said).contains(what)
}

/// Operations on `size` bytes, for qemu-io.
pub(crate) fn operations(random: &mut fastrand::Rng, size: u64, count: usize) -> Vec<String> {
    let mut sectors = |most: u64| {
        let at = random.u64(0..size / 512);
        (at, random.u64(1..=most.min(size / 512 - at)), random.u8(1..255), random.u32(0..10))
    };
    let operation = |_| {
        let (at, len, pattern, kind) = sectors(300);
        let (at, len) = (at * 512, len * 512);
        match kind {
            0..=6 => format!("write -q -P {pattern} {at} {len}"),
            7 => format!("write -q -z {at} {len}"),
            8 => format!("write -q -z -u {at} {len}"),
            _ => format!("write -q -P 0 {at} {len}"),
        }
    };
    (0..count).map(operation).collect()
}
