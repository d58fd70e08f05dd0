//! Opening the images of a configuration: one that cannot be served stops one disk, or all.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use ringtap_image::{
    Away, Container, Format, Image, Info, OpenError, OpenOptions, Place, is_store, on_a_ring,
    open_place, probe, qcow2, record,
};
use ringtap_io::Panic;
use ringtap_vbd::{Placement, Vbd, disk_span};
use rustix::fs::{Advice, fadvise};

use crate::at_once::at_once;
use crate::checkpoints;
use crate::identity::{Identity, identity};
use crate::labels::labels;
use crate::left_out::LeftOut;
use crate::successor;
use crate::turns::{Turns, files_of, turns};
use crate::twice::{Followed, one_each};
use crate::{Config, Disk, Error, Placed, sandbox};

/// What an image is given to before it is served, with its path.
pub type Wrap = Arc<dyn Fn(&Path, Box<dyn Image>) -> Box<dyn Image> + Send + Sync>;

/// The disks that are served, in the order of the configuration, and those that are not.
pub(crate) struct Opened {
    /// The configuration without the disks that are not served.
    pub(crate) config: Config,
    /// The device of each of its disks.
    pub(crate) vbds: Vec<Vbd>,
    /// The disks that are not served.
    pub(crate) left_out: Vec<LeftOut>,
    /// The files of those opened for writing as a format that was named.
    pub(crate) named: Vec<(Place, Format)>,
}

impl Opened {
    /// Open every image. With [`Config::strict`], and where no other disk is left to serve, the first failure
    /// is returned; a mistake of the command line always is.
    /// `wrap` may put another image before each.
    pub(crate) fn open(config: Config, wrap: &Wrap) -> Result<Opened, Error> {
        refuse_twice(&config.disks)?;
        let labels = labels(&config.disks);
        let Config { disks, strict, .. } = config;
        let config = Config { disks: vec![], ..config };
        let kept = config.folder.as_ref().filter(|folder| folder.keep);
        let all = followed(disks.into_iter().zip(labels).collect());
        let all = one_each(all, kept.map(|folder| &*folder.path));
        let labels: Vec<String> = all.iter().map(|one| one.label.clone()).collect();
        let mut opened = Opened { config, vbds: vec![], left_out: vec![], named: vec![] };
        let alone = all.len() == 1;
        for ((disk, found), label) in devices(all, &labels, wrap).into_iter().zip(labels) {
            let name = disk.path.display().to_string();
            let span = disk_span(&name).entered();
            let found = found.inspect_err(|error| {
                if let Some(hint) = sandbox::hint(&error.to_string()) {
                    tracing::warn!("{name}: {hint}");
                }
            });
            match found {
                Ok((vbd, named)) => {
                    opened.named.extend(named);
                    opened.vbds.push(vbd);
                    opened.config.disks.push(disk);
                }
                Err(error)
                    if strict
                        || disk.keeping.file.is_none() && (alone || is_of_command_line(&error)) =>
                {
                    return Err(error);
                }
                Err(error) => {
                    tracing::error!("not served: {error}");
                    opened.left_out.push(LeftOut { disk, label, error, opening: None });
                }
            }
            drop(span);
        }
        let nothing = opened.vbds.is_empty() && opened.config.folder.is_none();
        match nothing && !opened.left_out.is_empty() {
            true => {
                Err(outcome(opened.left_out, 0)
                    .expect_err("there was a disk, and it is not served"))
            }
            false => Ok(opened),
        }
    }
}

/// Record what the images are, once all is up: from now on a guest decides what a raw disk looks like.
pub(crate) fn record_formats(named: &[(Place, Format)]) {
    for (place, format) in named {
        record::confirm_format(place, *format);
    }
}

/// An error where a disk was left out, however well the `served` others were.
pub(crate) fn outcome(left_out: Vec<LeftOut>, served: usize) -> Result<(), Error> {
    let count = left_out.len();
    let Some(first) = left_out.into_iter().next() else { return Ok(()) };
    Err(Error::NotServed { count, of: count + served, first: Box::new(first.error) })
}

/// Whether nothing that happens to the image would help, but only another command line.
fn is_of_command_line(error: &Error) -> bool {
    matches!(
        error,
        Error::Usage(_) | Error::Open(OpenError::NoFormat { .. } | OpenError::NullSize { .. })
    )
}

