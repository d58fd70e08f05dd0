//! An image whose disk goes on in what lies below it, since a commit: whoever reads the image finds what it had at its end over what
//! has been written below since, and so a disk that there never was.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::{Image, record};

/// Say so of the first such in a chain of images, from the top down.
pub fn warn_of_mixture(chain: &[PathBuf]) {
    let file = |path: &Path| fs::metadata(path).ok().map(|facts| (facts.dev(), facts.ino()));
    for (at, image) in chain.iter().enumerate() {
        let Some(next) = record::successor(image) else { continue };
        let Some(goes_on) = file(&next) else { continue };
        if chain[at + 1..].iter().any(|below| file(below) == Some(goes_on)) {
            let (image, next) = (image.display(), next.display());
            return tracing::warn!(
                "{image}: its disk was committed into {next}, which lies below it, and goes on there: what is read here is of \
                 two times; read {next} instead (ringtap amend --forget-successor {image}, where this is meant all the same)"
            );
        }
    }
}

/// Of an image that was opened.
pub(crate) fn warn_of(image: &dyn Image) {
    let mut chain = Vec::new();
    let mut next = Some(image);
    while let Some(image) = next {
        chain.extend(image.container().map(|container| container.path().to_owned()));
        next = image.below();
    }
    if chain.len() > 1 {
        warn_of_mixture(&chain);
    }
}
