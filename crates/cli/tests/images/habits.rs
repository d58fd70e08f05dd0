//! What scripts written for qemu-img rely on: exit status, what stdout says, JSON, and its ways to name images and
//! secrets, each beside qemu-img itself.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::process::Command;

use serde_json::Value;

use super::bench::{Bench, operations};

/// What of stdout must be the same.
enum Same {
    /// Nothing of it.
    Nothing,
    /// All of it.
    Text,
    /// Every member that qemu-img has, wherever it stands.
    Json,
    /// These lines.
    Lines(&'static [&'static str]),
}

use Same::{Json, Lines, Nothing, Text};

const INFO: [&str; 5] =
    ["file format: ", "virtual size: ", "disk size: ", "backing file", "cluster_size: "];

fn images() -> Bench {
    let bench = Bench::new();
    let mut random = fastrand::Rng::with_seed(27);
    bench.ok("qemu-img create -q -f raw a.raw 10M");
    bench.ok("qemu-img create -q -f qcow2 base.qcow2 10M");
    bench.qemu_io("-f qcow2 base.qcow2", &operations(&mut random, 10 << 20, 30));
    bench.ok("qemu-img create -q -f qcow2 -b base.qcow2 -F qcow2 over.qcow2 20M");
    bench.qemu_io("-f qcow2 over.qcow2", &operations(&mut random, 10 << 20, 10));
    bench.ok("qemu-img create -q -f qcow2 other.qcow2 12M");
    bench.ok("qemu-img create -q -f vpc a.vpc 10M");
    bench.ok("qemu-img convert -q -f qcow2 -O vmdk base.qcow2 a.vmdk");
    bench.ok("qemu-img create -q --object secret,id=s,data=123 -f luks -o key-secret=s,iter-time=10 a.luks 1M");
    fs::write(bench.path("key"), "123").expect("a file");
    // A cluster too many, and one too few.
    bench.ok("qemu-img create -q -f qcow2 leak.qcow2 10M");
    bench.qemu_io("-f qcow2 leak.qcow2", &["write -q 0 128k".to_owned()]);
    for (name, cluster, count) in [("leak.qcow2", 8, 1u8), ("wrong.qcow2", 5, 0)] {
        if name != "leak.qcow2" {
            fs::copy(bench.path("leak.qcow2"), bench.path(name)).expect("a copy");
        }
        let mut bytes = fs::read(bench.path(name)).expect("the image");
        bytes.resize(9 << 16, 0);
        let block = (2 << 16) + 2 * cluster;
        bytes[block..block + 2].copy_from_slice(&[0, count]);
        fs::write(bench.path(name), bytes).expect("the image");
    }
    bench
}

