//! Which disks' images are opened at the same time, and which only one after the other.
//!
//! Two disks that one image belongs to are opened as they are named: which of them has it, and why the other does not, is as
//! ever. Where several lie upon one image, one of them comes first, which makes that whole; the others come together after it.
//! What cannot be looked at here is opened in turn: on a server, which the first asks for all; encrypted, for to derive a key
//! may take a gigabyte of memory; of other formats.
//!
//! Images are looked at without a lock, and nothing is believed of what stands there but what they may have in common: where
//! that changes before they are opened, a lock that one has tells the other, as between programs. No file that an image names
//! is touched but one that it may name.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::slice;

use ringtap_image::qcow2::header::incompatible;
use ringtap_image::qcow2::{Crypt, Header};
use ringtap_image::{Format, Place, Role, find_of_held, is_store, record};
use rustix::fs::{Advice, fadvise};

use crate::Disk;
use crate::identity::{Identity, identity};

/// The files that a disk's image consists of, its own first.
pub(crate) type Files = Vec<Identity>;

/// The most images above each other.
const DEEPEST: usize = 200;
/// So much is read of a header. One that is longer is not looked at.
const HEADER: u64 = 4096;

/// The places of disks in the configuration.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Turns {
    /// One after the other, in their order.
    pub(crate) in_turn: Vec<usize>,
    /// At the same time as those and as one another.
    pub(crate) at_once: Vec<usize>,
    /// The same, after all those.
    pub(crate) then: Vec<usize>,
}

/// The files of a disk; none where it is opened in turn whatever they are.
pub(crate) fn files_of(disk: &Disk) -> Option<Files> {
    if is_store(&disk.path) {
        return None;
    }
    if disk.is_null() {
        return Some(vec![]);
    }
    match disk.options.format.or_else(|| record::format(&disk.path))? {
        // One that is not there has none: that is found again, and told, as it is opened.
        Format::Raw => Some(identity(&disk.path).into_iter().collect()),
        Format::Qcow2 => chain(disk),
        _ => None,
    }
}

fn chain(disk: &Disk) -> Option<Files> {
    let (mut options, direct) = (disk.options.clone(), disk.options.cache.direct());
    options.format = Some(Format::Qcow2);
    let (mut files, mut image) = (vec![], Place::hold(&disk.path).ok()?);
    while files.len() < DEEPEST {
        let header = header(&image, direct)?;
        files.push(identity(&image.at())?);
        if header.crypt != Crypt::None || header.has(incompatible::DATA_FILE) {
            return None;
        }
        let Some(name) = &header.backing_file else { return Some(files) };
        let name = PathBuf::from(OsStr::from_bytes(name));
        if is_store(&name) {
            return None;
        }
        image = find_of_held(&image, Role::Backing, slice::from_ref(&name), &options).ok()?;
        options.read_only = true;
        match header.backing_format() {
            Some(b"qcow2") => {}
            Some(b"raw") => {
                files.push(identity(&image.at())?);
                return Some(files);
            }
            _ => return None,
        }
    }
    None
}

/// The header of a qcow2 image in a regular file. Where the image itself is read past the page cache, none of it stays there.
fn header(image: &Place, direct: bool) -> Option<Header> {
    // What else there may be is not opened only to look at it: a device that others write to, a pipe that waits for them.
    let at = image.at();
    let facts = std::fs::metadata(&at).ok().filter(|facts| facts.is_file())?;
    let file = File::open(&at).ok()?;
    let len = facts.size().min(HEADER);
    let mut bytes = vec![0; len as usize];
    // No further than is asked for.
    let _ = fadvise(&file, 0, None, Advice::Random);
    let read = file.read_exact_at(&mut bytes, 0);
    if direct {
        let _ = fadvise(&file, 0, std::num::NonZeroU64::new(HEADER), Advice::DontNeed);
    }
    read.ok().and_then(|()| Header::parse(&bytes).ok())
}

