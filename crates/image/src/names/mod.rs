//! Files that an image names, and which of them are opened.
//!
//! Whoever may write to an image may have it name any file. So one is opened only where Ringtap itself
//! recorded it when it wrote the name ([`record`]), where the operator names it, or where both the image
//! and its folder are the operator's own: then in that folder or below. What was looked at is what is
//! opened: it is held from the first look on.

mod error;
mod own;
mod role;

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use ringtap_stores::{Allows, allows_object, beside_object, is_path_of_object, is_store};
use rustix::fs::{CWD, Mode, OFlags};

pub use error::NameError;
pub(crate) use own::is_own_place as is_own;
pub use role::Role;

use crate::place::path_of;
use crate::{Container, Format, OpenError, OpenOptions, Place, foreign_name, probe, record};

/// Whether a name would be taken for that of something else than a file, by QEMU, too: what stands before its first colon.
fn names_a_protocol(name: &[u8]) -> bool {
    let colon = name.iter().position(|byte| *byte == b':');
    colon.is_some_and(|at| !name.get(..at).unwrap_or_default().contains(&b'/'))
}

/// Whether an image that names a file so can be opened.
pub fn is_understood(name: &Path) -> bool {
    let bytes = name.as_os_str().as_bytes();
    let path = bytes.strip_prefix(b"file:").unwrap_or(bytes);
    is_store(name)
        || !names_a_protocol(path) && (path.len() < bytes.len() || foreign_name(bytes).is_none())
}

/// A file that an image names, by one or several names, the best first.
struct Sought<'a> {
    role: Role,
    /// Where the image is.
    image: PathBuf,
    folder: PathBuf,
    /// What leads to the image and nowhere else.
    at: PathBuf,
    names: &'a [PathBuf],
    options: &'a OpenOptions,
}

/// The file that an image names, by one or several names, the best first; held.
pub fn find(
    image: &Container,
    role: Role,
    names: &[PathBuf],
    options: &OpenOptions,
) -> Result<Place, OpenError> {
    let at = match image.open_file() {
        Some(file) => path_of(file.as_fd()),
        None => image.path().to_owned(),
    };
    find_at(at, image.path(), role, names, options)
}

/// The same of an image that is held, and opened only to be looked at.
pub fn find_of_held(
    image: &Place,
    role: Role,
    names: &[PathBuf],
    options: &OpenOptions,
) -> Result<Place, OpenError> {
    find_at(image.at().into_owned(), image.path(), role, names, options)
}

/// `at` leads to the image and nowhere else.
fn find_at(
    at: PathBuf,
    image: &Path,
    role: Role,
    names: &[PathBuf],
    options: &OpenOptions,
) -> Result<Place, OpenError> {
    // What lies on a server has no folder here: only what the operator names is opened.
    let (path, folder) = if is_store(image) {
        (image.to_owned(), PathBuf::from("/"))
    } else {
        let path = fs::canonicalize(&at).or_else(|_| fs::canonicalize(image));
        let path = path.map_err(|source| os("find the folder of", image, source))?;
        let folder = path.parent().unwrap_or(Path::new("/")).to_owned();
        (path, folder)
    };
    Sought { role, image: image.to_owned(), folder, at, names, options }.find(&path)
}

