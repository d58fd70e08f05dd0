//! Disks that become larger: what they gain reads as zeros, or they are refused as they are.

use std::fs;
use std::os::unix::fs::FileExt;

use super::bench::Bench;

const LUKS: &str = "encrypt.format=luks,encrypt.iter-time=10";

/// Not a multiple of a cluster.
const ODD: usize = 1_088_512;

fn with_key() -> Bench {
    let bench = Bench::new();
    fs::write(bench.path("key"), "a secret").expect("a key");
    bench.ok("chmod 600 key");
    bench
}

/// What a guest reads.
fn content(bench: &Bench, image: &str) -> Vec<u8> {
    bench.ok(&format!("ringtap convert -U --secret file:key {image} -O raw content"));
    let content = fs::read(bench.path("content")).expect("content");
    fs::remove_file(bench.path("content")).expect("removed");
    content
}

fn is_then_zeros(content: &[u8], byte: u8, end: usize, what: &str) {
    let wrong = content
        .iter()
        .enumerate()
        .filter(|(at, found)| **found != if *at < end { byte } else { 0 });
    assert_eq!(wrong.count(), 0, "{what}");
}

#[test]
fn an_encrypted_end_within_a_cluster_stays_where_it_is() {
    let bench = with_key();
    fs::write(bench.path("was.raw"), vec![5; ODD]).expect("a file");
    let make = format!("ringtap create -q -f qcow2 --secret file:key -o {LUKS}");
    bench.ok(&format!("{make} base.qcow2 {ODD}"));
    // Nothing lies in its last cluster.
    bench.ok("ringtap resize -q base.qcow2 1088512");
    bench.ok("ringtap resize -q base.qcow2 2M");
    bench.ok(&format!("ringtap resize -q --shrink base.qcow2 {ODD}"));
    bench.ok("ringtap convert -n -f raw was.raw --target-secret file:key base.qcow2");
    bench.ok("ringtap resize -q base.qcow2 1088512");
    bench.ok("ringtap create -q -f qcow2 -b base.qcow2 top.qcow2 2M");
    for line in ["resize base.qcow2 2M", "commit --secret file:key top.qcow2"] {
        let said = bench.ends(&format!("ringtap {line}"), 1);
        assert!(said.contains("encrypted") && said.contains("convert -n"), "{line}: {said}");
        is_then_zeros(&content(&bench, "base.qcow2"), 5, ODD, line);
        let top = content(&bench, "top.qcow2");
        assert_eq!(top.len(), 2 << 20);
        is_then_zeros(&top, 5, ODD, line);
    }
    // As it says.
    bench.ok(&format!("{make} new.qcow2 2M"));
    bench.ok("ringtap convert -n --secret file:key base.qcow2 --target-secret file:key new.qcow2");
    is_then_zeros(&content(&bench, "new.qcow2"), 5, ODD, "new");
}

#[test]
fn encrypted_subclusters_behind_an_end_hide_a_longer_backing_file() {
    let bench = with_key();
    fs::write(bench.path("big.raw"), vec![0x77; 3 << 20]).expect("a file");
    let over = format!(
        "ringtap create -q -f qcow2 --secret file:key -o extended_l2=on,{LUKS} -b big.raw -F raw"
    );
    let end = (1 << 20) + 2048;
    for (name, write) in [("a.qcow2", None), ("b.qcow2", Some("0 1050624"))] {
        bench.ok(&format!("{over} {name} {end}"));
        if write.is_some() {
            fs::write(bench.path("own.raw"), vec![0x77; end]).expect("a file");
            bench.ok(&format!(
                "ringtap convert -n -S 0 -f raw own.raw --target-secret file:key {name}"
            ));
        }
        bench.ok(&format!("ringtap resize -q --secret file:key {name} 2M"));
        let now = content(&bench, name);
        assert_eq!(now.len(), 2 << 20);
        is_then_zeros(&now, 0x77, end, name);
        let theirs = format!("driver=qcow2,encrypt.key-secret=s,file.filename={name}");
        let secret = "--object secret,id=s,file=key";
        bench.ok(&format!("qemu-img check -q {secret} --image-opts {theirs}"));
    }
    // The end lies in a subcluster that shows the backing file.
    bench.ok(&format!("{over} c.qcow2 {}", end + 512));
    let before = fs::read(bench.path("c.qcow2")).expect("an image");
    let said = bench.ends("ringtap resize --secret file:key c.qcow2 2M", 1);
    assert!(said.contains("encrypted"), "{said}");
    assert!(fs::read(bench.path("c.qcow2")).expect("an image") == before);
}

