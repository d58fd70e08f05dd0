//! A qcow2 image whose clusters lie out of order, as random first writes leave them, made from one
//! in which they lie in order.

use anyhow::{Context, Result};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Of an L1 entry, where the L2 table lies.
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

/// Exchange each two neighbours in every L2 table (docs/interop/qcow2 of QEMU: header and cluster
/// mapping). The image stays consistent: each cluster keeps its one reference.
pub fn scatter(image: &Path) -> Result<()> {
    let failed = || format!("cannot rewrite the tables of {}", image.display());
    let file = File::options().read(true).write(true).open(image).with_context(failed)?;
    let mut header = [0; 48];
    file.read_exact_at(&mut header, 0).with_context(failed)?;
    let (cluster_bits, l1_size) = (be32(&header[20..]), be32(&header[36..]));
    let mut l1 = vec![0; l1_size as usize * 8];
    file.read_exact_at(&mut l1, be64(&header[40..])).with_context(failed)?;
    let mut table = vec![0; 1 << cluster_bits];
    for entry in l1.chunks_exact(8) {
        let at = be64(entry) & OFFSET;
        if at == 0 {
            continue;
        }
        file.read_exact_at(&mut table, at).with_context(failed)?;
        for pair in table.chunks_exact_mut(16) {
            pair.rotate_left(8);
        }
        file.write_all_at(&table, at).with_context(failed)?;
    }
    Ok(())
}

fn be32(bytes: &[u8]) -> u32 {
    bytes[..4].iter().fold(0, |sum, byte| sum << 8 | u32::from(*byte))
}

fn be64(bytes: &[u8]) -> u64 {
    bytes[..8].iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    fn qemu_img(words: &[&str]) {
        let end = Command::new("qemu-img").args(words).output().unwrap();
        assert!(end.status.success(), "{}", String::from_utf8_lossy(&end.stderr));
    }

    #[test]
    fn what_is_out_of_order_is_still_sound() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("i.qcow2");
        let image = path.display().to_string();
        qemu_img(&["create", "-q", "-f", "qcow2", "-o", "preallocation=metadata", &image, "64M"]);
        let map = || Command::new("qemu-img").args(["map", "--output", "json", &image]).output();
        let before = map().unwrap().stdout;
        scatter(&path).unwrap();
        qemu_img(&["check", "-q", &image]);
        let after = map().unwrap().stdout;
        let runs = |map: &[u8]| map.iter().filter(|byte| **byte == b'{').count();
        assert!(runs(&after) > 1000 && runs(&before) < 100);
    }
}
