//! Where a guest's kernel and its modules come from: what the distribution has installed, or its
//! package unpacked into a cache.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};

use crate::error::{Error, Result, io};
use crate::modules::Tree;
use crate::process::{find_program, run_tool};

/// What kind of machine a kernel runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Machine {
    /// A process of this host: the kernel is a program.
    Uml,
    /// A virtual PC.
    Pc,
}

/// A kernel and the directory of its modules.
#[derive(Debug, Clone)]
pub struct Kernel {
    /// What it runs on.
    pub machine: Machine,
    /// The program `linux.uml`, or a `vmlinuz`.
    pub image: PathBuf,
    /// The directory that holds `kernel/` and `modules.builtin`.
    pub modules: PathBuf,
    /// As `uname -r` says in the guest.
    pub release: String,
}

/// The modules an appliance for a virtual PC cannot do without.
pub(crate) const NEEDED_IN_PC: [&str; 8] = [
    "crc32c_generic",
    "virtio_pci",
    "virtio_console",
    "virtio_blk",
    "9pnet_virtio",
    "9p",
    "overlay",
    "sd_mod",
];

const DOWNLOAD_TIME: Duration = Duration::from_secs(600);
const QUERY_TIME: Duration = Duration::from_secs(60);

impl Kernel {
    /// The distribution's User-Mode Linux.
    ///
    /// # Errors
    /// [`Error::Missing`] when the package `user-mode-linux` is not installed.
    pub fn uml() -> Result<Self> {
        let image = find_program("linux.uml", "user-mode-linux")?;
        let version = run_tool(Command::new(&image).arg("--version"), QUERY_TIME)?;
        let release = String::from_utf8_lossy(&version).trim().to_owned();
        let modules = Path::new("/usr/lib/uml/modules").join(&release);
        if !modules.is_dir() {
            return Err(Error::Missing {
                what: format!("the module directory of User-Mode Linux {release}"),
                looked: modules.display().to_string(),
                remedy: "`apt-get install --reinstall user-mode-linux`".into(),
            });
        }
        Ok(Self { machine: Machine::Uml, image, modules, release })
    }

    /// A kernel for a virtual PC: the newest installed one, else the newest in `cache`, else the
    /// distribution's `linux-image` package, downloaded with `apt-get` (70 to 110 MB) and
    /// unpacked there without being installed.
    ///
    /// # Errors
    /// When none is there and none can be downloaded.
    pub fn pc(cache: &Path) -> Result<Self> {
        // A cloud image's kernel is cut down and may lack what the appliance stands on.
        let whole = |kernel: &Kernel| {
            let wanted = NEEDED_IN_PC.map(String::from);
            Tree::open(&kernel.modules).is_ok_and(|tree| tree.load_order(&wanted).is_ok())
        };
        if let Some(found) = newest(Path::new("/")).filter(whole) {
            return Ok(found);
        }
        Self::kept(&cache.join("kernel"), |_| Ok(vec![]))
    }

    /// As [`Kernel::pc`], of version `least` (6.12: `[6, 12]`) or later: where the distribution's is
    /// older, that of its backports, or else of the backports of Debian's present release.
    ///
    /// # Errors
    /// As [`Kernel::pc`], and where the backports have none either.
    pub fn pc_since(cache: &Path, least: &[u64]) -> Result<Self> {
        let mut found = Self::pc(cache)?;
        let newer = |kernel: &Kernel| version_key(&kernel.release).as_slice() >= least;
        for (store, release) in [("kernel-backports", None), ("kernel-stable", Some("stable"))] {
            if newer(&found) {
                break;
            }
            found = Self::kept(&cache.join(store), |store| backports(store, release))?;
        }
        if newer(&found) {
            return Ok(found);
        }
        Err(Error::Unusable {
            path: found.image,
            found: format!("a kernel of version {}, older than {least:?}", found.release),
            remedy: "install a newer kernel".into(),
        })
    }

    /// The newest kernel in `store`, or else the one of the package that apt knows, told the options
    /// that `apt` gives.
    fn kept(store: &Path, apt: impl FnOnce(&Path) -> Result<Vec<String>>) -> Result<Self> {
        let store = store.to_owned();
        fs::create_dir_all(&store).map_err(io("make", &store))?;
        let lock = fs::File::create(store.join("lock")).map_err(io("make", store.join("lock")))?;
        flock(&lock, FlockOperation::LockExclusive)
            .map_err(|e| io("lock", store.join("lock"))(e.into()))?;
        if let Some(found) = newest_of_packages(&store) {
            return Ok(found);
        }
        fetch(&store, &apt(&store)?)?;
        newest_of_packages(&store).ok_or_else(|| Error::Unusable {
            path: store,
            found: "without a kernel although one was just unpacked".into(),
            remedy: "`apt-get install linux-image-amd64`".into(),
        })
    }
}

