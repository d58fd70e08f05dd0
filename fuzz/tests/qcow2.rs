//! qcow2 images of arbitrary bytes: parsers by themselves, and every tool on images damaged at the
//! places that matter. An error is fine; a panic, a hang, or a repair that makes it worse is not.

mod common;

use std::sync::OnceLock;

use bolero::check;
use ringtap_image::qcow2::compressed::{Encoder, decode};
use ringtap_image::qcow2::{
    BitmapChange, BitmapSet, Compression, CreateOptions, Header, Parts, Qcow2, Repair,
    ResizeOptions, apply_snapshot, bitmap_directory, change_bitmaps, check as check_image, create,
    create_snapshot, delete_snapshot, list_bitmaps, list_snapshots, load_bitmap, resize,
    snapshot_table,
};
use ringtap_image::{Container, Traits};
use ringtap_io::{File, Io};
use ringtap_sim::Disk;

/// An image on a simulated disk.
struct Bench {
    disk: Disk,
    file: File,
}

impl Bench {
    fn new(image: &[u8]) -> Bench {
        let disk = Disk::new(512);
        let file = disk.add_file(image.len() as u64, 1);
        disk.poke(file, 0, image);
        Bench { disk, file }
    }

    fn run<T: 'static, F: Future<Output = T> + 'static>(
        &self,
        task: impl FnOnce(Io, Container) -> F,
    ) -> T {
        let len = self.disk.size(self.file);
        let container = Container::simulated(self.file, len, Traits::FILE);
        common::run(&self.disk, |io| task(io, container))
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.disk.size(self.file) as usize];
        self.disk.peek(self.file, 0, &mut bytes);
        bytes
    }
}

/// A good image and where the bytes lie that say something.
struct Sample {
    image: Vec<u8>,
    places: Vec<usize>,
}

/// Images with snapshots and bitmaps of each kind of table.
fn samples() -> &'static [Sample] {
    static SAMPLES: OnceLock<Vec<Sample>> = OnceLock::new();
    SAMPLES.get_or_init(|| {
        let kinds = [
            "cluster_size=512,preallocation=metadata",
            "cluster_size=16K,extended_l2=on,refcount_bits=64",
            "cluster_size=1K,compat=0.10,preallocation=metadata",
        ];
        kinds.map(sample).into()
    })
}

fn sample(kind: &str) -> Sample {
    let mut options = CreateOptions { size: 64 << 10, ..CreateOptions::default() };
    for word in kind.split(',') {
        let (name, value) = word.split_once('=').expect("name=value");
        options.set(name, value).expect(word);
    }
    let bench = Bench::new(&[]);
    bench.run(|io, container| async move {
        create(&io, &container, None, &options).await.expect("made");
        create_snapshot(&io, &container, "one", (1, 2)).await.expect("made");
        if options.version > 2 {
            let add = |name: &str| BitmapChange::Add { name: name.into(), granularity: Some(512) };
            change_bitmaps(&io, &container, &[add("on"), add("off")]).await.expect("added");
            let set = BitmapSet::open(&io, &container).await.expect("opened");
            set.note(4096, 512);
            set.store(&io, &container).await.expect("stored");
        }
    });
    let image = bench.bytes();
    let header = Header::parse(&image).expect("a header");
    let number = |at: u64| {
        let at = at as usize;
        u64::from_be_bytes(image[at..at + 8].try_into().expect("8 bytes")) & !(1 << 63)
    };
    let mut tables = vec![(0, 200), (header.l1_offset, 32), (number(header.l1_offset), 96)];
    tables.push((header.refcount_table_offset, 32));
    tables.push((number(header.refcount_table_offset), 200));
    tables.push((header.snapshots_offset, 72));
    if let Some(bitmaps) = header.bitmaps() {
        tables.push((bitmaps.directory_offset, bitmaps.directory_size as usize));
        tables.push((number(bitmaps.directory_offset), 16));
    }
    tables.retain(|(offset, _)| *offset > 0 || header.version > 0);
    let places = tables.iter().flat_map(|(offset, len)| *offset as usize..*offset as usize + len);
    let places = places.filter(|place| *place < image.len()).collect();
    Sample { image, places }
}

/// Change bytes: a place among those that matter (two bytes) and what to put there.
fn damage(sample: &Sample, edits: &[u8]) -> Vec<u8> {
    let mut image = sample.image.clone();
    for edit in edits.chunks_exact(3) {
        let place = usize::from(edit[0]) << 8 | usize::from(edit[1]);
        image[sample.places[place % sample.places.len()]] = edit[2];
    }
    image
}

#[test]
fn headers() {
    check!().with_max_len(600).for_each(|input: &[u8]| {
        let raw = Header::parse(input);
        let [kind, edits @ ..] = input else { return };
        let sample = &samples()[usize::from(*kind) % samples().len()];
        for parsed in [raw, Header::parse(&damage(sample, edits))].into_iter().flatten() {
            let _wrong_tables = parsed.check_tables(1 << 20);
            if let Ok(bytes) = parsed.to_bytes() {
                let again = Header::parse(&bytes).expect("what was written is read");
                assert_eq!(again.to_bytes().as_ref(), Ok(&bytes));
            }
        }
    });
}

