//! Images that verbs leave alone, and block devices that they write to as to files.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use crate::bench::Bench;

/// A file of the bench as a block device with sectors of that size.
struct Device(PathBuf);

impl Device {
    fn of(bench: &Bench, file: &str, sector: u32) -> Device {
        let sector = sector.to_string();
        let mut make = Command::new("losetup");
        make.args(["-f", "--show", "-b", &sector]).arg(bench.path(file));
        let made = make.output().expect("losetup");
        assert!(made.status.success(), "{made:?}");
        Device(String::from_utf8_lossy(&made.stdout).trim().into())
    }

    fn name(&self) -> String {
        self.0.display().to_string()
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("-d").arg(&self.0).status();
    }
}

fn random(bench: &Bench, name: &str, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fastrand::Rng::with_seed(len as u64).fill(&mut bytes);
    fs::write(bench.path(name), &bytes).expect("an image");
    bytes
}

#[test]
fn nothing_that_lies_below_an_image_is_overwritten_by_making_it() {
    let bench = Bench::new();
    let was = random(&bench, "a.raw", 1 << 20);
    fs::hard_link(bench.path("a.raw"), bench.path("h.raw")).expect("another name");
    bench.ok("ringtap create -q -f qcow2 -b a.raw -F raw b.qcow2");
    bench.ok("ringtap create -q -f qcow2 -b b.qcow2 -F qcow2 c.qcow2");
    for line in [
        "create -f qcow2 -b a.raw -F raw a.raw",
        "create -f qcow2 -b a.raw -F raw h.raw",
        "create -f qcow2 -u -b a.raw -F raw a.raw 1M",
        "create -f qcow2 -b c.qcow2 -F qcow2 b.qcow2",
        "create -f qcow2 -b c.qcow2 -F qcow2 h.raw",
        "create -f qcow2 -b a.raw -F raw -o data_file=a.raw d.qcow2 1M",
        "create -f qcow2 -b c.qcow2 -F qcow2 -o data_file=h.raw d.qcow2 1M",
        "create -f qcow2 -o data_file=b.qcow2 b.qcow2 1M",
        "convert -f qcow2 c.qcow2 -B b.qcow2 -F qcow2 -O qcow2 a.raw",
        "convert -U -f qcow2 c.qcow2 -O raw a.raw",
        "convert -U -n -f qcow2 c.qcow2 -O raw h.raw",
        "dd -f raw if=a.raw of=h.raw bs=1M",
    ] {
        let said = bench.ends(&format!("ringtap {line}"), 2);
        assert!(
            said.contains("overwrite")
                || said.contains("overwritten")
                || said.contains("its own data file"),
            "{line}: {said}"
        );
        assert_eq!(fs::read(bench.path("a.raw")).expect("it is there"), was, "{line}");
    }
    bench.same("a.raw", "c.qcow2");
    assert!(!bench.path("d.qcow2").exists());
    // Their names are no obstacle: another file of that name.
    fs::create_dir(bench.path("other")).expect("a folder");
    bench.ok("ringtap create -q -f qcow2 -b ../a.raw -F raw other/a.raw");
    bench.same("a.raw", "other/a.raw");
}

