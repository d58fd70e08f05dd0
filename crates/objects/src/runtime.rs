//! The threads that requests to stores are made on, for the whole process, from the first on.

use std::future::Future;
use std::sync::OnceLock;

use tokio::runtime::{Builder, Handle, Runtime};

static RUNTIME: OnceLock<Result<Runtime, String>> = OnceLock::new();

/// Decrypting and verifying want more than one.
const WORKERS: usize = 2;
/// Those that write to local caches.
const WRITERS: usize = 4;

/// The handle by which work is given to them.
pub(crate) fn handle() -> Result<Handle, String> {
    let runtime = RUNTIME.get_or_init(|| {
        let mut builder = Builder::new_multi_thread();
        builder.worker_threads(WORKERS).max_blocking_threads(WRITERS).thread_name("objects");
        builder.enable_all().build().map_err(|error| format!("cannot start threads: {error}"))
    });
    runtime.as_ref().map(|runtime| runtime.handle().clone()).map_err(Clone::clone)
}

/// Do it there, and wait for its end here.
pub(crate) fn wait_for<T: Send + 'static>(
    work: impl Future<Output = T> + Send + 'static,
) -> Result<T, String> {
    let (tell, hear) = std::sync::mpsc::sync_channel(1);
    handle()?.spawn(async move { _ = tell.send(work.await) });
    hear.recv().map_err(|_| "a thread has panicked".to_owned())
}
