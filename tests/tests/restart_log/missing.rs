//! A log that is known to be missing is not passed by; the operator has the last word.

use ringtap_tests::{ok, plain};

use crate::{Case, Client, Format, warnings};

fn missed(format: Format) {
    let within = tempfile::tempdir().expect("a folder");
    let mut case = Case::new(within.path(), format, "writeback");
    let logs = tempfile::tempdir_in("/dev/shm").expect("a folder on tmpfs");
    let here = ["--state-dir", plain(logs.path())];
    let server = case.serve(&here);
    let mut client = Client::start(&case.socket());
    case.write(&mut client, 0..4, 0xa1, false);
    case.kill(server);
    let (image, name) = (case.image(), format.name());
    let serve = |more: &[&str]| {
        let socket = format!("unix:{}", plain(&case.socket()));
        case.ringtap(&[&["serve", plain(&image), "-f", name, "--nbd", &socket], more].concat())
    };
    let refused = serve(&[]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("--restart-log drop"), "{format:?}: {said}");
    let raw = case.path("raw");
    let convert = |from: &str| {
        let _ = std::fs::remove_file(&raw);
        case.ringtap(&["convert", "-f", name, "-O", "raw", from, plain(&raw)])
    };
    let end = convert(plain(&image));
    assert!(!end.status.success(), "{format:?}: {end:?}");
    let info = case.ringtap(&["info", "-f", name, "--output", "json", plain(&image)]);
    let facts: serde_json::Value = serde_json::from_slice(&info.stdout).expect("JSON");
    assert_eq!(facts["restart-log"]["state"], "missing", "{format:?}: {facts}");
    // A copy is another image; it says so where it is known.
    for (copy, known) in [("-p", format == Format::Overlay), ("-a", true)] {
        let to = case.path("elsewhere");
        ok("cp", "coreutils", &[copy, plain(&image), plain(&to)]);
        let end = convert(plain(&to));
        let said = String::from_utf8_lossy(&end.stderr).into_owned();
        assert!(end.status.success(), "{format:?}, cp {copy}: {said}");
        assert_eq!(said.contains("a copy of an image"), known, "{format:?}, cp {copy}: {said}");
        std::fs::remove_file(to).expect("removed");
    }
    let (found, said) = case.read(case.serve(&here));
    assert!(found == case.disk, "{format:?}: {said}");
    // What was closed is missed by nobody.
    let (found, said) = case.read(case.serve(&[]));
    assert!(found == case.disk && warnings(&said).is_empty(), "{format:?}: {said}");
    let server = case.serve(&here);
    let mut client = Client::start(&case.socket());
    case.write(&mut client, 0..4, 0xa2, false);
    case.kill(server);
    let (found, said) = case.read(case.serve(&["--restart-log", "drop"]));
    assert!(found[..1 << 16].iter().all(|byte| [0xa1, 0xa2].contains(byte)), "{format:?}: {said}");
    let (_, said) = case.read(case.serve(&[]));
    assert!(warnings(&said).is_empty(), "{format:?}: it was dropped: {said}");
}

#[test]
fn a_missing_log_is_missed() {
    missed(Format::Overlay);
}

#[test]
fn a_missing_log_of_version_2_is_missed() {
    missed(Format::Version2);
}

#[test]
fn a_missing_log_of_a_vhd_is_missed() {
    missed(Format::Vpc);
}

/// With its attributes it says again that it has a log, and that was closed.
#[test]
fn a_copy_of_an_image_that_was_served_is_put_back() {
    let within = tempfile::tempdir().expect("a folder");
    for format in [Format::Version2, Format::Vpc] {
        let mut case = Case::new(within.path(), format, "writeback");
        let server = case.serve(&[]);
        let mut client = Client::start(&case.socket());
        case.write(&mut client, 0..4, 0xa1, true);
        let (image, copy) = (case.image(), case.path("copy"));
        ok("cp", "coreutils", &["-a", plain(&image), plain(&copy)]);
        drop(client);
        server.stop();
        ok("cp", "coreutils", &["-a", plain(&copy), plain(&image)]);
        let (found, said) = case.read(case.serve(&[]));
        assert!(found == case.disk, "{format:?}: {said}");
        let warned = warnings(&said);
        assert!(warned.len() == 1 && said.contains("a copy of an image"), "{format:?}: {said}");
        let (_, said) = case.read(case.serve(&[]));
        assert!(warnings(&said).is_empty(), "{format:?}: {said}");
    }
}

/// What is made anew in the place of an image has none.
#[test]
fn an_image_that_is_made_anew_misses_nothing() {
    let within = tempfile::tempdir().expect("a folder");
    let case = Case::new(within.path(), Format::Vpc, "writeback");
    let logs = tempfile::tempdir_in("/dev/shm").expect("a folder on tmpfs");
    let server = case.serve(&["--state-dir", plain(logs.path())]);
    case.kill(server);
    let image = case.image();
    let made =
        case.ringtap(&["create", "-q", "-f", "vpc", "-o", "force_size=on", plain(&image), "4M"]);
    assert!(made.status.success(), "{made:?}");
    let (found, said) = case.read(case.serve(&[]));
    assert!(found == case.disk && warnings(&said).is_empty(), "{said}");
}