impl Sought<'_> {
    fn find(&self, image: &Path) -> Result<Place, OpenError> {
        let recorded = record::allowed(&self.at, self.role);
        let mut refused = None;
        for name in self.names {
            if self.role == Role::Backing && is_store(name) {
                return self.store(name, &recorded);
            }
            if let Some(end) = self.beside_object(name, &recorded) {
                return end;
            }
            let name = self.path_in(name)?;
            for candidate in self.candidates(&name) {
                let Ok(file) = fs::canonicalize(candidate) else { continue };
                if let Some(place) = self.named_by_operator(&file)? {
                    return Ok(place);
                }
                if let Some(place) = recorded.iter().find_map(|it| it.find(&file)) {
                    return Ok(place);
                }
                match self.beside(image, &file)? {
                    Ok(place) => return Ok(place),
                    Err(why) => {
                        refused.get_or_insert((name.clone(), file, why));
                    }
                }
            }
        }
        if let Some((name, file, why)) = refused {
            let replaced = recorded.iter().any(|it| it.path() == file);
            let why = match replaced {
                true => "which is not the file that was recorded, but was put in its place".into(),
                false => format!("which was not recorded when Ringtap wrote the image, and {why}"),
            };
            return Err(self.refuse(&name, why, Some(file)));
        }
        // The names lead nowhere; what was named or recorded may be elsewhere now.
        for name in self.names {
            let last = Path::new(name).file_name();
            let same = |path: &Path| path.file_name() == last && path.is_file();
            let allowed = self.allowed().iter().find(|path| same(path));
            if let Some(place) = allowed.and_then(|path| Place::hold(path).ok()) {
                return Ok(place);
            }
            if let Some(place) = recorded.iter().find_map(|it| it.find(it.path())) {
                return Ok(place);
            }
        }
        Err(self.missing())
    }

    /// What lies on a server, which only the operator's word or a record allows.
    fn store(&self, name: &Path, recorded: &[record::Allowed]) -> Result<Place, OpenError> {
        let named = self.allowed().iter().any(|allowed| allowed == name);
        match named || recorded.iter().any(|it| it.path() == name) {
            true => Ok(name.into()),
            false => {
                let why =
                    "which was not recorded when Ringtap wrote the image, and lies on a server";
                Err(self.refuse(name, why.into(), Some(name.to_owned())))
            }
        }
    }

    /// What lies beside an object, where a relative name says so: by the operator's word or a record, as all on servers.
    fn beside_object(
        &self,
        name: &Path,
        recorded: &[record::Allowed],
    ) -> Option<Result<Place, OpenError>> {
        if self.role != Role::Backing || !is_path_of_object(&self.image) || !is_relative(name) {
            return None;
        }
        let leads = name.to_str().and_then(|name| beside_object(self.image.to_str()?, name));
        let Some(uri) = leads else {
            let why = "which leads out of the bucket or server that the image lies on";
            return Some(Err(self.refuse(name, why.into(), None)));
        };
        let whole = PathBuf::from(&uri);
        let names = self.allowed().iter().map(PathBuf::as_path);
        for allowed in names.chain(recorded.iter().map(|it| it.path())) {
            match allowed.to_str().and_then(|allowed| allows_object(allowed, &uri)) {
                // With the digest that he has pinned.
                Some(Allows::Itself) => return Some(Ok(allowed.into())),
                Some(Allows::Folder) => return Some(Ok(whole.as_path().into())),
                None => {}
            }
        }
        let why = format!("which lies beside it as {uri}, and nobody has named that");
        Some(Err(self.refuse(name, why, Some(whole))))
    }

    /// What the operator allows.
    fn allowed(&self) -> &[PathBuf] {
        match self.role {
            Role::DataFile => &self.options.data_files,
            _ => &self.options.allow_backing,
        }
    }

    /// A name as the path that it is.
    fn path_in(&self, name: &Path) -> Result<PathBuf, OpenError> {
        if matches!(self.role, Role::Parent | Role::Extent) {
            return Ok(name.to_owned());
        }
        let bytes = name.as_os_str().as_bytes();
        if let Some(why) = foreign_name(bytes).filter(|_| !bytes.starts_with(b"file:")) {
            return Err(refused(&self.image, name, why));
        }
        let bytes = bytes.strip_prefix(b"file:").unwrap_or(bytes);
        if names_a_protocol(bytes) {
            return Err(refused(&self.image, name, "only a file's path is understood"));
        }
        Ok(PathBuf::from(OsStr::from_bytes(bytes)))
    }

    /// Where a name may lead. Of one from another machine the last part may still be right.
    fn candidates(&self, name: &Path) -> impl Iterator<Item = PathBuf> {
        let last = name.components().next_back();
        let last = last.filter(|part| matches!(part, Component::Normal(_)));
        let foreign = matches!(self.role, Role::Parent | Role::Extent);
        let beside = last.filter(|_| foreign).map(|part| self.folder.join(part));
        [Some(self.folder.join(name)), beside].into_iter().flatten()
    }

    fn named_by_operator(&self, file: &Path) -> Result<Option<Place>, OpenError> {
        for allowed in self.allowed() {
            let Ok(whole) = fs::canonicalize(allowed) else { continue };
            if whole == file {
                let failed = |source| os("open", file, source);
                return Place::hold(allowed).map(Some).map_err(failed);
            }
            let below = file.strip_prefix(&whole).ok().filter(|_| self.role != Role::DataFile);
            if let Some(inside) = below {
                return open_beneath(&whole, inside, file).map(Some);
            }
        }
        Ok(None)
    }

    /// A file beside the image or below that, where all of it is the operator's own; else why it is not.
    fn beside(&self, image: &Path, file: &Path) -> Result<Result<Place, String>, OpenError> {
        if is_store(image) {
            return Ok(Err("the image lies on a server".into()));
        }
        let Ok(inside) = file.strip_prefix(&self.folder) else {
            return Ok(Err("lies outside the image's own folder".into()));
        };
        if let Err(why) = own::is_own(&self.at, image) {
            return Ok(Err(why));
        }
        // A raw disk whose guest has written an image onto it.
        let known = record::format(&self.at);
        if let Some(known) = known.filter(|known| self.options.format != Some(*known)) {
            return Ok(Err(format!("the image is recorded as {known}")));
        }
        let place = open_beneath(&self.folder, inside, file)?;
        let is_image = self.role == Role::DataFile
            && !self.options.read_only
            && record::format(&place.at()).is_some()
            && record::owner(&place.at()).is_none();
        Ok(if is_image { Err("it is recorded as an image itself".into()) } else { Ok(place) })
    }

    fn refuse(&self, name: &Path, why: String, file: Option<PathBuf>) -> OpenError {
        let source = Box::new(NameError::NotAllowed {
            image: self.image.clone(),
            role: self.role.name(),
            name: name.to_owned(),
            why,
            option: self.role.option(),
            file,
        });
        OpenError::Name { source }
    }

    fn missing(&self) -> OpenError {
        let Some(name) = self.names.first() else {
            return self.refuse(Path::new(""), "and there is none of that name".into(), None);
        };
        let path = self.folder.join(self.path_in(name).unwrap_or_else(|_| name.clone()));
        match fs::metadata(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => os("find", &path, source),
            _ => OpenError::Missing {
                image: self.image.clone(),
                what: self.role,
                name: name.as_os_str().to_owned(),
                path,
            },
        }
    }
}

