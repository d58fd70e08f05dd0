//! What is published, and what is not.

use std::fs;

use ringtap_tests::ok;

use crate::bench::{Bench, MIB, pattern, refusal, said};
use crate::origin::Origin;

#[test]
fn what_a_verb_has_not_ended_is_not_published() {
    let bench = Bench::new();
    fs::write(bench.path("disk.img"), pattern(MIB)).expect("written");
    let (image, www) = (bench.text("disk.img"), bench.text("www"));
    fs::create_dir(&www).expect("made");
    // As a `ringtap convert` that was killed leaves it.
    let mark = "import os, sys; os.setxattr(sys.argv[1], 'user.ringtap.unfinished', b'convert')";
    ok("python3", "python3", &["-c", mark, &image]);
    let why = refusal(&["publish", &image, &www]);
    assert!(why.contains("not whole") && why.contains("convert"), "{why}");
    assert_eq!(fs::read_dir(&www).expect("it").count(), 0);
    let whole = "import os, sys; os.removexattr(sys.argv[1], 'user.ringtap.unfinished')";
    ok("python3", "python3", &["-c", whole, &image]);
    assert!(said(&["publish", &image, &www]).contains("digest="));
}

/// As QEMU takes such names, but only where the operator says that it may be opened.
#[test]
fn what_a_published_overlay_lies_upon_is_looked_for_beside_it() {
    let bench = Bench::new();
    // Origins show what ends so.
    fs::write(bench.path("disk.img.base"), pattern(MIB)).expect("written");
    let (image, www) = (bench.text("disk.img"), bench.text("www"));
    fs::create_dir(&www).expect("made");
    let create = ["create", "-q", "-f", "qcow2", "-b", "disk.img.base", "-F", "raw", &image];
    ok("qemu-img", "qemu-utils", &create);
    let printed = said(&["publish", &bench.text("disk.img.base"), &www]);
    let digest = printed.lines().last().expect("a line").to_owned();
    let told = ringtap_tests::ringtap_of(&["publish", &image, &www]);
    let told = String::from_utf8_lossy(&told.stderr).into_owned();
    assert!(told.contains("lies upon disk.img.base, which is not published with it"), "{told}");
    let read = |name: &str| fs::read(bench.path("www").join(name)).expect("it is there");
    let origin = Origin::new(read("disk.img"));
    let beside = [".base", ".base.rtidx"];
    let beside = beside.map(|end| (end.to_owned(), read(&format!("disk.img{end}"))));
    origin.with(|state| state.beside = beside.to_vec());
    let base = origin.uri().replace("disk.img", "disk.img.base");
    let whole = |base: &str| format!("\"full-backing-filename\": \"{base}\"");
    let info = said(&["info", "-f", "qcow2", "--output", "json", &origin.uri()]);
    assert!(info.contains(&whole(&base)), "{info}");
    let nbd = format!("unix:{}", bench.text("nbd"));
    let serve = ["serve", &origin.uri(), "-f", "qcow2", "--read-only", "--nbd", &nbd];
    let why = refusal(&serve);
    assert!(why.contains(&base) && why.contains("--backing"), "{why}");
    let folder = base.split("disk.img").next().expect("a folder").to_owned();
    let plain = base.split('?').next().expect("a name").to_owned();
    let pinned = format!("{plain}?{digest}");
    for allowed in [&base, &plain, &pinned, &folder] {
        let more = ["-f", "qcow2", "--read-only", "--backing", allowed];
        let server = bench.serve(&origin.uri(), &more);
        assert!(bench.whole() == pattern(MIB), "{allowed}");
        server.stop();
    }
    // The digest that the operator has pinned holds.
    let other =
        pinned.replace("sha256:", "sha256:0").chars().take(pinned.len()).collect::<String>();
    let why = refusal(&[&serve[..], &["--backing", &other]].concat());
    assert!(why.contains("is not the one that digest=sha256:"), "{why}");
}

/// Neither to other servers nor to this host's files.
#[test]
fn what_an_object_names_leads_nowhere_else() {
    let bench = Bench::new();
    let secret = bench.text("secret");
    fs::write(&secret, pattern(MIB)).expect("written");
    let image = bench.text("disk.img");
    let beneath_root = secret.trim_start_matches('/').to_owned();
    for name in ["../../x", "../../../etc/passwd", &secret, &beneath_root, "x?endpoint=//evil"] {
        let create = ["create", "-q", "-f", "qcow2", "-u", "-b", name, "-F", "raw", &image, "1M"];
        ok("qemu-img", "qemu-utils", &create);
        let origin = Origin::new(fs::read(&image).expect("the image"));
        let folder = origin.uri().split("disk.img").next().expect("a folder").to_owned();
        let nbd = format!("unix:{}", bench.text("nbd"));
        let args = ["serve", &origin.uri(), "-f", "qcow2", "--read-only", "--nbd", &nbd];
        let why = refusal(&[&args[..], &["--backing", &folder]].concat());
        let led = ["leads out of", "lies on a server", "there is no such object"];
        assert!(led.iter().any(|led| why.contains(led)), "{name}: {why}");
        assert!(!why.contains("evil") || why.contains("%3Fendpoint"), "{name}: {why}");
    }
}

#[test]
fn a_publication_in_a_folder_that_is_stopped_leaves_what_was_there() {
    use rustix::process::{Pid, Signal, kill_process};
    use std::os::unix::process::ExitStatusExt;
    let bench = Bench::new();
    let (image, www) = (bench.path("disk.img"), bench.text("www"));
    fs::create_dir(&www).expect("made");
    let names = || {
        let found = fs::read_dir(&www).expect("listed").flatten();
        let mut found: Vec<_> =
            found.map(|one| (one.file_name(), fs::read(one.path()).expect("read"))).collect();
        found.sort();
        found
    };
    for signal in [Signal::INT, Signal::TERM] {
        let before = names();
        fs::write(&image, pattern(96 * MIB)).expect("written");
        let mut command = std::process::Command::new(ringtap_tests::ringtap());
        command.args(["publish", "--replace", &bench.text("disk.img"), &www]);
        command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::piped());
        let child = command.spawn().expect("ringtap");
        let until = std::time::Instant::now() + ringtap_tests::patience();
        while !bench.path("www/disk.img.part").exists() {
            assert!(std::time::Instant::now() < until, "it does not begin");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        kill_process(Pid::from_child(&child), signal).expect("it is there");
        let end = child.wait_with_output().expect("its end");
        let why = String::from_utf8_lossy(&end.stderr).into_owned();
        assert_eq!(end.status.signal(), Some(signal.as_raw()), "{why}");
        assert!(why.contains("what was there before is there as it was"), "{why}");
        assert!(names() == before, "{why}");
        // For the next round something is there.
        fs::write(&image, pattern(MIB)).expect("written");
        said(&["publish", "--replace", &bench.text("disk.img"), &www]);
    }
}
