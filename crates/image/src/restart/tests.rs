//! Tests of the restart log's memory.

use super::*;

fn records(log: &RestartLog) -> Vec<u64> {
    log.left().expect("a log").records.iter().map(|record| record[0]).collect()
}

fn note(log: &RestartLog, numbers: std::ops::Range<u64>) {
    for number in numbers {
        assert!(log.append([number, number + 1, number + 2]));
    }
}

#[test]
fn what_was_noted_is_found_by_the_next_process() {
    let folder = tempfile::tempdir().expect("a folder");
    let image = tempfile::NamedTempFile::new().expect("a file");
    let open = || RestartLog::open(&folder.path().join("logs"), &image, 100).expect("a log");
    let log = open();
    assert_eq!(log.left(), None);
    log.start(7);
    note(&log, 0..3);
    drop(log);
    let log = open();
    let left = log.left().expect("a log");
    assert_eq!(left.records, [[0, 1, 2], [1, 2, 3], [2, 3, 4]]);
    assert_eq!(log.generations(), [7, 7]);
    log.start(8);
    assert_eq!(open().left(), Some(Left { records: vec![] }));
    note(&log, 5..6);
    log.close(true);
    assert_eq!(open().left(), None);
    assert!(open().is_closed());
    // The same inode number on another boot or another file is somebody else's.
    log.start(9);
    let words: Vec<_> = log.words.iter().map(|word| AtomicU64::new(word.load(SeqCst))).collect();
    let other = Identity { boot: 1, ..log.identity };
    assert_eq!(RestartLog::with(Arc::new(words), other, 100).left(), None);
}

#[test]
fn a_log_takes_memory_as_changes_come() {
    let folder = tempfile::tempdir().expect("a folder");
    let image = tempfile::NamedTempFile::new().expect("a file");
    let open = || RestartLog::open(folder.path(), &image, 1 << 16).expect("a log");
    let taken = |log: &RestartLog| {
        let file = log.file.as_ref().expect("a file");
        512 * std::os::unix::fs::MetadataExt::blocks(&file.metadata().expect("its facts"))
    };
    let log = open();
    log.start(1);
    let at_first = taken(&log);
    assert!(at_first < 256 << 10, "{at_first}");
    for number in 0..10_000 {
        assert!(log.room_for(3) >= 3);
        note(&log, number..number + 1);
    }
    assert!((at_first + 1..1 << 20).contains(&taken(&log)));
    // What was noted before a flush ends, and after it began, of both halves.
    log.begin_flush();
    assert!(log.room_for(30_000) >= 30_000);
    note(&log, 10_000..40_000);
    assert!(log.room_for(1 << 16) < 1 << 16);
    let expected: Vec<u64> = (0..40_000).collect();
    assert_eq!(records(&log), expected);
    drop(log);
    let log = open();
    assert_eq!(records(&log), expected);
    log.end_flush();
    assert_eq!(records(&log), expected[10_000..]);
    // The next server goes on with a half that has more in it than its own memory at first.
    assert!(log.room_for(1) >= 1);
    note(&log, 40_000..40_001);
    assert_eq!(records(&log).last(), Some(&40_000));
}

/// A server before or after this one finds what was noted, whichever wrote it.
#[test]
fn the_witness_lies_where_older_servers_have_it() {
    let image = tempfile::NamedTempFile::new().expect("a file");
    let container = Container::open(image.path(), &crate::OpenOptions::default()).expect("opened");
    let folder = tempfile::tempdir().expect("a folder");
    let log = RestartLog::open(folder.path(), &image, 10).expect("a log").of(&container);
    log.start(1);
    let modified = container.file_facts().modified.expect("its time");
    // When the last change was begun, the lower bound of its stamp, and the upper one.
    assert_eq!([24, 26, 27].map(|at| log.word(at)), [modified; 3]);
    // They know nothing of these two.
    assert_eq!([23, 31].map(|at| log.word(at)), [0; 2]);
    log.set(24, modified + 60_000_000_000);
    log.set(28, 1);
    let said = Witness::read(&log.words, WITNESS);
    assert_eq!((said.pause, said.in_flight), (None, 1));
}

