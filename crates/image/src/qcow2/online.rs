//! A check of an image while it is served: of a moment.

use std::sync::Arc;

use ringtap_io::Io;

use super::check::check_at;
use super::moment::Moment;
use super::{Header, Report, Shared, ToolError};
use crate::{Boxed, Container, OnlineCheck};

impl Shared {
    /// Begin a check of the image as it is now.
    pub(super) async fn online_check(&self, io: &Io) -> Result<Box<dyn OnlineCheck>, ToolError> {
        let container = self.container.clone();
        if !self.info.read_only {
            return Ok(Box::new(Online { container, moment: self.moment(io).await? }));
        }
        // Tables that a killed server has left are seen in memory only.
        if self.state().cache.is_dirty() {
            let why = "changes of a killed server are not in it yet: serve it once for writing, which takes them up";
            return Err(ToolError::Refused { path: container.path().to_owned(), why: why.into() });
        }
        let (header, len) = (Header::read(io, &container).await?, container.len());
        let moment = Arc::new(Moment::new(header, len, vec![], 0));
        Ok(Box::new(Online { container, moment }))
    }
}

/// A check of a moment.
struct Online {
    container: Container,
    moment: Arc<Moment>,
}

impl OnlineCheck for Online {
    fn run<'a>(&'a self, io: &'a Io) -> Boxed<'a, Result<Report, ToolError>> {
        Box::pin(check_at(io, &self.container, &self.moment))
    }
}
