//! `dd`, as `qemu-img dd` and as dd(1) do it.

use super::bench::{Bench, operations};

const SIZE: u64 = 3 << 20;

#[test]
fn parts_are_those_that_qemu_and_dd_copy() {
    let bench = Bench::new();
    let mut random = fastrand::Rng::with_seed(53);
    bench.ok(&format!("ringtap create -q -f qcow2 a.qcow2 {SIZE}"));
    bench.qemu_io("-f qcow2 a.qcow2", &operations(&mut random, SIZE, 60));
    bench.ok("ringtap convert -q a.qcow2 a.raw");
    for operands in ["bs=1M count=2", "count=7", "skip=3", "bs=64k skip=9", "bs=1M count=9", ""] {
        bench.ok(&format!("qemu-img dd -f qcow2 -O raw if=a.qcow2 of=theirs.raw {operands}"));
        for format in ["raw", "qcow2", "vpc -o force_size=on"] {
            bench.ok(&format!("ringtap dd -f qcow2 -O {format} if=a.qcow2 of=b {operands}"));
            let name = format.split(' ').next().expect("a format");
            bench.ok(&format!("qemu-img compare -f raw -F {name} theirs.raw b"));
            let size = bench.json(&format!("qemu-img info --output json -f {name} b"));
            let theirs = bench.json("qemu-img info --output json -f raw theirs.raw");
            assert_eq!(size["virtual-size"], theirs["virtual-size"], "{format} {operands}");
        }
    }
    for operands in ["bs=64k skip=3 count=5", "bs=1k skip=100 count=101", "bs=1M skip=2 count=9"] {
        bench.ok(&format!("dd status=none if=a.raw of=theirs.raw {operands}"));
        bench.ok(&format!("ringtap dd -f qcow2 if=a.qcow2 of=b.raw {operands}"));
        bench.ok("cmp theirs.raw b.raw");
    }
    for (line, code, said) in [
        ("if=a.raw of=a.raw", 2, "read and overwritten at once"),
        ("if=a.raw of=c.raw conv=sync", 2, "conv=sync: write"),
        ("if=none.raw of=c.raw", 1, "none.raw"),
    ] {
        let told = bench.ends(&format!("ringtap dd {line}"), code);
        assert!(told.contains(said), "{told}");
        assert!(!bench.path("c.raw").exists());
    }
}
