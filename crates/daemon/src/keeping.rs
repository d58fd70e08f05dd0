//! What is written down of a disk beside what it is.

use std::path::PathBuf;

use serde_json::Value;

/// What is written down of a disk, beside what it is.
#[derive(Clone, Debug, Default)]
pub struct Keeping {
    /// The file that describes it.
    pub file: Option<PathBuf>,
    /// Where its secret is, as the command line says it.
    pub secret: Option<String>,
    /// Exports that a client of the control socket wants, each as it said.
    pub exports: Vec<Value>,
    /// Whether it is for this server alone, as the target of a job: no file is to describe it.
    #[doc(hidden)]
    pub passes: bool,
    /// Whether its image comes from the server before this one.
    #[doc(hidden)]
    pub comes: bool,
    /// Whether that lies upon another disk's, whatever it names.
    #[doc(hidden)]
    pub lies_upon: bool,
}
