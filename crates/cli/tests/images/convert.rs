//! What convert does beyond copying: compression, snapshots, bitmaps.

use std::fs;
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};

use super::bench::{Bench, operations};

/// Text-like, noise, zeros and repetition, in stretches that no cluster size fits.
fn content(len: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(23);
    let mut bytes = Vec::with_capacity(len);
    while bytes.len() < len {
        let stretch = random.usize(1..300_000);
        let kind = random.u32(0..5);
        let word = random.u64(..).to_le_bytes();
        bytes.extend((0..stretch).map(|at| match kind {
            0 => 0,
            1 => random.u8(..),
            2 => word[at % 8],
            _ => b"what lies in a row"[random.usize(0..18)],
        }));
    }
    bytes.truncate(len);
    bytes
}

#[test]
fn compressed_images_are_read_by_qemu_and_by_us() {
    let bench = Bench::new();
    for options in [
        "",
        "-o compression_type=zstd",
        "-o compression_type=zstd,extended_l2=on",
        "-o cluster_size=512",
        "-o cluster_size=2M,refcount_bits=64",
        "-o compat=0.10,cluster_size=4k",
        "-o refcount_bits=1",
        "-o refcount_bits=2,cluster_size=128k",
        "-t none",
        "-S 0 -m 7",
    ] {
        let most = if options.contains("=512") { 200_000 } else { 2 << 20 };
        let size = most / 512 * 512 + 37 * 512;
        fs::write(bench.path("a.raw"), content(size)).expect("a disk");
        bench.ok(&format!("ringtap convert -f raw a.raw -c -O qcow2 {options} b.qcow2"));
        bench.same("a.raw", "b.qcow2");
        let facts = bench.json("ringtap check --output json b.qcow2");
        assert!(facts["compressed-clusters"].as_u64() > Some(0), "{options}: {facts}");
        let blocks = |name: &str| {
            let place = bench.path(name);
            std::os::unix::fs::MetadataExt::blocks(&fs::metadata(place).expect("a file")) * 512
        };
        bench.ok(&format!("qemu-img convert -f raw a.raw -c -O qcow2 {} c.qcow2", theirs(options)));
        let (ours, theirs) = (blocks("b.qcow2"), blocks("c.qcow2"));
        // With few references to a cluster there are gaps, which theirs leaves as holes.
        let more = theirs / 10 + if options.contains("2M") { 4 << 21 } else { 256 << 10 };
        let packed = !options.contains("refcount_bits=1") && !options.contains("refcount_bits=2");
        assert!(!packed || ours <= theirs + more, "{options}: {ours} bytes, {theirs} by qemu-img");
        // Theirs is read by us, and ours is written over and freed as any other.
        bench.same("a.raw", "c.qcow2");
        bench.ok("ringtap convert b.qcow2 d.raw");
        bench.ok("cmp a.raw d.raw");
        let mut random = fastrand::Rng::with_seed(29);
        let changes = operations(&mut random, size as u64, 15);
        bench.qemu_io("-f qcow2 b.qcow2", &changes);
        bench.qemu_io("-f raw d.raw", &changes);
        bench.same("d.raw", "b.qcow2");
    }
}

/// Options that qemu-img has in another form.
fn theirs(options: &str) -> &str {
    match options {
        "-S 0 -m 7" => "-S 0",
        other => other,
    }
}

