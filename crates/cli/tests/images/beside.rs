//! Each verb beside qemu-img 10: what a command line ends with, what it prints, and whether it says something on stderr.
//! Of what goes wrong the words differ; that something is said, and the status, do not.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;

use super::bench::Bench;
use super::habits::missing;

/// What each row works on, as the programs make it.
const IMAGES: [&str; 26] = [
    "qemu-img create -q -f raw a.raw 1M",
    "qemu-img create -q -f qcow2 base.qcow2 2M",
    "qemu-img create -q -f qcow2 -b base.qcow2 -F qcow2 over.qcow2",
    "qemu-img create -q -f qcow2 other.qcow2 3M",
    "qemu-img create -q -f qcow2 -u -b gone.qcow2 -F qcow2 orphan.qcow2 2M",
    "qemu-img create -q -f qcow2 snap.qcow2 1M",
    "qemu-img snapshot -c one snap.qcow2",
    "qemu-img create -q -f qcow2 bits.qcow2 1M",
    "qemu-img bitmap --add bits.qcow2 b0",
    "qemu-img bitmap --add --disable bits.qcow2 b1",
    "qemu-img create -q -f qcow2 -o compat=0.10 v2.qcow2 1M",
    "qemu-img create -q -f vpc a.vpc 1M",
    "qemu-img create -q -f luks --object secret,id=s,file=key -o key-secret=s,iter-time=10 a.luks 1M",
    "qemu-io -f qcow2 base.qcow2 -c write_-q_-P_3_64k_320k",
    "qemu-io -f qcow2 over.qcow2 -c write_-q_-P_4_1M_64k",
    "qemu-img convert -f qcow2 -O vmdk base.qcow2 a.vmdk",
    "qemu-img convert -f qcow2 -O vmdk -o subformat=monolithicFlat base.qcow2 flat.vmdk",
    "qemu-img convert -f qcow2 -O vmdk -o subformat=twoGbMaxExtentSparse base.qcow2 split.vmdk",
    "qemu-img convert -f qcow2 -O vmdk -o subformat=streamOptimized base.qcow2 stream.vmdk",
    "qemu-img convert -f qcow2 -O vhdx base.qcow2 a.vhdx",
    "qemu-img create -q -f qcow2 -o data_file=d.raw data.qcow2 1M",
    // The L1 table of its snapshot is said to begin where no cluster does.
    "qemu-img create -q -f qcow2 torn.qcow2 1M",
    "qemu-img snapshot -c one torn.qcow2",
    "qemu-io -f raw torn.qcow2 -c write_-q_-P_2_327686_1",
    "cp base.qcow2 base2.qcow2",
    "cp base.qcow2 ro.qcow2",
];

/// Those whose format is recorded.
const RECORDED: [&str; 6] = ["base", "bits", "orphan", "ro", "snap", "v2"];

/// The programs of QEMU 10: those of Debian 13, unpacked, or this machine's where they are as new.
fn programs() -> PathBuf {
    let unpacked = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("iotests/trixie/root/run");
    if unpacked.join("qemu-img").exists() {
        return unpacked;
    }
    let told = Command::new("qemu-img").arg("--version").output().expect("qemu-img of qemu-utils");
    let told = String::from_utf8_lossy(&told.stdout).into_owned();
    let version = told.split_whitespace().nth(2).and_then(|it| it.split('.').next()?.parse().ok());
    assert!(
        version >= Some(10u32),
        "{told}is too old: scripts/qemu-of.sh trixie unpacks a newer one"
    );
    PathBuf::new()
}

/// Images to begin with, which no command line of a row is run on itself.
struct Images {
    bench: Bench,
    /// Nothing changes them.
    as_they_are: bool,
    programs: PathBuf,
}

