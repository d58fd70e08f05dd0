//! What a killed server left, and the verbs of images at rest: those that read show it, those that change the image
//! have it take that up first, and what is dropped is said.

use std::fs;

use ringtap_tests::plain;

use crate::{Back, Case, Client, Format, put_back};

/// Every verb says what waits: those that read show it, the others end with an error.
#[test]
fn every_verb_tells_the_truth() {
    let within = tempfile::tempdir().expect("a folder");
    for format in [Format::Overlay, Format::Vpc] {
        let mut case = Case::new(within.path(), format, "writeback");
        case.killed(true, false, &["cp", "-p"]);
        let (image, name) = (case.image(), format.name());
        let info = case.ringtap(&["info", "-f", name, "--output", "json", plain(&image)]);
        let facts: serde_json::Value = serde_json::from_slice(&info.stdout).expect("JSON");
        assert_eq!(facts["restart-log"]["state"], "waiting", "{facts}");
        assert!(facts["restart-log"]["changes"].as_u64() > Some(0), "{facts}");
        for share in [&[][..], &["-U"]] {
            let check = [&["check", "-f", name, plain(&image)][..], share].concat();
            let check = case.ringtap(&check);
            assert_eq!(check.status.code(), Some(1), "{check:?}");
            let said = String::from_utf8_lossy(&check.stderr);
            assert!(said.contains("--restart-log use"), "{check:?}");
        }
        // Of a copy that is read elsewhere nobody would know that something is missing.
        let shown = case.path("shown");
        fs::create_dir(&shown).expect("a folder");
        let published = case.ringtap(&["publish", "-q", plain(&image), plain(&shown)]);
        assert_eq!(published.status.code(), Some(1), "{published:?}");
        let said = String::from_utf8_lossy(&published.stderr);
        assert!(said.contains("which the image does not have yet"), "{published:?}");
        assert_eq!(fs::read_dir(&shown).expect("a folder").count(), 0);
        let map = case.ringtap(&["map", "-f", name, "--output", "json", plain(&image)]);
        let map: serde_json::Value = serde_json::from_slice(&map.stdout).expect("JSON");
        let data: u64 = map
            .as_array()
            .expect("a list")
            .iter()
            .filter(|part| part["depth"] == 0)
            .filter(|part| part["data"] == true)
            .filter_map(|part| part["length"].as_u64())
            .sum();
        assert!(data >= 14 << 16, "{map}");
        let used = case.ringtap(&["check", "-f", name, "--restart-log", "use", plain(&image)]);
        assert!(matches!(used.status.code(), Some(0 | 3)), "{used:?}");
        assert!(case.by_qemu(&image) == case.disk, "what was taken up is in the image");
    }
}

/// They show the disk as its guest knows it, and leave image and log as they are.
#[test]
fn verbs_that_read_show_what_waits() {
    let within = tempfile::tempdir().expect("a folder");
    for format in [Format::Overlay, Format::Version2, Format::Vpc] {
        let mut case = Case::new(within.path(), format, "writeback");
        case.killed(true, false, &["cp", "-p"]);
        let (image, name) = (case.image(), format.name());
        let (expected, to) = (case.path("expected"), case.path("dd"));
        fs::write(&expected, &case.disk).expect("a file");
        for share in [&[][..], &["-U"]] {
            let compare = ["compare", "-f", name, "-F", "raw", plain(&image), plain(&expected)];
            let compared = case.ringtap(&[&compare[..], share].concat());
            assert!(compared.status.success(), "{format:?} {share:?}: {compared:?}");
            let (from, into) = (format!("if={}", plain(&image)), format!("of={}", plain(&to)));
            let dd = ["dd", "-f", name, "-O", "raw", "bs=64k", &from, &into];
            let copied = case.ringtap(&[&dd[..], share].concat());
            assert!(copied.status.success(), "{format:?} {share:?}: {copied:?}");
            assert!(copied.stderr.is_empty(), "{format:?} {share:?}: {copied:?}");
            assert!(fs::read(&to).expect("a file") == case.disk, "{format:?} {share:?}: dd");
        }
        let measure = |path: &str| {
            let words = ["measure", "-f", name, "-O", "qcow2", "--output", "json", path];
            let end = case.ringtap(&words);
            assert!(end.status.success(), "{format:?}: {end:?}");
            end.stdout
        };
        let waiting = measure(plain(&image));
        if format != Format::Overlay {
            assert_ne!(waiting, measure(plain(&case.path("copy"))), "{format:?}");
        }
        let used = case.ringtap(&["check", "-f", name, "--restart-log", "use", plain(&image)]);
        assert!(matches!(used.status.code(), Some(0 | 3)), "{format:?}: {used:?}");
        assert_eq!(waiting, measure(plain(&image)), "{format:?}");
        assert!(case.by_qemu(&image) == case.disk, "{format:?}: what was taken up is in the image");
    }
}

