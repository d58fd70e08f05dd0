//! librados and librbd: their functions, found when they are wanted, and what is made of them. The only unsafe code.

mod cluster;
mod image;
mod request;
mod snapshots;

use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::OnceLock;

use libloading::Library;

pub(crate) use cluster::{Cluster, Pool};
pub(crate) use image::{Extent, Image};
pub(crate) use request::{Free, Request};

/// A handle of theirs.
type Handle = *mut c_void;
type OnEnd = extern "C" fn(Handle, *mut c_void);
type OnUpdate = extern "C" fn(*mut c_void);
type OnExtent = extern "C" fn(u64, usize, c_int, *mut c_void) -> c_int;

/// Who looks at an image: `rbd_image_watcher_t`.
#[repr(C)]
struct Watcher {
    address: *const c_char,
    id: i64,
    cookie: u64,
}

/// What is known of a snapshot: `rbd_snap_info_t`.
#[repr(C)]
struct SnapshotInfo {
    id: u64,
    size: u64,
    name: *const c_char,
}

macro_rules! functions {
    ($($library:ident { $($name:ident($($of:ty),*) $(-> $gives:ty)?;)* })*) => {
        /// Their functions.
        pub(crate) struct Api {
            $($($name: unsafe extern "C" fn($($of),*) $(-> $gives)?,)*)*
            // The functions are gone with these.
            _libraries: [Library; 2],
        }

        impl Api {
            fn find($($library: Library),*) -> Result<Api, libloading::Error> {
                Ok(Api {
                    // SAFETY: the types are those of librados.h and librbd.h, which keep them for as long as the
                    // libraries bear these names; they stay loaded for as long as the functions can be called.
                    $($($name: unsafe { *$library.get(concat!(stringify!($name), "\0").as_bytes())? },)*)*
                    _libraries: [$($library),*],
                })
            }
        }
    };
}

functions! {
    rados {
        rados_create(*mut Handle, *const c_char) -> c_int;
        rados_conf_read_file(Handle, *const c_char) -> c_int;
        rados_conf_parse_env(Handle, *const c_char) -> c_int;
        rados_conf_set(Handle, *const c_char, *const c_char) -> c_int;
        rados_conf_get(Handle, *const c_char, *mut c_char, usize) -> c_int;
        rados_connect(Handle) -> c_int;
        rados_shutdown(Handle);
        rados_ioctx_create(Handle, *const c_char, *mut Handle) -> c_int;
        rados_ioctx_set_namespace(Handle, *const c_char);
        rados_ioctx_destroy(Handle);
    }
    rbd {
        rbd_open(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
        rbd_open_read_only(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
        rbd_close(Handle) -> c_int;
        rbd_create(Handle, *const c_char, u64, *mut c_int) -> c_int;
        rbd_remove(Handle, *const c_char) -> c_int;
        rbd_get_size(Handle, *mut u64) -> c_int;
        rbd_get_features(Handle, *mut u64) -> c_int;
        rbd_resize(Handle, u64) -> c_int;
        rbd_aio_create_completion(*mut c_void, OnEnd, *mut Handle) -> c_int;
        rbd_aio_get_return_value(Handle) -> isize;
        rbd_aio_release(Handle);
        rbd_aio_readv(Handle, *const libc::iovec, c_int, u64, Handle) -> c_int;
        rbd_aio_write(Handle, u64, usize, *const c_char, Handle) -> c_int;
        rbd_aio_flush(Handle, Handle) -> c_int;
        rbd_aio_discard(Handle, u64, u64, Handle) -> c_int;
        rbd_aio_write_zeroes(Handle, u64, usize, Handle, c_int, c_int) -> c_int;
        rbd_diff_iterate2(Handle, *const c_char, u64, u64, u8, u8, OnExtent, *mut c_void) -> c_int;
        rbd_update_watch(Handle, *mut u64, OnUpdate, *mut c_void) -> c_int;
        rbd_update_unwatch(Handle, u64) -> c_int;
        rbd_watchers_list(Handle, *mut Watcher, *mut usize) -> c_int;
        rbd_watchers_list_cleanup(*mut Watcher, usize);
        rbd_lock_acquire(Handle, c_int) -> c_int;
        rbd_lock_get_owners(Handle, *mut c_int, *mut *mut c_char, *mut usize) -> c_int;
        rbd_lock_get_owners_cleanup(*mut *mut c_char, usize);
        rbd_lock_break(Handle, c_int, *const c_char) -> c_int;
        rbd_snap_create(Handle, *const c_char) -> c_int;
        rbd_snap_remove(Handle, *const c_char) -> c_int;
        rbd_snap_rollback(Handle, *const c_char) -> c_int;
        rbd_snap_list(Handle, *mut SnapshotInfo, *mut c_int) -> c_int;
        rbd_snap_list_end(*mut SnapshotInfo);
        rbd_snap_get_timestamp(Handle, u64, *mut libc::timespec) -> c_int;
        rbd_image_options_create(*mut Handle);
        rbd_image_options_destroy(Handle);
        rbd_clone3(Handle, *const c_char, *const c_char, Handle, *const c_char, Handle) -> c_int;
        rbd_metadata_get(Handle, *const c_char, *mut c_char, *mut usize) -> c_int;
        rbd_metadata_set(Handle, *const c_char, *const c_char) -> c_int;
        rbd_metadata_remove(Handle, *const c_char) -> c_int;
    }
}

/// The functions; else why there are none, and what to do.
pub(crate) fn api() -> Result<&'static Api, String> {
    static API: OnceLock<Result<Api, String>> = OnceLock::new();
    let load = || {
        let open = |name: &str| {
            // SAFETY: Ceph's libraries may be loaded at any time: what they do then makes no threads, and nothing of ours
            // is concerned by it.
            unsafe { Library::new(name) }.map_err(|error| {
                format!(
                    "Ceph's library cannot be loaded: {error}: install librbd1 (of Fedora and SUSE: librbd1, too), \
                     and where this server is confined name the disk when it starts, or give it --allow rbd:"
                )
            })
        };
        Api::find(open("librados.so.2")?, open("librbd.so.1")?)
            .map_err(|error| format!("librbd is too old ({error}): it must be of Ceph 15 or later"))
    };
    API.get_or_init(load).as_ref().map_err(Clone::clone)
}

/// Text as they take it.
fn c_text(text: &str) -> Result<CString, i32> {
    CString::new(text).map_err(|_| libc::EINVAL)
}

/// A result of theirs, a negative errno or none.
fn done(result: c_int) -> Result<(), i32> {
    if result < 0 { Err(-result) } else { Ok(()) }
}
