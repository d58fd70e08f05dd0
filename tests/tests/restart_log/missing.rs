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
