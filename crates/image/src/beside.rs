//! Files that an image names: they lie in its own folder, or where the user allows it.

use std::fs;
use std::path::{Component, Path, PathBuf};

use crate::OpenError;

/// What is looked for, for messages.
pub(crate) struct Sought<'a> {
    /// The image's format.
    pub(crate) format: &'static str,
    /// What the file is to the image.
    pub(crate) what: &'static str,
    /// The image that names it.
    pub(crate) image: &'a Path,
}

/// The folders in which files may lie that an image names.
pub(crate) struct Folders {
    /// The image's own.
    pub(crate) own: PathBuf,
    allowed: Vec<PathBuf>,
}

impl Folders {
    /// The folder of `image`, and those of `allow`; one that is not there allows nothing.
    pub(crate) fn of(image: &Path, allow: &[PathBuf]) -> Result<Folders, OpenError> {
        let whole = fs::canonicalize(image).map_err(|source| OpenError::Os {
            what: "find the folder of",
            path: image.to_owned(),
            source,
        })?;
        let own = whole.parent().unwrap_or(Path::new("/")).to_owned();
        let allowed = allow.iter().filter_map(|dir| fs::canonicalize(dir).ok()).collect();
        Ok(Folders { own, allowed })
    }

    /// Whether a file, by its name without links, lies in one of them or below.
    pub(crate) fn hold(&self, file: &Path) -> bool {
        file.starts_with(&self.own) || self.allowed.iter().any(|dir| file.starts_with(dir))
    }
}

/// The file that the first good one of `names` means: inside the image's own folder, or in one that
/// `allow` names. Of a name that leads nowhere the last part may still be right.
pub(crate) fn find(
    sought: &Sought<'_>,
    names: &[PathBuf],
    allow: &[PathBuf],
) -> Result<PathBuf, OpenError> {
    let Sought { format, what, image } = *sought;
    let folders = Folders::of(image, allow)?;
    let mut outside = None;
    for name in names {
        let last =
            name.components().next_back().filter(|part| matches!(part, Component::Normal(_)));
        let beside = last.map(|part| folders.own.join(part));
        for candidate in [Some(folders.own.join(name)), beside].into_iter().flatten() {
            let Ok(candidate) = fs::canonicalize(candidate) else { continue };
            if folders.hold(&candidate) {
                return Ok(candidate);
            }
            outside.get_or_insert(candidate);
        }
    }
    let found = match (outside, names.first()) {
        (Some(found), _) => format!("its {what} {} lies in another folder", found.display()),
        (None, Some(name)) => format!("its {what} {} is not there", name.display()),
        (None, None) => format!("it has a {what} and names none"),
    };
    Err(OpenError::Malformed {
        format,
        path: image.to_owned(),
        offset: 0,
        found,
        advice: "put it beside the image, or allow its folder with --allow-backing DIR",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_found_only_where_it_may_lie() {
        let dir = tempfile::tempdir().expect("a folder");
        let (here, there) = (dir.path().join("here"), dir.path().join("there"));
        for folder in [&here, &there] {
            fs::create_dir(folder).expect("made");
        }
        let image = here.join("child.vhd");
        fs::write(&image, "").expect("written");
        fs::write(there.join("base.vhd"), "").expect("written");
        let sought = Sought { format: "VHD", what: "parent", image: &image };
        let names = [PathBuf::from("../there/base.vhd")];
        let error = find(&sought, &names, &[]).expect_err("outside").to_string();
        assert!(error.contains("--allow-backing"), "{error}");
        assert!(find(&sought, &names, std::slice::from_ref(&there)).is_ok());
        // A symbolic link does not lead outside.
        std::os::unix::fs::symlink(there.join("base.vhd"), here.join("link.vhd")).expect("linked");
        assert!(find(&sought, &[PathBuf::from("link.vhd")], &[]).is_err());
        fs::write(here.join("base.vhd"), "").expect("written");
        let found = find(&sought, &names, &[]).expect("beside the image");
        assert!(found.ends_with("here/base.vhd"));
    }
}
