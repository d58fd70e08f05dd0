//! What `make deb` makes of the binary under test: what is in it, what its scripts do, and what lintian and AppArmor's
//! parser say. scripts/try-deb.sh installs it in guests.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use ringtap_tests::{ok, plain, ringtap};

/// What that of the lab consists of.
const OF_LAB: [&str; 7] = [
    "/usr/bin/ringtap-lab",
    "/usr/bin/ringtap-compare",
    "/lib/systemd/system/ringtap-compare.service",
    "/lib/systemd/system/ringtap-compare.timer",
    "/usr/share/man/man1/ringtap-lab-compare.1.gz",
    "/usr/share/man/man1/ringtap-lab-report.1.gz",
    "/usr/share/bash-completion/completions/ringtap-lab",
];

const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "-1");

fn top() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// What the package consists of beyond pages and completions.
const FILES: [&str; 16] = [
    "/usr/bin/ringtap",
    "/lib/systemd/system/ringtap-daemon.service",
    "/lib/systemd/system/ringtap@.service",
    "/lib/systemd/system/ringtap-nbd@.service",
    "/lib/systemd/system/ringtap-nbd@.socket",
    "/lib/systemd/system/ringtap-ublk@.service",
    "/lib/systemd/system/ringtap-xen.service",
    "/usr/lib/sysusers.d/ringtap.conf",
    "/usr/lib/tmpfiles.d/ringtap.conf",
    "/etc/apparmor.d/ringtap",
    "/usr/share/man/man1/ringtap-serve.1.gz",
    "/usr/share/bash-completion/completions/ringtap",
    "/usr/share/zsh/site-functions/_ringtap",
    "/usr/share/fish/vendor_completions.d/ringtap.fish",
    "/usr/share/ringtap/grafana/ringtap.json",
    "/usr/share/ringtap/bpftrace/latency.bt",
];

#[test]
fn packages_of_debian_have_all_that_belongs_to_them() {
    let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
    let made = Command::new(top().join("scripts/deb.sh"))
        .arg(ringtap())
        .arg(dir.path())
        // The binary of a test is large: quickly packed is good enough.
        .env("COMPRESSION", "-Zxz -z0")
        .output()
        .expect("a shell");
    let said = String::from_utf8_lossy(&made.stdout) + String::from_utf8_lossy(&made.stderr);
    assert!(made.status.success(), "{said}");
    let deb = |name: &str| {
        let arch = ok("dpkg", "dpkg", &["--print-architecture"]);
        dir.path().join(format!("{name}_{VERSION}_{}.deb", arch.trim()))
    };
    let (package, symbols) = (deb("ringtap"), deb("ringtap-dbgsym"));
    let lab = deb("ringtap-lab");

    let root = dir.path().join("root");
    ok("dpkg-deb", "dpkg", &["-x", plain(&package), plain(&root)]);
    // Since usr was merged, units are there.
    let there = |name: &str| [root.join(&name[1..]), root.join("usr").join(&name[1..])];
    for name in FILES {
        assert!(there(name).iter().any(|path| path.is_file()), "{name} is not in {said}");
    }
    // Who serves disks needs no lab.
    for name in OF_LAB {
        assert!(there(name).iter().all(|path| !path.exists()), "{name} is in the wrong package");
    }
    // What it has now lay in the other one once, which therefore goes before.
    let fields = ok("dpkg-deb", "dpkg", &["-f", plain(&lab), "Breaks", "Replaces"]);
    for field in ["Breaks", "Replaces"] {
        assert!(fields.contains(&format!("{field}: ringtap (<< 0.1.0-1~)")), "{fields}");
    }
    ok("dpkg-deb", "dpkg", &["-x", plain(&lab), plain(&root)]);
    for name in OF_LAB {
        assert!(there(name).iter().any(|path| path.is_file()), "{name} is not in {said}");
    }
    for unit in FILES.iter().filter(|name| name.ends_with(".service")) {
        let text = there(unit).iter().find_map(|path| fs::read_to_string(path).ok());
        let text = text.expect("a unit");
        assert!(!text.contains("/usr/local"), "{unit}: {text}");
        assert!(text.contains("ExecStart=/usr/bin/ringtap"), "{unit}: {text}");
        // Those that mount, or are Xen's, would need more than the profile has.
        let confined = !unit.contains("ublk") && !unit.contains("xen");
        assert_eq!(text.contains("\nAppArmorProfile=-ringtap\n"), confined, "{unit}: {text}");
    }

    // The debug symbols are found by the program's own mark.
    let notes = ok("readelf", "binutils", &["-n", plain(&root.join("usr/bin/ringtap"))]);
    let id = notes.lines().find_map(|line| line.trim().strip_prefix("Build ID: "));
    let id = id.unwrap_or_else(|| panic!("no build id: {notes}"));
    let sections = ok("readelf", "binutils", &["-SW", plain(&root.join("usr/bin/ringtap"))]);
    assert!(!sections.contains(".debug_info") && !sections.contains(".symtab"), "{sections}");
    ok("dpkg-deb", "dpkg", &["-x", plain(&symbols), plain(&root)]);
    let file = format!("usr/lib/debug/.build-id/{}/{}.debug", &id[..2], &id[2..]);
    let sections = ok("readelf", "binutils", &["-SW", plain(&root.join(&file))]);
    assert!(sections.contains(".debug_line") && sections.contains(".symtab"), "{sections}");

    let control = dir.path().join("control");
    ok("dpkg-deb", "dpkg", &["-e", plain(&package), plain(&control)]);
    let text = |name: &str| fs::read_to_string(control.join(name)).expect("a script");
    assert!(text("control").contains("Depends: libc6"), "{}", text("control"));
    assert_eq!(text("conffiles").trim(), "/etc/apparmor.d/ringtap");
    // An upgrade stops nobody's disks, and a package enables none.
    for script in ["postinst", "prerm", "postrm"] {
        let shell = control.join(script);
        ok("dash", "dash", &["-n", plain(&shell)]);
        for line in text(script).lines().filter(|line| !line.trim_start().starts_with('#')) {
            let starts =
                [" restart ", " start ", "try-restart"].iter().any(|word| line.contains(word));
            assert!(!starts, "{script}: {line}");
        }
    }
    assert!(text("prerm").contains("[ \"$1\" = remove ]"), "{}", text("prerm"));

    // Nobody's address is the maintainer's, and there is no bug to close.
    let suppressed =
        "bogus-mail-host,bogus-mail-host-in-debian-changelog,initial-upload-closes-no-bugs";
    let args =
        ["--fail-on", "error,warning", "--suppress-tags", suppressed, plain(&package), plain(&lab)];
    // It is slow.
    let lint = Command::new("timeout").args(["500", "lintian"]).args(args).output();
    let lint = lint.expect("timeout of coreutils");
    let said = String::from_utf8_lossy(&lint.stdout);
    assert!(lint.status.success(), "{said}{}", String::from_utf8_lossy(&lint.stderr));
}

#[test]
fn the_profile_for_units_is_one() {
    let profile = top().join("contrib/apparmor/ringtap");
    // Neither loaded nor kept.
    ok("apparmor_parser", "apparmor", &["-Q", "-K", "-T", plain(&profile)]);
    let names = ok("apparmor_parser", "apparmor", &["-N", plain(&profile)]);
    assert_eq!(names.trim(), "ringtap");
}
