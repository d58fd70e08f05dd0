//! What servers keep of their guests below /run, and what xenstored answers, changed at will: the next server takes
//! it up or refuses it, and nobody panics or waits for ever.

use std::fs::File;
use std::os::unix::fs::FileExt;

use bolero::check;
use ringtap_export::ublk::testing::image_in;
use ringtap_export::xen::testing::{Abi, Backend, Frontend, ask_store};
use ringtap_image::{CacheMode, Null};
use ringtap_vbd::Vbd;

fn disk() -> Vbd {
    Vbd::new(Box::new(Null::new(1 << 30, false)), CacheMode::None)
}

/// Reads of one page each.
fn put(front: &mut Frontend, count: u8) {
    for id in 0..u64::from(count) {
        let mut request = vec![0, 1, 0, 0, 0, 0, 0, 0];
        request.extend(id.to_le_bytes());
        request.extend((id * 8).to_le_bytes());
        request.extend([1, 0, 0, 0, 0, 7, 0, 0]);
        front.put(&request);
    }
}

/// The input: how many requests are put, how many of them the killed server had fetched, and then changes of nine
/// bytes: the word of the record (modulo those there are), and what it becomes.
#[test]
fn xen_record() {
    let dir = tempfile::tempdir_in("/dev/shm").expect("a folder");
    let path = dir.path().join("record");
    check!().with_iterations(300).for_each(|input: &[u8]| {
        let [count, changes @ ..] = input else { return };
        let mut front = Frontend::new(Abi::Wide).expect("memory");
        let mut killed = Backend::new(&front, disk(), Some(&path), true, 0).expect("a record");
        put(&mut front, count % 33);
        killed.turn(count & 128 != 0).expect("a sound ring");
        drop(killed);
        let file = File::options().read(true).write(true).open(&path).expect("the record");
        let words = file.metadata().expect("its size").len() / 8;
        for change in changes.chunks_exact(9) {
            let at = u64::from(change[0]) % words * 8;
            file.write_all_at(&change[1..], at).expect("changed");
        }
        // Another's record is refused, a ring that makes no sense stops.
        if let Ok(mut next) = Backend::new(&front, disk(), Some(&path), false, 0) {
            let _end = next.serve();
        }
        assert!(front.take().len() <= 32);
    });
}

#[test]
fn xenstore_messages() {
    check!().with_iterations(300).for_each(|input: &[u8]| {
        let answered = ask_store(&input[..input.len().min(16 << 10)]).expect("a socket");
        assert!(answered <= 4 + input.len() / 16);
    });
}

#[test]
fn ublk_record() {
    check!().with_iterations(300).for_each(|input: &[u8]| {
        let mark = 0x5254_0000_0000_0001;
        let image = image_in(input, mark);
        let ours = input.starts_with(b"5254000000000001 ");
        assert_eq!(image.map(|image| image.as_os_str().len()), ours.then(|| input.len() - 17));
    });
}