/// Two disks on one image: each would find the other's lock, and name this very process.
pub(crate) fn refuse_twice(disks: &[Disk]) -> Result<(), Error> {
    let mut seen: HashMap<Identity, &Disk> = HashMap::new();
    for disk in disks {
        let Some(other) = identity(&disk.path).and_then(|file| seen.insert(file, disk)) else {
            continue;
        };
        if !(disk.options.read_only && other.options.read_only) {
            return Err(Error::Usage(format!(
                "{} and {} are one image, named for two disks: give one disk all the addresses, as in \
                 {} -f FORMAT --nbd unix:A --vhost-user B; or add --read-only to both",
                other.path.display(),
                disk.path.display(),
                other.path.display()
            )));
        }
    }
    Ok(())
}

/// What was read of a shared device through this host's page cache would still be there when the image comes, however
/// much another host has written by then.
pub(crate) fn forget_pages(disk: &Disk) {
    let is_device = identity(&disk.path).is_some_and(|(device, ..)| device);
    if is_device && !disk.options.cache.direct() {
        let dropped = std::fs::File::open(&disk.path)
            .and_then(|file| Ok(fadvise(&file, 0, None, Advice::DontNeed)?));
        if let Err(error) = dropped {
            tracing::warn!("{}: its pages stay in the page cache: {error}", disk.path.display());
        }
    }
}

/// A device, and what is to be recorded of its image.
type Found = Result<(Vbd, Option<(Place, Format)>), Error>;

fn span(disk: &Disk) -> tracing::span::EnteredSpan {
    disk_span(&disk.path.display().to_string()).entered()
}

/// Find where each goes on, before it is seen what they share.
fn followed(disks: Vec<(Disk, String)>) -> Vec<Followed> {
    at_once(disks, |(mut disk, label)| {
        let _disk = span(&disk);
        let named = disk.path.clone();
        let end = successor::follow(&mut disk);
        Followed { disk, label, named, end }
    })
}

/// Open the image of each disk, those at the same time that may be.
fn devices(all: Vec<Followed>, labels: &[String], wrap: &Wrap) -> Vec<(Disk, Found)> {
    let found = |disk: &mut Disk, label: &String| {
        let _disk = span(disk);
        successor::follow(disk).and_then(|()| device(disk, label, wrap))
    };
    let looked_at = at_once(all, |one| {
        let entered = span(&one.disk);
        let files = one.end.is_ok().then(|| files_of(&one.disk)).flatten();
        drop(entered);
        (Some(one), files)
    });
    let (mut followed, files): (Vec<_>, Vec<_>) = looked_at.into_iter().unzip();
    let Turns { in_turn, at_once: alone, then } = turns(&files);
    let mut take = |numbers: Vec<usize>| -> Vec<_> {
        let one = |number: usize| Some((number, followed.get_mut(number)?.take()?));
        numbers.into_iter().filter_map(one).collect()
    };
    let open = |all: Vec<(usize, Followed)>| {
        let open = |(number, Followed { disk, end, .. }): (usize, Followed)| {
            let entered = span(&disk);
            let end = end.and_then(|()| device(&disk, &labels[number], wrap));
            drop(entered);
            (number, disk, end)
        };
        all.into_iter().map(open).collect::<Vec<_>>()
    };
    let each = |all: Vec<_>| all.into_iter().map(|one| vec![one]);
    // First those of which the last is to wait longest.
    let in_turn = Some(take(in_turn)).filter(|all| !all.is_empty());
    let first = in_turn.into_iter().chain(each(take(alone))).collect();
    let then = each(take(then)).collect();
    let mut all: Vec<_> =
        [first, then].into_iter().flat_map(|some| at_once(some, open)).flatten().collect();
    all.sort_by_key(|(number, ..)| *number);
    let mut all: Vec<_> = all.into_iter().map(|(_, disk, found)| (disk, found)).collect();
    let is_locked = |found: &Found| matches!(found, Err(Error::Open(OpenError::Locked { .. })));
    if let Some(first) = all.iter().position(|(_, found)| is_locked(found)) {
        // Of two disks that are about one image the first has it: from there on one is opened after the other.
        for (disk, found) in &mut all[first..] {
            let unused = std::mem::replace(found, Err(Error::Usage(String::new())));
            if let Some((vbd, _)) = unused.ok().filter(|_| !is_store(&disk.path)) {
                close_unused(&disk.path, vbd);
            }
        }
        for ((disk, end), label) in all[first..].iter_mut().zip(&labels[first..]) {
            *end = found(disk, label);
        }
    }
    all
}

