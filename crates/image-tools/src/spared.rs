//! What is not to be lost by making an image: what lies below it, and a name that nobody could open.

use std::path::{Path, PathBuf};

use ringtap_image::is_store;

use crate::files::{beside, same_file, understood};
use crate::{Error, FormatOptions, NewImage, Reading, chain};

impl NewImage {
    /// The files that making it at `path` makes or overwrites.
    pub fn files(&self, path: &Path) -> Vec<PathBuf> {
        let data = self.data_file().map(|name| beside(path, Path::new(name)));
        Some(path.to_owned()).into_iter().chain(data).collect()
    }

    fn data_file(&self) -> Option<&str> {
        match &self.options {
            FormatOptions::Qcow2 { own, .. } => own.data_file.as_deref(),
            _ => None,
        }
    }

    /// That making it at `path` overwrites none of the images below it, nor its own header by its data.
    pub(crate) fn spares_what_lies_below(
        &self,
        path: &Path,
        reading: &Reading,
    ) -> Result<(), Error> {
        if let Some(name) = self.data_file() {
            understood("data file", name)?;
        }
        let files = self.files(path);
        if let [path, data] = &files[..] {
            if data == path || same_file(data, path) {
                return Err(Error::usage("an image cannot be its own data file"));
            }
        }
        let Some(backing) = self.backing.as_ref().filter(|it| !is_store(&it.path)) else {
            return Ok(());
        };
        let mut below = vec![backing.path.clone()];
        // Where they cannot be found out nobody can read them, either.
        if let Ok(all) = chain::files(&backing.path, Some(backing.format), &reading.names) {
            below.extend(all);
        }
        match files.iter().find(|file| below.iter().any(|one| same_file(one, file))) {
            None => Ok(()),
            Some(file) => Err(Error::Usage(format!(
                "{} lies below the image that is to be made, which would overwrite it: give the image another name",
                file.display()
            ))),
        }
    }
}