#[test]
fn scripts_find_what_qemu_img_says() {
    let bench = images();
    let json = "json:{'driver':'qcow2','file':{'driver':'file','filename':'base.qcow2'}}";
    let lines: Vec<(String, i32, Same)> = [
        ("info -f qcow2 base.qcow2", 0, Lines(&["file format: ", "virtual size: ", "cluster_size: "])),
        ("info -f qcow2 over.qcow2", 0, Lines(&["file format: ", "virtual size: ", "disk size: ", "backing file"])),
        ("info --output=json -f qcow2 over.qcow2", 0, Json),
        ("info --output=json --backing-chain -f qcow2 over.qcow2", 0, Json),
        ("info --output=human a.raw", 0, Lines(&["file format: ", "virtual size: "])),
        ("info --output json -f vpc a.vpc", 0, Json),
        ("info nowhere", 1, Nothing),
        ("info --object secret,id=s,data=123 --image-opts driver=luks,key-secret=s,file.filename=a.luks", 0,
         Lines(&["file format: ", "virtual size: ", "encrypted: "])),
        ("info --image-opts driver=qcow2,file.driver=file,file.filename=base.qcow2", 0, Lines(&["virtual size: "])),
        ("check -f qcow2 base.qcow2", 0, Lines(&["No errors", "Image end", "errors were", "leaked"])),
        ("check -f qcow2 leak.qcow2", 3, Lines(&["leaked", "This means"])),
        ("check -f qcow2 wrong.qcow2", 2, Lines(&["errors were", "Data may"])),
        ("check --output json -f qcow2 leak.qcow2", 3, Json),
        ("check -f raw a.raw", 63, Text),
        ("check nowhere", 1, Nothing),
        ("check --no-such-option a", 1, Nothing),
        ("compare -f qcow2 -F qcow2 base.qcow2 base.qcow2", 0, Text),
        ("compare -s -f qcow2 -F qcow2 base.qcow2 over.qcow2", 1, Nothing),
        ("compare -f raw -F qcow2 a.raw other.qcow2", 0, Nothing),
        ("compare -f raw -F qcow2 a.raw base.qcow2", 1, Text),
        ("compare a.raw nowhere", 2, Nothing),
        ("map --output json -f qcow2 other.qcow2", 0, Json),
        ("map -f qcow2 other.qcow2", 0, Nothing),
        ("measure -O qcow2 --size 1G", 0, Text),
        ("measure --output json -O qcow2 -f qcow2 base.qcow2", 0, Json),
        ("measure -O luks --object secret,id=s,data=1 -o key-secret=s,version=1 --size 1G", 0, Nothing),
        ("snapshot -l base.qcow2", 0, Text),
        ("convert -f foo -f qcow2 -O foo -O raw base.qcow2 out.raw", 0, Text),
        ("convert -p -f qcow2 -O raw base.qcow2 out.raw", 0, Lines(&["    (100.00/100%)"])),
        ("convert -f qcow2 -O raw nowhere out.raw", 1, Text),
        ("resize -q -f raw a.raw +1M", 0, Text),
        ("amend -p -f qcow2 -o compat=0.10 other.qcow2", 0, Nothing),
        ("amend -f qcow2 -o size=13M other.qcow2", 0, Nothing),
        ("rebase -u -f qcow2 -b base.qcow2 -F qcow2 other.qcow2", 0, Text),
    ]
    .into_iter()
    .map(|(line, status, same)| (line.to_owned(), status, same))
    .chain([(format!("info {json}"), 0, Lines(&INFO)), (format!("map {json}"), 0, Nothing)])
    .collect();
    for (line, status, same) in lines {
        // Each on images of its own, as some are changed.
        let theirs = bench.run(&format!("qemu-img {}", line.replace(",version=1", "")));
        let ours = bench.run(&format!("ringtap {line}"));
        let told = format!("{line}\n{ours:?}\n{theirs:?}");
        assert_eq!(theirs.status.code(), Some(status), "{told}");
        // Of a command line that makes no sense Ringtap says so by a status of its own.
        assert!(
            ours.status.code() == Some(status) || (status == 1 && ours.status.code() == Some(2)),
            "{told}"
        );
        let [one, other] =
            [&ours.stdout, &theirs.stdout].map(|it| String::from_utf8_lossy(it).into_owned());
        match same {
            Nothing => {}
            Text => assert_eq!(one, other, "{told}"),
            Json => {
                let [one, other] = [&one, &other].map(|it| serde_json::from_str(it).expect("JSON"));
                if let Some(place) = missing(&one, &other) {
                    panic!("{place}: {told}");
                }
            }
            Lines(begin) => {
                let chosen = |text: &str| -> Vec<String> {
                    // Of the image, and not of its file, of which older programs say nothing.
                    let text = text.split("Child node").next().unwrap_or_default();
                    let lines = text.split(['\n', '\r']).map(str::to_owned);
                    lines.filter(|line| begin.iter().any(|it| line.contains(it))).collect()
                };
                let (one, other) = (chosen(&one), chosen(&other));
                assert_eq!(one.last(), other.last(), "{told}");
                assert!(begin.len() == 1 || one == other, "{told}");
            }
        }
        if status != 0 && status != 1 {
            continue;
        }
        let said = String::from_utf8_lossy(&ours.stderr).into_owned();
        assert!(said.lines().filter(|line| !line.contains("note:")).count() <= 1, "{told}");
    }
}

/// Where the first has not what the second has.
pub(super) fn missing(ours: &Value, theirs: &Value) -> Option<String> {
    match (ours, theirs) {
        (Value::Object(ours), Value::Object(theirs)) => theirs.iter().find_map(|(name, value)| {
            let own = ours.get(name).unwrap_or(&Value::Null);
            missing(own, value).map(|place| format!("{name}.{place}"))
        }),
        (Value::Array(ours), Value::Array(theirs)) if ours.len() == theirs.len() => {
            ours.iter().zip(theirs).find_map(|(one, other)| missing(one, other))
        }
        (one, other) => (one != other).then(|| format!("{one} is not {other}")),
    }
}

