//! Which boot of the machine this is.
//!
//! The kernel says so in /proc/sys, which a service with `ProcSubset=pid` does not see. So its service manager may
//! say it ([`TOLD`]; systemd's `%b` is the same), and a folder on tmpfs, which no boot shares with another,
//! keeps what was found first: who sees less later goes by that.

use std::ffi::OsString;
use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

const KERNELS: &str = "/proc/sys/kernel/random/boot_id";
/// The variable of the environment that holds it, in hexadecimal digits with or without hyphens.
pub(crate) const TOLD: &str = "RINGTAP_BOOT_ID";
/// The file in a folder on tmpfs.
const KEPT: &str = "boot-id";
const TMPFS: u64 = 0x0102_1994;

/// The boot of the machine, for what is kept in `folder`, which belongs to this user.
///
/// # Errors
/// Where neither the kernel, nor the environment, nor the folder tells it.
pub(crate) fn identity(folder: &Path) -> io::Result<u128> {
    let on_tmpfs = rustix::fs::statfs(folder).is_ok_and(|facts| facts.f_type as u64 == TMPFS);
    identity_in(
        folder,
        on_tmpfs,
        fs::read_to_string(KERNELS),
        std::env::var_os(TOLD).filter(|told| !told.is_empty()),
    )
}

fn identity_in(
    folder: &Path,
    on_tmpfs: bool,
    kernels: io::Result<String>,
    told: Option<OsString>,
) -> io::Result<u128> {
    let known = match (kernels, told) {
        (Ok(text), _) => Some(parse(&text)?),
        (Err(error), _) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        (Err(_), Some(text)) => Some(parse(&text.to_string_lossy())?),
        (Err(_), None) => None,
    };
    match known {
        Some(known) if !on_tmpfs => Ok(known),
        _ if on_tmpfs => kept(folder, known),
        _ => Err(io::Error::new(
            io::ErrorKind::NotFound,
            format!(
                "which boot of the machine this is cannot be told: {KERNELS} is not there \
                 (ProcSubset=pid?), {TOLD} is not set, and {} is not on tmpfs",
                folder.display()
            ),
        )),
    }
}

fn parse(text: &str) -> io::Result<u128> {
    let digits = text.trim().replace('-', "");
    let number = u128::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == 32);
    number.ok_or_else(|| {
        let text = format!("the identity of this boot is not 32 hexadecimal digits: {text:?}");
        io::Error::new(io::ErrorKind::InvalidData, text)
    })
}

/// What the folder keeps; where that is nothing, what is known, or a number drawn.
fn kept(folder: &Path, known: Option<u128>) -> io::Result<u128> {
    let path = folder.join(KEPT);
    loop {
        match read_kept(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            end => return end,
        }
        let draw = || getrandom::u64().map_err(|error| io::Error::other(error.to_string()));
        let new = match known {
            Some(known) => known,
            None => u128::from(draw()?) << 64 | u128::from(draw()?),
        };
        // Whole under its name, or not there: others may look at any time.
        let draft = folder.join(format!("{KEPT}.{:x}", draw()?));
        let mut file = fs::File::options().write(true).create_new(true).mode(0o600).open(&draft)?;
        let written = writeln!(file, "{new:032x}").and_then(|()| fs::hard_link(&draft, &path));
        let _ = fs::remove_file(&draft);
        match written {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
    }
}

fn read_kept(path: &Path) -> io::Result<u128> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC;
    let file = fs::File::options().read(true).custom_flags(flags).open(path)?;
    if file.metadata()?.uid() != rustix::process::geteuid().as_raw() {
        let text = format!("{} belongs to another user", path.display());
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
    }
    let mut text = String::new();
    file.take(64).read_to_string(&mut text)?;
    parse(&text)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "0f0e0d0c-0b0a-0908-0706-050403020100\n";
    const NUMBER: u128 = 0x0f0e_0d0c_0b0a_0908_0706_0504_0302_0100;

    fn hidden() -> io::Result<String> {
        Err(io::ErrorKind::NotFound.into())
    }

    #[test]
    fn the_kernel_is_asked_and_then_the_environment() {
        let folder = tempfile::tempdir().expect("a folder");
        let ask = |kernels, told: Option<&str>| {
            identity_in(folder.path(), false, kernels, told.map(Into::into))
        };
        assert_eq!(ask(Ok(ID.into()), Some("nonsense")).expect("told"), NUMBER);
        assert_eq!(ask(hidden(), Some(&ID.trim().replace('-', ""))).expect("told"), NUMBER);
        assert!(ask(hidden(), Some("17")).is_err(), "as good as none");
        let error = ask(hidden(), None).expect_err("nobody told").to_string();
        assert!(error.contains("ProcSubset=pid") && error.contains(TOLD), "{error}");
        assert_eq!(fs::read_dir(folder.path()).expect("the folder").count(), 0);
        let real = fs::read_to_string(KERNELS).expect("the kernel's");
        assert_eq!(identity(folder.path()).expect("told"), parse(&real).expect("a number"));
    }

    #[test]
    fn who_sees_less_goes_by_what_the_folder_keeps() {
        let folder = || tempfile::tempdir_in("/dev/shm").expect("a folder on tmpfs");
        let ask = |folder: &Path, kernels, told: Option<&str>| {
            identity_in(folder, true, kernels, told.map(Into::into)).expect("told")
        };
        let (first, second) = (folder(), folder());
        assert_eq!(ask(first.path(), Ok(ID.into()), None), NUMBER);
        assert_eq!(ask(first.path(), hidden(), None), NUMBER);
        // The other way round, nobody is of another boot for having seen more.
        let drawn = ask(second.path(), hidden(), None);
        assert_ne!(drawn, NUMBER);
        assert_eq!(ask(second.path(), Ok(ID.into()), None), drawn);
        assert_eq!(ask(second.path(), hidden(), None), drawn);
        let names = fs::read_dir(second.path()).expect("the folder");
        let names: Vec<_> = names.flatten().map(|entry| entry.file_name()).collect();
        assert_eq!(names, [KEPT], "nothing but that is left");
    }

    #[test]
    fn what_another_put_there_is_not_followed() {
        let folder = tempfile::tempdir_in("/dev/shm").expect("a folder on tmpfs");
        let kept = folder.path().join(KEPT);
        std::os::unix::fs::symlink("/etc/passwd", &kept).expect("a link");
        assert!(identity_in(folder.path(), true, Ok(ID.into()), None).is_err());
        fs::remove_file(&kept).expect("gone");
        fs::write(&kept, "torn").expect("a file");
        assert!(identity_in(folder.path(), true, Ok(ID.into()), None).is_err());
    }
}