#[test]
fn compressed_clusters_go_into_overlays_and_into_images_that_are_there() {
    let bench = Bench::new();
    let size = 6 << 20;
    let mut bytes = content(size);
    fs::write(bench.path("base.raw"), &bytes).expect("a disk");
    for (number, byte) in bytes[1_000_000..1_100_000].iter_mut().enumerate() {
        *byte = number as u8;
    }
    bytes[3_000_000..3_500_000].fill(0);
    fs::write(bench.path("a.raw"), &bytes).expect("a disk");
    for options in ["", "-o cluster_size=4k,extended_l2=off"] {
        let over = "-B base.raw -F raw";
        bench.ok(&format!("ringtap convert a.raw -c {over} {options} over.qcow2"));
        bench.same("a.raw", "over.qcow2");
        let len = fs::metadata(bench.path("over.qcow2")).expect("it").len();
        assert!(len < 1 << 20, "{len} bytes for little that differs");
        // A chain is kept as it is, but for the layers that are written anew.
        bench.ok("ringtap create -q -b over.qcow2 top.qcow2");
        bench.qemu_io("-f qcow2 top.qcow2", &["write -q -P 9 700k 300k".into()]);
        bench.ok(&format!("ringtap convert top.qcow2 -c {over} thin.qcow2"));
        bench.same("top.qcow2", "thin.qcow2");
        // Into an image that holds something else, snapshots too.
        bench.ok("qemu-img create -q -f qcow2 there.qcow2 6M");
        bench.qemu_io("-f qcow2 there.qcow2", &["write -q -P 3 0 6M".into()]);
        bench.ok("qemu-img snapshot -c was there.qcow2");
        bench.ok("ringtap convert -n -c a.raw -O qcow2 there.qcow2");
        bench.same("a.raw", "there.qcow2");
        bench.ok("ringtap snapshot -a was -f qcow2 there.qcow2");
        bench.qemu_io("-f qcow2 there.qcow2", &["read -q -P 3 0 6M".into()]);
    }
    // Sources that end within a cluster.
    fs::write(bench.path("odd.raw"), &bytes[..1_000_960]).expect("a disk");
    bench.ok("ringtap convert -f raw -c odd.raw a.raw odd.raw -O qcow2 all.qcow2");
    bench.ok("qemu-img convert -f raw odd.raw a.raw odd.raw -O raw all.raw");
    bench.same("all.raw", "all.qcow2");
}

/// A raw image whose 4 KiB pieces are holes, written zeros, or data, as chance has it.
fn finely_holed(bench: &Bench, name: &str, pieces: u64, random: &mut fastrand::Rng) {
    let file = fs::File::create(bench.path(name)).expect("a file");
    file.set_len(pieces * 4096).expect("its size");
    for at in 0..pieces {
        let byte = match random.u32(0..8) {
            0..=3 => continue,
            4 => 0,
            _ => random.u8(1..),
        };
        file.write_all_at(&[byte; 4096], at * 4096).expect("written");
    }
}

#[test]
fn holes_smaller_than_clusters_hide_nothing_from_what_is_compressed() {
    let bench = Bench::new();
    let mut random = fastrand::Rng::with_seed(31);
    for options in ["", "-o cluster_size=16k", "-o extended_l2=on"] {
        let pieces = random.u64(500..600);
        finely_holed(&bench, "old.raw", pieces, &mut random);
        finely_holed(&bench, "new.raw", pieces - 20, &mut random);
        let over = "-B new.raw -F raw";
        for what in ["", "-S 0", over, &format!("-S 0 {over}")] {
            let line = format!("ringtap convert -c {what} {options} -f raw -O qcow2 old.raw");
            bench.ok(&format!("{line} c.qcow2"));
            bench.same("old.raw", "c.qcow2");
        }
        // Into an image that holds something else.
        bench.ok(&format!("ringtap create -q -f qcow2 {options} there.qcow2 {}", pieces * 4096));
        bench.qemu_io("-f qcow2 there.qcow2", &[format!("write -q -P 3 0 {}", pieces * 4096)]);
        bench.ok("ringtap convert -n -c -S 0 -f raw -O qcow2 old.raw there.qcow2");
        bench.same("old.raw", "there.qcow2");
        // An overlay gets what shows there of one image, and lies over another.
        bench.ok(&format!("ringtap create -q {options} -b old.raw -F raw top.qcow2"));
        bench.qemu_io("-f qcow2 top.qcow2", &["write -q -P 5 700k 100k".into()]);
        bench.ok("qemu-img convert -O raw top.qcow2 was.raw");
        bench.ok("ringtap rebase -c -b new.raw -F raw top.qcow2");
        bench.same("was.raw", "top.qcow2");
    }
}

