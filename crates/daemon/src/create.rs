//! Images that are made while the server runs, in files that are there.

use std::path::{Path, PathBuf};

use ringtap_image::{Place, Secret, luks};
use ringtap_image_tools::held::{Content, make_file, make_held};

use crate::Error;

/// What is made.
pub(crate) enum New {
    /// A file of zeros, so long.
    File { path: PathBuf, size: u64 },
    /// An image in a file that is there; what is in it is lost.
    Image {
        path: PathBuf,
        place: Place,
        image: Content,
        /// How its data is enciphered, where it is qcow2, and what is to open it.
        encrypt: Option<(luks::CreateOptions, Secret)>,
    },
}

impl New {
    /// The same, its data enciphered.
    pub(crate) fn encrypted(mut self, own: luks::CreateOptions, with: Secret) -> New {
        if let New::Image { encrypt, .. } = &mut self {
            *encrypt = Some((own, with));
        }
        self
    }

    /// Make it, on this thread.
    pub(crate) fn make(self) -> Result<(), Error> {
        match self {
            New::File { path, size } => {
                make_file(&path, size).map_err(|error| failed(&path, error))
            }
            New::Image { path, place, mut image, encrypt } => {
                if let (Content::Qcow2(options), Some((own, secret))) = (&mut image, encrypt) {
                    let header = luks::create_header(&own, &secret);
                    options.luks = Some(header.map_err(|error| failed(&path, error.into()))?.0);
                }
                make_held(&place, image).map_err(|error| failed(&path, error))
            }
        }
    }
}

fn failed(path: &Path, error: ringtap_image_tools::Error) -> Error {
    use ringtap_image_tools::Error as Why;
    let why = match error {
        Why::Open(error) => return Error::Open(error),
        Why::Os { source, .. } => source.to_string(),
        other => match other.cause() {
            Why::Os { source, .. } => source.to_string(),
            cause => cause.to_string(),
        },
    };
    Error::Job(format!("Could not create '{}': {why}", path.display()))
}
