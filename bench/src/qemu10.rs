//! QEMU 10 from Debian 13's packages, on whatever Debian or Ubuntu this is: a second judge and a
//! newer peer.
//!
//! apt fetches the packages with everything they need, down to the C library, into a folder of
//! ours: sources, lists and state are its own, nothing is installed. They run by their own dynamic
//! linker.

use crate::interrupt;
use anyhow::{Context, Result, bail};
use ringtap_lab::process::launch::Launch;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

const PACKAGES: [&str; 2] = ["qemu-utils", "qemu-block-extra"];
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// An unpacked QEMU 10.
#[derive(Clone, Debug)]
pub struct Qemu10 {
    root: PathBuf,
    libraries: PathBuf,
    linker: PathBuf,
}

impl Qemu10 {
    /// `~/.cache/ringtap/trixie` (or under `XDG_CACHE_HOME`).
    fn folder() -> Result<PathBuf> {
        let cache = match (std::env::var_os("XDG_CACHE_HOME"), std::env::var_os("HOME")) {
            (Some(cache), _) if !cache.is_empty() => PathBuf::from(cache),
            (_, Some(home)) => PathBuf::from(home).join(".cache"),
            _ => bail!("neither XDG_CACHE_HOME nor HOME is set: no folder for QEMU 10"),
        };
        Ok(cache.join("ringtap/trixie"))
    }

    /// The one fetched earlier, if any.
    pub fn cached() -> Option<Qemu10> {
        Qemu10::within(&Qemu10::folder().ok()?.join("root")).ok()
    }

    /// The one fetched earlier, or fetches it now (about 45 MB).
    pub fn fetch() -> Result<Qemu10> {
        if let Some(found) = Qemu10::cached() {
            return Ok(found);
        }
        let folder = Qemu10::folder()?;
        eprintln!("fetching QEMU 10 into {} …", folder.display());
        let unpacked = folder.join("unpacking");
        let _ = fs::remove_dir_all(&unpacked);
        fs::create_dir_all(&unpacked)?;
        let archives = download(&folder)?;
        for entry in fs::read_dir(&archives)? {
            let path = entry?.path();
            if path.extension().is_some_and(|e| e == "deb") {
                let words: [OsString; 3] = ["-x".into(), path.into(), unpacked.clone().into()];
                finish("dpkg-deb", words, None)?;
            }
        }
        // Only a whole tree gets the name that `cached` looks for.
        let root = folder.join("root");
        let _ = fs::remove_dir_all(&root);
        fs::rename(&unpacked, &root).context("cannot put QEMU 10 in its place")?;
        let _ = fs::remove_dir_all(&archives);
        Qemu10::within(&root)
    }

    fn within(root: &Path) -> Result<Qemu10> {
        let triplet = match std::env::consts::ARCH {
            "x86_64" => ("x86_64-linux-gnu", "ld-linux-x86-64.so.2"),
            "aarch64" => ("aarch64-linux-gnu", "ld-linux-aarch64.so.1"),
            other => bail!("no QEMU 10 for {other}"),
        };
        let libraries = root.join("usr/lib").join(triplet.0);
        let linker = libraries.join(triplet.1);
        let module = libraries.join("qemu/block-blkio.so");
        for path in [&linker, &module, &root.join("usr/bin/qemu-img")] {
            if !path.exists() {
                bail!("{} is missing: remove {} and try again", path.display(), root.display());
            }
        }
        Ok(Qemu10 { root: root.into(), libraries, linker })
    }

    /// How to run one of its programs.
    pub fn launch<I: Into<OsString>>(
        &self,
        program: &str,
        args: impl IntoIterator<Item = I>,
    ) -> Launch {
        let program = self.root.join("usr/bin").join(program);
        let mut launch = Launch::new(&self.linker, args);
        launch.runner =
            vec!["--library-path".into(), self.libraries.clone().into(), program.into()];
        launch.env.push(("QEMU_MODULE_DIR".into(), self.libraries.join("qemu").into()));
        launch
    }
}