impl Images {
    fn new(as_they_are: bool) -> Images {
        let images = Images { bench: Bench::new(), as_they_are, programs: programs() };
        fs::create_dir(images.first()).expect("a folder");
        fs::write(images.first().join("key"), "123").expect("a file");
        fs::write(images.first().join("text"), "a bad header").expect("a file");
        let record = |name| format!("ringtap amend --record-format qcow2 {name}.qcow2");
        for line in IMAGES.map(str::to_owned).into_iter().chain(RECORDED.map(record)) {
            let (program, words) = line.split_once(' ').expect("a program");
            let told = images.command(program, words, &images.first()).output().expect("timeout");
            assert!(told.status.success(), "{line}: {told:?}");
        }
        for (name, mode) in [("key", 0o600), ("ro.qcow2", 0o444)] {
            let mode = fs::Permissions::from_mode(mode);
            fs::set_permissions(images.first().join(name), mode).expect("changed");
        }
        // What they take is settled then.
        let settled = Command::new("sync").arg("-f").arg(images.first()).status();
        assert!(settled.expect("sync of coreutils").success());
        images
    }

    fn first(&self) -> PathBuf {
        self.bench.path("first")
    }

    fn command(&self, program: &str, words: &str, at: &Path) -> Command {
        let mut command = Command::new("timeout");
        command.arg("60");
        let words = match words.strip_prefix("unprivileged: ") {
            Some(rest) if rustix::process::geteuid().is_root() => {
                command.args(["setpriv", "--bounding-set=-dac_override,-dac_read_search"]);
                rest
            }
            Some(rest) => rest,
            None => words,
        };
        match program {
            "ringtap" => command.arg(env!("CARGO_BIN_EXE_ringtap")),
            name if name.starts_with("qemu") => command.arg(self.programs.join(name)),
            name => command.arg(name),
        };
        let words = words.split_whitespace().map(|word| match word {
            "''" => String::new(),
            // What qemu-io is to do is one word.
            word if program == "qemu-io" => word.replace('_', " "),
            word => word.to_owned(),
        });
        command.args(words).current_dir(at).stdin(Stdio::null());
        command
    }

    /// Run it, on images of its own where it may change them.
    fn run(&self, program: &str, words: &str) -> Output {
        if self.as_they_are {
            return self.run_in(&self.first(), program, words);
        }
        let at = self.bench.path("copy");
        let copied = Command::new("cp").arg("-a").args([&self.first(), &at]).status();
        assert!(copied.expect("cp of coreutils").success());
        let told = self.run_in(&at, program, words);
        fs::remove_dir_all(&at).expect("removed");
        told
    }

    fn run_in(&self, at: &Path, program: &str, words: &str) -> Output {
        let (holder, words) = match words.strip_prefix("locked: ") {
            Some(rest) => (Some(self.hold(at)), rest),
            None => (None, words),
        };
        let told = self.command(program, words, at).output().expect("timeout of coreutils");
        if let Some(mut holder) = holder {
            drop(holder.stdin.take());
            holder.wait().expect("qemu-io has ended");
        }
        told
    }

    /// QEMU that has base.qcow2 open for writing.
    fn hold(&self, at: &Path) -> Child {
        let mut command = self.command("qemu-io", "-f qcow2 base.qcow2", at);
        let mut holder =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("qemu-io");
        holder.stdin.as_mut().expect("a pipe").write_all(b"length\n").expect("written");
        let mut line = String::new();
        BufReader::new(holder.stdout.as_mut().expect("a pipe")).read_line(&mut line).expect("read");
        assert!(line.contains("MiB"), "{line}");
        holder
    }

    /// What ringtap and qemu-img say, and both in words.
    fn both(&self, words: &str) -> (Output, Output, String) {
        let [ours, theirs] = ["ringtap", "qemu-img"].map(|program| self.run(program, words));
        let told = format!("{words}\n{ours:?}\n{theirs:?}");
        (ours, theirs, told)
    }

