//! Xen itself: the hypervisor and its tools, from the distribution's packages.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use flate2::read::GzDecoder;

use crate::apt::{self, Apt};
use crate::elf::Resolver;
use crate::error::{Error, Result, io};

/// The tools that the first domain gets, with the directories they get into; libraries keep theirs.
const TOOLS: [(&str, &[&str]); 2] = [
    ("usr/sbin", &["xl", "xenstored", "xenconsoled", "xen-init-dom0", "lsevtchn"]),
    (
        "usr/bin",
        &[
            "xenstore-chmod",
            "xenstore-exists",
            "xenstore-list",
            "xenstore-ls",
            "xenstore-read",
            "xenstore-rm",
            "xenstore-watch",
            "xenstore-write",
        ],
    ),
];

/// The emulator of HVM domains: its package, and its place there and in the first domain, where Debian's libxl looks for it.
const DEVICE_MODEL: &str = "qemu-system-xen";
const DEVICE_MODEL_PLACE: &str = "usr/libexec/xen-qemu-system-i386";

/// What the emulator and libxl read, which comes with QEMU on this machine.
const FIRMWARE: [&str; 4] = [
    "/usr/share/seabios/bios-256k.bin",
    "/usr/share/qemu/linuxboot.bin",
    "/usr/share/qemu/kvmvapic.bin",
    "/usr/share/qemu/keymaps/en-us",
];

/// libxl has pthread_cancel open it, and ends where it is not.
const UNNAMED_LIBRARY: &str = "libgcc_s.so.1";

/// A hypervisor and the unpacked packages of its tools.
#[derive(Debug, Clone)]
pub(crate) struct Hypervisor {
    /// An ELF file that a multiboot loader takes.
    pub(crate) image: PathBuf,
    root: PathBuf,
}

impl Hypervisor {
    /// What lies in `cache`, else the newest that apt knows, downloaded there (5 MB).
    ///
    /// # Errors
    /// Where it cannot be had.
    pub(crate) fn find(cache: &Path) -> Result<Self> {
        let store = cache.join("xen");
        let _lock = apt::locked(&store)?;
        if let Some(found) = newest(&store) {
            return Ok(found);
        }
        fetch(&store)?;
        newest(&store).ok_or_else(|| unusable(&store, "without a hypervisor although unpacked"))
    }

    /// Has `resolver` take all that the tools need.
    pub(crate) fn tools(&self, resolver: &mut Resolver) -> Result<()> {
        let versioned = self.versioned_dir()?;
        for (place, names) in TOOLS {
            for name in names {
                let own = [versioned.join(name), self.root.join(place).join(name)];
                let from = own
                    .iter()
                    .find(|path| path.is_file())
                    .ok_or_else(|| unusable(&self.root, &format!("without the program {name}")))?;
                resolver.add(from, &Path::new("/").join(place).join(name))?;
            }
        }
        resolver.library(UNNAMED_LIBRARY, Path::new("libxl"))
    }

    /// Has `resolver` take the emulator of HVM domains, downloaded beside Xen's own packages unless it lies there.
    ///
    /// # Errors
    /// Where it cannot be had, or lacks a library on this machine.
    pub(crate) fn device_model(&self, resolver: &mut Resolver) -> Result<()> {
        let store = self.root.with_file_name("device-model");
        let _lock = apt::locked(&store)?;
        let place = store.join(DEVICE_MODEL);
        let program = place.join(DEVICE_MODEL_PLACE);
        if !program.is_file() {
            let work = apt::work_dir(&store)?;
            let root = work.path().join("root");
            for deb in Apt::system().download(&[DEVICE_MODEL.into()], work.path())? {
                apt::unpack(&deb, &root, &["./usr/share/*"])?;
            }
            fs::rename(&root, &place).map_err(io("move Xen's QEMU to", &place))?;
        }
        if !program.is_file() {
            return Err(unusable(&place, &format!("without {DEVICE_MODEL_PLACE}")));
        }
        resolver.add(&program, &Path::new("/").join(DEVICE_MODEL_PLACE))
    }

