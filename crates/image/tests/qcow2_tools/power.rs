//! Power cuts at every turn of what the tools do: the image is as it was or as it is to be.

use std::cell::Cell;
use std::rc::Rc;

use ringtap_image::qcow2::{
    CreateOptions, Repair, Report, apply_snapshot, check, create, create_snapshot, delete_snapshot,
};
use ringtap_image::{Container, Traits};
use ringtap_io::{File, Io, Tasks};
use ringtap_sim::{Disk, End, Ends, Fault, Lie, Run, Sim};

use crate::guest::{content, header, snapshots};
use crate::oracle::Folder;

/// An image on a simulated disk.
#[derive(Clone)]
pub struct Bench {
    pub disk: Disk,
    pub file: File,
}

impl Bench {
    pub fn new(image: &[u8]) -> Bench {
        let disk = Disk::new(512);
        let file = disk.add_file(image.len() as u64, 1);
        disk.poke(file, 0, image);
        Bench { disk, file }
    }

    pub fn container(&self) -> Container {
        Container::simulated(self.file, self.disk.size(self.file), Traits::FILE)
    }

    /// A run of it, still to begin.
    pub fn run(&self) -> Run {
        Run::new(&self.disk, 1)
    }

    /// Do something to it, and look at what each of these seeds makes of a power cut at any turn; gives how many were
    /// looked at.
    pub fn cut<F: Future<Output = ()> + 'static, I: IntoIterator<Item = u64>>(
        &self,
        run: Run,
        seeds: impl FnMut(u64) -> I + 'static,
        mut look: impl FnMut(&Bench, u64) + 'static,
        deed: impl FnOnce(Io, Container) -> F,
    ) -> u64 {
        let (ends, file) = (Ends::default(), self.file);
        let look = move |disk, seed| {
            look(&Bench { disk, file }, seed);
            Ok(())
        };
        run.watched(ends.watch(End::PowerCut, seeds, look)).task(|io| deed(io, self.container()));
        ends.seen().expect("it would have panicked")
    }

    pub fn check(&self, repair: Repair) -> Report {
        let container = self.container();
        self.run().quiet().task(async move |io| {
            check(&io, &container, repair).await.expect("it can be looked at")
        })
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.disk.size(self.file) as usize];
        self.disk.peek(self.file, 0, &mut bytes);
        bytes
    }
}

/// What an image says: its size, the disk's content, the snapshots and theirs.
type Said = (u64, Vec<u8>, Vec<(String, Vec<u8>)>);

fn said(image: &[u8]) -> Said {
    (header(image).size, content(image), snapshots(image))
}

/// Do something to an image, and look at what a power cut at any turn leaves: no corruption, and
/// either what the image said before or what it says afterwards.
pub fn try_cuts<F: Future<Output = ()> + 'static>(
    image: &[u8],
    may_be_wrong: bool,
    deed: impl Fn(Io, Container) -> F,
) -> Bench {
    let before = said(image);
    let finished = Bench::new(image);
    finished.run().task(|io| deed(io, finished.container()));
    let after = said(&finished.bytes());
    assert!(finished.check(Repair::Nothing).is_clean());

    let same = before == after;
    let bench = Bench::new(image);
    let (old, new) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
    let (was, is) = (old.clone(), new.clone());
    let mut rng = fastrand::Rng::with_seed(9);
    let look = move |left: &Bench, seed| {
        if !may_be_wrong {
            let report = left.check(Repair::Nothing);
            assert_eq!(report.corruptions, 0, "seed {seed}: {report:?}");
        }
        let says = said(&left.bytes());
        if says == before {
            was.set(was.get() + 1);
        } else {
            assert!(says == after, "seed {seed}: neither old nor new");
            is.set(is.get() + 1);
        }
        let report = left.check(Repair::All);
        assert!(report.is_clean(), "seed {seed}: {report:?}");
        assert!(said(&left.bytes()) == says, "seed {seed}: a repair changed what it says");
    };
    bench.cut(bench.run(), move |_| [(); 4].map(|()| rng.u64(..)), look, &deed);
    assert!(same || (old.get() > 4 && new.get() > 0), "{old:?} {new:?}");
    bench
}