/// When disks are opened that have these files.
pub(crate) fn turns(disks: &[Option<Files>]) -> Turns {
    let mut users: HashMap<Identity, usize> = HashMap::new();
    for file in disks.iter().flatten().flatten() {
        *users.entry(*file).or_default() += 1;
    }
    let own: HashSet<Identity> =
        disks.iter().flatten().filter_map(|files| files.first()).copied().collect();
    let mut seen: HashSet<Identity> = HashSet::new();
    let mut turns = Turns::default();
    for (disk, files) in disks.iter().enumerate() {
        let Some(files) = files else {
            turns.in_turn.push(disk);
            continue;
        };
        let is_shared = |file: &&Identity| users.get(*file).is_some_and(|users| *users > 1);
        let shared: Vec<Identity> = files.iter().filter(is_shared).copied().collect();
        let is_others = shared.iter().any(|file| own.contains(file));
        let is_first = shared.iter().any(|file| !seen.contains(file));
        if is_others || is_first {
            turns.in_turn.push(disk);
            seen.extend(shared);
        } else if shared.is_empty() {
            turns.at_once.push(disk);
        } else {
            turns.then.push(disk);
        }
    }
    turns
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use ringtap_image::qcow2::{CreateOptions, create};
    use ringtap_image::{CacheMode, Container, OpenOptions, on_a_ring};

    use super::*;

    fn file(number: u64) -> Identity {
        (false, 1, number)
    }

    fn when(disks: &[Option<&[u64]>]) -> [Vec<usize>; 3] {
        let files = |files: &&[u64]| files.iter().map(|number| file(*number)).collect();
        let disks: Vec<Option<Files>> = disks.iter().map(|one| one.as_ref().map(files)).collect();
        let Turns { in_turn, at_once, then } = turns(&disks);
        [in_turn, at_once, then]
    }

    #[test]
    fn images_of_their_own_come_together_and_the_others_after_who_has_them_first() {
        assert_eq!(when(&[]), [vec![0; 0], vec![], vec![]]);
        assert_eq!(
            when(&[Some(&[1]), None, Some(&[2, 3]), Some(&[])]),
            [vec![1], vec![0, 2, 3], vec![]]
        );
        // Three upon one image, and one upon an overlay of its own on it.
        let upon = [Some(&[1, 9][..]), Some(&[2, 9]), Some(&[3, 30, 9]), Some(&[4])];
        assert_eq!(when(&upon), [vec![0], vec![3], vec![1, 2]]);
        // The third is the first with one of its images.
        assert_eq!(
            when(&[Some(&[1, 9]), Some(&[2, 9]), Some(&[3, 8, 9]), Some(&[4, 8, 9])]),
            [vec![0, 2], vec![], vec![1, 3]]
        );
        // What is a disk's own is another's, above or below: as they are named.
        assert_eq!(
            when(&[Some(&[1]), Some(&[2, 1]), Some(&[3, 1])]),
            [vec![0, 1, 2], vec![], vec![]]
        );
        assert_eq!(when(&[Some(&[1, 2]), Some(&[5]), Some(&[2])]), [vec![0, 2], vec![1], vec![]]);
        assert_eq!(when(&[Some(&[1]), Some(&[1])]), [vec![0, 1], vec![], vec![]]);
    }

    /// A qcow2 image upon another.
    fn image(path: &Path, below: Option<(&Path, &str)>) -> Disk {
        std::fs::write(path, "").expect("a file");
        let options = OpenOptions {
            format: Some(Format::Qcow2),
            cache: CacheMode::Writeback,
            no_restart_log: true,
            ..OpenOptions::default()
        };
        let container = Container::open(path, &options).expect("opened");
        let made = CreateOptions {
            size: 65536,
            backing_file: below.map(|(path, _)| path.display().to_string()),
            backing_format: below.map(|(_, format)| format.to_owned()),
            ..CreateOptions::default()
        };
        let task = |io| async move { create(&io, &container, None, &made).await.map(drop) };
        on_a_ring(path, task).expect("a ring").expect("an image");
        Disk::new(path, options)
    }

    #[test]
    fn an_images_files_are_found_down_to_the_last_as_far_as_they_can_be() {
        let dir = tempfile::tempdir().expect("a folder");
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("raw"), [7; 4096]).expect("written");
        let base = image(&at("base"), Some((Path::new("raw"), "raw")));
        let top = image(&at("top"), Some((Path::new("base"), "qcow2")));
        let of = |name: &str| identity(&at(name)).expect("it is there");
        assert_eq!(files_of(&base), Some(vec![of("base"), of("raw")]));
        assert_eq!(files_of(&top), Some(vec![of("top"), of("base"), of("raw")]));
        let raw = OpenOptions { format: Some(Format::Raw), ..OpenOptions::default() };
        assert_eq!(files_of(&Disk::new(at("raw"), raw.clone())), Some(vec![of("raw")]));
        assert_eq!(files_of(&Disk::new(at("none"), raw.clone())), Some(vec![]));
        assert_eq!(files_of(&Disk::new("null:1M", OpenOptions::default())), Some(vec![]));
        // In turn: on a server, upon something there, in another format, upon nothing that is there, upon itself.
        assert_eq!(files_of(&Disk::new("nbd://h/x", raw)), None);
        let luks = OpenOptions { format: Some(Format::Luks), ..OpenOptions::default() };
        assert_eq!(files_of(&Disk::new(at("raw"), luks)), None);
        for below in ["nbd://h/x", "none", "self"] {
            let odd = image(&at("self"), Some((Path::new(below), "qcow2")));
            assert_eq!(files_of(&odd), None, "{below}");
        }
        // What it may not name is not looked at.
        let other = tempfile::tempdir().expect("a folder");
        image(&other.path().join("base"), None);
        let named = other.path().join("base");
        let mut foreign = image(&at("foreign"), Some((&named, "qcow2")));
        assert_eq!(files_of(&foreign), None);
        foreign.options.allow_backing = vec![named.clone()];
        let both = vec![of("foreign"), identity(&named).expect("it is there")];
        assert_eq!(files_of(&foreign), Some(both));
        let odd = image(&at("odd"), Some((Path::new("raw"), "luks")));
        assert_eq!(files_of(&odd), None);
        // A pipe would wait for who writes to it.
        rustix::fs::mkfifoat(rustix::fs::CWD, at("pipe"), rustix::fs::Mode::RUSR).expect("a pipe");
        assert_eq!(files_of(&Disk::new(at("pipe"), odd.options)), None);
    }
}
