//! Ciphers of LUKS, as qemu-img makes them, alone and inside qcow2.

use std::fs;

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
