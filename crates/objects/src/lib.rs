//! Objects of stores that speak S3, and files of HTTP servers: read, and never written to.
//!
//! `open` asks for the size and the ETag (`source`). From then on every request is for a range of that very object, by
//! If-Match, so that one that was replaced is an error and never a mixture of both; where an index names what each chunk
//! holds (`index`), every chunk is compared with it. A thread that reads has a session (`session`), which ends
//! at once what is at hand. What is not goes to the threads of `runtime`: each chunk is one request, on a connection that no
//! other chunk waits for, tried again for as long as the operator said (`chunks`). Where the operator gives a folder for it
//! they are kept (`cache`), and a read of what is kept is a read of that file, by the thread's own reactor. What a boot list names is
//! fetched before anybody asks (`boot`).
//!
//! Requests, signatures and the chain of credentials are the crate `object_store`'s; `http` is the client under it.

#![forbid(unsafe_code)]

mod ahead;
pub mod boot;
mod budget;
pub mod cache;
mod chunks;
mod credentials;
mod http;
pub mod index;
mod journal;
mod memory;
mod publish;
mod runtime;
mod session;
mod source;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod trust;
mod upload;
mod uri;

use std::collections::HashMap;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use ringtap_io::{Holds, Io, OpenRemote, Remote, Session};
use tokio::runtime::Handle;
use tokio::sync::{Notify, Semaphore};

use boot::Recorder;
pub use cache::CacheDir;
use cache::{Cache, Unusable};
use chunks::Flight;
use http::Connector;
use index::{CHUNK, Index, digest};
pub use publish::{Publication, Published, publish};
use ringtap_stores::{Beside, Facts, LocalCache, Options, Store, Tells, WeakStore};
use source::{Failure, Source};
pub use upload::STOPPED;
pub use uri::{Server, Uri};

/// For how long opening tries again, at most.
const OPENING: Duration = Duration::from_secs(5);
/// Requests for what nobody waits for, at a time.
const WIDE: usize = 32;

/// What the operator says of all objects of this process.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// Where chunks are kept.
    pub cache: Option<CacheDir>,
    /// Where a boot list of the first object is written.
    pub record: Option<PathBuf>,
    /// A server before this one has begun that list.
    pub record_goes_on: bool,
    /// A boot list.
    pub boot_list: Option<PathBuf>,
    /// Whether all of an object is brought into the cache.
    pub fill: bool,
}

static SETTINGS: OnceLock<Settings> = OnceLock::new();
/// The object that is recorded, by its name: it may be closed and opened again.
static RECORDED: Mutex<Option<(String, Arc<Recorder>)>> = Mutex::new(None);

/// An open object.
pub(crate) struct Object {
    uri: Uri,
    source: Source,
    size: u64,
    etag: Option<String>,
    index: Option<Index>,
    runtime: Handle,
    memory: memory::Memory,
    cache: Option<Cache>,
    /// The folder that none could be made in, and why.
    without: Option<(PathBuf, String)>,
    recorder: Option<Arc<Recorder>>,
    /// What was kept is made stable soon.
    settles: AtomicBool,
    /// Chunks that are on their way, by number.
    flights: Mutex<HashMap<u32, Flight>>,
    ahead: ahead::Ahead,
    wide: Arc<Semaphore>,
    /// Requests fail at once until one goes well.
    given_up: AtomicBool,
    /// Another object is there now.
    replaced: AtomicBool,
    closed: AtomicBool,
    closing: Notify,
}

/// From now on this process opens objects by their names. The first who says so decides.
pub fn start(settings: Settings) {
    let _first = SETTINGS.set(settings);
    ringtap_stores::open_objects_by(|uri, options| open(&Uri::parse(uri)?, options));
    ringtap_stores::objects_take(beside);
}

/// The files that objects of this process take. A folder of the cache that is not there yet is made: whoever confines the
/// process by this cannot name what is not there.
fn beside() -> Beside {
    let settings = SETTINGS.get().cloned().unwrap_or_default();
    let mut read = credentials::files();
    read.extend(settings.boot_list);
    let cache = settings.cache.map(|cache| cache.path);
    if let Some(Err(error)) = cache.as_deref().map(cache::make_folder) {
        tracing::debug!("the cache folder: {error}");
    }
    let recorded = settings.record.as_deref().map(|path| match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
        _ => PathBuf::from("."),
    });
    Beside { read, kept: cache.into_iter().chain(recorded).collect() }
}

/// Open an object. Waits for its server.
pub fn open(uri: &Uri, options: &Options) -> Result<Store, String> {
    if !options.read_only {
        return Err(format!(
            "objects are not written to: add --read-only, put an overlay above it \
             (ringtap create -f qcow2 -b '{uri}' -F FORMAT OVERLAY), or upload a file by ringtap publish"
        ));
    }
    if let Some(store) = known(uri) {
        return Ok(store);
    }
    let object = begin(uri, &SETTINGS.get().cloned().unwrap_or_default())?;
    let facts = Facts {
        len: object.size,
        read_only: true,
        block: 1,
        preferred: 4096,
        rotational: false,
        discard: false,
        zero: false,
        resizable: false,
        verified: object.index.is_some(),
    };
    let weak = Arc::downgrade(&object);
    let store = Store::new(OpenRemote::new(object.clone()), facts).telling(object);
    let mut open = open_ones();
    open.retain(|one| one.store.upgrade().is_some());
    open.push(OpenOne { name: uri.to_string(), object: weak, store: store.downgrade() });
    Ok(store)
}

