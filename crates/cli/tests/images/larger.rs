//! Disks that become larger: what they gain reads as zeros, or they are refused as they are.

use std::fs;

use super::bench::Bench;

const LUKS: &str = "encrypt.format=luks,encrypt.iter-time=10";

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
}
