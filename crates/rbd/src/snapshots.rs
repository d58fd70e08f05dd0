//! Snapshots of images, also of those that are served meanwhile, and clones of them.

use crate::Name;
use crate::ffi::Image;
use crate::image::failed;
use crate::lock;
use crate::pools::{error, pool};

/// A snapshot of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Its number.
    pub id: u64,
    /// Its name.
    pub name: String,
    /// Bytes of the image then.
    pub size: u64,
    /// When it was taken, in seconds since 1970.
    pub taken: u64,
}

/// What has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// Where.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// Whether it reads as zeros now.
    pub zero: bool,
}

fn open(name: &Name, read_only: bool) -> Result<Image, String> {
    let pool = pool(name)?;
    Image::open(pool, &name.image, None, read_only).map_err(|errno| failed(name, errno))
}

/// One open as a whole, of which no snapshot is named.
fn whole(name: &str, read_only: bool) -> Result<(Name, Image), String> {
    let name = Name::parse(name)?;
    if let Some(snapshot) = &name.snapshot {
        return Err(format!("leave @{snapshot} out: snapshots are those of an image"));
    }
    let image = open(&name, read_only)?;
    Ok((name, image))
}

/// The snapshots of an image, the oldest first.
pub fn list(name: &str) -> Result<Vec<Snapshot>, String> {
    let (_, image) = whole(name, true)?;
    image.snapshots().map_err(|errno| error(errno).to_string())
}

/// Take one. Who has the image's lock takes it where it is served: it is what a power cut would have left then.
pub fn create(name: &str, snapshot: &str) -> Result<(), String> {
    let (_, image) = whole(name, false)?;
    image.take_snapshot(snapshot).map_err(|errno| match errno {
        libc::EEXIST => format!("there is a snapshot {snapshot} already"),
        errno => error(errno).to_string(),
    })
}

/// Remove one.
pub fn delete(name: &str, snapshot: &str) -> Result<(), String> {
    let (_, image) = whole(name, false)?;
    image.remove_snapshot(snapshot).map_err(|errno| match errno {
        libc::ENOENT => format!("there is no snapshot {snapshot}"),
        libc::EBUSY => format!(
            "the snapshot {snapshot} is protected, or images are clones of it: rbd children, rbd snap unprotect"
        ),
        errno => error(errno).to_string(),
    })
}

/// Let an image be as it was at one. Nobody else may write to it.
pub fn apply(name: &str, snapshot: &str) -> Result<(), String> {
    let (name, image) = whole(name, false)?;
    lock::take(&image, &name)?;
    let end = image.roll_back(snapshot).map_err(|errno| match errno {
        libc::ENOENT => format!("there is no snapshot {snapshot}"),
        errno => error(errno).to_string(),
    });
    lock::forget(&image);
    end
}

/// Whether a name is that of a snapshot.
pub fn is_snapshot(name: &str) -> bool {
    Name::parse(name).is_ok_and(|name| name.snapshot.is_some())
}

/// Make an image that is a snapshot of another until it is written to.
pub fn clone(of: &str, name: &str) -> Result<(), String> {
    let (of, name) = (Name::parse(of)?, Name::parse(name)?);
    let snapshot =
        of.snapshot.as_deref().ok_or("a clone is one of a snapshot: write IMAGE@SNAP")?;
    if of.cluster != name.cluster {
        return Err("a clone lies in the cluster of its parent, by the same options".into());
    }
    let (from, to) = (pool(&of)?, pool(&name)?);
    from.clone_to(&of.image, snapshot, &to, &name.image).map_err(|errno| match errno {
        libc::ENOENT => failed(&of, errno),
        libc::EEXIST => format!("there is an image {} already", name.spec()),
        libc::EINVAL => format!(
            "its snapshot is not protected, as this cluster's clones want it: rbd snap protect {}@{snapshot}",
            of.spec()
        ),
        errno => error(errno).to_string(),
    })
}

/// Bytes of an image.
pub fn size(name: &str) -> Result<u64, String> {
    let name = Name::parse(name)?;
    let image = Image::open(pool(&name)?, &name.image, name.snapshot.as_deref(), true)
        .map_err(|errno| failed(&name, errno))?;
    image.len().map_err(|errno| error(errno).to_string())
}

/// What has changed in an image, or until a snapshot of it, since a snapshot, in order.
pub fn changes(name: &str, since: &str) -> Result<Vec<Change>, String> {
    let name = Name::parse(name)?;
    let image = Image::open(pool(&name)?, &name.image, name.snapshot.as_deref(), true)
        .map_err(|errno| failed(&name, errno))?;
    let told = |errno| match errno {
        libc::ENOENT => format!("there is no snapshot {since}"),
        errno => error(errno).to_string(),
    };
    let len = image.len().map_err(told)?;
    let mut extents = image.extents(Some(since), 0, len).map_err(told)?;
    extents.sort_unstable_by_key(|extent| extent.offset);
    let mut changes: Vec<Change> = vec![];
    for extent in extents {
        let zero = !extent.exists;
        match changes.last_mut() {
            Some(last) if last.offset + last.len == extent.offset && last.zero == zero => {
                last.len += extent.len;
            }
            _ => changes.push(Change { offset: extent.offset, len: extent.len, zero }),
        }
    }
    Ok(changes)
}
