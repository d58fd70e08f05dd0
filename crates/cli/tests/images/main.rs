//! The verbs on images, with QEMU's programs as the judges.

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::Command;

use serde_json::Value;

mod bench;
mod beside;
mod convert;
mod dd;
mod foreign;
mod habits;
mod keyslots;
mod larger;
mod luks;
mod measure;
mod printed;
mod repaired;
mod spared;
mod stop;
mod vhd;

use bench::{Bench, operations};

/// What qemu-img and we have in common of a map.
fn map(text: &str) -> Vec<Value> {
    let Value::Array(mut stretches) = serde_json::from_str(text).expect("JSON") else {
        panic!("{text}")
    };
    for stretch in &mut stretches {
        let stretch = stretch.as_object_mut().expect("an object");
        // QEMU 7.2 does not tell the one yet; it tells where content would lie, we where it does.
        stretch.remove("compressed");
        if stretch["present"] == false {
            stretch.remove("offset");
        }
        // Data that lies in a hole of the file: QEMU may look, and say that it reads as zeros.
        if stretch["data"] == true {
            stretch.insert("zero".into(), false.into());
        }
    }
    let mut joined: Vec<Value> = vec![];
    for stretch in stretches {
        match joined.last_mut() {
            Some(last) if goes_on(last, &stretch) => {
                let length = last["length"].as_u64().zip(stretch["length"].as_u64());
                last["length"] = length.map(|(one, other)| one + other).into();
            }
            _ => joined.push(stretch),
        }
    }
    joined
}

/// Whether two stretches are of the same kind, and lie nowhere or one behind the other.
fn goes_on(one: &Value, next: &Value) -> bool {
    let same = |field| one[field] == next[field];
    let behind = match (one["offset"].as_u64(), next["offset"].as_u64()) {
        (Some(at), Some(next)) => one["length"].as_u64() == next.checked_sub(at),
        (None, None) => true,
        _ => false,
    };
    behind && ["depth", "present", "zero", "data"].into_iter().all(same)
}

const ODD: [&str; 8] = [
    "",
    "-o cluster_size=512",
    "-o cluster_size=2M",
    "-o extended_l2=on",
    "-o extended_l2=on,cluster_size=16k,refcount_bits=64",
    "-o compat=0.10,cluster_size=4k",
    "-o refcount_bits=1",
    "-o lazy_refcounts=on,refcount_bits=8,cluster_size=1M",
];

#[test]
fn images_of_odd_options_are_converted_mapped_and_compared_as_qemu_does() {
    let bench = Bench::new();
    let mut random = fastrand::Rng::with_seed(7);
    for (i, options) in ODD.iter().enumerate() {
        let size = 6 << 20 | i as u64 * 512;
        let by = ["qemu-img create -q", "ringtap create -q"][i % 2];
        bench.ok(&format!("{by} -f qcow2 {options} a.qcow2 {size}"));
        bench.qemu_io("-f qcow2 a.qcow2", &operations(&mut random, size, 150));
        let theirs = bench.ok("qemu-img map --output json a.qcow2");
        let ours = bench.ok("ringtap map -f qcow2 --output json a.qcow2");
        assert_eq!(map(&ours), map(&theirs), "{options}");
        bench.ok("ringtap convert -f qcow2 a.qcow2 -O raw a.raw");
        bench.same("a.qcow2", "a.raw");
        bench.ok(&format!("ringtap convert -f raw a.raw -O qcow2 {options} b.qcow2"));
        bench.same("a.raw", "b.qcow2");
        let size_of = |name: &str| fs::metadata(bench.path(name)).expect("a file").len();
        bench.ok(&format!("qemu-img convert -f raw a.raw -O qcow2 {options} c.qcow2"));
        let (ours, theirs) = (size_of("b.qcow2"), size_of("c.qcow2"));
        assert!(ours <= theirs + (4 << 20), "{options}: {ours} bytes, {theirs} by qemu-img");
        for name in ["a.qcow2", "b.qcow2", "c.qcow2", "a.raw"] {
            fs::remove_file(bench.path(name)).expect("removed");
        }
    }
}