#[test]
fn a_log_that_was_never_begun_is_removed() {
    let image = tempfile::NamedTempFile::new().expect("a file");
    let options =
        crate::OpenOptions { cache: crate::CacheMode::Writeback, ..crate::OpenOptions::default() };
    let container = Container::open(image.path(), &options).expect("an image");
    let open = || RestartLog::beside(&container, 10, false).expect("opened").expect("a log");
    let log = open();
    let path = log.path.clone().expect("a file");
    assert!(path.exists());
    drop(log);
    assert!(!path.exists());
    let log = open();
    log.start(1);
    drop(log);
    // Somebody's notes stay, whoever else fails to open the image.
    drop(open());
    assert!(path.exists());
    open().close(false);
    assert!(!path.exists());
}

#[test]
fn a_log_that_cannot_be_read_is_no_reason_to_go_on_without_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let image = tempfile::NamedTempFile::new().expect("a file");
    let options =
        crate::OpenOptions { cache: crate::CacheMode::Writeback, ..crate::OpenOptions::default() };
    let container = Container::open(image.path(), &options).expect("an image");
    let beside = || RestartLog::beside_in(folder.path(), &container, 10, false);
    let log = beside().expect("opened").expect("a log");
    log.start(7);
    note(&log, 0..3);
    let path = log.path.clone().expect("a file");
    drop(log);
    let kept = folder.path().join("kept");
    fs::rename(&path, &kept).expect("renamed");
    // A link is not followed.
    std::os::unix::fs::symlink(&kept, &path).expect("a link");
    let error = beside().err().expect("refused").to_string();
    assert!(error.contains(path.to_str().expect("a name")), "{error}");
    fs::rename(&kept, &path).expect("renamed");
    assert_eq!(records(&beside().expect("opened").expect("a log")), [0, 1, 2]);
    // What nobody ever began holds nothing.
    fs::write(&kept, "").expect("written");
    fs::remove_file(&path).expect("removed");
    std::os::unix::fs::symlink(&kept, &path).expect("a link");
    assert!(beside().expect("opened").is_none());
    // Nor does what somebody else has put there, or what nobody ever writes to.
    fs::remove_file(&path).expect("removed");
    fs::write(&path, MAGIC.to_ne_bytes()).expect("written");
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(folder.path(), Some(1), None).expect("given away");
        assert!(beside().expect("opened").is_none());
        std::os::unix::fs::chown(folder.path(), Some(0), None).expect("taken back");
    }
    fs::remove_file(&path).expect("removed");
    rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::RUSR).expect("a pipe");
    assert!(beside().expect("opened").is_none());
}

fn simulated(capacity: u64) -> RestartLog {
    let words: Vec<AtomicU64> =
        (0..RestartLog::words_for(capacity)).map(|_| AtomicU64::new(0)).collect();
    let log = RestartLog::with(Arc::new(words), Identity { boot: 1, file: (2, 3) }, capacity);
    log.start(1);
    log
}

#[test]
fn a_flush_drops_what_was_noted_before_it_began() {
    let log = simulated(4);
    note(&log, 0..4);
    assert_eq!(log.room(), 0);
    assert!(!log.append([9, 9, 9]));
    log.begin_flush();
    note(&log, 4..6);
    assert_eq!(records(&log), [0, 1, 2, 3, 4, 5]);
    log.end_flush();
    assert_eq!(records(&log), [4, 5]);
    for round in 0..10 {
        log.begin_flush();
        note(&log, 10 * round..10 * round + 1);
        log.end_flush();
        assert_eq!(records(&log), [10 * round]);
    }
}

