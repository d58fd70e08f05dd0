//! LUKS containers of cryptsetup and QEMU in Ringtap, and Ringtap's in theirs. None of it takes
//! device-mapper: cryptsetup formats, dumps, tests passphrases and enciphers plain files by itself.

mod qcow2;
mod tools;

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::time::Duration;

use ringtap_image::luks::{CreateOptions, Derivation, Effort, Hash, Version};
use ringtap_image::{CacheMode, OpenOptions, Secret};
use ringtap_vbd::Kind;

use tools::{Bench, cached, good, limited, make};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 256 << 10;
const QUICK: Effort = Effort::Exactly { iterations: 4, memory: 64, cpus: 2 };
const PBKDF2: [&str; 4] = ["--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000"];
const ARGON2: [&str; 6] =
    ["--pbkdf-force-iterations", "4", "--pbkdf-memory", "64", "--pbkdf-parallel", "2"];

/// What cryptsetup made, with its payload's offset and sector size, is read and written by Ringtap
/// and read by Python.
fn cryptsetup_makes_it(options: &[&str], offset: u64, sector: u64, cache: CacheMode) {
    let bench = Bench::new();
    bench.empty_disk(offset + SIZE);
    bench.luks_format(options);
    let opened = bench.open(cached(cache, bench.options())).expect("opened");
    assert_eq!(opened.vbd.size(), SIZE, "{options:?}");
    assert_eq!(u64::from(opened.vbd.info().logical_block_size), sector.max(512), "{options:?}");
    let model = opened.scribble(offset ^ sector);
    assert!(opened.read_all() == model, "{options:?}: Ringtap reads what it wrote");
    drop(opened);
    assert!(bench.by_python(offset, sector) == model, "{options:?}: Python reads it");
    if options.contains(&"luks1") {
        assert!(bench.by_qemu() == model, "{options:?}: QEMU reads it");
    }
}

#[test]
fn luks1_of_cryptsetup() {
    for (hash, bits, offset) in [("sha1", "256", 2 * MIB), ("sha512", "512", 2 * MIB)] {
        let mut options = vec!["--type", "luks1", "--hash", hash, "--key-size", bits];
        options.extend(["--pbkdf-force-iterations", "1000"]);
        for cache in [CacheMode::None, CacheMode::Writeback] {
            cryptsetup_makes_it(&options, offset, 512, cache);
        }
    }
}

#[test]
fn luks2_of_cryptsetup_with_each_sector_size() {
    for (sector, bits, cache) in [
        ("512", "512", CacheMode::None),
        ("1024", "256", CacheMode::Writeback),
        ("2048", "512", CacheMode::None),
        ("4096", "512", CacheMode::Writeback),
    ] {
        let mut options = vec!["--type", "luks2", "--sector-size", sector, "--key-size", bits];
        options.extend(PBKDF2);
        options.extend(["--hash", "sha512"]);
        cryptsetup_makes_it(&options, 16 * MIB, sector.parse().expect("a size"), cache);
    }
}

#[test]
fn luks2_of_cryptsetup_with_argon2() {
    for kind in ["argon2i", "argon2id"] {
        let mut options = vec!["--type", "luks2", "--sector-size", "512", "--pbkdf", kind];
        options.extend(ARGON2);
        cryptsetup_makes_it(&options, 16 * MIB, 512, CacheMode::None);
    }
}

/// The payload begins inside a block of 4096 bytes, which O_DIRECT may not reach.
#[test]
fn a_payload_at_an_odd_place() {
    let options =
        ["--type", "luks1", "--align-payload", "4041", "--pbkdf-force-iterations", "1000"];
    for cache in [CacheMode::None, CacheMode::DirectSync] {
        cryptsetup_makes_it(&options, 4041 * 512, 512, cache);
    }
}

/// cryptsetup enciphers a plain disk itself; Ringtap must read what was there.
#[test]
fn what_cryptsetup_enciphered_reads_as_before() {
    for sector in ["512", "4096"] {
        let bench = Bench::new();
        let mut rng = fastrand::Rng::with_seed(7);
        let mut plain = vec![0; 40 << 20];
        rng.fill(&mut plain[..8 << 20]);
        fs::write(&bench.disk, &plain).expect("a disk");
        let mut options = vec!["--encrypt", "--type", "luks2", "--reduce-device-size", "32M"];
        options.extend(["--sector-size", sector]);
        options.extend(PBKDF2);
        good(&bench.cryptsetup(&["reencrypt"], &options), "reencrypt --encrypt");
        let opened = bench.open(bench.options()).expect("opened");
        assert!(opened.read(0, 8 << 20) == plain[..8 << 20], "sectors of {sector}");
    }
}

