//! Images that are not whole yet, and say so.

use std::path::{Path, PathBuf};

use ringtap_image::{on_a_ring, probe};
use ringtap_vbd::Vbd;

use crate::create::Made;
use crate::error::Tried;
use crate::{Doing, Error};

/// Flush and close a target that is whole now.
pub(crate) fn finish(to: Vbd, target: &Path) -> Result<(), Error> {
    on_a_ring(target, |io| async move {
        to.flush(&io).await?;
        to.close(&io).await
    })?
    .doing(|| format!("cannot make {} stable", target.display()))
}

/// A target that is not whole yet, and says so to whoever opens it.
pub(crate) struct Unfinished {
    path: PathBuf,
    noted: bool,
}

impl Unfinished {
    pub(crate) fn begin(path: &Path) -> Unfinished {
        Unfinished { path: path.to_owned(), noted: probe::unfinished(path, "convert") }
    }

    pub(crate) fn message(&self) -> String {
        let noted = match self.noted {
            true => "ringtap refuses it from now on",
            false => "nothing in it says so",
        };
        format!("{} is not whole ({noted}): remove it", self.path.display())
    }

    /// Leave nothing that may be taken for a whole image where it was made here, and is closed; gives what to say. A
    /// file that was there before stays, empty where nothing in it tells.
    pub(crate) fn give_up(&self, made: &Made) -> String {
        let name = self.path.display();
        let file = self.path.metadata().is_ok_and(|facts| facts.is_file());
        if made.remove(&self.path) {
            format!("{name} is removed, for it was not whole")
        } else if file && !self.noted && std::fs::File::create(&self.path).is_ok() {
            format!("{name} is empty, for it was not whole")
        } else {
            self.message()
        }
    }

    pub(crate) fn end(self) -> Result<(), Error> {
        probe::finished(&self.path)
            .tried(|| format!("cannot mark {} as whole", self.path.display()))
    }
}
