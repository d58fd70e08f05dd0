//! Compiles the small shared libraries of `shim/` that [`ringtap_guest`] brings into guests and preloads there or into
//! User-Mode Linux, and the program that calls one of them, and embeds them, so that the one binary is all a machine needs.

use std::env;
use std::path::PathBuf;
use std::process::{Command, exit};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=shim");
    [("xstate", "cdylib"), ("standby", "cdylib"), ("call", "bin")].into_iter().for_each(compile);
}

fn compile((name, kind): (&str, &str)) {
    let source = format!("shim/{name}.rs");
    let var = |name: &str| {
        env::var(name).unwrap_or_else(|_| {
            eprintln!("cargo did not set {name}");
            exit(1)
        })
    };
    let out = PathBuf::from(var("OUT_DIR")).join(name);
    let mut rustc = Command::new(var("RUSTC"));
    rustc
        .args(["--crate-name", name, "--crate-type", kind])
        .args(["--edition", "2024", "--target", &var("TARGET")])
        .args(["-O", "-C", "panic=abort", "-C", "strip=symbols"])
        .arg(source)
        .arg("-o")
        .arg(&out);
    match rustc.status() {
        Ok(status) if status.success() => {}
        Ok(status) => {
            eprintln!("{rustc:?} ended with {status}");
            exit(1)
        }
        Err(error) => {
            eprintln!("cannot start {rustc:?}: {error}");
            exit(1)
        }
    }
}
