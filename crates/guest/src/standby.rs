//! Programs that a guest keeps loaded, to run them by a fork: `shim/standby.rs` says how.

/// Preloaded into the program that stands by.
pub(crate) const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/standby"));
/// The program that calls it.
pub(crate) const CALLER: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/call"));
/// Where both are in a guest.
pub(crate) const LIBRARY_PATH: &str = "/ringtap-standby.so";
pub(crate) const CALLER_PATH: &str = "/ringtap-standby";

/// A script that loads `program` and leaves it standing by; it ends once a call was answered, or with status 1 when the
/// program is none that can.
pub fn start(program: &str) -> String {
    format!(
        "socket=/run/standby-{program}\n\
         LD_PRELOAD={LIBRARY_PATH} RINGTAP_STANDBY=$socket {program} </dev/null >/dev/null 2>&1 &\n\
         until [ -S $socket ]; do kill -0 $! 2>/dev/null || exit 1; sleep 0.02; done\n\
         [ -n \"$({CALLER_PATH} {program} --version)\" ] || {{ kill $!; rm $socket; exit 1; }}"
    )
}

/// A shell command that runs `line`, a program and its quoted words, by the program that stands by, or where none does as
/// it is.
pub fn call(line: &str) -> String {
    format!("{CALLER_PATH} {line}")
}