/// A small image with some data.
pub fn small(folder: &Folder, options: &str) -> Vec<u8> {
    folder.img(&["create", "-q", "-f", "qcow2", "-o", options, "small", "256k"]);
    folder.io("small", &["write -P 1 0 20k", "write -P 2 64k 3k", "write -z 80k 8k"]);
    std::fs::read(folder.path("small")).expect("the image")
}

#[test]
fn snapshots_are_taken_applied_and_deleted_at_once() {
    let folder = Folder::new();
    for options in
        ["cluster_size=512", "cluster_size=4k,refcount_bits=8", "compat=0.10,cluster_size=1k"]
    {
        small(&folder, options);
        folder.img(&["snapshot", "-c", "first", "small"]);
        folder.io("small", &["write -P 3 4k 9k"]);
        let image = std::fs::read(folder.path("small")).expect("the image");
        try_cuts(&image, false, |io, container| async move {
            create_snapshot(&io, &container, "second", (1, 2)).await.expect("made");
        });
        try_cuts(&image, false, |io, container| async move {
            apply_snapshot(&io, &container, "first").await.expect("applied");
        });
        try_cuts(&image, false, |io, container| async move {
            delete_snapshot(&io, &container, "first").await.expect("deleted");
        });
    }
}

#[test]
fn repairs_lose_nothing() {
    let folder = Folder::new();
    let good = small(&folder, "cluster_size=512");
    let facts = header(&good);
    type Damage = fn(&mut Vec<u8>, u64, u64);
    let damages: [Damage; 3] = [
        // All refcounts of the first block.
        |image, _, block| image[block as usize..block as usize + 512].fill(0),
        // The pointer to it.
        |image, table, _| image[table as usize..table as usize + 8].fill(0),
        // Leaks, and a refcount of the last one too low.
        |image, _, block| image[block as usize + 8..block as usize + 30].fill(3),
    ];
    let table = facts.refcount_table_offset;
    let block = crate::guest::be64(&good, table);
    for damage in damages {
        let mut image = good.clone();
        damage(&mut image, table, block);
        assert!(!Bench::new(&image).check(Repair::Nothing).is_clean());
        try_cuts(&image, true, |io, container| async move {
            let report = check(&io, &container, Repair::All).await.expect("repaired");
            assert!(report.is_clean());
        });
    }
}

/// Until it is whole, a new image is none at all: neither the one that was there nor half of one.
#[test]
fn a_new_image_is_whole_or_none() {
    for preallocated in [false, true] {
        let bench = Bench::new(&vec![0x51; 4096]);
        let whole = Rc::new(Cell::new(0));
        let count = whole.clone();
        let look = move |left: &Bench, _| {
            if left.bytes().starts_with(b"QFI") {
                let report = left.check(Repair::Nothing);
                assert!(report.is_clean(), "{report:?}");
                assert!(content(&left.bytes()).iter().all(|byte| *byte == 0));
                count.set(count.get() + 1);
            }
        };
        let mut options = CreateOptions { size: 64 << 10, ..CreateOptions::default() };
        options.set("cluster_size", "512").expect("set");
        options.set("preallocation", if preallocated { "full" } else { "off" }).expect("set");
        let deed = |io, container| async move {
            create(&io, &container, None, &options).await.expect("made");
        };
        let cuts = bench.cut(bench.run(), |_| 0..4, look, deed);
        assert!(cuts - whole.get() > 8 && whole.get() > 0, "{whole:?} of {cuts}");
        assert!(bench.check(Repair::Nothing).is_clean());
    }
}