#[test]
fn an_image_without_a_backing_file_reads_as_before_upon_one() {
    let bench = Bench::new();
    for options in ["compat=1.1", "compat=0.10", "extended_l2=on"] {
        bench.ok(&format!("ringtap create -q -f qcow2 -o {options} a.qcow2 6M"));
        bench.qemu_io("-f qcow2 a.qcow2", &["write -q -P 1 0 128k".to_owned()]);
        bench.ok("qemu-img convert -f qcow2 -O raw a.qcow2 was.raw");
        bench.ok("qemu-img create -q -f raw under.raw 6M");
        bench.qemu_io("-f raw under.raw", &["write -q -P 2 0 6M".to_owned()]);
        bench.ok("ringtap rebase -f qcow2 -b under.raw -F raw a.qcow2");
        bench.same("-f raw -F qcow2 was.raw", "a.qcow2");
        bench.ends("ringtap rebase -f qcow2 a.qcow2", 2);
        bench.ok("ringtap rebase -f qcow2 --backing= a.qcow2");
        bench.same("-f raw -F qcow2 was.raw", "a.qcow2");
    }
}

/// What is behind the end of the shorter one reads as zeros, and goes on to.
#[test]
fn an_overlay_reads_as_before_upon_a_longer_image() {
    let bench = Bench::new();
    for options in ["compat=1.1", "compat=0.10", "extended_l2=on"] {
        bench.ok("qemu-img create -q -f raw short.raw 1000k");
        bench.qemu_io("-f raw short.raw", &["write -q -P 1 0 1000k".to_owned()]);
        bench
            .ok(&format!("ringtap create -q -f qcow2 -o {options} -b short.raw -F raw a.qcow2 3M"));
        bench.qemu_io("-f qcow2 a.qcow2", &["write -q -P 3 2M 64k".to_owned()]);
        bench.ok("qemu-img convert -f qcow2 -O raw a.qcow2 was.raw");
        bench.ok("qemu-img create -q -f raw long.raw 3M");
        bench.qemu_io("-f raw long.raw", &["write -q -P 2 0 3M".to_owned()]);
        bench.ok("ringtap rebase -f qcow2 -b long.raw -F raw a.qcow2");
        bench.same("-f raw -F qcow2 was.raw", "a.qcow2");
        bench.ok("qemu-img check -q a.qcow2");
    }
}

#[test]
fn version_3_becomes_version_2_and_reads_as_before() {
    let bench = Bench::new();
    let mut random = fastrand::Rng::with_seed(61);
    bench.ok("qemu-img create -q -f qcow2 base.qcow2 8M");
    bench.qemu_io("-f qcow2 base.qcow2", &operations(&mut random, 8 << 20, 30));
    for (options, own) in
        [("", false), ("-b base.qcow2 -F qcow2", true), ("-o cluster_size=4k", false)]
    {
        bench.ok(&format!("qemu-img create -q -f qcow2 {options} a.qcow2 8M"));
        bench.qemu_io("-f qcow2 a.qcow2", &operations(&mut random, 8 << 20, 40));
        bench.ok("qemu-img snapshot -c one a.qcow2");
        bench.qemu_io("-f qcow2 a.qcow2", &operations(&mut random, 8 << 20, 10));
        bench.qemu_io("-f qcow2 a.qcow2", &["write -q -z 3M 300k".to_owned()]);
        bench.ok("qemu-img convert -f qcow2 -O raw a.qcow2 now.raw");
        bench.ok("qemu-img convert -f qcow2 -l one -O raw a.qcow2 one.raw");
        bench.ok("ringtap amend -f qcow2 -o compat=0.10 a.qcow2");
        assert!(bench.ok("qemu-img info a.qcow2").contains("compat: 0.10"), "{options}");
        bench.same("-f raw -F qcow2 now.raw", "a.qcow2");
        bench.ok("qemu-img convert -f qcow2 -l one -O raw a.qcow2 then.raw");
        bench.same("-f raw -F raw one.raw", "then.raw");
        let entries = bench.json("qemu-img map --output json -f qcow2 a.qcow2");
        let zeros = entries.as_array().into_iter().flatten();
        let flagged =
            |it: &&Value| own && it["depth"] == 0 && it["zero"] == true && it["data"] == false;
        assert_eq!(zeros.filter(flagged).count(), 0, "{entries}");
    }
    for (options, said) in [
        ("-o extended_l2=on", "subclusters"),
        ("-o refcount_bits=64", "refcount_bits"),
        ("-o compression_type=zstd", "zstd"),
        ("-o data_file=c.data", "data file"),
    ] {
        bench.ok(&format!("qemu-img create -q -f qcow2 {options} c.qcow2 1M"));
        let told = bench.ends("ringtap amend -f qcow2 -o compat=0.10 c.qcow2", 1);
        assert!(told.contains(said), "{told}");
        assert!(bench.ok("qemu-img info c.qcow2").contains("compat: 1.1"));
    }
}

