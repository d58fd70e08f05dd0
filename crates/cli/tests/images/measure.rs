//! What images would take, and what they say of themselves, as qemu-img has it.

use std::fs;

use super::bench::{Bench, operations};

#[test]
fn images_take_what_qemu_img_says() {
    let bench = Bench::new();
    let mut random = fastrand::Rng::with_seed(7);
    bench.ok("qemu-img create -q -f qcow2 base.qcow2 30M");
    bench.qemu_io("-f qcow2 base.qcow2", &operations(&mut random, 30 << 20, 40));
    bench.ok("qemu-img create -q -f qcow2 -b base.qcow2 -F qcow2 a.qcow2 49M");
    bench.qemu_io("-f qcow2 a.qcow2", &operations(&mut random, 49 << 20, 20));
    bench.ok("qemu-img snapshot -c was a.qcow2");
    bench.qemu_io("-f qcow2 a.qcow2", &operations(&mut random, 49 << 20, 20));
    bench.ok("qemu-img bitmap --add -g 512 a.qcow2 one");
    bench.ok("qemu-img bitmap --add a.qcow2 the_other");
    bench.ok("qemu-img convert -f qcow2 -O raw a.qcow2 a.raw");
    bench.ok("qemu-img convert -f qcow2 -c -O qcow2 -o compat=0.10 a.qcow2 c.qcow2");
    for source in [
        "-f qcow2 a.qcow2",
        "-f qcow2 -l was a.qcow2",
        "-f raw a.raw",
        "-f qcow2 c.qcow2",
        "--size 1",
        "--size 5G",
        "--size 3T",
    ] {
        for target in [
            "raw",
            "qcow2",
            "qcow2 -o cluster_size=512",
            "qcow2 -o cluster_size=2M,refcount_bits=1",
            "qcow2 -o cluster_size=16k,extended_l2=on,refcount_bits=64",
            "qcow2 -o compat=0.10",
            "qcow2 -o preallocation=metadata",
            "qcow2 -o preallocation=falloc",
            "qcow2 -o backing_file=base.qcow2,backing_fmt=qcow2,extended_l2=off",
        ] {
            let line = format!("measure --output json -O {target} {source}");
            let theirs = bench.run(&format!("qemu-img {line}"));
            if !theirs.status.success() {
                // The disk is too large for such clusters.
                bench.ends(&format!("ringtap {line}"), 2);
                continue;
            }
            let ours = bench.json(&format!("ringtap {line}"));
            let theirs: serde_json::Value =
                serde_json::from_slice(&theirs.stdout).expect("what qemu-img prints");
            assert_eq!(ours, theirs, "{line}");
        }
    }
    let (ours, theirs) = ["ringtap", "qemu-img"]
        .map(|program| bench.ok(&format!("{program} measure -f qcow2 -O qcow2 a.qcow2")))
        .into();
    assert_eq!(ours, theirs);
    // And that is enough.
    for options in ["cluster_size=64k", "cluster_size=4k", "extended_l2=on", "refcount_bits=1"] {
        let line = format!("-f raw -O qcow2 -o {options} a.raw");
        let facts = bench.json(&format!("ringtap measure --output json {line}"));
        bench.ok(&format!("ringtap convert {line} b.qcow2"));
        let len = fs::metadata(bench.path("b.qcow2")).expect("it is there").len();
        assert!(len <= facts["required"].as_u64().expect("a number"), "{options}: {len}, {facts}");
    }
}

#[test]
fn what_cannot_be_measured_is_refused() {
    let bench = Bench::new();
    bench.ok("ringtap create -q a.raw 1M");
    for (line, wanted) in [
        ("measure a.raw --size 1M", "cannot be used with"),
        ("measure -O vpc a.raw", "raw, qcow2 and luks"),
        ("measure -O qcow2 -o data_file=d a.raw", "data_file"),
        ("measure -O qcow2 -o cluster_size=3k --size 1M", "cluster_size"),
        ("measure -l x a.raw", "no snapshots"),
        ("measure", "--size"),
    ] {
        let said = bench.ends(&format!("ringtap {line}"), 2);
        assert!(said.contains(wanted), "{line}: {said}");
    }
}

