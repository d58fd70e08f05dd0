//! What an image may name, and what a data file belongs to: as Ringtap wrote it, where nobody but its user
//! can.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use ringtap_sandbox::ask;
use ringtap_stores::is_store;
use serde::{Deserialize, Serialize};

use super::kept::Kept;
use super::known::{Allowed, Known};
use super::{attribute, identity};
use crate::Role;
use crate::{Format, NameError, OpenError, OpenOptions, Place};

/// Attributes that only root sees and writes.
const NAMES: &str = "trusted.ringtap.names";
const DATA_OF: &str = "trusted.ringtap.data-of";

/// What the image at `path` may name in that role.
pub(crate) fn allowed(path: &Path, role: Role) -> Vec<Allowed> {
    let mut all = all_allowed(path);
    all.retain(|it| it.data == (role == Role::DataFile));
    all
}

fn all_allowed(path: &Path) -> Vec<Allowed> {
    match attribute(path, NAMES) {
        Some(text) => serde_json::from_str(&text).unwrap_or_default(),
        None => Kept::of(path).map(|own| own.names).unwrap_or_default(),
    }
}

/// What opening the image at `path` may take beside it, as far as that is recorded: what it may name, what that may, and
/// where its disk goes on.
pub fn reach(path: &Path) -> Vec<PathBuf> {
    const MOST: usize = 4096;
    let mut all = vec![path.to_owned()];
    let mut at = 0;
    while at < all.len().min(MOST) {
        let path = all[at].clone();
        at += 1;
        if is_store(&path) {
            continue;
        }
        let names = all_allowed(&path).into_iter().map(|it| it.file.path);
        for next in names.chain(super::successor(&path)) {
            if !all.contains(&next) {
                all.push(next);
            }
        }
    }
    all.split_off(1)
}

/// Let the image at `path` name that file in that role, or none, and no other.
pub fn set_allowed(path: &Path, role: Role, file: Option<&Path>) -> io::Result<()> {
    let data = role == Role::DataFile;
    change_allowed(path, |names| {
        names.retain(|it| it.data != data);
        names.extend(file.and_then(Known::of).map(|file| Allowed { data, file, format: None }));
    })
}

/// Let it name that file as well: before another name is written into the image, so that it opens whichever
/// of the two a power cut leaves.
pub fn also_allow(path: &Path, role: Role, file: &Path) -> io::Result<()> {
    let data = role == Role::DataFile;
    let allowed = |file| Allowed { data, file, format: None };
    change_allowed(path, |names| names.extend(Known::of(file).map(allowed)))
}

/// What the image at `path` may name below it is of that format, and is opened as no other: whoever writes the image cannot
/// have a guest's bytes read as an image.
pub fn set_format_below(path: &Path, below: &Path, format: Format) -> io::Result<()> {
    let Some(below) = Known::of(below) else { return Ok(()) };
    change_allowed(path, |names| {
        let those = names.iter_mut().filter(|it| !it.data && it.file == below);
        those.for_each(|it| it.format = Some(format.name().into()));
    })
}

/// The format of what lies below the image at `path`, where that is recorded.
pub(crate) fn format_below(path: &Path, below: &Place) -> Option<Format> {
    let at = match is_store(below.path()) {
        true => below.path().to_owned(),
        false => fs::canonicalize(below.at()).ok()?,
    };
    let names = all_allowed(path).into_iter();
    let mut those = names.filter(|it| !it.data && (it.file.is(below) || it.file.path == at));
    let first = those.next()?.format?;
    // While one takes the other's place either may hold.
    those.all(|it| it.format.as_ref() == Some(&first)).then(|| first.parse().ok())?
}

fn change_allowed(path: &Path, change: impl FnOnce(&mut Vec<Allowed>)) -> io::Result<()> {
    let before = all_allowed(path);
    let mut names = before.clone();
    change(&mut names);
    if names == before {
        return Ok(());
    }
    let set = match names.is_empty() {
        true => remove_attribute(path, NAMES),
        false => set_attribute(path, NAMES, &names)?,
    };
    if set {
        // The image's own syncs are of its data, and an attribute is none.
        fs::File::open(path)?.sync_all()?;
    }
    also_kept(set, Kept::change(path, set || names.is_empty(), |own| own.names = names))
}

/// The state folder holds what stands in an attribute as well, for services that have no CAP_SYS_ADMIN and see
/// none: where it cannot, they are told of it as any other.
pub(super) fn also_kept(attribute: bool, kept: io::Result<()>) -> io::Result<()> {
    match kept {
        Err(error) if attribute => {
            tracing::debug!("the state folder does not hold what an image may name: {error}");
            Ok(())
        }
        end => end,
    }
}

/// Whose a data file is.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Owner {
    #[serde(flatten)]
    image: Known,
    /// Which file that was written down of, for a copy of it has the attribute as well. Older ones do not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    of: Option<String>,
}

/// Whose data file lies at `path`.
pub(crate) fn owner(path: &Path) -> Option<Known> {
    let Some(text) = attribute(path, DATA_OF) else { return Kept::of(path)?.data_of };
    let owner: Owner = serde_json::from_str(&text).ok()?;
    (owner.of.is_none() || owner.of == identity(path)).then_some(owner.image)
}

/// Whether the data file `data` is no other image's than that at `image`. `insisted`: the operator names the
/// file, so that one whose image is gone may have another.
pub fn may_own(image: &Place, data: &Place, insisted: bool) -> Result<(), OpenError> {
    let Some(owner) = owner(&data.at()) else { return Ok(()) };
    let same_path = fs::canonicalize(image.at()).is_ok_and(|path| path == owner.path);
    let gone = || !Place::hold(&owner.path).is_ok_and(|other| owner.is(&other));
    if owner.is(image) || same_path || (insisted && gone()) {
        return Ok(());
    }
    let source = Box::new(NameError::DataOf {
        image: image.path().to_owned(),
        data: data.path().to_owned(),
        owner: owner.path.clone(),
        gone: gone(),
    });
    Err(OpenError::Name { source })
}

