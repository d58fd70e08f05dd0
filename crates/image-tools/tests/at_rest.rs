//! Images changed by the functions themselves: snapshots, bitmaps, sizes, chains; what they tell of it, and what they refuse.

mod stops;

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ringtap_image::qcow2::BitmapChange;
use ringtap_image::{CacheMode, Format};
use ringtap_image_tools::amend::{self, Changes};
use ringtap_image_tools::bitmap::{self, Step};
use ringtap_image_tools::check::{Check, Repair, Report, check};
use ringtap_image_tools::commit::{Commit, commit};
use ringtap_image_tools::compare::{Found, Pair};
use ringtap_image_tools::convert::{Convert, Target, convert};
use ringtap_image_tools::create::create;
use ringtap_image_tools::info::{self, Lock};
use ringtap_image_tools::rebase::{Rebase, rebase};
use ringtap_image_tools::snapshot::{self, Change, Of};
use ringtap_image_tools::{
    BackingFile, Error, FormatOptions, NewImage, Reading, Watcher, Writing, unwatched,
};

use crate::stops::Stops;

const SIZE: u64 = 4 << 20;
const QCOW2: Option<Format> = Some(Format::Qcow2);

/// A folder with base.raw, whose bytes are ones, and top.qcow2 over it.
fn chain() -> (tempfile::TempDir, PathBuf, PathBuf) {
    let dir = tempfile::tempdir().expect("a folder");
    let (base, top) = (dir.path().join("base.raw"), dir.path().join("top.qcow2"));
    fs::write(&base, vec![1; SIZE as usize]).expect("a file");
    over(&base, &top);
    (dir, base, top)
}

/// Make an overlay.
fn over(base: &Path, top: &Path) {
    let name = base.file_name().expect("a name").to_string_lossy().into_owned();
    let backing = BackingFile::find(top, name, Some(Format::Raw.into())).expect("known");
    let options = FormatOptions::usual(Format::Qcow2).expect("it can be made");
    let new = NewImage { size: None, backing: Some(backing), options, secret: None };
    let size = create(top, &new, false, &Reading::default(), &unwatched()).expect("made");
    assert_eq!(size, SIZE);
}

/// Fill so many MiB of an image from its beginning, as one that is there.
fn fill(top: &Path, byte: u8, mebibytes: usize) {
    let raw = top.with_extension("filled");
    let file = fs::File::create(&raw).expect("a file");
    file.write_all_at(&vec![byte; mebibytes << 20], 0).expect("written");
    let into = Target::Existing { format: QCOW2, secret: None, backing: None, zeroed: false };
    let job = Convert::new(raw, top.to_owned(), into);
    convert(&Convert { format: Some(Format::Raw), ..job }, &unwatched()).expect("copied");
}

fn same(one: (&Path, Format), other: (&Path, Format)) -> bool {
    let images = [(one.0, Some(one.1)), (other.0, Some(other.1))];
    let pair = Pair::open(images, CacheMode::Writeback, &Reading::default(), None, &unwatched());
    let found = pair.expect("opened").compare(false, &unwatched()).expect("compared");
    matches!(found, Found::Same)
}

fn checked(path: &Path) -> Report {
    let job = Check {
        path,
        format: QCOW2,
        repair: Repair::Nothing,
        restart_log: None,
        force_share: false,
        force_format: false,
        data_files: &[],
    };
    let (format, report) = check(&job).expect("checked");
    assert_eq!(format, Format::Qcow2);
    report.expect("there is something to check")
}

fn commit_of(path: &Path) -> Commit {
    Commit {
        path: path.to_owned(),
        format: None,
        force_format: false,
        base: None,
        keep: false,
        rate: None,
        cache: CacheMode::Writeback,
        reading: Reading::default(),
    }
}

#[test]
fn an_overlay_is_told_of_committed_and_emptied() {
    let (dir, base, top) = chain();
    fill(&top, 7, 1);
    let told = info::chain(&top, None, &Reading::default()).expect("facts");
    let sizes: Vec<_> = told.iter().map(|it| (it.format, it.size, &it.lock)).collect();
    assert_eq!(sizes, [(Format::Qcow2, SIZE, &Lock::Free), (Format::Raw, SIZE, &Lock::Free)]);
    assert_eq!(told[0].backing.as_ref().map(|it| &it.path), Some(&base));
    let was = dir.path().join("was.raw");
    let options = FormatOptions::usual(Format::Raw).expect("it can be made");
    let into = Target::New(NewImage { size: None, backing: None, options, secret: None });
    convert(&Convert::new(top.clone(), was.clone(), into), &unwatched()).expect("copied");
    commit(&commit_of(&top), &unwatched()).expect("committed");
    assert!(same((&was, Format::Raw), (&base, Format::Raw)));
    assert!(same((&was, Format::Raw), (&top, Format::Qcow2)));
    assert_eq!(checked(&top).allocated_clusters, 0);
}

#[test]
fn a_commit_that_is_stopped_leaves_the_overlay_as_it_was() {
    let (_dir, _, top) = chain();
    fill(&top, 7, 4);
    let before = fs::read(&top).expect("read");
    let slow = Commit { rate: Some(256 << 10), ..commit_of(&top) };
    let watch: Watcher = Arc::new(Stops::default());
    let error = commit(&slow, &watch).expect_err("stopped");
    assert!(error.is_stopped(), "{error}");
    assert!(error.doing()[0].contains("commit again"), "{error}");
    assert!(fs::read(&top).expect("read") == before);
}

