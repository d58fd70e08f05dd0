//! Compressed clusters: deflate and zstd, of one cluster at a time.
//!
//! Memory is bounded by the cluster whatever the data says: both decode straight into it.

use std::cell::RefCell;

use flate2::{Compress, Decompress, FlushCompress, FlushDecompress, Status};
use zstd::zstd_safe::{self, CCtx, DCtx};

use super::Compression;
use crate::Error;

/// QEMU's window: some readers keep no more of what they have decoded.
const WINDOW_BITS: u8 = 12;

thread_local! {
    static INFLATE: RefCell<Option<Decompress>> = const { RefCell::new(None) };
    static ZSTD: RefCell<Option<DCtx<'static>>> = const { RefCell::new(None) };
}

/// Decode a compressed cluster: all of `out` from the beginning of `data`, whatever follows there.
pub fn decode(kind: Compression, data: &[u8], out: &mut [u8]) -> Result<(), Error> {
    match kind {
        Compression::Deflate => INFLATE.with_borrow_mut(|inflate| {
            let inflate = inflate.get_or_insert_with(|| Decompress::new(false));
            inflate.reset(false);
            let end = inflate.decompress(data, out, FlushDecompress::Finish);
            match (end, inflate.total_out() == out.len() as u64) {
                (Ok(_), true) => Ok(()),
                _ => Err(Error::Corrupt),
            }
        }),
        Compression::Zstd => ZSTD.with_borrow_mut(|context| {
            let context = match context {
                Some(context) => context,
                None => context.insert(DCtx::try_create().ok_or(Error::Os(libc::ENOMEM))?),
            };
            decode_frames(context, data, out).ok_or(Error::Corrupt)
        }),
    }
}

/// Frame after frame, until `out` is full.
fn decode_frames(context: &mut DCtx<'_>, mut data: &[u8], mut out: &mut [u8]) -> Option<()> {
    while !out.is_empty() {
        let len = zstd_safe::find_frame_compressed_size(data).ok()?;
        let (frame, rest) = data.split_at_checked(len)?;
        let done = context.decompress(out, frame).ok()?;
        // Frames of nothing can go on for ever only as long as the data does.
        out = out.get_mut(done..)?;
        data = rest;
    }
    Some(())
}

/// Compresses clusters, each for itself.
pub struct Encoder(Kind);

enum Kind {
    Deflate(Compress),
    Zstd(CCtx<'static>),
}

impl Encoder {
    /// An encoder of this kind, with the level that QEMU uses.
    pub fn new(kind: Compression) -> Result<Encoder, Error> {
        Ok(Encoder(match kind {
            Compression::Deflate => Kind::Deflate(deflate()),
            Compression::Zstd => Kind::Zstd(CCtx::try_create().ok_or(Error::Os(libc::ENOMEM))?),
        }))
    }

    /// Compress a cluster into `out`, which is as long as it or shorter. Gives the bytes used; none
    /// where that would be all or more, so that the cluster is better stored as it is.
    pub fn encode(&mut self, cluster: &[u8], out: &mut [u8]) -> Option<usize> {
        let most = out.len().min(cluster.len().saturating_sub(1));
        let out = out.get_mut(..most)?;
        match &mut self.0 {
            Kind::Deflate(compress) => {
                compress.reset();
                let end = compress.compress(cluster, out, FlushCompress::Finish);
                if matches!(end, Ok(Status::StreamEnd)) {
                    return Some(compress.total_out() as usize);
                }
                // zlib-rs 0.6 panics later where a stream is reset that has not ended.
                *compress = deflate();
                None
            }
            Kind::Zstd(context) => context.compress(out, cluster, zstd_safe::CLEVEL_DEFAULT).ok(),
        }
    }
}

fn deflate() -> Compress {
    Compress::new_with_window_bits(flate2::Compression::default(), false, WINDOW_BITS)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KINDS: [Compression; 2] = [Compression::Deflate, Compression::Zstd];

    fn text(len: usize) -> Vec<u8> {
        (0..len).map(|at| b"where the bytes of a disk are"[at * at / 7 % 29]).collect()
    }

    #[test]
    fn clusters_come_back() {
        for kind in KINDS {
            let mut encoder = Encoder::new(kind).expect("memory");
            for len in [512, 65536, 2 << 20] {
                for cluster in [text(len), vec![0; len]] {
                    let mut out = vec![0; len];
                    let used = encoder.encode(&cluster, &mut out).expect("it gets smaller");
                    assert!(used < len);
                    // The last sector holds something else after it.
                    out.truncate(used);
                    out.extend([0xd1; 300]);
                    let mut back = vec![1; len];
                    decode(kind, &out, &mut back).expect("it decodes");
                    assert!(back == cluster, "{kind:?} {len}");
                    decode(kind, &out[..used / 2], &mut back).expect_err("cut off");
                }
            }
            let mut rng = fastrand::Rng::with_seed(3);
            let noise: Vec<u8> = (0..65536).map(|_| rng.u8(..)).collect();
            assert_eq!(encoder.encode(&noise, &mut vec![0; 65536]), None, "{kind:?}");
            for len in [512; 200] {
                assert_eq!(encoder.encode(&noise[..len], &mut vec![0; 512]), None, "{kind:?}");
            }
            decode(kind, &noise, &mut vec![0; 65536]).expect_err("noise");
            decode(kind, &[], &mut vec![0; 512]).expect_err("nothing");
        }
    }

    /// A stream that goes on after the cluster is full: megabytes in a few bytes stay unread.
    #[test]
    fn a_bomb_fills_the_cluster_and_no_more() {
        let mut compress = Compress::new(flate2::Compression::best(), false);
        let mut bomb = vec![0; 1 << 20];
        compress.compress(&vec![0; 2 << 20], &mut bomb, FlushCompress::Finish).expect("deflate");
        let mut out = vec![1; 512];
        decode(Compression::Deflate, &bomb, &mut out).expect("the first 512 bytes");
        assert!(out.iter().all(|byte| *byte == 0));
        // A zstd frame says how much it holds, and that is too much.
        let mut bomb = vec![0; 1 << 20];
        let len = zstd_safe::compress(&mut bomb[..], &vec![0; 32 << 20], 1).expect("zstd");
        decode(Compression::Zstd, &bomb[..len], &mut out).expect_err("too large");
    }
}
