use ringtap_io::Tasks;
use ringtap_sim::{Chances, Disk, Sim};

use super::*;
use crate::qcow2::{CreateOptions, Parts, Qcow2, create};
use crate::restart::Identity;
use crate::{Container, Discard, Traits};

#[test]
fn a_stamp_tells_boot_file_and_generation() {
    let mut random = fastrand::Rng::with_seed(5);
    let own = (random.u128(..), random.u64(..));
    let first = stamp(own, 1 << 24);
    assert_eq!(first & !autoclear::RESTART_STAMP, autoclear::RESTART_LOG);
    assert_eq!(stamp(own, 0), stamp(own, 1 << 25), "generations begin again");
    for _ in 0..100 {
        let other = stamp(own, random.u64(..));
        assert_eq!(first & (BOOT | FILE), other & (BOOT | FILE));
    }
    let mut alike = |make: &mut dyn FnMut(&mut fastrand::Rng) -> (u128, u64), mask: u64| {
        let others = (0..1000).filter(|_| {
            let other = make(&mut random);
            (stamp(other, 0) ^ first) & mask == 0
        });
        others.count()
    };
    assert!(alike(&mut |random| (random.u128(..), own.1), BOOT) < 3);
    assert!(alike(&mut |random| (own.0, random.u64(..)), FILE) < 3);
}

/// Changes that are noted and that no flush has made stable.
fn noted(shared: &Shared) -> u64 {
    let log = shared.restart.get().expect("a log");
    log.capacity() - log.room()
}

/// Write to `len` bytes, with room for all of it asked for at once; how many rooms that took.
async fn write(shared: &Shared, io: &Io, offset: u64, len: u64) -> u64 {
    let (mut at, mut rooms, mut tries) = (offset, 0, 0);
    while at < offset + len {
        match shared.allocate(io, at, offset + len - at).await.expect("room") {
            Some(room) => {
                at += room.len;
                shared.commit(room.token, true);
                (rooms, tries) = (rooms + 1, 0);
            }
            None => tries += 1,
        }
        assert!(tries < 10, "no room at {at} of {} bytes", shared.info.size);
    }
    rooms
}

/// Do something to an image that was made now, whose log has room for so many changes.
fn with_image<F: Future<Output = ()> + 'static>(
    options: CreateOptions,
    records: u64,
    task: impl FnOnce(Io, Qcow2) -> F + 'static,
) {
    let disk = Disk::new(512);
    let file = disk.add_file(0, 1);
    let container = Container::simulated(file, 0, Traits::FILE);
    let mut tasks = Tasks::new(Box::new(Sim::new(&disk, 5).chances(Chances::NEVER)));
    let io = tasks.io().clone();
    let work = async move {
        let header = create(&io, &container, None, &options).await.expect("made");
        let words = RestartLog::words_for(records);
        let words: Vec<_> = (0..words).map(|_| std::sync::atomic::AtomicU64::new(0)).collect();
        let identity = Identity { boot: 1, file: (2, 3) };
        let log = RestartLog::with(std::sync::Arc::new(words), identity, records);
        let parts = Parts { restart: Some(log), ..Parts::default() };
        let image = Qcow2::open(&io, container, header, parts).await.expect("opened");
        task(io, image).await;
    };
    tasks.block_on(work).expect("the simulation runs");
}

/// The largest disks that qemu-img makes with clusters of each size.
#[test]
fn no_disk_is_so_large_that_its_writes_wait_for_flushes() {
    let kinds = [(9, false), (16, false), (19, false), (20, false), (21, false), (21, true)];
    for (cluster_bits, extended_l2) in kinds {
        let coverage = 2 * cluster_bits - 3 - u32::from(extended_l2);
        let (size, cluster_size) = (1 << (22 + coverage), 1 << cluster_bits);
        let options = CreateOptions { size, cluster_size, extended_l2, ..Default::default() };
        with_image(options, RESTART_RECORDS, move |io, image| async move {
            let shared = &image.shared;
            let far = size / 2 + 4 * cluster_size;
            for number in 0..100 {
                write(shared, &io, number * cluster_size + 512, 512).await;
                write(shared, &io, far + number * cluster_size, cluster_size).await;
            }
            assert_eq!(noted(shared), 200, "{size} bytes");
            let zero = Discard::Zero { unmap: true };
            shared.discard(&io, far, 100 * cluster_size, zero).await.expect("discarded");
            assert_eq!(noted(shared), 300, "{size} bytes");
            shared.flush(&io).await.expect("flushed");
            assert_eq!(noted(shared), 0);
        });
    }
}

/// However little the log has room for: a write gets its room in parts.
#[test]
fn no_write_is_too_large_for_the_log() {
    for records in [1, 2, 20] {
        let options = CreateOptions { size: 1 << 30, ..Default::default() };
        with_image(options, records, |io, image| async move {
            assert!(write(&image.shared, &io, 512, 40 << 16).await > 1);
            let zero = Discard::Zero { unmap: true };
            image.shared.discard(&io, 0, 41 << 16, zero).await.expect("discarded");
        });
    }
}

