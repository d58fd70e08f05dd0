//! Images that are open.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::Arc;

use super::{Api, Cluster, Handle, Pool, Request, Watcher, c_text, done};

/// The exclusive lock: RBD_LOCK_MODE_EXCLUSIVE.
const EXCLUSIVE: c_int = 0;
/// The most owners or watchers looked at.
const MANY: usize = 64;

/// One that is open; closed when it is dropped, which waits for what is in flight.
pub(crate) struct Image {
    pub(super) pool: Pool,
    pub(super) image: Handle,
    watch: Option<(u64, *mut Told)>,
}

/// Called when the image was changed: its length, its snapshots.
type Watch = Box<dyn Fn() + Send + Sync>;

struct Told(Watch);

// SAFETY: librbd lets every thread use an image; what a watch calls may be called and dropped on any.
unsafe impl Send for Image {}
// SAFETY: as above.
unsafe impl Sync for Image {}

extern "C" fn told(told: *mut c_void) {
    // SAFETY: it is there until the watch has ended.
    let Told(watch) = unsafe { &*told.cast::<Told>() };
    watch();
}

/// A part of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) offset: u64,
    pub(crate) len: u64,
    /// Whether something is there; else it reads as zeros.
    pub(crate) exists: bool,
}

type Extents = Vec<Extent>;

extern "C" fn extent(offset: u64, len: usize, exists: c_int, extents: *mut c_void) -> c_int {
    let extent = Extent { offset, len: len as u64, exists: exists != 0 };
    // SAFETY: that is the list that `extents` gave, which nobody else uses until that call ends.
    unsafe { (*extents.cast::<Extents>()).push(extent) };
    0
}

impl Image {
    /// It, as librbd knows it, for as long as it is open.
    pub(crate) fn opened(&self) -> (&'static Api, Handle) {
        (self.pool.api, self.image)
    }

    /// Open it. Else a positive errno.
    pub(crate) fn open(
        pool: Pool,
        name: &str,
        snapshot: Option<&str>,
        read_only: bool,
    ) -> Result<Image, i32> {
        let name = c_text(name)?;
        let snapshot = snapshot.map(c_text).transpose()?;
        let snapshot = snapshot.as_deref().map_or(ptr::null(), CStr::as_ptr);
        let (api, mut image) = (pool.api, ptr::null_mut());
        let open = if read_only { api.rbd_open_read_only } else { api.rbd_open };
        // SAFETY: texts that end, or none; a place for the handle.
        done(unsafe { open(pool.io, name.as_ptr(), &mut image, snapshot) })?;
        Ok(Image { pool, image, watch: None })
    }

    /// Have that called, by a thread of librbd's which must not wait for it, when the image was changed.
    pub(crate) fn watch(&mut self, watch: Watch) -> Result<(), i32> {
        let (mut handle, arg) = (0, Box::into_raw(Box::new(Told(watch))));
        // SAFETY: `arg` is there until the watch has ended, or forever.
        let began =
            unsafe { (self.pool.api.rbd_update_watch)(self.image, &mut handle, told, arg.cast()) };
        match done(began) {
            Ok(()) => self.watch = Some((handle, arg)),
            // SAFETY: nobody else has it.
            Err(_) => drop(unsafe { Box::from_raw(arg) }),
        }
        done(began)
    }

    /// Its connection.
    pub(crate) fn cluster(&self) -> &Cluster {
        self.pool.cluster()
    }

    /// Bytes.
    pub(crate) fn len(&self) -> Result<u64, i32> {
        let mut len = 0;
        // SAFETY: a place for the number.
        done(unsafe { (self.pool.api.rbd_get_size)(self.image, &mut len) }).map(|()| len)
    }

    /// The bits of its features.
    pub(crate) fn features(&self) -> Result<u64, i32> {
        let mut features = 0;
        // SAFETY: a place for the number.
        done(unsafe { (self.pool.api.rbd_get_features)(self.image, &mut features) })
            .map(|()| features)
    }

    /// Make it so long. Waits.
    pub(crate) fn resize(&self, len: u64) -> Result<(), i32> {
        // SAFETY: the image is open.
        done(unsafe { (self.pool.api.rbd_resize)(self.image, len) })
    }

    /// Where something is in a range, in order; since a snapshot: what has become another since then. Waits.
    pub(crate) fn extents(
        &self,
        since: Option<&str>,
        offset: u64,
        len: u64,
    ) -> Result<Extents, i32> {
        let since = since.map(c_text).transpose()?;
        let since = since.as_deref().map_or(ptr::null(), CStr::as_ptr);
        let mut extents = Extents::new();
        let list = ptr::from_mut(&mut extents).cast();
        // SAFETY: a text that ends, or none; the list outlives the call, and only the callback uses it meanwhile. With what a clone has of its
        // parent, and not by whole objects.
        let end = unsafe {
            (self.pool.api.rbd_diff_iterate2)(self.image, since, offset, len, 1, 0, extent, list)
        };
        done(end).map(|()| extents)
    }

