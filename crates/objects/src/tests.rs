//! Objects of a server that fails, is slow, or has another object now.

use super::*;
use crate::testing::{Served, State};

const LEN: usize = CHUNK as usize;

fn index_of(object: &[u8]) -> Option<Vec<u8>> {
    let digests = object.chunks(LEN).map(digest).collect();
    Some(Index::of(object.len() as u64, digests).to_bytes())
}

fn cached(folder: &tempfile::TempDir) -> Settings {
    let cache = CacheDir { path: folder.path().join("cache"), size: None };
    Settings { cache: Some(cache), ..Settings::default() }
}

/// What all bytes of a chunk are, and how many there are.
fn read(object: &Arc<Object>, number: u32) -> Result<(u8, usize), i32> {
    let flight = object.fly(number, true, ());
    let end = runtime::wait_for(async move { flight.end().await }).expect("an end");
    end.map(|bytes| {
        assert!(bytes.iter().all(|byte| *byte == bytes[0]));
        (bytes[0], bytes.len())
    })
}

fn wait_until(what: impl Fn() -> bool) {
    let begun = Instant::now();
    while !what() {
        assert!(begun.elapsed() < Duration::from_secs(30), "it does not come");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn asked(served: &Served) -> usize {
    served.state().asked.len()
}

#[test]
fn an_image_of_the_same_size_has_no_chunk_of_the_former() {
    let folder = tempfile::tempdir().expect("a folder");
    let object = vec![1; 2 * LEN];
    let index = index_of(&object);
    // Nothing but the index tells one from the other.
    let served = Served::new(State { object, index, ..State::default() });
    let open = || begin(&served.uri(""), &cached(&folder)).expect("open");
    let has = |object: &Arc<Object>| object.cache.as_ref().is_some_and(|cache| cache.has(0));
    let first = open();
    assert_eq!(read(&first, 0), Ok((1, LEN)));
    wait_until(|| has(&first));
    first.close();
    assert!(has(&open()), "the same is kept");
    let object = vec![2; 2 * LEN];
    served.state().index = index_of(&object);
    served.state().object = object;
    let second = open();
    assert!(!has(&second));
    assert_eq!(read(&second, 0), Ok((2, LEN)));
}

#[test]
fn what_an_index_says_is_zeros_is_not_fetched() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut object = vec![1; 2 * LEN + 5];
    object[LEN..].fill(0);
    let index = index_of(&object);
    let served = Served::new(State { object, index, ..State::default() });
    let plain = begin(&served.uri(""), &Settings::default()).expect("open");
    assert!(plain.at_hand(CHUNK, CHUNK + 5).is_some() && plain.at_hand(0, 1).is_none());
    assert_eq!(read(&plain, 1), Ok((0, LEN)));
    assert_eq!(read(&plain, 2), Ok((0, 5)));
    let kept = begin(&served.uri(""), &cached(&folder)).expect("open");
    let cache = kept.cache.as_ref().expect("a cache");
    assert!(cache.has_all(1..3) && !cache.has(0));
    assert_eq!(cache.read(2, 5).expect("read"), [0; 5]);
    assert_eq!(asked(&served), 0);
    assert_eq!(read(&kept, 0), Ok((1, LEN)));
}

#[test]
fn what_nobody_waits_for_is_tried_until_it_comes_and_fails_no_read() {
    let served = Served::new(State {
        object: (0..9).flat_map(|chunk| vec![chunk; LEN]).collect(),
        etag: Some("\"one\""),
        ..State::default()
    });
    let object = begin(&served.uri("?reconnect=1"), &Settings::default()).expect("open");
    served.state().away = true;
    let ahead = |number: u32| {
        let permit = object.wide.clone().try_acquire_owned().expect("one is left");
        object.fetch(number, permit);
    };
    ahead(3);
    ahead(4);
    std::thread::sleep(Duration::from_millis(1500));
    assert!(!object.given_up.load(SeqCst), "nobody has waited");
    assert!((4..30).contains(&asked(&served)), "{}", asked(&served));
    assert_eq!(object.wide.available_permits(), WIDE - 2);
    // A guest that waits for one of them waits as long as for any other.
    let begun = Instant::now();
    assert_eq!(read(&object, 3), Err(libc::EIO));
    assert!(begun.elapsed() >= Duration::from_millis(900), "{:?}", begun.elapsed());
    assert!(object.given_up.load(SeqCst));
    // From then on it waits no more.
    let begun = Instant::now();
    assert_eq!(read(&object, 4), Err(libc::EIO));
    assert!(begun.elapsed() < Duration::from_millis(900), "{:?}", begun.elapsed());
    served.state().away = false;
    wait_until(|| object.memory.get(3).is_some() && object.memory.get(4).is_some());
    assert!(!object.given_up.load(SeqCst));
    wait_until(|| object.wide.available_permits() == WIDE);
}

#[test]
fn no_answer_is_waited_for_longer_than_was_said() {
    let served =
        Served::new(State { object: vec![1; 2 * LEN], etag: Some("\"one\""), ..State::default() });
    let object = begin(&served.uri("?reconnect=1"), &Settings::default()).expect("open");
    served.state().slow = Duration::from_secs(8);
    let begun = Instant::now();
    // Whether a guest waits from the first on or not.
    object.fly(1, false, ());
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(read(&object, 1), Err(libc::EIO));
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
}

#[test]
fn who_opens_what_was_replaced_has_what_is_there_now() {
    let served =
        Served::new(State { object: vec![1; LEN], etag: Some("\"one\""), ..State::default() });
    let uri = served.uri("");
    let options = Options { read_only: true };
    let first = open(&uri, &options).expect("open");
    assert!(known(&uri).is_some());
    let name = uri.to_string();
    let object =
        open_ones().iter().find(|one| one.name == name).and_then(|one| one.object.upgrade());
    let object = object.expect("it is open");
    served.state().etag = Some("\"two\"");
    assert_eq!(read(&object, 0), Err(libc::EIO));
    assert!(object.replaced.load(SeqCst) && known(&uri).is_none());
    let second = open(&uri, &options).expect("open");
    assert!(known(&uri).is_some());
    drop((first, second));
}
