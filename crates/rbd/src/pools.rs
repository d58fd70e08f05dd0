//! The connections of the process, which images of one cluster share.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::Name;
use crate::ffi::{Cluster, Pool};
use crate::name::ClusterName;

/// Images on a connection before there is another: one connection is as fast as one thread of it.
const IMAGES: usize = 4;
/// The most connections to a cluster.
const MOST: usize = 4;

static OPEN: Mutex<Vec<(ClusterName, Weak<Cluster>)>> = Mutex::new(vec![]);

/// The connection for one image more: one that is there, or a new one. Waits for the cluster.
fn cluster(name: &ClusterName) -> Result<Arc<Cluster>, String> {
    // Held while connecting: who opens several at once shall share.
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    open.retain(|(_, cluster)| cluster.strong_count() > 0);
    let same = open.iter().filter(|(other, _)| other == name);
    let used = same.filter_map(|(_, cluster)| Some((cluster.strong_count(), cluster.upgrade()?)));
    let used: Vec<_> = used.filter(|(_, cluster)| !cluster.is_shut_out()).collect();
    let full = used.len() >= MOST;
    let least = used.into_iter().min_by_key(|(count, _)| *count);
    if let Some((_, cluster)) = least.filter(|(count, _)| full || *count < IMAGES) {
        return Ok(cluster);
    }
    let cluster = Arc::new(Cluster::connect(name)?);
    open.push((name.clone(), Arc::downgrade(&cluster)));
    Ok(cluster)
}

/// The pool of an image.
pub(crate) fn pool(name: &Name) -> Result<Pool, String> {
    let cluster = cluster(&name.cluster)?;
    Pool::open(cluster, &name.pool, &name.namespace).map_err(|errno| match errno {
        libc::ENOENT => format!("the cluster has no pool {}", name.pool),
        errno => format!("the pool {}: {}", name.pool, error(errno)),
    })
}

/// The sentence of an errno.
pub(crate) fn error(errno: i32) -> std::io::Error {
    std::io::Error::from_raw_os_error(errno)
}