#[test]
fn ours_opens_in_cryptsetup() {
    for (version, sector_size, derivation, hash, key_bits) in [
        (Version::Luks1, 512, None, Hash::Sha256, 512),
        (Version::Luks1, 512, None, Hash::Sha1, 256),
        (Version::Luks2, 512, Some(Derivation::Argon2id), Hash::Sha256, 512),
        (Version::Luks2, 4096, Some(Derivation::Pbkdf2), Hash::Sha512, 512),
        (Version::Luks2, 2048, Some(Derivation::Argon2id), Hash::Sha256, 256),
    ] {
        let bench = Bench::new();
        let label = if version == Version::Luks2 { "ringtap's" } else { "" }.to_owned();
        let options = CreateOptions {
            version,
            key_bits,
            sector_size,
            hash,
            derivation,
            effort: QUICK,
            label,
        };
        let shown = format!("{options:?}");
        bench.create(SIZE, options.clone());
        let dump = limited("cryptsetup").arg("luksDump").arg(&bench.disk).output().expect("runs");
        good(&dump, &shown);
        let dump = String::from_utf8_lossy(&dump.stdout).into_owned();
        let number = if version == Version::Luks1 { "1" } else { "2" };
        assert!(dump.contains(&format!("Version:       \t{number}")), "{shown}: {dump}");
        assert!(dump.contains(&options.label), "{shown}: {dump}");
        let test = ["open", "--test-passphrase"];
        good(&bench.cryptsetup(&test, &[]), &shown);
        let opened = bench.open(bench.options()).expect(&shown);
        let model = opened.scribble(key_bits.into());
        drop(opened);
        let offset = if version == Version::Luks1 { 2 * MIB } else { 16 * MIB };
        assert!(bench.by_python(offset, sector_size.into()) == model, "{shown}");
        if version == Version::Luks1 {
            assert!(bench.by_qemu() == model, "{shown}");
        }
        fs::write(&bench.key, "another").expect("a key file");
        assert!(!bench.cryptsetup(&test, &[]).status.success(), "{shown}: any secret opens it");
    }
}

/// The header is one that cryptsetup can work on: a second keyslot opens, the first one goes.
#[test]
fn keyslots_that_cryptsetup_adds_and_kills() {
    for version in [Version::Luks1, Version::Luks2] {
        let bench = Bench::new();
        bench.create(SIZE, CreateOptions { version, effort: QUICK, ..CreateOptions::default() });
        let model = bench.open(bench.options()).expect("opened").scribble(1);
        let second = bench.path("second");
        fs::write(&second, "the second\n").expect("a key file");
        let mut add = limited("cryptsetup");
        add.args(["luksAddKey", "-q", "--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000"]);
        add.arg("--key-file").arg(&bench.key).arg(&bench.disk).arg(&second);
        good(&add.output().expect("runs"), "luksAddKey");
        let with = |secret: &str| OpenOptions {
            secret: Some(Secret::new(secret.as_bytes()).expect("memory")),
            ..bench.options()
        };
        let opened = bench.open(with("the second\n")).expect("the second slot");
        assert!(opened.read_all() == model);
        drop(opened);
        let error = bench.open(with("neither\n")).err().expect("refused").to_string();
        assert!(error.contains("none of the 2 keyslots") && error.contains("newline"), "{error}");
        let mut kill = limited("cryptsetup");
        kill.args(["luksKillSlot", "-q", "--key-file"]).arg(&second).arg(&bench.disk).arg("0");
        good(&kill.output().expect("runs"), "luksKillSlot");
        assert!(bench.open(bench.options()).is_err(), "the first slot is gone");
        assert!(bench.open(with("the second\n")).expect("opened").read_all() == model);
    }
}

#[test]
fn luks_of_qemu() {
    for (bits, hash) in [("aes-256", "sha256"), ("aes-128", "sha1")] {
        let bench = Bench::new();
        let mut create = limited("qemu-img");
        create.args(["create", "-q", "-f", "luks", "--object"]).arg(bench.qemu_secret());
        let cipher = format!("key-secret=s,iter-time=1,cipher-alg={bits},hash-alg={hash}");
        create.args(["-o", &cipher]).arg(&bench.disk).arg("1M");
        make(&mut create);
        bench.qemu_io("write -P 0x5a 4k 100k");
        bench.qemu_io("write -P 0 512 1536");
        let opened = bench.open(bench.options()).expect("opened");
        assert_eq!(opened.vbd.size(), MIB);
        assert!(opened.read(4096, 100 << 10).iter().all(|byte| *byte == 0x5a));
        assert!(opened.read(512, 1536).iter().all(|byte| *byte == 0));
        let model = opened.scribble(3);
        opened.write(512, &[0xa5; 1024]);
        drop(opened);
        bench.qemu_io("read -P 0xa5 512 1k");
        let seen = bench.by_qemu();
        assert!(seen[..512] == model[..512] && seen[1536..] == model[1536..]);
    }
}

