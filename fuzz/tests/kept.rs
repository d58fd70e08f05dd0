//! What Ringtap keeps of images in the state folder, changed at will: it is taken up or refused, and what is taken up is
//! served.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

use bolero::check;
use ringtap_image::bitmap_store::testing::{body_again, coming_again};
use ringtap_image::bitmap_store::{Binding, BitMemory, KeptIn};
use ringtap_image::record::testing::{Record, ends_with, has_handle, written_again};
use ringtap_image::{CacheMode, Container, Raw, Traits};
use ringtap_io::{File, Io, Words};
use ringtap_sim::{Disk, alone};
use ringtap_vbd::{BitmapChange, Kind, Request, Vbd};
use sha2::{Digest, Sha256};

const SIZE: u64 = 1 << 20;
const REGION: u64 = 64 << 10;

#[test]
fn records_of_images() {
    check!().for_each(|input: &[u8]| {
        for record in Record::ALL {
            if let Some(again) = written_again(record, input) {
                assert_eq!(written_again(record, &again), Some(again), "{record:?}");
            }
        }
        let _any = has_handle(&String::from_utf8_lossy(input));
        let _any = has_handle(&format!("file {}", String::from_utf8_lossy(input)));
    });
}

#[test]
fn where_a_disk_comes_from() {
    check!().for_each(|input: &[u8]| {
        if let Some(again) = coming_again(input) {
            assert_eq!(again, input);
        }
    });
}

/// The input: the number of the part, and the file.
#[test]
fn file_of_a_transaction() {
    let dir = tempfile::tempdir_in("/dev/shm").expect("a folder");
    let path = dir.path().join("transaction");
    check!().for_each(|input: &[u8]| {
        let [number, text @ ..] = input else { return };
        let number = usize::from(*number);
        fs::write(&path, text).expect("written");
        let ends = ends_with(&path, number).expect("it is there");
        let after = fs::read(&path).expect("it is there");
        let count = text.iter().position(|byte| *byte == b'\n');
        assert_eq!(after.len(), text.len());
        for (at, (before, now)) in text.iter().zip(&after).enumerate() {
            let is_gone = at == number && count.is_some_and(|count| at < count);
            assert_eq!(*now, if is_gone { b'x' } else { *before });
        }
        let pending =
            count.is_none_or(|count| after[..count].iter().any(|one| !b"x-".contains(one)));
        assert_eq!(ends, !pending);
    });
}

