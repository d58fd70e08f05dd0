//! How long a file may be.

use std::path::Path;

use rustix::process::{Resource, getrlimit};

/// The number by which statfs(2) knows ext2, ext3 and ext4.
const EXT: u64 = 0xef53;

/// Which limit keeps the file at `path` from being `len` bytes long, where it is not for want of room.
pub fn limit_of_length(path: &Path, len: u64) -> Option<String> {
    if let Some(most) = getrlimit(Resource::Fsize).current.filter(|most| *most < len) {
        return Some(format!(
            "this process may write files of {most} bytes at most (ulimit -f, LimitFSIZE= in a unit)"
        ));
    }
    let found = rustix::fs::statfs(path).ok()?;
    #[allow(clippy::unnecessary_cast)] // their widths differ between machines
    let (kind, block) = (found.f_type as u64, found.f_bsize as u64);
    let most = ext4_most(block);
    (kind == EXT && most < len).then(|| {
        format!(
            "ext4 with blocks of {block} bytes holds files of {most} bytes at most: a qcow2 image there \
             may have a larger disk as long as it is not full, and XFS and btrfs hold larger files"
        )
    })
}

/// Source: the kernel's documentation of ext4, "Blocks": a file has fewer than 2^32 blocks.
fn ext4_most(block: u64) -> u64 {
    block * u64::from(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fits_meets_no_limit() {
        assert_eq!(limit_of_length(Path::new("/"), 4096), None);
        assert_eq!(ext4_most(4096), (16 << 40) - 4096);
    }
}
