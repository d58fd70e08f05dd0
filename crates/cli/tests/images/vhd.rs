//! VHDs: overlays, checks, sizes; and what a LUKS container tells without its secret.

use std::fs;
use std::os::unix::fs::FileExt;

use super::bench::{Bench, operations};

const SIZE: u64 = 5 << 20;

#[test]
fn children_are_made_over_parents_and_told_of() {
    let bench = Bench::new();
    let mut random = fastrand::Rng::with_seed(37);
    bench.ok(&format!("qemu-img create -q -f vpc -o force_size=on base.vhd {SIZE}"));
    bench.qemu_io("-f vpc base.vhd", &operations(&mut random, SIZE, 40));
    bench.ok("ringtap create -q -f vpc -b base.vhd -F vpc child.vhd");
    bench.ok("ringtap create -q -f vpc -b child.vhd top.vhd");
    bench.ok("ringtap convert top.vhd was.raw");
    bench.ok("qemu-img compare -f vpc -F raw base.vhd was.raw");
    let chain = bench.json("ringtap info --backing-chain --output json top.vhd");
    let chain = chain.as_array().expect("a list");
    assert_eq!(chain.len(), 3, "{chain:?}");
    for (facts, below) in chain.iter().zip(["child.vhd", "base.vhd"]) {
        let full = facts["full-backing-filename"].as_str().expect("a path");
        assert!(full.ends_with(below), "{facts}");
        assert_eq!(facts["backing-filename-format"], "vpc");
        assert_eq!(facts["virtual-size"], SIZE);
        assert_eq!(facts["cluster-size"], 2 << 20);
    }
    // What an overlay differs by is written, and the rest is its parent's.
    fs::copy(bench.path("was.raw"), bench.path("new.raw")).expect("a copy");
    bench.qemu_io("-f raw new.raw", &["write -q -P 7 1234432 70k".into()]);
    bench.ok("ringtap convert -f raw new.raw -O vpc -B base.vhd -F vpc thin.vhd");
    bench.ok("ringtap compare -f raw new.raw thin.vhd");
    let len = fs::metadata(bench.path("thin.vhd")).expect("it").len();
    assert!(len < 3 << 20, "{len} bytes for 70 KiB");
    for (line, wanted) in [
        ("ringtap create -f vpc -b was.raw -F raw x.vhd", "another VHD only"),
        ("ringtap create -f vpc -o subformat=fixed -b base.vhd -F vpc x.vhd", "subformat"),
    ] {
        let said = bench.ends(line, 2);
        assert!(said.contains(wanted), "{said}");
        assert!(!bench.path("x.vhd").exists());
    }
}

#[test]
fn vhds_are_resized_as_guests_and_qemu_see_it() {
    let bench = Bench::new();
    let mut random = fastrand::Rng::with_seed(41);
    for (by, kind) in [
        ("qemu-img", "fixed"),
        ("ringtap", "fixed"),
        ("qemu-img", "dynamic"),
        ("ringtap", "dynamic"),
    ] {
        let options = format!("subformat={kind},force_size=on");
        bench.ok(&format!("{by} create -q -f vpc -o {options} a.vhd {SIZE}"));
        let changes = operations(&mut random, SIZE, 30);
        bench.qemu_io("-f vpc a.vhd", &changes);
        bench.ok(&format!("ringtap create -q -f raw a.raw {SIZE}"));
        bench.qemu_io("-f raw a.raw", &changes);
        // Within the table of blocks, and past it (more than 128 of 2 MiB).
        for size in ["5242880", "6M", "400M", "+512"] {
            bench.ok(&format!("ringtap resize -q -f vpc a.vhd {size}"));
            bench.ok(&format!("ringtap resize -q -f raw a.raw {size}"));
            let changes = operations(&mut random, 6 << 20, 10);
            let size = fs::metadata(bench.path("a.raw")).expect("it").len();
            if size > 6 << 20 {
                bench.qemu_io("-f vpc a.vhd", &changes);
                bench.qemu_io("-f raw a.raw", &changes);
                let last = vec![format!("write -q -P 9 {} 512", size - 512)];
                bench.qemu_io("-f vpc a.vhd", &last);
                bench.qemu_io("-f raw a.raw", &last);
            }
            bench.ok("qemu-img compare -s -f vpc -F vpc a.vhd a.vhd");
            bench.ok("qemu-img compare -f vpc -F raw a.vhd a.raw");
            bench.ok("ringtap compare -f vpc a.vhd -F raw a.raw");
            bench.ok("ringtap check -q -f vpc a.vhd");
            let facts = bench.json("qemu-img info --output json -f vpc a.vhd");
            assert_eq!(facts["virtual-size"], size, "{by} {kind}");
        }
        bench.ends("ringtap resize -f vpc a.vhd 1M", 2);
        if kind == "fixed" {
            bench.ok("ringtap resize -q -f vpc --shrink a.vhd 1M");
            bench.ok("ringtap resize -q -f raw --shrink a.raw 1M");
            bench.ok("qemu-img compare -f vpc -F raw a.vhd a.raw");
            let facts = bench.json("qemu-img info --output json -f vpc a.vhd");
            assert_eq!(facts["virtual-size"], 1 << 20, "{by} {kind}");
        } else {
            let said = bench.ends("ringtap resize -f vpc --shrink a.vhd 1M", 1);
            assert!(said.contains("convert it"), "{said}");
            bench.ok("qemu-img compare -f vpc -F raw a.vhd a.raw");
        }
    }
}