/// What comes of a task with an image that has a log, or none; it counts the operations on the file.
fn counted<T: 'static, F: Future<Output = T> + 'static>(
    with_log: bool,
    task: impl FnOnce(Io, Container, Header, Parts, Disk) -> F + 'static,
) -> T {
    let disk = Disk::new(512);
    let file = disk.add_file(0, 1);
    let container = Container::simulated(file, 0, Traits::FILE);
    let mut tasks = Tasks::new(Box::new(Sim::new(&disk, 5).chances(Chances::NEVER)));
    let io = tasks.io().clone();
    let work = async move {
        let options = CreateOptions { size: 1 << 30, ..Default::default() };
        let header = create(&io, &container, None, &options).await.expect("made");
        let words: Vec<_> =
            (0..RestartLog::words_for(100)).map(|_| std::sync::atomic::AtomicU64::new(0)).collect();
        let identity = Identity { boot: 1, file: (2, 3) };
        let log = with_log.then(|| RestartLog::with(std::sync::Arc::new(words), identity, 100));
        let parts = Parts { restart: log, ..Parts::default() };
        task(io, container, header, parts, disk).await
    };
    tasks.block_on(work).expect("the simulation runs")
}

/// Operations on the file, syncs among them, that a flush of one new cluster takes.
fn operations_of_a_flush(with_log: bool) -> (u64, Vec<u64>) {
    counted(with_log, |io, container, header, parts, disk| async move {
        let image = Qcow2::open(&io, container.clone(), header, parts).await.expect("opened");
        let shared = &image.shared;
        write(shared, &io, 0, 1 << 16).await;
        shared.flush(&io).await.expect("flushed");
        write(shared, &io, 1 << 16, 1 << 16).await;
        let before = disk.operations();
        shared.flush(&io).await.expect("flushed");
        let count = disk.operations() - before;
        let said = Header::read(&io, &container).await.expect("a header").autoclear;
        let stamps = shared.restart.get().map(|log| {
            let numbers = log.generations().into_iter();
            numbers.map(|number| stamp(log.own(), number) ^ said).collect()
        });
        (count, stamps.unwrap_or_default())
    })
}

/// The generation is one write more, beside the tables; and not one sync.
#[test]
fn a_flush_moves_the_generation_by_one_write() {
    let (without, _) = operations_of_a_flush(false);
    let (with, stamps) = operations_of_a_flush(true);
    assert_eq!(with, without + 1);
    assert_eq!(stamps, [0, 0], "the image says what the log does");
}

/// Operations on the file that it takes to open an image and to close it, with nothing written between.
fn operations_to_open_and_close(with_log: bool) -> u64 {
    counted(with_log, |io, container, header, parts, disk| async move {
        let before = disk.operations();
        let image = Qcow2::open(&io, container, header, parts).await.expect("opened");
        image.shared.close(&io).await.expect("closed");
        disk.operations() - before
    })
}

/// It is named by one write and forgotten by one, and neither waits for a sync: many disks are handed over at once.
#[test]
fn a_log_costs_no_sync_where_nothing_is_written() {
    assert_eq!(operations_to_open_and_close(true), operations_to_open_and_close(false) + 2);
}

/// Open an image whose server was killed once more, after a record of its log has said of a cluster that
/// it lies at `host(length of the file)`. Gives what the opening said, and the lengths before and after.
fn opened_with_host(
    version: u32,
    host: impl FnOnce(u64) -> u64 + 'static,
) -> (Result<(), OpenError>, u64, u64) {
    let disk = Disk::new(512);
    let file = disk.add_file(0, 1);
    let container = Container::simulated(file, 0, Traits::FILE);
    let mut tasks = Tasks::new(Box::new(Sim::new(&disk, 5).chances(Chances::NEVER)));
    let io = tasks.io().clone();
    let sizes = disk.clone();
    let work = async move {
        let options = CreateOptions { size: 1 << 30, version, ..Default::default() };
        create(&io, &container, None, &options).await.expect("made");
        let words: std::sync::Arc<[_]> =
            (0..RestartLog::words_for(8)).map(|_| std::sync::atomic::AtomicU64::new(0)).collect();
        let identity = Identity { boot: 1, file: (2, 3) };
        let log = || RestartLog::with(std::sync::Arc::new(words.clone()), identity, 8);
        let open = async || {
            let header = Header::read(&io, &container).await?;
            let parts = Parts { restart: Some(log()), ..Parts::default() };
            Qcow2::open(&io, container.clone(), header, parts).await
        };
        let image = open().await.expect("opened");
        write(&image.shared, &io, 0, 1 << 16).await;
        drop(image);
        let before = sizes.size(file);
        let first = crate::restart::FIRST;
        assert_eq!(words[first + 1].load(std::sync::atomic::Ordering::SeqCst), 0, "of cluster 0");
        words[first + 2].store(host(before) | COPIED, std::sync::atomic::Ordering::SeqCst);
        let opened = open().await.map(drop);
        (opened, before, sizes.size(file))
    };
    tasks.block_on(work).expect("the simulation runs")
}

/// A server makes the file longer before it uses what is new.
#[test]
fn a_log_that_names_clusters_behind_the_end_of_the_file_contradicts_it() {
    for version in [2, 3] {
        for far in [0, 1 << 16, 1 << 40, 1 << 55] {
            let host = move |len: u64| len.next_multiple_of(1 << 16) + far & OFFSET_MASK;
            let (opened, before, after) = opened_with_host(version, host);
            let refused = matches!(opened, Err(OpenError::RestartLogInDoubt { .. }));
            assert!(refused, "version {version}, {far} bytes behind the end: {opened:?}");
            assert_eq!(before, after, "the file is as it was");
        }
        let last = |len: u64| len.next_multiple_of(1 << 16) - (1 << 16);
        opened_with_host(version, last).0.expect("in the last cluster");
    }
}
