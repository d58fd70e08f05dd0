//! Decoding compressed clusters beside the queue threads, and keeping the last ones decoded.
//!
//! The threads serve every image of the process and start with the first cluster to decode. A task
//! waits for its cluster on an eventfd, like for any transfer.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use ringtap_io::{Io, Op, OpenFile, Panic};
use rustix::event::{EventfdFlags, eventfd};

use super::{Compression, compressed};
use crate::Error;

/// The most threads; decoding a cluster takes far longer than reading it.
const MOST_THREADS: usize = 8;

/// Decodes the clusters of one image.
pub struct Decoder {
    kind: Compression,
    cluster: usize,
    inline: bool,
    cache: Mutex<Cache>,
}

impl Decoder {
    /// A decoder of clusters of `cluster` bytes that keeps up to `cache` bytes of them, at least one
    /// cluster. `inline` decodes in the task that asks, as a simulation must.
    pub fn new(kind: Compression, cluster: usize, cache: usize, inline: bool) -> Decoder {
        let most = (cache / cluster.max(1)).max(1);
        let cache = Mutex::new(Cache { most, clock: 0, clusters: HashMap::new() });
        Decoder { kind, cluster, inline, cache }
    }

    /// The cluster of an L2 entry, where it was decoded not long ago.
    pub fn cached(&self, entry: u64) -> Option<Arc<[u8]>> {
        lock(&self.cache).get(entry)
    }

    /// Decode the cluster of an L2 entry from the bytes that the entry points to.
    pub async fn decode(&self, io: &Io, entry: u64, data: Vec<u8>) -> Result<Arc<[u8]>, Error> {
        let decoded = if self.inline {
            run(self.kind, &data, self.cluster)?
        } else {
            self.decode_elsewhere(io, data).await?
        };
        lock(&self.cache).put(entry, decoded.clone());
        Ok(decoded)
    }

    /// Forget all clusters: an L2 entry may come to mean something else from now on.
    pub fn forget(&self) {
        lock(&self.cache).clusters.clear();
    }

    async fn decode_elsewhere(&self, io: &Io, data: Vec<u8>) -> Result<Arc<[u8]>, Error> {
        let pool = Pool::get()?;
        let event = match lock(&pool.events).pop() {
            Some(event) => event,
            None => {
                let event = eventfd(0, EventfdFlags::CLOEXEC);
                OpenFile::new(event.map_err(|error| Error::from_errno(error.raw_os_error()))?)
            }
        };
        let file = event.handle();
        let job = Arc::new(Job {
            kind: self.kind,
            cluster: self.cluster,
            data,
            event,
            result: Mutex::new(None),
        });
        lock(&pool.queue).push_back(job.clone());
        pool.more.notify_one();
        let result = loop {
            let read = io.run(Op::ReadEvent { file }).await;
            match lock(&job.result).take() {
                Some(Ok(result)) => break result,
                // It belongs to the disk whose cluster it was: here is who serves that.
                Some(Err(panic)) => panic.pass_on(),
                None => {}
            }
            // Only a ring that is coming down says anything else than "interrupted".
            if read < 0 && read != -libc::EINTR {
                break Err(Error::from_errno(-read));
            }
        };
        if let Ok(job) = Arc::try_unwrap(job) {
            lock(&pool.events).push(job.event);
        }
        result
    }
}

fn run(kind: Compression, data: &[u8], cluster: usize) -> Result<Arc<[u8]>, Error> {
    let mut out = vec![0; cluster];
    compressed::decode(kind, data, &mut out)?;
    Ok(out.into())
}

type Decoded = Result<Arc<[u8]>, Error>;

struct Job {
    kind: Compression,
    cluster: usize,
    data: Vec<u8>,
    event: OpenFile,
    result: Mutex<Option<Result<Decoded, Panic>>>,
}

#[derive(Default)]
struct Pool {
    queue: Mutex<VecDeque<Arc<Job>>>,
    more: Condvar,
    /// Events that nobody waits for, with a count of 0.
    events: Mutex<Vec<OpenFile>>,
}