/// The changed image is newer than what the log was noted for.
#[test]
fn verbs_that_change_an_image_take_up_what_waits() {
    let within = tempfile::tempdir().expect("a folder");
    for (format, verb) in [
        (Format::Overlay, "snapshot -c s -f qcow2 image"),
        (Format::Version2, "snapshot -c s -f qcow2 image"),
        (Format::Overlay, "bitmap --add -f qcow2 image b"),
        (Format::Overlay, "amend -f qcow2 -o lazy_refcounts=on image"),
        (Format::Version2, "amend -f qcow2 -o compat=1.1 image"),
        (Format::Overlay, "rebase -u -f qcow2 -b below -F raw image"),
        (Format::Overlay, "rebase -f qcow2 --backing= image"),
        (Format::Overlay, "commit -f qcow2 image"),
        (Format::Overlay, "resize -f qcow2 image 5M"),
        (Format::Version2, "resize -f qcow2 image 5M"),
        (Format::Vpc, "resize -f vpc image 5M"),
    ] {
        let mut case = Case::new(within.path(), format, "writeback");
        case.killed(true, false, &["cp", "-p"]);
        let (image, below) = (case.image(), case.path("below"));
        let words: Vec<&str> = verb
            .split(' ')
            .map(|word| match word {
                "image" => plain(&image),
                "below" => plain(&below),
                word => word,
            })
            .collect();
        let end = case.ringtap(&words);
        assert!(end.status.success(), "{format:?}, {verb}: {end:?}");
        assert!(
            case.by_qemu(&image)[..case.disk.len()] == case.disk,
            "{format:?}, {verb}: {end:?}"
        );
    }
}

#[test]
fn a_commit_takes_up_what_waits_for_a_vhd() {
    let within = tempfile::tempdir().expect("a folder");
    let mut case = Case::new(within.path(), Format::Differencing, "writeback");
    case.killed(true, false, &["cp", "-p"]);
    let end = case.ringtap(&["commit", "-f", "vpc", "-d", plain(&case.image())]);
    assert!(end.status.success(), "{end:?}");
    assert!(case.by_qemu(&case.path("below")) == case.disk, "{end:?}");
}

#[test]
fn a_commit_takes_up_what_waits_for_an_image_between() {
    let within = tempfile::tempdir().expect("a folder");
    for format in [Format::Overlay, Format::Differencing] {
        let mut case = Case::new(within.path(), format, "writeback");
        case.killed(true, false, &["cp", "-p"]);
        let (image, below, top) = (case.image(), case.path("below"), case.path("top"));
        let name = format.name();
        let create = ["create", "-q", "-f", name, "-b", plain(&image), "-F", name, plain(&top)];
        let created = case.ringtap(&create);
        assert!(created.status.success(), "{format:?}: {created:?}");
        let end = case.ringtap(&["commit", "-f", name, "-b", plain(&below), plain(&top)]);
        assert!(end.status.success(), "{format:?}: {end:?}");
        let found = match format {
            Format::Overlay => fs::read(&below).expect("a file"),
            _ => case.by_qemu(&below),
        };
        assert!(found == case.disk, "{format:?}: {end:?}");
    }
}