#[test]
fn snapshot_tables_and_bitmap_directories() {
    check!().with_max_len(300).for_each(|input: &[u8]| {
        let [count, bytes @ ..] = input else { return };
        if let Some(Ok((snapshots, len))) = snapshot_table::parse(bytes, u32::from(*count)) {
            assert_eq!(snapshots.len(), usize::from(*count));
            assert!(len <= bytes.len().next_multiple_of(8) as u64);
        }
        if let Ok(entries) = bitmap_directory::parse(bytes, u32::from(*count)) {
            assert_eq!(entries.len(), usize::from(*count));
            let written = bitmap_directory::to_bytes(&entries);
            assert_eq!(bitmap_directory::parse(&written, u32::from(*count)), Ok(entries));
        }
    });
}

#[test]
fn compressed_clusters() {
    let cluster: Vec<u8> = (0..4096u32).map(|at| (at * at >> 8) as u8).collect();
    let good = [Compression::Deflate, Compression::Zstd].map(|kind| {
        let mut out = vec![0; 4096];
        let len = Encoder::new(kind).expect("memory").encode(&cluster, &mut out);
        out.truncate(len.expect("it gets smaller"));
        (kind, out)
    });
    check!().with_max_len(300).for_each(|input: &[u8]| {
        for (kind, stream) in &good {
            let mut out = vec![0; 4096];
            let _maybe_wrong = decode(*kind, input, &mut out);
            let mut stream = stream.clone();
            for edit in input.chunks_exact(3) {
                let place = usize::from(edit[0]) << 8 | usize::from(edit[1]);
                let len = stream.len();
                stream[place % len] = edit[2];
            }
            let _maybe_wrong = decode(*kind, &stream, &mut out);
        }
    });
}

#[test]
fn tools_on_damaged_images() {
    check!().with_max_len(40).with_iterations(300).for_each(|input: &[u8]| {
        let [kind, deed, edits @ ..] = input else { return };
        let sample = &samples()[usize::from(*kind) % samples().len()];
        let bench = Bench::new(&damage(sample, edits));
        let deed = *deed;
        bench.run(move |io, container| async move {
            let Ok(before) = check_image(&io, &container, Repair::Nothing).await else { return };
            // A change is refused, or leaves what was right right.
            let done = match deed % 8 {
                0 => create_snapshot(&io, &container, "two", (0, 0)).await.is_ok(),
                1 => apply_snapshot(&io, &container, "one").await.is_ok(),
                2 => delete_snapshot(&io, &container, "one").await.is_ok(),
                3 => {
                    let size = u64::from(deed) << 11;
                    let options = ResizeOptions {
                        size,
                        shrink: true,
                        backing_size: Some(1 << 20),
                        ..Default::default()
                    };
                    resize(&io, &container, None, &options).await.is_ok()
                }
                4 => {
                    let changes = ["on", "off"].map(|name| BitmapChange::Clear(name.into()));
                    change_bitmaps(&io, &container, &changes).await.is_ok()
                }
                5 => {
                    let _listed = list_snapshots(&io, &container).await;
                    let _listed = list_bitmaps(&io, &container).await;
                    load_bitmap(&io, &container, "on").await.is_ok()
                }
                _ => true,
            };
            let changed = check_image(&io, &container, Repair::Nothing).await;
            if done && before.is_clean() {
                let changed = changed.expect("it can still be looked at");
                assert!(changed.is_clean(), "{before:?} {changed:?}");
            }
            if let Ok(repaired) = check_image(&io, &container, Repair::All).await {
                let again = check_image(&io, &container, Repair::Nothing).await;
                let again = again.expect("what was repaired can be looked at");
                assert!(again.corruptions <= repaired.corruptions + 1, "{repaired:?} {again:?}");
            }
        });
    });
}

/// An image is damaged where it says something; what of it opens is served to a guest.
#[test]
fn damaged_images_served() {
    check!().with_max_len(40).with_iterations(300).for_each(|input: &[u8]| {
        let [kind, edits @ ..] = input else { return };
        let sample = &samples()[usize::from(*kind) % samples().len()];
        let bench = Bench::new(&damage(sample, edits));
        let table_memory = Some(if kind & 128 == 0 { 1 << 20 } else { 0 });
        bench.run(move |io, container| async move {
            let Ok(header) = Header::read(&io, &container).await else { return };
            let parts = Parts { table_memory, ..Parts::default() };
            match Qcow2::open(&io, container, header, parts).await {
                Ok(image) => {
                    common::use_image(&io, Box::new(image), common::Writes::MayCross).await;
                }
                Err(error) => assert!(error.to_string().len() > 20, "{error}"),
            }
        });
    });
}
