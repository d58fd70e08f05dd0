//! The units in contrib/systemd: how exposed they are, and whether they start.

mod guest;

use std::fs;
use std::path::{Path, PathBuf};

use ringtap_tests::{program, ringtap};

/// Each unit, and the exposure it may have by systemd's own reckoning (0 to 10).
const UNITS: [(&str, f64); 5] = [
    ("ringtap-daemon.service", 2.0),
    ("ringtap@.service", 2.0),
    ("ringtap-nbd@.service", 2.0),
    ("ringtap-ublk@.service", 4.0),
    ("ringtap-xen.service", 4.0),
];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../contrib/systemd")
}

#[test]
fn units_are_no_more_exposed_than_they_may_be() {
    for (unit, most) in UNITS {
        let path = folder().join(unit);
        let output = program(
            "systemd-analyze",
            "systemd",
            [
                "security".as_ref(),
                "--offline=true".as_ref(),
                "--no-pager".as_ref(),
                path.as_os_str(),
            ],
        );
        let said = String::from_utf8_lossy(&output.stdout);
        let level = said.lines().find_map(|line| line.split_once("Overall exposure level for"));
        let level = level.and_then(|(_, rest)| rest.split_once(": ")?.1.split(' ').next());
        let level: f64 = level
            .and_then(|level| level.parse().ok())
            .unwrap_or_else(|| panic!("{unit}: {said}{}", String::from_utf8_lossy(&output.stderr)));
        eprintln!("{unit}: {level}");
        assert!(level <= most, "{unit} has an exposure of {level}, more than {most}:\n{said}");
    }
}

#[test]
fn units_say_nothing_that_systemd_does_not_know() {
    let dir = tempfile::tempdir().expect("a folder");
    for entry in fs::read_dir(folder()).expect("the units").flatten() {
        let text = fs::read_to_string(entry.path()).expect("a unit");
        let ours = ringtap().display().to_string();
        let text = text.replace("/usr/local/bin/ringtap-compare", &ours);
        let text = text.replace("/usr/local/bin/ringtap", &ours);
        // One of a template.
        let name = entry.file_name().to_string_lossy().replace('@', "@vm1");
        fs::write(dir.path().join(name), text).expect("a copy");
    }
    for entry in fs::read_dir(dir.path()).expect("the copies").flatten() {
        let path = entry.path();
        let args = ["verify".as_ref(), "--man=no".as_ref(), path.as_os_str()];
        let output = program("systemd-analyze", "systemd", args);
        let said = String::from_utf8_lossy(&output.stderr);
        let of_ours = |line: &&str| line.contains("ringtap");
        let complaints: Vec<&str> = said.lines().filter(of_ours).collect();
        assert!(complaints.is_empty(), "{complaints:#?}");
    }
}
