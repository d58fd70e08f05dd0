//! What happens to disks at one moment, at which all of them stand still: changes of their bitmaps, and backups that begin.

use std::fmt::Display;
use std::path::Path;
use std::time::Duration;

use ringtap_image::CacheMode;
use ringtap_image::bitmap_store::KeptIn;
use ringtap_image::record::Transaction;
use ringtap_io::{Io, Tasks};
use ringtap_vbd::{
    Backup, BitmapChange, Breaks, Busy, DirtyBitmap, LeftMarks, Moment, OnErrors, Quiesced,
    Scratch, StagedBitmaps, Successor, Vbd,
};

use crate::chain::{REST, STILL, TRIES};
use crate::scratch::ScratchAt;
use crate::{Disk, Error, checkpoints};

/// A backup that is to begin.
pub(crate) struct Wanted {
    pub(crate) to: ringtap_vbd::Disk,
    /// Only what is marked in this is saved.
    pub(crate) by: Option<String>,
    /// Whether its marks are to be as if it had been cleared at the moment, once the backup has ended.
    pub(crate) clears: bool,
    /// The moment is only kept, and shown, and so many bytes are saved at most.
    pub(crate) held: Option<Option<u64>>,
    /// Where guests' changes have old content set aside until the target has it; none: they wait for the target.
    pub(crate) scratch: Option<ScratchAt>,
    /// Whether the target reads as zeros.
    pub(crate) zeroed: bool,
    /// How long a guest's write may wait for the target; as long as it takes where there is none.
    pub(crate) limit: Option<Duration>,
    /// What breaks then, or where the target fails.
    pub(crate) breaks: Breaks,
    /// What becomes of a job that meets an error.
    pub(crate) on_errors: OnErrors,
}

/// One disk's part.
pub(crate) struct Part {
    pub(crate) disk: Disk,
    pub(crate) vbd: ringtap_vbd::Disk,
    pub(crate) changes: Vec<BitmapChange>,
    /// Whether a persistent bitmap is added.
    pub(crate) keeps: bool,
    pub(crate) backups: Vec<Wanted>,
}

/// A backup that has begun.
pub(crate) struct Begun {
    pub(crate) moment: Moment,
    /// What the moment is read by, where it is only kept.
    pub(crate) shown: Option<ringtap_vbd::Disk>,
}

/// Do it, on this thread; gives each disk's backups.
pub(crate) fn at_one_moment(parts: Vec<Part>) -> Result<Vec<Vec<Begun>>, Error> {
    let mut tasks = Tasks::new(ringtap_io::reactor().map_err(Error::Ring)?);
    let io = tasks.io().clone();
    let driven = |source| Error::Process { tried: "drive the io_uring", source };
    tasks.block_on(async move { begin(&io, parts).await }).map_err(driven)?
}

fn failed(part: &Part, why: impl ToString) -> Error {
    let (path, why) = (part.disk.path.clone(), why.to_string());
    match part.backups.is_empty() {
        true => Error::Bitmaps { path, why },
        false => Error::Backup { path, why },
    }
}

async fn begin(io: &Io, mut parts: Vec<Part>) -> Result<Vec<Vec<Begun>>, Error> {
    for part in parts.iter().filter(|part| part.keeps && !part.vbd.keeps_bitmaps()) {
        keep(io, part).await?;
    }
    let mut scratch = make_scratch(&parts)?.into_iter();
    let mut staged = vec![];
    for part in &mut parts {
        let changes = std::mem::take(&mut part.changes);
        let one = part.vbd.stage_bitmaps(io, changes).await;
        staged.push(one.map_err(|error| failed(part, error))?);
    }
    let own: Vec<Vbd> = parts.iter().map(|part| part.vbd.fork()).collect();
    let still = stand_still(io, &parts, &own).await?;
    let mut begun = vec![];
    for ((part, staged), still) in parts.iter().zip(&staged).zip(&still) {
        staged.switch(still).await;
        let scratch = scratch.by_ref().take(part.backups.len());
        match begin_backups(part, staged, still, scratch) {
            Ok(own) => begun.push(own),
            Err(error) => return Err(error),
        }
    }
    drop(still);
    commit(io, &parts, staged).await.map(|()| begun)
}

