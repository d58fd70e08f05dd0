//! Who a front-end is, and whether it shares the memory it hands over.

use std::fmt;
use std::fs::File;
use std::os::fd::AsFd;

use ringtap_sandbox::ask;
use rustix::net::sockopt;

/// What to tell whose guest cannot be served.
pub(crate) const SHARE: &str = "add share=on to the guest's memory (QEMU: -object \
     memory-backend-memfd,id=mem,size=SIZE,share=on -machine memory-backend=mem; Cloud Hypervisor: \
     --memory size=SIZE,shared=on; libvirt: <access mode='shared'/>)";

/// A front-end's process, where it is visible here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Peer(Option<i32>);

impl Peer {
    /// Who has connected.
    pub(crate) fn of(socket: impl AsFd) -> Peer {
        let found = sockopt::socket_peercred(socket).ok();
        Peer(found.map(|found| found.pid.as_raw_nonzero().get()).filter(|id| *id > 0))
    }

    /// Whether the front-end has mapped that file at its own address so that it sees no change of ours, nor
    /// we one of its guest's. Where that cannot be seen it is believed that it has not.
    pub(crate) fn keeps_private(self, file: &File, address: u64) -> bool {
        let process = self.0.and_then(|id| u32::try_from(id).ok());
        process.is_some_and(|id| ask::keeps_private(id, file.as_fd(), address))
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            None => f.write_str("a process that is not visible here"),
            Some(id) => {
                let name = std::fs::read_to_string(format!("/proc/{id}/comm")).unwrap_or_default();
                write!(f, "process {id} ({})", name.trim())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;

    use rustix::fs::{MemfdFlags, memfd_create};
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

    #[test]
    fn memory_that_is_mapped_privately_is_seen() {
        const SIZE: usize = 1 << 16;
        let (ours, _theirs) = UnixStream::pair().expect("a pair");
        let peer = Peer::of(&ours);
        assert_eq!(peer.0, i32::try_from(std::process::id()).ok());
        let file: OwnedFd = memfd_create("guest", MemfdFlags::CLOEXEC).expect("memory");
        let file = File::from(file);
        file.set_len(SIZE as u64).expect("its size");
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        for (flags, private) in [(MapFlags::PRIVATE, true), (MapFlags::SHARED, false)] {
            // SAFETY: a new mapping, where the kernel finds room; nothing is read or written there.
            let at = unsafe { mmap(std::ptr::null_mut(), SIZE, rights, flags, &file, 0) };
            let at = at.expect("a mapping");
            assert_eq!(peer.keeps_private(&file, at as u64 + 4096), private);
            // SAFETY: the mapping made above, which nobody uses.
            unsafe { munmap(at, SIZE) }.expect("unmapped");
        }
    }
}
