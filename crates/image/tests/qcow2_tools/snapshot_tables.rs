//! Tables of snapshots that are broken, and what a repair makes of them.

use std::cell::Cell;
use std::rc::Rc;

use ringtap_image::qcow2::{Amendment, Repair, Snapshot, amend, check, list_snapshots};
use ringtap_image::qcow2::{Header, snapshot_table};

use crate::check::run;
use crate::guest::{content, header, snapshots};
use crate::oracle::{Folder, with};
use crate::power::Bench;

/// An image with three snapshots, and what they hold.
fn make(folder: &Folder, options: &str) -> Vec<u8> {
    folder.img(&["create", "-q", "-f", "qcow2", "-o", options, "image", "256k"]);
    for (name, pattern) in [("one", 1), ("two", 2), ("three", 3)] {
        folder.io("image", &[&format!("write -P {pattern} 0 20k")]);
        folder.img(&["snapshot", "-c", name, "image"]);
    }
    folder.io("image", &["write -P 4 0 20k"]);
    std::fs::read(folder.path("image")).expect("the image")
}

fn table(image: &[u8]) -> Vec<Snapshot> {
    let header = header(image);
    let bytes = &image[header.snapshots_offset as usize..];
    snapshot_table::parse(bytes, header.snapshots).expect("whole").expect("sane").0
}

/// An entry with so much extra data, which says to have `said` bytes of it.
fn entry(of: &Snapshot, extra: &[u8], said: usize) -> Vec<u8> {
    let mut bytes = of.l1_offset.to_be_bytes().to_vec();
    bytes.extend(of.l1_size.to_be_bytes());
    bytes.extend((of.id.len() as u16).to_be_bytes());
    bytes.extend((of.name.len() as u16).to_be_bytes());
    bytes.resize(36, 0);
    bytes.extend((said as u32).to_be_bytes());
    bytes.extend(extra);
    bytes.extend(of.id.bytes());
    bytes.extend(of.name.bytes());
    bytes.resize(bytes.len().next_multiple_of(8), 0);
    bytes
}

/// Put other bytes in the place of the table.
fn put(image: &mut Vec<u8>, bytes: &[u8]) {
    let at = header(image).snapshots_offset as usize;
    let end = image.len().max(at + bytes.len());
    image.resize(end, 0);
    image[at..at + bytes.len()].copy_from_slice(bytes);
}

fn with_header(image: &mut [u8], change: impl FnOnce(&mut Header)) {
    let mut header = header(image);
    change(&mut header);
    let bytes = header.to_bytes().expect("it fits");
    image[..bytes.len()].copy_from_slice(&bytes);
}

/// Two snapshots do not say how large the disk was, and one has data that is not known here.
fn incomplete(image: &mut Vec<u8>) {
    let list = table(image);
    let known =
        [&[0; 8][..], &(256u64 << 10).to_be_bytes(), &[0; 8], b"very important data"].concat();
    let bytes = [
        entry(&list[0], &[], 0),
        entry(&list[1], &known, known.len()),
        entry(&list[2], &[0; 8], 8),
    ];
    put(image, &bytes.concat());
}

/// The last one says to have more than there may be, and the file ends before that does.
fn too_long(image: &mut Vec<u8>) {
    let list = table(image);
    let end = (image.len() as u64).next_multiple_of(header(image).cluster_size());
    with_header(image, |header| header.snapshots_offset = end);
    let size = (256u64 << 10).to_be_bytes();
    let known = [&[0; 8][..], &size].concat();
    let bytes = [
        entry(&list[0], &known, 16),
        entry(&list[1], &known, 16),
        entry(&list[2], &known, 64 << 10),
    ];
    put(image, &bytes.concat());
}

fn names(folder: &Folder) -> Vec<String> {
    with(&folder.path("image"), |io, container| async move {
        let list = list_snapshots(&io, &container).await.expect("listed");
        list.into_iter().map(|snapshot| snapshot.name).collect()
    })
}

#[test]
fn what_a_table_lacks_is_added() {
    let folder = Folder::new();
    let mut image = make(&folder, "cluster_size=4k");
    let (disk, held) = (content(&image), snapshots(&image));
    incomplete(&mut image);
    std::fs::write(folder.path("image"), &image).expect("written");
    let report = run(&folder, "image", Repair::Nothing);
    assert_eq!((report.corruptions, report.leaks), (2, 0), "{report:?}");
    assert_eq!(folder.check("image")["corruptions"].as_u64(), Some(2));
    let report = run(&folder, "image", Repair::All);
    assert!(report.is_clean() && report.corruptions_fixed == 2, "{report:?}");
    folder.assert_clean("image");
    let after = std::fs::read(folder.path("image")).expect("read");
    assert!(content(&after) == disk && snapshots(&after) == held);
    let extra: Vec<_> = table(&after).into_iter().map(|it| it.extra).collect();
    assert_eq!(extra[0], [0xff; 8]);
    assert!(extra[1].ends_with(b"very important data"));
    folder.img(&["snapshot", "-a", "three", "image"]);
    folder.io("image", &["read -P 3 0 20k", "write -P 9 0 64k"]);
    folder.assert_clean("image");
}