#[test]
fn body_of_a_sidecar() {
    check!().with_max_len(16 << 10).for_each(|input: &[u8]| {
        // By itself, and behind a description that is right.
        let mut bitmaps = String::new();
        for id in 1..=u64::from(input.first().copied().unwrap_or(0) % 3) {
            let comma = if id > 1 { "," } else { "" };
            bitmaps += &format!(r#"{comma}{{"name":"b","granularity":65536,"id":{id},"recording":true}}"#);
        }
        let head = format!(
            r#"{{"identity":"i","boot":"b","session":1,"region":65536,"known":{{"modified":1,"written":null}},"closed":true,"bitmaps":[{bitmaps}]}}"#
        );
        let headed = [&(head.len() as u64).to_le_bytes()[..], head.as_bytes(), input].concat();
        for bytes in [input, &headed] {
            if let Some(again) = body_again(bytes) {
                // Words of a page are not left out, nor made up.
                assert!(again.len() <= bytes.len() + 200 + bytes.len() * 6);
                assert_eq!(body_again(&again), Some(again));
            }
        }
    });
}

/// Memory that a killed server leaves.
#[derive(Default)]
struct Memory(Mutex<HashMap<u64, Arc<[AtomicU64]>>>);

impl BitMemory for Memory {
    fn words(&self, number: u64, count: Option<usize>) -> io::Result<Words> {
        let mut all = self.0.lock().expect("no panic before");
        let there = all.get(&number).cloned();
        let count = count.or(there.as_ref().map(|there| there.len()));
        let count = count.ok_or(io::ErrorKind::NotFound)?;
        // As much as a server that has such a disk would make.
        assert!(count <= 1 << 16, "{count} words");
        match there {
            Some(there) if there.len() >= count => Ok(Arc::new(there)),
            _ => {
                let new: Arc<[AtomicU64]> = (0..count).map(|_| AtomicU64::new(0)).collect();
                all.insert(number, new.clone());
                Ok(Arc::new(new))
            }
        }
    }

    fn forget(&self, number: u64) {
        self.0.lock().expect("no panic before").remove(&number);
    }

    fn forget_but(&self, numbers: &[u64]) {
        self.0.lock().expect("no panic before").retain(|number, _| numbers.contains(number));
    }
}

async fn open(io: &Io, disk: Disk, files: (File, File), boot: u128) -> (Vbd, io::Result<()>) {
    let (image, sidecar) = files;
    let sidecar = Container::simulated(sidecar, disk.size(sidecar), Traits::FILE);
    let times = disk.clone();
    let container = Container::simulated(image, disk.size(image), Traits::FILE);
    let container = container.with_time(move || times.modified(image));
    disk.watch(image, container.witness().clone());
    let vbd = Vbd::new(Box::new(Raw::new(container.clone())), CacheMode::None);
    let binding = Binding::simulated(&container, "the image".into(), boot, 1 << 40);
    let memory = Arc::new(Memory::default());
    let end = vbd.keep_bitmaps(io, KeptIn { sidecar, memory, binding, region: REGION }).await;
    (vbd, end)
}

async fn write(io: &Io, vbd: &Vbd, offset: u64) {
    let buffer = io.buffer(4096).expect("memory");
    let request = Request { kind: Kind::Write, offset, len: 4096, mem: buffer.mem(), fua: false };
    vbd.serve(io, request).await.expect("written");
}

/// A disk with two bitmaps and its sidecar; of a server that was stopped, or not.
fn leave(stopped: bool) -> (Disk, (File, File)) {
    let disk = Disk::new(512);
    let files = (disk.add_file(SIZE, 1), disk.add_file(0, 1));
    let own = disk.clone();
    alone(&disk, 1, async move |io| {
        let (vbd, end) = open(&io, own, files, 1).await;
        end.expect("kept");
        let add = |name: &str| BitmapChange::Add {
            name: name.into(),
            granularity: 4096,
            persistent: true,
            recording: true,
        };
        let staged = vbd.stage_bitmaps(&io, vec![add("one"), add("two")]).await.expect("staged");
        let still = vbd.quiesce(&io, 1 << 40).await.expect("nothing is in flight");
        staged.switch(&still).await;
        drop(still);
        staged.commit(&io).await.expect("stable");
        for at in 0..4 {
            write(&io, &vbd, at * 3 * REGION).await;
        }
        if stopped {
            vbd.close(&io).await.expect("closed");
        }
    });
    (disk, files)
}

/// Have its checksums be right again.
fn mend(bytes: &mut [u8]) {
    for at in [0, 4096] {
        let word = |bytes: &[u8], number: usize| {
            let place = at + number * 8;
            bytes.get(place..place + 8).map_or(0, |word| {
                usize::try_from(u64::from_le_bytes(word.try_into().expect("eight"))).unwrap_or(0)
            })
        };
        let (start, end) = (word(bytes, 4), word(bytes, 5));
        if let Some(hash) = bytes.get(start..end).map(Sha256::digest) {
            bytes[at + 48..at + 80].copy_from_slice(&hash);
        }
        let own = Sha256::digest(&bytes[at..at + 80]);
        bytes[at + 80..at + 112].copy_from_slice(&own);
    }
}

/// The input: bit 0 of the first byte says whether the server was stopped, bit 1 whether the machine was started since, bit 2
/// whether checksums are mended; then changes of three bytes: which byte of what is written there, and what it becomes. Places
/// are counted without what is zero.
#[test]
fn sidecar_of_an_image() {
    let left = [leave(false), leave(true)];
    let bytes = left.each_ref().map(|(disk, (_, sidecar))| {
        let mut bytes = vec![0; disk.size(*sidecar) as usize];
        disk.peek(*sidecar, 0, &mut bytes);
        bytes
    });
    let used = bytes.each_ref().map(|bytes| {
        let places = bytes.iter().enumerate().filter(|(_, byte)| **byte != 0);
        places.map(|(at, _)| at).collect::<Vec<usize>>()
    });
    check!().with_iterations(300).with_max_len(64).for_each(|input: &[u8]| {
        let [first, changes @ ..] = input else { return };
        let which = usize::from(first & 1);
        let (mut bytes, used) = (bytes[which].clone(), &used[which]);
        for change in changes.chunks_exact(3) {
            let place = usize::from(u16::from_le_bytes([change[0], change[1]]));
            // Bytes between those that are used, too: numbers begin with zeros.
            let at = (used[place % used.len()] + (place / used.len()) % 8).min(bytes.len() - 1);
            bytes[at] = change[2];
        }
        if first & 4 != 0 {
            mend(&mut bytes);
        }
        let (disk, files) = &left[which];
        let (disk, files) = (disk.after_kill(1), *files);
        disk.poke(files.1, 0, &bytes);
        let (own, boot) = (disk.clone(), if first & 2 != 0 { 2 } else { 1 });
        let whole = changes.len() < 3;
        alone(&disk, 1, async move |io| {
            let (vbd, end) = open(&io, own, files, boot).await;
            if end.is_err() {
                return;
            }
            let all = vbd.dirty_bitmaps();
            if whole {
                assert_eq!(all.len(), 2, "nothing was changed");
            }
            for one in &all {
                let granularity = one.marks.granularity();
                assert!(granularity.is_power_of_two() && granularity >= 512);
                let mut at = 0;
                while let Some(range) = one.marks.next(at, u64::MAX) {
                    assert!(range.end > at);
                    at = range.end;
                }
            }
            write(&io, &vbd, 0).await;
            for one in all.iter().filter(|one| one.recording && one.lost.is_none()) {
                assert!(one.marks.is_marked(0..4096), "a write is noted");
            }
            vbd.close(&io).await.expect("closed");
        });
    });
}