/// Look at an object, and begin to fetch what is to be fetched first.
fn begin(uri: &Uri, settings: &Settings) -> Result<Arc<Object>, String> {
    let source = Source::new(uri, &connector()?)?;
    let (asked, runtime) = (uri.clone(), runtime::handle()?);
    let wants_list = settings.cache.is_some();
    let found = runtime::wait_for(async move { look(&asked, source, wants_list).await })??;
    let Found { source, size, etag, index, known_by, boot_list } = found;
    let (mut cache, mut without) = (None, None);
    if let Some(dir) = &settings.cache {
        match Cache::open(dir, &known_by, size) {
            Ok(open) => cache = Some(open),
            Err(Unusable::Refused(why)) => return Err(why),
            // The object is as good without it.
            Err(Unusable::Disk(why)) => {
                tracing::error!("{why}: nothing of {uri} is kept there until it is opened anew");
                without = Some((dir.path.clone(), why));
            }
        }
    }
    let count = size.div_ceil(CHUNK) as u32;
    if let (Some(cache), Some(index)) = (&cache, &index) {
        // Where nothing was written the file reads as zeros.
        (0..count).filter(|number| index.is_zero(*number)).for_each(|number| cache.set(number));
    }
    let list = boot_list_of(settings, boot_list, count)?;
    let recorder = recorder_of(uri, settings, count)?;
    let object = Object {
        uri: uri.clone(),
        source,
        size,
        etag,
        index,
        runtime,
        memory: memory::Memory::default(),
        cache,
        without,
        recorder,
        settles: AtomicBool::new(false),
        flights: Mutex::default(),
        ahead: ahead::Ahead::default(),
        wide: Arc::new(Semaphore::new(WIDE)),
        given_up: AtomicBool::new(false),
        replaced: AtomicBool::new(false),
        closed: AtomicBool::new(false),
        closing: Notify::new(),
    };
    let object = Arc::new(object);
    let keeps = object.cache.is_some();
    object.fetch_first(if keeps { list } else { vec![] }, settings.fill && keeps);
    Ok(object)
}

/// What records the object, if it is the one that is recorded.
fn recorder_of(
    uri: &Uri,
    settings: &Settings,
    count: u32,
) -> Result<Option<Arc<Recorder>>, String> {
    let Some(path) = &settings.record else { return Ok(None) };
    let mut recorded = RECORDED.lock().unwrap_or_else(PoisonError::into_inner);
    let name = uri.to_string();
    if let Some((first, recorder)) = &*recorded {
        return Ok((*first == name).then(|| recorder.clone()));
    }
    let failed = |error| format!("cannot record to {}: {error}", path.display());
    let recorder = Recorder::new(path, count, settings.record_goes_on).map_err(failed)?;
    let recorder = Arc::new(recorder);
    *recorded = Some((name, recorder.clone()));
    Ok(Some(recorder))
}

/// One that is open.
struct OpenOne {
    name: String,
    object: Weak<Object>,
    store: WeakStore,
}

/// Those that are open, by their names: disks that have one base share it.
fn open_ones() -> MutexGuard<'static, Vec<OpenOne>> {
    static OPEN: Mutex<Vec<OpenOne>> = Mutex::new(vec![]);
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn known(uri: &Uri) -> Option<Store> {
    let name = uri.to_string();
    // All reads of one that was replaced fail, for good: who opens now has the one that is there.
    let is_good = |object: Arc<Object>| !object.replaced.load(SeqCst);
    let open = open_ones();
    let mut those =
        open.iter().filter(|one| one.name == name && one.object.upgrade().is_some_and(is_good));
    those.find_map(|one| one.store.upgrade())
}

/// What is to be fetched first: by the list of the operator, else by the one beside the object.
fn boot_list_of(
    settings: &Settings,
    beside: Option<Vec<u8>>,
    count: u32,
) -> Result<Vec<u32>, String> {
    if settings.cache.is_none() {
        return Ok(vec![]);
    }
    if let Some(path) = settings.boot_list.as_deref().filter(|path| path.exists()) {
        let failed = |why: String| format!("the boot list {} {why}", path.display());
        let text =
            std::fs::read(path).map_err(|error| failed(format!("cannot be read: {error}")))?;
        return boot::parse(&text, count).map_err(failed);
    }
    match beside.map(|text| boot::parse(&text, count)) {
        Some(Err(why)) => {
            tracing::warn!("the boot list beside the object {why}");
            Ok(vec![])
        }
        list => Ok(list.and_then(Result::ok).unwrap_or_default()),
    }
}

