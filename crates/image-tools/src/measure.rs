//! How much space a new image would take.

use std::path::{Path, PathBuf};

use ringtap_image::qcow2::{BitmapEntry, CreateOptions, Preallocation, SnapshotName};
use ringtap_image::{CacheMode, Format, luks, on_a_ring, open};
use ringtap_vbd::Vbd;

use crate::opening::cannot;
use crate::{
    Doing, Error, FormatOptions, LazySecret, NewImage, Reading, Watcher, chain, format_of,
};

/// What would be copied into a new image.
#[derive(Clone, Debug)]
pub struct Source {
    /// The image.
    pub path: PathBuf,
    /// Its format, if that is named.
    pub format: Option<Format>,
    /// As it was at this snapshot inside it.
    pub snapshot: Option<SnapshotName>,
}

/// Bytes of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measurement {
    /// With what the source holds.
    pub required: u64,
    /// Once every byte of the disk is written.
    pub fully_allocated: u64,
    /// What the source's bitmaps would take besides.
    pub bitmaps: Option<u64>,
}

/// How much space an image would take: a copy of `source`, or an empty one. Its size is that of the source, else its own.
///
/// # Errors
///
/// Neither is known, images of that format are not measured (VHD), or the source cannot be read.
pub fn measure(
    new: &NewImage,
    source: Option<&Source>,
    reading: &Reading,
    watch: &Watcher,
) -> Result<Measurement, Error> {
    let disk = source.map(|source| open_at(source, reading, watch)).transpose()?;
    let size = disk.as_ref().map(|disk| disk.size()).or(new.size);
    let none = || Error::usage("name an image, or a size with --size");
    let size = size.and_then(|size| size.checked_next_multiple_of(512)).ok_or_else(none)?;
    let alike = |bytes| Measurement { required: bytes, fully_allocated: bytes, bitmaps: None };
    match &new.options {
        FormatOptions::Raw(_) => Ok(alike(size)),
        FormatOptions::Luks { own, .. } => Ok(alike(luks::front_len(own) + size)),
        FormatOptions::Vhd { .. } => {
            let why = "what vpc images take is not measured: raw, qcow2 and luks are";
            Err(Error::usage(why))
        }
        FormatOptions::Qcow2 { .. } => {
            let new = NewImage { size: Some(size), ..new.clone() };
            let secret = new.secret.as_ref().map(LazySecret::read).transpose()?;
            let Some(options) = new.qcow2_options(secret.as_ref())? else {
                return Ok(alike(size));
            };
            qcow2(&options, source.zip(disk), reading.force_share)
        }
    }
}

fn open_at(source: &Source, reading: &Reading, watch: &Watcher) -> Result<Vbd, Error> {
    let cache = CacheMode::Writeback;
    let Some(snapshot) = &source.snapshot else {
        return reading.open(&source.path, source.format, cache, watch);
    };
    open_snapshot(&source.path, source.format, snapshot, cache, reading)
}

/// The disk of an image as it was at a snapshot.
pub(crate) fn open_snapshot(
    path: &Path,
    named: Option<Format>,
    snapshot: &SnapshotName,
    cache: CacheMode,
    reading: &Reading,
) -> Result<Vbd, Error> {
    let (format, _) = format_of(path, named)?;
    if format != Format::Qcow2 {
        return Err(cannot(path, format, "have no snapshots: leave -l out"));
    }
    let mut options = reading.options(format, cache)?;
    options.snapshot = Some(snapshot.clone());
    Ok(Vbd::new(open(path, &options)?, cache))
}

fn qcow2(
    options: &CreateOptions,
    source: Option<(&Source, Vbd)>,
    share: bool,
) -> Result<Measurement, Error> {
    if options.data_file.is_some() {
        let why = "what an image with an external data file takes is not measured: leave \
                   data_file out";
        return Err(Error::usage(why));
    }
    let fully_allocated = options.full_size().map_err(Error::usage)?;
    let cluster = options.cluster_size;
    let all = options.size.next_multiple_of(cluster);
    let mut measured =
        Measurement { required: fully_allocated - all, fully_allocated, bitmaps: None };
    let reserved = !matches!(options.preallocation, Preallocation::Off | Preallocation::Metadata);
    if let Some((source, disk)) = source {
        let layer = chain::layer(&source.path, source.format, share)?;
        if options.version > 2 && layer.header.is_some_and(|header| header.version > 2) {
            measured.bitmaps = Some(bitmaps(&layer.bitmaps, disk.size(), cluster));
        }
        // How much of it the backing file holds already is not known.
        let known = options.backing_file.is_none() && !reserved;
        measured.required += if known { data(&source.path, disk, cluster)? } else { all };
    } else if reserved {
        measured.required += all;
    }
    Ok(measured)
}

/// Bytes of the clusters that a disk's data lies in.
fn data(path: &Path, disk: Vbd, cluster: u64) -> Result<u64, Error> {
    let place = path.display().to_string();
    on_a_ring(path, |io| async move {
        let (mut at, mut clusters, mut counted) = (0, 0, 0);
        while at < disk.size() {
            let status = disk.status(&io, at, disk.size() - at).await;
            let status =
                status.doing(|| format!("{place}: what lies at {at} cannot be found out"))?;
            let end = at + status.len.max(1);
            if status.allocated && !status.zero {
                let last = end.div_ceil(cluster);
                clusters += last.saturating_sub(counted.max(at / cluster));
                counted = last;
            }
            at = end;
        }
        Ok(clusters * cluster)
    })?
}

/// Bytes of bitmaps, all of their clusters there, their tables and the directory.
fn bitmaps(entries: &[BitmapEntry], size: u64, cluster: u64) -> u64 {
    let (mut bytes, mut directory) = (0u64, 0);
    for entry in entries.iter().filter(|entry| entry.is_usable()) {
        let bits = size.div_ceil(1 << entry.granularity_bits);
        let clusters = bits.div_ceil(8).div_ceil(cluster);
        let own = clusters * cluster + (clusters * 8).next_multiple_of(cluster);
        bytes = bytes.saturating_add(own);
        directory += (24 + entry.name.len() as u64).next_multiple_of(8);
    }
    bytes.saturating_add(directory.next_multiple_of(cluster))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unwatched;

    #[test]
    fn a_sparse_file_takes_what_it_holds() {
        use std::os::unix::fs::FileExt;
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("a.raw");
        let file = std::fs::File::create(&path).expect("a file");
        file.set_len(1 << 30)
            .and_then(|()| file.write_all_at(&[1; 4096], 512 << 20))
            .expect("written");
        let source = Source { path, format: Some(Format::Raw), snapshot: None };
        let measured = |format, source: Option<&Source>, size| {
            let options = FormatOptions::usual(format).expect("can be made");
            let new = NewImage { size, backing: None, options, secret: None };
            measure(&new, source, &Reading::default(), &unwatched())
        };
        let found = measured(Format::Qcow2, Some(&source), None).expect("measured");
        let empty = measured(Format::Qcow2, None, Some(1 << 30)).expect("measured");
        assert_eq!(found.fully_allocated, empty.fully_allocated);
        assert_eq!(found.required, empty.required + (64 << 10));
        let raw = measured(Format::Raw, Some(&source), None).expect("measured");
        assert_eq!((raw.required, raw.fully_allocated), (1 << 30, 1 << 30));
        assert!(measured(Format::Qcow2, None, None).expect_err("no size").is_usage());
    }
}