#[test]
fn chains_are_rebased_and_committed_and_read_as_before() {
    let bench = Bench::new();
    let mut random = fastrand::Rng::with_seed(11);
    const SIZE: u64 = 5 << 20;
    for round in 0..4 {
        let options = ODD[(round * 3 + 1) % ODD.len()];
        bench.ok(&format!("ringtap create -q -f raw base.raw {}", SIZE - 69_632));
        bench.qemu_io("-f raw base.raw", &operations(&mut random, SIZE - 69_632, 60));
        bench.ok(&format!("ringtap create -q {options} -b base.raw mid.qcow2 {SIZE}"));
        bench.qemu_io("-f qcow2 mid.qcow2", &operations(&mut random, SIZE, 40));
        bench.ok("ringtap create -q -b mid.qcow2 top.qcow2");
        bench.qemu_io("-f qcow2 top.qcow2", &operations(&mut random, SIZE, 60));
        bench.ok("qemu-img convert -f qcow2 -O raw top.qcow2 was.raw");
        let theirs = bench.ok("qemu-img map --output json top.qcow2");
        assert_eq!(map(&bench.ok("ringtap map --output json top.qcow2")), map(&theirs));
        bench.ok("ringtap convert top.qcow2 -B mid.qcow2 -F qcow2 thin.qcow2");
        bench.same("was.raw", "thin.qcow2");

        // Over another image, over none, over the first again.
        bench.ok("cp mid.qcow2 other.qcow2");
        bench.qemu_io("-f qcow2 other.qcow2", &operations(&mut random, SIZE, 20));
        bench.ok("ringtap rebase -b other.qcow2 -F qcow2 top.qcow2");
        bench.same("was.raw", "top.qcow2");
        bench.ok("ringtap rebase -b mid.qcow2 -F qcow2 top.qcow2");
        bench.same("was.raw", "top.qcow2");
        let said = bench.ends("ringtap rebase -b top.qcow2 -F qcow2 mid.qcow2", 1);
        assert!(said.contains("lies over"), "{said}");

        if round % 2 == 0 {
            bench.ok("ringtap commit -q top.qcow2");
            bench.same("was.raw", "mid.qcow2");
            bench.same("was.raw", "top.qcow2");
            let left = fs::metadata(bench.path("top.qcow2")).expect("the overlay").blocks() * 512;
            assert!(left < 1 << 20, "{left} bytes in an overlay that was committed");
        }
        bench.ok("ringtap commit -q -b base.raw top.qcow2");
        bench.same("was.raw", "base.raw");
        bench.ok("ringtap rebase -u -b base.raw -F raw top.qcow2");
        bench.same("was.raw", "top.qcow2");
        for name in ["base.raw", "mid.qcow2", "top.qcow2", "was.raw", "other.qcow2", "thin.qcow2"] {
            fs::remove_file(bench.path(name)).expect("removed");
        }
    }
}

#[test]
fn snapshots_that_change_with_what_lies_below_are_told_of() {
    let bench = Bench::new();
    for name in ["base", "other"] {
        bench.ok(&format!("ringtap create -q -f qcow2 {name}.qcow2 1M"));
    }
    bench.ok("ringtap create -q -b base.qcow2 top.qcow2");
    let commands = [
        "ringtap rebase -b other.qcow2 -F qcow2 top.qcow2",
        "ringtap rebase -b base.qcow2 -F qcow2 top.qcow2",
        "ringtap commit top.qcow2",
    ];
    for line in commands {
        let said = bench.ok(line);
        assert!(!said.contains("warning"), "{line}: {said}");
    }
    bench.ok("ringtap snapshot -c was top.qcow2");
    for line in commands {
        let said = bench.ok(line);
        let warning = "warning: snapshots inside ";
        assert!(said.contains(warning) && said.contains("top.qcow2 (1) change"), "{line}: {said}");
    }
    let said = bench.ok("ringtap rebase -u -b other.qcow2 -F qcow2 top.qcow2");
    assert!(!said.contains("warning"), "{said}");
}

