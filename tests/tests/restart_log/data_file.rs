//! Images whose guest data lies in an external file: what a killed server left is taken up only if that file,
//! too, is as the server left it.

use std::fs;
use std::path::Path;

use ringtap_tests::{ok, plain};

use crate::{Case, Client, Format, tick, warnings};

/// Written to, with a copy of the data file taken in between, and killed.
fn killed(within: &Path) -> Case {
    let mut case = Case::new(within, Format::DataFile, "writeback");
    let server = case.serve(&[]);
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

/// Neither who writes nor who reads takes the log up without being told to.
fn is_refused(case: &Case, context: &str) {
    let (image, raw) = (case.image(), case.path("raw"));
    let socket = format!("unix:{}", plain(&case.socket()));
    let image = plain(&image);
    for words in [
        ["convert", "-f", "qcow2", "-O", "raw", image, plain(&raw)].as_slice(),
        &["serve", image, "-f", "qcow2", "--nbd", &socket],
    ] {
        let end = case.ringtap(words);
        let said = String::from_utf8_lossy(&end.stderr);
        assert!(!end.status.success(), "{context}, {}: {said}", words[0]);
        assert!(said.contains("--restart-log use"), "{context}, {}: {said}", words[0]);
        assert!(said.contains("of its data file"), "{context}, {}: {said}", words[0]);
    }
}

#[test]
fn a_data_file_that_was_put_back_is_told() {
    let within = tempfile::tempdir_in("/var/tmp").expect("a folder");
    for script in [
        "cp kept data",
        "cp -p kept data",
        "rsync --inplace --no-whole-file -I kept data",
        "rsync --inplace --no-whole-file -I -t kept data",
        "mv kept data",
        "cp -p kept other && mv other data",
        "printf x | dd of=data conv=notrunc status=none",
    ] {
        let case = killed(within.path());
        shell(&case, script);
        is_refused(&case, script);
    }
}

/// The operator has the last word.
#[test]
fn the_operator_says_what_becomes_of_it() {
    let within = tempfile::tempdir_in("/var/tmp").expect("a folder");
    for choice in ["use", "drop"] {
        let case = killed(within.path());
        shell(&case, "cp kept data");
        let (found, said) = case.read(case.serve(&["--restart-log", choice]));
        assert!(found[..2 << 16].iter().all(|byte| *byte == 0xa1), "{choice}: {said}");
        assert_eq!(said.contains("taking up"), choice == "use", "{said}");
    }
}

#[test]
fn a_data_file_that_nobody_changed_is_taken_up() {
    let within = tempfile::tempdir_in("/var/tmp").expect("a folder");
    for script in ["true", "sleep 1.2", "chmod 600 data", "ln data link", "cat data > backup"] {
        let case = killed(within.path());
        shell(&case, script);
        let raw = case.path("raw");
        let image = case.image();
        let convert = ["convert", "-f", "qcow2", "-O", "raw", plain(&image), plain(&raw)];
        let end = case.ringtap(&convert);
        assert!(end.status.success(), "{script}: {end:?}");
        assert!(fs::read(&raw).expect("a file") == case.disk, "{script}: {end:?}");
        let (found, said) = case.read(case.serve(&[]));
        assert!(found == case.disk, "{script}: {said}");
        assert!(said.contains("taking up"), "{script}: {said}");
        assert!(warnings(&said).is_empty(), "{script}: {said}");
    }
}
