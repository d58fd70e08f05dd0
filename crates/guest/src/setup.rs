//! The shell lines that turn a fresh guest into one with a root, its shares and its files.

use crate::appliance::Root;
use crate::guest::quote;

/// The kernel's option for where the initramfs is unpacked to: a tmpfs would take half of the memory that the packed one leaves,
/// which in a small guest is less than what is in there.
pub(crate) const RAM: &str = "rootfstype=ramfs";

/// A host directory and where it stands in the guest.
#[derive(Debug, Clone)]
pub(crate) struct Share {
    pub(crate) host: std::path::PathBuf,
    pub(crate) guest: String,
}

/// Lays a tmpfs over the host's root (mounted at /lower by `mount_host`) or over the packed one,
/// and makes the guest's devices, processes and files visible in it.
pub(crate) fn root_script(root: Root, mount_host: &str) -> String {
    let (mount, lower) = match root {
        Root::Host => (mount_host, "/lower"),
        Root::Packed => ("", "/packed"),
    };
    let busybox = match root {
        Root::Host => "",
        Root::Packed => INSTALL_BUSYBOX,
    };
    format!(
        "{mount}
mount -t tmpfs -o mode=755 tmpfs /upper
mkdir /upper/top /upper/work
mount -t overlay -o lowerdir={lower},upperdir=/upper/top,workdir=/upper/work root /root
{SURROUNDINGS}{busybox}cp -a /files/. /root/
mkdir -p /root/run/lock
"
    )
}

/// Makes the packed root the guest's as it is; whatever is written goes to the initramfs.
pub(crate) fn packed_root_script() -> String {
    format!(
        "mount -o bind /packed /root
{SURROUNDINGS}{INSTALL_BUSYBOX}mkdir -p /root/run/lock
"
    )
}

const SURROUNDINGS: &str = "\
for dir in dev proc sys; do mkdir -p /root/$dir; mount -o bind /$dir /root/$dir; done
mount -o bind /dev/pts /root/dev/pts
mount -o bind /dev/shm /root/dev/shm
for dir in tmp run mnt; do mkdir -p /root/$dir; mount -t tmpfs -o mode=1777 tmpfs /root/$dir; done
";

const INSTALL_BUSYBOX: &str = "\
cp /bin/busybox /root/busybox/busybox
chroot /root /busybox/busybox --install -s /busybox
";

/// Mounts one share; `mount` is the mount command without its directory.
pub(crate) fn share_script(share: &Share, mount: &str) -> String {
    let place = quote(&format!("/root/{}", share.guest.trim_start_matches('/')));
    format!("mkdir -p {place}\n{mount} {place}\n")
}
