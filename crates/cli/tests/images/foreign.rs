//! VMDK and VHDX, as qemu-img makes them: what `check` ends with and where `map` sees holes, beside qemu-img.

use std::fs;

use serde_json::Value;

use super::bench::{Bench, operations};

const SIZE: u64 = 40 << 20;

fn images(bench: &Bench, format: &str, options: &str) {
    let mut random = fastrand::Rng::with_seed(7);
    bench.ok(&format!("qemu-img create -q -f raw a.raw {SIZE}"));
    bench.qemu_io("-f raw a.raw", &operations(&mut random, SIZE, 30));
    bench.ok(&format!("qemu-img convert -f raw -O {format} {options} a.raw a.img"));
    if !options.contains("streamOptimized") {
        bench.qemu_io(&format!("-f {format} a.img"), &["write -q -P 3 30M 200k".to_owned()]);
    }
}

const VMDKS: [&str; 5] = [
    "",
    "-o zeroed_grain=on",
    "-o subformat=monolithicFlat",
    "-o subformat=twoGbMaxExtentSparse",
    "-o subformat=streamOptimized",
];

#[test]
fn holes_are_where_qemu_img_sees_them() {
    let bench = Bench::new();
    for options in VMDKS {
        images(&bench, "vmdk", options);
        if options.contains("zeroed") {
            bench.qemu_io("-f vmdk a.img", &["write -q -z 2M 8M".to_owned()]);
        }
        let [ours, theirs] = ["ringtap", "qemu-img"].map(|program| {
            kinds(&bench.json(&format!("{program} map --output json -f vmdk a.img")))
        });
        assert_eq!(ours, theirs, "{options}");
        assert!(ours.len() > 3, "{options}: {ours:?}");
    }
}

/// How long each stretch is, whether somebody has written it, and whether it reads as zeros.
fn kinds(stretches: &Value) -> Vec<(u64, Option<bool>, Option<bool>)> {
    let mut joined: Vec<(u64, Option<bool>, Option<bool>)> = vec![];
    for it in stretches.as_array().expect("a list") {
        let length = it["length"].as_u64().expect("a number");
        let (present, zero) = (it["present"].as_bool(), it["zero"].as_bool());
        match joined.last_mut() {
            Some(last) if (last.1, last.2) == (present, zero) => last.0 += length,
            _ => joined.push((length, present, zero)),
        }
    }
    joined
}

#[test]
fn a_check_ends_as_that_of_qemu_img() {
    let bench = Bench::new();
    let both = |line: &str, code: i32| {
        let theirs = bench.ends(&format!("qemu-img {line}"), code);
        let ours = bench.ends(&format!("ringtap {line}"), code);
        (ours, theirs)
    };
    for options in VMDKS {
        images(&bench, "vmdk", options);
        let (ours, theirs) = both("check -f vmdk a.img", 0);
        assert_eq!(ours, theirs, "{options}");
        both("check -f vmdk -r all a.img", 63);
    }
    images(&bench, "vmdk", "");
    let whole = fs::read(bench.path("a.img")).expect("the image");
    fs::write(bench.path("a.img"), &whole[..whole.len() / 2]).expect("cut");
    both("check -f vmdk a.img", 1);

    images(&bench, "vhdx", "-o subformat=dynamic,block_size=1M");
    let (ours, _) = both("check -f vhdx a.img", 0);
    assert!(ours.contains("No errors were found on the image."), "{ours}");
    let whole = fs::read(bench.path("a.img")).expect("the image");
    fs::write(bench.path("a.img"), &whole[..whole.len() - (3 << 20)]).expect("cut");
    both("check -f vhdx a.img", 2);
    let counted = |program: &str| {
        bench.json(&format!("{program} check --output json -f vhdx a.img"))["corruptions"].as_u64()
    };
    assert!(counted("ringtap") > Some(0) && counted("ringtap") == counted("qemu-img"));
}
