//! The guest's memory, as the front-end shares it, and addresses within it.

use std::fs::File;
use std::sync::Arc;

use vhost::vhost_user::Error;
use vhost::vhost_user::message::VhostUserMemoryRegion;

use super::mapping::{Mapping, Maps};

/// One region of guest memory, mapped into this process.
#[derive(Clone)]
pub(crate) struct Region {
    guest: u64,
    user: u64,
    size: u64,
    /// Where in its file it begins.
    offset: u64,
    /// Its file, where that is kept.
    file: Option<Arc<File>>,
    mapping: Arc<Mapping>,
}

impl Region {
    /// Map a region that the front-end describes; `file` must reach to its end.
    pub(crate) fn map(
        region: &VhostUserMemoryRegion,
        file: &File,
        maps: &Maps,
    ) -> vhost::vhost_user::Result<Region> {
        let VhostUserMemoryRegion { guest_phys_addr, user_addr, memory_size, mmap_offset } =
            *region;
        let mapping = Mapping::new(file, mmap_offset, memory_size, maps)
            .map_err(|error| Error::ReqHandlerError(std::io::Error::other(error)))?;
        let mapping = Arc::new(mapping);
        let (guest, user, size, offset) = (guest_phys_addr, user_addr, memory_size, mmap_offset);
        Ok(Region { guest, user, size, offset, file: None, mapping })
    }

    /// The same, whose file is kept.
    pub(crate) fn of(self, file: Option<Arc<File>>) -> Region {
        Region { file, ..self }
    }

    /// How a front-end describes it (guest address, size, its own address, offset in the file), and the file where
    /// that is kept.
    pub(crate) fn source(&self) -> ([u64; 4], Option<&File>) {
        ([self.guest, self.size, self.user, self.offset], self.file.as_deref())
    }

    /// Whether it is the region the front-end means.
    pub(crate) fn is(&self, region: &VhostUserMemoryRegion) -> bool {
        let VhostUserMemoryRegion { guest_phys_addr, user_addr, memory_size, .. } = *region;
        (self.guest, self.user, self.size) == (guest_phys_addr, user_addr, memory_size)
    }

    fn is_cut(&self) -> bool {
        self.mapping.is_cut()
    }

    /// Bytes from `address` (counted from `base`) to the region's end, and where they are.
    #[inline]
    fn at(&self, base: u64, address: u64) -> Option<(*mut u8, u64)> {
        let offset = address.wrapping_sub(base);
        let inside = offset < self.size;
        inside.then(|| (self.mapping.base().wrapping_add(offset as usize), self.size - offset))
    }
}

/// The whole of a guest's memory. While a value lives its regions stay mapped.
#[derive(Clone, Default)]
pub(crate) struct Memory {
    regions: Vec<Region>,
}

impl Memory {
    pub(crate) fn new(regions: Vec<Region>) -> Memory {
        Memory { regions }
    }

    pub(crate) fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// Whether its front-end cut a part of it short.
    pub(crate) fn is_cut(&self) -> bool {
        self.regions.iter().any(Region::is_cut)
    }

    /// Call `each` with every contiguous piece of `len` bytes at a guest address; false where some
    /// of them are not the guest's memory.
    #[inline]
    pub(crate) fn pieces(
        &self,
        mut address: u64,
        mut len: u64,
        mut each: impl FnMut(*mut u8, u64),
    ) -> bool {
        while len > 0 {
            let Some((base, most)) = self.regions.iter().find_map(|r| r.at(r.guest, address))
            else {
                return false;
            };
            let piece = len.min(most);
            each(base, piece);
            len -= piece;
            // Cannot overflow: the front-end's regions end below 2^64.
            address = address.wrapping_add(piece);
        }
        true
    }

    /// Call `each` with every piece of guest addresses that `len` bytes of this process's are: what
    /// [`Memory::pieces`] gave, the other way round.
    pub(crate) fn guest_pieces(
        &self,
        mut base: *const u8,
        mut len: u64,
        mut each: impl FnMut(u64, u64),
    ) {
        while len > 0 {
            let within = |region: &Region| {
                let offset = (base as u64).wrapping_sub(region.mapping.base() as u64);
                (offset < region.size).then(|| (region.guest + offset, region.size - offset))
            };
            let Some((guest, most)) = self.regions.iter().find_map(within) else { return };
            let piece = len.min(most);
            each(guest, piece);
            len -= piece;
            base = base.wrapping_add(piece as usize);
        }
    }

    /// The address behind the guest's last.
    pub(crate) fn end(&self) -> u64 {
        self.regions
            .iter()
            .map(|region| region.guest.saturating_add(region.size))
            .max()
            .unwrap_or(0)
    }

    /// Where `len` contiguous bytes at an address of the front-end's own process are.
    pub(crate) fn at_user_address(&self, address: u64, len: u64) -> Option<*mut u8> {
        let (base, most) = self.regions.iter().find_map(|r| r.at(r.user, address))?;
        (len <= most).then_some(base)
    }
}
