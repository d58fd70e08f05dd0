//! What a file is to the image that names it.

use std::fmt::{self, Display, Formatter};

/// What a file is to the image that names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// What lies below a qcow2 image.
    Backing,
    /// What lies below a VHD.
    Parent,
    /// A part of a VMDK.
    Extent,
    /// Where the guest's data of a qcow2 image lies.
    DataFile,
}

impl Role {
    pub(super) fn name(self) -> &'static str {
        match self {
            Role::Backing => "backing file",
            Role::Parent => "parent",
            Role::Extent => "extent",
            Role::DataFile => "data file",
        }
    }

    /// The option by which the operator allows it.
    pub(super) fn option(self) -> &'static str {
        if self == Role::DataFile { "--data-file" } else { "--backing" }
    }
}

impl Display for Role {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