    /// What an HVM domain starts with, each with its place in the first domain.
    ///
    /// # Errors
    /// Where some of it is not there.
    pub(crate) fn firmware(&self) -> Result<Vec<(PathBuf, PathBuf)>> {
        let loader = self.versioned_dir()?.with_file_name("boot").join("hvmloader");
        let inside = loader.strip_prefix(&self.root).unwrap_or(&loader);
        let mut files = vec![(loader.clone(), Path::new("/").join(inside))];
        for path in FIRMWARE.map(PathBuf::from) {
            if !path.is_file() {
                return Err(Error::Missing {
                    what: "QEMU's firmware for HVM domains of Xen".into(),
                    looked: path.display().to_string(),
                    remedy: "`apt-get install qemu-system-data seabios`".into(),
                });
            }
            files.push((path.clone(), path));
        }
        Ok(files)
    }

    /// Resolves programs with the libraries of these packages first.
    pub(crate) fn resolver(&self) -> Resolver {
        Resolver::below(&self.root)
    }

    /// The files of `/etc/xen`, each with its place in the first domain.
    pub(crate) fn settings(&self) -> Result<Vec<(PathBuf, PathBuf)>> {
        let mut files = Vec::new();
        let mut pending = vec![self.root.join("etc/xen")];
        while let Some(dir) = pending.pop() {
            for entry in fs::read_dir(&dir).map_err(io("list", &dir))? {
                let path = entry.map_err(io("list", &dir))?.path();
                if path.is_dir() {
                    pending.push(path);
                } else if let Ok(below) = path.strip_prefix(&self.root) {
                    let place = Path::new("/").join(below);
                    files.push((path, place));
                }
            }
        }
        Ok(files)
    }

    /// Where Debian keeps what belongs to one version of Xen.
    fn versioned_dir(&self) -> Result<PathBuf> {
        let lib = self.root.join("usr/lib");
        let dirs = fs::read_dir(&lib).map_err(io("list", &lib))?.flatten().map(|e| e.path());
        dirs.map(|dir| dir.join("bin"))
            .find(|dir| dir.join("xl").is_file())
            .ok_or_else(|| unusable(&self.root, "without the program xl"))
    }
}

fn unusable(path: &Path, found: &str) -> Error {
    Error::Unusable {
        path: path.to_path_buf(),
        found: found.into(),
        remedy: "remove it, `apt-get update`, then try again".into(),
    }
}

fn newest(store: &Path) -> Option<Hypervisor> {
    let roots = fs::read_dir(store).ok()?.flatten().map(|entry| entry.path());
    let root = roots.filter(|root| root.join("xen").is_file()).max()?;
    Some(Hypervisor { image: root.join("xen"), root })
}

/// Downloads the hypervisor, its tools and such libraries of theirs as are part of Xen or of no
/// other use; all others are on every machine.
fn fetch(store: &Path) -> Result<()> {
    let apt = Apt::system();
    let none = || Error::Missing {
        what: "Xen".into(),
        looked: "apt's lists: xen-system-amd64 is unknown or names no hypervisor".into(),
        remedy: "`apt-get update`".into(),
    };
    let system = apt.depends("xen-system-amd64")?;
    let hypervisor = system
        .iter()
        .find(|name| name.starts_with("xen-hypervisor-") && name.ends_with("-amd64"))
        .ok_or_else(none)?;
    let utils = system.iter().find(|name| name.starts_with("xen-utils-")).ok_or_else(none)?;
    let mut packages = vec![hypervisor.clone(), utils.clone(), "xenstore-utils".into()];
    let mut looked_at = 1;
    while let Some(package) = packages.get(looked_at).cloned() {
        looked_at += 1;
        for name in apt.depends(&package)? {
            let wanted = name.contains("xen") || name.starts_with("libyajl");
            if wanted && !packages.contains(&name) {
                packages.push(name);
            }
        }
    }
    let work = apt::work_dir(store)?;
    let root = work.path().join("root");
    for deb in apt.download(&packages, work.path())? {
        apt::unpack(&deb, &root, &["./usr/share/*", "./usr/lib/debug/*"])?;
    }
    let boot = root.join("boot");
    let packed = fs::read_dir(&boot)
        .map_err(io("list", &boot))?
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|end| end == "gz"))
        .ok_or_else(|| unusable(&boot, "without a hypervisor"))?;
    let image = root.join("xen");
    let mut from = GzDecoder::new(File::open(&packed).map_err(io("open", &packed))?);
    let mut to = File::create(&image).map_err(io("make", &image))?;
    std::io::copy(&mut from, &mut to).map_err(io("decompress", &packed))?;
    let place = store.join(hypervisor);
    fs::rename(&root, &place).map_err(io("move Xen to", &place))
}