#[test]
fn every_format_is_made_and_read() {
    let bench = Bench::new();
    let mut random = fastrand::Rng::with_seed(13);
    bench.ok("ringtap create -q a.raw 4161536"); // a size that VHD's geometry has
    bench.qemu_io("-f raw a.raw", &operations(&mut random, 4_161_536, 80));
    fs::write(bench.path("key"), "a secret").expect("a key");
    bench.ok("chmod 600 key");
    for (format, extra, back) in [
        ("raw", "", ""),
        ("qcow2", "", ""),
        ("vpc", "", ""),
        ("vhd", "-o subformat=fixed", ""),
        ("luks", "--target-secret file:key", "--secret file:key"),
        ("qcow2", "-o encrypt.format=luks --target-secret file:key", "--secret file:key"),
    ] {
        bench.ok(&format!("ringtap convert a.raw -O {format} {extra} b.img"));
        bench.ok(&format!("ringtap compare a.raw b.img {back}"));
        bench.ok(&format!("ringtap convert b.img c.raw {back}"));
        bench.ok("qemu-img compare -f raw -F raw a.raw c.raw");
        if back.is_empty() {
            let theirs = if format == "vhd" { "vpc" } else { format };
            bench.ok(&format!("qemu-img compare -f raw -F {theirs} a.raw b.img"));
        } else {
            let said = bench.ends("ringtap compare a.raw b.img", 2);
            assert!(said.contains("secret") || said.contains("key"), "{said}");
        }
        let known = bench.json(&format!("ringtap info --output json b.img {back}"));
        assert_eq!(known["format-known"], "recorded");
    }
    for format in ["vhdx", "vmdk"] {
        bench.ok(&format!("qemu-img convert -f raw a.raw -O {format} d.img"));
        bench.ok("ringtap compare a.raw d.img");
        bench.ok(&format!("ringtap convert -f {format} d.img d.raw"));
        bench.ok("qemu-img compare -f raw -F raw a.raw d.raw");
        let said = bench.ends(&format!("ringtap create -f {format} e.img 1M"), 2);
        assert!(said.contains("cannot be made"), "{said}");
        assert!(!bench.path("e.img").exists());
    }
}

#[test]
fn two_images_are_compared_with_the_exit_codes_of_qemu_img() {
    let bench = Bench::new();
    for line in [
        "ringtap create -q a.raw 1M",
        "ringtap create -q b.raw 2M",
        "ringtap create -q -o preallocation=full c.raw 1M",
    ] {
        bench.ok(line);
    }
    assert!(bench.ok("ringtap compare a.raw b.raw").contains("size mismatch"));
    bench.ends("ringtap compare -s a.raw b.raw", 1);
    bench.ok("ringtap compare a.raw c.raw");
    assert!(bench.ends("ringtap compare -s a.raw c.raw", 1).contains("block status"));
    bench.qemu_io("-f raw b.raw", &["write -q -P 1 1234432 512".into()]);
    assert!(bench.ends("ringtap compare a.raw b.raw", 1).contains("at offset 1234432!"));
    bench.qemu_io("-f raw a.raw", &["write -q -P 1 99840 512".into()]);
    assert!(bench.ends("ringtap compare a.raw b.raw", 1).contains("at offset 99840!"));
    bench.ends("ringtap compare a.raw missing", 2);
    bench.ends("ringtap compare a.raw", 2);
    bench.ends("ringtap compare -F raw", 2);
}

#[test]
fn no_guest_turns_its_raw_disk_into_something_else() {
    let bench = Bench::new();
    bench.ok("ringtap create -q ours.raw 1M");
    if bench.json("ringtap info --output json ours.raw")["format-known"] != "recorded" {
        eprintln!("skipped: no extended attributes on this file system");
        return;
    }
    // What a guest may write: the header of an overlay over a file that is not its own.
    bench.ok("ringtap create -q -f raw secret 1M");
    bench.qemu_io("-f raw secret", &["write -q -P 7 0 1M".into()]);
    bench.ok("qemu-img create -q -f qcow2 -b secret -F raw evil.qcow2");
    let header = fs::read(bench.path("evil.qcow2")).expect("an image");
    let write = |name: &str| {
        let file = fs::File::options().write(true).open(bench.path(name)).expect("open");
        file.write_all_at(&header, 0).expect("written");
    };
    write("ours.raw");
    fs::write(bench.path("foreign.raw"), vec![0; 1 << 20]).expect("a disk of unknown make");
    write("foreign.raw");

    let known = bench.json("ringtap info --output json ours.raw");
    assert_eq!((&known["format"], &known["looks-like"]), (&"raw".into(), &"qcow2".into()));
    bench.ok("ringtap convert ours.raw copy.raw");
    bench.ok("cmp ours.raw copy.raw");
    // Written to without a name: only what was written down is believed.
    let said = bench.ends("ringtap resize foreign.raw +1M", 2);
    assert!(said.contains("-f") && said.contains("looks like qcow2"), "{said}");
    bench.ok("ringtap resize -q ours.raw +1M");
    bench.ends("ringtap serve foreign.raw --nbd unix:s", 2);
    // Nor does an overlay that names no format of its backing file believe that file's mark.
    bench.ok("ringtap create -q -b foreign.raw -F raw over.qcow2");
    let mut bytes = fs::read(bench.path("over.qcow2")).expect("an image");
    let at = bytes.windows(4).position(|it| it == [0xe2, 0x79, 0x2a, 0xca]).expect("the extension");
    bytes[at..at + 4].copy_from_slice(b"none");
    fs::write(bench.path("over.qcow2"), bytes).expect("written");
    let said = bench.ends("ringtap convert -f qcow2 over.qcow2 out.raw", 1);
    assert!(said.contains("rebase -u"), "{said}");
    // A name on the command line that is not what was written down is not heeded, but by force.
    bench.ok("ringtap create -q -f qcow2 changed.qcow2 1M");
    bench.ok("truncate -s 4M changed.qcow2");
    let line = "ringtap convert -n -O raw -f raw ours.raw changed.qcow2 --target-is-zero";
    let said = bench.ends(line, 1);
    assert!(said.contains("recorded as qcow2"), "{said}");
    bench.ok("qemu-img check -q -f qcow2 changed.qcow2");
    bench.ok(&format!("{line} --force-format"));
    let known = bench.json("ringtap info --output json changed.qcow2");
    assert_eq!((&known["format-known"], &known["format"]), (&"recorded".into(), &"raw".into()));
}

