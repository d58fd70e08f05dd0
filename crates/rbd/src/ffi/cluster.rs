//! Connections to clusters, and pools of them.

use std::ffi::{CStr, c_char};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use super::{Api, Handle, api, c_text, done};
use crate::name::ClusterName;

/// A connection.
pub(crate) struct Cluster {
    api: &'static Api,
    rados: Handle,
    /// The cluster has shut it out.
    shut_out: AtomicBool,
}

// SAFETY: librados lets every thread use a connection.
unsafe impl Send for Cluster {}
// SAFETY: as above.
unsafe impl Sync for Cluster {}

/// For how long a cluster is looked for, where its configuration says nothing, in seconds.
const PATIENCE: &str = "30";
const CEPHS_PATIENCE: &str = "300";

impl Cluster {
    /// Connect. Waits for the cluster. Else what was tried and found.
    pub(crate) fn connect(name: &ClusterName) -> Result<Cluster, String> {
        let api = api()?;
        let errno = |errno: i32| std::io::Error::from_raw_os_error(errno);
        let failed = |what: &str| {
            let what = what.to_owned();
            move |code: i32| format!("{what}: {}", errno(code))
        };
        let id = name.id.as_deref().map(c_text).transpose().map_err(failed("the user's name"))?;
        let mut rados = ptr::null_mut();
        let id = id.as_deref().map_or(ptr::null(), CStr::as_ptr);
        // SAFETY: a place for the handle, and a text that ends, or none.
        done(unsafe { (api.rados_create)(&mut rados, id) }).map_err(failed("cannot begin"))?;
        let cluster = Cluster { api, rados, shut_out: AtomicBool::new(false) };
        cluster.configure(name)?;
        // SAFETY: the handle is there until the cluster is dropped.
        done(unsafe { (api.rados_connect)(rados) }).map_err(|code| {
            let more = match code {
                libc::ETIMEDOUT => "no monitor answers: is the cluster up, and mon_host right?",
                libc::ENOENT | libc::EACCES | libc::EPERM => {
                    "are the user (:id=NAME) and its keyring right?"
                }
                _ => "is Ceph's configuration right?",
            };
            format!("cannot connect to the cluster: {}: {more}", errno(code))
        })?;
        Ok(cluster)
    }

    fn configure(&self, name: &ClusterName) -> Result<(), String> {
        let Cluster { api, rados, .. } = *self;
        let conf = name.conf.as_deref().map(c_text).transpose();
        let conf = conf.map_err(|_| "conf= has a zero in it".to_owned())?;
        let path = conf.as_deref().map_or(ptr::null(), CStr::as_ptr);
        // SAFETY: a path that ends, or none; the handle is there.
        let read = unsafe { (api.rados_conf_read_file)(rados, path) };
        let told = name.conf.clone().or_else(|| std::env::var("CEPH_CONF").ok());
        match (done(read), told) {
            (Ok(()), _) => {}
            (Err(code), Some(path)) => {
                let error = std::io::Error::from_raw_os_error(code);
                return Err(format!("cannot read Ceph's configuration {path}: {error}"));
            }
            // There may be none where options say all of it.
            (Err(_), None) if name.options.iter().any(|(key, _)| key == "mon_host") => {}
            (Err(_), None) => {
                return Err(
                    "there is no configuration of Ceph: put it at /etc/ceph/ceph.conf, or name it by \
                            CEPH_CONF or :conf=FILE"
                        .into(),
                );
            }
        }
        // SAFETY: no name of a variable: that is CEPH_ARGS.
        done(unsafe { (api.rados_conf_parse_env)(rados, ptr::null()) })
            .map_err(|code| format!("CEPH_ARGS: {}", std::io::Error::from_raw_os_error(code)))?;
        // Guests have caches of their own. What is written is copied here.
        let own = [("rbd_cache", "false"), ("rbd_disable_zero_copy_writes", "false")];
        for (key, value) in own {
            let _ = self.set(key, value);
        }
        if self.get("client_mount_timeout").as_deref() == Some(CEPHS_PATIENCE) {
            let _ = self.set("client_mount_timeout", PATIENCE);
        }
        for (key, value) in &name.options {
            self.set(key, value).map_err(|code| {
                let error = std::io::Error::from_raw_os_error(code);
                format!("{key}={value} is no option of Ceph: {error}")
            })?;
        }
        Ok(())
    }

    fn set(&self, key: &str, value: &str) -> Result<(), i32> {
        let (key, value) = (c_text(key)?, c_text(value)?);
        // SAFETY: texts that end; the handle is there.
        done(unsafe { (self.api.rados_conf_set)(self.rados, key.as_ptr(), value.as_ptr()) })
    }

    fn get(&self, key: &str) -> Option<String> {
        let key = c_text(key).ok()?;
        let mut value = [0u8; 64];
        let (at, room) = (value.as_mut_ptr().cast::<c_char>(), value.len());
        // SAFETY: a text that ends, and so much room.
        done(unsafe { (self.api.rados_conf_get)(self.rados, key.as_ptr(), at, room) }).ok()?;
        Some(CStr::from_bytes_until_nul(&value).ok()?.to_str().ok()?.to_owned())
    }

    /// The cluster has shut it out: nothing more is opened by it.
    pub(crate) fn set_shut_out(&self) {
        self.shut_out.store(true, SeqCst);
    }

    /// Whether it has.
    pub(crate) fn is_shut_out(&self) -> bool {
        self.shut_out.load(SeqCst)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // SAFETY: nothing of it is used any more: pools and images keep it.
        unsafe { (self.api.rados_shutdown)(self.rados) };
    }
}

/// A pool, or a namespace of it.
pub(crate) struct Pool {
    pub(super) api: &'static Api,
    pub(super) io: Handle,
    cluster: Arc<Cluster>,
}

// SAFETY: librados lets every thread use it; nothing of it is changed once it is here.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

impl Pool {
    /// Find it. Else a positive errno.
    pub(crate) fn open(cluster: Arc<Cluster>, name: &str, namespace: &str) -> Result<Pool, i32> {
        let (name, namespace) = (c_text(name)?, c_text(namespace)?);
        let (api, mut io) = (cluster.api, ptr::null_mut());
        // SAFETY: a text that ends, and a place for the handle.
        done(unsafe { (api.rados_ioctx_create)(cluster.rados, name.as_ptr(), &mut io) })?;
        // SAFETY: the handle was just made; a text that ends.
        unsafe { (api.rados_ioctx_set_namespace)(io, namespace.as_ptr()) };
        Ok(Pool { api, io, cluster })
    }

    /// Its connection.
    pub(crate) fn cluster(&self) -> &Arc<Cluster> {
        &self.cluster
    }

    /// Make an image there, with the features that the configuration names.
    pub(crate) fn make(&self, image: &str, len: u64) -> Result<(), i32> {
        let (image, mut order) = (c_text(image)?, 0);
        // SAFETY: a text that ends, and a place for what the order becomes.
        done(unsafe { (self.api.rbd_create)(self.io, image.as_ptr(), len, &mut order) })
    }

    /// Remove an image.
    pub(crate) fn remove(&self, image: &str) -> Result<(), i32> {
        let image = c_text(image)?;
        // SAFETY: a text that ends.
        done(unsafe { (self.api.rbd_remove)(self.io, image.as_ptr()) })
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: images keep it.
        unsafe { (self.api.rados_ioctx_destroy)(self.io) };
    }
}