#[test]
fn what_an_image_says_is_amended_as_by_qemu_img() {
    let bench = Bench::new();
    bench.ok("qemu-img create -q -f qcow2 base.qcow2 1M");
    bench.ok("ringtap create -q -f qcow2 -o data_file=a.data,data_file_raw=on a.qcow2 1M");
    bench.qemu_io("-f qcow2 a.qcow2", &["write -q -P 7 0 1M".to_owned()]);
    fs::rename(bench.path("a.data"), bench.path("b.data")).expect("renamed");
    bench.ok("ringtap amend -o data_file=b.data,data_file_raw=off a.qcow2");
    let facts = bench.json("qemu-img info --output json a.qcow2");
    let data = &facts["format-specific"]["data"];
    assert_eq!(
        (&data["data-file"], &data["data-file-raw"]),
        (&"b.data".into(), &false.into()),
        "{facts}"
    );
    bench.qemu_io("-f qcow2 a.qcow2", &["read -q -P 7 0 1M".to_owned()]);
    bench.ends("ringtap amend -o data_file_raw=on a.qcow2", 1);

    bench.ok("ringtap create -q -f qcow2 b.qcow2 1M");
    bench.ends("ringtap amend -o data_file=b.data b.qcow2", 1);
    bench.ok("ringtap amend -o size=3M b.qcow2");
    bench.ends("ringtap amend -o size=1M b.qcow2", 2);
    assert_eq!(bench.json("qemu-img info --output json b.qcow2")["virtual-size"], 3 << 20);

    // One that is to come, or was moved away.
    bench.ok("ringtap amend -o data_file=later.data a.qcow2");
    fs::rename(bench.path("b.data"), bench.path("later.data")).expect("renamed");
    bench.qemu_io("-f qcow2 a.qcow2", &["read -q -P 7 0 1M".to_owned()]);
    bench.ok("ringtap resize -q a.qcow2 2M");
}

#[test]
fn another_backing_file_is_named_by_rebase_alone() {
    let bench = Bench::new();
    bench.ok("qemu-img create -q -f qcow2 base.qcow2 1M");
    bench.ok("ringtap create -q -f qcow2 -b base.qcow2 -F qcow2 a.qcow2");
    bench.ok("ringtap create -q -f qcow2 b.qcow2 1M");
    for (image, options) in [
        ("a", "backing_file=missing"),
        ("a", "backing_file=missing,backing_fmt=qcow2"),
        ("a", "backing_file=./base.qcow2"),
        ("a", "backing_file="),
        ("a", "backing_fmt=raw"),
        ("a", "size=2M,compat=1.1,backing_file=other.qcow2"),
        ("b", "backing_file=base.qcow2,backing_fmt=qcow2"),
        ("b", "backing_file="),
        ("b", "backing_fmt=raw"),
    ] {
        let before = fs::read(bench.path(&format!("{image}.qcow2"))).expect("the image");
        let told = bench.ends(&format!("ringtap amend -o {options} {image}.qcow2"), 2);
        assert!(told.contains("ringtap rebase -u -b"), "{options}: {told}");
        let after = fs::read(bench.path(&format!("{image}.qcow2"))).expect("the image");
        assert!(before == after, "{options}");
    }
    bench.ok("ringtap amend -o backing_file=base.qcow2,backing_fmt=qcow2,size=2M a.qcow2");
    assert_eq!(bench.json("qemu-img info --output json a.qcow2")["virtual-size"], 2 << 20);
}