/// Whether it is a name beside the image that has it: neither a path from the root nor anything with a protocol.
fn is_relative(name: &Path) -> bool {
    !name.is_absolute() && !names_a_protocol(name.as_os_str().as_bytes())
}

/// A name of what lies below an image, as a whole one, where the image is an object and the name leads to another beside it.
pub fn whole_name(image: &Path, name: &Path) -> Option<PathBuf> {
    let object = image.to_str().filter(|_| is_path_of_object(image) && is_relative(name))?;
    beside_object(object, name.to_str()?).map(PathBuf::from)
}

/// The format that an image names for the file below, else what Ringtap wrote down. What bears no signature is
/// raw; a signature alone is not believed, for the guest of a raw disk may have written it.
pub(crate) fn find_format(
    image: &Path,
    name: &Path,
    format: Option<&[u8]>,
    below: &Place,
) -> Result<Format, OpenError> {
    let refused = |why| refused(image, name, why);
    if let Some(format) = format {
        let unknown = "it is said to be of a format that is not known here";
        return match std::str::from_utf8(format) {
            Ok("file" | "host_device" | "nbd" | "http" | "https") => Ok(Format::Raw),
            Ok(name) => name.parse().map_err(|_| refused(unknown)),
            Err(_) => Err(refused(unknown)),
        };
    }
    let at = below.at();
    if let Some(format) = record::format(&at) {
        return Ok(format);
    }
    match probe::signature(&at).map_err(|source| os("read", below.path(), source))? {
        None => Ok(Format::Raw),
        Some(_) => Err(refused(
            "the image does not say of which format that is, and its own signature may be a \
             guest's work: write it down with ringtap rebase -u -b FILE -F FORMAT IMAGE",
        )),
    }
}

/// Whether what lies below an image is named as of the format that was written down with its name: who may write to the image
/// may not have a guest's bytes read as one that names files.
pub(crate) fn is_as_recorded(
    image: &Place,
    name: &Path,
    format: Format,
    below: &Place,
) -> Result<(), OpenError> {
    match record::format_below(&image.at(), below) {
        Some(recorded) if recorded != format => Err(refused(
            image.path(),
            name,
            "the image says that it is of another format than was written down when it was named: if that is meant, write \
             it down with ringtap rebase -u -b FILE -F FORMAT IMAGE",
        )),
        _ => Ok(()),
    }
}

/// Open what lies in a folder or below and nowhere else, whatever links there are.
fn open_beneath(folder: &Path, inside: &Path, file: &Path) -> Result<Place, OpenError> {
    let failed = |error: rustix::io::Errno| os("open", file, error.into());
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let folder = rustix::fs::openat(CWD, folder, flags | OFlags::DIRECTORY, Mode::empty());
    let folder = folder.map_err(failed)?;
    let held = ringtap_sandbox::open_beneath(folder, inside, flags);
    Ok(Place::of(file, held.map_err(failed)?))
}

fn os(what: &'static str, path: &Path, source: io::Error) -> OpenError {
    OpenError::Os { what, path: path.to_owned(), source }
}

fn refused(image: &Path, name: &Path, why: &'static str) -> OpenError {
    OpenError::Backing { image: image.to_owned(), name: name.as_os_str().to_owned(), why }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What was looked at may be another by the time it is opened.
    #[test]
    fn a_link_put_there_since_leads_nowhere() {
        let dir = tempfile::tempdir().expect("a folder");
        let (inside, secret) = (dir.path().join("in"), dir.path().join("secret"));
        fs::create_dir(&inside).expect("made");
        fs::write(&secret, "secret").expect("written");
        fs::write(inside.join("file"), "").expect("written");
        let open = |name: &str| open_beneath(&inside, Path::new(name), &inside.join(name));
        let held = open("file").expect("a file of that folder");
        std::os::unix::fs::symlink(&secret, inside.join("link")).expect("linked");
        std::os::unix::fs::symlink("..", inside.join("up")).expect("linked");
        for name in ["link", "up/secret", "../secret"] {
            assert!(open(name).is_err(), "{name}");
        }
        // And what is held stays what it is.
        fs::remove_file(inside.join("file")).expect("removed");
        std::os::unix::fs::symlink(&secret, inside.join("file")).expect("linked");
        assert_eq!(fs::read(held.at()).expect("the file that was"), b"");
    }
}
