//! What a front-end may not do to others.

use super::Backend;

impl Backend {
    /// Whether the disk's writes have to be stable for it. Who cannot write has no say in how others do.
    pub(super) fn writes_through(&self) -> bool {
        let caches = self.flushes && self.cache_wanted;
        !caches && !self.vbd.info().read_only
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::Options;
    use super::*;
    use ringtap_image::{CacheMode, Null};
    use ringtap_vbd::{Disk, Vbd};
    use vhost::vhost_user::VhostUserBackendReqHandlerMut;
    use vhost::vhost_user::message::VhostUserConfigFlags;
    use virtio_bindings::bindings::virtio_config::VIRTIO_F_VERSION_1;

    #[test]
    fn a_front_end_that_cannot_write_leaves_others_their_write_cache() {
        let vbd = Disk::from(Vbd::new(Box::new(Null::new(1 << 30, true)), CacheMode::Writeback));
        let mut backend = Backend::new(vbd.clone(), Options::default());
        backend.set_features(1 << VIRTIO_F_VERSION_1).expect("offered");
        assert!(vbd.write_cache(), "it cannot flush, and need not");
        backend.set_config(32, &[0], VhostUserConfigFlags::WRITABLE).expect("it may");
        assert!(vbd.write_cache() && !backend.shows_cache(), "it turned its own off");
    }
}
