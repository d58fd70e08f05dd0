//! Programs that a guest keeps loaded, to run them by a fork: `shim/standby.rs` says how.

/// Preloaded into the program that stands by.
pub(crate) const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/standby.so"));
/// The shell function that calls it.
pub(crate) const CALLER: &str = include_str!("standby.sh");
/// Where both are in a guest.
pub(crate) const LIBRARY_PATH: &str = "/ringtap-standby.so";
pub(crate) const CALLER_PATH: &str = "/ringtap-standby.sh";

/// A script that loads `program` and leaves it standing by; it ends once calls are heard, or with status 1 when the program
/// is none that can.
pub fn start(program: &str) -> String {
    format!(
        "cd /run && mkfifo standby-{program}.ask || exit 1\n\
         LD_PRELOAD={LIBRARY_PATH} RINGTAP_STANDBY=/run/standby-{program} {program} </dev/null >/dev/null 2>&1 &\n\
         until [ -e standby-{program}.ready ]; do kill -0 $! 2>/dev/null || exit 1; sleep 0.02; done"
    )
}

/// A shell command that runs `line`, a program and its quoted words, by the program that stands by, or where none does as
/// it is. One call of a program at a time, and not in a subshell.
pub fn call(line: &str) -> String {
    format!(". {CALLER_PATH}; standby {line}")
}
