//! Images of Ceph.

/// Have this process open them.
pub(crate) fn start() {
    #[cfg(feature = "rbd")]
    ringtap_rbd::start();
}