#[test]
fn what_is_not_used_of_a_log_is_said() {
    let within = tempfile::tempdir().expect("a folder");
    for format in [Format::Overlay, Format::Version2, Format::Vpc] {
        let mut case = Case::new(within.path(), format, "writeback");
        case.killed(false, false, &["cp", "-p"]);
        put_back(&case, Back::Shell("cp -p copy image"));
        let (image, raw) = (case.image(), case.path("raw"));
        let convert = ["convert", "-f", format.name(), "-O", "raw", plain(&image), plain(&raw)];
        let end = case.ringtap(&convert);
        let said = String::from_utf8_lossy(&end.stderr);
        assert!(end.status.success(), "{format:?}: {said}");
        assert!(said.contains("not used, of what a killed process left"), "{format:?}: {said}");
        assert!(fs::read(&raw).expect("a file") == case.by_qemu(&image), "{format:?}: {said}");
        let check = case.ringtap(&["check", "-f", format.name(), plain(&image)]);
        let said = String::from_utf8_lossy(&check.stderr);
        assert!(said.contains("not used"), "{format:?}: {check:?}");
        let (image, name) = (plain(&image), format.name());
        for words in [
            ["map", "-f", name, image].as_slice(),
            &["measure", "-f", name, "-O", "raw", image],
            &["compare", "-f", name, "-F", "raw", image, plain(&raw)],
            &[
                "dd",
                "-f",
                name,
                "-O",
                "raw",
                &format!("if={image}"),
                &format!("of={}", plain(&case.path("dd"))),
            ],
            &["bench", "-f", name, "-c", "1", image],
        ] {
            let end = case.ringtap(words);
            let said = String::from_utf8_lossy(&end.stderr);
            assert!(said.contains("not used"), "{format:?}, {words:?}: {end:?}");
        }
    }
}

/// With `-U` nobody is kept off, and it is said who is there.
#[test]
fn who_looks_at_an_image_that_is_served_is_told() {
    let within = tempfile::tempdir().expect("a folder");
    for format in [Format::Overlay, Format::Vpc] {
        let mut case = Case::new(within.path(), format, "writeback");
        let server = case.serve(&[]);
        let client = &mut Client::start(&case.socket());
        case.write(client, 0..4, 0xa1, false);
        let (image, raw) = (case.image(), case.path("raw"));
        let info = case.ringtap(&["info", "-U", plain(&image)]);
        let said = String::from_utf8_lossy(&info.stdout);
        assert!(said.contains("has it open for writing"), "{format:?}: {info:?}");
        assert!(info.stderr.is_empty(), "{format:?}: {info:?}");
        let convert =
            ["convert", "-U", "-f", format.name(), "-O", "raw", plain(&image), plain(&raw)];
        let end = case.ringtap(&convert);
        let said = String::from_utf8_lossy(&end.stderr);
        assert!(end.status.success() && said.contains("writes to it"), "{format:?}: {end:?}");
        case.kill(server);
    }
}

/// `use` decides where it cannot be told, and not against what the image itself says.
#[test]
fn what_is_known_to_be_of_another_image_is_never_taken_up() {
    let within = tempfile::tempdir().expect("a folder");
    let mut case = Case::new(within.path(), Format::Overlay, "writeback");
    case.killed(true, false, &["cp", "-p"]);
    let image = case.image();
    let size = case.path("copy");
    ringtap_tests::ok("cp", "coreutils", &[plain(&size), plain(&image)]);
    let write = ["-f", "qcow2", "-c", "write -P 7 0 64k", plain(&image)];
    ringtap_tests::ok("qemu-io", "qemu-utils", &write);
    let before = fs::read(&image).expect("the image");
    let used = case.ringtap(&["check", "-f", "qcow2", "--restart-log", "use", plain(&image)]);
    let said = String::from_utf8_lossy(&used.stderr);
    assert_eq!(used.status.code(), Some(1), "{said} {used:?}");
    assert!(said.contains("decides only where that cannot be told"), "{said}");
    assert!(fs::read(&image).expect("the image") == before);
    let dropped = case.ringtap(&["check", "-f", "qcow2", "--restart-log", "drop", plain(&image)]);
    assert_eq!(dropped.status.code(), Some(0), "{dropped:?}");
}
