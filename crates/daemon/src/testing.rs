//! What is made of bytes from elsewhere, without a server: for fuzz targets.

pub use crate::handover::testing as handover;
pub use crate::metrics::testing as metrics;
