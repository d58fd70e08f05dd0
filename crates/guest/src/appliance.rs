//! The appliance: an initramfs with busybox, the modules a guest needs and, where asked for,
//! programs of the host with their libraries.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::cpio::Archive;
use crate::elf::{Closure, Resolver};
use crate::error::{Error, Result, io};
use crate::kernel::{Kernel, Machine, NEEDED_IN_PC};
use crate::modules::Tree;
use crate::process::{find_program, package_of};
use crate::standby;
use crate::xen::packages::Hypervisor;

const INIT: &str = include_str!("init.sh");

/// What Xen's own hotplug scripts run that busybox does not replace.
const HOTPLUG: [&str; 4] = ["/bin/bash", "flock", "stat", "losetup"];

/// What the guest's root directory is made of. Either way a tmpfs lies over it, so a guest may
/// write anywhere and changes nothing on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Root {
    /// The host's own root directory, shared read-only: every program of the host is there at
    /// once, nothing is copied.
    Host,
    /// Only the named programs and their libraries, packed into the initramfs.
    Packed,
}

/// A kernel with an initramfs, ready to be booted any number of times.
#[derive(Debug, Clone)]
pub struct Appliance {
    pub(crate) kernel: Kernel,
    pub(crate) initrd: PathBuf,
    pub(crate) root: Root,
    pub(crate) hypervisor: Option<Hypervisor>,
}

/// Collects what goes into an [`Appliance`].
#[derive(Debug, Clone)]
pub struct Builder {
    machine: Machine,
    kernel: Option<Kernel>,
    root: Root,
    programs: Vec<String>,
    files: Vec<(PathBuf, PathBuf)>,
    modules: Vec<String>,
    spare_modules: Vec<String>,
    device_model: bool,
}

impl Appliance {
    /// An appliance for [`crate::Uml`], [`crate::Qemu`], [`crate::Xen`] or a [`crate::Domain`].
    pub fn builder(machine: Machine) -> Builder {
        Builder {
            machine,
            kernel: None,
            root: match machine {
                Machine::Uml => Root::Host,
                Machine::Pc | Machine::Xen | Machine::Domain | Machine::Hvm => Root::Packed,
            },
            programs: Vec::new(),
            files: Vec::new(),
            modules: Vec::new(),
            spare_modules: Vec::new(),
            device_model: false,
        }
    }

    /// Where appliances and kernels are kept unless told otherwise: `ringtap/guest` below
    /// `$XDG_CACHE_HOME` or `~/.cache`.
    pub fn default_cache() -> PathBuf {
        let home = || std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache"));
        std::env::var_os("XDG_CACHE_HOME")
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
            .or_else(home)
            .unwrap_or_else(std::env::temp_dir)
            .join("ringtap/guest")
    }

    /// The kernel it boots.
    pub fn kernel(&self) -> &Kernel {
        &self.kernel
    }

    /// The initramfs, an uncompressed cpio archive.
    pub fn initrd(&self) -> &Path {
        &self.initrd
    }
}

impl Builder {
    /// Programs the guest will run, by name or absolute path. They are looked for on the host at
    /// once; with [`Root::Packed`] they and their libraries are packed.
    #[must_use]
    pub fn programs<S: Into<String>>(mut self, names: impl IntoIterator<Item = S>) -> Self {
        self.programs.extend(names.into_iter().map(Into::into));
        self
    }

    /// A file of the host that shall stand at `to` in the guest.
    #[must_use]
    pub fn file(mut self, from: impl Into<PathBuf>, to: impl Into<PathBuf>) -> Self {
        self.files.push((from.into(), to.into()));
        self
    }

    /// Kernel modules to load at boot beside those every guest gets (virtio, loop, overlay; in a
    /// domain of Xen other than the first xen-blkfront alone).
    #[must_use]
    pub fn modules<S: Into<String>>(mut self, names: impl IntoIterator<Item = S>) -> Self {
        self.modules.extend(names.into_iter().map(Into::into));
        self
    }

    /// Kernel modules that are packed for `modprobe` and not loaded; with [`Root::Packed`] only.
    #[must_use]
    pub fn spare_modules<S: Into<String>>(mut self, names: impl IntoIterator<Item = S>) -> Self {
        self.spare_modules.extend(names.into_iter().map(Into::into));
        self
    }

    /// Gives Xen's first domain the QEMU that HVM domains need, of the distribution's package (3 MB, fetched once).
    #[must_use]
    pub fn device_model(mut self) -> Self {
        self.device_model = true;
        self
    }

    /// What the guest's root is made of. Unless told otherwise the host's own in User-Mode Linux,
    /// where it costs nothing, and packed for a PC: under TCG the first start of fio over 9p takes
    /// some eight seconds, packed half a second. Domains of Xen have it packed always.
    #[must_use]
    pub fn root(mut self, root: Root) -> Self {
        self.root = root;
        self
    }

    /// A certain kernel instead of the distribution's.
    #[must_use]
    pub fn kernel(mut self, kernel: Kernel) -> Self {
        self.kernel = Some(kernel);
        self
    }

