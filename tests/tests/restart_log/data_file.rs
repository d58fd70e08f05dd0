//! Images whose guest data lies in an external file: what a killed server left is taken up only if that file,
//! too, is as the server left it.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use ringtap_tests::{ok, plain};

use crate::{Case, Client, Format, file_system, tick, warnings};

/// Words that an older server's log lacks behind the records: it had no witness of data files, and no path of its image.
const LACKS: u64 = 16 + 1 + 4096 / 8;
/// Where the generation of the image is in a log, and that which is being written.
const GENERATION: [u64; 2] = [5, 6];
/// Where the image has it, in eight bytes with other bits.
const IN_HEADER: u64 = 88;
const ITS_BITS: u64 = 0x1ff_ffff << 8;

/// Written to, with a copy of the data file taken in between, and killed.
fn killed(within: &Path) -> Case {
    killed_with(within, &[])
}

fn killed_with(within: &Path, options: &[&str]) -> Case {
    let mut case = Case::new(within, Format::DataFile, "writeback");
    let server = case.serve(options);
    let client = &mut Client::start(&case.socket());
    case.write(client, 0..4, 0xa1, true);
    shell(&case, "cp -p data kept");
    tick();
    case.write(client, 2..10, 0xb2, false);
    case.kill(server);
    case
}

fn shell(case: &Case, script: &str) {
    ok("sh", "", &["-ec", &format!("cd {}; {script}", plain(case.folder.path()))]);
}

/// No verb takes the log up without being told to, and `info` says why.
fn is_refused(case: &Case, options: &[&str], context: &str) {
    let (image, raw) = (case.image(), case.path("raw"));
    let socket = format!("unix:{}", plain(&case.socket()));
    let image = plain(&image);
    for words in [
        ["convert", "-f", "qcow2", "-O", "raw", image, plain(&raw)].as_slice(),
        &["map", "-f", "qcow2", image],
        &["check", "-f", "qcow2", image],
        &["check", "-f", "qcow2", "--repair", "all", image],
        &["resize", "-f", "qcow2", image, "8M"],
        &["serve", image, "-f", "qcow2", "--nbd", &socket],
    ] {
        let end = case.ringtap(&[options, words].concat());
        let said = String::from_utf8_lossy(&end.stderr);
        assert_eq!(end.status.code(), Some(1), "{context}, {words:?}: {said}");
        assert!(said.contains("--restart-log use"), "{context}, {words:?}: {said}");
        assert!(said.contains("of its data file"), "{context}, {words:?}: {said}");
    }
    let (state, why) = told(case, options);
    assert_eq!(state, "in-doubt", "{context}");
    assert!(why.contains("of its data file"), "{context}: {why}");
}

/// What `info` says of what waits.
fn told(case: &Case, options: &[&str]) -> (String, String) {
    let image = case.image();
    let info = ["info", "-f", "qcow2", "--output", "json", plain(&image)];
    let info = case.ringtap(&[options, &info].concat());
    assert!(info.status.success(), "{info:?}");
    let facts: serde_json::Value = serde_json::from_slice(&info.stdout).expect("JSON");
    let log = &facts["restart-log"];
    assert!(log["changes"].as_u64() > Some(0), "{facts}");
    let text = |name: &str| log[name].as_str().unwrap_or_default().to_owned();
    (text("state"), text("why"))
}

/// Ways of putting the copy in the data file's place, or of writing to it.
const WAYS: [&str; 7] = [
    "cp kept data",
    "cp -p kept data",
    "rsync --inplace --no-whole-file -I kept data",
    "rsync --inplace --no-whole-file -I -t kept data",
    "mv kept data",
    "cp -p kept other && mv other data",
    "printf x | dd of=data conv=notrunc status=none",
];

fn on(kind: &str) {
    let set_up = file_system(kind);
    let within = set_up.folder();
    for script in WAYS {
        let case = killed(within);
        shell(&case, script);
        is_refused(&case, &[], &format!("{kind}, {script}"));
    }
    the_operator_decides(within, kind);
    for script in ["true", "sleep 1.2", "chmod 600 data", "ln data link", "cat data > backup"] {
        let case = killed(within);
        shell(&case, script);
        is_taken_up(&case, &format!("{kind}, {script}"));
    }
}

/// The operator has the last word.
fn the_operator_decides(within: &Path, kind: &str) {
    for choice in ["use", "drop"] {
        let case = killed(within);
        shell(&case, WAYS[0]);
        let (found, said) = case.read(case.serve(&["--restart-log", choice]));
        let context = format!("{kind}, {choice}: {said}");
        assert!(found[..2 << 16].iter().all(|byte| *byte == 0xa1), "{context}");
        assert_eq!(said.contains("taking up"), choice == "use", "{context}");
    }
}