/// Make the changes stable: those of all disks, or none, wherever the server is killed or the power is cut.
async fn commit(io: &Io, parts: &[Part], mut staged: Vec<StagedBitmaps>) -> Result<(), Error> {
    let unstable = |part: &Part, error: &dyn Display| {
        Err(failed(part, format!("the bitmaps cannot be made stable: {error}")))
    };
    let kept = parts.iter().zip(&staged).filter(|(_, one)| one.is_kept());
    let images: Vec<&Path> = kept.map(|(part, _)| &*part.disk.path).collect();
    let together = match (images.len() > 1).then(|| Transaction::begin(&images)).transpose() {
        Ok(together) => together,
        Err(error) => return unstable(&parts[0], &error),
    };
    let (mut end, mut number) = (Ok(()), 0);
    let mut begins = vec![];
    for (part, one) in parts.iter().zip(&mut staged) {
        let of = together.as_ref().filter(|_| one.is_kept()).map(|together| together.part(number));
        number += usize::from(one.is_kept());
        begins.push(of.clone());
        if let Err(error) = one.put(io, of).await {
            end = unstable(part, &error);
            break;
        }
    }
    // What may find no room is written. From here on one header for each disk says that it is so.
    let mut presented: Vec<StagedBitmaps> = vec![];
    for ((part, mut one), of) in parts.iter().zip(staged).zip(begins) {
        if end.is_err() {
            break;
        }
        let begins = together.as_ref().zip(of).map(|(together, of)| together.writes_down(&of));
        if let Err(error) = begins.unwrap_or(Ok(())) {
            end = unstable(part, &error);
            break;
        }
        match one.present(io).await {
            Ok(()) => presented.push(one),
            Err(error) => end = unstable(part, &error),
        }
    }
    if let (Ok(()), Some(together)) = (&end, &together) {
        if let Err(error) = together.decide() {
            end = unstable(&parts[0], &error);
            let recalled = together.recall();
            recalled.inspect_err(|error| tracing::warn!("{error}")).unwrap_or_default();
        }
    }
    if end.is_ok() {
        presented.into_iter().for_each(StagedBitmaps::finish);
        return end;
    }
    for (before, one) in parts.iter().zip(presented) {
        let _disk = before.vbd.span().enter();
        one.take_back(io).await;
    }
    together.into_iter().for_each(Transaction::call_off);
    end
}

/// A disk's bitmaps are kept from now on.
async fn keep(io: &Io, part: &Part) -> Result<(), Error> {
    loop {
        let kept = checkpoints::begin(&part.vbd)?;
        if keep_in(io, part, kept).await? {
            return Ok(());
        }
    }
}

/// They are kept there; false where a job has had the disk go on in another image meanwhile.
async fn keep_in(io: &Io, part: &Part, kept: KeptIn) -> Result<bool, Error> {
    let own = part.vbd.fork();
    // Who changes bitmaps has the disk stand still: their turn comes before it does.
    let _alone = part.vbd.bitmaps_alone().await;
    let _still = stand_still(io, std::slice::from_ref(part), std::slice::from_ref(&own)).await?;
    if !checkpoints::is_there(&part.vbd, &kept) {
        return Ok(false);
    }
    let end = part.vbd.keep_bitmaps(io, kept).await;
    end.map_err(|error| failed(part, error))?;
    checkpoints::begun(&part.vbd);
    Ok(true)
}

async fn stand_still<'a>(
    io: &Io,
    parts: &[Part],
    own: &'a [Vbd],
) -> Result<Vec<Quiesced<'a>>, Error> {
    for tries in 1.. {
        let mut still = vec![];
        for (part, vbd) in parts.iter().zip(own) {
            match vbd.quiesce(io, STILL).await {
                Ok(quiesced) => still.push(quiesced),
                Err(Busy::Late) if tries < TRIES => break,
                Err(busy) => return Err(failed(part, busy)),
            }
        }
        if still.len() == own.len() {
            return Ok(still);
        }
        drop(still);
        io.sleep(REST).await;
    }
    Ok(vec![])
}

/// What backups set aside in: of each, if it is to have some. Before disks stand still, for it takes a while.
fn make_scratch(parts: &[Part]) -> Result<Vec<Option<Scratch>>, Error> {
    let all = parts.iter().flat_map(|part| part.backups.iter().map(move |wanted| (part, wanted)));
    let made = all.map(|(part, wanted)| {
        // What nobody writes to changes not.
        let scratch = wanted.scratch.as_ref().filter(|_| !part.vbd.is_read_only());
        let Some(at) = scratch else { return Ok(None) };
        match at.make(part.vbd.size()) {
            Ok(scratch) => Ok(Some(scratch)),
            Err(why) if at.folder.is_some() => Err(failed(part, why)),
            // Nobody has asked for it.
            Err(why) => {
                let _disk = part.vbd.span().enter();
                tracing::warn!("guests wait for the target of a backup: {why}");
                Ok(None)
            }
        }
    });
    made.collect()
}

fn begin_backups(
    part: &Part,
    staged: &StagedBitmaps,
    still: &Quiesced<'_>,
    scratch: impl Iterator<Item = Option<Scratch>>,
) -> Result<Vec<Begun>, Error> {
    let all = part.backups.iter().zip(scratch);
    all.map(|(wanted, scratch)| {
        let mut begun = begin_backup(part, wanted, staged, still)?;
        if let Some(scratch) = scratch {
            begun.moment = begun.moment.with_scratch(scratch);
        }
        Ok(begun)
    })
    .collect()
}

/// What a moment is read by, with these as bitmaps of it.
pub(crate) fn shown(moment: &Moment, marks: &[LeftMarks]) -> ringtap_vbd::Disk {
    Vbd::new(moment.image(marks), CacheMode::Writeback).disk().clone()
}