#[test]
fn backing_files_open_only_where_they_may_lie() {
    let bench = Bench::new();
    fs::create_dir(bench.path("here")).expect("a folder");
    fs::create_dir(bench.path("there")).expect("a folder");
    bench.ok("ringtap create -q there/base.raw 1M");
    bench.ok("qemu-img create -q -f qcow2 -b ../there/base.raw -F raw here/over.qcow2");
    let said = bench.ends("ringtap map -f qcow2 here/over.qcow2", 1);
    let there = fs::canonicalize(bench.path("there/base.raw")).expect("it is there");
    assert!(said.contains(&format!("--backing {}", there.display())), "{said}");
    for option in ["--backing there", "--allow-backing there", "--backing there/base.raw"] {
        bench.ok(&format!("ringtap map -f qcow2 here/over.qcow2 {option}"));
    }
    bench.ends("ringtap info --backing-chain --output json here/over.qcow2", 1);
    let line = "ringtap info --backing-chain --backing there --output json here/over.qcow2";
    let both = bench.json(line);
    assert_eq!(both.as_array().map(Vec::len), Some(2));
    assert_eq!(both[0]["full-backing-filename"], "here/../there/base.raw");
    // A cycle has an end.
    let said = bench.ok("ringtap rebase -f qcow2 -u -b over.qcow2 -F qcow2 here/over.qcow2");
    assert!(said.contains("its own backing file"), "{said}");
    bench.ends("ringtap map -f qcow2 here/over.qcow2", 1);
    bench.ends("ringtap rebase -f qcow2 -b over.qcow2 -F qcow2 here/over.qcow2", 2);
    bench.ok("qemu-img create -q -f qcow2 -u -b a.qcow2 -F qcow2 here/b.qcow2 1M");
    bench.ok("qemu-img create -q -f qcow2 -u -b b.qcow2 -F qcow2 here/a.qcow2 1M");
    let said = bench.ends("ringtap map -f qcow2 here/a.qcow2", 1);
    assert!(said.contains("its own backing file"), "{said}");
    bench.ends("ringtap info --backing-chain -f qcow2 here/a.qcow2", 1);
}

#[test]
fn a_target_that_is_not_finished_is_refused() {
    let bench = Bench::new();
    bench.ok("ringtap create -q a.raw 16M");
    bench.qemu_io("-f raw a.raw", &["write -q -P 5 0 16M".into()]);
    // An image that is gone had the same inode, and a server that was killed.
    fs::write(bench.path("b.qcow2"), "").expect("a file");
    let target = fs::metadata(bench.path("b.qcow2")).expect("it was made");
    let log = format!("{:x}-{:x}.restart", target.dev(), target.ino());
    let log = ringtap_image::RestartLog::usual_folder().join(log);
    fs::create_dir_all(log.parent().expect("a folder")).expect("the folder");
    fs::write(&log, "").expect("a log");
    // No file may become larger than 8 MiB here.
    let own = env!("CARGO_BIN_EXE_ringtap");
    let script = format!("trap '' XFSZ; ulimit -f 8192; exec {own} convert a.raw -O qcow2 b.qcow2");
    let mut shell = Command::new("timeout");
    shell.args(["60", "bash", "-c", &script]).current_dir(bench.path(""));
    let output = shell.output().expect("bash");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("b.qcow2 is not whole") && said.contains("writing"), "{said}");
    let now = fs::metadata(bench.path("b.qcow2")).expect("it is there");
    assert_eq!(now.ino(), target.ino());
    assert!(!log.exists(), "{} is of no use to anybody", log.display());
    if said.contains("ringtap refuses it") {
        let said = bench.ends("ringtap compare a.raw b.qcow2", 2);
        assert!(said.contains("not whole"), "{said}");
        assert_eq!(bench.json("ringtap info --output json b.qcow2")["unfinished"], "convert");
    }
    bench.ok("ringtap convert a.raw -O qcow2 b.qcow2");
    bench.same("a.raw", "b.qcow2");
}

