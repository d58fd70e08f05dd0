//! Files of simulated disks as images see them, and images in them.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use ringtap_image::qcow2::{CreateOptions, create};
use ringtap_image::{Container, Image, Raw, RestartLog, Traits};
use ringtap_io::File;
use ringtap_sim::{Bench, Disk};

/// A file that is read and written in blocks of so many bytes, as under O_DIRECT; 1 takes all.
#[allow(dead_code)]
pub fn blocks(align: u64) -> Traits {
    let memory_alignment = align.min(512) as usize;
    Traits { request_alignment: align, memory_alignment, ..Traits::FILE }
}

/// A file in blocks of 512 bytes.
#[allow(dead_code)]
pub fn container(disk: &Disk, file: File) -> Container {
    Container::simulated(file, disk.size(file), blocks(512))
}

/// A raw image that is such a file.
#[allow(dead_code)]
pub fn raw(disk: &Disk, file: File) -> Box<dyn Image> {
    Box::new(Raw::new(container(disk, file)))
}

/// A file in blocks of 512 bytes, of which is seen when it was last written to.
#[allow(dead_code)]
pub fn timed(disk: &Disk, file: File) -> Container {
    let clock = disk.clone();
    container(disk, file).with_time(move || clock.modified(file))
}

/// Memory for a restart log of so many records.
#[allow(dead_code)]
pub fn log_memory(records: u64) -> Arc<[AtomicU64]> {
    (0..RestartLog::words_for(records)).map(|_| AtomicU64::new(0)).collect()
}

/// Make a qcow2 image in a file, stable.
#[allow(dead_code)]
pub fn make(bench: &impl Bench, file: File, options: CreateOptions) {
    let image = container(bench.disk(), file);
    bench.alone(async move |io| {
        create(&io, &image, None, &options).await.expect("an image");
        io.sync(file).await.expect("stable");
    });
}