/// Whatever operation fails, the image is as it was or as it is to be, and the tool says so.
#[test]
fn a_failed_operation_leaves_the_image() {
    let folder = Folder::new();
    let image = small(&folder, "cluster_size=1k");
    let before = said(&image);
    for errno in [libc::EIO, libc::ENOSPC] {
        for number in 1.. {
            let bench = Bench::new(&image);
            bench.disk.fail_operations(number..number + 1, Fault::Errno(errno));
            let container = bench.container();
            let done = bench.run().quiet().task(async move |io| {
                create_snapshot(&io, &container, "one", (1, 2)).await.is_ok()
            });
            let begun = bench.disk.operations();
            bench.disk.heal();
            assert_eq!(bench.check(Repair::Nothing).corruptions, 0, "operation {number}");
            let after = said(&bench.bytes());
            assert_eq!(after.1, before.1, "operation {number}");
            assert!(!done || after.2.len() == 1, "operation {number}: said to be done");
            if begun < number {
                assert!(done && number > 10);
                break;
            }
        }
    }
}

/// The tests above would notice a sync that does nothing.
#[test]
fn a_sync_that_does_nothing_is_noticed() {
    let folder = Folder::new();
    let image = small(&folder, "cluster_size=512");
    let (before, bench) = (said(&image), Bench::new(&image));
    let wrong = Rc::new(Cell::new(0));
    let count = wrong.clone();
    let look = move |left: &Bench, _| {
        let sound = std::panic::catch_unwind(|| {
            let report = left.check(Repair::Nothing);
            let says = said(&left.bytes());
            report.corruptions == 0 && says.1 == before.1
        });
        count.set(count.get() + u32::from(!sound.unwrap_or(false)));
    };
    let deed = |io: Io, container: Container| async move {
        create_snapshot(&io, &container, "one", (1, 2)).await.expect("made");
    };
    bench.cut(bench.run().lying(Some(Lie::SyncDoesNothing)), |_| 0..8, look, deed);
    assert!(wrong.get() > 0);
}

/// A device does not grow: an image on it takes what room there is, and says where there is none.
#[test]
fn images_lie_on_devices() {
    let disk = Disk::new(512);
    let file = disk.add_device(1 << 20, 512);
    disk.poke(file, 0, &vec![0xa5; 1 << 20]);
    let traits = Traits {
        regular: false,
        read_only: false,
        request_alignment: 512,
        memory_alignment: 512,
        logical_block_size: 512,
        physical_block_size: 512,
    };
    let device = Container::simulated(file, 1 << 20, traits);
    let mut tasks = Tasks::new(Box::new(Sim::new(&disk, 3)));
    let io = tasks.io().clone();
    let deeds = async move {
        let mut options = CreateOptions { size: 600 << 10, ..CreateOptions::default() };
        options.set("cluster_size", "4K").expect("set");
        options.set("preallocation", "metadata").expect("set");
        create(&io, &device, None, &options).await.expect("made");
        assert!(check(&io, &device, Repair::Nothing).await.expect("checked").is_clean());
        let (mut made, mut error) = (0, String::new());
        while error.is_empty() {
            match create_snapshot(&io, &device, &format!("s{made}"), (0, 0)).await {
                Ok(_) => made += 1,
                Err(why) => error = why.to_string(),
            }
            let report = check(&io, &device, Repair::Nothing).await.expect("checked");
            assert!(report.is_clean(), "{report:?}");
        }
        assert!(made > 20 && error.contains("no room is left on the device"), "{made}: {error}");
        for number in 0..made {
            delete_snapshot(&io, &device, &format!("s{number}")).await.expect("deleted");
        }
        let report = check(&io, &device, Repair::Nothing).await.expect("checked");
        assert!(report.is_clean(), "{report:?}");
        options.size = 4 << 20;
        let error = create(&io, &device, None, &options).await.expect_err("too large");
        assert!(error.to_string().contains("the device has 1048576"), "{error}");
    };
    tasks.block_on(deeds).expect("the simulation runs");
    // Preallocated clusters hold zeros, not what was on the device before.
    let mut bytes = vec![0; 1 << 20];
    disk.peek(file, 0, &mut bytes);
    assert!(content(&bytes).iter().all(|byte| *byte == 0));
}
