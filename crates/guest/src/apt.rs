//! Packages of the distribution, downloaded by apt and unpacked without being installed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};

use crate::error::{Error, Result, io};
use crate::process::{find_program, run_tool};

const DOWNLOAD_TIME: Duration = Duration::from_secs(600);
const QUERY_TIME: Duration = Duration::from_secs(60);

/// apt with the lists it looks in.
pub(crate) struct Apt {
    options: Vec<String>,
}

impl Apt {
    /// The machine's own lists.
    pub(crate) fn system() -> Self {
        Self { options: Vec::new() }
    }

    /// The backports of this Debian, or of the release named, in lists of their own below `store`.
    ///
    /// # Errors
    /// Where this is no Debian or they cannot be had.
    pub(crate) fn backports(store: &Path, release: Option<&str>) -> Result<Self> {
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
        let options = options.into_iter().map(|option| format!("-o{option}")).collect();
        let apt_get = find_program("apt-get", "apt")?;
        run_tool(Command::new(apt_get).args(&options).arg("update"), DOWNLOAD_TIME)?;
        Ok(Self { options })
    }

    /// What `apt-cache` answers.
    pub(crate) fn query(&self, args: &[&str]) -> Result<String> {
        let apt_cache = find_program("apt-cache", "apt")?;
        let out = run_tool(Command::new(apt_cache).args(&self.options).args(args), QUERY_TIME)?;
        Ok(String::from_utf8_lossy(&out).into_owned())
    }

    /// What a package (`NAME` or `NAME=VERSION`) depends on, by name.
    pub(crate) fn depends(&self, package: &str) -> Result<Vec<String>> {
        let said = self.query(&["depends", package])?;
        let names = said.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
        Ok(names.map(str::to_owned).collect())
    }

    /// Downloads packages into a directory of their own; their files.
    pub(crate) fn download(&self, packages: &[String], to: &Path) -> Result<Vec<PathBuf>> {
        let mut apt_get = Command::new(find_program("apt-get", "apt")?);
        apt_get.args(&self.options).arg("download").args(packages).current_dir(to);
        run_tool(&mut apt_get, DOWNLOAD_TIME)?;
        let entries = fs::read_dir(to).map_err(io("list", to))?.flatten().map(|e| e.path());
        let found: Vec<_> = entries.filter(|p| p.extension().is_some_and(|e| e == "deb")).collect();
        if found.len() == packages.len() {
            return Ok(found);
        }
        Err(Error::Unusable {
            path: to.to_path_buf(),
            found: format!(
                "left with {} packages by `apt-get download {}`",
                found.len(),
                packages.join(" ")
            ),
            remedy: "`apt-get update`, then try again".into(),
        })
    }
}

/// Unpacks a package without what fits one of tar's patterns.
pub(crate) fn unpack(deb: &Path, to: &Path, without: &[&str]) -> Result<()> {
    fs::create_dir_all(to).map_err(io("make", to))?;
    let dpkg = find_program("dpkg-deb", "dpkg")?;
    let mut stream = Command::new(&dpkg);
    stream.arg("--fsys-tarfile").arg(deb).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut stream = stream.spawn().map_err(io("start", &dpkg))?;
    let mut tar = Command::new(find_program("tar", "tar")?);
    tar.arg("-x").arg("-C").arg(to);
    tar.args(without.iter().map(|pattern| format!("--exclude={pattern}")));
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
        remedy: "free some space, then try again".into(),
    })
}

/// Makes the directory and keeps every other process out of it until the file is dropped.
pub(crate) fn locked(store: &Path) -> Result<fs::File> {
    fs::create_dir_all(store).map_err(io("make", store))?;
    let lock = fs::File::create(store.join("lock")).map_err(io("make", store.join("lock")))?;
    flock(&lock, FlockOperation::LockExclusive)
        .map_err(|e| io("lock", store.join("lock"))(e.into()))?;
    Ok(lock)
}

/// A directory in `store` that vanishes unless it is renamed.
pub(crate) fn work_dir(store: &Path) -> Result<tempfile::TempDir> {
    let dir = tempfile::Builder::new().prefix("unpack-").tempdir_in(store);
    dir.map_err(io("make a directory in", store))
}
