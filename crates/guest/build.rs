//! Compiles the small shared libraries of `shim/` that [`ringtap_guest`] brings into guests and preloads there or into
//! User-Mode Linux, and embeds them, so that the one binary is all a machine needs.

use std::env;
use std::path::PathBuf;
use std::process::{Command, exit};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    ["xstate", "standby"].into_iter().for_each(compile);
}

fn compile(name: &str) {
    let source = format!("shim/{name}.rs");
    println!("cargo::rerun-if-changed={source}");
    let var = |name: &str| {
        env::var(name).unwrap_or_else(|_| {
            eprintln!("cargo did not set {name}");
            exit(1)
        })
    };
    let out = PathBuf::from(var("OUT_DIR")).join(format!("{name}.so"));
    let mut rustc = Command::new(var("RUSTC"));
    rustc
        .args(["--crate-name", name, "--crate-type", "cdylib"])
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