#[test]
fn what_cannot_be_compressed_is_refused_before_anything_is_made() {
    let bench = Bench::new();
    bench.ok("ringtap create -q a.raw 1M");
    for (options, wanted) in [
        ("-O raw", "raw images cannot be compressed"),
        ("-O vpc", "cannot be compressed"),
        ("-O qcow2 -o preallocation=full", "preallocation"),
        ("-O qcow2 -o data_file=d.raw", "data_file"),
        ("-O qcow2 -o compat=0.10,compression_type=zstd", "compression_type"),
        ("-O qcow2 -o compression_type=lzma", "zlib or zstd"),
    ] {
        let output = bench.run(&format!("ringtap convert -c a.raw {options} b.img"));
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(wanted), "{options}: {said}");
        assert!(!bench.path("b.img").exists(), "{options}");
    }
    bench.ok("qemu-img create -q -f qcow2 -o data_file=d.raw there.qcow2 1M");
    let said = bench.ends("ringtap convert -n -c a.raw -O qcow2 there.qcow2", 2);
    assert!(said.contains("external data file"), "{said}");
}

/// QEMU's `convert -l` gives the size that the disk has today, cut or filled with zeros.
#[test]
fn a_snapshot_of_another_size_is_converted_in_its_own() {
    let bench = Bench::new();
    bench.ok("qemu-img create -q -f qcow2 a.qcow2 8M");
    bench.qemu_io("-f qcow2 a.qcow2", &["write -q -P 7 0 8M".into()]);
    bench.ok("ringtap convert -q -f qcow2 a.qcow2 then.raw");
    bench.ok("qemu-img snapshot -c was a.qcow2");
    for today in ["16M", "4M"] {
        bench.ok(&format!("qemu-img resize -q -f qcow2 --shrink a.qcow2 {today}"));
        for (format, to) in [("raw", "out.raw"), ("qcow2", "out.qcow2")] {
            bench.ok(&format!("ringtap convert -q -f qcow2 -l was a.qcow2 -O {format} {to}"));
            let facts = bench.json(&format!("ringtap info --output json -f {format} {to}"));
            assert_eq!(facts["virtual-size"], 8 << 20, "{today}, {to}");
            bench.same("then.raw", to);
        }
        let measured = bench.json("ringtap measure --output json -f qcow2 -l was a.qcow2 -O raw");
        assert_eq!(measured["fully-allocated"], 8 << 20, "{today}");
    }
}

