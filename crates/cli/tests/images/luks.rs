//! Ciphers of LUKS, as qemu-img makes them, alone and inside qcow2.

use std::fs;
use std::os::unix::fs::MetadataExt;

use serde_json::Value;

use super::bench::{Bench, operations};

const SIZE: u64 = 3 << 20;

/// What qemu-img calls them.
const CIPHERS: [&str; 8] = [
    "cipher-alg=aes-256,cipher-mode=cbc,ivgen-alg=essiv,ivgen-hash-alg=sha256",
    "cipher-alg=aes-128,cipher-mode=cbc,ivgen-alg=plain64",
    "cipher-alg=aes-128,cipher-mode=xts,ivgen-alg=plain",
    "cipher-alg=serpent-256,cipher-mode=xts,ivgen-alg=plain64",
    "cipher-alg=serpent-128,cipher-mode=cbc,ivgen-alg=plain64",
    "cipher-alg=twofish-256,cipher-mode=xts,ivgen-alg=plain64",
    "cipher-alg=twofish-128,cipher-mode=xts,ivgen-alg=plain64",
    "cipher-alg=twofish-256,cipher-mode=cbc,ivgen-alg=plain64",
];

#[test]
fn every_cipher_is_read_and_written_as_by_qemu_img() {
    let bench = Bench::new();
    let mut random = fastrand::Rng::with_seed(5);
    fs::write(bench.path("key"), "123").expect("a file");
    bench.ok(&format!("qemu-img create -q -f raw a.raw {SIZE}"));
    bench.qemu_io("-f raw a.raw", &operations(&mut random, SIZE, 20));
    bench.ok(&format!("qemu-img create -q -f raw b.raw {SIZE}"));
    bench.qemu_io("-f raw b.raw", &operations(&mut random, SIZE, 20));
    let secret = "--object secret,id=s,file=key";
    for cipher in CIPHERS {
        let inside =
            cipher.split(',').map(|it| format!("encrypt.{it}")).collect::<Vec<_>>().join(",");
        for (format, prefix, options) in [
            ("luks", "", format!("iter-time=10,key-secret=s,{cipher}")),
            (
                "qcow2",
                "encrypt.",
                format!("encrypt.format=luks,encrypt.iter-time=10,encrypt.key-secret=s,{inside}"),
            ),
        ] {
            let name = format!("a.{format}");
            bench
                .ok(&format!("qemu-img create -q {secret} -f {format} -o {options} {name} {SIZE}"));
            let theirs = format!("driver={format},{prefix}key-secret=s,file.filename={name}");
            bench.ok(&format!(
                "qemu-img convert -n {secret} -f raw a.raw --target-image-opts {theirs}"
            ));
            bench.ok(&format!(
                "ringtap compare -q --secret file:key -F raw -f {format} {name} a.raw"
            ));
            bench.ok(&format!(
                "ringtap convert -n -f raw b.raw -O {format} --target-secret file:key {name}"
            ));
            bench.ok(&format!(
                "qemu-img compare {secret} --image-opts {theirs} driver=raw,file.filename=b.raw"
            ));
            let told = |program: &str| {
                let facts = bench.json(&format!("{program} info --output json -f {format} {name}"));
                let data = &facts["format-specific"]["data"];
                if format == "qcow2" { data["encrypt"].clone() } else { data.clone() }
            };
            says_no_less(&told("ringtap"), &told("qemu-img"), &format!("{format} {cipher}"));
            let lines = |program: &str| {
                let text = bench.ok(&format!("{program} info -f {format} {name}"));
                text.lines().map(|line| line.trim().to_owned()).collect::<Vec<_>>()
            };
            let ours = lines("ringtap");
            for line in lines("qemu-img") {
                assert!(ours.contains(&line), "{format} {cipher}: {line}: {ours:?}");
            }
        }
    }
}

/// All that they say, and perhaps more.
fn says_no_less(ours: &Value, theirs: &Value, what: &str) {
    assert!(!theirs.is_null(), "{what}");
    match theirs {
        Value::Object(facts) => {
            facts.iter().for_each(|(name, fact)| {
                says_no_less(&ours[name], fact, &format!("{what} {name}"))
            });
        }
        Value::Array(all) => {
            assert_eq!(ours.as_array().map(Vec::len), Some(all.len()), "{what}");
            all.iter().enumerate().for_each(|(at, one)| says_no_less(&ours[at], one, what));
        }
        one => assert_eq!(ours, one, "{what}"),
    }
}

