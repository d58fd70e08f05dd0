//! Files of a simulated disk.

use ringtap_image::{Container, Traits};
use ringtap_io::File;
use ringtap_sim::Disk;

/// A file of a simulated disk as images see it.
pub fn container(disk: &Disk, file: File) -> Container {
    let traits = Traits {
        regular: true,
        read_only: false,
        request_alignment: 512,
        memory_alignment: 512,
        logical_block_size: 512,
        physical_block_size: 4096,
    };
    Container::simulated(file, disk.size(file), traits)
}