#[test]
fn an_image_reads_as_before_over_another() {
    let (dir, base, top) = chain();
    fill(&top, 7, 1);
    let (other, was) = (dir.path().join("other.raw"), dir.path().join("was.qcow2"));
    fs::write(&other, vec![9; SIZE as usize]).expect("a file");
    fs::copy(&top, &was).expect("a copy");
    let job = |name: &str| Rebase {
        path: top.clone(),
        format: None,
        force_format: false,
        backing: Some((name.to_owned(), Some(Format::Raw.into()))),
        blindly: false,
        compress: false,
        cache: CacheMode::Writeback,
        reading: Reading::default(),
    };
    rebase(&job("other.raw"), &unwatched()).expect("rebased");
    fs::remove_file(&base).expect("removed");
    fs::write(&base, vec![1; SIZE as usize]).expect("a file");
    assert!(same((&was, Format::Qcow2), (&top, Format::Qcow2)));
    let error = rebase(&job("top.qcow2"), &unwatched()).expect_err("a circle");
    assert!(error.is_usage(), "{error}");
}

/// What is copied in from below is compressed, and what the overlay holds of its own stays as it is.
#[test]
fn an_image_reads_as_before_compressed_over_another() {
    let (dir, _, top) = chain();
    fill(&top, 7, 1);
    let (other, was) = (dir.path().join("other.raw"), dir.path().join("was.qcow2"));
    fs::write(&other, vec![9; SIZE as usize]).expect("a file");
    fs::copy(&top, &was).expect("a copy");
    let job = Rebase {
        path: top.clone(),
        format: None,
        force_format: false,
        backing: Some(("other.raw".into(), Some(Format::Raw.into()))),
        blindly: false,
        compress: true,
        cache: CacheMode::Writeback,
        reading: Reading::default(),
    };
    rebase(&job, &unwatched()).expect("rebased");
    assert!(same((&was, Format::Qcow2), (&top, Format::Qcow2)));
    let report = checked(&top);
    let all = report.total_clusters;
    assert!(report.is_clean() && report.allocated_clusters == all, "{report:?}");
    assert_eq!(report.compressed_clusters, all - (all / 4), "{report:?}");
    // What lies below now is another disk, of which nothing shows.
    fs::write(&other, vec![3; SIZE as usize]).expect("a file");
    assert!(same((&was, Format::Qcow2), (&top, Format::Qcow2)));
}

#[test]
fn snapshots_and_bitmaps_are_made_told_of_and_removed() {
    let (_dir, _, top) = chain();
    let of = Of { path: &top, format: None };
    let change = |change| snapshot::change(&of, change, false, &[]);
    change(Change::Create("one".into())).expect("taken");
    fill(&top, 7, 1);
    let list = snapshot::list(&of, false).expect("listed");
    assert_eq!(list.iter().map(|it| it.name.as_str()).collect::<Vec<_>>(), ["one"]);
    change(Change::Apply("one".into())).expect("applied");
    assert_eq!(checked(&top).allocated_clusters, 0);
    change(Change::Delete("one".into())).expect("deleted");
    change(Change::Delete("one".into())).expect_err("it is gone");
    let bitmaps = |steps| {
        let changes = bitmap::Changes {
            path: &top,
            format: None,
            force_format: false,
            data_files: &[],
            bitmap: "b",
            source: None,
            steps,
        };
        bitmap::change(changes)
    };
    let add = Step::Change(BitmapChange::Add { name: "b".into(), granularity: None });
    bitmaps(vec![add.clone()]).expect("added");
    bitmaps(vec![add]).expect_err("it is there");
    let told = info::info(&top, None, &Reading::default()).expect("facts");
    assert_eq!(told.bitmaps.iter().map(|it| it.name.as_str()).collect::<Vec<_>>(), ["b"]);
    bitmaps(vec![Step::Change(BitmapChange::Remove("b".into()))]).expect("removed");
    assert!(checked(&top).is_clean());
}

#[test]
fn what_an_image_says_is_amended_and_no_format_is_guessed() {
    let (dir, _, top) = chain();
    let writing = Writing::new(Format::Qcow2, false, &[]);
    let wanted = Changes { size: Some(2 * SIZE), ..Changes::default() };
    amend::amend(&top, writing, &wanted, &Reading::default()).expect("amended");
    let told = info::info(&top, None, &Reading::default()).expect("facts");
    assert_eq!(told.size, 2 * SIZE);
    // What is recorded of an image does not come along with its bytes.
    let copy = dir.path().join("copy.qcow2");
    fs::write(&copy, fs::read(&top).expect("read")).expect("written");
    let error = commit(&commit_of(&copy), &unwatched()).expect_err("a guess");
    assert!(matches!(error, Error::FormatUnknown { looks_like: Some("qcow2"), .. }), "{error}");
    let raw = amend::record_format(&copy, Format::Luks, false, &unwatched()).expect_err("no LUKS");
    assert!(raw.is_usage(), "{raw}");
    amend::record_format(&copy, Format::Qcow2, false, &unwatched()).expect("recorded");
    assert_eq!(amend::forget_successor(&copy).expect("recorded"), None);
}