#[test]
fn snapshots_bitmaps_and_sizes_are_as_qemu_sees_them() {
    let bench = Bench::new();
    let mut random = fastrand::Rng::with_seed(17);
    bench.ok("ringtap create -q -f qcow2 a.qcow2 6M");
    bench.qemu_io("-f qcow2 a.qcow2", &operations(&mut random, 6 << 20, 40));
    bench.ok("qemu-img convert -f qcow2 -O raw a.qcow2 first.raw");
    bench.ok("ringtap snapshot -c first a.qcow2");
    bench.qemu_io("-f qcow2 a.qcow2", &operations(&mut random, 6 << 20, 40));
    bench.ok("ringtap resize -q a.qcow2 +2M");
    bench.ok("qemu-img convert -f qcow2 -O raw a.qcow2 second.raw");
    bench.ok("qemu-img snapshot -c second a.qcow2");
    let list = bench.json("ringtap snapshot a.qcow2 --output json");
    let theirs = bench.json("qemu-img info --output json a.qcow2");
    assert_eq!(list[1]["name"], "second");
    assert_eq!(list[0]["date-sec"], theirs["snapshots"][0]["date-sec"]);
    bench.ok("ringtap snapshot -a first a.qcow2");
    bench.same("first.raw", "a.qcow2");
    bench.ok("ringtap snapshot -a 2 a.qcow2");
    bench.same("second.raw", "a.qcow2");
    bench.ok("ringtap snapshot -d first a.qcow2");
    bench.ok("ringtap snapshot -d second a.qcow2");
    let said = bench.ends("ringtap snapshot -d second a.qcow2", 1);
    assert!(said.contains("no snapshot"), "{said}");
    bench.same("second.raw", "a.qcow2");

    bench.ends("ringtap resize a.qcow2 1M", 2);
    bench.ok("ringtap resize -q --shrink a.qcow2 1M");
    bench.ok("ringtap resize -q -f raw --shrink second.raw 1M");
    bench.same("second.raw", "a.qcow2");
    bench.ok("ringtap resize -q a.qcow2 9M");
    bench.ok("ringtap resize -q -f raw second.raw 9M");
    bench.same("second.raw", "a.qcow2");

    bench.ok("ringtap bitmap --add a.qcow2 one");
    bench.ok("ringtap bitmap --add -g 4k --disable a.qcow2 two");
    bench.qemu_io("-f qcow2 a.qcow2", &["write -q 1M 64k".into()]);
    bench.ok("ringtap bitmap --merge one a.qcow2 two");
    let ours = bench.json("ringtap info --output json a.qcow2");
    let theirs = bench.json("qemu-img info --output json a.qcow2");
    let of = |facts: &Value| {
        let list = facts["format-specific"]["data"]["bitmaps"].as_array().cloned();
        let mut list = list.expect("bitmaps");
        list.sort_by_key(|it| it["name"].to_string());
        list
    };
    assert_eq!(of(&ours), of(&theirs));
    bench.ok("ringtap bitmap --remove a.qcow2 one");
    bench.ok("qemu-img check -q a.qcow2");
    for field in ["virtual-size", "cluster-size", "format", "dirty-flag", "filename"] {
        assert_eq!(ours[field], theirs[field], "{field}");
    }
}

