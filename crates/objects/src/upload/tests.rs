//! Stores that fail in the middle of an upload, and lose it.

use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use object_store::memory::InMemory;
use object_store::multipart::MultipartStore;
use object_store::path::Path;
use object_store::{
    MultipartId, ObjectStoreExt as _, PutMultipartOptions, PutPayload, PutResult, Result,
};

use tokio::sync::watch;

use super::*;
use crate::index::digest;
use crate::runtime;

/// One that fails from a part on.
#[derive(Debug, Default)]
struct Fails {
    store: Arc<InMemory>,
    /// The first part that it does not take.
    from: AtomicUsize,
    /// Parts that it has taken.
    took: Mutex<Vec<usize>>,
    begun: Mutex<Vec<String>>,
    /// Until there have been so many parts at a time none ends.
    wanted: usize,
    now: AtomicUsize,
    most: watch::Sender<usize>,
}

#[async_trait]
impl MultipartStore for Fails {
    async fn create_multipart(&self, path: &Path) -> Result<MultipartId> {
        self.create_multipart_opts(path, PutMultipartOptions::default()).await
    }

    async fn create_multipart_opts(
        &self,
        path: &Path,
        options: PutMultipartOptions,
    ) -> Result<MultipartId> {
        let id = self.store.create_multipart_opts(path, options).await?;
        self.begun.lock().expect("no panic").push(id.clone());
        Ok(id)
    }

    async fn put_part(
        &self,
        path: &Path,
        id: &MultipartId,
        part: usize,
        data: PutPayload,
    ) -> Result<PartId> {
        if part >= self.from.load(SeqCst) {
            return Err(Error::Generic { store: "test", source: "it is full".into() });
        }
        if !self.begun.lock().expect("no panic").contains(id) {
            return Err(Error::NotFound { path: id.clone(), source: "no such upload".into() });
        }
        self.stays_until_others_are_here().await;
        self.store.put_part(path, id, part, data).await?;
        self.took.lock().expect("no panic").push(part);
        Ok(PartId { content_id: format!("\"{part}\"") })
    }

    async fn complete_multipart(
        &self,
        path: &Path,
        id: &MultipartId,
        parts: Vec<PartId>,
    ) -> Result<PutResult> {
        let wanted = (0..parts.len()).map(|part| format!("\"{part}\""));
        assert!(parts.iter().map(|part| part.content_id.clone()).eq(wanted), "{parts:?}");
        self.store.complete_multipart(path, id, parts).await
    }

    async fn abort_multipart(&self, path: &Path, id: &MultipartId) -> Result<()> {
        assert_eq!(self.now.load(SeqCst), 0, "a store may keep what arrives after this");
        self.begun.lock().expect("no panic").retain(|other| other != id);
        self.store.abort_multipart(path, id).await
    }
}

impl Fails {
    async fn stays_until_others_are_here(&self) {
        let now = self.now.fetch_add(1, SeqCst) + 1;
        self.most.send_modify(|most| *most = now.max(*most));
        let _ = self.most.subscribe().wait_for(|most| *most >= self.wanted).await;
        self.now.fetch_sub(1, SeqCst);
    }

    fn take(&self, from: usize) -> Vec<usize> {
        self.from.store(from, SeqCst);
        let mut took = std::mem::take(&mut *self.took.lock().expect("no panic"));
        took.sort_unstable();
        took
    }
}

#[test]
fn parts_that_have_arrived_are_not_sent_again_and_a_lost_upload_begins_anew() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("image");
    let bytes: Vec<u8> = (0..50u64 << 20).step_by(8).flat_map(u64::to_le_bytes).collect();
    fs::write(&path, &bytes).expect("written");
    let digests = bytes.chunks(CHUNK as usize).map(digest).collect();
    let index = Index::of(bytes.len() as u64, digests);
    let fails = Arc::new(Fails::default());
    let store = fails.store.clone();
    let source = Source { store, parts: Some(fails.clone()), path: Path::from("a") };
    let runtime = runtime::handle().expect("threads");
    let run = || {
        let mut journal = Journal::open(Some(folder.path()), "a", &[1; 32]);
        let image = Image { path: &path, index: &index, of: Attributes::new(), stop: None };
        runtime.block_on(upload(&source, &image, &mut journal, &|_| {}))
    };
    let there = || {
        let found =
            runtime.block_on(async { fails.store.get(&Path::from("a")).await?.bytes().await });
        found.expect("it is there").to_vec()
    };
    fails.take(2);
    let why = run().expect_err("it is full");
    assert!(why.contains("2 of 4 parts have arrived") && why.contains("publish it again"), "{why}");
    assert_eq!(fails.take(9), [0, 1]);
    run().expect("the rest");
    assert_eq!(fails.take(1), [2, 3]);
    assert!(there() == bytes);
    // Of one that the store has given up meanwhile nothing is there any more.
    run().expect_err("it is full");
    fails.begun.lock().expect("no panic").clear();
    assert_eq!(fails.take(9), [0]);
    run().expect("all of it");
    assert_eq!(fails.take(3), [0, 1, 2, 3]);
    // One that was changed is given up.
    run().expect_err("it is full");
    fs::write(&path, vec![1; bytes.len()]).expect("written");
    fails.take(9);
    assert!(run().expect_err("changed").contains("was changed"));
    assert!(there() == bytes);
    let left = fs::read_dir(folder.path()).expect("listed").count();
    assert_eq!(left, 1, "nothing is noted any more");
}

