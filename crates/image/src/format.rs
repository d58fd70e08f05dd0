//! The formats by their names.

use std::fmt;
use std::str::FromStr;

/// Formats an image can be opened as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// The disk's bytes as they are.
    Raw,
    /// QEMU's copy-on-write format, versions 2 and 3.
    Qcow2,
    /// Microsoft's VHD, which QEMU calls vpc.
    Vhd,
    /// Microsoft's VHDX; read-only.
    Vhdx,
    /// VMware's VMDK, sparse or flat; read-only.
    Vmdk,
    /// A LUKS container, version 1 or 2.
    Luks,
}

impl Format {
    /// Every format.
    pub const ALL: [Format; 6] =
        [Format::Raw, Format::Qcow2, Format::Vhd, Format::Vhdx, Format::Vmdk, Format::Luks];

    /// The name that QEMU's programs use and print.
    pub fn name(self) -> &'static str {
        match self {
            Format::Raw => "raw",
            Format::Qcow2 => "qcow2",
            Format::Vhd => "vpc",
            Format::Vhdx => "vhdx",
            Format::Vmdk => "vmdk",
            Format::Luks => "luks",
        }
    }

    /// Other names it goes by.
    pub fn aliases(self) -> &'static [&'static str] {
        match self {
            Format::Raw => &["host_device"],
            Format::Vhd => &["vhd"],
            _ => &[],
        }
    }

    /// What it is, in a few words.
    pub fn about(self) -> &'static str {
        match self {
            Format::Raw => "The disk's bytes as they are",
            Format::Qcow2 => "QEMU's qcow2: snapshots, overlays, compression",
            Format::Vhd => "VHD, as Xen and Azure use it",
            Format::Vhdx => "VHDX, read-only",
            Format::Vmdk => "VMDK, read-only",
            Format::Luks => "A LUKS container",
        }
    }

    /// Whether images of it can be written to.
    pub fn writable(self) -> bool {
        !matches!(self, Format::Vhdx | Format::Vmdk)
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A text that names no format.
#[derive(Debug, thiserror::Error)]
#[error(
    "{0:?} is no format known here: \
     there are raw, qcow2, vpc (or vhd), vhdx, vmdk and luks"
)]
pub struct UnknownFormat(String);

impl FromStr for Format {
    type Err = UnknownFormat;

    fn from_str(text: &str) -> Result<Format, UnknownFormat> {
        let named = |format: &Format| format.name() == text || format.aliases().contains(&text);
        Format::ALL.into_iter().find(named).ok_or_else(|| UnknownFormat(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_found_by_every_name() {
        for format in Format::ALL {
            assert_eq!(format.name().parse::<Format>().expect("its name"), format);
            for alias in format.aliases() {
                assert_eq!(alias.parse::<Format>().expect("an alias"), format);
            }
        }
        let message = "qcow3".parse::<Format>().expect_err("no such format").to_string();
        for format in Format::ALL {
            assert!(message.contains(format.name()), "{message}");
        }
    }
}
