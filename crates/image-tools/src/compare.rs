//! Whether two images have the same content.

use std::path::Path;
use std::sync::Arc;

use ringtap_image::{CacheMode, Format};
use ringtap_vbd::{Compare, Progress, Vbd, Workers};

pub use ringtap_vbd::{CompareError, Found};

use crate::{Error, LazySecret, Reading, Watcher};

/// Two images that are open.
pub struct Pair {
    disks: [Vbd; 2],
}

impl Pair {
    /// Open two images, each of the format named or of the one that it is known to be; with `second_secret` the second is
    /// opened by that, and not by the one of `reading`.
    pub fn open(
        images: [(&Path, Option<Format>); 2],
        cache: CacheMode,
        reading: &Reading,
        second_secret: Option<&LazySecret>,
        watch: &Watcher,
    ) -> Result<Pair, Error> {
        let [(one, format), (other, second)] = images;
        let one = reading.open(one, format, cache, watch)?;
        let secret = second_secret.or(reading.secret.as_ref()).cloned();
        let reading = Reading { secret, ..reading.clone() };
        Ok(Pair { disks: [one, reading.open(other, second, cache, watch)?] })
    }

    /// Bytes of both disks.
    pub fn sizes(&self) -> [u64; 2] {
        [self.disks[0].size(), self.disks[1].size()]
    }

    /// Find the first difference, `strict`ly also of what is allocated. What follows the shorter one counts as zeros. The error says of which of
    /// the two it is.
    pub fn compare(self, strict: bool, watch: &Watcher) -> Result<Found, CompareError> {
        let progress = Arc::new(Progress::default());
        let [one, other] = self.sizes();
        watch.begins(one.max(other), &progress);
        let disks = self.disks.map(Into::into);
        ringtap_vbd::compare(Compare { disks, strict, workers: Workers::of(8) }, &progress)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unwatched;
    use std::os::unix::fs::FileExt;

    #[test]
    fn the_first_difference_is_found() {
        let dir = tempfile::tempdir().expect("a folder");
        let (one, other) = (dir.path().join("a"), dir.path().join("b"));
        let file = std::fs::File::create(&one).expect("a file");
        file.set_len(1 << 20).expect("its size");
        std::fs::File::create(&other).and_then(|file| file.set_len(1 << 20)).expect("a file");
        let compare = |strict| {
            let format = Some(Format::Raw);
            let images = [(one.as_path(), format), (other.as_path(), format)];
            let pair =
                Pair::open(images, CacheMode::Writeback, &Reading::default(), None, &unwatched())
                    .expect("opened");
            assert_eq!(pair.sizes(), [1 << 20; 2]);
            pair.compare(strict, &unwatched()).expect("compared")
        };
        assert!(matches!(compare(false), Found::Same));
        file.write_all_at(&[0; 4096], 8192).expect("written");
        assert!(matches!(compare(false), Found::Same));
        assert!(matches!(compare(true), Found::Allocation(8192)));
        file.write_all_at(&[1], 8200).expect("written");
        assert!(matches!(compare(false), Found::Content(8200)));
    }
}