    /// Builds the initramfs below `cache`, or finds the one that the same inputs made before.
    ///
    /// # Errors
    /// When a program, library, module or kernel is missing; the message names the package.
    pub fn build(mut self, cache: &Path) -> Result<Appliance> {
        fs::create_dir_all(cache).map_err(io("make", cache))?;
        let kernel = match (self.kernel.clone(), self.machine) {
            (Some(kernel), _) => kernel,
            (None, Machine::Uml) => Kernel::uml()?,
            (None, Machine::Pc) => Kernel::pc(cache)?,
            (None, Machine::Xen | Machine::Domain) => Kernel::xen(cache, self.machine)?,
            (None, Machine::Hvm) => Kernel::hvm(cache)?,
        };
        let hypervisor = match self.machine {
            Machine::Xen => Some(Hypervisor::find(cache)?),
            _ => None,
        };
        if !self.machine.has_overlay() {
            self.root = Root::Packed;
        }
        if let Some(xen) = &hypervisor {
            self.files.splice(..0, xen.settings()?);
            if self.device_model {
                self.files.extend(xen.firmware()?);
            }
        }
        let busybox = find_program("busybox", "busybox-static")?;
        let closure = self.closure(hypervisor.as_ref())?;
        let modules = self.wanted_modules();
        let name = self.fingerprint(&kernel, &busybox, &closure, &modules)?;
        let initrd = cache.join(format!("{name}.cpio"));
        if !initrd.is_file() {
            let archive = self.archive(&kernel, &busybox, &closure, &modules)?;
            let mut file =
                tempfile::NamedTempFile::new_in(cache).map_err(io("make a file in", cache))?;
            archive.write(std::io::BufWriter::new(&mut file)).map_err(io("write", &initrd))?;
            file.flush().map_err(io("write", &initrd))?;
            file.persist(&initrd).map_err(|e| io("write", &initrd)(e.error))?;
        }
        Ok(Appliance { kernel, initrd, root: self.root, hypervisor })
    }

    fn closure(&self, hypervisor: Option<&Hypervisor>) -> Result<Closure> {
        let mut resolver = hypervisor.map_or_else(Resolver::new, Hypervisor::resolver);
        if let Some(xen) = hypervisor {
            xen.tools(&mut resolver)?;
            if self.device_model {
                xen.device_model(&mut resolver)?;
            }
        }
        let scripts: &[&str] = if hypervisor.is_some() { &HOTPLUG } else { &[] };
        let always = ["/bin/sh"].iter().chain(scripts).copied();
        for name in always.chain(self.programs.iter().map(String::as_str)) {
            let path = find_program(name, package_of(name))?;
            if self.root == Root::Packed {
                resolver.add(&path, &path)?;
            }
        }
        Ok(resolver.finish())
    }

    fn wanted_modules(&self) -> Vec<String> {
        let base: &[&str] = match self.machine {
            Machine::Uml => &["overlay", "virtio_blk", "loop"],
            Machine::Pc => &["ata_piix", "ext4", "loop"],
            Machine::Xen => &["virtio_blk", "xenfs", "xen_evtchn", "xen_gntdev", "loop"],
            Machine::Domain => &["xen_blkfront"],
            Machine::Hvm => &["xen_blkfront", "ata_piix", "sd_mod"],
        };
        let needed = NEEDED_IN_PC.iter().filter(|_| self.machine == Machine::Pc);
        let mut seen = BTreeSet::new();
        needed
            .chain(base)
            .map(|name| (*name).to_owned())
            .chain(self.modules.iter().cloned())
            .filter(|name| seen.insert(name.clone()))
            .collect()
    }

    /// A name that changes when any input does; files count by size, time and inode.
    fn fingerprint(
        &self,
        kernel: &Kernel,
        busybox: &Path,
        closure: &Closure,
        modules: &[String],
    ) -> Result<String> {
        let mut hash = Sha256::new();
        hash.update(env!("CARGO_PKG_VERSION"));
        hash.update(INIT);
        hash.update(standby::LIBRARY);
        hash.update(standby::CALLER);
        hash.update(format!("{:?}{kernel:?}{modules:?}{:?}", self.root, self.spare_modules));
        let files = closure.iter().chain(self.files.iter().map(|(from, to)| (to, from)));
        let fixed = [busybox, &kernel.image, &kernel.modules].map(|p| (p, p));
        for (to, from) in fixed.into_iter().chain(files.map(|(t, f)| (t.as_path(), f.as_path()))) {
            let meta = fs::metadata(from).map_err(io("look at", from))?;
            let stamp = (meta.size(), meta.mtime(), meta.mtime_nsec(), meta.ino(), meta.mode());
            hash.update(format!("{to:?}{from:?}{stamp:?}"));
        }
        Ok(hex::encode(&hash.finalize()[..12]))
    }

