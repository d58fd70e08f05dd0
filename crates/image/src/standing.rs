//! How a restart log and its image stand to each other.

/// How a log and its image stand to each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// The image is as the log's writer left it.
    Same,
    /// It is not, and this is why.
    Other(String),
    /// That cannot be told, and this is why.
    Unknown(String),
}