#[test]
fn the_old_name_of_encryption_is_known() {
    let bench = Bench::new();
    let words = "create -q -f qcow2 --object secret,id=s,data=123 -o encryption=on,encrypt.key-secret=s,encrypt.iter-time=10";
    bench.ok(&format!("ringtap {words} a.qcow2 1M"));
    let facts = bench.json("qemu-img info --output json a.qcow2");
    assert_eq!(facts["format-specific"]["data"]["encrypt"]["format"], "luks", "{facts}");
    bench.ok("ringtap create -q -f qcow2 -o encryption=off b.qcow2 1M");
    assert!(bench.json("qemu-img info --output json b.qcow2").get("encrypted").is_none());
    bench.ends("ringtap create -q -f qcow2 -o encryption=aes c.qcow2 1M", 2);
}

/// What qemu-img refuses, too.
#[test]
fn a_size_is_said_once_and_a_backing_file_has_a_name() {
    let bench = Bench::new();
    for line in ["-o size=10M a.qcow2 20M", "-o backing_file= a.qcow2 1M"] {
        bench.ends(&format!("ringtap create -q -f qcow2 {line}"), 2);
        bench.ends(&format!("qemu-img create -q -f qcow2 {line}"), 1);
        assert!(!bench.path("a.qcow2").exists(), "{line}");
    }
    bench.ends("ringtap create -q -f qcow2 --backing= a.qcow2 1M", 2);
}

#[test]
fn containers_become_larger_and_smaller() {
    let bench = Bench::new();
    fs::write(bench.path("key"), "123").expect("a file");
    let secret = "--object secret,id=s,file=key";
    let theirs = format!("{secret} --image-opts driver=luks,key-secret=s,file.filename=a.luks");
    bench
        .ok(&format!("qemu-img create -q {secret} -f luks -o key-secret=s,iter-time=10 a.luks 1M"));
    let io = |operations: &[&str]| {
        let operations: Vec<String> = operations.iter().map(|it| (*it).to_owned()).collect();
        bench.qemu_io(&theirs, &operations);
    };
    let size = || {
        let facts = bench.json(&format!("qemu-img info --output json {theirs}"));
        facts["virtual-size"].as_u64().expect("a size")
    };
    io(&["write -q -P 5 0 1M"]);
    // No key is needed, and one that a script names does not disturb.
    bench.ok("ringtap resize -q -f luks a.luks +1M");
    assert_eq!(size(), 2 << 20);
    io(&["read -q -P 5 0 1M", "write -q -P 7 1M 1M", "read -q -P 7 1M 1M"]);
    bench.ok(&format!("ringtap resize -q {theirs} 3M"));
    assert_eq!(size(), 3 << 20);
    bench.ends("ringtap resize -q -f luks --preallocation=metadata a.luks 4M", 2);
    bench.ends("ringtap resize -q -f luks a.luks 1536k", 2);
    assert_eq!(size(), 3 << 20);
    bench.ok("ringtap resize -q -f luks --shrink a.luks 1536k");
    assert_eq!(size(), 3 << 19);
    io(&["read -q -P 5 0 1M", "read -q -P 7 1M 512k"]);
    bench.ends(&format!("ringtap check {theirs}"), 63);
    bench.ends(&format!("qemu-img check {theirs}"), 63);
    // Sectors of another size; what is recorded is what it is.
    let options = "version=2,sector_size=4096,iter-time=10,key-secret=s";
    bench.ok(&format!("ringtap create -q {secret} -f luks -o {options} b.luks 1M"));
    bench.ok("ringtap resize -q b.luks +1k");
    let facts = bench.json("ringtap info --secret file:key --output json b.luks");
    assert_eq!(facts["virtual-size"], (1 << 20) + 4096, "{facts}");
}

/// What a disk is made larger by for what lies above it is to read as zeros, which a container's new end does not.
#[test]
fn containers_are_not_made_larger_for_what_is_committed() {
    let bench = Bench::new();
    fs::write(bench.path("key"), "123").expect("a file");
    let secret = "--object secret,id=s,file=key -o key-secret=s,iter-time=10";
    bench.ok(&format!("ringtap create -q {secret} -f luks base.luks 1M"));
    bench.ok("ringtap create -q -f qcow2 --secret file:key -b base.luks -F luks top.qcow2 2M");
    let told = bench.ends("ringtap commit -q --secret file:key top.qcow2", 2);
    assert!(told.contains("as large as the overlay"), "{told}");
}

