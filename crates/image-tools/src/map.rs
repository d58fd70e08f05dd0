//! Where the content of an image lies.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};

use ringtap_image::{CacheMode, Format, Status, on_a_ring};
use ringtap_io::{Holds, Op};
use ringtap_stores::{is_object, is_store, nbd, rbd as ceph};
use ringtap_vbd::{Progress, Vbd};

use crate::{Doing, Error, Reading, Watcher, chain, rbd};

/// A stretch of a disk whose bytes are of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// Where it begins, in bytes of the disk.
    pub start: u64,
    /// Bytes.
    pub length: u64,
    /// The layer that decides: 0 is the image itself.
    pub depth: u32,
    /// Whether any layer says what is there.
    pub present: bool,
    /// Whether it reads as zeros.
    pub zero: bool,
    /// Whether it has bytes of its own, that are no zeros as far as is known.
    pub data: bool,
    /// Whether they are compressed.
    pub compressed: bool,
    /// Where they lie in the file, as they are read.
    pub offset: Option<u64>,
}

impl Stretch {
    fn new(start: u64, status: &Status, deepest: u32) -> Stretch {
        Stretch {
            start,
            length: status.len,
            depth: status.depth.min(deepest),
            present: status.present,
            zero: status.zero,
            data: status.allocated && !status.zero,
            compressed: status.compressed,
            offset: status.at,
        }
    }

    /// Take in the next one, if they are one to a reader.
    pub fn take_in(&mut self, next: &Stretch) -> bool {
        let goes_on = match (self.offset, next.offset) {
            (Some(at), Some(next_at)) => at.checked_add(self.length) == Some(next_at),
            (None, None) => true,
            _ => false,
        };
        let kind = |it: &Stretch| (it.depth, it.present, it.zero, it.data, it.compressed);
        let same = goes_on && kind(self) == kind(next);
        if same {
            self.length += next.length;
        }
        same
    }
}

/// An image that is open, to be mapped.
pub struct Map {
    disk: Vbd,
    path: PathBuf,
    files: Vec<PathBuf>,
}

impl Map {
    /// Open an image.
    pub fn open(
        path: &Path,
        named: Option<Format>,
        reading: &Reading,
        watch: &Watcher,
    ) -> Result<Map, Error> {
        // In this order a server needs to let one client in, not two.
        let files = chain::files(path, named, &reading.names)?;
        let disk = reading.open(path, named, CacheMode::Writeback, watch)?;
        Ok(Map { disk, path: path.to_owned(), files })
    }

    /// The files of the layers, by [`Stretch::depth`].
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// Give `tell` the stretches from an offset on, for so many bytes or to the end, in order and each as long as it can be. A
    /// large map needs no memory. Ends early where `tell` breaks off. `watch` is told how far it is.
    pub fn stretches<B>(
        self,
        start: u64,
        len: Option<u64>,
        watch: &Watcher,
        tell: impl FnMut(Stretch) -> ControlFlow<B>,
    ) -> Result<ControlFlow<B>, Error> {
        let Map { disk, path, files } = self;
        let deepest = files.len().saturating_sub(1) as u32;
        let end = len.map_or(disk.size(), |len| start.saturating_add(len)).min(disk.size());
        let progress = Arc::new(Progress::default());
        watch.begins(end.saturating_sub(start), &progress);
        one_by_one(
            move |send| {
                on_a_ring(&path.clone(), |io| async move {
                    let mut at = start;
                    while at < end {
                        let status = disk.status(&io, at, end - at).await.doing(|| {
                            format!("{}: what lies at {at} cannot be found out", path.display())
                        })?;
                        if send.send(Stretch::new(at, &status, deepest)).is_err() {
                            return Ok(()); // the reader has gone
                        }
                        at += status.len.max(1);
                        progress.set(at - start);
                    }
                    Ok(())
                })?
            },
            tell,
        )
    }
}

/// Give `tell` what `walk` sends, each stretch as long as it can be. They come through a channel: whoever takes them may wait.
fn one_by_one<B>(
    walk: impl FnOnce(SyncSender<Stretch>) -> Result<(), Error> + Send + 'static,
    mut tell: impl FnMut(Stretch) -> ControlFlow<B>,
) -> Result<ControlFlow<B>, Error> {
    let (send, stretches) = sync_channel(1024);
    let walk = std::thread::spawn(move || walk(send));
    let mut last: Option<Stretch> = None;
    for stretch in stretches {
        if last.as_mut().is_some_and(|one| one.take_in(&stretch)) {
            continue;
        }
        if let Some(one) = last.replace(stretch) {
            if let ControlFlow::Break(why) = tell(one) {
                return Ok(ControlFlow::Break(why));
            }
        }
    }
    match walk.join() {
        Ok(end) => end?,
        Err(panic) => std::panic::resume_unwind(panic),
    }
    Ok(last.map_or(ControlFlow::Continue(()), tell))
}