/// Has apt download the packages and all they depend on; returns the folder they are in.
fn download(folder: &Path) -> Result<PathBuf> {
    let path = |name: &str| folder.join(name).display().to_string();
    for name in ["state/lists/partial", "cache/archives/partial", "etc"] {
        fs::create_dir_all(folder.join(name))
            .with_context(|| format!("cannot make {}", path(name)))?;
    }
    let source = format!("deb [signed-by={KEYRING}] {} trixie main\n", mirror());
    fs::write(folder.join("etc/sources.list"), source)?;
    // An empty list of installed packages makes apt take the C library along.
    fs::write(folder.join("etc/status"), "")?;
    let config = [
        ("Dir::Etc::SourceList", path("etc/sources.list")),
        ("Dir::Etc::SourceParts", "/nonexistent".into()),
        ("Dir::State", path("state")),
        ("Dir::State::Status", path("etc/status")),
        ("Dir::Cache", path("cache")),
        ("APT::Install-Recommends", "false".into()),
        ("APT::Sandbox::User", "root".into()),
        ("Debug::NoLocking", "true".into()),
    ];
    let config: String =
        config.iter().map(|(key, value)| format!("{key} \"{value}\";\n")).collect();
    // System-wide hooks after an update are for the system's own lists.
    let config =
        config + "#clear APT::Update::Post-Invoke-Success;\n#clear APT::Update::Post-Invoke;\n";
    let file = folder.join("etc/apt.conf");
    fs::write(&file, config)?;
    let words = |text: &str| text.split(' ').map(OsString::from).collect::<Vec<_>>();
    finish("apt-get", words("-q update"), Some(&file))?;
    let install = format!("-q -y --download-only install {}", PACKAGES.join(" "));
    finish("apt-get", words(&install), Some(&file))?;
    Ok(folder.join("cache/archives"))
}

/// The Debian mirror this machine uses, or Debian's own.
fn mirror() -> String {
    let mut files = vec![PathBuf::from("/etc/apt/sources.list")];
    let more = fs::read_dir("/etc/apt/sources.list.d").into_iter().flatten().flatten();
    files.extend(more.map(|entry| entry.path()));
    let texts = files.iter().flat_map(fs::read_to_string);
    texts
        .into_iter()
        .find_map(|text| mirror_in(&text))
        .unwrap_or("http://deb.debian.org/debian".into())
}

fn mirror_in(text: &str) -> Option<String> {
    let active = text.lines().filter(|line| !line.trim_start().starts_with('#'));
    active
        .flat_map(str::split_whitespace)
        .map(|word| word.trim_end_matches('/'))
        .find(|word| word.contains("://") && word.ends_with("/debian"))
        .map(String::from)
}

fn finish(
    program: &str,
    args: impl IntoIterator<Item = OsString>,
    apt_config: Option<&Path>,
) -> Result<()> {
    interrupt::check()?;
    let mut launch = Launch::new(program, args);
    if let Some(file) = apt_config {
        launch.env.push(("APT_CONFIG".into(), file.into()));
    }
    launch
        .output(Duration::from_secs(600), crate::interrupt::stop())
        .with_context(|| format!("fetching QEMU 10 by {program}"))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_mirror_in_both_styles() {
        let list =
            "# deb http://old/debian x main\ndeb [arch=amd64] http://host/debian/ bookworm main\n";
        assert_eq!(mirror_in(list).as_deref(), Some("http://host/debian"));
        let deb822 =
            "Types: deb\n# http://snapshot/archive/debian/2025\nURIs: https://mirror/x/debian\n";
        assert_eq!(mirror_in(deb822).as_deref(), Some("https://mirror/x/debian"));
        assert_eq!(mirror_in("deb http://security.debian.org/debian-security x main"), None);
    }
}