/// A device that nobody has used.
pub(crate) fn close_unused(path: &Path, vbd: Vbd) {
    let closed = on_a_ring(path, |io| async move { vbd.close(&io).await });
    match closed {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::warn!("cannot close it again: {error}"),
        Err(error) => tracing::warn!("cannot close it again: {error}"),
    }
}

/// A disk's image, opened, and what is to be recorded of it.
pub(crate) fn device(
    disk: &Disk,
    label: &str,
    wrap: &Wrap,
) -> Result<(Vbd, Option<(Place, Format)>), Error> {
    device_at(disk, label, wrap, At::default())
}

/// Where an image is, beyond its path.
#[derive(Default)]
pub(crate) struct At {
    /// Its file, where that is held already.
    pub(crate) place: Option<Place>,
    /// The image that it is opened upon, whatever it names.
    pub(crate) upon: Option<Box<dyn Image>>,
}

/// As [`device`], of an image of which more is known.
pub(crate) fn device_at(
    disk: &Disk,
    label: &str,
    wrap: &Wrap,
    at: At,
) -> Result<(Vbd, Option<(Place, Format)>), Error> {
    let opened = Panic::catch(|| open(disk, wrap, at));
    let opened = opened.unwrap_or_else(|panic| Err(Error::panicked([&*disk.path], &panic)));
    opened.map(|(vbd, named)| (vbd.named(&disk.path.display().to_string(), label), named))
}

fn open(disk: &Disk, wrap: &Wrap, at: At) -> Result<(Vbd, Option<(Place, Format)>), Error> {
    // One file from here on, whatever is put at its path.
    let place = at.place.or_else(|| Place::hold(&disk.path).ok());
    let place = place.unwrap_or_else(|| (&disk.path).into());
    let cache = disk.options.cache;
    let image = image(disk, wrap, &place, at.upon)?;
    let goes_on_nowhere = image.container().is_some_and(Container::goes_on_nowhere);
    let named = named(disk, place, &*image);
    let vbd = match disk.logical_block_size {
        None => Vbd::new(image, cache),
        Some(bytes) => {
            sectors_fit(disk, image.info().size)?;
            Vbd::with_logical_block_size(image, cache, bytes)
        }
    };
    // One that comes later was looked at where it is.
    if disk.growable && !disk.incoming && vbd.grow(vbd.size()).is_err() {
        return Err(Error::Usage(format!(
            "{}: --growable takes a raw image in a regular file",
            disk.path.display()
        )));
    }
    let Placed { processors, cgroup } = disk.placement.clone();
    let placement = Placement::new(processors, cgroup.as_deref())
        .map_err(|why| Error::Usage(format!("{}: {why}", disk.path.display())))?;
    let vbd = vbd.held_back(disk.hold).placed(placement);
    if !disk.incoming && !vbd.is_read_only() && !goes_on_nowhere {
        successor::take_back(&disk.path);
    }
    checkpoints::restore(vbd.disk())?;
    Ok((vbd, named))
}

/// What is to be recorded of an image once it is served.
pub(crate) fn named(disk: &Disk, place: Place, image: &dyn Image) -> Option<(Place, Format)> {
    let format = disk.options.format.filter(|_| !image.info().read_only && !disk.incoming);
    format.map(|format| (place, format))
}

/// Where the sector size was chosen, the image must be whole sectors.
pub(crate) fn sectors_fit(disk: &Disk, size: u64) -> Result<(), Error> {
    match disk.logical_block_size {
        Some(bytes) if size % u64::from(bytes) != 0 => Err(Error::Usage(format!(
            "{}: its {size} bytes are not whole sectors of {bytes}, so a guest would not see the \
             last of them: resize it, or give another --logical-block-size",
            disk.path.display()
        ))),
        _ => Ok(()),
    }
}

