//! Kernel modules with their dependencies in loading order, read from the modules themselves.
//!
//! A module names what it needs in its `.modinfo` section, so no `modules.dep` is needed; an
//! unpacked Debian kernel package has none, as `depmod` makes it on installation.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use goblin::elf::Elf;

use crate::error::{Error, Result, io};

/// Modules of older kernels whose work newer ones do without a module (crc32c: since Linux 6.16).
const IN_THE_LIBRARY: [&str; 1] = ["crc32c_generic"];

/// One module, decompressed.
pub(crate) struct Module {
    /// Its name, with underscores.
    pub(crate) name: String,
    /// The `.ko` file.
    pub(crate) data: Vec<u8>,
}

/// The directory of one kernel's modules, such as `/lib/modules/6.1.0-9-amd64`.
pub(crate) struct Tree {
    root: PathBuf,
    files: HashMap<String, PathBuf>,
    builtin: Vec<String>,
}

impl Tree {
    /// Lists a kernel's modules.
    ///
    /// # Errors
    /// When the directory cannot be read.
    pub(crate) fn open(root: &Path) -> Result<Self> {
        let mut files = HashMap::new();
        let mut pending = vec![root.join("kernel")];
        while let Some(dir) = pending.pop() {
            for entry in fs::read_dir(&dir).map_err(io("list", &dir))? {
                let entry = entry.map_err(io("list", &dir))?;
                let path = entry.path();
                if entry.file_type().is_ok_and(|t| t.is_dir()) {
                    pending.push(path);
                } else if let Some(name) = module_name(&path) {
                    files.insert(name, path);
                }
            }
        }
        let builtin = fs::read_to_string(root.join("modules.builtin")).unwrap_or_default();
        let builtin = builtin.lines().filter_map(|line| module_name(Path::new(line))).collect();
        Ok(Self { root: root.to_path_buf(), files, builtin })
    }

    /// The wanted modules and what they need, in the order in which to load them. Those built
    /// into the kernel are left out.
    ///
    /// # Errors
    /// When a module is neither there nor built in, or cannot be read.
    pub(crate) fn load_order(&self, wanted: &[String]) -> Result<Vec<Module>> {
        let mut order = Vec::new();
        for name in wanted {
            self.add(&normal(name), &mut order, 0)?;
        }
        Ok(order)
    }

    fn add(&self, name: &str, order: &mut Vec<Module>, depth: u32) -> Result<()> {
        if order.iter().any(|m| m.name == name) || self.builtin.iter().any(|b| b == name) {
            return Ok(());
        }
        let Some(path) = self.files.get(name) else {
            if IN_THE_LIBRARY.contains(&name) {
                return Ok(());
            }
            return Err(Error::Missing {
                what: format!("the kernel module {name}"),
                looked: self.root.display().to_string(),
                remedy: "another kernel package may have it; this one was built without".into(),
            });
        };
        let data = read_module(path)?;
        let info = modinfo(path, &data)?;
        let broken = |found: &str| Error::Unusable {
            path: path.clone(),
            found: found.into(),
            remedy: "reinstall the kernel package".into(),
        };
        if depth > 32 {
            return Err(broken("part of a circle of dependencies"));
        }
        for need in info.iter().filter_map(|e| e.strip_prefix("depends=")) {
            for need in need.split(',').filter(|n| !n.is_empty()) {
                self.add(&normal(need), order, depth + 1)?;
            }
        }
        // A soft dependency is a wish: one that this kernel does not have is no error.
        for wish in info.iter().filter_map(|e| e.strip_prefix("softdep=pre:")) {
            for wish in wish.split_whitespace().map(normal) {
                if self.files.contains_key(&wish) {
                    self.add(&wish, order, depth + 1)?;
                }
            }
        }
        if !order.iter().any(|m| m.name == name) {
            order.push(Module { name: name.to_owned(), data });
        }
        Ok(())
    }
}

fn normal(name: &str) -> String {
    name.replace('-', "_")
}

fn module_name(path: &Path) -> Option<String> {
    let file = path.file_name()?.to_str()?;
    let stem = ["", ".xz", ".zst", ".gz"]
        .iter()
        .find_map(|end| file.strip_suffix(end).and_then(|f| f.strip_suffix(".ko")))?;
    Some(normal(stem))
}

fn read_module(path: &Path) -> Result<Vec<u8>> {
    let data = fs::read(path).map_err(io("read", path))?;
    let bad = |error: String| Error::Unusable {
        path: path.to_path_buf(),
        found: format!("not decompressible ({error})"),
        remedy: "reinstall the kernel package".into(),
    };
    match path.extension().and_then(|e| e.to_str()) {
        Some("xz") => {
            let mut out = Vec::new();
            lzma_rs::xz_decompress(&mut &data[..], &mut out).map_err(|e| bad(e.to_string()))?;
            Ok(out)
        }
        Some("zst") => zstd::decode_all(&data[..]).map_err(|e| bad(e.to_string())),
        Some("gz") => Err(bad("gzip is not supported, no current distribution uses it".into())),
        _ => Ok(data),
    }
}

/// The `key=value` strings of a module's `.modinfo` section.
fn modinfo(path: &Path, data: &[u8]) -> Result<Vec<String>> {
    let bad = |found: String| Error::Unusable {
        path: path.to_path_buf(),
        found,
        remedy: "reinstall the kernel package".into(),
    };
    let elf = Elf::parse(data).map_err(|e| bad(format!("not a readable ELF file ({e})")))?;
    let section = elf
        .section_headers
        .iter()
        .find(|s| elf.shdr_strtab.get_at(s.sh_name) == Some(".modinfo"))
        .and_then(|s| s.file_range())
        .and_then(|range| data.get(range))
        .ok_or_else(|| bad("a module without .modinfo".into()))?;
    Ok(section
        .split(|&b| b == 0)
        .filter(|s| !s.is_empty())
        .map(|s| String::from_utf8_lossy(s).into_owned())
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::Kernel;

    #[test]
    fn dependencies_come_first() {
        let kernel = Kernel::uml().unwrap();
        let tree = Tree::open(&kernel.modules).unwrap();
        let order = tree.load_order(&["dm-thin-pool".into()]).unwrap();
        let at = |name: &str| order.iter().position(|m| m.name == name).unwrap();
        assert!(at("dm_mod") < at("dm_bufio"));
        assert!(at("dm_persistent_data") < at("dm_thin_pool"));
        assert!(order.iter().all(|m| m.data.starts_with(b"\x7fELF")));
        assert!(tree.load_order(&["ext4".into()]).unwrap().is_empty(), "ext4 is built into UML");
        let error = tree.load_order(&["no-such-thing".into()]).err().unwrap();
        assert!(error.to_string().contains("no_such_thing"), "{error}");
    }

    #[test]
    fn compressed_modules_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let kernel = Kernel::uml().unwrap();
        let plain = kernel.modules.join("kernel/drivers/block/virtio_blk.ko");
        let want = fs::read(&plain).unwrap();
        for (end, tool, package) in [("xz", "xz", "xz-utils"), ("zst", "zstd", "zstd")] {
            let path = dir.path().join(format!("virtio_blk.ko.{end}"));
            let out = fs::File::create(&path).unwrap();
            let mut command = std::process::Command::new(tool);
            if tool == "xz" {
                command.args(["--check=crc32", "--lzma2=dict=1MiB"]);
            }
            let status = command.arg("-c").arg(&plain).stdout(out).status();
            assert!(
                status.is_ok_and(|s| s.success()),
                "{tool} is missing: apt-get install {package}"
            );
            assert!(read_module(&path).unwrap() == want, "{tool}");
        }
    }
}
