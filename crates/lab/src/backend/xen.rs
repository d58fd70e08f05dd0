//! Disks of Xen's guests: what serves them in the first domain, and what they lie on there. The stage attaches them.

use super::{Backend, Context, Entry, File, Peers, Reach, Served, WriteCache};
use crate::env::{Env, Missing};
use crate::error::{Error, Result};
use crate::sample::Stage;
use crate::workload::{Client, Workload};

/// Where the first domain has its images.
pub const FILES: &str = "/srv";

/// What serves a guest's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// The kernel's xen-blkback.
    Blkback(Node),
    /// `ringtap xen`.
    Ringtap(Image, Mode),
    /// Nothing: the first domain uses the volume itself.
    Native,
    /// QEMU's emulated IDE controller in an HVM guest, on the volume through the page cache of the first domain, as xl has it
    /// opened.
    Emulated(WriteCache),
    /// xen-blkback on the volume, and its driver in that HVM guest.
    InHvm,
}

/// Who uses a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seat {
    /// The PV guest with that number, from 1.
    Guest(usize),
    /// The first domain.
    First,
    /// The HVM guest.
    Hvm,
}

impl Seat {
    /// Xen's name of it.
    pub fn domain(self) -> String {
        match self {
            Seat::Guest(number) => format!("guest{number}"),
            Seat::First => "Domain-0".into(),
            Seat::Hvm => "hvm".into(),
        }
    }

    /// Whose images and volume it uses: what is compared lies on the same.
    pub fn images(self) -> usize {
        match self {
            Seat::Guest(number) => number,
            Seat::First | Seat::Hvm => 1,
        }
    }
}

impl Way {
    /// Who uses the disk, where it is the `number`th of a load.
    pub fn seat(self, number: usize) -> Seat {
        match self {
            Way::Native => Seat::First,
            Way::Emulated(_) | Way::InHvm => Seat::Hvm,
            Way::Blkback(_) | Way::Ringtap(..) => Seat::Guest(number),
        }
    }

    /// Whether it is made anew whenever it is attached.
    pub fn is_overlay(self) -> bool {
        matches!(self, Way::Ringtap(Image::Overlay, _))
    }
}

/// The block device that xen-blkback is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Node {
    /// device-mapper's linear target: what an LVM linear volume is.
    Volume,
    /// A loop device on a raw file on ext4.
    Loop {
        /// Past the page cache of the first domain.
        direct: bool,
    },
}

/// What `ringtap xen` opens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Image {
    /// The volume that xen-blkback gets.
    Volume,
    /// The raw file below the loop devices.
    Raw,
    /// qcow2, all of it written.
    Qcow2,
    /// A qcow2 overlay on the raw file, made anew whenever it is attached.
    Overlay,
    /// A dynamic VHD, all of it written.
    Vhd,
}

/// How `ringtap xen` serves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// As it does unless told otherwise.
    Usual,
    /// With cache=writeback: what `file:` lines become.
    Cached,
    /// Without persistent grants: the hypervisor copies.
    GrantCopy,
    /// Each answer held back: known to be slower.
    Slow,
}

impl Node {
    /// Shell words that print the device of the domain with that number, made if need be.
    pub fn find(self, domain: usize) -> String {
        match self {
            Node::Volume => format!("echo {}", volume(domain)),
            Node::Loop { direct } => {
                let how = if direct { "on" } else { "off" };
                format!("losetup -f --show --direct-io={how} {FILES}/{domain}.raw")
            }
        }
    }
}

impl Image {
    /// The file or device of the domain with that number.
    pub fn path(self, domain: usize) -> String {
        match self {
            Image::Volume => volume(domain),
            Image::Raw => format!("{FILES}/{domain}.raw"),
            Image::Qcow2 => format!("{FILES}/{domain}.qcow2"),
            Image::Overlay => format!("{FILES}/{domain}.overlay"),
            Image::Vhd => format!("{FILES}/{domain}.vhd"),
        }
    }

    /// Its format, as a target names it.
    pub fn format(self) -> &'static str {
        match self {
            Image::Volume | Image::Raw => "raw",
            Image::Qcow2 | Image::Overlay => "qcow2",
            Image::Vhd => "vhd",
        }
    }

    /// What qemu-img makes it of the raw file with.
    pub fn made_by(self) -> Option<&'static [&'static str]> {
        match self {
            Image::Volume | Image::Raw | Image::Overlay => None,
            Image::Qcow2 => Some(&["-O", "qcow2"]),
            Image::Vhd => Some(&["-O", "vpc", "-o", "subformat=dynamic,force_size=on"]),
        }
    }
}

