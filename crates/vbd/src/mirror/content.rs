//! What a disk holds, on its way to the target.

use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use ringtap_io::{Buffer, Io};

use super::error::MirrorError;
use super::target::{Bytes, Target};
use crate::bytes::{is_zero, runs};
use crate::level::Pass;

/// Zeros of so many bytes are not written.
const SPARSE: usize = 4096;

/// What the disk holds from an offset on.
pub(crate) enum Content {
    /// Nothing that concerns the copy.
    Other,
    Zeros,
    Data(Rc<Buffer>),
}

/// The next part of a range: how many bytes, and what they are. Data comes in pieces of `most` bytes.
pub(crate) async fn look(
    io: &Io,
    pass: Pass<'_>,
    range: Range<u64>,
    most: u64,
    above: Option<u32>,
) -> Result<(u64, Content), MirrorError> {
    let (offset, len) = (range.start, range.end - range.start);
    let status = pass.image.status(io, offset, len).await;
    let status = status.map_err(|error| MirrorError::Status { offset, error })?;
    if above.is_some_and(|above| status.depth >= above) {
        return Ok((status.len, Content::Other));
    }
    if status.zero {
        return Ok((status.len, Content::Zeros));
    }
    let len = status.len.min(most - offset % most);
    let buffer = io.buffer(len as usize).map_err(|_| MirrorError::Memory { len })?;
    let read = pass.read(io, offset, buffer.mem()).await;
    read.map_err(|error| MirrorError::Read { offset, len, error })?;
    Ok((len, Content::Data(Rc::new(buffer))))
}

/// Have the target hold that.
pub(crate) async fn give<K: Clone + 'static>(
    io: &Io,
    target: &Arc<Target>,
    offset: u64,
    len: u64,
    content: Content,
    zeroed: bool,
    keep: &K,
) -> Result<(), MirrorError> {
    let zeros = async |offset: u64, len: u64| match zeroed {
        true => Ok(()),
        false => target.write(io, offset, Bytes::Zeros(len), keep.clone()).await,
    };
    match content {
        Content::Other => Ok(()),
        Content::Zeros => zeros(offset, len).await,
        Content::Data(buffer) => {
            let bytes = buffer.clone();
            for run in runs(len as usize, SPARSE, |range| is_zero(&bytes.bytes()[range])) {
                let (at, len) = (offset + run.from as u64, run.to - run.from);
                match run.chosen {
                    true => zeros(at, len as u64).await?,
                    false => {
                        let part = Bytes::There(buffer.clone(), run.from, len);
                        target.write(io, at, part, keep.clone()).await?;
                    }
                }
            }
            Ok(())
        }
    }
}