/// From now on the data file is that image's.
pub fn set_owner(image: &Place, data: &Place) -> io::Result<()> {
    let Some(own) = Known::of(&image.at()).filter(|own| own.identity.is_some()) else {
        return Ok(());
    };
    let at = data.at();
    let owner = Owner { image: own.clone(), of: identity(&at) };
    let known = match attribute(&at, DATA_OF) {
        Some(text) => serde_json::from_str(&text).ok().as_ref() == Some(&owner),
        None => Kept::of(&at).and_then(|kept| kept.data_of).as_ref() == Some(&own),
    };
    if known {
        return Ok(());
    }
    let set = set_attribute(&at, DATA_OF, &owner)?;
    also_kept(set, Kept::change(&at, set, |kept| kept.data_of = Some(own)))
}

/// False where that cannot be, for whatever reason.
pub(super) fn set_attribute(path: &Path, name: &str, value: &impl Serialize) -> io::Result<bool> {
    let text = serde_json::to_vec(value)?;
    Ok(ask::set_attribute(path, name, Some(&text)).is_ok())
}

/// False where that cannot be, or it is not there.
pub(super) fn remove_attribute(path: &Path, name: &str) -> bool {
    ask::set_attribute(path, name, None).is_ok()
}

/// An image and its data file are being opened: they must belong together, and do from now on where the image is
/// opened for writing.
pub(crate) fn belong_together(
    image: &Place,
    data: &Place,
    options: &OpenOptions,
) -> Result<(), OpenError> {
    may_own(image, data, !options.data_files.is_empty())?;
    if options.read_only {
        return Ok(());
    }
    if let Err(error) = set_owner(image, data) {
        let (image, data) = (image.path().display(), data.path().display());
        tracing::warn!("cannot write down that {data} is the data file of {image}: {error}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_may_be_named_is_that_file_wherever_it_is() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = |name: &str| dir.path().join(name);
        for name in ["image", "base", "other"] {
            fs::write(path(name), name).expect("written");
        }
        if set_allowed(&path("image"), Role::Backing, Some(&path("base"))).is_err() {
            eprintln!("skipped: there is nowhere to record an image");
            return;
        }
        let find = |name: &str| {
            let all = allowed(&path("image"), Role::Parent);
            all.iter().find_map(|it| it.find(&path(name))).is_some()
        };
        assert!(find("base") && !find("other"));
        assert!(allowed(&path("image"), Role::DataFile).is_empty());
        fs::rename(path("base"), path("moved")).expect("moved");
        assert!(find("moved") && !find("base"));
        // Another in its place counts where only this user could have put it.
        fs::rename(path("other"), path("base")).expect("moved");
        assert!(find("base"));
        use std::os::unix::fs::PermissionsExt;
        let shared = fs::Permissions::from_mode(0o777);
        fs::set_permissions(dir.path(), shared).expect("changed");
        assert!(!find("base") && find("moved"));
        // While one name takes the place of another both may be there.
        fs::write(path("next"), "next").expect("written");
        also_allow(&path("image"), Role::Backing, &path("next")).expect("written");
        assert!(find("moved") && find("next"));
        set_allowed(&path("image"), Role::Backing, Some(&path("next"))).expect("written");
        assert!(!find("moved") && find("next"));
        let format =
            |name: &str| format_below(&path("image"), &Place::hold(&path(name)).expect("there"));
        assert_eq!(format("next"), None);
        set_format_below(&path("image"), &path("next"), Format::Vhd).expect("written");
        set_format_below(&path("image"), &path("moved"), Format::Raw).expect("nothing of it");
        assert_eq!((format("next"), format("moved")), (Some(Format::Vhd), None));
        set_allowed(&path("image"), Role::Backing, None).expect("removed");
        assert!(!find("next"));
    }

    #[test]
    fn a_data_file_has_one_image() {
        let dir = tempfile::tempdir().expect("a folder");
        let place = |name: &str| Place::hold(&dir.path().join(name)).expect("there");
        for name in ["one", "two", "data"] {
            fs::write(dir.path().join(name), name).expect("written");
        }
        let (one, two, data) = (place("one"), place("two"), place("data"));
        may_own(&two, &data, false).expect("nobody's");
        if set_owner(&one, &data).is_err() || owner(&data.at()).is_none() {
            eprintln!("skipped: there is nowhere to record an image");
            return;
        }
        may_own(&one, &data, false).expect("its own");
        for insisted in [false, true] {
            let error = may_own(&two, &data, insisted).expect_err("another's").to_string();
            assert!(error.contains("one") && error.contains("two"), "{error}");
        }
        if attribute(&data.at(), DATA_OF).is_some() {
            let copy = dir.path().join("copy");
            let paths = [dir.path().join("data"), copy.clone()];
            let end = std::process::Command::new("cp").arg("-a").args(paths).status();
            assert!(end.expect("cp").success());
            may_own(&two, &Place::hold(&copy).expect("there"), false).expect("nobody's yet");
        }
        drop(one);
        fs::remove_file(dir.path().join("one")).expect("removed");
        let error = may_own(&two, &data, false).expect_err("nobody said so").to_string();
        assert!(error.contains("--data-file"), "{error}");
        may_own(&two, &data, true).expect("its image is gone");
        fs::write(dir.path().join("one"), "from a backup").expect("written");
        may_own(&place("one"), &data, false).expect("the image, restored");
    }
}