impl Mode {
    /// What `ringtap xen` is told.
    pub fn options(self) -> &'static str {
        match self {
            Mode::Usual => "--cache none",
            Mode::Cached => "--cache writeback",
            Mode::GrantCopy => "--cache none --persistent-grants false",
            Mode::Slow => "--cache none --hold 20",
        }
    }
}

fn volume(domain: usize) -> String {
    format!("/dev/mapper/disk{domain}")
}

/// A disk of a guest of Xen.
#[derive(Debug)]
pub struct Vbd(pub Way);

impl Backend for Vbd {
    fn reach(&self) -> Reach {
        Reach::Inside
    }

    fn missing(&self, env: &Env) -> Option<Missing> {
        match self.0 {
            Way::Blkback(_) | Way::Native => None,
            Way::Emulated(_) | Way::InHvm => env.xen_hvm().err(),
            Way::Ringtap(image, _) => env
                .ringtap_xen()
                .or_else(|| image.made_by().and_then(|_| env.program("qemu-img", "qemu-utils"))),
        }
    }

    fn start(&self, _: &Context<'_>) -> Result<Served> {
        Err(Error::Plan("a disk of Xen's guests is attached by its stage alone".into()))
    }

    fn in_xen(&self) -> Option<Way> {
        Some(self.0)
    }

    fn cached(&self) -> bool {
        match self.0 {
            Way::Blkback(Node::Loop { direct: false }) | Way::Ringtap(_, Mode::Cached) => true,
            // Opened with cache=writeback.
            Way::Emulated(_) => true,
            _ => false,
        }
    }

    fn guest_sets_cache(&self) -> Option<WriteCache> {
        match self.0 {
            Way::Emulated(WriteCache::Off) => Some(WriteCache::Off),
            _ => None,
        }
    }

    fn refuses(&self, workload: &dyn Workload) -> Option<Missing> {
        let refuse = |what: &str| Some(Missing::new(what, "phy-lvm, in a PV guest"));
        match (self.0, workload.client()) {
            (Way::Native, _) if workload.is_pair() => refuse("there is one first domain"),
            (Way::Emulated(_) | Way::InHvm, Client::Dd | Client::Flushes) => None,
            (Way::Emulated(_) | Way::InHvm, _) => refuse("the HVM guest has dd alone"),
            _ => None,
        }
    }

    fn slow_of(&self) -> Option<&'static str> {
        matches!(self.0, Way::Ringtap(_, Mode::Slow)).then_some("tap-raw")
    }

    fn remark(&self) -> Option<&'static str> {
        if self.0 == Way::Native {
            return Some("in Xen's first domain: the client's CPU is the whole machine's");
        }
        Some(
            "served in Xen's first domain: the client's CPU is the whole machine's, server included",
        )
    }
}

const XEN_LVM: Vbd = Vbd(Way::Blkback(Node::Volume));
const XEN_LOOP: Vbd = Vbd(Way::Blkback(Node::Loop { direct: true }));
const XEN_FILE: Vbd = Vbd(Way::Blkback(Node::Loop { direct: false }));
const TAP_LVM: Vbd = Vbd(Way::Ringtap(Image::Volume, Mode::Usual));
const TAP_RAW: Vbd = Vbd(Way::Ringtap(Image::Raw, Mode::Usual));
const TAP_GRANT_COPY: Vbd = Vbd(Way::Ringtap(Image::Raw, Mode::GrantCopy));
const TAP_CACHED: Vbd = Vbd(Way::Ringtap(Image::Raw, Mode::Cached));
const TAP_QCOW2: Vbd = Vbd(Way::Ringtap(Image::Qcow2, Mode::Usual));
const TAP_OVERLAY: Vbd = Vbd(Way::Ringtap(Image::Overlay, Mode::Usual));
const TAP_SLOW: Vbd = Vbd(Way::Ringtap(Image::Raw, Mode::Slow));
const TAP_VHD: Vbd = Vbd(Way::Ringtap(Image::Vhd, Mode::Usual));