/// As libvirt makes the overlays of its snapshots. How large a disk is no key is needed for.
#[test]
fn overlays_are_made_without_the_secret_of_what_is_below() {
    let bench = Bench::new();
    for (name, secret) in [("key", "123"), ("other", "456")] {
        fs::write(bench.path(name), secret).expect("a file");
    }
    let own = "-o encrypt.format=luks,encrypt.iter-time=10";
    bench.ok(&format!("ringtap create -q -f qcow2 --target-secret file:key {own} a.qcow2 3M"));
    bench.ok(
        "ringtap create -q -f luks --target-secret file:key -o version=1,iter-time=10 b.luks 3M",
    );
    for (base, format) in [("a.qcow2", "qcow2"), ("b.luks", "luks")] {
        bench.ok(&format!("ringtap create -q -f qcow2 -b {base} -F {format} plain.qcow2"));
        bench.ok("ringtap create -q -f qcow2 -b plain.qcow2 -F qcow2 upper.qcow2");
        bench.ok(&format!(
            "ringtap create -q -f qcow2 --target-secret file:other {own} -b {base} -F {format} sealed.qcow2"
        ));
        for made in ["plain.qcow2", "upper.qcow2", "sealed.qcow2"] {
            let facts = bench.json(&format!("qemu-img info --output json {made}"));
            assert_eq!(facts["virtual-size"], 3 << 20, "{made} on {base}");
        }
        bench.ok("ringtap map --output json --secret file:key plain.qcow2");
        // What is below is read with its own secret only.
        bench.ends("ringtap map --output json plain.qcow2", 1);
    }
}

/// `convert -B`: what is below is read with the secrets of what is read, whether or not the overlay has one of its own.
#[test]
fn overlays_are_copied_over_what_is_encrypted() {
    let bench = Bench::new();
    for (name, secret) in [("below", "123"), ("above", "456"), ("wrong", "789")] {
        fs::write(bench.path(name), secret).expect("a file");
    }
    let objects = "--object secret,id=b,file=below --object secret,id=a,file=above";
    let sealing = "-o encrypt.format=luks,encrypt.iter-time=10";
    bench
        .ok(&format!("ringtap create -q -f qcow2 --target-secret file:below {sealing} a.qcow2 3M"));
    bench.ok(
        "ringtap create -q -f luks --target-secret file:below -o version=1,iter-time=10 b.luks 3M",
    );
    bench.ok("qemu-img create -q -f raw a.raw 3M");
    bench.qemu_io("-f raw a.raw", &["write -q -P 5 0 3M".to_owned()]);
    for (base, format, prefix) in [("a.qcow2", "qcow2", "encrypt."), ("b.luks", "luks", "")] {
        let below = format!("driver={format},{prefix}key-secret=b,file.filename={base}");
        bench.qemu_io(&format!("{objects} --image-opts {below}"), &["write -q -P 5 0 3M".into()]);
        let through = format!("backing.{prefix}key-secret=b");
        for (own, key, opens) in [
            ("", "", through.clone()),
            (sealing, "--target-secret file:above", format!("encrypt.key-secret=a,{through}")),
        ] {
            let alike = ["write -q -P 5 0 3M", "write -q -P 6 128k 64k"].map(str::to_owned);
            bench.qemu_io("-f raw a.raw", &alike);
            let words =
                format!("-f raw -O qcow2 {own} {key} -B {base} -F {format} a.raw ours.qcow2");
            bench.ok(&format!("ringtap convert --secret file:below {words}"));
            let ours = format!("driver=qcow2,{opens},file.filename=ours.qcow2");
            bench.ok(&format!(
                "qemu-img compare {objects} --image-opts {ours} driver=raw,file.filename=a.raw"
            ));
            // The rest shows through.
            let facts =
                bench.json(&format!("qemu-img check {objects} --output json --image-opts {ours}"));
            assert_eq!(facts["allocated-clusters"], 1, "{base} {own}: {facts}");
            // As qemu-img does it, which wants the target to be there.
            for program in ["qemu-img", "ringtap"] {
                bench.ok(&format!(
                    "qemu-img create -q -u -f qcow2 -b {base} -F {format} theirs.qcow2 3M"
                ));
                let theirs = format!("driver=qcow2,{through},file.filename=theirs.qcow2");
                bench.ok(&format!(
                    "{program} convert -n {objects} -B {base} -F {format} --target-image-opts \
                     -f raw a.raw {theirs}"
                ));
                bench.ok(&format!("qemu-img compare {objects} --image-opts {ours} {theirs}"));
            }
            // Into one that is there.
            bench.qemu_io("-f raw a.raw", &["write -q -P 8 1M 64k".to_owned()]);
            let words = format!("-n -f raw -O qcow2 {key} -B {base} -F {format} a.raw ours.qcow2");
            bench.ok(&format!("ringtap convert --secret file:below {words}"));
            bench.ok(&format!(
                "qemu-img compare {objects} --image-opts {ours} driver=raw,file.filename=a.raw"
            ));
            let told = bench.ends(&format!("ringtap convert {words}"), 1);
            assert!(told.contains("secret"), "{told}");
            bench.ends(&format!("ringtap convert --secret file:wrong {words}"), 1);
        }
    }
}