#[test]
fn images_are_amended_as_by_qemu_img() {
    let bench = Bench::new();
    let mut random = fastrand::Rng::with_seed(8);
    bench.ok("qemu-img create -q -f qcow2 -o compat=0.10 a.qcow2 3M");
    bench.qemu_io("-f qcow2 a.qcow2", &operations(&mut random, 3 << 20, 20));
    bench.ok("qemu-img snapshot -c was a.qcow2");
    bench.ok("qemu-img convert -f qcow2 -O raw a.qcow2 a.raw");
    let of = |name: &str| {
        let mut facts = bench.json(&format!("qemu-img info --output json {name}"));
        // How each lays it out in the file is its own affair.
        facts
            .as_object_mut()
            .expect("facts")
            .retain(|key, _| !["filename", "actual-size", "children"].contains(&key.as_str()));
        facts
    };
    for options in ["compat=1.1", "lazy_refcounts=on", "lazy_refcounts=off,compat=1.1"] {
        fs::copy(bench.path("a.qcow2"), bench.path("theirs.qcow2")).expect("copied");
        bench.ok(&format!("ringtap amend -f qcow2 -o {options} a.qcow2"));
        bench.ok(&format!("qemu-img amend -q -f qcow2 -o {options} theirs.qcow2"));
        assert_eq!(of("a.qcow2"), of("theirs.qcow2"), "{options}");
        bench.ok("qemu-img check -q a.qcow2");
    }
    bench.same("a.raw", "a.qcow2");
    bench.ok("qemu-img snapshot -a was a.qcow2");
    bench.same("a.raw", "a.qcow2");

    let before = fs::read(bench.path("a.qcow2")).expect("the image");
    for (line, code, wanted) in [
        ("amend -f qcow2 -o compat=0.10,lazy_refcounts=on a.qcow2", 1, "needs version 3"),
        ("amend -f qcow2 -o cluster_size=4k a.qcow2", 2, "convert it with -o cluster_size=4k"),
        ("amend -f qcow2 -o backing_fmt=raw a.qcow2", 2, "ringtap rebase"),
        ("amend -f raw -o compat=1.1 a.raw", 2, "raw images"),
        ("amend -f qcow2 -o nonsense=1 a.qcow2", 2, "nonsense"),
    ] {
        let said = bench.ends(&format!("ringtap {line}"), code);
        assert!(said.contains(wanted), "{line}: {said}");
        assert!(fs::read(bench.path("a.qcow2")).expect("it") == before, "{line}");
    }
}

#[test]
fn numbers_that_no_image_has_are_no_panic() {
    let bench = Bench::new();
    bench.ok("qemu-img create -q -f qcow2 a.qcow2 1M");
    bench.ok("qemu-img bitmap --add a.qcow2 one");
    let good = fs::read(bench.path("a.qcow2")).expect("the image");
    let header = ringtap_image::qcow2::Header::parse(&good).expect("a header");
    let directory = header.bitmaps().expect("bitmaps").directory_offset as usize;
    let damage = |at: usize, bytes: &[u8]| {
        let mut image = good.clone();
        image[at..at + bytes.len()].copy_from_slice(bytes);
        fs::write(bench.path("a.qcow2"), image).expect("written");
    };
    // The granularity of a bitmap: it is none that is copied.
    damage(directory + 17, &[200]);
    let told = bench.ok("ringtap measure -f qcow2 -O qcow2 a.qcow2");
    assert!(told.contains("bitmaps size: 0"), "{told}");
    // The size of the disk.
    damage(24, &[0xff; 8]);
    for line in ["resize -f qcow2 a.qcow2 +1G", "amend -f qcow2 -o size=2M a.qcow2"] {
        let told = bench.ends(&format!("ringtap {line}"), 1);
        assert!(told.contains("at most 2^62 bytes"), "{told}");
    }
    fs::write(bench.path("a.qcow2"), &good).expect("written");
    let most = u64::MAX;
    for line in
        [format!("amend -f qcow2 -o size={most} a.qcow2"), format!("create -q b.raw {most}")]
    {
        let told = bench.run(&format!("ringtap {line}"));
        assert!(matches!(told.status.code(), Some(1 | 2)), "{line}: {told:?}");
    }
}