/// What a metadata context of an NBD export says, such as `qemu:dirty-bitmap:NAME`, in the form of what is allocated: its
/// first bit is that there is no data, its second that there are zeros. From an offset on, for so many bytes or to the end, to
/// `tell` as [`Map::stretches`] has it.
///
/// # Errors
///
/// It is no NBD export, or has no such context, or cannot be asked.
pub fn of_context<B>(
    path: &Path,
    named: Option<Format>,
    context: &str,
    (start, len): (u64, Option<u64>),
    tell: impl FnMut(Stretch) -> ControlFlow<B>,
) -> Result<ControlFlow<B>, Error> {
    let name = path.to_string_lossy().into_owned();
    let is_nbd = is_store(path) && !ceph::is_rbd(&name) && !is_object(&name);
    if !is_nbd || named.is_some_and(|format| format != Format::Raw) {
        return Err(Error::usage("--context takes an NBD export, as raw"));
    }
    let uri = nbd::Uri::parse(&name).map_err(Error::Usage)?;
    let store = nbd::open_context(&uri, context)
        .map_err(|error| Error::Refused(format!("{name}: {error}")))?;
    let end = len.map_or(u64::MAX, |len| start.saturating_add(len)).min(store.len());
    let path = path.to_owned();
    let walk = move |send: SyncSender<Stretch>| {
        let file = store.file();
        on_a_ring(&path, move |io| async move {
            let mut at = start;
            while at < end {
                let (offset, len) = (at, end - at);
                let result = io.run(Op::Status { file, offset, len }).await;
                if result < 0 {
                    let error = ringtap_image::Error::from_errno(-result);
                    let why = format!("{name}: what lies at {at} cannot be found out: {error}");
                    return Err(Error::Refused(why));
                }
                let holds = Holds::of_result(result);
                let length = holds.len.clamp(1, len);
                let present = !holds.hole || holds.zero;
                let stretch = Stretch {
                    start: at,
                    length,
                    depth: 0,
                    present,
                    zero: holds.zero,
                    data: !holds.hole,
                    compressed: false,
                    offset: present.then_some(at),
                };
                if send.send(stretch).is_err() {
                    return Ok(()); // the reader has gone
                }
                at += length;
            }
            Ok(())
        })?
    };
    one_by_one(walk, tell)
}

/// What has become another in a raw image of Ceph since a snapshot.
///
/// # Errors
///
/// It is none, or the cluster refuses.
pub fn changes_since(
    path: &Path,
    named: Option<Format>,
    snapshot: &str,
) -> Result<Vec<Stretch>, Error> {
    let Some(name) = rbd::name(path).filter(|_| named.is_none_or(|it| it == Format::Raw)) else {
        let why = "--since takes a raw image of Ceph: of others bitmaps say what has changed";
        return Err(Error::usage(why));
    };
    let changes = rbd::snapshots::changes(name, snapshot);
    let changes = changes.map_err(|why| Error::Refused(format!("{name}: {why}")))?;
    let stretch = |change: rbd::snapshots::Change| Stretch {
        start: change.offset,
        length: change.len,
        depth: 0,
        present: true,
        zero: change.zero,
        data: !change.zero,
        compressed: false,
        offset: Some(change.offset),
    };
    Ok(changes.into_iter().map(stretch).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unwatched;

    #[test]
    fn holes_and_data_come_in_order_until_the_caller_has_enough() {
        use std::os::unix::fs::FileExt;
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("a.raw");
        let file = std::fs::File::create(&path).expect("a file");
        file.set_len(4 << 20)
            .and_then(|()| file.write_all_at(&[1; 1 << 20], 1 << 20))
            .expect("written");
        let open = || {
            Map::open(&path, Some(Format::Raw), &Reading::default(), &unwatched()).expect("opened")
        };
        assert_eq!(open().files(), std::slice::from_ref(&path));
        let mut found = vec![];
        let end = open().stretches(0, None, &unwatched(), |stretch| {
            found.push((stretch.start, stretch.length, stretch.data));
            ControlFlow::<()>::Continue(())
        });
        assert_eq!(end.expect("mapped"), ControlFlow::Continue(()));
        const MIB: u64 = 1 << 20;
        assert_eq!(found, [(0, MIB, false), (MIB, MIB, true), (2 * MIB, 2 * MIB, false)]);
        let end =
            open().stretches(MIB, Some(2 * MIB), &unwatched(), |it| ControlFlow::Break(it.length));
        assert_eq!(end.expect("mapped"), ControlFlow::Break(MIB));
    }
}
