//! Which files may be opened, by landlock.

use std::fs;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreated, RulesetCreatedAttr, RulesetStatus, Scope,
};
use rustix::fs::{FileType, OFlags};

/// What a server opens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Files {
    /// Files, and folders with all in them, to read.
    pub read: Vec<PathBuf>,
    /// Files and devices to read and write.
    pub images: Vec<PathBuf>,
    /// Folders in which files are read, written, made and removed.
    pub folders: Vec<PathBuf>,
    /// Folders in which sockets and empty files are made, and files removed.
    pub places: Vec<PathBuf>,
}

impl Files {
    /// All of both.
    pub fn extend(&mut self, other: Files) {
        self.read.extend(other.read);
        self.images.extend(other.images);
        self.folders.extend(other.folders);
        self.places.extend(other.places);
    }

    fn rules(&self) -> impl Iterator<Item = (&Path, BitFlags<AccessFs>)> {
        let kinds = [
            (&self.read, looking()),
            (&self.images, using()),
            (&self.folders, keeping()),
            (&self.places, placing()),
        ];
        kinds
            .into_iter()
            .flat_map(|(paths, access)| paths.iter().map(move |path| (&**path, access)))
    }
}

/// The newest set of rules that is asked for. A kernel that knows less is taken with what it knows.
const NEWEST: ABI = ABI::V6;

fn looking() -> BitFlags<AccessFs> {
    AccessFs::ReadFile | AccessFs::ReadDir
}

fn using() -> BitFlags<AccessFs> {
    looking() | AccessFs::WriteFile | AccessFs::Truncate | AccessFs::IoctlDev
}

fn placing() -> BitFlags<AccessFs> {
    AccessFs::ReadDir | AccessFs::MakeSock | AccessFs::MakeReg | AccessFs::RemoveFile
}

fn keeping() -> BitFlags<AccessFs> {
    AccessFs::from_all(NEWEST)
        & !(AccessFs::Execute | AccessFs::MakeChar | AccessFs::MakeBlock | AccessFs::MakeSym)
}

/// What of the system every server reads, and the devices without which little runs.
fn usual(rules: RulesetCreated) -> Result<RulesetCreated, landlock::RulesetError> {
    let rules = ["/proc", "/sys"].iter().try_fold(rules, |rules, path| add(rules, path, looking()));
    ["/dev/null", "/dev/zero", "/dev/urandom"]
        .iter()
        .try_fold(rules?, |rules, path| add(rules, path, using()))
}

/// A rule for what is there; what is not cannot be opened anyway.
fn add(
    rules: RulesetCreated,
    path: impl AsRef<Path>,
    access: BitFlags<AccessFs>,
) -> Result<RulesetCreated, landlock::RulesetError> {
    let Ok(file) = PathFd::new(path) else { return Ok(rules) };
    let folder =
        rustix::fs::fstat(&file).is_ok_and(|facts| FileType::from_raw_mode(facts.st_mode).is_dir());
    let access = if folder { access } else { access & AccessFs::from_file(NEWEST) };
    rules.add_rule(PathBeneath::new(file, access))
}

fn ruleset(network: bool) -> Result<RulesetCreated, landlock::RulesetError> {
    let rules = Ruleset::default().handle_access(AccessFs::from_all(NEWEST))?;
    let rules = if network { rules } else { rules.handle_access(AccessNet::from_all(NEWEST))? };
    rules.scope(Scope::from_all(NEWEST))?.create()
}

/// How much of it the kernel has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Held {
    Whole,
    Partly,
    Not,
}

impl From<RulesetStatus> for Held {
    fn from(status: RulesetStatus) -> Held {
        match status {
            RulesetStatus::FullyEnforced => Held::Whole,
            RulesetStatus::PartiallyEnforced => Held::Partly,
            RulesetStatus::NotEnforced => Held::Not,
        }
    }
}

/// This thread, and those that it starts, open these and nothing else.
pub(crate) fn restrict(files: &Files, network: bool) -> Result<Held, landlock::RulesetError> {
    let rules = usual(ruleset(network)?)?;
    let rules = files.rules().try_fold(rules, |rules, (path, access)| add(rules, path, access))?;
    Ok(rules.restrict_self()?.ruleset.into())
}

/// As [`restrict`], and the files that this process has open now, as it has them open.
pub(crate) fn restrict_to_open(files: &Files) -> Result<Held, landlock::RulesetError> {
    // What the first allowed of the network is allowed, and no more.
    let rules = rules_of_open(usual(ruleset(true)?)?)?;
    let rules = files.rules().try_fold(rules, |rules, (path, access)| add(rules, path, access))?;
    Ok(rules.restrict_self()?.ruleset.into())
}

fn rules_of_open(rules: RulesetCreated) -> Result<RulesetCreated, landlock::RulesetError> {
    open_files()
        .into_iter()
        .try_fold(rules, |rules, (file, access)| rules.add_rule(PathBeneath::new(file, access)))
}