#[test]
fn checks_end_as_those_of_qemu_img_and_repair() {
    let bench = Bench::new();
    let image = bench.path("a.qcow2");
    bench.ok("ringtap create -q -f qcow2 a.qcow2 4M");
    bench.qemu_io("-f qcow2 a.qcow2", &["write -q -P 3 0 1M".into()]);
    bench.ok("cp a.qcow2 was.qcow2");
    let be64 = |at: u64| {
        let mut bytes = [0; 8];
        let file = fs::File::open(&image).expect("open");
        file.read_exact_at(&mut bytes, at).expect("read");
        u64::from_be_bytes(bytes)
    };
    let poke = |at: u64, bytes: &[u8]| {
        let file = fs::File::options().write(true).open(&image).expect("open");
        file.write_all_at(bytes, at).expect("written");
    };
    let block = be64(be64(48));
    let l2 = be64(be64(40)) & 0x00ff_ffff_ffff_fe00;
    let data = be64(l2) & 0x00ff_ffff_ffff_fe00;
    bench.ok("ringtap check a.qcow2");
    // A cluster that nothing refers to has a refcount.
    let end = fs::metadata(&image).expect("it").len();
    poke(end.next_multiple_of(65536) + 65535, &[0]);
    poke(block + 2 * (end.next_multiple_of(65536) >> 16), &[0, 1]);
    bench.ends("qemu-img check -q a.qcow2", 3);
    bench.ends("ringtap check a.qcow2", 3);
    let facts = bench.json("ringtap check --output json a.qcow2");
    assert_eq!(facts["leaks"], 1);
    bench.ok("ringtap check --repair leaks a.qcow2");
    bench.ok("qemu-img check -q a.qcow2");
    // A cluster in use has none.
    poke(be64(be64(48)) + 2 * (data >> 16), &[0, 0]);
    bench.ends("qemu-img check -q a.qcow2", 2);
    bench.ends("ringtap check a.qcow2", 2);
    bench.ends("ringtap check --repair leaks a.qcow2", 2);
    bench.ok("ringtap check --repair all a.qcow2");
    bench.same("was.qcow2", "a.qcow2");
    bench.ok("ringtap create -q b.raw 1M");
    bench.ends("ringtap check b.raw", 63);
    bench.ends("ringtap check missing", 1);
    bench.ends("ringtap check --repair some a.qcow2", 1);
}

#[test]
fn options_are_listed_and_wrong_ones_refused() {
    let bench = Bench::new();
    for (format, wanted) in
        [("raw", "preallocation"), ("qcow2", "cluster_size"), ("vpc", "subformat")]
    {
        let text = bench.ok(&format!("ringtap create -f {format} -o help"));
        assert!(text.contains(wanted), "{text}");
        assert_eq!(bench.ok(&format!("ringtap convert -O {format} -o help")), text);
        let said = bench.ends(&format!("ringtap create -f {format} -o nonsense=1 x.img 1M"), 2);
        assert!(said.contains("nonsense"), "{said}");
        assert!(!bench.path("x.img").exists(), "nothing is left");
    }
    for (line, wanted) in [
        ("ringtap create x.img", "size"),
        ("ringtap create -f qcow2 -b a.raw x.img", "-F"),
        ("ringtap create -f raw -b a.raw -F raw x.img 1M", "qcow2"),
        ("ringtap convert a.raw", "image to write"),
    ] {
        let said = bench.ends(line, 2);
        assert!(said.contains(wanted), "{line}: {said}");
    }
    bench.ok("ringtap create -q a.raw 1M");
    let said = bench.ends("ringtap convert a.raw a.raw", 2);
    assert!(said.contains("overwritten"), "{said}");
    assert!(Path::exists(&bench.path("a.raw")));
}

/// Neither the image nor its external data file, unless it was there before.
#[test]
fn an_image_that_cannot_be_made_leaves_no_file() {
    let bench = Bench::new();
    let too_large = "cluster_size=2M,preallocation=falloc,size=17T";
    for options in ["refcount_bits=5", "cluster_size=2M,size=1E", too_large] {
        let line = format!("ringtap create -f qcow2 -o data_file=d.raw,{options} b.qcow2");
        let line = if options.contains("size=1") { line } else { line + " 1G" };
        bench.ends(&line, 1);
        for name in ["b.qcow2", "d.raw"] {
            assert!(!bench.path(name).exists(), "{options}: {name}");
        }
        fs::write(bench.path("d.raw"), [7; 4096]).expect("a file");
        bench.ends(&line, 1);
        assert!(!bench.path("b.qcow2").exists(), "{options}");
        fs::remove_file(bench.path("d.raw")).expect("it stays");
    }
}