#[test]
fn what_a_table_has_too_much_goes() {
    let folder = Folder::new();
    let mut image = make(&folder, "cluster_size=4k");
    let (disk, held) = (content(&image), snapshots(&image));
    too_long(&mut image);
    std::fs::write(folder.path("image"), &image).expect("written");
    for repair in [Repair::Nothing, Repair::Leaks] {
        let said = with(&folder.path("image"), move |io, container| async move {
            check(&io, &container, repair).await.expect_err("nobody opens it").to_string()
        });
        assert!(
            said.contains("65536 bytes of extra data") && said.contains("repair all"),
            "{said}"
        );
        assert_eq!(std::fs::read(folder.path("image")).expect("read"), image);
    }
    let report = run(&folder, "image", Repair::All);
    assert!(report.is_clean(), "{report:?}");
    folder.assert_clean("image");
    let after = std::fs::read(folder.path("image")).expect("read");
    assert!(content(&after) == disk);
    let left: Vec<_> = snapshots(&after).into_iter().map(|it| it.1).collect();
    let there: Vec<_> = held.into_iter().map(|it| it.1).collect();
    assert!(left == there);
    // Where its name and its ID were said to lie there are none.
    assert_eq!(names(&folder), ["one", "two", ""]);
    folder.img(&["snapshot", "-a", "two", "image"]);
    folder.io("image", &["read -P 2 0 20k"]);
    folder.assert_clean("image");
}

#[test]
fn snapshots_that_are_too_many_go() {
    let folder = Folder::new();
    let options = "compat=0.10,cluster_size=64k";
    folder.img(&["create", "-q", "-f", "qcow2", "-o", options, "image", "64M"]);
    folder.io("image", &["write -P 5 0 64k"]);
    let mut image = std::fs::read(folder.path("image")).expect("the image");
    // The table is zeros, which are entries in version 2; the first that is too many has an L1 table.
    let (at, count) = (1 << 20, 65_546);
    image.resize(at + 40 * count, 0);
    let first_too_many = at + 40 * 65536;
    image[first_too_many + 5] = 0x0e;
    image[first_too_many + 11] = 1;
    with_header(&mut image, |header| {
        (header.snapshots, header.snapshots_offset) = (count as u32, at as u64);
    });
    std::fs::write(folder.path("image"), &image).expect("written");
    let report = run(&folder, "image", Repair::All);
    assert!(report.is_clean() && report.corruptions_fixed >= 10, "{report:?}");
    folder.assert_clean("image");
    assert_eq!(names(&folder).len(), 65536);
    let after = header(&std::fs::read(folder.path("image")).expect("read"));
    assert_eq!((after.snapshots, after.snapshots_offset), (65536, at as u64), "where it was");
    folder.io("image", &["read -P 5 0 64k"]);
}

/// A repair of a table is one switch: whenever the power is cut, another one makes of what is there what this one would have.
#[test]
fn power_cuts_leave_a_table_that_can_be_repaired() {
    let folder = Folder::new();
    let good = make(&folder, "cluster_size=1k");
    for damage in [incomplete, too_long] {
        let mut image = good.clone();
        damage(&mut image);
        let finished = Bench::new(&image);
        assert!(finished.check(Repair::All).is_clean());
        let disk = content(&good);
        let wanted = snapshots(&finished.bytes());
        let bench = Bench::new(&image);
        let seen = Rc::new(Cell::new((0, 0)));
        let count = seen.clone();
        let look = move |left: &Bench, seed| {
            let said = left.bytes();
            assert!(content(&said) == disk, "seed {seed}");
            let same = header(&said).snapshots_offset == header(&image).snapshots_offset;
            let (old, new) = count.get();
            count.set(if same { (old + 1, new) } else { (old, new + 1) });
            let report = left.check(Repair::All);
            assert!(report.is_clean(), "seed {seed}: {report:?}");
            let said = left.bytes();
            assert!(content(&said) == disk && snapshots(&said) == wanted, "seed {seed}");
        };
        let deed = |io, container| async move {
            check(&io, &container, Repair::All).await.expect("repaired");
        };
        bench.cut(bench.run(), |_| 0..4, look, deed);
        assert!(seen.get().0 > 4 && seen.get().1 > 0, "{seen:?}");
    }
}

/// What version 2 need not say of its snapshots is said in version 3.
#[test]
fn snapshots_say_in_version_3_how_large_the_disk_was() {
    let folder = Folder::new();
    let mut image = make(&folder, "compat=0.10,cluster_size=4k");
    let (disk, held) = (content(&image), snapshots(&image));
    incomplete(&mut image);
    std::fs::write(folder.path("image"), &image).expect("written");
    assert!(run(&folder, "image", Repair::Nothing).is_clean());
    with(&folder.path("image"), |io, container| async move {
        let wanted = Amendment { version: Some(3), ..Amendment::default() };
        amend(&io, &container, &wanted).await.expect("amended");
    });
    folder.assert_clean("image");
    let after = std::fs::read(folder.path("image")).expect("read");
    assert_eq!(header(&after).version, 3);
    assert!(content(&after) == disk && snapshots(&after) == held);
}
