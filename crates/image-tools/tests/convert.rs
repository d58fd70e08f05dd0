//! Images copied by the functions themselves: what is copied, what is told on the way, and what is left where it is
//! stopped in the middle.

mod stops;

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex};

use ringtap_image::{CacheMode, Format};
use ringtap_image_tools::compare::{Found, Pair};
use ringtap_image_tools::convert::{Convert, Target, convert};
use ringtap_image_tools::{FormatOptions, NewImage, Note, Reading, Watch, Watcher, unwatched};

use crate::stops::Stops;

const SIZE: u64 = 16 << 20;

/// A raw image whose every third piece of 64 KiB is a hole.
fn source(dir: &Path) -> PathBuf {
    let path = dir.join("a.raw");
    let file = fs::File::create(&path).expect("a file");
    file.set_len(SIZE).expect("its size");
    for at in (0..SIZE >> 16).filter(|at| at % 3 != 0) {
        file.write_all_at(&[at as u8 + 1; 64 << 10], at << 16).expect("written");
    }
    path
}

fn new(format: Format) -> Target {
    let options = FormatOptions::usual(format).expect("it can be made");
    Target::New(NewImage { size: None, backing: None, options, secret: None })
}

fn job(source: &Path, target: &Path, into: Target) -> Convert {
    let format = Some(Format::Raw);
    Convert { format, ..Convert::new(source.to_owned(), target.to_owned(), into) }
}

#[test]
fn every_format_that_is_made_reads_as_its_source() {
    let dir = tempfile::tempdir().expect("a folder");
    let from = source(dir.path());
    for format in [Format::Raw, Format::Qcow2, Format::Vhd] {
        let to = dir.path().join(format!("b.{format}"));
        convert(&job(&from, &to, new(format)), &unwatched()).expect("copied");
        let images = [(from.as_path(), Some(Format::Raw)), (to.as_path(), Some(format))];
        let pair =
            Pair::open(images, CacheMode::Writeback, &Reading::default(), None, &unwatched());
        let found = pair.expect("opened").compare(false, &unwatched()).expect("compared");
        assert!(matches!(found, Found::Same), "{format}: {found:?}");
    }
}

#[test]
fn a_copy_that_is_stopped_leaves_no_target() {
    let dir = tempfile::tempdir().expect("a folder");
    let (from, to) = (source(dir.path()), dir.path().join("b.qcow2"));
    let stops = Arc::new(Stops::default());
    let watch: Watcher = stops.clone();
    let slow = Convert { rate: Some(1 << 20), ..job(&from, &to, new(Format::Qcow2)) };
    let error = convert(&slow, &watch).expect_err("stopped");
    assert!(error.is_stopped() && !error.is_usage(), "{error}");
    assert_eq!(error.doing(), [format!("{} is removed, for it was not whole", to.display())]);
    assert_eq!(stops.total.load(SeqCst), SIZE);
    assert!(!to.exists());
}

#[test]
fn a_target_that_was_there_is_never_taken_for_a_whole_one() {
    let dir = tempfile::tempdir().expect("a folder");
    let (from, to) = (source(dir.path()), dir.path().join("b.qcow2"));
    fs::write(&to, [7; 4096]).expect("a file");
    let slow = Convert { rate: Some(1 << 20), ..job(&from, &to, new(Format::Qcow2)) };
    let watch: Watcher = Arc::new(Stops::default());
    assert!(convert(&slow, &watch).expect_err("stopped").is_stopped());
    let empty = to.metadata().expect("it stays").len() == 0;
    let opened = Reading::default().open(&to, Some(Format::Qcow2), CacheMode::Writeback, &watch);
    let why = opened.err().expect("it is not whole").to_string();
    assert!(empty || why.contains("convert"), "{why}");
}

#[test]
fn a_format_that_was_guessed_is_told_and_a_target_is_never_guessed() {
    #[derive(Default)]
    struct Hears(Mutex<Vec<String>>);
    impl Watch for Hears {
        fn note(&self, note: &Note) {
            assert!(!note.is_warning());
            self.0.lock().expect("no panic").push(note.to_string());
        }
    }
    let dir = tempfile::tempdir().expect("a folder");
    let (from, image) = (source(dir.path()), dir.path().join("b.qcow2"));
    convert(&job(&from, &image, new(Format::Qcow2)), &unwatched()).expect("copied");
    let copy = dir.path().join("c.qcow2");
    // What is recorded of an image does not come along with its bytes.
    fs::write(&copy, fs::read(&image).expect("read")).expect("written");
    let hears = Arc::new(Hears::default());
    let watch: Watcher = hears.clone();
    let back = dir.path().join("d.raw");
    convert(&Convert::new(copy.clone(), back, new(Format::Raw)), &watch).expect("copied");
    let heard = hears.0.lock().expect("no panic").clone();
    assert!(matches!(&heard[..], [one] if one.contains("taken for it")), "{heard:?}");
    let there = Target::Existing { format: None, secret: None, backing: None, zeroed: false };
    let error = convert(&job(&from, &copy, there), &watch).expect_err("a guess");
    assert!(error.is_usage() && error.to_string().contains("it looks like qcow2"), "{error}");
}
