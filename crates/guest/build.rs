//! Compiles `shim/xstate.rs` into the small shared library that [`ringtap_guest`] preloads into
//! User-Mode Linux and embeds it, so that the one binary is all a machine needs.

use std::env;
use std::path::PathBuf;
use std::process::{Command, exit};

fn main() {
    println!("cargo::rerun-if-changed=shim/xstate.rs");
    println!("cargo::rerun-if-changed=build.rs");
    let var = |name: &str| {
        env::var(name).unwrap_or_else(|_| {
            eprintln!("cargo did not set {name}");
            exit(1)
        })
    };
    let out = PathBuf::from(var("OUT_DIR")).join("xstate.so");
    let mut rustc = Command::new(var("RUSTC"));
    rustc
        .args(["--crate-name", "xstate", "--crate-type", "cdylib"])
        .args(["--edition", "2024", "--target", &var("TARGET")])
        .args(["-O", "-C", "panic=abort", "-C", "strip=symbols"])
        .arg("shim/xstate.rs")
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
