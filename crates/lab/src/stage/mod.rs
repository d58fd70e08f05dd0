//! Where the load runs.

pub mod guest;
pub mod host;