/// The client of the process.
fn connector() -> Result<Connector, String> {
    static CONNECTOR: OnceLock<Result<Connector, String>> = OnceLock::new();
    CONNECTOR.get_or_init(Connector::new).clone()
}

/// What opening has found.
struct Found {
    source: Source,
    size: u64,
    etag: Option<String>,
    index: Option<Index>,
    /// What no other bytes have: by it they are kept.
    known_by: String,
    boot_list: Option<Vec<u8>>,
}

async fn look(uri: &Uri, source: Source, wants_list: bool) -> Result<Found, String> {
    let patience = uri.reconnect.unwrap_or_default().min(OPENING);
    let (facts, bytes, boot_list) = tokio::join!(
        again(patience, || source.look()),
        again(patience, || source.beside(index::ENDING, index::MOST)),
        async {
            if !wants_list {
                return None;
            }
            // A hint: without it a start takes longer.
            source.beside(boot::ENDING, boot::MOST).await.ok().flatten()
        },
    );
    let facts = facts.map_err(|failure| match failure {
        Failure::Missing => "there is no such object".to_owned(),
        Failure::Denied(why) => format!("the store lets us not read it: {why}"),
        other => other.text(),
    })?;
    let bytes = match (bytes, uri.digest) {
        (Ok(bytes), _) => bytes,
        // Stores that let nobody list them say so of what is not there.
        (Err(Failure::Denied(_)), None) => None,
        (Err(failure), _) => return Err(format!("its index: {}", failure.text())),
    };
    // An index names every byte, whether it is pinned or not; an ETag only where it is a strong one.
    let known_by = match &bytes {
        Some(bytes) => format!("sha256:{}", hex::encode(digest(bytes))),
        None => format!("{} {}", uri.identity(), facts.etag.as_deref().unwrap_or("-")),
    };
    let index = match bytes {
        Some(bytes) => {
            Some(Index::parse(&bytes, uri.digest).map_err(|why| format!("its index {why}"))?)
        }
        None if uri.digest.is_some() => {
            return Err(format!(
                "digest= names an index, and there is none beside it ({})",
                index::ENDING
            ));
        }
        None => None,
    };
    if let Some(index) = index.as_ref().filter(|index| index.size() != facts.size) {
        return Err(format!(
            "it has {} bytes, and its index is of an object of {}: publish it again",
            facts.size,
            index.size()
        ));
    }
    if facts.size.div_ceil(CHUNK) > u32::MAX.into() {
        return Err(format!("it has {} bytes, more than 1 PiB", facts.size));
    }
    if index.is_none() && facts.etag.is_none() {
        return Err("the server gives no strong ETag, so that nobody could tell if it was replaced while it is read: \
                    publish it with an index (ringtap publish), or copy it"
            .into());
    }
    Ok(Found { source, size: facts.size, etag: facts.etag, index, known_by, boot_list })
}

/// A request, made again while what fails may go well, and for so long.
async fn again<T, F: Future<Output = Result<T, Failure>>>(
    patience: Duration,
    mut request: impl FnMut() -> F,
) -> Result<T, Failure> {
    let (begun, mut pause) = (Instant::now(), chunks::PAUSE);
    loop {
        match request().await {
            Err(Failure::Passing { .. }) if begun.elapsed() + pause < patience => {
                tokio::time::sleep(pause).await;
                pause *= 2;
            }
            end => return end,
        }
    }
}

impl Object {
    /// What the range holds, or the first of it.
    fn holds(&self, offset: u64, len: u64) -> Holds {
        let data = Holds { len, hole: false, zero: false };
        let Some(index) = &self.index else { return data };
        let end = offset.saturating_add(len).min(self.size);
        if offset >= end {
            return data;
        }
        let numbers = (offset / CHUNK) as u32..end.div_ceil(CHUNK) as u32;
        let zero = index.is_zero(numbers.start);
        let other = numbers.clone().find(|number| index.is_zero(*number) != zero);
        let to = other.map_or(offset + len, |number| u64::from(number) * CHUNK);
        Holds { len: to - offset, hole: zero, zero }
    }
}

impl Tells for Object {
    fn local_cache(&self) -> Option<LocalCache> {
        let told = |folder: &PathBuf, given_up: Option<&str>| LocalCache {
            folder: folder.display().to_string(),
            given_up: given_up.map(str::to_owned),
        };
        match (&self.cache, &self.without) {
            (Some(cache), _) => Some(told(cache.folder(), cache.given_up())),
            (None, Some((folder, why))) => Some(told(folder, Some(why))),
            (None, None) => None,
        }
    }
}

impl Remote for Object {
    fn session(self: Arc<Self>, _: &Io) -> Rc<dyn Session> {
        session::session(self)
    }

    fn close(&self) {
        self.closed.store(true, SeqCst);
        self.closing.notify_waiters();
        if let Some(cache) = &self.cache {
            cache.settle();
        }
    }
}