#[test]
fn new_room_is_reserved_where_that_is_asked_for() {
    let bench = Bench::new();
    let taken = |name: &str| {
        bench.json(&format!("ringtap info --output json {name}"))["actual-size"].as_u64()
    };
    for (format, how) in
        [("raw", "falloc"), ("raw", "full"), ("qcow2", "falloc"), ("qcow2", "full")]
    {
        bench.ok(&format!("ringtap create -q -f {format} a 1M"));
        bench.ok(&format!("ringtap resize -q --preallocation={how} a 5M"));
        assert!(taken("a") >= Some(4 << 20), "{format} {how}: {:?}", taken("a"));
        bench.ok(&format!("qemu-img compare -f {format} -F {format} a a"));
        bench.ok("ringtap resize -q --preallocation=off a 9M");
        assert!(taken("a") < Some(6 << 20), "{format} {how}: {:?}", taken("a"));
        bench.ends(&format!("ringtap resize -q --shrink --preallocation={how} a 1M"), 2);
    }
    bench.ok("ringtap create -q -f vpc a.vpc 10M");
    bench.ends("ringtap resize --preallocation=full a.vpc 20M", 2);
    bench.ends("ringtap resize --preallocation=metadata a 20M", 0);
    bench.ok("ringtap create -q -f raw a.raw 1M");
    bench.ends("ringtap resize --preallocation=metadata a.raw 2M", 2);
}

/// Also where a disk ends in the middle of a cluster that shows a longer backing file.
#[test]
fn a_disk_is_as_large_and_as_full_as_qemu_img_makes_it() {
    let bench = Bench::new();
    bench.ok("qemu-img create -q -f raw base.raw 2M");
    bench.qemu_io("-f raw base.raw", &["write -q -P 7 0 2M".to_owned()]);
    fs::write(bench.path("key"), "123").expect("a file");
    let over = "-b base.raw -F raw";
    for (made, from) in [
        ("", "1000k"),
        ("-o cluster_size=4k,extended_l2=off", "1M"),
        ("-o extended_l2=on", "1000k"),
        (over, "1M"),
        (over, "31k"),
        ("-b base.raw -F raw -o extended_l2=on", "503k"),
    ] {
        for how in ["off", "metadata", "falloc", "full"] {
            for name in ["ours", "theirs"] {
                bench.ok(&format!("qemu-img create -q -f qcow2 {made} {name}.qcow2 {from}"));
                bench.qemu_io(
                    &format!("-f qcow2 {name}.qcow2"),
                    &["write -q -P 1 1k 5k".to_owned()],
                );
            }
            let words = format!("resize -q -f qcow2 --preallocation={how}");
            bench.ok(&format!("ringtap {words} ours.qcow2 3M"));
            bench.ok(&format!("qemu-img {words} theirs.qcow2 3M"));
            bench.same("-f qcow2 -F qcow2 theirs.qcow2", "ours.qcow2");
            let placed = |name: &str| {
                let told =
                    bench.json(&format!("qemu-img check --output=json -f qcow2 {name}.qcow2"));
                told["allocated-clusters"].as_u64()
            };
            assert_eq!(placed("ours"), placed("theirs"), "{made} {from} {how}");
        }
    }
    let with_key = "--object secret,id=s,file=key --image-opts driver=qcow2,encrypt.key-secret=s,file.filename=a.qcow2";
    let taken = || fs::metadata(bench.path("a.qcow2")).expect("a file").blocks() * 512;
    for how in ["metadata", "falloc", "full"] {
        bench.ok("ringtap create -q -f qcow2 -o encrypt.format=luks,encrypt.iter-time=10 a.qcow2 1M --target-secret file:key");
        bench.qemu_io(with_key, &["write -q -P 1 0 1M".to_owned()]);
        bench.ok(&format!("ringtap resize -q --preallocation={how} --secret file:key a.qcow2 3M"));
        bench.qemu_io(with_key, &["read -P 1 0 1M".to_owned(), "read -P 0 1M 2M".to_owned()]);
        if how != "metadata" {
            assert!(taken() >= 3 << 20, "{how}: {}", taken());
        }
        bench.ok("ringtap check -q a.qcow2");
    }
}

#[test]
fn an_overlay_is_committed_to_a_base_by_its_own_name_of_it() {
    let bench = Bench::new();
    fs::create_dir(bench.path("in")).expect("a folder");
    bench.ok("ringtap create -q -f qcow2 in/base.qcow2 1M");
    bench.ok("ringtap create -q -f qcow2 -b base.qcow2 -F qcow2 in/mid.qcow2");
    bench.ok("ringtap create -q -f qcow2 -b mid.qcow2 -F qcow2 in/top.qcow2");
    bench.ok("ringtap commit -q -b base.qcow2 in/top.qcow2");
    bench.ok("ringtap commit -q -b mid.qcow2 in/top.qcow2");
    // Not as seen from here: there, another may be of that name.
    bench.ends("ringtap commit -q -b in/mid.qcow2 in/top.qcow2", 2);
    bench.ends("ringtap commit -q -b nowhere in/top.qcow2", 1);
}