    fn archive(
        &self,
        kernel: &Kernel,
        busybox: &Path,
        closure: &Closure,
        modules: &[String],
    ) -> Result<Archive> {
        let mut archive = Archive::default();
        for dir in ["proc", "sys", "dev", "run", "root", "lower", "upper", "packed", "files"] {
            archive.directory(dir);
        }
        archive.character("dev/console", 5, 1);
        archive.character("dev/null", 1, 3);
        archive.file("init", 0o755, INIT.into());
        // The shell is the kernel's first program: without its libraries nothing starts.
        let mut shell = Resolver::new();
        shell.add(busybox, Path::new("/bin/busybox"))?;
        for (to, from) in shell.finish() {
            put(&mut archive, "", &from, &to)?;
        }
        archive.symlink("bin/sh", "busybox");
        let tree = Tree::open(&kernel.modules)?;
        self.pack_spare_modules(&mut archive, &tree, kernel, modules)?;
        let loaded = tree.load_order(modules)?;
        let order: Vec<&str> = loaded.iter().map(|module| module.name.as_str()).collect();
        let mut order = order.join("\n");
        order.push('\n');
        archive.file("modules/order", 0o644, order.into());
        for module in loaded {
            archive.file(&format!("modules/{}.ko", module.name), 0o644, module.data);
        }
        for (to, from) in closure {
            put(&mut archive, "packed", from, to)?;
        }
        if self.root == Root::Packed {
            pack_surroundings(&mut archive)?;
        }
        // Where no overlay lies over the packed root, a copy would take memory once more.
        let place = if self.machine.has_overlay() { "files" } else { "packed" };
        for (from, to) in &self.files {
            put(&mut archive, place, from, to)?;
        }
        let path = |path: &str| format!("{place}{path}");
        archive.file(&path(standby::LIBRARY_PATH), 0o755, standby::LIBRARY.into());
        archive.file(&path(standby::CALLER_PATH), 0o755, standby::CALLER.into());
        Ok(archive)
    }

    /// Packs them with the list in which `modprobe` looks up what they need.
    fn pack_spare_modules(
        &self,
        archive: &mut Archive,
        tree: &Tree,
        kernel: &Kernel,
        loaded: &[String],
    ) -> Result<()> {
        let dir = format!("packed/lib/modules/{}", kernel.release);
        let mut needs = String::new();
        for name in &self.spare_modules {
            let mut order = tree.load_order(std::slice::from_ref(name))?;
            let names: Vec<String> = order.iter().rev().map(|m| format!("{}.ko", m.name)).collect();
            if let Some((module, others)) = names.split_first() {
                needs.push_str(&format!("{module}: {}\n", others.join(" ")));
            }
            order.retain(|module| !loaded.contains(&module.name));
            for module in order {
                let path = format!("{dir}/{}.ko", module.name);
                archive.file(&path, 0o644, module.data);
            }
        }
        archive.file(&format!("{dir}/modules.dep"), 0o644, needs.into());
        Ok(())
    }
}

/// What a packed root has beside its programs: directories, users, the loader's cache (libraries
/// keep their paths, so the host's serves), and busybox for everything that was not named.
fn pack_surroundings(archive: &mut Archive) -> Result<()> {
    for dir in ["proc", "sys", "dev", "run", "tmp", "root", "mnt", "var/tmp", "busybox"] {
        archive.directory(&format!("packed/{dir}"));
    }
    archive.file("packed/etc/passwd", 0o644, b"root:x:0:0:root:/root:/bin/sh\n".to_vec());
    archive.file("packed/etc/group", 0o644, b"root:x:0:\n".to_vec());
    for file in ["/etc/ld.so.cache", "/etc/mke2fs.conf"].map(Path::new) {
        if file.is_file() {
            put(archive, "packed", file, file)?;
        }
    }
    Ok(())
}

fn put(archive: &mut Archive, below: &str, from: &Path, to: &Path) -> Result<()> {
    let data = fs::read(from).map_err(io("read", from))?;
    let mode = fs::metadata(from).map_err(io("look at", from))?.permissions().mode() & 0o777;
    let Some(to) = to.to_str() else {
        return Err(Error::Unusable {
            path: to.to_path_buf(),
            found: "not UTF-8".into(),
            remedy: "give it another name".into(),
        });
    };
    archive.file(&format!("{below}/{}", to.trim_start_matches('/')), mode, data);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_inputs_are_built_once() {
        let cache = tempfile::tempdir().unwrap();
        let extra = cache.path().join("extra");
        fs::write(&extra, b"1").unwrap();
        let build = || {
            let builder = Appliance::builder(Machine::Uml).file(&extra, "/etc/extra");
            builder.build(cache.path()).unwrap()
        };
        let first = build();
        let made = fs::metadata(first.initrd()).unwrap().modified().unwrap();
        assert_eq!(build().initrd(), first.initrd());
        assert_eq!(fs::metadata(first.initrd()).unwrap().modified().unwrap(), made);
        fs::write(&extra, b"22").unwrap();
        assert_ne!(build().initrd(), first.initrd());
    }

    #[test]
    fn a_missing_program_names_its_package() {
        let cache = tempfile::tempdir().unwrap();
        let builder = Appliance::builder(Machine::Uml).programs(["/nowhere/mke2fs"]);
        let error = builder.build(cache.path()).unwrap_err();
        assert!(error.to_string().contains("/nowhere/mke2fs"), "{error}");
    }
}
