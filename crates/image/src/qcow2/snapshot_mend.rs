//! A broken table of internal snapshots, mended.

use super::rewrite::Rewrite;
use super::snapshot_scan::{Entries, PIECE, Scan};
use super::tool::ToolError;

/// Leave out what is too much, and where entries have to change write the table anew, with the header pointing to it. What it
/// takes now is free then.
pub(super) async fn mend(rewrite: &mut Rewrite<'_, '_, '_>, scan: &Scan) -> Result<(), ToolError> {
    if scan.incomplete + scan.too_long == 0 {
        // What stays is right as it lies there.
        rewrite.image.header.snapshots = scan.kept;
        if scan.astray > 0 {
            rewrite.image.header.snapshots_offset = 0;
        }
        return Ok(());
    }
    let bits = rewrite.image.header.cluster_bits;
    let clusters = scan.len.div_ceil(1 << bits);
    let offset = if clusters == 0 { 0 } else { rewrite.take(clusters).await? };
    let mut entries = Entries::of(rewrite.image);
    let (mut at, mut piece) = (offset, Vec::new());
    for _ in 0..scan.kept {
        let entry = entries.next().await?;
        piece.extend(entry.mended(&rewrite.image.header));
        if piece.len() as u64 >= PIECE {
            rewrite.image.write(at, &piece).await?;
            at += piece.len() as u64;
            piece.clear();
        }
    }
    piece.resize((offset + (clusters << bits) - at) as usize, 0);
    rewrite.image.write(at, &piece).await?;
    for cluster in scan.clusters.iter().cloned().flatten() {
        rewrite.add_or_leave(cluster).await?;
    }
    rewrite.image.header.snapshots = scan.kept;
    rewrite.image.header.snapshots_offset = offset;
    Ok(())
}
