//! Whether every part of an image can be found, where its format has nothing else to check.

use std::path::PathBuf;

use ringtap_io::Io;

use crate::qcow2::{Report, ToolError};
use crate::{Boxed, Error, Image, OnlineCheck};

/// Of an image that nobody writes to and whose format has nothing else to check: whether every part of it can be found.
pub(crate) struct Findable {
    pub(crate) image: Box<dyn Image>,
    pub(crate) path: PathBuf,
}

impl OnlineCheck for Findable {
    fn run<'a>(&'a self, io: &'a Io) -> Boxed<'a, Result<Report, ToolError>> {
        Box::pin(async move {
            let failed = |offset: u64| {
                let what = "find the disk's bytes in";
                move |source: Error| ToolError::Io { what, path: self.path.clone(), offset, source }
            };
            let (mut at, end) = (0, self.image.info().size);
            while at < end {
                let status = self.image.status(io, at, end - at).await;
                at += status.map_err(failed(at))?.len.max(1);
            }
            Ok(Report::default())
        })
    }
}