    /// Addresses of those who have it open for writing.
    pub(crate) fn watchers(&self) -> Result<Vec<String>, i32> {
        let mut list: Vec<Watcher> =
            (0..MANY).map(|_| Watcher { address: ptr::null(), id: 0, cookie: 0 }).collect();
        let mut count = list.len();
        // SAFETY: room for so many.
        done(unsafe {
            (self.pool.api.rbd_watchers_list)(self.image, list.as_mut_ptr(), &mut count)
        })?;
        let names = list[..count.min(MANY)].iter().map(|one| {
            // SAFETY: librbd gives texts that end, which are there until the cleanup.
            unsafe { CStr::from_ptr(one.address) }.to_string_lossy().into_owned()
        });
        let names = names.collect();
        // SAFETY: what it was just given.
        unsafe { (self.pool.api.rbd_watchers_list_cleanup)(list.as_mut_ptr(), count) };
        Ok(names)
    }

    /// The address of who has the lock.
    pub(crate) fn lock_owner(&self) -> Result<Option<String>, i32> {
        let mut owners = [ptr::null_mut::<c_char>(); MANY];
        let (mut mode, mut count) = (0, owners.len());
        // SAFETY: room for so many.
        let end = unsafe {
            (self.pool.api.rbd_lock_get_owners)(
                self.image,
                &mut mode,
                owners.as_mut_ptr(),
                &mut count,
            )
        };
        match done(end) {
            Err(libc::ENOENT) => return Ok(None),
            end => end?,
        }
        let first = owners[..count.min(MANY)].first().map(|owner| {
            // SAFETY: librbd gives texts that end, which are there until the cleanup.
            unsafe { CStr::from_ptr(*owner) }.to_string_lossy().into_owned()
        });
        // SAFETY: what it was just given.
        unsafe { (self.pool.api.rbd_lock_get_owners_cleanup)(owners.as_mut_ptr(), count) };
        Ok(first)
    }

    /// Take the lock, and keep it whoever asks for it.
    pub(crate) fn lock(&self) -> Result<(), i32> {
        // SAFETY: the image is open.
        done(unsafe { (self.pool.api.rbd_lock_acquire)(self.image, EXCLUSIVE) })
    }

    /// Take the lock from its owner, and shut that out of the cluster.
    pub(crate) fn break_lock(&self, owner: &str) -> Result<(), i32> {
        let owner = c_text(owner)?;
        // SAFETY: a text that ends.
        done(unsafe { (self.pool.api.rbd_lock_break)(self.image, EXCLUSIVE, owner.as_ptr()) })
    }

    /// Whether the cluster carries requests of it out. Waits.
    pub(crate) fn is_answered(&self) -> Result<(), i32> {
        let (mut value, mut len) = ([0u8; 8], 8);
        // SAFETY: a text that ends, and so much room.
        let end = unsafe {
            let at = value.as_mut_ptr().cast();
            (self.pool.api.rbd_metadata_get)(self.image, c"ringtap.no-such".as_ptr(), at, &mut len)
        };
        match done(end) {
            Err(libc::ENOENT) => Ok(()),
            end => end,
        }
    }

    /// What is noted at the image under a key.
    pub(crate) fn note(&self, key: &str) -> Option<String> {
        let key = c_text(key).ok()?;
        let (mut value, mut len) = ([0u8; 512], 512);
        // SAFETY: a text that ends, and so much room.
        done(unsafe {
            let at = value.as_mut_ptr().cast();
            (self.pool.api.rbd_metadata_get)(self.image, key.as_ptr(), at, &mut len)
        })
        .ok()?;
        Some(CStr::from_bytes_until_nul(&value).ok()?.to_str().ok()?.to_owned())
    }

    /// Note something, or nothing any more.
    pub(crate) fn set_note(&self, key: &str, value: Option<&str>) -> Result<(), i32> {
        let key = c_text(key)?;
        let api = self.pool.api;
        let value = value.map(c_text).transpose()?;
        // SAFETY: texts that end.
        done(unsafe {
            match &value {
                Some(value) => (api.rbd_metadata_set)(self.image, key.as_ptr(), value.as_ptr()),
                None => (api.rbd_metadata_remove)(self.image, key.as_ptr()),
            }
        })
    }

    /// Begin a request. It is told its end, also where it could not begin.
    pub(crate) fn begin(&self, request: &Arc<Request>) {
        request.begin();
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        if let Some((handle, arg)) = self.watch.take() {
            // SAFETY: librbd has given it. Once that has ended nobody calls `told` any more.
            unsafe {
                if done((self.pool.api.rbd_update_unwatch)(self.image, handle)).is_ok() {
                    drop(Box::from_raw(arg));
                }
            }
        }
        // SAFETY: nobody uses it any more, and what is in flight is waited for.
        unsafe { (self.pool.api.rbd_close)(self.image) };
    }
}