    /// What is not the same, if anything. `stdout` says what of that has to be: all of it (`same`), what progress ends
    /// with and all behind it (`ends`), all but the last line, which says how long it took (`times`), every member that
    /// qemu-img has (`json`), every line that it has, in that order (`lines`), that there is something, in Ringtap's words (`other`), or that there is `nothing`.
    fn check(&self, stdout: &str, words: &str) -> Result<(), String> {
        let (ours, theirs, told) = self.both(words);
        let [status, wanted] = [&ours, &theirs].map(|it| it.status.code());
        let said = [&ours, &theirs].map(|it| String::from_utf8_lossy(&it.stderr));
        let others = |said: &str| said.starts_with("timeout:") || said.starts_with("setpriv:");
        if wanted >= Some(124) || said.iter().any(|said| others(said)) {
            return Err(format!("it was not tried: {told}"));
        }
        // Of a command line that makes no sense Ringtap says so by a status of its own, but where that has a meaning.
        let has_own = !words.contains("check");
        if status != wanted && !(has_own && (status, wanted) == (Some(2), Some(1))) {
            return Err(format!("another status: {told}"));
        }
        let unknown = ["invalid option", "unrecognized option", "xpect"];
        let is_theirs = unknown.iter().any(|it| said[1].contains(it));
        if said[0].contains("unexpected argument") && !is_theirs {
            return Err(format!("an option is not known: {told}"));
        }
        if ours.stderr.is_empty() != theirs.stderr.is_empty() {
            return Err(format!("only one says something on stderr: {told}"));
        }
        // What a check has found is said line by line.
        let failed = status == Some(1) || (has_own && status != Some(0));
        if failed && ours.stderr.iter().filter(|it| **it == b'\n').count() > 1 {
            return Err(format!("more than a line: {told}"));
        }
        let [one, other] = [&ours.stdout, &theirs.stdout].map(|it| String::from_utf8_lossy(it));
        let same = match stdout {
            "same" => one == other,
            "ends" => end(&one) == end(&other),
            "times" => one.lines().rev().skip(1).eq(other.lines().rev().skip(1)),
            "json" => {
                let [one, other] = [&one, &other].map(|it| serde_json::from_str::<Value>(it));
                matches!((one, other), (Ok(one), Ok(other)) if missing(&one, &other).is_none())
            }
            "lines" => {
                let mut rest = one.lines();
                other.lines().all(|line| rest.any(|it| it == line))
            }
            "other" => one.is_empty() == other.is_empty(),
            "nothing" => one.is_empty(),
            _ => return Err(format!("{stdout} is no way to compare")),
        };
        if same { Ok(()) } else { Err(format!("another stdout: {told}")) }
    }
}

/// The rows of a table: what stands before the line, and the line.
fn rows(table: &str) -> impl Iterator<Item = (&str, &str)> {
    let lines = table.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
    lines
        .map(|line| line.split_once('|').expect("a row"))
        .map(|(how, words)| (how.trim(), words.trim()))
}

/// What progress ends with, and what stands behind it.
fn end(text: &str) -> Vec<String> {
    let parts = text.split(['\r', '\n']).filter(|part| !part.is_empty());
    let mut parts: Vec<_> = parts.map(str::to_owned).collect();
    let shown = parts.iter().rposition(|part| part.contains("/100%)")).unwrap_or(0);
    parts.drain(..shown);
    parts
}

fn check_all(table: &str, as_they_are: bool) {
    let images = Images::new(as_they_are);
    let wrong = rows(table).filter_map(|(how, words)| images.check(how, words).err());
    let wrong: Vec<_> = wrong.collect();
    assert!(wrong.is_empty(), "{} rows:\n{}", wrong.len(), wrong.join("\n\n"));
}

#[test]
fn verbs_that_read_end_and_print_as_qemu_img_10_does() {
    check_all(include_str!("beside/reading.txt"), true);
}

#[test]
fn verbs_that_make_images_end_and_print_as_qemu_img_10_does() {
    check_all(include_str!("beside/making.txt"), false);
}

#[test]
fn verbs_that_change_images_end_and_print_as_qemu_img_10_does() {
    check_all(include_str!("beside/changing.txt"), false);
}

#[test]
fn what_ends_otherwise_than_qemu_img_10_is_what_is_known_to() {
    let images = Images::new(false);
    for (statuses, words) in rows(include_str!("beside/differing.txt")) {
        let (ours, theirs, told) = images.both(words);
        let found = [ours, theirs].map(|it| it.status.code().expect("no signal").to_string());
        assert!(statuses.split_whitespace().eq(&found), "{told}");
    }
}