/// The image itself; where it is to come only with its guest, what it looks like at present.
pub(crate) fn image(
    disk: &Disk,
    wrap: &Wrap,
    place: &Place,
    upon: Option<Box<dyn Image>>,
) -> Result<Box<dyn Image>, Error> {
    if disk.incoming {
        // Others write to it meanwhile: its facts are all that can be known.
        let options = OpenOptions {
            read_only: true,
            force_share: true,
            no_restart_log: true,
            layers: if disk.keeping.lies_upon { Some(1) } else { disk.options.layers },
            // Those that record are found in use.
            bitmaps: vec![],
            ..disk.options.clone()
        };
        let looked_at = open_place(place, &options)?;
        forget_pages(disk);
        let read_only = disk.options.read_only;
        return Ok(Box::new(Away::new(Info { read_only, ..looked_at.info().clone() })));
    }
    let image = match upon {
        None => open_place(place, &disk.options)?,
        Some(base) => {
            if let Some(verb) = probe::unfinished_work(&place.at()) {
                return Err(OpenError::Unfinished { path: disk.path.clone(), verb }.into());
            }
            let (place, options) = (place.clone(), disk.options.clone());
            let open = |io| async move { qcow2::open_upon(&io, &place, &options, base).await };
            on_a_ring(&disk.path, open)??
        }
    };
    if image.ends_with_process() && is_store(&disk.path) && !disk.options.cache.writethrough() {
        tracing::warn!(
            "{}: an image on a server has no restart log: where this process is killed and the guest lives on, what was \
             acknowledged and not flushed is lost; --cache writethrough makes each write stable before it is \
             acknowledged",
            disk.path.display()
        );
    }
    Ok(wrap(&disk.path, image))
}

#[cfg(test)]
mod tests {
    use std::sync::{Condvar, Mutex};
    use std::time::Duration;

    use ringtap_image::qcow2::{CreateOptions, create};
    use ringtap_image::{CacheMode, Role};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(120);

    fn image(path: &Path, below: Option<&Path>) -> Disk {
        std::fs::write(path, "").expect("a file");
        let options = OpenOptions {
            format: Some(Format::Qcow2),
            cache: CacheMode::Writeback,
            no_restart_log: true,
            allow_backing: below.iter().map(|path| (*path).to_owned()).collect(),
            ..OpenOptions::default()
        };
        let container = Container::open(path, &options).expect("opened");
        let made = CreateOptions {
            size: 65536,
            backing_file: below.map(|path| path.display().to_string()),
            backing_format: below.map(|_| "qcow2".into()),
            ..CreateOptions::default()
        };
        let task = |io| async move { create(&io, &container, None, &made).await.map(drop) };
        on_a_ring(path, task).expect("a ring").expect("an image");
        if let Some(below) = below {
            let _ = record::set_allowed(path, Role::Backing, Some(below));
        }
        Disk::new(path, options)
    }

    /// Each that is opened waits until as many are as there are to be at the same time: all, but where several lie upon one
    /// image, the first of which is alone with those that have nothing to do with it.
    #[test]
    fn images_are_opened_together_and_overlays_of_one_image_after_the_first_of_them() {
        let dir = tempfile::tempdir().expect("a folder");
        let base = dir.path().join("base");
        drop(image(&base, None));
        let disk = |name: &str, below| image(&dir.path().join(name), below);
        let upon = Some(&*base);
        let disks = vec![
            disk("a", upon),
            disk("x", None),
            disk("b", upon),
            disk("y", None),
            disk("c", upon),
        ];
        let opened = Arc::new((Mutex::new(Vec::<String>::new()), Condvar::new()));
        let (seen, at_least) =
            (opened.clone(), |name: &str| if matches!(name, "b" | "c") { 5 } else { 3 });
        let wrap: Wrap = Arc::new(move |path, image| {
            let name = path.file_name().expect("a name").to_string_lossy().into_owned();
            let (names, told) = &*seen;
            let mut names = names.lock().expect("no panic");
            names.push(name.clone());
            told.notify_all();
            let few = |names: &mut Vec<String>| names.len() < at_least(&name);
            let (names, end) = told.wait_timeout_while(names, PATIENCE, few).expect("no panic");
            assert!(!end.timed_out(), "{name} waits alone: {names:?}");
            image
        });
        let labels = vec![String::new(); disks.len()];
        for (disk, found) in
            devices(followed(disks.into_iter().zip(labels.clone()).collect()), &labels, &wrap)
        {
            let (vbd, _) = found.expect("opened");
            close_unused(&disk.path, vbd);
        }
        let mut names = opened.0.lock().expect("no panic").clone();
        names[..3].sort();
        names[3..].sort();
        assert_eq!(names, ["a", "x", "y", "b", "c"]);
    }
}
