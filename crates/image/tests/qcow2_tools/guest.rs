//! What the guest sees in an image without a backing file, read in the plainest way.

use ringtap_image::qcow2::compressed::decode;
use ringtap_image::qcow2::header::{COMPRESSED, OFFSET_MASK, ZERO};
use ringtap_image::qcow2::{Header, snapshot_table};

pub fn be64(bytes: &[u8], at: u64) -> u64 {
    let at = at as usize;
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

pub fn put64(bytes: &mut [u8], at: u64, value: u64) {
    bytes[at as usize..at as usize + 8].copy_from_slice(&value.to_be_bytes());
}

pub fn header(image: &[u8]) -> Header {
    Header::parse(image).expect("a header")
}

/// Where the L2 entry of a guest cluster lies in the file.
pub fn l2_entry_at(image: &[u8], cluster: u64) -> u64 {
    let header = header(image);
    let (index, rest) = (cluster / header.l2_entries(), cluster % header.l2_entries());
    let table = be64(image, header.l1_offset + index * 8) & OFFSET_MASK;
    assert_ne!(table, 0, "the cluster is mapped");
    table + rest * header.l2_entry_size()
}

/// The disk's content.
pub fn content(image: &[u8]) -> Vec<u8> {
    let header = header(image);
    content_of(image, header.l1_offset, u64::from(header.l1_size), header.size)
}

/// The names of the snapshots and what they hold.
pub fn snapshots(image: &[u8]) -> Vec<(String, Vec<u8>)> {
    let header = header(image);
    let table = &image[header.snapshots_offset as usize..];
    let parsed = snapshot_table::parse(table, header.snapshots).expect("whole").expect("sane");
    let content = parsed.0.into_iter().map(|snapshot| {
        let size = snapshot.disk_size.expect("its size");
        let l1_size = u64::from(snapshot.l1_size);
        (snapshot.name, content_of(image, snapshot.l1_offset, l1_size, size))
    });
    content.collect()
}

fn content_of(image: &[u8], l1_offset: u64, l1_size: u64, size: u64) -> Vec<u8> {
    let header = header(image);
    let cluster = header.cluster_size();
    let mut content = vec![0; size as usize];
    for (number, to) in (0..).zip(content.chunks_mut(cluster as usize)) {
        let (index, rest) = (number / header.l2_entries(), number % header.l2_entries());
        assert!(index < l1_size);
        let table = be64(image, l1_offset + index * 8) & OFFSET_MASK;
        if table == 0 {
            continue;
        }
        let at = table + rest * header.l2_entry_size();
        let entry = be64(image, at);
        if entry & COMPRESSED != 0 {
            let (offset, len) = header.compressed_extent(entry);
            let end = image.len().min((offset + len) as usize);
            let mut whole = vec![0; cluster as usize];
            let decoded = decode(header.compression, &image[offset as usize..end], &mut whole);
            decoded.expect("it decodes");
            to.copy_from_slice(&whole[..to.len()]);
            continue;
        }
        let host = entry & OFFSET_MASK;
        let len = to.len() as u64;
        // A file may end inside its last cluster.
        let mut from = image[(host as usize).min(image.len())..].to_vec();
        from.resize(len as usize, 0);
        if header.extended_l2() {
            let bitmap = be64(image, at + 8);
            let subcluster = header.subcluster_size() as usize;
            for (bit, to) in to.chunks_mut(subcluster).enumerate() {
                if bitmap >> bit & 1 == 1 {
                    to.copy_from_slice(&from[bit * subcluster..][..to.len()]);
                }
            }
        } else if host != 0 && entry & ZERO == 0 {
            to.copy_from_slice(&from);
        }
    }
    content
}
