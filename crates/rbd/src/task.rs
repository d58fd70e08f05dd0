//! What the thread of an image is asked for.

use std::sync::Arc;

use crate::ffi::Request;

/// One thing.
pub(crate) enum Task {
    /// An operation.
    Do(Arc<Request>),
    /// The image was changed: look how long it is.
    Look,
    /// It is to end.
    End,
}