/// Of what `amend` is told in one go all takes place, or nothing.
#[test]
fn an_amendment_is_whole_or_none() {
    let bench = Bench::new();
    let image = || fs::read(bench.path("a.qcow2")).expect("the image");
    fs::write(bench.path("below.raw"), vec![7; 1 << 20]).expect("a file");
    bench.ok("qemu-img create -q -f qcow2 a.qcow2 1M");
    bench.qemu_io("-f qcow2 a.qcow2", &["write -q -z 64k 64k".to_owned()]);
    let before = image();
    let amend = "ringtap amend -f qcow2 a.qcow2 -o";
    for options in [
        "size=2M,data_file=none",
        "compat=0.10,data_file=none",
        "size=2M,compat=0.10,lazy_refcounts=on",
        "size=2M,data_file_raw=on,compat=0.10",
    ] {
        bench.ends(&format!("{amend} {options}"), 1);
        assert!(image() == before, "{options}");
    }
    bench.ends(&format!("{amend} size=4k,lazy_refcounts=on"), 2);
    assert!(image() == before);
    // Zeros of version 3 hide what is below of it in version 2, too.
    bench.ok("qemu-img create -q -f qcow2 -b below.raw -F raw a.qcow2");
    bench.qemu_io("-f qcow2 a.qcow2", &["write -q -z 64k 64k".to_owned()]);
    bench.ok(&format!("{amend} compat=0.10"));
    bench.qemu_io(
        "-r -f qcow2 a.qcow2",
        &["read -P 7 0 64k", "read -P 0 64k 64k"].map(str::to_owned),
    );
    bench.ok("qemu-img check -q a.qcow2");

    bench.ok("qemu-img create -q -f qcow2 a.qcow2 1M");
    bench.ok("qemu-img snapshot -c one a.qcow2");
    bench.ends(&format!("{amend} compat=0.10,size=2M"), 2);
    bench.ok("ringtap resize -q a.qcow2 2M");
    let before = image();
    bench.ends(&format!("{amend} compat=0.10"), 1);
    assert!(image() == before);
}

#[test]
fn a_backing_format_is_written_down_as_it_was_said() {
    let bench = Bench::new();
    bench.ok("ringtap create -q -f qcow2 a.qcow2 1M");
    for name in ["host_device", "raw", "qcow2"] {
        bench.ok(&format!("ringtap rebase -u -b /nowhere/disk -F {name} a.qcow2"));
        let said = bench.ok("qemu-img info --output=json a.qcow2");
        let facts: Value = serde_json::from_str(&said).expect("JSON");
        assert_eq!(facts["backing-filename-format"], name);
    }
}

/// QEMU was killed, and wrote no refcounts as `lazy_refcounts` allows: they are found out again, as by qemu-img.
#[test]
fn what_qemu_left_dirty_is_changed_as_by_qemu_img() {
    let bench = Bench::new();
    bench.ok("qemu-img create -q -f qcow2 -o lazy_refcounts=on left 1M");
    let mut killed = Command::new("timeout");
    killed.args(["60", "qemu-io", "-f", "qcow2"]).args(["-c", "write -P 5 0 128k", "-c", "flush"]);
    killed
        .args(["-c", "sigraise 9"])
        .arg(bench.path("left"))
        .output()
        .expect("timeout of coreutils");
    let is_dirty = |name: &str| {
        bench.json(&format!("qemu-img info --output json {name}"))["dirty-flag"] == true
    };
    assert!(is_dirty("left"), "qemu-io was killed before it wrote refcounts");
    for line in [
        "amend -f qcow2 -o compat=0.10 a.qcow2",
        "amend -f qcow2 -o lazy_refcounts=off a.qcow2",
        "snapshot -f qcow2 -c one a.qcow2",
        "bitmap -f qcow2 --add a.qcow2 b",
        "rebase -f qcow2 -u --backing= a.qcow2",
        "resize -q -f qcow2 a.qcow2 2M",
    ] {
        fs::copy(bench.path("left"), bench.path("a.qcow2")).expect("a copy");
        bench.ok(&format!("ringtap {line}"));
        assert!(!is_dirty("a.qcow2"), "{line}");
        bench.ok("qemu-img check -q a.qcow2");
        bench.qemu_io("-r -f qcow2 a.qcow2", &["read -P 5 0 128k".to_owned()]);
    }
}
