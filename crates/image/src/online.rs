//! Whether an image contradicts itself, looked at while it is served.

use ringtap_io::Io;

use crate::Boxed;
use crate::qcow2::{Report, ToolError};

/// A look at the tables of an image as they were at one moment, by [`crate::Image::online_check`], whatever is written to the image
/// since. Nobody closes the image or opens it anew meanwhile.
pub trait OnlineCheck {
    /// Look at all of them.
    fn run<'a>(&'a self, io: &'a Io) -> Boxed<'a, Result<Report, ToolError>>;
}