#[test]
fn a_commit_shows_nothing_of_a_longer_data_file() {
    let bench = with_key();
    bench.ok("ringtap create -q -f qcow2 -o data_file=d.raw,data_file_raw=on base.qcow2 1M");
    let data = fs::File::options().write(true).open(bench.path("d.raw")).expect("a data file");
    data.write_all_at(&vec![0x55; 3 << 20], 1 << 20).expect("written");
    bench.ok("ringtap create -q -f qcow2 -b base.qcow2 -F qcow2 top.qcow2 4M");
    is_then_zeros(&content(&bench, "top.qcow2"), 0, 0, "before");
    let said = bench.ends("ringtap commit top.qcow2", 1);
    assert!(said.contains("longer than its disk"), "{said}");
    let facts = bench.json("ringtap info --output json base.qcow2");
    assert_eq!(facts["virtual-size"], 1 << 20);
    is_then_zeros(&content(&bench, "top.qcow2"), 0, 0, "after");
    // It is the disk's where that is asked for.
    bench.ok("ringtap resize -q base.qcow2 4M");
    assert_eq!(content(&bench, "base.qcow2")[1 << 20], 0x55);
}

#[test]
fn a_vhd_is_made_no_larger_where_its_parent_would_show() {
    let bench = with_key();
    bench.ok("ringtap create -q -f vpc p.vhd 10M");
    bench.qemu_io("-f vpc p.vhd", &["write -q -P 1 0 10M".into()]);
    bench.ok("ringtap create -q -f vpc -b p.vhd c.vhd 5M");
    bench.ok("ringtap create -q -f vpc -b c.vhd t.vhd 10M");
    let size = |image: &str| {
        let facts = bench.json(&format!("ringtap info --output json {image}"));
        facts["virtual-size"].as_u64().expect("a size") as usize
    };
    let end = size("c.vhd");
    for line in ["resize c.vhd 10M", "commit t.vhd"] {
        let said = bench.ends(&format!("ringtap {line}"), 1);
        assert!(said.contains("its parent"), "{line}: {said}");
        assert_eq!(size("c.vhd"), end);
        is_then_zeros(&content(&bench, "t.vhd"), 1, end, line);
    }
    // Nothing of a parent of its own size shows.
    bench.ok("ringtap create -q -f vpc -b p.vhd same.vhd");
    bench.ok("ringtap resize -q same.vhd 20M");
    is_then_zeros(&content(&bench, "same.vhd"), 1, 10 << 20, "same");
}

#[test]
fn the_state_of_a_machine_is_no_part_of_a_larger_disk() {
    let bench = with_key();
    bench.ok("ringtap create -q -f qcow2 -o cluster_size=4k base.qcow2 2M");
    bench.qemu_io("-f qcow2 base.qcow2", &["write -q -b -P 9 0 1M".into()]);
    bench.ok("qemu-img snapshot -c s base.qcow2");
    bench.ok("ringtap snapshot -a s base.qcow2");
    bench.ok("cp base.qcow2 sized.qcow2");
    bench.ok("ringtap create -q -f qcow2 -b base.qcow2 top.qcow2 4M");
    bench.ok("ringtap commit top.qcow2");
    bench.ok("ringtap resize -q -f qcow2 sized.qcow2 2560k");
    bench.ok("ringtap resize -q -f qcow2 sized.qcow2 4M");
    for image in ["top.qcow2", "base.qcow2", "sized.qcow2"] {
        is_then_zeros(&content(&bench, image), 0, 0, image);
        bench.ok(&format!("qemu-img check -q {image}"));
    }
    // The snapshot has it still.
    bench.ok("qemu-img snapshot -a s base.qcow2");
    let state = "read -q -b -P 9 0 1M";
    bench.qemu_io("-f qcow2 base.qcow2", &[state.into()]);
}