#[test]
fn snapshots_and_bitmaps_are_converted_as_qemu_does() {
    let bench = Bench::new();
    let mut random = fastrand::Rng::with_seed(31);
    bench.ok("qemu-img create -q -f qcow2 a.qcow2 3M");
    for name in ["first", "2"] {
        bench.qemu_io("-f qcow2 a.qcow2", &operations(&mut random, 3 << 20, 30));
        bench.ok(&format!("qemu-img snapshot -c {name} a.qcow2"));
        bench.ok("qemu-img resize -q -f qcow2 a.qcow2 +512k");
    }
    bench.qemu_io("-f qcow2 a.qcow2", &operations(&mut random, 4 << 20, 30));
    for which in ["first", "1", "2", "snapshot.name=first", "snapshot.id=2,snapshot.name=2"] {
        bench.ok(&format!("ringtap convert -f qcow2 -l {which} a.qcow2 ours.raw"));
        bench.ok(&format!("qemu-img convert -f qcow2 -l {which} -O raw a.qcow2 theirs.raw"));
        // QEMU leaves it as large as the disk is by now, with zeros behind.
        bench.ok("qemu-img compare -f raw -F raw ours.raw theirs.raw");
        assert!(fs::metadata(bench.path("ours.raw")).expect("it").len() < 4 << 20);
    }
    let said = bench.ends("ringtap convert -f qcow2 -l third a.qcow2 none.raw", 1);
    assert!(said.contains("no snapshot \"third\""), "{said}");
    let said = bench.ends("ringtap convert -f raw -l 1 ours.raw none.raw", 2);
    assert!(said.contains("no snapshots"), "{said}");
    let said = bench.ends("ringtap convert -f qcow2 -l 1 a.qcow2 a.qcow2 none.raw", 2);
    assert!(said.contains("one source"), "{said}");
    assert!(!bench.path("none.raw").exists());

    bench.ok("qemu-img create -q -f qcow2 b.qcow2 3M");
    bench.ok("qemu-img bitmap --add -g 4k b.qcow2 on");
    bench.ok("qemu-img bitmap --add b.qcow2 off");
    bench.qemu_io("-f qcow2 b.qcow2", &operations(&mut random, 3 << 20, 30));
    bench.ok("qemu-img bitmap --disable b.qcow2 off");
    bench.ok("ringtap convert -f qcow2 --bitmaps b.qcow2 -c -O qcow2 ours.qcow2");
    bench.ok("qemu-img convert -f qcow2 --bitmaps b.qcow2 -O qcow2 theirs.qcow2");
    bench.same("b.qcow2", "ours.qcow2");
    let of = |name: &str| {
        let facts = bench.json(&format!("qemu-img info --output json {name}"));
        facts["format-specific"]["data"]["bitmaps"].clone()
    };
    assert_eq!(of("ours.qcow2"), of("theirs.qcow2"));
    // The bits: what is merged into a new bitmap from each is the same to the byte.
    for name in ["on", "off"] {
        for image in ["ours", "theirs"] {
            bench.ok(&format!("qemu-img create -q -f qcow2 {image}.bits 3M"));
            bench.ok(&format!("qemu-img bitmap --add -g 4k {image}.bits x"));
            bench.ok(&format!(
                "qemu-img bitmap --merge {name} -F qcow2 -b {image}.qcow2 {image}.bits x"
            ));
        }
        bench.ok("cmp ours.bits theirs.bits");
    }
    let said = bench.ends("ringtap convert -f qcow2 --bitmaps b.qcow2 none.raw", 2);
    assert!(said.contains("no bitmaps"), "{said}");
}

#[test]
fn what_can_be_read_is_saved_and_the_rest_told() {
    let bench = Bench::new();
    fs::write(bench.path("a.raw"), content(1 << 20)).expect("a disk");
    bench.ok("qemu-img convert -f raw -c a.raw -O qcow2 a.qcow2");
    let mut bytes = fs::read(bench.path("a.qcow2")).expect("an image");
    let be64 = |at: u64| {
        let at = at as usize;
        u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
    };
    // A compressed cluster that is none.
    let l2 = be64(be64(40)) & 0x00ff_ffff_ffff_fe00;
    let entry = (0..16).map(|index| be64(l2 + index * 8)).find(|entry| entry >> 62 & 1 == 1);
    let at = entry.expect("a compressed cluster") as usize & 0x003f_ffff_ffff_ffff;
    bytes[at..at + 40].fill(0xff);
    fs::write(bench.path("a.qcow2"), bytes).expect("damage");
    let said = bench.ends("ringtap convert -f qcow2 a.qcow2 ours.raw", 1);
    assert!(said.contains("source failed"), "{said}");
    let said = bench.ok("ringtap convert -f qcow2 --salvage a.qcow2 ours.raw");
    assert!(said.contains("65536 bytes at"), "{said}");
    bench.ok("qemu-img convert -f qcow2 --salvage -q a.qcow2 -O raw theirs.raw");
    bench.ok("cmp ours.raw theirs.raw");
    assert_eq!(bench.ok("ringtap convert -f qcow2 --salvage -q a.qcow2 ours.raw"), "");
}