#[test]
fn a_damaged_copy_is_made_up_for_by_the_other() {
    let bench = Bench::new();
    bench.create(SIZE, CreateOptions { effort: QUICK, ..CreateOptions::default() });
    let model = bench.open(bench.options()).expect("opened").scribble(2);
    let file = fs::File::options().write(true).open(&bench.disk).expect("the disk");
    let damage = |at: u64| file.write_all_at(&[0xff; 16], at).expect("written");
    let before = fs::read(&bench.disk).expect("the disk");
    // In the JSON, in the binary part, the magic itself; of the first copy, then of the second.
    for copy in [0, 0x4000] {
        for at in [0x1010, 0x100, 0] {
            damage(copy + at);
            assert!(bench.open(bench.options()).expect("opened").read_all() == model, "{at}");
            file.write_all_at(&before, 0).expect("restored");
        }
    }
    damage(0x1010);
    damage(0x5010);
    let error = bench.open(bench.options()).err().expect("refused").to_string();
    assert!(error.contains("neither copy") && error.contains("checksum"), "{error}");
    // The copy with the larger number counts, though both are whole: cryptsetup writes one after the
    // other.
    file.write_all_at(&before, 0).expect("restored");
    let another = bench.path("another");
    fs::write(&another, "another").expect("a key file");
    let mut change = limited("cryptsetup");
    change.args(["luksChangeKey", "-q"]).args(PBKDF2).arg("--key-file").arg(&bench.key);
    good(&change.arg(&bench.disk).arg(&another).output().expect("runs"), "luksChangeKey");
    file.write_all_at(&before[..0x4000], 0).expect("the old first copy");
    let secret = Some(Secret::new(b"another").expect("memory"));
    let new = OpenOptions { secret, ..bench.options() };
    assert!(bench.open(new).expect("opened by the second copy").read_all() == model);
    assert!(bench.open(bench.options()).is_err(), "the old secret opens nothing");
}

#[test]
fn discards_pass_only_where_asked() {
    for allow_discards in [false, true] {
        let bench = Bench::new();
        bench.create(4 * MIB, CreateOptions { effort: QUICK, ..CreateOptions::default() });
        let opened = bench.open(OpenOptions { allow_discards, ..bench.options() }).expect("opened");
        opened.write(0, &vec![7; 4 << 20]);
        opened.ask(Kind::Flush, 0, 0).expect("a flush");
        let blocks = || fs::metadata(&bench.disk).expect("facts").blocks();
        let before = blocks();
        opened.ask(Kind::Discard, MIB, 2 * MIB).expect("a discard");
        let freed = (before - blocks()) * 512;
        assert_eq!(freed > MIB, allow_discards, "{freed} bytes freed");
        assert!(opened.read(0, 1 << 20).iter().all(|byte| *byte == 7));
        let kept = opened.read(MIB, 1 << 20).iter().all(|byte| *byte == 7);
        assert_eq!(kept, !allow_discards);
        let zero = Kind::WriteZeroes { unmap: true, fast: true };
        assert!(opened.ask(zero, 0, MIB).is_err(), "zeros take writing");
    }
}

#[test]
fn no_secret_no_disk() {
    let bench = Bench::new();
    bench.create(SIZE, CreateOptions { effort: QUICK, ..CreateOptions::default() });
    let none = OpenOptions { secret: None, ..bench.options() };
    let error = bench.open(none).err().expect("refused").to_string();
    assert!(error.contains("--secret") && error.contains("disk"), "{error}");
}

/// The default effort is what takes cryptsetup's two seconds; here less is asked, by time.
#[test]
fn effort_by_time_opens_in_cryptsetup() {
    let bench = Bench::new();
    let effort = Effort::Time(Duration::from_millis(50));
    bench.create(SIZE, CreateOptions { effort, ..CreateOptions::default() });
    good(&bench.cryptsetup(&["open", "--test-passphrase"], &[]), "--test-passphrase");
}
