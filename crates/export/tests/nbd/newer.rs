//! libnbd and QEMU newer than those of Debian 12: Debian 13's packages, fetched with all they need down to the
//! C library, and run by their own dynamic linker. Nothing is installed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{FlockOperation, flock};

const PACKAGES: [&str; 3] = ["libnbd-bin", "python3-libnbd", "qemu-utils"];

pub struct Newer {
    root: PathBuf,
    libraries: PathBuf,
    linker: PathBuf,
}

impl Newer {
    /// Those fetched earlier, or fetches them now: 60 MB.
    pub fn get() -> Newer {
        let store = Path::new(env!("CARGO_TARGET_TMPDIR")).join("debian13");
        fs::create_dir_all(&store).expect("a folder");
        let lock = fs::File::create(store.join("lock")).expect("a lock");
        flock(&lock, FlockOperation::LockExclusive).expect("the lock");
        let root = store.join("root");
        if !root.join("usr/bin/qemu-img").exists() {
            let _ = fs::remove_dir_all(&root);
            fetch(&store, &root);
        }
        let libraries = root.join(format!("usr/lib/{}-linux-gnu", std::env::consts::ARCH));
        let linkers = fs::read_dir(&libraries).expect("libraries").flatten().map(|one| one.path());
        let is_linker = |path: &PathBuf| path.display().to_string().contains("/ld-linux-");
        let linker = { linkers }.find(is_linker).expect("a dynamic linker");
        Newer { root, libraries, linker }
    }

    fn start(&self, program: &str) -> Command {
        let mut command = Command::new("timeout");
        command.args(["--kill-after=5", "60"]).arg(&self.linker);
        command.arg("--library-path").arg(&self.libraries);
        command.arg(self.root.join("usr/bin").join(program));
        command.env("QEMU_MODULE_DIR", self.libraries.join("qemu"));
        command
    }

    /// Run a program to its end, a minute at most; it must succeed.
    pub fn run(&self, program: &str, args: &[&str]) -> String {
        finish(self.start(program).args(args))
    }

    /// Run a script of its Python.
    pub fn python(&self, script: &str, args: &[&str]) -> String {
        let mut command = self.start("python3");
        command.env("PYTHONHOME", self.root.join("usr"));
        command.env("PYTHONPATH", self.root.join("usr/lib/python3/dist-packages"));
        finish(command.args(["-c", script]).args(args))
    }
}

fn fetch(store: &Path, root: &Path) {
    let path = |name: &str| store.join(name).display().to_string();
    for name in ["state/lists/partial", "cache/archives/partial", "unpacking"] {
        fs::create_dir_all(store.join(name)).expect("a folder");
    }
    let keyring = "/usr/share/keyrings/debian-archive-keyring.gpg";
    let source = format!("deb [signed-by={keyring}] http://deb.debian.org/debian trixie main\n");
    fs::write(store.join("sources.list"), source).expect("written");
    // With an empty list of installed packages apt takes the C library along.
    fs::write(store.join("status"), "").expect("written");
    let config = [
        ("Dir::Etc::SourceList", path("sources.list")),
        ("Dir::Etc::SourceParts", "/nonexistent".into()),
        ("Dir::State", path("state")),
        ("Dir::State::Status", path("status")),
        ("Dir::Cache", path("cache")),
        ("APT::Install-Recommends", "false".into()),
        ("APT::Sandbox::User", "root".into()),
        ("Debug::NoLocking", "true".into()),
    ];
    let mut text: String =
        config.iter().map(|(key, value)| format!("{key} \"{value}\";\n")).collect();
    // What the system does after an update is for its own lists.
    text += "#clear APT::Update::Post-Invoke-Success;\n#clear APT::Update::Post-Invoke;\n";
    fs::write(store.join("apt.conf"), text).expect("written");
    let apt_get = |args: &[&str]| {
        let mut command = Command::new("apt-get");
        finish(command.env("APT_CONFIG", store.join("apt.conf")).args(args));
    };
    apt_get(&["-q", "update"]);
    apt_get(&[&["-q", "-y", "--download-only", "install"], &PACKAGES[..]].concat());
    let unpacking = store.join("unpacking");
    for archive in fs::read_dir(store.join("cache/archives")).expect("archives").flatten() {
        if archive.path().extension().is_some_and(|ext| ext == "deb") {
            finish(Command::new("dpkg-deb").arg("-x").arg(archive.path()).arg(&unpacking));
        }
    }
    // Only a whole tree has the name that is looked for.
    fs::rename(unpacking, root).expect("renamed");
}

fn finish(command: &mut Command) -> String {
    let output = command.output().expect("it runs");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{command:?}: {}\n{said}{errors}", output.status);
    said
}