/// An overlay and what is below, each under its own secret.
#[test]
fn each_image_of_a_chain_is_opened_by_the_secret_that_fits() {
    let bench = Bench::new();
    for (name, secret) in [("below", "123"), ("above", "456"), ("wrong", "789")] {
        fs::write(bench.path(name), secret).expect("a file");
    }
    let own = "-o encrypt.format=luks,encrypt.iter-time=10";
    let objects = "--object secret,id=b,file=below --object secret,id=a,file=above";
    let base = "driver=qcow2,encrypt.key-secret=b,file.filename=base.qcow2";
    let top =
        "driver=qcow2,encrypt.key-secret=a,backing.encrypt.key-secret=b,file.filename=top.qcow2";
    bench.ok(&format!("ringtap create -q -f qcow2 --target-secret file:below {own} base.qcow2 1M"));
    bench.ok(&format!(
        "ringtap create -q -f qcow2 --target-secret file:above {own} -b base.qcow2 -F qcow2 top.qcow2"
    ));
    let io = |image: &str, operation: &str| {
        bench.qemu_io(&format!("{objects} --image-opts {image}"), &[operation.to_owned()]);
    };
    io(base, "write -q -P 5 0 1M");
    io(top, "write -q -P 6 100k 300k");
    let both = "--secret file:below --secret file:above";
    bench.ok(&format!("ringtap convert -f qcow2 -O raw {both} top.qcow2 a.raw"));
    bench.ok(&format!("ringtap convert {objects} -O raw --image-opts {top} b.raw"));
    bench.ok(&format!("qemu-img convert {objects} -O raw --image-opts {top} c.raw"));
    bench.same("-f raw -F raw a.raw", "b.raw");
    bench.same("-f raw -F raw a.raw", "c.raw");
    bench.ends("ringtap convert -f qcow2 -O raw --secret file:above top.qcow2 d.raw", 1);
    let wrong = "--secret file:above --secret file:wrong";
    bench.ends(&format!("ringtap convert -f qcow2 -O raw {wrong} top.qcow2 d.raw"), 1);
    bench.ok(&format!("ringtap commit -q {objects} --image-opts {top}"));
    io(base, "read -q -P 5 0 100k");
    io(base, "read -q -P 6 100k 300k");
    io(base, "read -q -P 5 400k 624k");
}

/// A header of small clusters leaves out what only other programs' messages are made of.
#[test]
fn small_clusters_have_room_for_what_matters() {
    let bench = Bench::new();
    fs::write(bench.path("key"), "123").expect("a file");
    let own = "-o encrypt.format=luks,encrypt.iter-time=10,cluster_size=512";
    bench.ok(&format!("ringtap create -q -f qcow2 --target-secret file:key {own} a.qcow2 1M"));
    let object = "--object secret,id=s,file=key";
    let theirs =
        format!("{object} --image-opts driver=qcow2,encrypt.key-secret=s,file.filename=a.qcow2");
    bench.qemu_io(&theirs, &["write -q -P 9 0 3k".to_owned(), "read -q -P 9 0 3k".to_owned()]);
    bench.ok(&format!("qemu-img check -q {theirs}"));
    bench.ok("ringtap create -q -f qcow2 -o cluster_size=512,extended_l2=off b.qcow2 1M");
    let long = format!("/nowhere/{}", "n".repeat(100));
    bench.ok(&format!("ringtap rebase -u -F raw -b {long} b.qcow2"));
    let facts = bench.json("qemu-img info --output json b.qcow2");
    assert_eq!(facts["backing-filename"], long);
}