/// Who reads sees it, and who writes takes it up, without a word of warning.
fn is_taken_up(case: &Case, context: &str) {
    assert_eq!(told(case, &[]).0, "waiting", "{context}");
    let (image, raw) = (case.image(), case.path("raw"));
    let convert = ["convert", "-f", "qcow2", "-O", "raw", plain(&image), plain(&raw)];
    let end = case.ringtap(&convert);
    assert!(end.status.success(), "{context}: {end:?}");
    assert!(fs::read(&raw).expect("a file") == case.disk, "{context}: {end:?}");
    let (found, said) = case.read(case.serve(&[]));
    assert!(found == case.disk, "{context}: {said}");
    assert!(said.contains("taking up"), "{context}: {said}");
    assert!(warnings(&said).is_empty(), "{context}: {said}");
}

/// What `info` says of image and data file as they are: one that it may not look at, or that is gone, is told, and
/// an image that is another decides alone.
#[test]
fn info_tells_of_both() {
    let within = tempfile::tempdir_in("/var/tmp").expect("a folder");
    for (script, state, words) in [
        ("true", "waiting", ""),
        ("mv data away", "in-doubt", "its data file cannot be looked at"),
        ("mkfifo pipe; mv pipe data", "in-doubt", "its data file cannot be looked at"),
        ("mkdir other; mv data other; ln -s other/data data", "waiting", ""),
        (
            "cp kept data; printf x | dd of=image bs=1 seek=3M status=none",
            "void",
            "by something else",
        ),
    ] {
        let case = killed(within.path());
        shell(&case, script);
        let (found, why) = told(&case, &[]);
        assert_eq!(found, state, "{script}: {why}");
        assert!(why.contains(words), "{script}: {why}");
    }
}

/// Have the log that a killed server left there be one of an older server: without words of the data file, or
/// with those of a newer server before it, which it leaves as they are, with a generation of its own.
fn make_older(case: &Case, logs: &Path, cut: bool) {
    let mut all = fs::read_dir(logs).expect("the logs").map(|entry| entry.expect("a log").path());
    let log = all.find(|path| path.extension().is_some_and(|end| end == "restart")).expect("a log");
    let open = |path: &Path| fs::File::options().read(true).write(true).open(path).expect("a file");
    let log = open(&log);
    if cut {
        let len = log.metadata().expect("its length").len();
        return log.set_len(len - 8 * LACKS).expect("cut");
    }
    let image = open(&case.image());
    let modified = image.metadata().and_then(|facts| facts.modified()).expect("a time");
    let mut bits = [0; 8];
    image.read_exact_at(&mut bits, IN_HEADER).expect("read");
    let bits = u64::from_be_bytes(bits);
    let own = (bits & ITS_BITS) >> 8 ^ 0x5a5a;
    for at in GENERATION {
        log.write_all_at(&own.to_ne_bytes(), 8 * at).expect("written");
    }
    let bits = bits & !ITS_BITS | own << 8;
    image.write_all_at(&bits.to_be_bytes(), IN_HEADER).expect("written");
    image.set_modified(modified).expect("its time");
}

/// Whether the data file is as a server left it that noted nothing of it is not guessed. That server's log may
/// lie in the file of a newer one's, whose words behind the records are not its own.
#[test]
fn by_an_older_server() {
    let within = tempfile::tempdir_in("/var/tmp").expect("a folder");
    for (cut, choice) in [(true, "use"), (true, "drop"), (false, "use"), (false, "drop")] {
        let logs = tempfile::tempdir_in("/dev/shm").expect("a folder on tmpfs");
        let options = ["--state-dir", plain(logs.path())];
        let case = killed_with(within.path(), &options);
        make_older(&case, logs.path(), cut);
        let context = format!("cut {cut}, {choice}");
        is_refused(&case, &options, &context);
        let server = case.serve(&[&options[..], &["--restart-log", choice]].concat());
        let (found, said) = case.read(server);
        assert_eq!(said.contains("taking up"), choice == "use", "{context}: {said}");
        assert_eq!(found == case.disk, choice == "use", "{context}: {said}");
    }
}

#[test]
fn on_ext4() {
    on("ext4");
}

#[test]
fn on_xfs() {
    on("xfs");
}

#[test]
fn on_btrfs() {
    on("btrfs");
}

#[test]
fn on_tmpfs() {
    on("tmpfs");
}