impl Pool {
    fn get() -> Result<&'static Pool, Error> {
        static POOL: OnceLock<Option<&'static Pool>> = OnceLock::new();
        POOL.get_or_init(Pool::start).ok_or(Error::Os(libc::EAGAIN))
    }

    /// None where not one thread can be had.
    fn start() -> Option<&'static Pool> {
        let pool: &'static Pool = Box::leak(Box::default());
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let started = (0..cores.min(MOST_THREADS)).filter(|number| {
            let thread = std::thread::Builder::new().name(format!("decode {number}"));
            thread.spawn(|| pool.work()).is_ok()
        });
        (started.count() > 0).then_some(pool)
    }

    fn work(&self) {
        loop {
            let mut queue = lock(&self.queue);
            let job = loop {
                match queue.pop_front() {
                    Some(job) => break job,
                    None => queue = self.more.wait(queue).unwrap_or_else(PoisonError::into_inner),
                }
            };
            drop(queue);
            let result = Panic::catch(|| run(job.kind, &job.data, job.cluster));
            *lock(&job.result) = Some(result);
            // An event takes 2^64 - 2 of these before it would block.
            while rustix::io::write(&job.event, &1u64.to_ne_bytes()) == Err(rustix::io::Errno::INTR)
            {
            }
        }
    }
}

struct Cache {
    most: usize,
    clock: u64,
    /// By L2 entry: when it was last used, and its bytes.
    clusters: HashMap<u64, (u64, Arc<[u8]>)>,
}

impl Cache {
    fn get(&mut self, entry: u64) -> Option<Arc<[u8]>> {
        self.clock += 1;
        let (used, bytes) = self.clusters.get_mut(&entry)?;
        *used = self.clock;
        Some(bytes.clone())
    }

    fn put(&mut self, entry: u64, bytes: Arc<[u8]>) {
        self.clock += 1;
        if self.clusters.len() >= self.most && !self.clusters.contains_key(&entry) {
            let oldest = self.clusters.iter().min_by_key(|(_, (used, _))| *used);
            if let Some(oldest) = oldest.map(|(entry, _)| *entry) {
                self.clusters.remove(&oldest);
            }
        }
        self.clusters.insert(entry, (self.clock, bytes));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::rc::Rc;

    use super::*;
    use crate::on_a_ring;
    use crate::qcow2::compressed::Encoder;

    fn cluster(number: u8) -> Vec<u8> {
        (0..65536u32).map(|at| (at / 100) as u8 ^ number).collect()
    }

    fn compressed(kind: Compression, number: u8) -> Vec<u8> {
        let mut out = vec![0; 65536];
        let mut encoder = Encoder::new(kind).expect("memory");
        let len = encoder.encode(&cluster(number), &mut out).expect("smaller");
        out.truncate(len);
        out
    }

    #[test]
    fn clusters_are_decoded_beside_the_ring() {
        for (kind, inline) in
            [(Compression::Deflate, false), (Compression::Zstd, false), (Compression::Zstd, true)]
        {
            on_a_ring(Path::new("none"), |io| async move {
                let decoder = Rc::new(Decoder::new(kind, 65536, 4 * 65536, inline));
                let left = Rc::new(std::cell::Cell::new(40));
                for number in 0..40u8 {
                    let (task_io, decoder, left) = (io.clone(), decoder.clone(), left.clone());
                    io.spawn(async move {
                        let data = compressed(kind, number);
                        let entry = u64::from(number);
                        let out = decoder.decode(&task_io, entry, data).await.expect("decoded");
                        assert!(*out == *cluster(number));
                        left.set(left.get() - 1);
                    });
                }
                while left.get() > 0 {
                    io.sleep(1_000_000).await;
                }
                let bad = decoder.decode(&io, 99, vec![0xff; 100]).await;
                assert_eq!(bad.map(|_| ()), Err(Error::Corrupt));
                assert!(decoder.cached(99).is_none());
                let kept: Vec<u64> = (0..40).filter(|at| decoder.cached(*at).is_some()).collect();
                assert_eq!(kept.len(), 4);
                decoder.forget();
                assert!(kept.iter().all(|at| decoder.cached(*at).is_none()));
            })
            .expect("a ring");
        }
    }

    #[test]
    fn what_was_used_last_is_kept() {
        let mut cache = Cache { most: 2, clock: 0, clusters: HashMap::new() };
        let bytes: Arc<[u8]> = vec![1].into();
        cache.put(1, bytes.clone());
        cache.put(2, bytes.clone());
        cache.get(1);
        cache.put(3, bytes);
        let kept = [1, 2, 3].map(|entry| cache.get(entry).is_some());
        assert_eq!(kept, [true, false, true]);
    }
}
