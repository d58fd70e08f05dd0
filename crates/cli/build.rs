//! Which commit the program was built from, for `--version`.

use std::path::Path;
use std::process::Command;

fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git").args(args).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}

fn main() {
    let own = |path: &str| git(&["rev-parse", "--git-path", path]);
    // A source package has none; a commit of somebody else's, around it, says nothing of it.
    let commit = git(&["rev-parse", "--short=12", "HEAD"])
        .filter(|_| git(&["ls-files", "--error-unmatch", "Cargo.toml"]).is_some());
    // By the way that leads here from the lab, too, which has the same.
    println!("cargo::rerun-if-changed=../cli/build.rs");
    let branch = git(&["symbolic-ref", "-q", "HEAD"]);
    let told = ["HEAD".to_owned()].into_iter().chain(branch).filter_map(|path| own(&path));
    for path in told.filter(|path| Path::new(path).exists()) {
        println!("cargo::rerun-if-changed={path}");
    }
    let version = env!("CARGO_PKG_VERSION");
    let version = commit.map_or(version.to_owned(), |commit| format!("{version} ({commit})"));
    println!("cargo::rustc-env=RINGTAP_VERSION={version}");
}
