//! The image that an overlay has taken the place of, until it is stable.
//!
//! What it was given and was not flushed is below the overlay now, where the overlay's own flush does not reach it:
//! until it is closed every flush of the disk makes it stable first.

use std::sync::Arc;

use ringtap_image::{Error, Image};
use ringtap_io::Io;
use ringtap_io::sync::atomic::{AtomicBool, Ordering::SeqCst};

/// An image that an overlay on it has taken the place of: see [`crate::Quiesced::overlay`].
#[derive(Clone)]
pub struct Former(Arc<Inner>);

struct Inner {
    image: Box<dyn Image>,
    /// Closed in good order: there is nothing left to make stable.
    settled: AtomicBool,
}

impl Former {
    pub(crate) fn new(image: Box<dyn Image>) -> Former {
        Former(Arc::new(Inner { image, settled: AtomicBool::new(false) }))
    }

    /// Make what was written to it stable, and leave it as other programs expect a closed image. Whoever uses the disk
    /// goes on meanwhile; its flushes need this no more afterwards. Where it fails they go on to make the image stable
    /// themselves, and fail where they cannot; it may be tried again.
    pub async fn settle(&self, io: &Io) -> Result<(), Error> {
        if !self.is_settled() {
            self.0.image.close(io).await?;
            self.0.image.stop_writing();
            self.0.settled.store(true, SeqCst);
        }
        Ok(())
    }

    /// Whether it is stable and closed.
    pub fn is_settled(&self) -> bool {
        self.0.settled.load(SeqCst)
    }

    pub(crate) fn is(&self, other: &Former) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Make stable what was written to it.
    pub(crate) async fn flush(&self, io: &Io) -> Result<(), Error> {
        if self.is_settled() { Ok(()) } else { self.0.image.flush(io).await }
    }

    pub(crate) fn abandon(&self) {
        self.0.image.abandon();
    }

    /// The image itself. It is read through the overlay, and written to no more.
    pub fn image(&self) -> &dyn Image {
        &*self.0.image
    }
}