/// Of an image so large that its parts are large.
#[test]
fn no_more_is_in_memory_than_is_to_be() {
    for (size, part, wide) in [
        (1 << 30, 16, 8),
        (256 << 30, 30, 8),
        (1 << 40, 117, 2),
        (2 << 40, 234, 1),
        (5 << 40, 583, 1),
    ] {
        let pieces = Pieces::of(size);
        assert_eq!((pieces.part >> 20, pieces.wide), (part, wide), "{size}");
        assert!(pieces.wide == 1 || pieces.part * pieces.wide as u64 <= 256 << 20, "{size}");
        assert!(size.div_ceil(pieces.part) <= 10_000, "{size}");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("image");
    let bytes = vec![7; 24 << 20];
    fs::write(&path, &bytes).expect("written");
    let index = Index::of(24 << 20, bytes.chunks(CHUNK as usize).map(digest).collect());
    let runtime = runtime::handle().expect("threads");
    for (in_flight, wide) in [(1, 1), (7 << 20, 3), (64 << 20, 8)] {
        let counts = Arc::new(Fails { from: 12.into(), wanted: wide, ..Fails::default() });
        let store = counts.store.clone();
        let source = Source { store, parts: Some(counts.clone()), path: Path::from("a") };
        let image = Image { path: &path, index: &index, of: Attributes::new(), stop: None };
        let mut journal = Journal::open(None, "a", &[1; 32]);
        let sent = runtime.block_on(async {
            let begun = counts.create_multipart(&source.path).await;
            let id = begun.map_err(|error| End::Failed(error.to_string()))?;
            let pieces = Pieces::in_parts(2 << 20, in_flight);
            send(&source, &image, &id, pieces, BTreeMap::new(), &mut journal, &|_| {}).await
        });
        assert_eq!(sent.map_err(|_| "an error").expect("sent").len(), 12);
        assert_eq!(*counts.most.borrow(), wide, "{in_flight}");
    }
}

#[test]
fn who_stops_gives_it_up_once_nothing_is_on_its_way() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("image");
    let bytes = vec![7; 40 << 20];
    fs::write(&path, &bytes).expect("written");
    let index = Index::of(40 << 20, bytes.chunks(CHUNK as usize).map(digest).collect());
    // Three parts, which stay until something else lets them go.
    let fails = Arc::new(Fails { from: 9.into(), wanted: 4, ..Fails::default() });
    let store = fails.store.clone();
    let source = Source { store, parts: Some(fails.clone()), path: Path::from("a") };
    let stop = AtomicBool::new(false);
    let image = Image { path: &path, index: &index, of: Attributes::new(), stop: Some(&stop) };
    let mut journal = Journal::open(Some(folder.path()), "a", &[1; 32]);
    let why = runtime::handle().expect("threads").block_on(async {
        let stops = async {
            let _ = fails.most.subscribe().wait_for(|most| *most == 3).await;
            stop.store(true, SeqCst);
            tokio::time::sleep(LOOK * 5).await;
            fails.most.send_replace(4);
        };
        tokio::join!(upload(&source, &image, &mut journal, &|_| {}), stops).0
    });
    assert_eq!(why.expect_err("stopped"), STOPPED);
    assert_eq!(fails.take(9), [0, 1, 2]);
    assert!(fails.begun.lock().expect("no panic").is_empty());
    assert_eq!(fs::read_dir(folder.path()).expect("listed").count(), 1);
}
