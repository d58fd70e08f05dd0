//! QEMU's own programs, each with a time limit, and images in a folder that goes away.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use ringtap_image::{CacheMode, Container, OpenOptions, on_a_ring};
use ringtap_io::Io;
use serde_json::Value;

pub struct Folder(tempfile::TempDir);

impl Folder {
    pub fn new() -> Folder {
        Folder(tempfile::tempdir().expect("a folder"))
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn command(&self, program: &str, args: &[&str]) -> Output {
        let mut command = Command::new("timeout");
        command.args(["60", program]).args(args).current_dir(self.0.path());
        command.output().expect("the program is installed")
    }

    /// What a program says, and it must succeed.
    pub fn run(&self, program: &str, args: &[&str]) -> String {
        let output = self.command(program, args);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{program} {args:?}: {text}{errors}");
        text
    }

    pub fn img(&self, args: &[&str]) -> String {
        self.run("qemu-img", args)
    }

    /// qemu-io commands on an image.
    pub fn io(&self, image: &str, commands: &[&str]) {
        let mut args = vec!["-f", "qcow2"];
        commands.iter().for_each(|command| args.extend(["-c", command]));
        args.push(image);
        let text = self.run("qemu-io", &args);
        assert!(!text.contains("rror") && !text.contains("failed"), "{commands:?}: {text}");
    }

    pub fn info(&self, image: &str) -> Value {
        let text = self.img(&["info", "-U", "--output", "json", image]);
        serde_json::from_str(&text).expect("json")
    }

    /// What qemu-img check finds, whatever that is.
    pub fn check(&self, image: &str) -> Value {
        let output = self.command("qemu-img", &["check", "-f", "qcow2", "--output=json", image]);
        let text = String::from_utf8_lossy(&output.stdout);
        // The lines of what is wrong come before the report.
        let json = &text[text.find("{\n").unwrap_or_else(|| {
            panic!("{image}: {text}{}", String::from_utf8_lossy(&output.stderr))
        })..];
        serde_json::from_str(json).expect(json)
    }

    /// The image has neither corruptions nor leaks.
    #[track_caller]
    pub fn assert_clean(&self, image: &str) {
        let report = self.check(image);
        for count in ["corruptions", "leaks", "check-errors"] {
            let found = report.get(count).and_then(Value::as_u64).unwrap_or(0);
            let say = || self.command("qemu-img", &["check", "-f", "qcow2", image]);
            assert_eq!(found, 0, "{image}: {:?}", say());
        }
    }

    /// The guest sees the same in both.
    #[track_caller]
    pub fn assert_same(&self, one: &str, other: &str) {
        self.img(&["compare", one, other]);
    }
}

/// Run a task on an image of the folder.
pub fn with<T: 'static, F: Future<Output = T> + 'static>(
    path: &Path,
    task: impl FnOnce(Io, Container) -> F,
) -> T {
    let container = open(path);
    on_a_ring(path, |io| task(io, container)).expect("io_uring")
}

pub fn open(path: &Path) -> Container {
    let options = OpenOptions { cache: CacheMode::Writeback, ..OpenOptions::default() };
    Container::open(path, &options).expect("the image opens")
}