#[test]
fn what_cannot_be_is_found_out_before_a_target_is_written_to() {
    let bench = Bench::new();
    random(&bench, "z.raw", 1 << 20);
    bench.ok("ringtap create -q -f qcow2 base.qcow2 2M");
    bench.ok("ringtap create -q -b base.qcow2 -F qcow2 t.qcow2");
    let before = fs::read(bench.path("t.qcow2")).expect("it is there");
    let words = "convert -f raw -B base.qcow2 -F qcow2 z.raw z.raw -O qcow2 t.qcow2";
    let two = bench.ends(&format!("ringtap {words}"), 2);
    assert!(two.contains("several sources make no overlay"), "{two}");
    bench.ends(&format!("ringtap {}", words.replacen("convert", "convert -n", 1)), 2);
    assert_eq!(fs::read(bench.path("t.qcow2")).expect("it is there"), before);
    bench.ok("ringtap map t.qcow2");
    bench.ok("ringtap create -q -f qcow2 marked.qcow2 1M");
    bench.ok("ringtap bitmap --add marked.qcow2 b");
    for options in ["-o compat=0.10", "-o size=16M"] {
        let words =
            format!("ringtap convert -f qcow2 --bitmaps marked.qcow2 -O qcow2 {options} t.qcow2");
        let said = bench.ends(&words, 1);
        assert!(said.contains("bitmaps cannot be copied"), "{said}");
        assert_eq!(fs::read(bench.path("t.qcow2")).expect("it is there"), before, "{options}");
    }
    bench.ok("ringtap convert -q -f qcow2 --bitmaps marked.qcow2 -O qcow2 -o size=1M n.qcow2");
    // What is left of an overlay is its data file's.
    bench.ok("ringtap create -q -f qcow2 -b base.qcow2 -F qcow2 -o data_file=d.dat o.qcow2");
    bench.qemu_io("-f qcow2 o.qcow2", &["write -P 7 0 64k".into()]);
    let base = fs::read(bench.path("base.qcow2")).expect("it is there");
    let said = bench.ends("ringtap commit -f qcow2 o.qcow2", 1);
    assert!(said.contains("add -d"), "{said}");
    assert_eq!(fs::read(bench.path("base.qcow2")).expect("it is there"), base);
    bench.ok("ringtap commit -q -d -f qcow2 o.qcow2");
    bench.same("base.qcow2", "o.qcow2");
}

#[test]
fn names_that_nobody_could_open_are_not_written() {
    let bench = Bench::new();
    random(&bench, "x:y.raw", 1 << 20);
    bench.ok("ringtap create -q -f qcow2 o.qcow2 1M");
    for line in [
        "create -f qcow2 -b x:y.raw -F raw n.qcow2",
        "rebase -b x:y.raw -F raw o.qcow2",
        "create -f qcow2 -o data_file=x:d.raw n.qcow2 1M",
    ] {
        let said = bench.ends(&format!("ringtap {line}"), 2);
        assert!(said.contains("write ./x:"), "{line}: {said}");
        assert!(!bench.path("n.qcow2").exists());
    }
    bench.ok("ringtap map o.qcow2");
    bench.ok("ringtap create -q -f qcow2 -b ./x:y.raw -F raw n.qcow2");
    bench.ok("ringtap convert -f qcow2 n.qcow2 -O raw n.raw");
    assert_eq!(
        fs::read(bench.path("n.raw")).expect("it is there"),
        fs::read(bench.path("x:y.raw")).expect("it is there")
    );
}

#[test]
fn clusters_smaller_than_a_devices_sectors_are_written() {
    let bench = Bench::new();
    random(&bench, "s.raw", 1 << 20);
    for (cluster, size) in [(512, "1M"), (1024, "64M"), (2048, "700M")] {
        let file = format!("device{cluster}");
        fs::File::create(bench.path(&file)).expect("a file").set_len(128 << 20).expect("its size");
        let device = Device::of(&bench, &file, 4096);
        let name = device.name();
        bench.ok(&format!("ringtap create -q -f qcow2 -o cluster_size={cluster} {name} {size}"));
        bench.ok(&format!("ringtap convert -n -f raw s.raw -O qcow2 {name}"));
        bench.ok(&format!("ringtap convert -f qcow2 {name} -O raw back.raw"));
        let back = fs::read(bench.path("back.raw")).expect("it is there");
        let wanted = fs::read(bench.path("s.raw")).expect("it is there");
        assert!(
            back.starts_with(&wanted) && back[wanted.len()..].iter().all(|byte| *byte == 0),
            "{cluster}"
        );
        bench.ok(&format!("qemu-img check -q -f qcow2 {name}"));
    }
}

/// QEMU does not look at the bitmaps of its sectors.
#[test]
fn a_dynamic_vhd_on_a_device_reads_the_same_in_qemu() {
    let bench = Bench::new();
    let mut bytes = vec![0; 9 << 20];
    bytes[..512].fill(1);
    bytes[5 << 20..][..512].fill(2);
    fs::write(bench.path("z.raw"), &bytes).expect("an image");
    fs::write(bench.path("device"), vec![b'S'; 40 << 20]).expect("a file");
    let device = Device::of(&bench, "device", 512);
    let name = device.name();
    bench.ok(&format!("ringtap convert -f raw z.raw -O vpc -o force_size=on {name}"));
    bench.ok(&format!("qemu-img compare -f raw -F vpc z.raw {name}"));
    bench.ok(&format!("ringtap compare -q -f raw -F vpc z.raw {name}"));
}