#[test]
fn options_typed_for_qemu_img_work_or_say_what_to_write() {
    let bench = Bench::new();
    fs::write(bench.path("a.raw"), content(3 << 20)).expect("a disk");
    bench.ok("ringtap convert -q -f raw -T none -t none -m 8 -W -C -S 64k a.raw -O qcow2 b.qcow2");
    bench.same("a.raw", "b.qcow2");
    let said = bench.ok("ringtap convert -p -U -f qcow2 b.qcow2 -O raw c.raw");
    assert!(said.contains("(100.00/100%)"), "{said}");
    bench.ok("cmp a.raw c.raw");
    bench.ok("ringtap convert -f raw -r 8M -S 0 a.raw d.raw");
    bench.ok("cmp a.raw d.raw");
    for (line, wanted) in [
        ("ringtap convert --object secret,id=s a.raw b.raw", "file=PATH"),
        ("ringtap convert --image-opts driver=raw b.raw", "file.filename=PATH"),
        ("ringtap info --object secret,id=s a.raw", "file=PATH"),
    ] {
        let said = bench.ends(line, 2);
        assert!(said.contains(wanted), "{line}: {said}");
    }
}

#[test]
fn what_cannot_get_bitmaps_is_not_written() {
    let bench = Bench::new();
    bench.ok("qemu-img create -q -f qcow2 a.qcow2 3M");
    bench.qemu_io("-f qcow2 a.qcow2", &["write -q -P 1 0 3M".into()]);
    bench.ok("qemu-img bitmap --add a.qcow2 b");
    for (options, size, wanted) in [
        ("", "4M", "its disk has 4194304 bytes"),
        ("", "3M", "a bitmap \"b\" already"),
        ("-o compat=0.10", "3M", "version 2 has none"),
    ] {
        bench.ok(&format!("qemu-img create -q -f qcow2 {options} there.qcow2 {size}"));
        bench.qemu_io("-f qcow2 there.qcow2", &["write -q -P 3 0 3M".into()]);
        if size == "3M" && options.is_empty() {
            bench.ok("qemu-img bitmap --add there.qcow2 b");
        }
        let before = fs::read(bench.path("there.qcow2")).expect("read");
        let line = "ringtap convert -n --bitmaps -f qcow2 -O qcow2 a.qcow2 there.qcow2";
        let said = bench.ends(line, 1);
        assert!(said.contains(wanted), "{said}");
        assert!(fs::read(bench.path("there.qcow2")).expect("read") == before, "{wanted}");
        bench.ok("ringtap info there.qcow2");
    }
    // One that is made of another size is not there afterwards.
    let said =
        bench.ends("ringtap convert --bitmaps -f qcow2 -O qcow2 -o size=4M a.qcow2 new.qcow2", 1);
    assert!(said.contains("its disk has 4194304 bytes"), "{said}");
    assert!(!bench.path("new.qcow2").exists());
}

#[test]
fn what_is_compressed_is_noted_in_bitmaps() {
    let bench = Bench::new();
    fs::write(bench.path("a.raw"), content(3 << 20)).expect("a disk");
    for (image, program) in [("ours", "ringtap"), ("theirs", "qemu-img")] {
        for name in [image, "bits"] {
            bench.ok(&format!("qemu-img create -q -f qcow2 {name}.qcow2 4M"));
            bench.ok(&format!("qemu-img bitmap --add -g 64k {name}.qcow2 b"));
        }
        let options = "-q -n --target-is-zero -f raw -c a.raw -O qcow2";
        bench.ok(&format!("{program} convert {options} {image}.qcow2"));
        bench.ok(&format!("qemu-img bitmap --merge b -F qcow2 -b {image}.qcow2 bits.qcow2 b"));
        fs::rename(bench.path("bits.qcow2"), bench.path(image)).expect("renamed");
    }
    bench.ok("cmp ours theirs");
}

