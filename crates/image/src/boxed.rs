//! What an image's slow paths are.

use std::future::Future;
use std::pin::Pin;

/// A future of an image's slow path.
pub type Boxed<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;
