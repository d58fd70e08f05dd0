//! How Xen's guests are to be served.

use ringtap_image::OpenOptions;

/// How Xen's guests are served.
#[derive(Clone, Debug)]
pub struct XenConfig {
    /// How images are opened, but for what their target says.
    pub options: OpenOptions,
    /// The most rings of a disk.
    pub queues: u16,
    /// Whether guests may have pages kept mapped.
    pub persistent: bool,
    /// Percent of its own time that each answer is held back, for the lab.
    pub hold: u32,
}
