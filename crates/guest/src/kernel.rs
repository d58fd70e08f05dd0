//! Where a guest's kernel and its modules come from: what the distribution has installed, or its
//! package unpacked into a cache.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::apt::{self, Apt};
use crate::error::{Error, Result, io};
use crate::modules::Tree;
use crate::process::{find_program, run_tool};
use crate::xen::vmlinux;

/// What kind of machine a kernel runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Machine {
    /// A process of this host: the kernel is a program.
    Uml,
    /// A virtual PC.
    Pc,
    /// Xen's first domain, on a virtual PC.
    Xen,
    /// Another domain of that Xen.
    Domain,
    /// One that is a PC to its kernel, with devices that QEMU emulates in the first domain (HVM).
    Hvm,
}

impl Machine {
    /// Whether a tmpfs is laid over the guest's root. In a domain of Xen each module costs seconds
    /// to load under TCG, that of overlayfs too, and the packed root is in memory anyway.
    pub(crate) fn has_overlay(self) -> bool {
        matches!(self, Machine::Uml | Machine::Pc)
    }
}

/// A kernel and the directory of its modules.
#[derive(Debug, Clone)]
pub struct Kernel {
    /// What it runs on.
    pub machine: Machine,
    /// The program `linux.uml`, a `vmlinuz`, or for Xen a `vmlinux`.
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

const QUERY_TIME: Duration = Duration::from_secs(60);

/// Drivers of hardware that no guest of ours has, and papers: without them 400 MB are some 130.
const UNWANTED: [&str; 12] = [
    "*/kernel/drivers/gpu",
    "*/kernel/drivers/media",
    // Of the network cards only those without a folder of their own: virtio's is among them.
    "*/kernel/drivers/net/*/*",
    "*/kernel/drivers/infiniband",
    "*/kernel/drivers/usb",
    "*/kernel/drivers/staging",
    "*/kernel/drivers/iio",
    "*/kernel/drivers/hwmon",
    "*/kernel/drivers/input",
    "*/kernel/sound",
    "./usr/share/*",
    "./boot/System.map*",
];

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
        Self::kept(&cache.join("kernel"), |_| Ok(Apt::system()))
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
            found = Self::kept(&cache.join(store), |store| Apt::backports(store, release))?;
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

    /// A kernel for an HVM domain of Xen, as its boot loader takes it: the one that the others have.
    ///
    /// # Errors
    /// As [`Kernel::pc_since`].
    pub fn hvm(cache: &Path) -> Result<Self> {
        let usual = Self::pc_since(cache, &[6, 12])?;
        Ok(Self { machine: Machine::Hvm, ..usual })
    }

    /// A kernel for domains of Xen, for the first ([`Machine::Xen`]) or another: one since 6.12,
    /// which loads modules several times as fast there as 6.1 does.
    ///
    /// # Errors
    /// As [`Kernel::pc_since`].
    pub fn xen(cache: &Path, machine: Machine) -> Result<Self> {
        let usual = Self::pc_since(cache, &[6, 12])?;
        let image = vmlinux::uncompressed(&usual.image, &cache.join("vmlinux"))?;
        Ok(Self { machine, image, ..usual })
    }

    /// The newest kernel in `store`, or else the one of the package that `apt` knows.
    fn kept(store: &Path, apt: impl FnOnce(&Path) -> Result<Apt>) -> Result<Self> {
        let _lock = apt::locked(store)?;
        let kept = newest_of_packages(store);
        if let Some(found) = kept.clone().filter(has_network) {
            return Ok(found);
        }
        match (apt(store).and_then(|apt| fetch(store, &apt)), kept) {
            // Unpacked without a network card's driver, by an earlier version: better than none.
            (Err(_), Some(kept)) => return Ok(kept),
            (fetched, _) => fetched?,
        }
        newest_of_packages(store).ok_or_else(|| Error::Unusable {
            path: store.to_path_buf(),
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
    roots
        .filter_map(|root| newest(&root))
        .max_by_key(|kernel| (has_network(kernel), version_key(&kernel.release)))
}

/// Whether a kernel has the driver of a virtual PC's network card.
fn has_network(kernel: &Kernel) -> bool {
    let wanted = ["virtio_net".to_owned()];
    Tree::open(&kernel.modules).is_ok_and(|tree| tree.load_order(&wanted).is_ok())
}

/// Numbers compare as numbers: 6.12 is newer than 6.1.
fn version_key(release: &str) -> Vec<u64> {
    release.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse().ok()).collect()
}

/// Downloads the newest kernel package and unpacks what a guest may need of it.
fn fetch(store: &Path, apt: &Apt) -> Result<()> {
    let packages = newest_packages(apt)?;
    let work = apt::work_dir(store)?;
    let root = work.path().join("root");
    for deb in apt.download(&packages, work.path())? {
        apt::unpack(&deb, &root, &UNWANTED)?;
    }
    let place = store.join(format!("{}+net", packages[0]));
    fs::rename(root, &place).map_err(io("move the kernel to", &place))
}

/// The packages behind the newest `linux-image-amd64` that apt knows, by name: one, or the image,
/// the modules, and the list of those built in.
fn newest_packages(apt: &Apt) -> Result<Vec<String>> {
    let none = |why: &str| Error::Missing {
        what: "a kernel for a virtual PC".into(),
        looked: format!("/boot and apt's lists: {why}"),
        remedy: "`apt-get update`, or `apt-get install linux-image-amd64`".into(),
    };
    let known = apt.query(&["madison", "linux-image-amd64"])?;
    let version = known
        .lines()
        .filter_map(|line| line.split('|').nth(1).map(str::trim))
        .max_by_key(|version| version_key(version))
        .ok_or_else(|| none("linux-image-amd64 is unknown"))?;
    let needs = |package: &str, prefixes: &[&str]| -> Result<Vec<String>> {
        let mut names = apt.depends(package)?;
        names.retain(|name| prefixes.iter().any(|prefix| name.starts_with(prefix)));
        Ok(names)
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