/// What a new image has allocated at once reads as noise, deciphered.
#[test]
fn holes_stay_zeros_in_images_allocated_and_encrypted_at_once() {
    let bench = Bench::new();
    fs::write(bench.path("key"), "123").expect("a file");
    bench.ok("qemu-img create -q -f raw a.raw 3M");
    bench.qemu_io("-f raw a.raw", &["write -q -P 5 1M 64k".to_owned()]);
    for how in ["metadata", "falloc", "full"] {
        let own = format!("-o encrypt.format=luks,encrypt.iter-time=10,preallocation={how}");
        bench.ok(&format!(
            "ringtap convert -f raw -O qcow2 --target-secret file:key {own} a.raw a.qcow2"
        ));
        bench.ok("ringtap compare -q --second-secret file:key -f raw -F qcow2 a.raw a.qcow2");
    }
}

/// Holes of the source among it: none of it is given back.
#[test]
fn what_is_allocated_at_once_stays_so_where_the_source_has_holes() {
    let bench = Bench::new();
    fs::write(bench.path("key"), "123").expect("a file");
    bench.ok("qemu-img create -q -f raw a.raw 3M");
    bench.qemu_io("-f raw a.raw", &["write -q -P 5 1M 64k".to_owned()]);
    bench.ok("qemu-img create -q -f raw base.raw 3M");
    bench.qemu_io("-f raw base.raw", &["write -q -P 6 0 2M".to_owned()]);
    let inside = "encrypt.format=luks,encrypt.iter-time=10";
    for (format, own, opens) in [
        ("luks", "-o version=1,iter-time=10 --target-secret file:key", "key-secret=s,"),
        ("qcow2", &format!("-o {inside} --target-secret file:key"), "encrypt.key-secret=s,"),
        (
            "qcow2",
            &format!("-o {inside},compat=0.10 --target-secret file:key"),
            "encrypt.key-secret=s,",
        ),
        ("qcow2", "-o extended_l2=on -B base.raw -F raw", ""),
    ] {
        for how in ["falloc", "full"] {
            bench.ok(&format!(
                "ringtap convert -f raw -O {format} {own} -o preallocation={how} a.raw b"
            ));
            let image = format!("driver={format},{opens}file.filename=b");
            let with_key = format!("--object secret,id=s,file=key --image-opts {image}");
            bench.ok(&format!("qemu-img compare {with_key} driver=raw,file.filename=a.raw"));
            let blocks = bench.path("b").metadata().expect("a file").blocks();
            assert!(blocks * 512 >= SIZE, "{format} {own} {how}: {blocks} blocks");
            if format == "qcow2" {
                let facts = bench.json(&format!("qemu-img check --output json {with_key}"));
                assert_eq!(facts["allocated-clusters"], 48, "{own} {how}: {facts}");
            }
            fs::remove_file(bench.path("b")).expect("removed");
        }
    }
}

#[test]
fn containers_have_their_room_at_once_where_that_is_asked_for() {
    let bench = Bench::new();
    fs::write(bench.path("key"), "123").expect("a file");
    let theirs =
        "--object secret,id=s,file=key --image-opts driver=luks,key-secret=s,file.filename=a.luks";
    let blocks = || bench.path("a.luks").metadata().expect("a file").blocks() * 512;
    for how in ["falloc", "full"] {
        let own = format!("-o version=1,iter-time=10,preallocation={how}");
        bench.ok(&format!("ringtap create -q -f luks --target-secret file:key {own} a.luks 1M"));
        assert!(blocks() >= 1 << 20, "{how}: {}", blocks());
        bench.qemu_io(theirs, &["write -q -P 5 0 1M".to_owned()]);
        let before = blocks();
        bench.ok(&format!("ringtap resize -q -f luks --preallocation={how} a.luks 3M"));
        assert!(blocks() >= before + (2 << 20), "{how}: {before}, {}", blocks());
        let facts = bench.json(&format!("qemu-img info --output json {theirs}"));
        assert_eq!(facts["virtual-size"], SIZE);
        let read = ["read -q -P 5 0 1M", "write -q -P 7 1M 2M", "read -q -P 7 1M 2M"];
        bench.qemu_io(theirs, &read.map(str::to_owned));
        bench.ends(&format!("ringtap resize -q --shrink --preallocation={how} a.luks 1M"), 2);
    }
    bench.ends(
        "ringtap create -f luks --target-secret file:key -o preallocation=metadata b.luks 1M",
        2,
    );
}