/// On a terminal of its own, by util-linux's `script`; what it shows there.
fn on_a_terminal(bench: &Bench, line: &str) -> String {
    let line = line.replacen("ringtap", env!("CARGO_BIN_EXE_ringtap"), 1);
    let mut script = Command::new("timeout");
    script.args(["60", "script", "-qec", &line, "/dev/null"]).current_dir(bench.path(""));
    let output = script.stdin(Stdio::null()).output().expect("timeout of coreutils");
    assert!(output.status.success(), "{line}: {output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn a_terminal_is_told_of_progress_and_a_file_only_where_asked() {
    let bench = Bench::new();
    fs::write(bench.path("a.raw"), content(6 << 20)).expect("a disk");
    // Slow enough that a terminal is told.
    let slow = "ringtap convert -f raw -r 2M a.raw -O raw";
    std::thread::scope(|all| {
        let told = all.spawn(|| on_a_terminal(&bench, &format!("{slow} b.raw")));
        let file = all.spawn(|| bench.ok(&format!("{slow} c.raw")));
        let quiet = all.spawn(|| on_a_terminal(&bench, &format!("{slow} -q d.raw")));
        let told = told.join().expect("told");
        assert!(told.contains("100 %") && told.contains(" left"), "{told:?}");
        assert_eq!(file.join().expect("ended"), "");
        assert_eq!(quiet.join().expect("ended"), "");
    });
    let same = "ringtap compare -f raw -F raw a.raw b.raw";
    assert_eq!(bench.ok(same), "Images are identical.\n");
    assert!(bench.ok(&format!("{same} -p")).contains("    (100.00/100%)"));
    let told = on_a_terminal(&bench, &format!("{same} -p"));
    assert!(told.contains("    (100.00/100%)"), "{told:?}");
}

/// What takes longer than two seconds has a bar on a terminal, or the time that has passed; unless it is to be quiet.
#[test]
fn what_takes_long_is_drawn_on_a_terminal() {
    let bench = Bench::new();
    fs::write(bench.path("a.raw"), content(6 << 20)).expect("a disk");
    fs::write(bench.path("secret"), "hunter2").expect("a secret");
    bench.ok("qemu-img create -q -f qcow2 -b a.raw -F raw top.qcow2");
    bench.qemu_io("-f qcow2 top.qcow2", &["write -q -P 5 0 6M".to_owned()]);
    std::thread::scope(|all| {
        let lines = [
            ("ringtap commit -f qcow2 -r 2M top.qcow2", "100 %"),
            ("ringtap create -q -f luks --secret file:secret -o iter-time=3000 new 1M", ""),
            ("ringtap create -f luks --secret file:secret -o iter-time=3000 new2 1M", "2s"),
        ];
        let bench = &bench;
        let told = lines
            .map(|(line, wanted)| (line, wanted, all.spawn(move || on_a_terminal(bench, line))));
        for (line, wanted, told) in told {
            let told = told.join().expect("told");
            // A bar is drawn over and over.
            let drawn = told.matches('\r').count() > 1 && told.contains('\u{1b}');
            assert_eq!(drawn, !wanted.is_empty(), "{line}: {told:?}");
            assert!(told.contains(wanted), "{line}: {told:?}");
        }
    });
}

#[test]
fn holes_stay_zeros_over_an_external_data_file_that_was_there() {
    let bench = Bench::new();
    bench.ok("qemu-img create -q -f raw a.raw 3M");
    bench.qemu_io("-f raw a.raw", &["write -q -P 5 1M 64k".to_owned()]);
    for more in ["data_file_raw=on", "preallocation=metadata", "preallocation=off"] {
        std::fs::write(bench.path("data"), vec![7; 3 << 20]).expect("a file");
        let _ = std::fs::remove_file(bench.path("a.qcow2"));
        bench
            .ok(&format!("ringtap convert -f raw -O qcow2 -o data_file=data,{more} a.raw a.qcow2"));
        bench.same("-f raw -F qcow2 a.raw", "a.qcow2");
    }
}
