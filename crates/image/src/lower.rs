//! What lies below an image that has only a part of its disk: the one place that knows that it may be shorter, or not there.

use crate::{Extent, Image};

/// An image's backing file, or VHD's parent, if it has one.
pub(crate) struct Lower(Option<Box<dyn Image>>);

impl Lower {
    pub(crate) fn new(image: Option<Box<dyn Image>>) -> Lower {
        Lower(image)
    }

    pub(crate) fn image(&self) -> Option<&dyn Image> {
        self.0.as_deref()
    }

    pub(crate) fn is_there(&self) -> bool {
        self.0.is_some()
    }

    /// The image, if it reaches as far as `offset`, and how much of the range it has.
    pub(crate) fn reaching(&self, offset: u64, len: u64) -> Option<(&dyn Image, u64)> {
        let image = self.image()?;
        let left = image.info().size.checked_sub(offset).filter(|left| *left > 0)?;
        Some((image, len.min(left)))
    }

    /// Where the bytes are that are not the image's own: nowhere, past the end of what lies below. They are never written
    /// to from above.
    pub(crate) fn map(&self, offset: u64, len: u64) -> Extent<'_> {
        let Some((image, len)) = self.reaching(offset, len) else {
            return Extent::Zero { len, writable: false };
        };
        match image.map(offset, len) {
            Extent::Data { file, offset, len, cipher, .. } => {
                Extent::Data { file, offset, len, writable: false, cipher }
            }
            Extent::Zero { len, .. } => Extent::Zero { len, writable: false },
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Null;

    #[test]
    fn what_is_shorter_or_missing_reads_as_zeros_that_are_not_written_to() {
        let is = |extent, wanted: u64| matches!(extent, Extent::Zero { len, writable: false } if len == wanted);
        let none = Lower::new(None);
        assert!(is(none.map(0, 4096), 4096) && none.reaching(0, 1).is_none() && !none.is_there());
        let short = Lower::new(Some(Box::new(Null::new(1024, false))));
        assert!(is(short.map(512, 4096), 512), "no further than it reaches");
        assert!(is(short.map(1024, 4096), 4096) && is(short.map(u64::MAX - 1, 1), 1));
        assert_eq!(short.reaching(1000, 100).map(|(_, len)| len), Some(24));
        assert!(short.reaching(1024, 1).is_none());
    }
}