#[test]
fn a_flush_that_fails_drops_nothing() {
    let log = simulated(4);
    note(&log, 0..2);
    log.begin_flush();
    note(&log, 2..4);
    log.begin_flush();
    note(&log, 4..6);
    assert_eq!(records(&log), [0, 1, 2, 3, 4, 5]);
    assert_eq!(log.room(), 0);
    log.end_flush();
    assert_eq!(records(&log), [2, 3, 4, 5]);
    log.begin_flush();
    log.end_flush();
    assert!(records(&log).is_empty());
}

#[test]
fn turns_never_run_out() {
    let log = simulated(4);
    note(&log, 0..4);
    log.begin_flush();
    note(&log, 4..8);
    // Both halves are full of marks of turns that come again.
    for (turn, half) in [(u64::MAX - 1, 0), (u64::MAX, 1)] {
        log.set(TURN[half], turn);
        (0..4).for_each(|number| log.set(log.place(half, number), turn % 2 + 1));
    }
    log.start(1);
    for round in 0..4 {
        log.begin_flush();
        note(&log, 10 * round..10 * round + 1);
        log.end_flush();
        assert_eq!(records(&log), [10 * round]);
    }
}

#[test]
fn a_log_of_nonsense_gives_no_more_than_it_holds() {
    let log = simulated(4);
    note(&log, 0..1);
    for at in FIRST - 8..log.words.len() {
        log.set(at, u64::MAX);
    }
    for at in 5..FIRST {
        log.set(at, u64::MAX);
    }
    assert!(log.left().is_none_or(|left| left.records.len() <= 8));
    log.start(3);
    assert!(records(&log).is_empty());
}

/// Bytes of memory that a log takes.
fn taken(path: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    512 * fs::metadata(path).expect("a log").blocks()
}

#[test]
fn the_memory_of_a_log_is_left_for_who_opens_the_image_next_and_else_given_back() {
    let folder = tempfile::tempdir().expect("a folder");
    let image = tempfile::NamedTempFile::new().expect("a file");
    let open = || RestartLog::open(&folder.path().join("logs"), &image, 10_000).expect("a log");
    let log = open();
    let path = log.path.clone().expect("a file");
    let whole = taken(&path);
    log.start(7);
    note(&log, 0..3);
    log.stays_whole();
    log.close(true);
    drop(log);
    assert_eq!(taken(&path), whole);
    // What stands in it means nothing to the next.
    let log = open();
    assert!(log.is_closed() && log.left().is_none());
    log.start(8);
    assert!(records(&log).is_empty());
    note(&log, 5..6);
    assert_eq!(records(&open()), [5]);
    log.close(true);
    drop(log);
    assert!(taken(&path) < whole, "{} bytes", taken(&path));
}

#[test]
fn an_image_that_is_opened_again_leaves_the_memory_of_its_log() {
    use crate::qcow2::{CreateOptions, create};
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("image");
    fs::write(&path, "").expect("a file");
    let options = crate::OpenOptions {
        format: Some(crate::Format::Qcow2),
        cache: crate::CacheMode::Writeback,
        ..crate::OpenOptions::default()
    };
    let container = Container::open(&path, &options).expect("opened");
    let made = CreateOptions { size: 65536, ..CreateOptions::default() };
    let task = |io| async move { create(&io, &container, None, &made).await.map(drop) };
    crate::on_a_ring(&path, task).expect("a ring").expect("an image");
    let file = rustix::fs::stat(&path).expect("a file");
    let log = RestartLog::usual_folder().join(name_of(&file));
    let close = |again: bool| {
        let image = crate::open(&path, &options).expect("opened");
        if again {
            image.opens_again();
        }
        let end = crate::on_a_ring(&path, |io| async move { image.close(&io).await });
        end.expect("a ring").expect("closed");
        taken(&log)
    };
    let (whole, given_back) = (close(true), close(false));
    assert!(whole > 100 << 10 && given_back < 16 << 10, "{whole} and {given_back} bytes");
    fs::remove_file(&log).expect("removed");
}