/// Regular files and block devices that are open, but for those that are in no folder. Other threads may close theirs meanwhile.
fn open_files() -> Vec<(OwnedFd, BitFlags<AccessFs>)> {
    let entries = fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    // All of them before there are more.
    let numbers: Vec<i32> = numbers.collect();
    let mut open = vec![];
    for number in numbers {
        // SAFETY: where it is not open any more the kernel says so.
        let file = unsafe { BorrowedFd::borrow_raw(number) };
        let Ok(file) = rustix::io::fcntl_dupfd_cloexec(file, 0) else { continue };
        let (Ok(facts), Ok(flags)) = (rustix::fs::fstat(&file), rustix::fs::fcntl_getfl(&file))
        else {
            continue;
        };
        let kind = FileType::from_raw_mode(facts.st_mode);
        let own = format!("/proc/self/fd/{}", file.as_raw_fd());
        let named = fs::read_link(own).is_ok_and(|path| {
            fs::symlink_metadata(&path)
                .is_ok_and(|found| (found.dev(), found.ino()) == (facts.st_dev, facts.st_ino))
        });
        if !named || !(kind.is_file() || kind.is_block_device()) {
            continue;
        }
        let access = match flags.intersects(OFlags::WRONLY | OFlags::RDWR) {
            true => using() & AccessFs::from_file(NEWEST),
            false => AccessFs::ReadFile.into(),
        };
        open.push((file, access));
    }
    open
}

/// Folders in which an operator's images may lie: all but those of the system itself, hidden folders of users, and
/// what runs there (/run). Links are those folders that they lead to.
///
/// # Errors
/// Where it is not shown which folders there are.
pub fn everywhere_but_the_systems() -> std::io::Result<Vec<PathBuf>> {
    const SYSTEMS: [&str; 14] = [
        "bin",
        "boot",
        "efi",
        "etc",
        "lib",
        "lib32",
        "lib64",
        "libx32",
        "proc",
        "run",
        "sbin",
        "sys",
        "usr",
        "lost+found",
    ];
    const OF_VAR_LIB: [&str; 7] =
        ["apt", "dpkg", "pam", "polkit-1", "rpm", "systemd", "containers"];
    let entries = |folder: &str| -> Vec<(String, PathBuf)> {
        let found = fs::read_dir(folder).into_iter().flatten().flatten();
        let real = found.filter(|entry| entry.file_type().is_ok_and(|kind| !kind.is_symlink()));
        real.map(|entry| (entry.file_name().to_string_lossy().into_owned(), entry.path())).collect()
    };
    let unhidden = |folder: &str| {
        entries(folder).into_iter().filter(|(name, _)| !name.starts_with('.')).map(|(_, path)| path)
    };
    fs::read_dir("/")?;
    let mut all = vec![];
    for (name, path) in entries("/") {
        match &*name {
            _ if SYSTEMS.contains(&&*name) || name.starts_with('.') => {}
            "var" => {
                all.push("/var/tmp".into());
                let lib = entries("/var/lib").into_iter();
                all.extend(
                    lib.filter(|(name, _)| !OF_VAR_LIB.contains(&&**name)).map(|(_, path)| path),
                );
            }
            "root" => all.extend(unhidden("/root")),
            "home" => {
                for (_, home) in entries("/home") {
                    all.extend(unhidden(&home.to_string_lossy()));
                }
            }
            _ => all.push(path),
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

    #[test]
    fn the_systems_own_folders_are_not_where_images_lie() {
        let all = everywhere_but_the_systems().expect("/ is listed");
        let has = |path: &str| all.iter().any(|folder| Path::new(path).starts_with(folder));
        assert!(has("/tmp/a.qcow2") && has("/var/tmp/a") && has("/dev/vg/a"));
        for path in ["/etc/shadow", "/usr/bin/sh", "/proc/1/mem", "/run/docker.sock", "/var/log/a"]
        {
            assert!(!has(path), "{path}");
        }
        assert!(!has("/root/.ssh/authorized_keys") && !has("/var/lib/dpkg/status"));
    }

    #[test]
    fn files_that_are_open_are_known_and_memory_is_none() {
        let dir = tempfile::tempdir().expect("a folder");
        let written = fs::File::create(dir.path().join("a")).expect("a file");
        fs::write(dir.path().join("b"), "").expect("a file");
        let read = fs::File::open(dir.path().join("b")).expect("the file");
        let memory =
            rustix::fs::memfd_create("a", rustix::fs::MemfdFlags::CLOEXEC).expect("memory");
        let open = open_files();
        let of = |file: std::os::fd::BorrowedFd<'_>| {
            let wanted = rustix::fs::fstat(file).expect("its facts");
            let is_it = |other: &OwnedFd| {
                let found = rustix::fs::fstat(other).expect("its facts");
                (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino)
            };
            open.iter().find(|(other, _)| is_it(other)).map(|(_, access)| *access)
        };
        assert!(of(written.as_fd()).expect("it").contains(AccessFs::WriteFile));
        assert_eq!(of(read.as_fd()), Some(AccessFs::ReadFile.into()));
        assert_eq!(of(memory.as_fd()), None);
    }

    #[test]
    fn a_file_that_a_thread_closes_meanwhile_is_left_out() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(SeqCst) {
                    drop(fs::File::open(file.path()));
                }
            });
            let made = (0..2_000).try_for_each(|_| rules_of_open(ruleset(true)?).map(drop));
            over.store(true, SeqCst);
            made.expect("rules");
        });
    }
}
