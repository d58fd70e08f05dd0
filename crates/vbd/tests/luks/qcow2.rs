//! LUKS inside qcow2: QEMU's images in Ringtap, and Ringtap's in QEMU.

use std::fs;

use ringtap_image::luks::{self, Effort, Version};
use ringtap_image::{CacheMode, Container, Format, OpenOptions, Secret, on_a_ring, qcow2};

use crate::tools::{Bench, good, limited, make};

const SIZE: u64 = 1 << 20;

/// What the image holds as QEMU deciphers it, once QEMU's check has found nothing wrong.
fn by_qemu(bench: &Bench) -> Vec<u8> {
    let disk = format!(
        "driver=qcow2,encrypt.format=luks,encrypt.key-secret=s,file.driver=file,file.filename={}",
        bench.disk.display()
    );
    let clear = bench.path("clear");
    for words in [vec!["check"], vec!["convert", "-O", "raw"]] {
        let mut qemu = limited("qemu-img");
        qemu.args(&words).arg("--object").arg(bench.qemu_secret()).arg("--image-opts").arg(&disk);
        if words.len() > 1 {
            qemu.arg(&clear);
        }
        good(&qemu.output().expect("qemu-img runs"), words[0]);
    }
    fs::read(&clear).expect("the payload")
}

fn options(bench: &Bench, cache: CacheMode) -> OpenOptions {
    OpenOptions { format: Some(Format::Qcow2), cache, ..bench.options() }
}

/// Ringtap writes here and there, leaving the rest unwritten; both must read the same.
fn write_and_compare(bench: &Bench, cache: CacheMode) {
    let opened = bench.open(options(bench, cache)).expect("opened");
    assert_eq!(opened.vbd.size(), SIZE);
    let mut rng = fastrand::Rng::with_seed(9);
    let mut model = opened.read_all();
    for _ in 0..20 {
        let from = rng.usize(0..2000) * 512;
        let len = (rng.usize(1..60) * 512).min(model.len() - from);
        rng.fill(&mut model[from..from + len]);
        opened.write(from as u64, &model[from..from + len]);
    }
    assert!(opened.read_all() == model);
    opened.close();
    assert!(by_qemu(bench) == model, "QEMU reads what Ringtap wrote");
    let again = bench.open(options(bench, cache)).expect("opened again");
    assert!(again.read_all() == model);
    again.close();
}

#[test]
fn qcow2_with_luks_of_qemu() {
    for (more, cache) in [("", CacheMode::None), (",cluster_size=4k", CacheMode::Writeback)] {
        let bench = Bench::new();
        let mut create = limited("qemu-img");
        create.args(["create", "-q", "-f", "qcow2", "--object"]).arg(bench.qemu_secret());
        let luks = "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=1";
        create.args(["-o", &format!("{luks}{more}")]).arg(&bench.disk).arg("1M");
        make(&mut create);
        let mut io = limited("qemu-io");
        io.args(["-c", "write -P 0x5a 64k 200k", "--object"]).arg(bench.qemu_secret());
        let disk = "driver=qcow2,encrypt.format=luks,encrypt.key-secret=s,file.driver=file";
        io.arg("--image-opts").arg(format!("{disk},file.filename={}", bench.disk.display()));
        good(&io.output().expect("qemu-io runs"), "qemu-io");
        let opened = bench.open(options(&bench, cache)).expect("opened");
        assert!(opened.read(64 << 10, 200 << 10).iter().all(|byte| *byte == 0x5a));
        assert!(opened.read(0, 64 << 10).iter().all(|byte| *byte == 0));
        opened.close();
        write_and_compare(&bench, cache);
        let none = OpenOptions { secret: None, ..options(&bench, cache) };
        let error = bench.open(none).err().expect("refused").to_string();
        assert!(error.contains("--secret"), "{error}");
    }
}

#[test]
fn qcow2_with_luks_of_ours() {
    let bench = Bench::new();
    bench.empty_disk(0);
    let secret = Secret::new(crate::tools::PASS.as_bytes()).expect("memory");
    let effort = Effort::Exactly { iterations: 1000, memory: 0, cpus: 0 };
    let luks = luks::CreateOptions { version: Version::Luks1, effort, ..Default::default() };
    let (header, _) = luks::create_header(&luks, &secret).expect("a header");
    let create = qcow2::CreateOptions { size: SIZE, luks: Some(header), ..Default::default() };
    let disk = bench.disk.clone();
    let made = on_a_ring(&bench.disk, |io| async move {
        let container = Container::open(&disk, &OpenOptions::default()).expect("a file");
        qcow2::create(&io, &container, None, &create).await.map(drop)
    });
    made.expect("a ring").expect("an image");
    write_and_compare(&bench, CacheMode::None);
}
