//! The file itself: what everything else is measured against.

use super::{Access, Backend, Context, Reach, Served};
use crate::env::{Env, Missing};
use crate::error::Result;

/// The plain file.
#[derive(Debug)]
pub struct Native;

impl Backend for Native {
    fn reach(&self) -> Reach {
        Reach::File
    }

    fn missing(&self, _: &Env) -> Option<Missing> {
        None
    }

    fn start(&self, context: &Context<'_>) -> Result<Served> {
        Ok(Served { access: Access::File(context.disk.to_owned()), server: None, device: None })
    }
}