/// The newest kernel below a root directory that has both image and modules.
fn newest(root: &Path) -> Option<Kernel> {
    let names = |dir: &str| -> Vec<String> {
        let entries = fs::read_dir(root.join(dir)).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
    };
    let kernel = |image: PathBuf, release: &str| {
        let modules = ["lib/modules", "usr/lib/modules"]
            .map(|dir| root.join(dir).join(release))
            .into_iter()
            .find(|dir| dir.join("kernel").is_dir())?;
        fs::File::open(&image).ok()?;
        Some(Kernel { machine: Machine::Pc, image, modules, release: release.to_owned() })
    };
    let boot = names("boot")
        .into_iter()
        .filter_map(|name| kernel(root.join("boot").join(&name), name.strip_prefix("vmlinuz-")?));
    // Debian's packages since Linux 7 have the image among the modules.
    let beside = names("usr/lib/modules").into_iter().filter_map(|release| {
        kernel(root.join("usr/lib/modules").join(&release).join("vmlinuz"), &release)
    });
    boot.chain(beside).max_by_key(|kernel| version_key(&kernel.release))
}

fn newest_of_packages(store: &Path) -> Option<Kernel> {
    let roots = fs::read_dir(store).ok()?.flatten().map(|e| e.path()).filter(|p| p.is_dir());
    roots.filter_map(|root| newest(&root)).max_by_key(|kernel| version_key(&kernel.release))
}

/// Numbers compare as numbers: 6.12 is newer than 6.1.
fn version_key(release: &str) -> Vec<u64> {
    release.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse().ok()).collect()
}

/// Downloads the newest kernel package and unpacks what a guest may need of it.
fn fetch(store: &Path, apt: &[String]) -> Result<()> {
    let packages = newest_packages(apt)?;
    let work = tempfile::Builder::new()
        .prefix("unpack-")
        .tempdir_in(store)
        .map_err(io("make a directory in", store))?;
    run_tool(
        Command::new(find_program("apt-get", "apt")?)
            .args(apt)
            .arg("download")
            .args(&packages)
            .current_dir(work.path()),
        DOWNLOAD_TIME,
    )?;
    let files = fs::read_dir(work.path()).map_err(io("list", work.path()))?.flatten();
    let debs: Vec<PathBuf> =
        files.map(|e| e.path()).filter(|p| p.extension().is_some_and(|e| e == "deb")).collect();
    if debs.len() < packages.len() {
        return Err(Error::Unusable {
            path: work.path().to_path_buf(),
            found: format!("incomplete after `apt-get download {}`", packages.join(" ")),
            remedy: "`apt-get update`, then try again".into(),
        });
    }
    for deb in &debs {
        unpack(deb, &work.path().join("root"))?;
    }
    let place = store.join(&packages[0]);
    fs::rename(work.path().join("root"), &place).map_err(io("move the kernel to", &place))
}

/// Takes the image and the modules, without the drivers of hardware no guest of ours has: 400 MB
/// become some 130.
fn unpack(deb: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).map_err(io("make", to))?;
    let dpkg = find_program("dpkg-deb", "dpkg")?;
    let mut stream = Command::new(&dpkg);
    stream.arg("--fsys-tarfile").arg(deb).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut stream = stream.spawn().map_err(io("start", &dpkg))?;
    let mut tar = Command::new(find_program("tar", "tar")?);
    tar.arg("-x").arg("-C").arg(to);
    for unwanted in ["gpu", "media", "net", "infiniband", "usb", "staging", "iio", "hwmon", "input"]
    {
        tar.arg(format!("--exclude=*/kernel/drivers/{unwanted}"));
    }
    tar.args(["--exclude=*/kernel/sound", "--exclude=./usr/share/*"]);
    tar.args(["--exclude=./boot/System.map*"]);
    let stdout = stream.stdout.take().map_or_else(Stdio::null, Stdio::from);
    let result = Command::output(tar.stdin(stdout)).map_err(io("unpack", deb));
    let dpkg_status = stream.wait().map_err(io("unpack", deb))?;
    let output = result?;
    if output.status.success() && dpkg_status.success() {
        return Ok(());
    }
    Err(Error::Unusable {
        path: deb.to_path_buf(),
        found: format!(
            "not unpackable (dpkg-deb {dpkg_status}, tar {}): {}",
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        ),
        remedy: "free some space, or `apt-get install linux-image-amd64`".into(),
    })
}