fn begin_backup(
    part: &Part,
    wanted: &Wanted,
    staged: &StagedBitmaps,
    still: &Quiesced<'_>,
) -> Result<Begun, Error> {
    let found = |name: &String| staged.after().iter().find(|one| one.name == *name);
    let by: Option<&DirtyBitmap> = match &wanted.by {
        None => None,
        Some(name) => {
            Some(found(name).ok_or_else(|| failed(part, format!("the bitmap '{name}' is gone")))?)
        }
    };
    let backup = Backup {
        changed: by.map(|by| by.marks.clone()),
        keeps_marks: true,
        room: wanted.held.flatten(),
        zeroed: wanted.zeroed,
        limit: wanted.limit.map(|limit| u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX)),
        breaks: wanted.breaks,
        on_errors: wanted.on_errors,
        ..Backup::new(part.vbd.clone(), wanted.to.clone())
    };
    let mut moment = backup.begin_still(still).map_err(|error| failed(part, error))?;
    let shown = wanted.held.map(|_| {
        let valid = staged.after().iter().filter(|one| one.lost.is_none());
        let marks: Vec<_> = valid.map(DirtyBitmap::left).collect();
        shown(&moment, &marks)
    });
    // The bitmap is to be as if it had been cleared at the moment.
    if let Some(by) = by.filter(|_| wanted.clears) {
        moment.succeed_bitmap(by, still);
    }
    Ok(Begun { moment, shown })
}

/// A backup has ended well: its bitmap has the marks since its moment alone.
pub(crate) async fn cleared(io: &Io, disk: &Disk, vbd: &ringtap_vbd::Disk, successor: &Successor) {
    let (name, marks) = (successor.name().to_owned(), successor.marks().clone());
    let change = BitmapChange::Replace(name, marks);
    if let Err(error) = changed(io, disk, vbd, change).await {
        tracing::warn!("the backup is whole, and its bitmap keeps what was marked before: {error}");
    }
}

/// A backup has not ended well: the bitmap that was made at its moment says nothing of any copy.
pub(crate) async fn withdrawn(io: &Io, disk: &Disk, vbd: &ringtap_vbd::Disk, name: String) {
    if !vbd.dirty_bitmaps().iter().any(|bitmap| bitmap.name == name) {
        return;
    }
    if let Err(error) = changed(io, disk, vbd, BitmapChange::Remove(name)).await {
        tracing::warn!(
            "there is no backup from which a checkpoint could go on, and it stays: {error}"
        );
    }
}

async fn changed(
    io: &Io,
    disk: &Disk,
    vbd: &ringtap_vbd::Disk,
    change: BitmapChange,
) -> Result<(), Error> {
    let (disk, vbd, changes) = (disk.clone(), vbd.clone(), vec![change]);
    let part = Part { disk, vbd, changes, keeps: false, backups: vec![] };
    begin(io, vec![part]).await.map(drop)
}

#[cfg(test)]
mod tests {
    use ringtap_image::{Format, OpenOptions, open};

    use super::*;

    /// A job has the disk go on elsewhere just as its bitmaps are about to be kept.
    #[test]
    fn bitmaps_are_kept_of_the_image_that_a_disk_is_in_by_then() {
        let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
        let options = OpenOptions {
            format: Some(Format::Raw),
            cache: CacheMode::Writeback,
            ..OpenOptions::default()
        };
        let [before, after] = ["before", "after"].map(|name| {
            let path = dir.path().join(name);
            let file = std::fs::File::create(&path).expect("a file");
            file.set_len(1 << 20).expect("its size");
            (open(&path, &options).expect("an image"), path)
        });
        let vbd = Vbd::new(before.0, CacheMode::Writeback).disk().clone();
        let disk = Disk::new(before.1, options);
        let part = Part { disk, vbd, changes: vec![], keeps: true, backups: vec![] };
        let mut tasks = Tasks::new(ringtap_io::reactor().expect("a reactor"));
        let io = tasks.io().clone();
        let end = tasks.block_on(async move {
            let kept = checkpoints::begin(&part.vbd).expect("a place");
            let own = part.vbd.fork();
            let still = own.quiesce(&io, 1 << 40).await.expect("nothing is in flight");
            still.replace(after.0).expect("it takes its place");
            drop(still);
            assert!(!keep_in(&io, &part, kept).await.expect("no error"));
            assert!(!part.vbd.keeps_bitmaps());
            keep(&io, &part).await.expect("kept");
            let (sidecar, _) = part.vbd.bitmap_sidecar().expect("a sidecar");
            let path = std::fs::read_link(sidecar.place().at()).expect("its path");
            let container = part.vbd.image().expect("an image").container().cloned();
            let container = container.expect("a file");
            part.vbd.close(&io).await.expect("closed");
            ringtap_image::bitmap_store::remove_sidecar(&container).expect("removed");
            assert!(!path.exists(), "it was another image's");
        });
        end.expect("it is driven");
    }
}
