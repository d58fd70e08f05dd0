//! Manual pages and completions come out whole.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

fn ringtap(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ringtap")).args(args).output().expect("ringtap runs")
}

fn stdout(output: Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).expect("UTF-8")
}

#[test]
fn every_command_has_a_page_with_its_sections() {
    let dir = tempfile::tempdir().expect("a folder");
    let to = dir.path().join("man1");
    stdout(ringtap(&["man", to.to_str().expect("UTF-8")]));
    let mut names: Vec<_> = fs::read_dir(&to)
        .expect("the folder")
        .map(|entry| entry.expect("an entry").file_name().into_string().expect("UTF-8"))
        .collect();
    names.sort();
    let commands = [
        "-amend",
        "-bench",
        "-bitmap",
        "-check",
        "-commit",
        "-compare",
        "-completions",
        "-convert",
        "-create",
        "-daemon",
        "-dd",
        "-detach",
        "-disk",
        "-disk-add",
        "-disk-backup",
        "-disk-check",
        "-disk-checkpoint",
        "-disk-checkpoint-add",
        "-disk-checkpoint-list",
        "-disk-checkpoint-remove",
        "-disk-commit",
        "-disk-detach",
        "-disk-group",
        "-disk-info",
        "-disk-limit",
        "-disk-list",
        "-disk-migrate",
        "-disk-mirror",
        "-disk-pause",
        "-disk-remove",
        "-disk-resize",
        "-disk-resume",
        "-disk-snapshot",
        "-disk-stream",
        "-info",
        "-job",
        "-job-cancel",
        "-job-list",
        "-job-pause",
        "-job-rate",
        "-job-resume",
        "-job-wait",
        "-list",
        "-man",
        "-map",
        "-measure",
        "-publish",
        "-rebase",
        "-reload",
        "-report",
        "-resize",
        "-serve",
        "-snapshot",
        "-stop",
        "-top",
        "-upgrade",
        "-xen",
        "",
    ];
    let mut expected: Vec<_> =
        commands.iter().map(|command| format!("ringtap{command}.1")).collect();
    expected.sort();
    assert_eq!(names, expected, "and none of a hidden command");
    let page = |name: &str| fs::read_to_string(to.join(name)).expect("a page");
    let serve = page("ringtap-serve.1");
    for wanted in [
        ".TH RINGTAP-SERVE 1",
        "ringtap\\-serve",
        ".SH \"OPTIONS OF THE DISK BEFORE THEM\"",
        "\\-\\-vhost\\-user",
        ".SH SIGNALS",
        "SIGHUP",
        ".SH \"EXIT STATUS\"",
    ] {
        assert!(serve.contains(wanted), "{wanted} in:\n{serve}");
    }
    let commit = page("ringtap-disk-commit.1");
    for wanted in [".TH RINGTAP-DISK-COMMIT 1", "\\-\\-no\\-wait", "ringtap\\-disk(1)"] {
        assert!(commit.contains(wanted), "{wanted} in:\n{commit}");
    }
    assert!(!commit.contains("today.qcow2"), "the examples of another: {commit}");
    assert!(page("ringtap-compare.1").contains("ringtap\\-lab"));
    assert!(page("ringtap.1").contains("ringtap\\-serve(1)"));
    let alone = stdout(ringtap(&["man"]));
    assert_eq!(alone, page("ringtap.1"));
}

#[test]
fn completions_are_made_for_every_shell() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let text = stdout(ringtap(&["completions", shell]));
        assert!(text.contains("vhost-user"), "{shell}");
    }
}

#[test]
fn bash_takes_its_completions() {
    let dir = tempfile::tempdir().expect("a folder");
    let script = dir.path().join("ringtap");
    fs::write(&script, ringtap(&["completions", "bash"]).stdout).expect("a file");
    let offered = complete(&script, "ringtap serve --vh");
    assert_eq!(offered, "--vhost-user");
}

/// What bash would offer for the last word of a line.
fn complete(script: &Path, line: &str) -> String {
    let text = "source \"$0\"; COMP_WORDS=($1); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); \
        _ringtap ringtap \"${COMP_WORDS[COMP_CWORD]}\" \"\"; echo \"${COMPREPLY[*]}\"";
    let mut bash = Command::new("bash");
    bash.arg("-c").arg(text).arg(script).arg(line).stdin(Stdio::null());
    stdout(bash.output().expect("bash runs")).trim().to_owned()
}

#[test]
fn the_version_is_told() {
    let told = stdout(ringtap(&["--version"]));
    let (version, commit) = told.trim().split_once(" (").unwrap_or((told.trim(), ")"));
    assert_eq!(version, format!("ringtap {}", env!("CARGO_PKG_VERSION")));
    // None where the sources are in no repository.
    let commit = commit.strip_suffix(')').expect("a commit, in brackets");
    assert!(commit.chars().all(|digit| digit.is_ascii_hexdigit()), "{told}");
    let lab = Path::new(env!("CARGO_BIN_EXE_ringtap")).with_file_name("ringtap-lab");
    let lab = stdout(Command::new(lab).arg("--version").output().expect("ringtap-lab runs"));
    assert_eq!(lab, told.replacen("ringtap", "ringtap-lab", 1));
}