/// Has apt look at the backports of this Debian, or of the release named, in lists of their own
/// below `store`; the options by which it finds them again.
fn backports(store: &Path, release: Option<&str>) -> Result<Vec<String>> {
    let path = Path::new("/etc/os-release");
    let here = fs::read_to_string(path).map_err(io("read", path))?;
    let name = here.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    let name = release.or(name).filter(|_| here.contains("ID=debian"));
    let name = name.ok_or_else(|| Error::Missing {
        what: "a newer kernel for a virtual PC".into(),
        looked: "backports, which only Debian has".into(),
        remedy: "install a newer kernel".into(),
    })?;
    let apt = store.join("apt");
    for dir in ["lists/partial", "cache/archives/partial"].map(|dir| apt.join(dir)) {
        fs::create_dir_all(&dir).map_err(io("make", &dir))?;
    }
    let list = apt.join("sources.list");
    let source =
        format!("deb http://deb.debian.org/debian {}-backports main\n", name.trim_matches('"'));
    fs::write(&list, source).map_err(io("write", &list))?;
    let shown = apt.display();
    let options = [
        format!("Dir::Etc::sourcelist={}", list.display()),
        "Dir::Etc::sourceparts=-".into(),
        format!("Dir::State::lists={shown}/lists"),
        format!("Dir::Cache={shown}/cache"),
        "Acquire::Languages=none".into(),
    ];
    let options: Vec<String> = options.into_iter().map(|option| format!("-o{option}")).collect();
    let apt_get = find_program("apt-get", "apt")?;
    run_tool(Command::new(apt_get).args(&options).arg("update"), DOWNLOAD_TIME)?;
    Ok(options)
}

/// The packages behind the newest `linux-image-amd64` that apt knows, by name: one, or the image,
/// the modules, and the list of those built in.
fn newest_packages(apt: &[String]) -> Result<Vec<String>> {
    let none = |why: &str| Error::Missing {
        what: "a kernel for a virtual PC".into(),
        looked: format!("/boot and apt's lists: {why}"),
        remedy: "`apt-get update`, or `apt-get install linux-image-amd64`".into(),
    };
    let apt_cache = find_program("apt-cache", "apt")?;
    let run = |args: &[&str]| -> Result<String> {
        let out = run_tool(Command::new(&apt_cache).args(apt).args(args), QUERY_TIME)?;
        Ok(String::from_utf8_lossy(&out).into_owned())
    };
    let known = run(&["madison", "linux-image-amd64"])?;
    let version = known
        .lines()
        .filter_map(|line| line.split('|').nth(1).map(str::trim))
        .max_by_key(|version| version_key(version))
        .ok_or_else(|| none("linux-image-amd64 is unknown"))?;
    let needs = |package: &str, prefixes: &[&str]| -> Result<Vec<String>> {
        let depends = run(&["depends", package])?;
        let names = depends.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
        let fits = |name: &&str| prefixes.iter().any(|prefix| name.starts_with(prefix));
        Ok(names.filter(fits).map(str::to_owned).collect())
    };
    let images = needs(&format!("linux-image-amd64={version}"), &["linux-image-"])?;
    let image = images.first().ok_or_else(|| none("linux-image-amd64 names no image"))?;
    let parts = needs(image, &["linux-binary-", "linux-modules-", "linux-base-"])?;
    Ok(if parts.is_empty() { images } else { parts })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_compare_as_numbers() {
        assert!(version_key("6.12.9-amd64") > version_key("6.1.100-amd64"));
        assert!(version_key("6.1.0-56-amd64") > version_key("6.1.0-9-amd64"));
    }

    #[test]
    fn the_newest_kernel_with_modules_is_taken() {
        let root = tempfile::tempdir().unwrap();
        for (release, modules) in [("6.1.0-9", true), ("6.1.0-56", true), ("6.12.0", false)] {
            let boot = root.path().join("boot");
            fs::create_dir_all(&boot).unwrap();
            fs::write(boot.join(format!("vmlinuz-{release}")), b"").unwrap();
            if modules {
                fs::create_dir_all(root.path().join("lib/modules").join(release).join("kernel"))
                    .unwrap();
            }
        }
        assert_eq!(newest(root.path()).unwrap().release, "6.1.0-56");
        let beside = root.path().join("usr/lib/modules/7.3.4");
        fs::create_dir_all(beside.join("kernel")).unwrap();
        fs::write(beside.join("vmlinuz"), b"").unwrap();
        assert_eq!(newest(root.path()).unwrap().image, beside.join("vmlinuz"));
    }
}