#[test]
fn vhds_are_checked_and_their_footers_mended() {
    let bench = Bench::new();
    bench.ok("ringtap create -q -f vpc a.vhd 5M");
    bench.qemu_io("-f vpc a.vhd", &["write -q -P 3 0 3M".into()]);
    bench.ok("cp a.vhd was.vhd");
    let poke = |at: u64, bytes: &[u8]| {
        let file = fs::File::options().write(true).open(bench.path("a.vhd")).expect("open");
        file.write_all_at(bytes, at).expect("written");
    };
    bench.ok("ringtap check a.vhd");
    let facts = bench.json("ringtap check --output json a.vhd");
    assert_eq!((&facts["format"], &facts["allocated-clusters"]), (&"vpc".into(), &2.into()));
    let end = fs::metadata(bench.path("a.vhd")).expect("it").len();
    poke(end - 512, b"nothing");
    let said = bench.ends("ringtap check a.vhd", 2);
    assert!(said.contains("the one at the end"), "{said}");
    bench.ends("ringtap check -f vpc --repair leaks a.vhd", 2);
    bench.ok("ringtap check -f vpc --repair all a.vhd");
    bench.ok("ringtap check a.vhd");
    bench.ok("qemu-img compare -f vpc -F vpc was.vhd a.vhd");
    // A block over another is nothing that can be mended.
    let mut table = [0; 8];
    let file = fs::File::open(bench.path("a.vhd")).expect("open");
    file.read_exact_at(&mut table, 512 + 16).expect("the table's place");
    let table_at = u64::from_be_bytes(table);
    let mut entry = [0; 4];
    file.read_exact_at(&mut entry, table_at).expect("an entry");
    poke(table_at + 4, &entry);
    let said = bench.ends("ringtap check -f vpc --repair all a.vhd", 2);
    assert!(said.contains("overlap"), "{said}");
}

#[test]
fn a_luks_container_tells_what_it_is_without_its_secret() {
    let bench = Bench::new();
    fs::write(bench.path("key"), "a secret").expect("a key");
    bench.ok("chmod 600 key");
    bench.ok(
        "qemu-img create -q --object secret,id=s,file=key -f luks -o key-secret=s,iter-time=10 \
         a.luks 1M",
    );
    let theirs = bench.json("qemu-img info --output json a.luks");
    let ours = bench.json("ringtap info --output json a.luks");
    for field in ["virtual-size", "format", "encrypted"] {
        assert_eq!(ours[field], theirs[field], "{field}");
    }
    let [ours, theirs] = [&ours, &theirs].map(|it| &it["format-specific"]["data"]);
    for field in ["uuid", "cipher-alg", "cipher-mode", "ivgen-alg", "payload-offset"] {
        assert_eq!(ours[field], theirs[field], "{field}");
    }
    for field in ["active", "iters", "key-offset", "stripes"] {
        assert_eq!(ours["slots"][0][field], theirs["slots"][0][field], "{field}");
    }
    bench.ok("ringtap create -q -f luks --target-secret file:key b.luks 1M");
    let ours = bench.json("ringtap info --output json b.luks");
    assert_eq!(ours["virtual-size"], 1 << 20);
    let data = &ours["format-specific"]["data"];
    assert_eq!(
        (&data["version"], &data["slots"][0]["kdf"]["type"]),
        (&2.into(), &"argon2id".into())
    );
    let said = bench.ok("ringtap info a.luks");
    assert!(said.contains("encrypted: yes") && said.contains("cipher alg: aes-256"), "{said}");
}
