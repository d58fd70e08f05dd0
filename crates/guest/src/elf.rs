//! Which shared libraries a program needs, read from its ELF headers; nothing is executed.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use goblin::elf::Elf;

use crate::error::{Error, Result, io};

/// Where the dynamic loader of Debian and its kin looks without being told.
const STANDARD: [&str; 6] = [
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/lib64",
    "/usr/lib64",
    "/lib",
    "/usr/lib",
];

/// Files of the host, each by the path it must have in the guest.
pub(crate) type Closure = BTreeMap<PathBuf, PathBuf>;

/// Resolves programs to all files they need to run.
pub(crate) struct Resolver {
    directories: Vec<PathBuf>,
    closure: Closure,
    root: Option<PathBuf>,
}

impl Resolver {
    /// Knows the directories of `/etc/ld.so.conf` and the standard ones.
    pub(crate) fn new() -> Self {
        let mut directories = Vec::new();
        read_conf(Path::new("/etc/ld.so.conf"), &mut directories, 0);
        directories.extend(STANDARD.map(PathBuf::from));
        Self { directories, closure: Closure::new(), root: None }
    }

    /// Looks below `root` first, where packages are unpacked that are not installed; what is found
    /// there gets the path that it has in them.
    pub(crate) fn below(root: &Path) -> Self {
        let mut resolver = Self::new();
        let inside = STANDARD.map(|dir| root.join(dir.trim_start_matches('/')));
        resolver.directories.splice(..0, inside);
        resolver.root = Some(root.to_path_buf());
        resolver
    }

    /// Adds one program (a script counts too) and everything it needs, at `to` in the guest.
    ///
    /// # Errors
    /// When a file cannot be read or a library is not found.
    pub(crate) fn add(&mut self, from: &Path, to: &Path) -> Result<()> {
        if self.closure.contains_key(to) {
            return Ok(());
        }
        let data = fs::read(from).map_err(io("read", from))?;
        self.closure.insert(to.to_path_buf(), from.to_path_buf());
        if !data.starts_with(b"\x7fELF") {
            return self.add_interpreter(from, &data);
        }
        let elf = Elf::parse(&data).map_err(|error| Error::Unusable {
            path: from.to_path_buf(),
            found: format!("not a readable ELF file ({error})"),
            remedy: "reinstall the package it belongs to".into(),
        })?;
        if let Some(loader) = elf.interpreter {
            self.add(Path::new(loader), Path::new(loader))?;
        }
        let own = search_path(from, elf.runpaths.iter().chain(&elf.rpaths));
        for library in &elf.libraries {
            let in_own = own.iter().map(|dir| dir.join(library)).find(|path| path.is_file());
            match in_own {
                Some(path) => self.add_library(&path)?,
                None => self.library(library, from)?,
            }
        }
        Ok(())
    }

    /// Adds the library of this name for `user`.
    ///
    /// # Errors
    /// As [`Resolver::add`].
    pub(crate) fn library(&mut self, name: &str, user: &Path) -> Result<()> {
        // One beside it comes with whoever needs both and says where they are, as systemd does.
        let beside = user.parent().map(Path::to_path_buf);
        let mut candidates = self.directories.iter().chain(&beside).map(|dir| dir.join(name));
        match candidates.find(|path| path.is_file()) {
            Some(path) => self.add_library(&path),
            None => Err(Error::Missing {
                what: format!("the library {name} that {} needs", user.display()),
                looked: "the directories of /etc/ld.so.conf".into(),
                remedy: format!("`apt-get install -f`, or `dpkg -S {name}` elsewhere"),
            }),
        }
    }

    fn add_library(&mut self, from: &Path) -> Result<()> {
        let inside = self.root.as_deref().and_then(|root| from.strip_prefix(root).ok());
        let to = inside.map(|path| Path::new("/").join(path));
        self.add(from, to.as_deref().unwrap_or(from))
    }

    fn add_interpreter(&mut self, script: &Path, data: &[u8]) -> Result<()> {
        let first = data.split(|&b| b == b'\n').next().unwrap_or_default();
        let Some(line) = first.strip_prefix(b"#!") else { return Ok(()) };
        let line = String::from_utf8_lossy(line);
        match line.split_whitespace().next() {
            Some(name) if Path::new(name).is_file() => self.add(Path::new(name), Path::new(name)),
            name => Err(Error::Missing {
                what: format!("the interpreter {name:?} of {}", script.display()),
                looked: "the path in its first line".into(),
                remedy: "install it".into(),
            }),
        }
    }

    /// Everything added so far.
    pub(crate) fn finish(self) -> Closure {
        self.closure
    }
}

fn search_path<'a>(file: &Path, paths: impl Iterator<Item = &'a &'a str>) -> Vec<PathBuf> {
    let origin = fs::canonicalize(file).unwrap_or_else(|_| file.to_path_buf());
    let origin = origin.parent().unwrap_or(Path::new("/")).to_string_lossy().into_owned();
    paths
        .flat_map(|list| list.split(':'))
        .map(|dir| PathBuf::from(dir.replace("$ORIGIN", &origin).replace("${ORIGIN}", &origin)))
        .collect()
}

/// Reads `ld.so.conf`, following `include DIR/*.conf`, the one pattern distributions use.
fn read_conf(path: &Path, directories: &mut Vec<PathBuf>, depth: u32) {
    let Ok(text) = fs::read_to_string(path) else { return };
    for line in text.lines().map(|l| l.split('#').next().unwrap_or("").trim()) {
        if let Some(pattern) = line.strip_prefix("include ") {
            let Some(dir) = Path::new(pattern.trim()).parent() else { continue };
            let Ok(entries) = fs::read_dir(dir) else { continue };
            let mut files: Vec<PathBuf> = entries.flatten().map(|e| e.path()).collect();
            files.sort();
            for file in files.iter().filter(|f| f.extension().is_some_and(|e| e == "conf")) {
                if depth < 4 {
                    read_conf(file, directories, depth + 1);
                }
            }
        } else if line.starts_with('/') {
            directories.push(PathBuf::from(line));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_brings_its_libraries_and_loader() {
        let mut resolver = Resolver::new();
        resolver.add(Path::new("/bin/sh"), Path::new("/bin/sh")).unwrap();
        let files = resolver.finish();
        let has = |name: &str| files.keys().any(|p| p.ends_with(name));
        assert!(has("bin/sh") && has("libc.so.6") && has("ld-linux-x86-64.so.2"), "{files:?}");
    }

    #[test]
    fn a_program_that_is_not_there_is_named() {
        let error = Resolver::new().add(Path::new("/no/such"), Path::new("/x")).unwrap_err();
        assert!(error.to_string().contains("/no/such"), "{error}");
    }
}