/// What this file has for the catalogue.
pub(super) const FILE: File = File {
    entries: &[
        Entry::usual(
            Stage::Xen,
            10,
            "phy-lvm",
            "phy: on an LVM volume (dm-linear), by xen-blkback",
            &XEN_LVM,
        ),
        Entry::usual(
            Stage::Xen,
            20,
            "phy-loop",
            "phy: on a loop device with direct-io=on, by xen-blkback",
            &XEN_LOOP,
        ),
        Entry::usual(
            Stage::Xen,
            30,
            "file",
            "file:, on a loop device as xl makes it, by xen-blkback",
            &XEN_FILE,
        ),
        Entry::usual(
            Stage::Xen,
            40,
            "tap-lvm",
            "ringtap xen on the LVM volume, cache=none",
            &TAP_LVM,
        ),
        Entry::usual(
            Stage::Xen,
            50,
            "tap-raw",
            "ringtap xen on the raw file, cache=none",
            &TAP_RAW,
        ),
        Entry::named(
            Stage::Xen,
            60,
            "tap-grant-copy",
            "the same, without persistent grants",
            &TAP_GRANT_COPY,
        ),
        Entry::usual(
            Stage::Xen,
            70,
            "tap-cached",
            "the same, cache=writeback: what file: becomes",
            &TAP_CACHED,
        ),
        Entry::usual(Stage::Xen, 80, "tap-qcow2", "ringtap xen, qcow2, cache=none", &TAP_QCOW2),
        Entry::usual(
            Stage::Xen,
            90,
            "tap-overlay",
            "ringtap xen, a qcow2 overlay made anew for each load that writes, by `ringtap create -b` (with subclusters)",
            &TAP_OVERLAY,
        ),
        Entry::usual(
            Stage::Xen,
            100,
            "tap-vhd",
            "ringtap xen, a dynamic VHD, cache=none",
            &TAP_VHD,
        ),
        Entry::usual(
            Stage::Xen,
            110,
            "native",
            "natively: the first domain on the LVM volume, with one processor and as much memory as a guest has to spare",
            &Vbd(Way::Native),
        ),
        Entry::named(
            Stage::Xen,
            120,
            "hvm-ide",
            "HVM: IDE emulated by QEMU in the first domain, cache=writeback as xl has it, on the LVM volume",
            &Vbd(Way::Emulated(WriteCache::On)),
        ),
        Entry::named(
            Stage::Xen,
            130,
            "hvm-ide-cache-off",
            "the same, the guest has turned the disk's write cache off",
            &Vbd(Way::Emulated(WriteCache::Off)),
        ),
        Entry::named(
            Stage::Xen,
            140,
            "hvm-pv",
            "HVM with PV drivers: phy: on the LVM volume, by xen-blkback",
            &Vbd(Way::InHvm),
        ),
        Entry::usual(
            Stage::Xen,
            150,
            "tap-slow",
            "tap-raw with each answer held back by 20 % of its time: known to be slower",
            &TAP_SLOW,
        ),
    ],
    labels: &[
        ("phy-lvm", "Xen's blkback, LVM volume"),
        ("phy-loop", "Xen's blkback, loop device"),
        ("file", "Xen's blkback, file:"),
        ("tap-lvm", "Ringtap, LVM volume"),
        ("tap-raw", "Ringtap, raw"),
        ("tap-grant-copy", "Ringtap, raw, grant copies"),
        ("tap-cached", "Ringtap, raw, page cache"),
        ("tap-qcow2", "Ringtap, qcow2"),
        ("tap-overlay", "Ringtap, fresh overlay"),
        ("tap-vhd", "Ringtap, VHD"),
        ("tap-slow", "Ringtap, slowed on purpose"),
        ("hvm-ide", "Xen HVM, IDE"),
        ("hvm-ide-cache-off", "Xen HVM, IDE, write cache off"),
        ("hvm-pv", "Xen HVM, PV drivers"),
    ],
    peers: &[
        Peers { place: 220, stage: Stage::Xen, arm: "tap-raw", against: &["phy-loop", "file"] },
        Peers { place: 230, stage: Stage::Xen, arm: "tap-lvm", against: &["phy-lvm"] },
        Peers {
            place: 240,
            stage: Stage::Xen,
            arm: "tap-grant-copy",
            against: &["phy-loop", "tap-raw"],
        },
        Peers { place: 250, stage: Stage::Xen, arm: "tap-cached", against: &["file"] },
        Peers { place: 260, stage: Stage::Xen, arm: "tap-qcow2", against: &["phy-loop"] },
        Peers { place: 270, stage: Stage::Xen, arm: "tap-overlay", against: &["phy-loop"] },
        Peers { place: 280, stage: Stage::Xen, arm: "tap-vhd", against: &["phy-loop"] },
    ],
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_domain_has_images_of_its_own_and_ways_that_are_compared_share_them() {
        assert_eq!(Image::Raw.path(2), "/srv/2.raw");
        assert!(Node::Loop { direct: true }.find(2).ends_with("--direct-io=on /srv/2.raw"));
        assert_eq!(Node::Volume.find(1), format!("echo {}", Image::Volume.path(1)));
        assert_ne!(Image::Overlay.path(1), Image::Overlay.path(2));
    }

    #[test]
    fn what_goes_through_a_page_cache_says_so() {
        let cached = |way| Vbd(way).cached();
        assert!(cached(Way::Blkback(Node::Loop { direct: false })));
        assert!(cached(Way::Ringtap(Image::Raw, Mode::Cached)));
        assert!(!cached(Way::Blkback(Node::Loop { direct: true })));
        assert!(!cached(Way::Ringtap(Image::Raw, Mode::GrantCopy)));
    }
}
